"""The page: one file, nothing from outside, hostile text kept as text; `--trace` and `/tree` of the command lines."""

import base64
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, UsageError
from engine.app import batch, chat, cli, trace_page
from engine.app.trace_page import check_target, page, write
from engine.contract.trace import Trace
from engine.demo import demo_folder
from search import Trie
from tests.engine.app.typist import Terminal
from tools import tree
from tools.tree import load

ROOT = Path(__file__).parents[3]
HOSTILE = [
    "</script><script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    *("<!--", "\u2028", "&lt;", "@@script@@", "\u202e", "\0", '"'),
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(demo_folder(), threads=1, kv_memory=32 << 20)


@pytest.fixture(scope="module")
def record(engine: Engine) -> dict[str, Any]:
    trace = Trace("a & b")
    engine.generate(["There once was"], Trie(beams=3), max_new_tokens=8, trace=trace)
    assert trace.record is not None
    return trace.record


def hostile(record: dict[str, Any]) -> dict[str, Any]:
    """The same with texts that would do something if they were taken for more than text."""
    record = json.loads(json.dumps(record))
    for i, token in enumerate(record["texts"]["target"]):
        record["texts"]["target"][token] = HOSTILE[i % len(HOSTILE)]
    record["trees"][0]["prompt"] = record["name"] = record["end"] = record["outputs"][0]["text"] = "".join(HOSTILE)
    return record


class Elements(HTMLParser):
    """A page as a browser would see it: elements, scripts, data."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, str] = {}
        self.now = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.now = dict(attrs).get("type") or tag

    def handle_endtag(self, tag):
        self.now = ""

    def handle_data(self, data):
        self.inside[self.now] = self.inside.get(self.now, "") + data


def test_the_page_stands_alone_and_texts_stay_texts(record: dict[str, Any]):
    evil = hostile(record)
    text = page([evil])
    seen = Elements(text)
    assert json.loads(seen.inside["application/json"])["requests"] == [evil]
    assert [tag for tag, _ in seen.elements].count("script") == 2
    assert not {"img", "link", "iframe", "object", "embed", "form", "base"} & {tag for tag, _ in seen.elements}
    assert not [(tag, a) for tag, a in seen.elements if {"src", "href", "style", "action"} & a.keys()]
    assert not [(tag, key) for tag, a in seen.elements for key in a if key.startswith("on")]
    assert not re.search(r"https?:|//\w|@import|url\(|innerHTML|insertAdjacent|document\.write|eval\(",
                         seen.inside["script"].replace("// ", "") + seen.inside["style"])  # fmt: skip
    policy = next(a for _, a in seen.elements if a.get("http-equiv"))
    rules = dict(rule.strip().split(" ", 1) for rule in str(policy["content"]).split(";"))
    assert rules["default-src"] == "'none'" and "unsafe" not in str(policy["content"])
    for kind, rule in (("script", "script-src"), ("style", "style-src")):
        digest = base64.b64encode(hashlib.sha256(seen.inside[kind].encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    ids = [a["id"] for _, a in seen.elements if "id" in a]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'byId\("([\w-]+)"\)', seen.inside["script"])) <= set(ids)
    assert "aria-live" in text and seen.inside["title"] == f"coppice · Trie · {''.join(HOSTILE)}"


def test_colours_can_be_told_from_their_ground():
    """WCAG's contrast, 4.5 for text, of what the style sheet pairs; in light and dark."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a: str, b: str) -> float:
        low, high = sorted((light(a), light(b)))
        return (high + 0.05) / (low + 0.05)

    style = (ROOT / "engine/app/trace_page.css").read_text(encoding="utf-8")
    for theme in re.findall(r":root \{(.*?)\}", style, re.DOTALL):
        colours = dict(re.findall(r"--([\w-]+): (#\w{6})", theme))
        pairs = [(name, name.removesuffix("-ink")) for name in colours if name.endswith("-ink")]
        assert len(pairs) == 9
        for ink, ground in [*pairs, ("ink", "page"), ("ink", "panel"), ("dim", "page"), ("dim", "panel")]:
            assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
        for mark in ("focus", "chance"):
            assert contrast(colours[mark], colours["panel"]) >= 3, mark


# --- files ---


def test_targets_are_refused_with_a_reason(tmp_path: Path, record: dict[str, Any]):
    other, ours = tmp_path / "letter.html", tmp_path / "ours.html"
    other.write_text("<p>Dear Anna</p>")
    write(ours, [record])
    check_target(ours)
    check_target(tmp_path / "new.html")
    assert not (tmp_path / "new.html").exists()
    for path, others, words in [
        (other, [], "not a trace"),
        (tmp_path, [], "folder"),
        (tmp_path / "none" / "x.html", [], "no such folder"),
        (ours / "x.html", [], "cannot write"),
        ("a\0b", [], "cannot write"),
        (ours, [None, "-", str(tmp_path / "." / "ours.html")], "own"),
    ]:
        with pytest.raises(UsageError, match=words):
            check_target(path, *others)
    assert other.read_text() == "<p>Dear Anna</p>"
    if os.getuid():  # root may write anywhere
        ours.chmod(0o400)
        with pytest.raises(UsageError, match="no permission"):
            check_target(ours)
    with pytest.raises(UsageError, match="cannot write the trace"):
        write(tmp_path / "none" / "x.html", [record])


def test_data_comes_back_and_other_files_are_refused(tmp_path: Path, record: dict[str, Any]):
    path = tmp_path / "t.json"
    write(path, [record, record], left_out=3)
    check_target(path)
    whole = load(path)
    assert whole["requests"][1] == json.loads(json.dumps(record)) and whole["left_out"] == 3
    changes = ({"steps": 0.5}, {"trees": [{}]}, {"trees": [[]]}, {"search": None}, {"name": []}, {"outputs": {}})
    wrong = [json.dumps(whole | {"requests": [record | change]}).encode() for change in changes]
    wrong += [json.dumps(whole | {"left_out": value}).encode() for value in (-1, "3", None)]
    for data in (b"", b"[]", b"{}", b'{"format": "coppice trace 1", "requests": [1]}', b"[" * 100_000, b"\xff", *wrong):
        path.write_bytes(data)
        with pytest.raises(UsageError, match="no trace of the format 'coppice trace 1'"):
            load(path)
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path / "none.json")


# --- command lines ---


@pytest.fixture
def loaded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The command lines take this engine; how often they asked for it."""
    asked: list[int] = []
    for module in (cli, batch):
        monkeypatch.setattr(module, "load_engine", lambda args, shard=None: asked.append(1) or engine)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    return asked


def test_what_cannot_be_written_is_told_before_a_model_is_loaded(loaded: list[int], tmp_path: Path, capsys):
    no = str(tmp_path / "none" / "t.html")
    assert chat.main(["-p", "Hello", "--trace", no]) == 2
    assert batch.main(["--trace", no], io.BytesIO(b"")) == 2
    assert tree.main(["-p", "Hello", "-o", no]) == 2
    both = str(tmp_path / "both")
    assert batch.main(["--trace", both, "--output", both], io.BytesIO(b"")) == 2
    assert chat.main(["-p", "Hello", "--trace", both, "--save", both]) == 2
    assert not loaded and not list(tmp_path.iterdir())
    assert capsys.readouterr().err.count("error: cannot write the trace: there is no such folder") == 3


def test_a_chat_with_a_trace(loaded: list[int], tmp_path: Path, capsys):
    path = tmp_path / "t.json"
    assert chat.main(["-p", "Hello", "--search", "trie", "--max-new-tokens", "5", "--trace", str(path)]) == 0
    [request] = load(path)["requests"]
    assert request["name"] == "Hello" and request["search"] == "Trie" and request["outputs"][0]["text"]
    assert capsys.readouterr().out.strip() == request["outputs"][0]["text"]


def test_a_batch_with_a_trace(loaded: list[int], tmp_path: Path):
    path = tmp_path / "t.html"
    lines = b'{"prompt": "One", "id": "<b>"}\n{"prompt": 7}\n{"prompt": "Two", "params": {"search": "trie"}}\n'
    for _ in range(2):  # a trace may take the place of another
        assert batch.main(["--max-new-tokens", "4", "--trace", str(path)], io.BytesIO(lines), io.BytesIO()) == 2
    data = json.loads(Elements(path.read_text(encoding="utf-8")).inside["application/json"])
    assert [(r["name"], r["search"]) for r in data["requests"]] == [("<b>", "Greedy"), (2, "Trie")]


def test_an_interrupted_batch_leaves_its_trace(long: str, tmp_path: Path):
    path = tmp_path / "t.json"
    argv = [sys.executable, "-m", "engine.batch", "--model", long, "--kv-memory", "64M"]
    argv += ["--threads", "1", "--ignore-eos", "--trace", str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*argv, "--max-new-tokens", "50000"], cwd=ROOT, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdin and process.stdout
        process.stdin.write(b'{"prompt": "One", "params": {"max_new_tokens": 1}}\n{"prompt": "Two"}\n')
        process.stdin.flush()
        process.stdout.readline()  # the second is under way
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == cli.INTERRUPTED
    ends = [request["end"] for request in load(path)["requests"]]
    assert ends[0] == "done" and ends[1:] in ([], ["interrupted"])


def test_tree_writes_the_last_reply(loaded: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    lines = ["/tree", "What is the opposite of hot?", "/tree", "Hello", "/tree two.json", "/tree none/x"]
    lines += ["Hello " * 600, "/tree"]  # refused: it does not fit the context
    streams = {"stdin": Terminal("\n".join([*lines, ""])), "stdout": Terminal(), "stderr": Terminal()}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    assert chat.main(["--max-new-tokens", "4"]) == 0
    told = streams["stderr"].getvalue()
    assert told.count("there is no search to show") == 2
    assert (tmp_path / "tree.html").as_uri() in told and "no such folder" in told
    assert "opposite" in (tmp_path / "tree.html").read_text(encoding="utf-8")
    assert [request["name"] for request in load("two.json")["requests"]] == ["Hello"]


def test_the_tool_answers_and_shows(loaded: list[int], tmp_path: Path, capsys):
    data, html = tmp_path / "t.json", tmp_path / "t.html"
    assert tree.main(["-p", "Hello", "--search", "trie", "--max-new-tokens", "6", "-o", str(data), "-q"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    assert text and json.loads(last).items() >= {"file": str(data), "requests": 1, "steps": 7}.items()
    assert tree.main([str(data), str(data), "-o", str(html)]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 2
    assert tree.main([str(data), "-o", str(data)]) == tree.main([str(data), "-p", "x"]) == 2
    assert tree.main([str(html), "-o", str(tmp_path / "u.html")]) == 2
    assert "2 requests" in html.read_text(encoding="utf-8")
    assert trace_page.page([]).count("<script") == 2


def test_a_search_that_fails_leaves_its_trace(loaded: list[int], engine: Engine, tmp_path: Path, monkeypatch, capsys):
    def fails(*arguments: Any) -> Any:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(engine.runner, "answer", fails)
    path = tmp_path / "t.json"
    assert tree.main(["-p", "Hello", "-o", str(path)]) == 1
    assert load(path)["requests"][0]["steps"]
    assert "on purpose" in capsys.readouterr().err
    assert engine.pool.used_pages == 0

"""The page in a browser: headless Chromium (Debian: chromium, chromium-driver), asked by plain WebDriver requests."""

import json
import re
import shutil
import subprocess
import time
import urllib.request
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from engine import Engine
from engine.app.trace_page import write
from engine.contract.trace import Trace
from engine.demo import demo_folder
from search.base import make_search
from tests.served import background

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # what the standard calls a reference to one
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--window-size=1300,800"]
KEYS = {"Left": "\ue012", "Up": "\ue013", "Right": "\ue014", "Down": "\ue015", "End": "\ue010", "Home": "\ue011"}
SEARCHES = {
    "trie": {"beams": 6},
    "ults": {"ults_prior": "dirichlet"},
    "sbon": {"sbon_n": 8, "sbon_tau": 5, "temperature": 1.5},
    "aded": {"aded_nodes": 12},
    "dsbd": {},
}
HOSTILE = ["</script><script>hacked=1</script>", "<img src=x onerror=hacked=1>", "<!--", "\u202e", "\0"]


class Browser:
    """A session of Chromium."""

    def __init__(self, chromium: str, driver: str, profile: Path):
        self.process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = next((m for line in self.process.stdout if (m := re.search(r"successfully on port (\d+)", line))), None)
        assert found, "chromedriver does not start"
        self.base = f"http://127.0.0.1:{found[1]}"
        options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = self.ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.base += f"/session/{answer['sessionId']}"

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.loads(reply.read())["value"]

    def open(self, path: Path, at: str = "") -> None:
        self.ask("POST", "/url", {"url": "about:blank"})
        self.ask("POST", "/url", {"url": path.as_uri() + (at and f"#{at}")})
        assert self.run("return document.documentElement.dataset.ready") == "true", self.faults()

    def run(self, script: str, *args: Any) -> Any:
        """JavaScript, in the page."""
        return self.ask("POST", "/execute/sync", {"script": script, "args": list(args)})

    def wait_for_frame(self) -> None:
        """Until the page has drawn what follows from scrolling, which it does in the next frame."""
        script = "const [done] = arguments; requestAnimationFrame(() => requestAnimationFrame(() => done(true)));"
        assert self.ask("POST", "/execute/async", {"script": script, "args": []})

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def type(self, selector: str, keys: str) -> None:
        found = self.ask("POST", "/element", {"using": "css selector", "value": selector})
        self.ask("POST", f"/element/{found[ELEMENT]}/value", {"text": keys})

    def emulate(self, **features: str) -> None:
        told = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        body = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": told}}
        self.ask("POST", "/goog/cdp/execute", body)

    def faults(self) -> list[str]:
        """The complaints of the console since the last call."""
        logs = self.ask("POST", "/se/log", {"type": "browser"})
        ours = "willReadFrequently"  # advice about COLOURS
        return [x["message"] for x in logs if x["level"] in ("SEVERE", "WARNING") and ours not in x["message"]]

    def picture(self) -> bytes:
        return b64decode(self.ask("GET", "/screenshot"))

    def close(self) -> None:
        self.ask("DELETE", "")
        self.process.terminate()
        self.process.wait(120)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    browser = Browser(chromium, driver, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def records() -> dict[str, dict[str, Any]]:
    folders: dict[str, Any] = {role: demo_folder(role) for role in ("draft", "reward")}
    engine = Engine.load(demo_folder(), dtype="float32", threads=1, kv_memory=32 << 20, **folders)
    assert engine.template is not None
    told = [{"role": "user", "content": "Tell me a story about a fox."}]
    ids, records = engine.tokenizer.encode_rendered(engine.template.render(told)), {}
    for name, params in SEARCHES.items():
        trace = Trace(name)
        engine.generate([ids], make_search(name, params), max_new_tokens=20, trace=trace)
        assert trace.record is not None
        records[name] = trace.record
    return records


UNNAMED = """
const named = e => e.ariaLabel || e.textContent.trim() || e.labels?.length;
return [...document.querySelectorAll("button, input, select, canvas[role=img]")].filter(e => !named(e)).length;
"""
# The colours on a canvas, but for the background's: how many there are, and what part of the canvas they cover.
COLOURS = """
const c = document.querySelector(arguments[0]), d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
const seen = new Set();
let drawn = 0;
for (let i = 0; i < d.length; i += 4) if (d[i + 3]) { drawn++; seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); }
return [seen.size, 4 * drawn / d.length];
"""
# From now on, counts what is drawn on any canvas.
COUNTED = """
window.drawn = 0;
const canvas = CanvasRenderingContext2D.prototype;
for (const name of ["stroke", "fill", "fillText", "strokeRect", "fillRect"]) {
  const real = canvas[name];
  canvas[name] = function (...values) { window.drawn++; return real.apply(this, values); };
}
"""


@pytest.mark.parametrize("name", SEARCHES)
def test_every_step_of_a_search_is_drawn(browser: Browser, records: dict[str, Any], tmp_path: Path, name: str):
    path, record = tmp_path / "t.html", records[name]
    write(path, [record])
    browser.emulate(prefers_color_scheme="light", prefers_reduced_motion="reduce")
    browser.open(path)
    last = len(record["steps"]) - 1
    assert browser.text("#where") == f"step {last} of {last}"
    assert browser.text("h1").startswith(f"{record['search']} · {name} · target")
    assert record["outputs"][0]["text"].split("\n")[0] in browser.text("#outputs")
    for view in ("whole", "live"):
        browser.run("const v = document.getElementById('view'); v.value = arguments[0]; v.onchange({target: v})", view)
        for step in range(0, last + 1, 3):
            browser.run("go(arguments[0])", step)
            browser.wait_for_frame()
            colours, part = browser.run(COLOURS, ".tree canvas")
            assert colours > 20 and part > 0.002, (view, step)
    states = browser.run(
        "return trees.map(t => request.steps.map((_, s) => t.token.slice(0, t.real).map((_, n) => t.state(n, s))))"
    )
    for tree, by_step in zip(record["trees"], states, strict=True):  # the page's reading of the record
        for step, seen in enumerate(by_step):
            for n, state in enumerate(seen):
                there, gone = tree["born"][n] <= step, tree["dropped"][n] is not None and tree["dropped"][n] < step
                assert (state not in (None, "end")) is there
                if there and tree["accepted"][n] != step:
                    assert (state == "gone") is gone
    said = browser.run(
        "return trees.map(t => request.steps.map((_, s) => t.token.slice(0, t.real).map((_, n) => "
        "t.state(n, s) && t.words(n, s).includes('settled') ? t.depth[n] : 0)))"
    )
    certain = [*accumulate(step["settled"] for step in record["steps"])]
    assert all(max(depths) <= certain[step] for step, depths in enumerate(said[0]))
    assert not any(max(depths) for tree in said[1:] for depths in tree), "of a draft's tree nothing is settled"
    models = [tree["model"] for tree in record["trees"]]
    assert [re.sub(r" \d", "", t.split(" ·")[0][2:]) for t in browser.run(
        "return [...document.querySelectorAll('.tree > button')].map(b => b.textContent)")] == models  # fmt: skip
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    assert not browser.faults()


def test_keys_walk_the_tree_and_the_steps(browser: Browser, records: dict[str, Any], tmp_path: Path):
    path = tmp_path / "t.html"
    write(path, [records["trie"]])
    browser.open(path, "step=6")
    tree = records["trie"]["trees"][0]
    box = ".tree .scroll"

    def chosen() -> int:
        named = browser.run("return document.querySelector('.scroll').getAttribute('aria-activedescendant')")
        role = browser.run("return document.getElementById(arguments[0]).getAttribute('role')", named)
        assert role == "treeitem"
        return int(named.removeprefix("t0n"))

    browser.type(box, KEYS["Home"])
    assert chosen() == 0 and "prompt" in browser.text("#say")
    browser.type(box, KEYS["Right"])
    child = chosen()
    assert tree["parent"][child] == 0 and "depth 1" in browser.text("#say") and "probability" in browser.text("#say")
    assert f"id {tree['token'][child]}" in browser.text("#node")
    browser.type(box, KEYS["Down"])
    sibling = chosen()
    assert sibling != child and tree["parent"][sibling] == 0
    browser.type(box, KEYS["Up"] + KEYS["End"])
    end = chosen()
    assert not [n for n, parent in enumerate(tree["parent"]) if parent == end and tree["born"][n] <= 6]
    browser.type(box, KEYS["Left"])
    assert chosen() == tree["parent"][end]
    assert f"node={tree['parent'][end]}" in browser.run("return location.hash")
    browser.type(box, "]]")
    assert browser.text("#where").startswith("step 8 ") and browser.text("#say").startswith("Step 8 of")
    browser.type(box, "[")
    assert browser.text("#where").startswith("step 7 ")
    browser.type(box, "{")
    assert browser.text("#where").startswith(f"step {tree['born'][chosen()]} ")
    browser.type("#step", KEYS["Right"])
    assert browser.text("#where").startswith(f"step {tree['born'][chosen()] + 1} ")
    items = browser.run("return [...document.querySelectorAll('[role=treeitem]')].map(e => e.ariaLabel)")
    assert len(items) >= 3 and all("siblings" in label for label in items)
    browser.type(box, KEYS["Home"])
    assert browser.run("return getComputedStyle(document.activeElement).outlineWidth") == "3px"
    assert browser.run(UNNAMED) == 0
    assert not browser.faults()


def test_playing_and_choosing(browser: Browser, records: dict[str, Any], tmp_path: Path):
    path = tmp_path / "t.html"
    write(path, list(records.values()), left_out=2)
    browser.open(path)
    assert "2 earlier requests left out" in browser.text("#notice")
    names = browser.run("return [...document.getElementById('request').options].map(o => o.textContent)")
    assert names == [f"{i}: {name}" for i, name in enumerate(SEARCHES, 1)]
    browser.run("const r = document.getElementById('request'); r.value = 4; r.onchange({target: r})")
    assert browser.text("h1").startswith("DSBD") and "draft rejected" in browser.text("#legend")
    where = browser.run("play(true); return document.querySelector('#where').textContent")
    assert where.startswith("step 0 ")
    browser.ask("POST", "/timeouts", {"script": 60000})
    told = "setInterval(() => { if (shown.step >= 2) { play(false); arguments[0](shown.step) } }, 50)"
    assert browser.ask("POST", "/execute/async", {"script": told, "args": []}) >= 2
    browser.run("document.querySelector('.pick').click()")
    assert browser.run("return document.querySelector('#node th').textContent") == "token"


def test_dark_and_light_narrow_and_wide(browser: Browser, records: dict[str, Any], tmp_path: Path):
    path = tmp_path / "t.html"
    write(path, [records["dsbd"]])
    seen = set()
    for scheme in ("light", "dark"):
        browser.emulate(prefers_color_scheme=scheme)
        for width in (360, 1300):
            browser.ask("POST", "/window/rect", {"width": width, "height": 800})
            browser.open(path, "step=8")
            seen.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
            assert browser.run("return document.documentElement.scrollWidth - innerWidth") <= 0, width
            browser.wait_for_frame()
            assert browser.run(COLOURS, ".tree canvas")[0] > 20
            picture = browser.picture()
            assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    assert len(seen) == 2
    browser.emulate(prefers_color_scheme="light")


def test_hostile_texts_do_nothing(browser: Browser, records: dict[str, Any], tmp_path: Path):
    path, record = tmp_path / "t.html", json.loads(json.dumps(records["trie"]))
    words = record["texts"]["target"]
    record["texts"]["target"] = {token: HOSTILE[i % len(HOSTILE)] for i, token in enumerate(words)}
    record["name"] = record["end"] = record["trees"][0]["prompt"] = record["outputs"][0]["text"] = "".join(HOSTILE)
    record["steps"][3]["info"] = {HOSTILE[0]: HOSTILE[1]}
    record["models"]["target"] = HOSTILE[0]
    write(path, [record, record])
    browser.open(path, "step=3&node=4&tree=0")
    for step in range(len(record["steps"])):
        browser.run("go(arguments[0])", step)
    seen = browser.run("return [typeof hacked, document.scripts.length, document.images.length]")
    assert seen == ["undefined", 2, 0]
    assert "\u202e" not in browser.run("return [1, 2, 3, 4, 5, 6].map(n => trees[0].text(n)).join('')")
    inject = "const s = document.createElement('script'); s.textContent = 'hacked = 1'; document.body.append(s);"
    assert browser.run(inject + "return typeof hacked") == "undefined"  # the page's policy lets no other script run
    assert [fault for fault in browser.faults() if "Content Security Policy" in fault]


def test_thousands_of_nodes(browser: Browser, records: dict[str, Any], tmp_path: Path):
    """15,000 nodes: a scroll draws what can be seen; a step and a key draw each slot of the cache besides, once."""
    path, record = tmp_path / "t.html", json.loads(json.dumps(records["trie"]))
    steps, width = 1000, 15
    count = steps * width + 1
    tree = record["trees"][0]
    tree["token"] = [tree["token"][1 + n % 20] for n in range(count)]
    tree["parent"] = [-1, *([0] * width), *(n - width for n in range(width + 1, count))]
    tree["born"] = tree["evaluated"] = [0, *((n - 1) // width + 1 for n in range(1, count))]
    tree["logp"] = [None, *(-0.5 for _ in range(1, count))]
    for column in ("dropped", "settled", "accepted"):
        tree[column] = [None] * count
    tree["slots"] = [[tree["born"][n], 100 + n, n] for n in range(1, count)]
    record["steps"] = [{"seconds": s / 1000, "settled": 0, "info": {}, "beams": []} for s in range(steps + 1)]
    record["outputs"] = []
    write(path, [record])
    browser.emulate(prefers_reduced_motion="reduce")  # no gliding
    browser.open(path)
    assert browser.text("#where") == f"step {steps} of {steps}"
    browser.run(COUNTED)
    scroll = "panels[0].scroll.scrollTo(9000 * i, 0); panels[0].draw()"
    for act, most in (("go(100 + i)", 1.5 * count), (scroll, 1000), ("choose(0, 500 + i)", 1.5 * count)):
        drawn = browser.run(f"window.drawn = 0; for (let i = 0; i < 5; i++) {{ {act} }} return window.drawn / 5")
        assert 0 < drawn < most, act
    browser.run("fit()")
    browser.wait_for_frame()
    assert browser.run(COLOURS, ".tree canvas")[1] > 0.01


@contextmanager
def served(browser: Browser, *flags: str, keys: Sequence[str] = ()) -> Iterator[None]:
    """The page of a server."""
    pytest.importorskip("starlette", reason="needs the extra serve")
    pytest.importorskip("uvicorn", reason="needs the extra serve")
    from engine.serve import command

    args = command.make_parser().parse_args(["--dtype", "float32", "--kv-memory", "8M", "--threads", "1", "-q", *flags])
    with command.application(args, keys) as app, background(app) as url:
        browser.ask("POST", "/url", {"url": url})
        yield
        browser.ask("POST", "/url", {"url": "about:blank"})


def has_tree(browser: Browser) -> bool:
    """Whether there is a tree beside an answer that is complete: until then the next text would end it."""
    return browser.run("return running ? 0 : document.querySelector('#tree').srcdoc.length") > 1000


def test_the_servers_page_chats_with_the_tree_beside_it(browser: Browser):
    """With a key, and under a policy that allows the scripts of both pages alone."""
    with served(browser, keys=["a-key-of-some-length"]):
        browser.type("#key", "a-key-of-some-length\ue007")
        wait_until(lambda: browser.text("#model") == "demo")
        browser.type("#text", "What is the opposite of hot?\ue007")
        wait_until(lambda: has_tree(browser))
        assert browser.text("#turns") == "What is the opposite of hot?Cold is the opposite of hot."
        frame = browser.ask("POST", "/element", {"using": "css selector", "value": "#tree"})
        browser.ask("POST", "/frame", {"id": frame})
        wait_until(lambda: browser.run("return document.documentElement.dataset.ready") == "true")
        assert "Trie" in browser.text("#title")
        browser.ask("POST", "/frame", {"id": None})
        assert browser.run(UNNAMED) == 0
        root = "document.documentElement"
        assert browser.run(f"return [{root}.scrollWidth - innerWidth, {root}.scrollHeight - innerHeight]") == [0, 0]
        assert not [fault for fault in browser.faults() if "401" not in fault]


def test_no_tree_stays_beside_an_error_of_the_servers_page(browser: Browser):
    with served(browser):
        wait_until(lambda: browser.text("#model") == "demo")
        browser.type("#text", "What is the opposite of hot?\ue007")
        wait_until(lambda: has_tree(browser))
        browser.run("document.querySelector('#tokens').value = 5000")
        browser.type("#text", "And of warm?\ue007")
        wait_until(lambda: browser.run("return document.querySelector('.error') !== null"))
        assert "max_tokens: expected at most 4096" in browser.text(".error") and not has_tree(browser)
        browser.run("document.querySelector('#tokens').value = 20")
        browser.type("#text", "And of warm?\ue007")
        wait_until(lambda: has_tree(browser))
        assert browser.run("return messages.map(m => m.role)") == ["user", "assistant"] * 2, "the failed turn is gone"
        browser.faults()  # 400 is reported to the console


def test_the_servers_page_sends_what_was_chosen(browser: Browser):
    with served(browser):
        wait_until(lambda: browser.text("#model") == "demo")
        choose = (
            "const s = document.querySelector('#search'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))"
        )
        browser.type("#system", "Be brief.")
        browser.run(choose, "sample")
        browser.type("#temperature", "0.5")
        browser.type("#seed", "7")
        sent = {}
        for search in browser.run("return [...document.querySelector('#search').options].map(o => o.value)"):
            browser.run(choose, search)
            sent[search] = browser.run("return body('x')")
            browser.type("#text", "What is the opposite of hot?\ue007")
            wait_until(lambda: has_tree(browser))
            assert browser.run("return document.querySelector('.error')") is None, browser.text("#turns")
            browser.run("document.querySelector('#fresh').click()")
        assert all(body["messages"][0] == {"role": "system", "content": "Be brief."} for body in sent.values())
        assert {name: body.get("temperature") for name, body in sent.items() if "temperature" in body} == {
            "sample": 0.5, "beam-sample": 0.5
        }  # fmt: skip
        assert all(body["seed"] == 7 for body in sent.values())
        assert [name for name, body in sent.items() if "beams" in body] == ["trie", "beam-sample"]
        assert not browser.faults()


def test_the_servers_page_completes_for_a_model_without_a_template(browser: Browser):
    with served(browser, "--chat-template", "none"):
        wait_until(lambda: browser.text("#model") == "demo")
        browser.type("#text", "Once upon a time\ue007")
        wait_until(lambda: has_tree(browser))
        assert browser.text("#turns").startswith("Once upon a time") and len(browser.text(".assistant")) > 5
        assert browser.run("return document.querySelector('.error')") is None
        assert browser.run("return document.querySelector('#system').disabled")
        assert not browser.faults()


def wait_until(reached, seconds: float = 60.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)

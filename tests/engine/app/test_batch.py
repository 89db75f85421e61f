"""The batch command line: its records, its errors, its files."""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.app import batch
from engine.app.batch_flags import WITHOUT_EFFECT, deciding, make_parser
from engine.app.records import read_lines
from engine.engine import Engine
from engine.errors import CheckpointError
from kernels import files
from search.base import REGISTRY, path_field
from search.greedy import Greedy
from tools.random_checkpoint import make

ROOT = Path(__file__).parents[3]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make(folder, layers=2, width=32, mlp=48, heads=4, kv_heads=2, vocab=300, max_positions=64, scale=1.5)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(folder, threads=1, kv_memory=1 << 20)


class Run:
    """Calls the command line in this process, with an engine that is loaded once."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def __call__(self, lines: Any, *flags: str | Path) -> tuple[int, list[dict[str, Any]]]:
        if not isinstance(lines, bytes):
            lines = "".join(json.dumps(line) + "\n" for line in lines).encode()
        out = io.BytesIO()
        code = batch.main(["--max-new-tokens", "6", *map(str, flags)], io.BytesIO(lines), out)
        assert self.engine.pool.used_pages == 0
        assert out.getvalue()[-1:] in (b"", b"\n")
        return code, [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.fixture
def run(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(batch, "load_engine", lambda args, shard=None: engine)
    return Run(engine)


def tokens(record: dict[str, Any]) -> list[int]:
    return record["outputs"][0]["token_ids"]


def said(record: dict[str, Any]) -> list[Any]:
    """The outputs without their log-probabilities, whose last bits depend on what else is in the pass."""
    return [(output["text"], output["token_ids"], output["finish_reason"]) for output in record["outputs"]]


def test_answers(run: Run, engine: Engine):
    lines = [{"prompt": "ab"}, {"id": "é\ud800", "prompt_ids": [5, 6]}, {"id": 7, "prompt": ""}]
    code, records = run(lines, "--search", "trie", "--beams", "3", "--num-return-sequences", "2", "--ignore-eos")
    assert code == 0
    assert [r["id"] for r in records] == [0, "é\ud800", 7]
    for record in records:
        assert list(record) == ["id", "outputs", "stats"] and len(record["outputs"]) == 2
        for output in record["outputs"]:
            assert list(output) == ["text", "token_ids", "logprob", "score", "finish_reason"]
            assert (
                output["text"] == engine.tokenizer.decode(output["token_ids"]) and output["finish_reason"] == "length"
            )
            assert output["score"] == pytest.approx(output["logprob"] / 6)
        promised = """prompt_tokens new_tokens forward_passes nodes_evaluated prefill_seconds decode_seconds
            kv_bytes_peak kv_bytes_per_token live_nodes_peak unshared_nodes_peak"""
        assert set(promised.split()) <= set(record["stats"])
    assert records[1]["stats"]["prompt_tokens"] == 2 and records[1]["stats"]["new_tokens"] == 6


def test_a_batch_is_its_lines_alone(run: Run):
    lines = [{"prompt": "x" * (i % 7), "params": {"max_new_tokens": 1 + i % 9}} for i in range(40)]
    lines[3]["params"] |= {"search": "sample", "seed": 5, "num_return_sequences": 3}
    code, together = run(lines, "--search", "trie", "--beams", "4")
    assert code == 0 and [r["id"] for r in together] == list(range(40))
    for i in (0, 3, 8, 17, 39):
        _, [alone] = run([lines[i]], "--search", "trie", "--beams", "4")
        for a, b in zip(alone["outputs"], together[i]["outputs"], strict=True):
            assert a["token_ids"] == b["token_ids"] and a["logprob"] == pytest.approx(b["logprob"], abs=1e-5)


def test_params_override_the_command_line(run: Run):
    _, [trie] = run([{"prompt": "ab"}], "--search", "trie", "--beams", "2")
    _, [greedy] = run([{"prompt": "ab"}])
    lines = [
        {"prompt": "ab"},
        {"prompt": "ab", "params": {"search": "greedy"}},  # does not inherit --beams
        {"prompt": "ab", "params": {"search": "trie", "beams": 1}},
        {"prompt": "ab", "params": {"search": "sample", "top_k": 1, "max_new_tokens": 2, "ignore_eos": True}},
        {"prompt": "ab", "params": {"search": "greedy", "beams": 2}},
        {"prompt": "ab", "params": {"search": "greedy", "eos_token_ids": tokens(greedy)[:1]}},
        {"prompt": "ab", "params": {"search": "greedy", "stop": "g"}},
    ]
    code, records = run(lines, "--search", "trie", "--beams", "2")
    assert code == 2
    assert said(records[0]) == said(trie)
    assert said(records[1]) == said(greedy)
    assert tokens(records[2]) == tokens(greedy)
    assert tokens(records[3]) == tokens(greedy)[:2]
    assert records[4]["error"] == {
        "code": "usage",
        "message": "line 5: beams: the search 'greedy' has no such parameter; searches that have it: "
        "beam-sample, diverse, trie",
    }
    assert tokens(records[5]) == tokens(greedy)[:1] and records[5]["outputs"][0]["finish_reason"] == "eos"
    text = greedy["outputs"][0]["text"]
    assert said(records[6])[0] == (text[: text.index("g")], tokens(records[6]), "stop")
    assert tokens(records[6]) == tokens(greedy)[: len(tokens(records[6]))]


def test_what_a_line_means_without_a_search(run: Run):
    _, [trie] = run([{"prompt": "ab"}], "--search", "trie", "--beams", "3")
    _, [greedy] = run([{"prompt": "ab"}])
    params = [
        {"beams": 3},
        {"beams": 3, "temperature": 0},
        {"search": "beam", "beams": 3},
        {"temperature": 0},
        {"temperature": 0, "seed": 1, "top_p": 0.9},
        {"search": "sample", "temperature": 0, "seed": 1},
        {"beams": 3, "temperature": 0.7},
        {"temperature": 1},
        {"search": None, "beams": 3},
    ]
    for flags in ([], ["--temperature", "0"], ["--search", "sample", "--temperature", "0"]):
        _, records = run([{"prompt": "ab", "params": each} for each in params], *flags)
        assert [said(record) for record in records[:3]] == [said(trie)] * 3
        assert [said(record) for record in records[3:6]] == [said(greedy)] * 3
        message = records[6]["error"]["message"]
        assert "temperature: the search 'trie' has no such parameter; searches that have all of the par" in message
        assert ("error" in records[7]) == ("sample" not in flags)
        assert "search: expected one of" in records[8]["error"]["message"]


BAD = [
    (b"{", "malformed JSON"),
    (b"[1]", "expected a JSON object, got [1]"),
    (b"null", "expected a JSON object, got null"),
    (b'{"prompt": "\xff"}', "not valid UTF-8: byte 0xFF at 12"),
    (b'{"prompt": "a", "params": {"length_penalty": NaN}}', "NaN"),
    (b'{"prompt": "a", "params": {"length_penalty": 1e999}}', "out of range"),
    (b'{"prompt": "a", "params": {"seed": 99999999999999999999}}', "out of range"),
    (b'{"prompt": "a", "params": {"seed": ' + b"1" * 5000 + b"}}", "out of range"),
    (b'{"a":' * 100_000, "malformed JSON: nested too deep"),
    (b'{"prompt": "a", "prompt": "b"}', "the key 'prompt' occurs twice"),
    ({}, "expected one of prompt, messages and prompt_ids, got none"),
    ({"prompt": "a", "prompt_ids": [1]}, "got prompt and prompt_ids"),
    ({"promt": "a"}, "promt: no such key; did you mean prompt?"),
    ({"prompt": "a", "zzz\ud800": 1}, "no such key; known: id, "),
    (
        {"prompt": "a", "search": "trie"},
        'search: no such key of a line; it is a key of params: "params": {"search": ...}',
    ),
    ({"prompt": "a", "regex": "a"}, "regex: no such key of a line; it is a key of params"),
    ({"prompt": 3}, "prompt: expected a string, got 3"),
    ({"prompt": [5, 6]}, "prompt: expected a string, got [5, 6]; token ids go into prompt_ids"),
    ({"prompt": "\ud800"}, "lone surrogate"),
    ({"prompt": "a" * 300}, "this model's maximum context length is 64"),
    ({"prompt_ids": []}, "the prompt is empty"),
    ({"prompt_ids": [1, 300]}, "expected token ids from 0 to 299, got 300; token 1"),
    ({"prompt_ids": [True]}, "prompt: expected token ids from 0 to 299, got True; token 0"),
    ({"prompt_ids": "abc"}, "prompt_ids: expected a list of integers"),
    ({"messages": []}, "at least one message"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: expected a string, got none"),
    ({"messages": [{"role": 1, "content": ""}]}, "messages[0].role: expected a string, got 1"),
    ({"messages": ["hi"]}, 'messages[0]: expected an object, got "hi"'),
    ({"id": None, "prompt": "a"}, "id: expected a string or an integer, got null"),
    ({"id": True, "prompt": "a"}, "id: expected a string or an integer, got true"),
    ({"prompt": "a", "params": []}, "params: expected an object"),
    ({"prompt": "a", "params": {"num_beams": 3}}, "params.num_beams: no such key; did you mean beams?"),
    ({"prompt": "a", "params": {"xyz": 3}}, "params.xyz: no such key; --help all lists them, as flags"),
    ({"prompt": "a", "params": {"catalogue": "x"}}, "params.catalogue: no such key; only the command line has it"),
    ({"prompt": "a", "params": {"draft_store": "x"}}, "params.draft_store: no such key; only the command line has it"),
    ({"prompt": "a", "params": {"tools": []}}, "params.tools: no such key; it is a key of the line, beside params"),
    ({"prompt": "a", "params": {"search": "tri"}}, "search: expected one of"),
    ({"prompt": "a", "params": {"search": ["trie"]}}, "search: expected one of"),
    ({"prompt": "a", "params": {"search": "trie", "beams": 0}}, "beams: expected an integer >= 1, got 0"),
    ({"prompt": "a", "params": {"search": "trie", "beams": "4"}}, "beams: expected an integer"),
    ({"prompt": "a", "params": {"search": "trie", "beams": 10**9}}, "beams: at most 299 fit this model"),
    ({"prompt": "a", "params": {"search": "trie", "early_stopping": []}}, "early_stopping: expected"),
    ({"prompt": "a", "params": {"search": "sample", "top_p": "x"}}, "top_p: expected a number"),
    ({"prompt": "a", "params": {"max_new_tokens": 0}}, "max_new_tokens: expected an integer >= 1"),
    ({"prompt": "a", "params": {"max_new_tokens": True}}, "max_new_tokens: expected an integer >= 1"),
    ({"prompt": "a", "params": {"ignore_eos": 1}}, "ignore_eos: expected true or false"),
    ({"prompt": "a", "params": {"stop": [""]}}, "stop: expected a list of non-empty strings"),
    ({"prompt": "a", "params": {"stop": 3}}, "stop: expected a list of non-empty strings"),
    ({"prompt": "a", "params": {"eos_token_ids": 2}}, "eos_token_ids: expected a list of token ids"),
    ({"prompt": "a", "params": {"eos_token_ids": None}}, "eos_token_ids: expected a list of token ids, got null"),
    ({"prompt": "a", "params": {"eos_token_ids": [[2]]}}, "eos_token_ids: expected a list of token ids, got [2] in it"),
    ({"prompt": "a", "params": {"eos_token_ids": "2"}}, "eos_token_ids: expected a list of token ids, got '2'"),
    ({"prompt": "a", "params": {"eos_token_ids": [-1]}}, "eos_token_ids: expected a list of token ids, got -1 in it"),
    ({"prompt": "a", "params": {"choices": {"a": 1}}}, "choices: expected a list of texts"),
    ({"prompt": "a", "params": {"bad_words": None}}, "bad_words: expected a list of texts"),
    ({"prompt": "a", "params": {"logit_bias": {"300": 1}}}, "logit_bias: expected token ids from 0 to 299, got 300"),
    ({"prompt": "a", "params": {"sequence_bias": [[1, 2, 3]]}}, "sequence_bias: expected a list of"),
    ({"prompt": "a", "params": {"constraint_scores": []}}, "constraint_scores: expected model or renormalised"),
    ({"prompt": "a", "params": {"repetition_penalty": None}}, "repetition_penalty: expected a number"),
    ({"prompt": "a", "params": {"constraint": "x"}}, "params.constraint: no such key; only engine.Request has it"),
    ({"prompt": "a", "params": {"logits_processor": 1}}, "params.logits_processor: no such key; only engine.Request"),
    ({"prompt": "a", "params": {"help": 1}}, "params.help: no such key; did you mean heal?"),
]


def test_constraints_of_flags_and_of_lines(run: Run):
    lines = [
        {"prompt": "a", "params": {"choices": ["ab", "cd"]}},
        {"prompt": "a", "params": {"search": "trie", "choices": "xy", "constraint_scores": "renormalised"}},
        {"prompt": "a", "params": {"suppress_tokens": [*range(300)]}},
        {"prompt": "a"},
    ]
    code, answers = run(
        lines, "--bad-word", "q", "--logit-bias", "7=100", "--min-new-tokens", "2", "--max-new-tokens", "4"
    )
    assert code == 0
    first, second, third, fourth = [answer["outputs"][0] for answer in answers]
    assert first["text"] in ("ab", "cd") and second["text"] == "xy" and second["score"] <= 0
    assert (third["token_ids"], third["finish_reason"]) == ([], "constraint")
    assert fourth["token_ids"] == [7, 7, 7, 7]


@pytest.mark.skipif(find_spec("llguidance") is None, reason="llguidance is not installed (extra grammar)")
def test_grammars_of_flags_and_of_lines(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    schema, wrong = tmp_path / "schema.json", tmp_path / "wrong.json"
    schema.write_text('{"enum": ["ab", 17]}')
    wrong.write_text('{"enum": ')
    lines = [
        {"prompt": "a"},
        {"prompt": "a", "params": {"regex": "[xy]z"}},
        {"prompt": "a", "params": {"grammar": 'start: "p" | "q"', "search": "trie"}},
        {"prompt": "a", "params": {"json_schema": {"type": "boolean"}}},
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": [1]}}}},
        {"prompt": "a", "response_format": {"type": "text"}},
        {"prompt": "a", "response_format": {"type": "text"}, "params": {"regex": "a"}},
        {"prompt": "a", "response_format": "json"},
        {"prompt": "a", "params": {"regex": "("}},
        {"prompt": "a", "params": {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3000))}},
        {"prompt": "a", "params": {"grammar": "root ::= bar"}},
        {"prompt": "a"},
    ]
    code, answers = run(lines, "--json-schema", str(schema), "--max-new-tokens", "20")
    texts = [answer["outputs"][0]["text"] if "outputs" in answer else answer["error"]["message"] for answer in answers]
    assert code == 2 and texts[0] in ('"ab"', "17") and texts[1] in ("xz", "yz") and texts[2] in ("p", "q")
    assert texts[3] in ("true", "false") and json.loads(texts[4]) == [1]
    assert answers[5]["outputs"][0]["finish_reason"] in ("length", "eos") and "at most one" in texts[6]
    assert "response_format: expected type" in texts[7] and "unclosed group" in texts[8]
    assert "nested too deep" in texts[9] and "Rule 'bar' not found" in texts[10] and texts[11] == texts[0]
    for path, words in ((wrong, "is not valid JSON"), (tmp_path / "none", "cannot read")):
        with pytest.raises(SystemExit):
            run([], "--json-schema", str(path))
        assert words in capsys.readouterr().err


def test_log_probabilities_of_tokens(run: Run):
    lines = [{"prompt": "ab"}, {"prompt": "ab", "params": {"logprobs": 0, "search": "greedy"}}]
    code, records = run([*lines, {"prompt": "ab", "params": {"logprobs": -1}}], "--logprobs", "2", "--search", "trie")
    assert code == 2 and "logprobs: expected an integer from 0" in records[2]["error"]["message"]
    for record, k in zip(records[:2], (2, 0), strict=True):
        [output] = record["outputs"]
        assert sum(output["token_logprobs"]) == pytest.approx(output["logprob"], abs=1e-4)
        assert [len(top) for top in output["top_logprobs"]] == [k] * len(output["token_ids"])
        pairs = zip(output["top_logprobs"], output["token_logprobs"], strict=True)
        assert all(top[0][1] >= own for top, own in pairs if top)


def test_lines_that_begin_alike_are_read_once(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"prompt": "x" * 60 + str(i)}) + "\n" for i in range(6)))
    reused = {}
    for cache in ("on", "off"):
        argv = ["--model", str(folder), "--input", str(lines), "--parallel", "1", "--max-new-tokens", "3", "-v"]
        assert batch.main([*argv, "--prefix-cache", cache]) == 0
        out, err = capsys.readouterr()
        records = [json.loads(line) for line in out.splitlines()]
        reused[cache] = [record["stats"]["reused_tokens"] for record in records], [tokens(r) for r in records]
        assert ("prompt tokens were cached" in err) == (cache == "on")
    assert reused["off"][0] == [0] * 6 and reused["on"][0][0] == 0 and min(reused["on"][0][1:]) >= 60
    assert reused["on"][1] == reused["off"][1]


def test_bad_lines_do_not_disturb_the_others(run: Run, capsys: pytest.CaptureFixture[str]):
    lines = []
    for line, _ in BAD:  # each between two good ones and a blank
        lines += [line if isinstance(line, bytes) else json.dumps(line).encode(), b'{"prompt": "a"}', b"  \r"]
    code, records = run(b"\n".join(lines))
    assert code == 2
    assert [r["id"] for r in records] == list(range(2 * len(BAD)))
    for i, (line, message) in enumerate(BAD):
        error = records[2 * i].get("error", {"message": str(records[2 * i])})
        assert message in error["message"], (line, error)
        assert error["message"].startswith(f"line {3 * i + 1}: ") and "\n" not in error["message"]
        assert error["code"] == ("context_length_exceeded" if "maximum context length is" in message else "usage")
        assert said(records[2 * i + 1]) == said(records[1])
    assert capsys.readouterr().err == f"{len(BAD)} of {2 * len(BAD)} answers are errors\n"


def test_a_line_that_is_too_long(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.app.records.MAX_LINE", 50)
    _, records = run(b'{"prompt": "' + b"a" * 5000 + b'"}\n{"prompt": "a"}\n' + b"b" * 51)
    assert [("error" in r) for r in records] == [True, False, True]


def test_nothing_byte_order_mark_and_no_end(run: Run):
    assert run(b"") == (0, []) and run(b"\n\n") == (0, [])
    code, records = run(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "a"}')
    assert code == 0 and said(records[0]) == said(records[1])


def test_memory_of_a_line(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    small = Engine.load(folder, threads=1, kv_memory=32 * 256)
    monkeypatch.setattr(batch, "load_engine", lambda args, shard=None: small)
    heavy = {"prompt": "ab", "params": {"search": "trie", "beams": 100}}
    code, records = run([{"prompt": "a"}, heavy, {"prompt": "a"}])
    assert code == 2 and said(records[0]) == said(records[2])
    assert records[1]["error"]["code"] == "memory" and "the largest beam count" in records[1]["error"]["message"]


def test_messages(run: Run, engine: Engine, monkeypatch: pytest.MonkeyPatch):
    chat = {"messages": [{"role": "user", "content": "hi </s>"}]}
    ids = engine.tokenizer.encode("user: hi </s>\n")
    assert ids[0] == engine.tokenizer.bos_token_id
    code, records = run([chat, {"prompt_ids": ids}])
    assert code == 0 and said(records[0]) == said(records[1])
    monkeypatch.setattr(engine, "template", None)
    code, [record] = run([chat])
    assert code == 2 and "--chat-template FILE" in record["error"]["message"]


@pytest.mark.filterwarnings("default:'</s>' in a prompt")
def test_control_tokens_in_prompts_and_never_in_messages(
    run: Run, engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    prompt, chat = {"prompt": "a</s>b"}, {"messages": [{"role": "user", "content": "hi </s>"}]}
    monkeypatch.setattr(engine.model, "warned", False)
    text, parsed = (engine.tokenizer.encode("a</s>b", parse_special=parse) for parse in (False, True))
    rendered = engine.tokenizer.encode("user: hi </s>\n")
    own = [prompt | {"params": {"parse_special": parse}} for parse in (True, False)]
    ids = [{"prompt_ids": ids} for ids in (parsed, text, rendered)]
    code, records = run([*ids, *own, prompt, chat])
    assert capsys.readouterr().err.count("warning: '</s>' in a prompt is read as text") == 1
    expected = [*map(said, records[:3])]
    assert code == 0 and [*map(said, records[3:])] == [*expected[:2], *expected[1:]] and expected[0] != expected[1]
    code, records = run([prompt, own[1], chat], "--parse-special")
    assert code == 0 and [*map(said, records)] == expected
    code, records = run([chat | {"params": {"parse_special": True}}, prompt | {"params": {"parse_special": 1}}])
    assert code == 2 and "parse_special: messages are from users" in records[0]["error"]["message"]
    assert "parse_special: expected true or false, got 1" in records[1]["error"]["message"]


def test_wrong_command_lines_are_told_before_loading(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    answered = tmp_path / "answered"
    answered.write_text("x\n")
    for flags, message in [
        (["--search", "trie", "--top-k", "3"], "top_k: the search 'trie' has no such parameter"),
        (["--resume"], "--resume needs --output FILE"),
        (["--input", str(tmp_path / "absent")], "cannot read the input: No such file or directory"),
        (["--input", str(tmp_path)], "cannot read the input: Is a directory"),
        (["--output", str(tmp_path / "no" / "where")], "cannot write the output"),
        (["--output", str(answered)], "--resume continues it"),
        (["--input", str(answered), "--output", str(answered)], "the same file"),
        (["--output", str(answered), "--resume"], "no answer of an earlier run"),
    ]:
        assert batch.main(flags, io.BytesIO(), io.BytesIO()) == 2
        assert message in capsys.readouterr().err
    assert answered.read_text() == "x\n"


def test_how_many_searches_run_at_once(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, capsys: pytest.CaptureFixture[str]
):
    parallel = []
    monkeypatch.setattr(batch, "load_engine", lambda args, shard=None: parallel.append(args.parallel) or engine)
    for flags in ([], ["--parallel", "64"]):
        assert batch.main(["-q", *flags], io.BytesIO(), io.BytesIO()) == 0
    assert parallel == [16, 64]
    monkeypatch.undo()
    assert batch.main(["--parallel", "0"], io.BytesIO(), io.BytesIO()) == 2
    assert "parallel: expected an integer" in capsys.readouterr().err


def test_two_runs_on_one_output(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, codes = tmp_path / "out", []
    inlet, to = os.pipe()
    with os.fdopen(inlet, "rb") as stdin:
        flags = ["--max-new-tokens", "6", "--output", str(path), "-q"]
        first = threading.Thread(target=lambda: codes.append(batch.main(flags, stdin)))
        first.start()
        try:
            os.write(to, b'{"prompt": "a"}\n')
            deadline = time.monotonic() + 60
            while not (path.exists() and path.stat().st_size) and time.monotonic() < deadline:
                time.sleep(0.01)
            before = path.read_bytes()
            for more in ([], ["--resume"]):
                assert run([{"prompt": "b"}], "--output", path, *more) == (2, [])
                err = capsys.readouterr().err
                assert "another run is writing to the output file" in err and str(path) in err and "--output" in err
            assert before and path.read_bytes() == before
        finally:
            os.close(to)
            first.join(60)
    assert codes == [0] and os.listdir(tmp_path) == ["out"]
    assert run([{"prompt": "a"}, {"prompt": "b"}], "--output", path, "--resume") == (0, [])  # the lock is gone
    assert path.read_bytes().count(b"\n") == 2


def test_an_output_without_locks(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    assert run([{"prompt": "a"}], "--output", tmp_path / "a") == (0, [])
    assert "its file system has no locks; no other run may write to it" in capsys.readouterr().err
    assert run([{"prompt": "a"}], "--output", tmp_path / "b", "-q") == (0, [])
    assert capsys.readouterr().err == ""


def test_paths_are_not_for_lines(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    @dataclass(frozen=True)
    class Own(Greedy):
        notes: Path | None = None
        book: str = path_field("none", words=("none", "any"))

    monkeypatch.setitem(REGISTRY, "own", Own)
    there = tmp_path / "there"
    there.write_text("x")
    for key in ("aded_store", "aded_save", "ults_prior", "own_notes", "own_book"):
        search = key.partition("_")[0]
        paths = [str(there), str(tmp_path / "absent"), str(tmp_path / "no" / "x"), "/", 3, ["x"]]
        code, records = run([{"prompt": "a", "params": {"search": search, key: path}} for path in paths])
        messages = {record["error"]["message"].partition(": ")[2] for record in records}
        assert code == 2 and len(messages) == 1  # whatever is there
        assert messages.pop().startswith(f"params.{key}: paths are given on the command line only")
        assert run([{"prompt": "a", "params": {"search": search, key: None}}])[0] in (0, 2)
    good = [{"ults_prior": "dirichlet", "search": "ults"}, {"own_book": "any", "search": "own"}, {"aded_store": None}]
    code, records = run([{"prompt": "a", "params": params} for params in good], "--search", "aded")
    assert code == 0, records
    assert there.read_text() == "x" and os.listdir(tmp_path) == ["there"]
    code, _ = run([{"prompt": "abc"}], "--search", "aded", "--aded-save", tmp_path / "store")  # the flag is as it was
    assert code == 0 and (tmp_path / "store").is_file()


def test_a_tokenizer_that_fails_on_one_prompt(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    spec = json.loads(file.read_text())
    split = {"type": "Split", "pattern": {"Regex": "((ab)+)+$"}, "behavior": "Isolated", "invert": False}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, spec["pre_tokenizer"]]}
    file.write_text(json.dumps(spec))
    engine = Engine.load(tmp_path / "model", threads=1, kv_memory=1 << 20)
    monkeypatch.setattr(batch, "load_engine", lambda args, shard=None: engine)
    code, records = Run(engine)([{"prompt": "a"}, {"prompt": "ab" * 50 + "c"}, {"prompt": "a"}])
    assert code == 2 and records[1]["error"]["code"] == "checkpoint"
    assert records[1]["error"]["message"].startswith("line 2: the tokenizer is refused: ")
    assert str(file) in records[1]["error"]["message"]
    assert said(records[0]) == said(records[2])


def test_a_tokenizer_that_fails_on_one_answer(run: Run, monkeypatch: pytest.MonkeyPatch):
    _, expected = run([{"prompt": "a"}, {"prompt": "b"}])
    decode, failing = run.engine.tokenizer.decode, tokens(expected[1])

    def fail(ids: Any, **options: Any) -> str:
        if list(ids) == failing:
            raise CheckpointError("the tokenizer cannot decode these tokens")
        return decode(ids, **options)

    monkeypatch.setattr(run.engine.tokenizer, "decode", fail)
    code, records = run([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}])
    assert code == 2 and records[1]["error"]["code"] == "checkpoint"
    assert said(records[0]) == said(records[2]) == said(expected[0])


LINES = [{"prompt": "a"}, {"prompt": 3}, {"id": "c", "prompt": "c"}, {"id": "c", "prompt": "d"}, {"prompt": "e"}]


def outputs(text: bytes) -> list[Any]:
    return [(r["id"], said(r) if "outputs" in r else r["error"]) for r in map(json.loads, text.splitlines())]


def test_resume(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert run(LINES, "--output", whole) == (2, [])
    expected, ends = outputs(whole.read_bytes()), [0]
    for line in whole.read_bytes().splitlines(True):
        ends.append(ends[-1] + len(line))
    assert [identity for identity, _ in expected] == [0, 1, "c", "c", 4]
    for cut in sorted({0, 1, 7, *ends, *(e - 1 for e in ends[1:]), *(e + 9 for e in ends[:-1])}):
        for lost in (b"", bytes(5000)):  # a loss of power may leave zeros
            part.write_bytes(whole.read_bytes()[:cut] + lost)
            assert run(LINES, "--output", part, "--resume") == (2, [])
            assert outputs(part.read_bytes()) == expected, cut
    part.unlink()
    run(LINES, "--output", part, "--resume")  # nothing there yet
    assert outputs(part.read_bytes()) == expected
    kept = part.read_bytes()
    for lines, message in [
        (LINES[:3], "part has 5 answers, the input only 3 records"),
        ([*LINES[:2], {"id": "x", "prompt": "c"}], "record 2 of the input has the id 'x', its answer 'c'"),
        ([*LINES[:2], {"id": "c", "prompt": "x"}], "record 2 of the input, with the id 'c', has changed since it was"),
        ([{"prompt": "a", "params": {"beams": 2}}], "record 0 of the input, with the id 0, has changed"),
        ([LINES[0], {"prompt": 4}], "record 1 of the input, with the id 1, has changed"),
    ]:
        assert run(lines, "--output", part, "--resume") == (2, [])
        assert message in capsys.readouterr().err and part.read_bytes() == kept


def test_resume_takes_answers_without_digests_and_records_in_another_order(run: Run, tmp_path: Path):
    path = tmp_path / "file"
    run(LINES, "--output", path)
    kept = path.read_bytes()
    reordered = [dict(reversed(line.items())) for line in LINES]
    assert run([*reordered, {"prompt": "f"}], "--output", path, "--resume") == (2, [])
    assert path.read_bytes().startswith(kept) and len(path.read_bytes().splitlines()) == 6
    old = [json.dumps({key: x for key, x in json.loads(line).items() if key != "record"}) for line in kept.splitlines()]
    path.write_text("".join(f"{line}\n" for line in old[:4]))
    assert run([{"prompt": "z"}, *LINES[1:]], "--output", path, "--resume") == (2, [])
    assert outputs(path.read_bytes()) == outputs(kept)
    assert "record" not in run([{"prompt": "a"}])[1][0]  # on standard output nothing is resumed


@pytest.mark.parametrize(
    "other", ["--search trie", "--beams 3", "--stop x", "--max-new-tokens 7", "--parse-special", "--dtype bfloat16"]
)
def test_resume_refuses_other_flags(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str):
    path = tmp_path / "file"
    run(LINES[:2], "--output", path)
    kept = path.read_bytes()
    assert run(LINES, "--output", path, "--resume", *other.split()) == (2, [])
    assert "this answer was made with other flags\n" in capsys.readouterr().err and path.read_bytes() == kept
    machine = "--kv-memory", "1M", "--threads", "1", "--parallel", "2", "--drafts", "ngrams", "-q"
    assert run(LINES, "--output", path, "--resume", *machine) == (2, [])  # flags that decide no answer
    assert path.read_bytes().startswith(kept)


def test_resume_takes_answers_of_versions_that_recorded_no_flags(run: Run, tmp_path: Path):
    path = tmp_path / "file"
    run([{"prompt": "a"}], "--output", path)
    line = json.loads(path.read_bytes())
    assert len(line.pop("flags")) == 16
    path.write_text(json.dumps(line) + "\n")
    code, _ = run([{"prompt": "a"}, {"prompt": "b"}], "--output", path, "--resume", "--search", "trie")
    assert code == 0 and len(path.read_bytes().splitlines()) == 2


def test_which_flags_decide_answers():
    groups = {group.title: {action.dest for action in group._group_actions} for group in make_parser()._action_groups}
    without = groups["options"] | groups["batch"] | groups["machine"] | {"quiet", "verbose", "version"}
    assert without | {"drafts", "shard"} == {*WITHOUT_EFFECT}
    args = make_parser().parse_args(["--beams", "3", "--threads", "2", "--temperature", "1"])
    assert deciding(args) == {"search": "trie", "beams": 3, "temperature": 1.0}


@pytest.mark.parametrize("text", [b"my notes", b'{"id": 1}\n', b'{"id": 0, "outputs": []\n', b"[]\n", b"\xff\n"])
def test_resume_leaves_other_files_alone(run: Run, tmp_path: Path, text: bytes):
    path = tmp_path / "file"
    path.write_bytes(text)
    assert run(LINES, "--output", path, "--resume") == (2, [])
    assert path.read_bytes() == text


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_device(run: Run, capsys: pytest.CaptureFixture[str]):
    assert run(LINES, "--output", "/dev/full") == (2, [])
    assert "cannot write the output: No space left on device" in capsys.readouterr().err


def test_a_pipe_gets_its_answers_while_it_stays_open(run: Run):
    (inlet, to), (back, outlet) = os.pipe(), os.pipe()
    codes: list[int] = []
    with os.fdopen(inlet, "rb") as stdin, os.fdopen(outlet, "wb") as stdout, os.fdopen(back, "rb") as answers:
        thread = threading.Thread(target=lambda: codes.append(batch.main(["--max-new-tokens", "3"], stdin, stdout)))
        thread.start()
        try:
            rest = b""
            for i in range(3):
                os.write(to, rest + b'{"prompt": "a"}\n{"prom')
                rest = b'pt": "a"}\n'
                assert [json.loads(answers.readline())["id"] for _ in range(1 + (i > 0))][-1] == 2 * i
        finally:
            os.close(to)
            thread.join(120)
        assert codes == [2] and "malformed JSON" in json.loads(answers.readline())["error"]["message"]


def test_a_busy_engine_is_not_kept_waiting():
    inlet, to = os.pipe()
    with os.fdopen(inlet, "rb") as source:
        lines = read_lines(source, lambda: True)
        assert next(lines) == (0, None)
        os.write(to, b"a\nb")
        while (item := next(lines)) == (0, None):
            pass
        assert item == (1, b"a\n")
        os.close(to)
        assert [item for item in lines if item[1]] == [(2, b"b")]


def test_progress(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "in"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "a"}\n')
    assert run(b"", "--input", path)[0] == 0 and capsys.readouterr().err == ""
    assert run(b"", "--input", path, "-v")[0] == 0
    assert "2 lines, 12 new tokens in" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    clock = iter(range(10**6))
    monkeypatch.setattr(batch, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert run(b"", "--input", path)[0] == 0
    err = capsys.readouterr().err
    assert "\r0/2 lines, " in err and "tokens/s, KV 0.0 MB\x1b[K" in err and err.count("\n") == 4
    assert run(b"", "--input", path, "-q")[0] == 0 and capsys.readouterr().err == ""


# --- as a process ---


def command(folder: Path, *flags: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "engine.batch",
        "--model",
        str(folder),
        "--threads",
        "1",
        "--max-new-tokens",
        "6",
        *flags,
    ]


def test_an_interrupt_in_a_locale_without_utf8(folder: Path):
    """The answer comes while the input stays open; Ctrl-C ends without a trace; bytes are UTF-8."""
    process = subprocess.Popen(
        command(folder),
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin and process.stdout and process.stderr
    with process:
        process.stdin.write('{"id": "é→", "prompt": "a"}\n'.encode())
        process.stdin.flush()
        assert json.loads(process.stdout.readline().decode())["id"] == "é→"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read().decode() == "interrupted\n"
        assert process.wait(120) == 130


@pytest.mark.parametrize(("flags", "code"), [(["--model", "/absent"], 3), (["--kv-memory", "10"], 4)])
def test_whole_run_errors(folder: Path, flags: list[str], code: int, capsys: pytest.CaptureFixture[str]):
    assert batch.main(["--model", str(folder), *flags], io.BytesIO(b'{"prompt": "a"}'), io.BytesIO()) == code
    assert capsys.readouterr().err.startswith("error: ")

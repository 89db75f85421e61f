"""The fleet: its folder, its workers, and on Ray a worker that is killed in the middle."""

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.app import batch
from engine.errors import UsageError
from tools.fleet import __main__ as command
from tools.fleet.store import ANSWERS, COMING, RUN, Store, read_input
from tools.fleet.worker import Worker, depended_on, make_parser

ROOT = Path(__file__).parents[2]
FLAGS = ("--dtype", "float32", "--device", "cpu", "--kv-memory", "16M", "--max-new-tokens", "6")
RAY = importlib.util.find_spec("ray") is not None
LINES = [
    {"id": "a", "prompt": "Once upon a time"},
    {"prompt": "The little dog", "params": {"search": "trie", "beams": 3}},
    {"id": 7, "prompt": "Once", "params": {"beams": 0}},
    {"prompt": "The cat", "params": {"search": "sample", "seed": 4}},
    {"id": "a", "messages": [{"role": "user", "content": "Tell me a story."}]},
]


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "lines.jsonl"
    text = "\n\n".join(json.dumps(line) for line in LINES) + "\nno json\n"
    path.write_text("\N{ZERO WIDTH NO-BREAK SPACE}" + text, encoding="utf-8")
    return path


def answers(path):
    """Ids, tokens and texts, or errors; what shares a pass may change the last bits of log-probabilities."""
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    outputs = [[(output["token_ids"], output["text"]) for output in record.get("outputs", ())] for record in records]
    return [(record["id"], found, record.get("error")) for record, found in zip(records, outputs, strict=True)]


def expected(lines, tmp_path):
    """The answers of `engine.batch`."""
    assert batch.main(["--input", str(lines), "--output", str(tmp_path / "batch"), "-q", *FLAGS]) == 2
    return answers(tmp_path / "batch")


def blocks(lines, size):
    for i in range(0, len(lines), size):
        yield dict(zip(("record", "number", "line"), zip(*lines[i : i + size], strict=True), strict=True))


def alone(args, flags, lines):
    """In the place of `tools.fleet.__main__.answers`: one worker of this process."""
    worker = Worker(flags)
    for block in blocks(lines, 2):
        found = worker(block)
        yield from zip(found["record"], found["answer"], strict=True)


def run(lines, folder, *flags):
    return command.main(["--input", str(lines), "--output", str(folder), *FLAGS, *flags])


def test_answers_are_those_of_a_batch_in_the_order_of_the_input(lines, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "answers", lambda *given: reversed([*alone(*given)]))
    assert run(lines, tmp_path / "out") == 2  # some answers are errors
    assert answers(tmp_path / "out" / ANSWERS) == expected(lines, tmp_path)
    assert "6 lines in" in capsys.readouterr().err


def test_a_run_that_ended_goes_on(lines, tmp_path, monkeypatch):
    """Nothing is answered again, a line that was cut short is; the whole is the same."""

    def dies(*given):
        for i, found in enumerate(alone(*given)):
            if i == 3:
                raise KeyboardInterrupt
            yield found

    out = tmp_path / "out"
    monkeypatch.setattr(command, "answers", dies)
    assert run(lines, out) == 130 and not (out / ANSWERS).exists()
    before = (out / COMING).read_bytes()
    (out / COMING).write_bytes(before + b'{"record": 3, "answ')
    asked = []
    monkeypatch.setattr(command, "answers", lambda *given: asked.extend(given[2]) or alone(*given))
    assert run(lines, out, "--workers", "3") == 2
    assert [line.record for line in asked] == [3, 4, 5]
    assert (out / COMING).read_bytes().startswith(before)
    whole = (out / ANSWERS).read_bytes()
    assert answers(out / ANSWERS) == expected(lines, tmp_path)
    monkeypatch.setattr(command, "answers", lambda *given: pytest.fail("all lines are answered"))
    assert run(lines, out) == 2 and (out / ANSWERS).read_bytes() == whole


def test_a_folder_of_another_run_is_refused(lines, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "answers", alone)
    out = tmp_path / "out"
    assert run(lines, out) == 2
    assert run(lines, out, "--search", "trie") == 2 and "a run with other flags" in capsys.readouterr().err
    lines.write_text(lines.read_text() + json.dumps(LINES[0]))
    assert run(lines, out) == 2 and "a run with other input" in capsys.readouterr().err
    (out / RUN).unlink()
    assert run(lines, out) == 2 and "answers of another run" in capsys.readouterr().err


def test_a_folder_has_one_writer_and_each_answer_once(lines, tmp_path):
    read = read_input(str(lines))
    assert [(line.record, line.number) for line in read] == [(0, 1), (1, 3), (2, 5), (3, 7), (4, 9), (5, 10)]
    with contextlib.closing(Store(tmp_path / "out", read, [])) as store:
        with pytest.raises(UsageError, match="another run is writing"):
            Store(tmp_path / "out", read, [])
        for record in (2, 0, 2, 1, 5, 4, 3):
            store.add(record, b'{"id": %d}' % record)
        assert len(store) == 6 and store.errors == 0
        assert store.merge().read_bytes() == b"".join(b'{"id": %d}\n' % record for record in range(6))
    for answer in (
        b'"x", "answer": {}',
        b'9, "answer": {}',
        b'-1, "answer": {}',
        b'0, "answer": 7',
        b'0, "answer": {',
        b"[" * 9999,
    ):
        (tmp_path / "out" / COMING).write_bytes(b'{"record": ' + answer + b', "answer": {}}\n')
        with pytest.raises(UsageError, match="not an answer that a run wrote") as error:
            Store(tmp_path / "out", read, [])
        assert error.value.where == str(tmp_path / "out" / COMING)
    (tmp_path / "out" / COMING).write_bytes(b"something else\n")
    with pytest.raises(UsageError, match="not a file that a run wrote"):
        Store(tmp_path / "out", read, [])


def test_a_model_that_cannot_be_loaded_ends_the_run(lines, tmp_path, capsys):
    found = Worker(["--input", "", "--output", "", "--memory", "1M", *FLAGS])(next(blocks(read_input(str(lines)), 2)))
    assert found["record"] == [0, 1] and found["code"] == [2, 2] and "is less than" in found["fault"][0]
    assert run(lines, tmp_path / "out", "--model", str(tmp_path)) == 3
    assert "config.json" in capsys.readouterr().err


def test_a_worker_has_the_one_thread_that_help_says():
    parser = make_parser()
    assert "limit of CPU threads of a worker (1)" in parser.format_help()
    assert Worker(["--input", "", "--output", "", *FLAGS]).args.threads == 1


def test_flags_that_answers_depend_on():
    def of(*flags):
        return depended_on(make_parser().parse_args(["--input", "a", "--output", "b", *flags]))

    assert of() == of("--workers", "4", "--threads", "2", "--block", "9", "-v", "--address", "a:1", "--parallel", "2")
    assert of() != of("--beams", "2") and of() != of("--dtype", "float32")


def test_without_ray_the_error_names_it(lines, tmp_path, monkeypatch, capsys):
    def absent(name):
        raise ImportError(f"no module {name}")

    monkeypatch.setattr(importlib, "import_module", absent)
    assert run(lines, tmp_path / "out") == 2
    assert "pip install 'ray[data]<2.64'" in capsys.readouterr().err
    assert run(lines, tmp_path / "out", "--search", "aded", "--aded-save", str(tmp_path / "n")) == 2
    assert "workers save nothing" in capsys.readouterr().err


# --- on Ray ---


def workers(session):
    """The processes of a session that hold a model."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(b"ray::MapWorker") and os.getsid(int(path.parent.name)) == session:
                found.append(int(path.parent.name))
    return found


@pytest.mark.skipif(not RAY, reason="needs ray, the extra fleet")
def test_a_worker_that_is_killed_loses_nothing(tmp_path):
    """And nothing is answered twice: the answers are those of one process."""
    path, out = tmp_path / "lines", tmp_path / "out"
    path.write_text("".join(json.dumps({"id": i, "prompt": f"Number {i} was"}) + "\n" for i in range(64)))
    flags = [*FLAGS, "--max-new-tokens", "48", "--ignore-eos", "--input", str(path)]
    fleet = [sys.executable, "-m", "tools.fleet", "--workers", "2", "--block", "4", "--output", str(out), *flags]
    with subprocess.Popen(fleet, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            killed = 0
            while process.poll() is None and not killed:
                time.sleep(0.05)
                some = (out / COMING).read_bytes().count(b"\n") if (out / COMING).exists() else 0
                if some >= 8 and (found := workers(process.pid)):
                    os.kill(killed := found[0], signal.SIGKILL)
            _, errors = process.communicate(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0 and killed, errors
    rows = [json.loads(line) for line in (out / COMING).read_bytes().splitlines()]
    assert sorted(row["record"] for row in rows) == [*range(64)]
    assert batch.main([*flags, "--output", str(tmp_path / "batch"), "-q"]) == 0
    assert answers(out / ANSWERS) == answers(tmp_path / "batch")


SERVE = """
import json, sys, urllib.request
import ray
from ray import serve
sys.path.insert(0, sys.argv[1])
import service
paths = {"env_vars": {"PYTHONPATH": sys.argv[2]}}
ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, runtime_env=paths)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[3])})
serve.run(service.app, route_prefix="/")
body = json.dumps({"prompt": "Once upon a time", "max_tokens": 6, "search": "trie", "beams": 3}).encode()
url = f"http://127.0.0.1:{sys.argv[3]}/v1/completions"
request = urllib.request.Request(url, data=body, headers={"content-type": "application/json"})
print("answer:", urllib.request.urlopen(request, timeout=120).read().decode(), flush=True)
serve.shutdown()
"""


@pytest.mark.skipif(not RAY or importlib.util.find_spec("fastapi") is None, reason="needs ray[serve]")
def test_the_server_under_ray_serve(tmp_path):
    """The page's example, with one replica."""
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    code = next(block for block in page.split("```python\n")[1:] if "serve.ingress" in block).partition("```")[0]
    (tmp_path / "service.py").write_text(code.replace("num_replicas=2", "num_replicas=1"))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    slow = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60"}
    environment = os.environ | slow | {"PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(tmp_path), paths, str(port)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert "answer: " in done.stdout, done.stderr[-4000:]
    found = json.loads(done.stdout.partition("answer: ")[2].splitlines()[0])
    assert found["choices"][0]["text"] and found["usage"]["completion_tokens"] == 6

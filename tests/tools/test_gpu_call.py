"""One call for a GPU: its steps end in time, and what they have printed by then is kept."""

import json
import subprocess
import sys
import time

import pytest

from tools import gpu_call
from tools.bench.report import comparison
from tools.gpu_call import Step

HANG = "import time; print('before', flush=True); time.sleep(600)"
TESTS = """import sys
print('''.F
 failed: tests/test_a.py::test_one[cuda]
E   assert 1 == 2
=== FAILURES ===
E   assert 1 == 2
1 failed, 1 passed''')
sys.exit(1)"""


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Runs a call of some steps, in folders of its own; returns its exit code, and the log."""
    monkeypatch.setattr(gpu_call, "LEAST", 0)
    monkeypatch.setattr(gpu_call, "STOPPING", 0.5)

    def run(seconds, *steps):
        monkeypatch.setattr(gpu_call, "steps", lambda kept, models: steps)
        code = gpu_call.main([str(seconds), "--out", str(tmp_path / "out"), "--kept", str(tmp_path / "kept")])
        return code, (tmp_path / "out/log.txt").read_text()

    return run


def python(text):
    return lambda seconds: [sys.executable, "-c", text]


def test_a_step_that_hangs_is_ended_and_the_next_has_its_time(call, capsys):
    began = time.monotonic()
    code, log = call(80, Step("hangs", python(HANG), 0.07), Step("next", python("print('after')")))
    assert code == 0 and time.monotonic() - began < 80
    assert log.index("before\n") < log.index("== hangs: ") < log.index("after\n") < log.index("== next: ")
    assert "next: " in log.splitlines()[-1] and "exit code 0" in log.splitlines()[-1]
    assert capsys.readouterr().out == log


def test_an_interrupt_ends_the_step_under_way(call, monkeypatch):
    started, wait = [], subprocess.Popen.wait

    def interrupted(process, timeout=None):
        if started:
            return wait(process, timeout)
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(60, Step("hangs", python(HANG)))
    try:
        assert started[0].poll() is not None
    finally:
        started[0].kill()


def test_what_tests_and_stages_found_ends_the_log(call, tmp_path):
    found = {"targets": [comparison("a step", 0.7, 0.8)]}
    lines = {"is": "begin", "stage": "steps"}, {"is": "end", "stage": "steps", "left": 0, "found": found}
    text = "\n".join(map(json.dumps, lines))
    write = f"open({str(tmp_path / 'kept/journal.jsonl')!r}, 'w').write({text + chr(10)!r})"
    code, log = call(60, Step("stages", python(write)), Step("tests", python(TESTS)), Step("no", lambda _: ["/absent"]))
    summary = log[log.index("== no: ") :]
    assert code == 1 and (tmp_path / "kept/tested").exists()
    assert summary.count("test_one[cuda]") == summary.count("assert 1 == 2") == 1 and "| a step" in summary
    assert "tests: " in summary and "No such file" in summary
    assert (tmp_path / "out/journal.jsonl").read_text() == text + "\n"


def test_kernels_that_cannot_be_loaded_are_left_aside(call, monkeypatch):
    """The tests would end at once, see `tests/conftest.py`."""
    monkeypatch.setenv("COPPICE_KERNELS", "/of/another/machine")
    monkeypatch.setattr(gpu_call, "why_no_kernels", lambda: "no such machine")
    _, log = call(60, Step("told", python("import os; print(os.environ.get('COPPICE_KERNELS'))")))
    assert "COPPICE_KERNELS is not used: no such machine\n" in log and "\nNone\n" in log


def test_the_next_call_continues(tmp_path):
    names = [step.name for step in gpu_call.steps(tmp_path, ())]
    assert names[2:5] == ["stages", "tests", "stages"]
    (tmp_path / "tested").touch()
    again = [*gpu_call.steps(tmp_path, ["a.gguf"])]
    assert [step.name for step in again] == [*names[:2], *names[4:]]
    command = again[2].command(100)
    assert command[command.index("--model") + 1] == "a.gguf" and command[-1] == "65"
    assert "tests/test_gpu.py" in gpu_call.tests(tmp_path / "passed") and not any(
        "--deselect" in x for x in gpu_call.tests(tmp_path / "passed")
    )


def test_tests_that_have_passed_are_left_out_of_the_next_call(call, tmp_path):
    lines = ["[gw0] [ 1%] PASSED tests/test_a.py::test_one[a b]", "tests/test_b.py::test_two PASSED    [ 9%]",
             "[gw1] [ 2%] FAILED tests/test_a.py::test_three", "tests/test_b.py::test_four"]  # fmt: skip
    call(60, Step("tests", python(f"print({chr(10).join(lines)!r})")))
    assert [x for x in gpu_call.tests(tmp_path / "kept/passed") if "--deselect" in x] == [
        "--deselect=tests/test_a.py::test_one[a b]", "--deselect=tests/test_b.py::test_two"
    ]  # fmt: skip
    copies = ["passed", "tested"]  # for the next call, which may have another machine
    assert all((tmp_path / "out" / x).read_text() == (tmp_path / "kept" / x).read_text() for x in copies)


def test_a_file_that_lacks_a_package_costs_no_other(monkeypatch, tmp_path):
    (tmp_path / "tests").mkdir()
    for name, line in {"a": "import absent_package", "b": "def test_b(): pass"}.items():
        (tmp_path / f"tests/test_{name}.py").write_text(f"import pytest\npytestmark = pytest.mark.gpu\n{line}\n")
    monkeypatch.setattr(gpu_call, "ROOT", tmp_path)
    monkeypatch.setitem(sys.modules, "xdist", None)
    command = [*gpu_call.tests(tmp_path / "passed"), "-c", "/dev/null", "--rootdir", "."]
    command.remove("--full")  # of the project's conftest
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "1 passed" in done.stdout and "absent_package" in done.stdout, done.stdout

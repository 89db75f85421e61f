"""Runs of the GPU benchmark: what one process has found, the next one keeps; a process that breaks costs its case."""

import json
import subprocess
import sys
import time

import pytest
import torch

from engine.errors import UsageError
from tools.bench import gpu
from tools.bench.__main__ import main
from tools.bench.gpu import setting, watching
from tools.bench.gpu.journal import Ended, Journal
from tools.bench.gpu.watching import watch
from tools.bench.report import comparison

WORKER = """
import os, signal, sys, time
from pathlib import Path
from tools.bench.gpu.journal import Journal
from tools.bench.gpu.watching import LOST
path, *stages = sys.argv[1:]
journal = Journal(Path(path))
for stage in stages:
    if stage in journal.stages:
        continue
    journal.stage = stage
    journal.begin()
    if stage == "broken":
        os._exit(9)
    rows = []
    for case in ("fine", stage, "last"):
        if (known := journal.known(case)) is None:
            journal.begin(case)
            if case == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            if case == "hang":
                time.sleep(600)
            row, notes = {"pid": os.getpid()}, []
            if case == "lost":
                row, notes = None, ["lost: illegal access"]
            journal.end(case, row, notes)
            if case == "lost":
                os._exit(LOST)
        rows.append(case)
    journal.close({"rows": rows, "targets": [], "notes": [], "seconds": 0.1})
"""


def worker(path, *stages):
    return [sys.executable, "-c", WORKER, str(path), *stages]


def test_a_process_that_breaks_costs_the_case_under_way(tmp_path, capsys):
    path, stages = tmp_path / "journal", ["lost", "crash", "broken", "whole"]
    journal = Journal(path)
    journal.run()
    watch(worker(path, *stages), journal, stages, time.time() + 600)
    assert list(journal.stages) == stages and not journal.begun
    assert [journal.stages[name]["rows"] for name in stages] == [["fine", name, "last"] for name in stages[:2]] + [
        [], ["fine", "whole", "last"]]  # fmt: skip
    assert journal.ended["lost", "lost"] == Ended(None, ["lost: illegal access"])
    assert journal.ended["crash", "crash"].notes == ["crash: the process ended with exit code -11"]
    assert journal.stages["broken"]["notes"] == ["broken: the process ended with exit code 9"]
    pids = [journal.ended[stage, case].row["pid"] for stage in ("lost", "crash") for case in ("fine", "last")]
    assert pids[0] != pids[1] == pids[2] != pids[3] != journal.ended["whole", "whole"].row["pid"]
    assert capsys.readouterr().err.count("a new process goes on") == 3
    assert Journal(path).ended == journal.ended and Journal(path).stages == journal.stages


def test_a_process_that_hangs_is_ended_and_so_is_one_whose_time_is_over(tmp_path):
    path, stages = tmp_path / "journal", ["hang", "whole"]
    journal = Journal(path)

    def patience(stage):
        return 0.1 if journal.begun[-1:] == [("hang", "hang")] else 600

    watch(worker(path, *stages), journal, stages, time.time() + 600, patience)
    assert journal.ended["hang", "hang"].notes == ["hang: nothing ended in 0 s"]
    assert journal.stages["hang"]["rows"] == ["fine", "hang", "last"] and "whole" in journal.stages
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert watching.ended(sleep, journal, time.time() + 0.5, lambda stage: 600) == "the time is over"


def test_a_process_that_never_begins_or_is_told_wrong_is_not_repeated(tmp_path, capsys):
    journal = Journal(tmp_path / "journal")
    watch([sys.executable, "-c", "raise SystemExit(1)"], journal, ["smoke"], time.time() + 600)
    assert "no stage had begun when the process ended: the process ended with exit code 1" in capsys.readouterr().err
    with pytest.raises(UsageError, match="not run"):
        watch([sys.executable, "-c", "raise SystemExit(2)"], journal, ["smoke"], time.time() + 600)


def test_a_watched_process_ends_with_the_one_that_watches():
    inner = "from tools.bench.gpu import watching as w; w.end_with_parent(); print(1, flush=True); w.time.sleep(600)"
    outer = f"import subprocess as s, sys; s.Popen([sys.executable, '-c', {inner!r}], stdout=s.PIPE).stdout.readline()"
    done = subprocess.run([sys.executable, "-c", outer], stderr=subprocess.PIPE)  # ends when nobody has its stderr
    assert done.returncode == 0 and not done.stderr


def test_a_run_goes_on_where_another_was_ended(tmp_path):
    path = tmp_path / "journal"
    first = Journal(path)
    first.agree(device="A")
    for stage, left in (("smoke", 0), ("steps", 2)):
        first.stage = stage
        first.begin()
        first.begin("one")
        first.end("one", {"x": float("nan")}, [])
        first.close({"rows": [], "targets": []}, left)
    first.stage = "where"
    first.begin()
    first.begin("one")
    with path.open("ab") as file:
        file.write(b'{"is": "end", "stage": "wh')  # killed while it wrote
    second = Journal(path)
    assert second.begun == [("where", ""), ("where", "one")] and second.left == {"smoke": 0, "steps": 2}
    second.run()  # a case that was under way, and a stage that had no time for all, have another try
    assert list(second.stages) == ["smoke"] and not second.begun and ("steps", "one") in second.ended
    second.agree(device="A")
    with pytest.raises(UsageError, match="the journal's device is A, not B"):
        second.agree(device="B")
    assert all(json.loads(line) for line in path.read_text().splitlines())
    path.write_text("{}\n")
    with pytest.raises(UsageError, match="cannot be read"):
        Journal(path)


def test_the_command_watches_itself(tmp_path, monkeypatch, capsys):
    """Its process gets the command's words, the end and the journal; targets follow when all stages have ended."""
    commands = []

    def run(command, journal, stages, end, patience):
        commands.append((command, end - time.time(), patience("smoke"), patience("compiled")))
        journal.stage = "steps"
        journal.close({"rows": [], "targets": [comparison("faster", 2.0, 1.0)]}, 1)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "watch", run)
    words = ["gpu", "--stages", "smoke", "steps", "--journal", str(tmp_path / "journal")]
    assert main(words) == 0
    [(command, end, patience, long)] = commands
    assert command[1:3] == ["-m", "tools.bench"] and command[3 : 3 + len(words)] == words
    assert command[-4] == "--inside" and command[-2:] == ["--journal", words[-1]]
    assert end == pytest.approx(gpu.TOTAL + gpu.GRACE, abs=20) and patience == watching.PATIENCE and long == 300
    told = capsys.readouterr().err
    assert "| faster" in told and "not measured, or only in part: smoke, steps" in told
    assert main([*words, "--total", "50"]) == 0 and commands[1][1] == pytest.approx(50 + gpu.GRACE, abs=20)
    assert main([*words, "--beams", "4"]) == 2 and "the journal's settings" in capsys.readouterr().err
    monkeypatch.setenv(gpu.EARLY, "on")
    assert main(words) == 2 and f"{gpu.EARLY}=on" in capsys.readouterr().err


def test_a_lost_gpu_ends_the_process_after_a_note(monkeypatch):
    """After an illegal access every call fails; other errors leave the GPU to the cases that follow."""
    lost = []

    def synchronize():
        if lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def access():
        lost.append(1)
        synchronize()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    parser = gpu.argparse.ArgumentParser()
    gpu.add_parser(parser.add_subparsers())
    s = setting.Setting(parser.parse_args(["gpu"]), Journal())
    s.begin("smoke", 60)
    cases = [("wrong", lambda: 1 / 0), ("right", lambda: {"x": 1.0}), ("far", access), ("after", dict)]
    with pytest.raises(setting.DeviceLost):
        s.rows(cases)
    ended = {case: end.row for (_, case), end in s.journal.ended.items()}
    assert ended == {"wrong": None, "right": {"x": 1.0}, "far": None}
    lost.clear()
    s.notes.clear()
    assert s.rows(cases) == [{"x": 1.0}, {}] and len(s.notes) == 2 and "illegal" in s.notes[1]


def test_what_cases_share_and_cannot_be_made_ends_them():
    parser = gpu.argparse.ArgumentParser()
    gpu.add_parser(parser.add_subparsers())
    s = setting.Setting(parser.parse_args(["gpu"]), Journal(), torch.device("cpu"))
    s.begin("steps", 60)

    def cases():
        yield "first", lambda: {"x": 1.0}
        raise MemoryError("no room for the second")

    assert s.rows(cases()) == [{"x": 1.0}] and s.notes == ["the next case: MemoryError: no room for the second"]

"""Everything to run on a GPU that is there for minutes: stages of benchmarks, the tests, and what had no time before.

    python -m tools.gpu_call 540 --out out

The same command again continues with what had no time. The folder `--kept` has what it continues from: the stages'
journals, the tests that passed, and whether all have ended. Whatever is printed is in `--out` too, as it comes, with
copies of these files: if the call is ended from outside, only the case under way is lost. The last lines sum up the
call.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from kernels.ending import ended

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "gpu"
FIRST = 0.55  # of a call, in which the stages come before the tests
GRACE = 35  # seconds that stages may take after their total
KERNELS = "COPPICE_KERNELS"
LEAST = 40  # seconds that are worth a step
STOPPING = 15  # seconds from an interrupt to the end of a process
MOST_PROCESSES = 14  # of tests, which spend most of their time in the compiler
HANGING = 90  # seconds of a test after which it is told where it stands
PASSED = re.compile(r"PASSED (?P<id>tests/.+::.+)|(?P<own>tests/.+::.+) PASSED")  # with xdist and without
MARKED = re.compile(r"mark\.gpu|tests\.marks")  # of files with tests for a GPU
FACTS = """import sys, torch, triton
from kernels import cpp
print("kernels:", cpp.why_not() or cpp.find().path)
print("Python", sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__)
print(torch.cuda.get_device_properties(0) if torch.cuda.is_available() else "no GPU here")"""


class Step(NamedTuple):
    """A part of a call.

    Attributes:
        command: gets the seconds that it has.
        share: the step ends when this share of the call's time is over.
        variables: environment variables that it sets.
    """

    name: str
    command: Callable[[float], list[str]]
    share: float = 1.0
    variables: tuple[tuple[str, str], ...] = ()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a call. Returns 1 if tests have failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_call", description=__doc__)
    parser.add_argument("seconds", type=float, help="seconds after which everything has ended")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the log and copies of --kept")
    text = "folder from which the next call continues (%(default)s)"
    parser.add_argument("--kept", type=Path, default=KEPT, metavar="DIR", help=text)
    text = "checkpoint folders and GGUF files for the stage models"
    parser.add_argument("--model", nargs="+", default=[], metavar="FILE", help=text)
    args = parser.parse_args(argv)
    call = Call(args.seconds, args.kept, args.out)
    for step in steps(args.kept, args.model):
        call.run(step)
    return call.sum_up()


def steps(kept: Path, models: Sequence[str]) -> Iterator[Step]:
    """The parts of a call, the most important first; what an earlier call has done is left out."""
    named = ["--model", *models] if models else []
    yield Step("versions", lambda _: [sys.executable, "-c", FACTS])
    yield Step("nvidia-smi", lambda _: ["nvidia-smi"])
    if not (kept / "tested").exists():
        yield Step("stages", stages(kept / "journal.jsonl", *named), FIRST)
        yield Step("tests", lambda _: tests(kept / "passed"))
    yield Step("stages", stages(kept / "journal.jsonl", *named))
    overlap = stages(kept / "overlap.jsonl", "--stages", "steps", "--prefix", "4096")
    yield Step("launches that overlap", overlap, variables=(("COPPICE_PDL", "on"),))
    tuned = "--stages", "tune", "--prefix", "4096", "--queries", "15"
    yield Step("shapes of programs", stages(kept / "tune.jsonl", *tuned))


def stages(journal: Path, *more: str) -> Callable[[float], list[str]]:
    """The command of the stages, by the seconds that they have."""
    command = [sys.executable, "-m", "tools.bench", "gpu", *more, "--journal", str(journal.resolve())]
    return lambda seconds: [*command, "--total", f"{max(1, seconds - GRACE):.0f}"]


def tests(passed: Path) -> list[str]:
    """The command of the tests, in several processes if xdist is there.

    Args:
        passed: a file with the ids of tests that are left out, if it exists.
    """
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARKED.search(path.read_text("utf-8"))]
    command = [sys.executable, "-m", "pytest", "--full", "-m", "gpu", *(str(path.relative_to(ROOT)) for path in files)]
    command += ["-p", "no:benchmark", "-p", "no:cacheprovider", "--tb=short", "--durations=15"]
    command += ["--continue-on-collection-errors"]  # without xdist, a file that lacks a package would cost all others
    command += ["-v", "-o", f"faulthandler_timeout={HANGING}"]  # if tests are ended, the log says which ran, and where
    command += [f"--deselect={line}" for line in passed.read_text().splitlines()] if passed.exists() else []
    with contextlib.suppress(ImportError):
        import xdist  # noqa: F401

        count = min(MOST_PROCESSES, os.cpu_count() or 1)
        command += ["--numprocesses", str(count), "--dist", "worksteal"]
    return command


def why_no_kernels() -> str | None:
    """Why the C++ kernels that a variable names cannot be loaded here, those of another machine for instance."""
    from kernels.cpp import why_not  # torch, too, which takes seconds

    return why_not()


class Call:
    """A call: runs steps until its time is over.

    Args:
        seconds: of the call.
        kept, out: folders, made if they are absent; see the module.
    """

    def __init__(self, seconds: float, kept: Path, out: Path):
        self.end, self.seconds, self.kept, self.out = time.monotonic() + seconds, seconds, kept, out
        self.ran: list[str] = []
        self.failed: list[str] = []  # lines of tests
        for folder in (kept, out):
            folder.mkdir(parents=True, exist_ok=True)
        self.environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        if KERNELS in os.environ and (why := why_no_kernels()):
            self.say(f"{KERNELS} is not used: {why}")
            del self.environment[KERNELS]

    def say(self, line: str) -> None:
        """Print a line, and write it into the log."""
        print(line, flush=True)
        with (self.out / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def run(self, step: Step) -> None:
        """Run a step, at most until its time is over; with too little time it is left out."""
        seconds = self.end - (1 - step.share) * self.seconds - STOPPING - time.monotonic()
        if seconds < LEAST:
            self.ran.append(f"{step.name}: no time")
            return
        self.say(f"== {step.name}, at most {seconds:.0f} s")
        began, code = time.monotonic(), self.code_of(step, seconds)
        self.ran.append(f"{step.name}: {time.monotonic() - began:.0f} s, exit code {code}")
        self.say(f"== {self.ran[-1]}")
        if step.name == "tests" and code in (0, 1, 5):  # 5: none was left. Otherwise the next call continues
            (self.kept / "tested").touch()
        self.copy()

    def code_of(self, step: Step, seconds: float) -> int | str:
        """The exit code of a step's command, or why it did not start."""
        try:
            process = subprocess.Popen(
                step.command(seconds), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                cwd=ROOT, env=self.environment | dict(step.variables), process_group=0,
            )  # fmt: skip
        except OSError as error:
            return str(error)
        reader = threading.Thread(target=self.read, args=(process.stdout, step.name == "tests"), daemon=True)
        reader.start()
        try:
            for patience, number in ((seconds, signal.SIGINT), (STOPPING, signal.SIGKILL), (STOPPING, None)):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience)
                    break
                if number == signal.SIGINT:  # it ends what it has started, and tells what it knows
                    process.send_signal(number)
                elif number is not None:
                    os.killpg(process.pid, number)
        except KeyboardInterrupt:  # which a process of another group does not get: it would keep the GPU
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOPPING)
            raise
        reader.join(2)  # what it has left behind may keep the pipe open
        code = process.poll()
        return "none" if code is None else code

    def read(self, lines: IO[str], tested: bool) -> None:
        """Pass on the output of a command as it comes."""
        with lines:
            for line in lines:
                self.say(line.rstrip("\n"))
                if tested and line.startswith((" failed: ", "E ")):
                    self.failed.append(line.rstrip("\n")[:300])
                if tested and (found := PASSED.search(line.rstrip("\n"))):
                    with (self.kept / "passed").open("a", encoding="utf-8") as file:
                        file.write(f"{found['id'] or found['own']}\n")
                self.copy()

    def copy(self) -> None:
        """Copy what the next call continues from to where a call's findings are: it may have another machine."""
        for path in self.kept.iterdir():
            with contextlib.suppress(OSError):
                shutil.copyfile(path, self.out / path.name)

    def sum_up(self) -> int:
        """Print what failed, the targets and the steps; returns the exit code."""
        from tools.bench.gpu.journal import Journal  # torch, too, which takes seconds
        from tools.bench.report import comparison_table

        failed = dict.fromkeys(self.failed)
        for line in [*failed][:60]:
            self.say(line)
        found = Journal(self.kept / "journal.jsonl").stages
        if compared := [target for stage in found.values() for target in stage["targets"]]:
            self.say(comparison_table(compared))
        self.say("== " + "; ".join(self.ran))
        return int(bool(failed))


if __name__ == "__main__":
    sys.exit(ended(main))

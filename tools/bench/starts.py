"""Time and memory of a program from its start to its first token: this engine and llama.cpp.

Each start is a process of its own that loads the file, evaluates a prompt of one token and generates one. Before a
first start, the file's pages are dropped from the system's cache and everything that loading keeps for later starts is
removed; a later start finds both. The seconds include imports, the tokenizer, the writing of what is kept and all else
that the process does; CPU seconds are those of all threads.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from models.gguf.reader import parts_of
from models.later import later
from tools.bench.checkpoints import MODELS_HELP, defaults, is_gguf
from tools.bench.flags import add_numbers
from tools.bench.measure import cores, in_turn, memory
from tools.bench.report import add_save_flag, finish, rows_table, stamp

with later():
    import kernels.cpp as cpp  # from kernels: pyright takes that for tools.kernels

STARTS = """
from engine.load.startup import import_torch
import_torch()
import engine.app.chat
from engine import Engine
from search import Greedy
engine = Engine.load({!r}, threads={})
engine.generate([[engine.start_token]], Greedy(), max_new_tokens=1)
"""
PERIOD = 0.004  # seconds between looks at the process
LEGEND = """*s* is the median time from the start of the process to its end, *CPU s* the CPU time of all its threads,
and *MB* the peak of its resident memory, pages of mapped files included. Before a *first* start, pages of the file are
dropped from the system's cache (unless another process has mapped them), and so is everything that an earlier start
kept."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("starts", help="time to the first token, here and in llama.cpp", description=__doc__)
    parser.add_argument("--model", nargs="+", metavar="MODEL", default=[], help=MODELS_HELP)
    parser.add_argument("--llama", type=Path, metavar="PATH", help="llama-batched-bench (llama.cpp is left out)")
    add_numbers(parser, runs=(3, "interleaved runs of each start"), threads=(cores(), "CPU threads"))
    add_save_flag(parser, "benchmarks")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    with tempfile.TemporaryDirectory(prefix="starts-") as home:
        return _measured(args, argv, Path(home) / "coppice")


def _measured(args: argparse.Namespace, argv: Sequence[str], cache: Path) -> dict[str, Any]:
    """Measure and report; loading keeps its results in `cache`, which is made here with a link to the kernels."""
    made, rows = stamp(argv), []
    cache.mkdir()
    (cache / "kernels").symlink_to(cpp.cache_folder() / "kernels")
    kept = {"coppice": [cache / "models"], "llama.cpp": []}
    for model in defaults(args.model):
        files = parts_of(model) if is_gguf(model) else sorted(model.glob("*.safetensors"))
        commands = {"coppice": [sys.executable, "-c", STARTS.format(str(model), args.threads)]}
        if args.llama is not None and is_gguf(model):
            words = f"-c 256 -npp 1 -ntg 1 -npl 1 -fa on -t {args.threads} -tb {args.threads}"
            commands["llama.cpp"] = [str(args.llama.resolve()), "-m", str(model.resolve()), *words.split()]
        works: dict[tuple[str, bool], Callable[[int], tuple[float, float, float]]] = {
            (name, first): partial(start, command, [*files, *kept[name]] if first else [], cache.parent)
            for first in (True, False) for name, command in commands.items()
        }  # fmt: skip
        for (name, first), found in in_turn(works, args.runs, what=f"{model.name}: round").items():
            seconds, used, most = map(statistics.median, zip(*found, strict=True))
            rows.append({"model": model.resolve().name, "engine": name, "start": "first" if first else "later",
                         "seconds": seconds, "cpu": used, "bytes": most})  # fmt: skip
    columns = {"model": "{model}", "engine": "{engine}", "start": "{start}", "s": "{seconds:.2f}",
               "CPU s": "{cpu:.2f}", "MB": "{bytes:MB}"}  # fmt: skip
    result = {"threads": args.threads, "results": rows}
    finish("starts", made, f"{args.threads} threads.\n\n{rows_table(rows, columns)}\n\n{LEGEND}", result, args.save)
    return result


def start(command: Sequence[str], dropped: Sequence[Path], home: Path, _: int) -> tuple[float, float, float]:
    """Run a process; returns its seconds, CPU seconds and peak bytes.

    Args:
        dropped: files whose pages are dropped from the system's cache before, and folders that are removed.
        home: the folder of the process's caches.
    """
    for path in dropped:
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            shutil.rmtree(path, ignore_errors=True)
    environment = {**os.environ, "XDG_CACHE_HOME": str(home)}
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    ended, most = 0, 0
    while not ended:  # the system's own account of a child's memory begins with that of this process
        most = memory(process.pid, "VmHWM") or most
        ended, status, used = os.wait4(process.pid, os.WNOHANG)
        time.sleep(PERIOD)
    seconds, process.returncode = time.perf_counter() - began, os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return seconds, used.ru_utime + used.ru_stime, most

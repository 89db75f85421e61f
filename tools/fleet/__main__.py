"""`python -m tools.fleet`: reads the input, starts workers on Ray Data, writes their answers."""

import argparse
import importlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from engine.app.cli import ended, run
from engine.errors import CoppiceError, UsageError
from models.later import later
from tools.fleet.worker import Worker, check_search, depended_on, make_parser

with later():
    import torch

    from engine.app.cli import fetch_models, rules, search_params
    from engine.load.distributed import ProcessError, check_alone
    from models.checkpoint.headers import Checkpoint
    from search.base import make_search
    from tools.fleet.store import Line, Store, read_input

RETRIES = 5  # times that a block is given to another worker when its own has died
BLOCKS = 8  # for each worker, so that all end at about the same time
MOST = 128  # most lines of a block: the work that is lost when a worker dies


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    flags = [*(sys.argv[1:] if argv is None else argv)]
    args = make_parser().parse_args(flags)
    return run(lambda: fleet(args, flags), args.verbose)


def fleet(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Answer the input. Raises CoppiceError for errors of the whole run."""
    check_alone("tools.fleet")
    check_search(make_search(args.search, search_params(args)))  # before anything is started
    rules(args)
    for folder in fetch_models(args).folders.values():
        Checkpoint.open(folder)
    lines = read_input(args.input)
    with closing(Store(args.output, lines, depended_on(args))) as store:
        before, began = len(store), time.monotonic()
        left = [line for line in lines if line.record not in store]
        if left:
            for record, answer in answers(args, flags, left):
                store.add(record, answer)
        path = store.merge()
        if not args.quiet:
            seconds, old = time.monotonic() - began, f"; {before} were there before" if before else ""
            print(f"{len(left)} lines in {seconds:.1f} s by {args.workers} workers{old}: {path}", file=sys.stderr)
            if store.errors:
                print(f"{store.errors} of {len(store)} answers are errors", file=sys.stderr)
        return UsageError.exit_code if store.errors else 0


def answers(args: argparse.Namespace, flags: Sequence[str], lines: Sequence[Line]) -> Iterator[tuple[int, bytes]]:
    """The numbers of records and their answers, in the order in which workers finish them. Raises CoppiceError."""
    ray, data = _ray(), _ray("ray.data")
    if not args.verbose:
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    _join(ray, args)
    try:
        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        size = args.block or max(1, min(MOST, len(lines) // (BLOCKS * args.workers)))
        rows = data.from_items([line._asdict() for line in lines], override_num_blocks=-(-len(lines) // size))
        options = {"num_cpus": args.threads, "num_gpus": int(_on_gpu(args)), "max_task_retries": RETRIES}
        pool = data.ActorPoolStrategy(size=args.workers, max_tasks_in_flight_per_actor=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no other argument of this version limits how often a block is tried
            found = rows.map_batches(
                Worker,
                batch_size=None,  # a block as it is
                compute=pool,
                fn_constructor_args=([*flags],),
                **options,
            )
        for row in found.iter_rows():
            if row["fault"]:
                raise _Fault(row["fault"], row["code"])
            yield int(row["record"]), bytes(row["answer"])
    except (ray.exceptions.RayError, ConnectionError) as error:
        remedy = "its last words are above with -v; the same command continues the run"
        raise ProcessError(f"a worker ended too often: {_line(error)}", remedy=remedy) from error
    finally:
        ray.shutdown()


class _Fault(CoppiceError):
    """The error of a worker, as it described it."""

    def __init__(self, text: str, exit_code: int):
        super().__init__(text)
        self.exit_code = exit_code


def _join(ray: Any, args: argparse.Namespace) -> None:
    """Start Ray on this machine, or join a cluster. Raises ProcessError."""
    options: dict[str, Any] = {"address": args.address}
    if args.address is None:
        options = {"address": "local", "num_cpus": args.workers * args.threads, "include_dashboard": False}
    try:
        ray.init(log_to_driver=args.verbose, logging_level="ERROR", runtime_env={"env_vars": _environment()}, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = args.address or "this machine"
        raise ProcessError(f"Ray cannot be reached at {where}: {_line(error)}") from error


def _environment() -> dict[str, str]:
    """The environment of workers: the packages of this process, wherever it was started."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def _on_gpu(args: argparse.Namespace) -> bool:
    return args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())


def _ray(name: str = "ray") -> Any:
    """Ray, which reports nothing about its use. Raises UsageError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"the fleet needs ray: {error}", remedy="pip install 'ray[data]<2.64'") from None


def _line(error: BaseException) -> str:
    """The last line of an error, which in Ray's errors is the cause."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]


if __name__ == "__main__":
    sys.exit(ended(main))

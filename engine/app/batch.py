"""Batch: reads prompts and writes answers as JSON Lines, in the same order; each forward pass serves many lines. Its
flags are in `engine.app.batch_flags`."""

import argparse
import io
import sys
import traceback
from collections.abc import Sequence
from contextlib import closing, nullcontext
from typing import IO

from engine.app.batch_flags import make_parser
from engine.app.cli import rules, run, search_params
from engine.app.cli.engines import kept_texts, load_engine
from engine.app.meter import Meter
from engine.app.records import Records, answer
from engine.app.sink import open_sink
from engine.app.trace_page import check_target, saving
from engine.contract.trace import Traces
from engine.errors import CoppiceError, UsageError
from engine.load.distributed import together
from models.shard import Shard
from search.base import make_search


def main(argv: Sequence[str] | None = None, stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None) -> int:
    """Run the command line, with `stdin` and `stdout` instead of the process's if given. Returns the exit code."""
    args = make_parser().parse_args(argv)
    return run(lambda: command(args, stdin, stdout), args.verbose, args.quiet)


def command(args: argparse.Namespace, stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None) -> int:
    """Run the command line that the flags give, perhaps as one of several processes. Returns the exit code; raises
    CoppiceError."""
    with together(args.device) as shard:
        return batch(args, stdin, stdout, shard)


def batch(args: argparse.Namespace, stdin: IO[bytes] | None, stdout: IO[bytes] | None, shard: Shard) -> int:
    """Serve the input to its end. Raises CoppiceError for errors of the whole run.

    If several processes share the models, the first one reads and writes, and sends its input to the others.
    """
    make_search(args.search, search_params(args))  # checks the command line before anything is loaded
    rules(args)
    traces = None
    if args.trace is not None:
        check_target(args.trace, args.input, args.output)
        traces = Traces()
    args = argparse.Namespace(**{**vars(args), "shard": shard})
    if shard.rank > 0:
        args.quiet, args.trace = True, None
    source = _open_input(args, stdin) if shard.rank == 0 else io.BytesIO()
    # A pipe stays open until the process ends: closing it would wait for the thread that reads it.
    with source if source.seekable() else nullcontext(), closing(open_sink(args, source, stdout, shard)) as sink:
        engine = load_engine(args)
        meter = Meter(engine, args, source)
        records = Records(source, engine, args, sink.kept, traces)
        try:
            with (
                kept_texts(args, engine),
                saving(traces, args.trace),
                closing(engine.serve(records, on_step=meter.step)) as outcomes,
            ):
                for i, outcome in outcomes:
                    meter.count(outcome)
                    if args.verbose and isinstance(outcome, CoppiceError) and outcome.__cause__ is not None:
                        traceback.print_exception(outcome)
                    place = records.finish(i)
                    sink.put(i, answer(place, outcome), place.digest)
        except KeyboardInterrupt:
            if sink.file is None:
                raise
            raise KeyboardInterrupt(
                f"{args.output} has the answers so far; the same command with --resume continues"
            ) from None
        finally:
            meter.clear()
        if records.index < len(sink.kept):
            raise UsageError(
                f"{args.output} has {len(sink.kept)} answers, the input only {records.index} records",
                remedy="--resume needs the input that the answers are for",
            )
        meter.summary(len(sink.kept))
        if sink.errors:
            if not args.quiet:
                print(f"{sink.errors} of {sink.lines} answers are errors", file=sys.stderr)
            return UsageError.exit_code
        return 0


def _open_input(args: argparse.Namespace, stdin: IO[bytes] | None) -> IO[bytes]:
    if args.input != "-":
        try:
            return open(args.input, "rb")
        except OSError as error:
            raise UsageError(f"cannot read the input: {error.strerror}", where=args.input) from None
    if stdin is not None:
        return stdin
    if sys.stdin is None:
        raise UsageError("standard input is closed", remedy="give --input FILE")
    if sys.stdin.isatty() and not args.quiet:
        print("JSON Lines are read from the terminal; Ctrl-D ends them", file=sys.stderr)
    # Not sys.stdin: a thread that waits there holds a lock that the interpreter takes when it ends.
    return open(sys.stdin.fileno(), "rb", closefd=False)

"""Batch: reads prompts and writes answers as JSON Lines, in the same order; each forward pass serves many lines. Its
flags are in `engine.app.batch_flags`."""

import argparse
import io
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import closing, nullcontext
from typing import IO

from engine.app.batch_flags import make_parser
from engine.app.cli import rules, run, search_params
from engine.app.cli.engines import kept_texts, load_engine
from engine.app.records import Records, answer, count_records
from engine.app.sink import open_sink
from engine.app.trace_page import check_target, saving
from engine.contract import SearchResult
from engine.contract.trace import Traces
from engine.engine import Engine
from engine.errors import CoppiceError, UsageError
from engine.load.distributed import together
from engine.step.driver import Driver
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


class Meter:
    """Progress on stderr: one line that changes on a terminal, elsewhere with -v a line every ten seconds."""

    def __init__(self, engine: Engine, args: argparse.Namespace, source: IO[bytes]):
        self.engine = engine
        self.terminal = sys.stderr is not None and sys.stderr.isatty()
        self.quiet, self.notes = args.quiet or sys.stderr is None, set()  # notes of searches, once each
        self.on = not args.quiet and (self.terminal or args.verbose)
        self.began = time.monotonic()
        self.shown, self.drawn = self.began, False
        self.done = self.tokens = self.peak = 0
        self.total = count_records(source) if self.on and args.input != "-" else None
        machine = engine.capabilities
        if self.on:
            lines = f"{engine.name} loaded in {engine.load_seconds:.1f} s", machine.precision, machine.paths
            print(*filter(None, lines), sep="\n", file=sys.stderr)
        if machine.warning and not self.quiet:
            print(machine.warning, file=sys.stderr)

    def count(self, outcome: SearchResult | CoppiceError) -> None:
        """Count an answer."""
        self.clear()
        self.done += 1
        if isinstance(outcome, SearchResult):
            self.tokens += outcome.stats["new_tokens"]

    def step(self, driver: Driver) -> None:
        """Show progress after a step."""
        for note in [r.report.info["note"] for r in driver.running if "note" in r.report.info]:
            if not self.quiet and note not in self.notes:
                self.clear()
                self.notes.add(note)
                print(note, file=sys.stderr)
        if not self.on:
            return
        live = self.engine.pool.used_pages * self.engine.pool.page_bytes
        self.peak = max(self.peak, live)
        now = time.monotonic()
        if now - self.shown < (0.2 if self.terminal else 10):
            return
        self.shown = now
        tokens = self.tokens + sum(len(r.report.best()) for r in driver.running if r.report.best)
        of = "" if self.total is None else f"/{self.total}"
        text = f"{self.done}{of} lines, {tokens / (now - self.began):.0f} tokens/s, KV {live / 1e6:.1f} MB"
        print(f"\r{text}\x1b[K" if self.terminal else f"{text}\n", end="", file=sys.stderr, flush=True)
        self.drawn = self.terminal

    def clear(self) -> None:
        """Erase the line before other output."""
        if self.drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self.drawn = False

    def summary(self, kept: int) -> None:
        """Print the totals."""
        if not self.on:
            return
        seconds = time.monotonic() - self.began
        text = f"{self.done} lines, {self.tokens} new tokens in {seconds:.1f} s ({self.tokens / seconds:.0f} tokens/s)"
        before = f"; {kept} lines were there before" if kept else ""
        prefixes = self.engine.pool.prefixes
        if prefixes is not None and prefixes.reused_tokens:
            before += f"; {prefixes.reused_tokens} of {prefixes.asked_tokens} prompt tokens were cached"
        print(f"{text}, KV peak {self.peak / 1e6:.1f} MB{before}", file=sys.stderr)

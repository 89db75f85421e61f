"""The progress of a batch on standard error."""

import argparse
import sys
import time
from typing import IO

from engine.app.records import count_records
from engine.contract import SearchResult
from engine.engine import Engine
from engine.errors import CoppiceError
from engine.step.driver import Driver


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

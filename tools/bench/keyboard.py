"""Completion under a keyboard: the time from a key to the list of likely completions, and the cost of early keys.

A text is typed key by key, and each key asks for a list: beam search with few tokens, a healed prompt, distinct texts.
First each list is awaited. Then keys come in bursts, at an interval: each key cancels the request before it, and only
the last list of a burst is awaited.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.app.cli import add_load_flag
from engine.demo import demo_folder, is_demo
from engine.errors import UsageError
from models.later import later
from tools.bench import measure
from tools.bench.flags import add_numbers, add_run_flags
from tools.bench.report import comparison, comparison_table, finish, rows_table, stamp

with later():
    import asyncio

    from engine import AsyncEngine, Engine, Request, SearchResult
    from search import Trie

TEXT = " ".join([
    "Once upon a time there was a little girl who had a small brown dog. Every day they went to the park together,",
    "and she threw a ball for him. One day the ball fell into the water, and the dog was afraid to",
])  # fmt: skip
BURST = 8  # keys
LEGEND = """*list* is the time from a key to its list in milliseconds, when each list is awaited. *after a burst* is the
time from the last key of a burst, in which each key cancels the request before it. *CPU* is the median CPU time of all
threads for a list, which other programs on the machine disturb less. *passes* and *evaluated* (prompt tokens that were
not in the cache) are per list, when each is awaited. *RSS* is the peak resident memory of the process."""
MOST_MS, MOST_BYTES = 0.150, 400e6  # wanted, of SmolLM2-135M in int8 on two cores


class Keyboard:
    """Likely completions of the text typed so far; a key cancels the request of the key before."""

    def __init__(self, engine: AsyncEngine, beams: int = 5, ends: int = 3, tokens: int = 12):
        self.engine, self.tokens = engine, tokens
        self.search = Trie(beams, num_return_sequences=ends)
        self.asked: asyncio.Task[SearchResult] | None = None

    def key(self, typed: str) -> asyncio.Task[SearchResult]:
        """Ask for completions of a text; the outputs have different texts, the likeliest first."""
        if self.asked is not None:
            self.asked.cancel()  # it ends before the next pass
        request = Request(typed, self.search, self.tokens, heal=True, distinct="text", stop=["\n"])
        self.asked = asyncio.create_task(self.engine.generate(request))
        return self.asked


async def each_list(keyboard: Keyboard, typed: Sequence[str]) -> list[tuple[float, float, SearchResult]]:
    """Seconds, processor seconds and result of each list."""
    found = []
    for text in typed:
        begin, used = time.perf_counter(), time.process_time()
        result = await keyboard.key(text)
        found.append((time.perf_counter() - begin, time.process_time() - used, result))
    return found


async def bursts(keyboard: Keyboard, typed: Sequence[str], interval: float) -> list[float]:
    """Seconds from the last key of each burst to its list."""
    found = []
    for number, text in enumerate(typed, 1):
        begin = time.perf_counter()
        task = keyboard.key(text)
        if number % BURST == 0:
            await task
            found.append(time.perf_counter() - begin)
        else:
            await asyncio.sleep(interval)
    return found


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report. Raises UsageError for fewer keys than a burst has."""
    if args.keys < BURST:
        raise UsageError(f"--keys: expected an integer >= {BURST}, the keys of a burst, got {args.keys}")
    made = stamp(argv)
    options = {"dtype": args.dtype, "quant": args.quant, "activations": args.activations}
    options |= {"threads": args.threads, "kv_memory": "16M"}
    folder = Path(args.model or demo_folder())
    engine, name = Engine.load(folder, prefix_cache="on", **options), "demo" if is_demo(folder) else folder.name
    typed = [TEXT[:end] for end in range(max(1, len(TEXT) - args.keys), len(TEXT) + 1)]

    async def work() -> tuple[list[tuple[float, float, SearchResult]], list[float]]:
        async with AsyncEngine(engine) as shared:
            keyboard = Keyboard(shared, args.beams, args.ends, args.tokens)
            waited = (await each_list(keyboard, typed))[1:]  # the first one reads the whole text, and warms up
            measure.progress(f"{len(waited)} lists")
            return waited, await bursts(keyboard, typed[: len(typed) // BURST * BURST], args.interval / 1e3)

    waited, hurried = asyncio.run(work())
    seconds, used, results = map(list, zip(*waited, strict=True))
    row = {
        "model": name, "median": statistics.median(seconds), "p90": quantile(seconds, 0.9), "least": min(seconds),
        "cpu": statistics.median(used),
        "hurried": statistics.median(hurried), "hurried_p90": quantile(hurried, 0.9),
        "passes": statistics.mean(result.stats["forward_passes"] for result in results),
        "evaluated": statistics.mean(r.stats["prompt_tokens"] - r.stats["reused_tokens"] for r in results),
        "texts": statistics.mean(len(result.outputs) for result in results),
        "rss": measure.memory(os.getpid(), "VmHWM"), "lists": len(waited), "bursts": len(hurried),
    }  # fmt: skip
    compared = [
        comparison("median time to a list", row["median"], MOST_MS, at_most=True, unit="ms"),
        comparison("peak memory, MB", row["rss"] and row["rss"] / measure.MB, MOST_BYTES / measure.MB, at_most=True),
    ]
    body = "\n\n".join([
        f"{name}, {args.beams} beams, {args.tokens} tokens, lists of {args.ends}; {len(waited)} keys, a key "
        f"every {args.interval} ms in bursts of {BURST}.",
        rows_table([row], {
            "list, median": "{median:ms.0f} ms", "p90": "{p90:ms.0f} ms", "least": "{least:ms.0f} ms",
            "CPU": "{cpu:ms.0f} ms", "after a burst, median": "{hurried:ms.0f} ms",
            "p90 ": "{hurried_p90:ms.0f} ms", "passes": "{passes:.1f}", "evaluated": "{evaluated:.1f}",
            "texts": "{texts:.1f}", "RSS MB": "{rss:MB}"}),
        comparison_table(compared),
        LEGEND,
    ])  # fmt: skip
    finish("keyboard", made, body, result := {"results": [row], "compared": compared}, args.save)
    return result


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that this share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("keyboard", help="completion under a keyboard: time to the list", description=__doc__)
    parser.add_argument("--model", metavar="DIR", help="checkpoint folder (the demo)")
    add_load_flag(parser, "quant")
    add_load_flag(parser, "activations")
    add_numbers(
        parser,
        keys=(64, "keys to type"),
        interval=(60, "milliseconds between the keys of a burst"),
        beams=5,
        tokens=(12, "tokens of a completion"),
        ends=(3, "completions in a list"),
    )
    add_run_flags(parser, "benchmarks", "auto", run)

"""Stages of whole steps: one search and many, small weights, wide beams, transformers, where the time goes."""

import gc
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from engine import Engine
from engine.request import Request
from kernels.same_bits import asking
from models.families.llama import Llama
from models.families.qwen3 import Qwen3
from search import Trie
from tools.bench import device as on_gpu
from tools.bench import peers
from tools.bench.gpu.graph_times import graph_times, largest
from tools.bench.gpu.random_models import Made, make
from tools.bench.gpu.setting import PAGE, SMALL, Found, Setting
from tools.bench.measure import cores
from tools.bench.report import comparison

RUNS = 3  # of searches, after one that warms up
COPIES = 3  # before each of them
FLOOR = """*of floor* divides the floor by the time of a step, search included. The floor is (bytes of the weights,
without the embedding, and of the live keys and values) / bandwidth of copies between the runs of the search. Ratios of
two searches are of runs that alternated."""

SEARCHES = """*tokens/s* counts one token per search and step. *by bytes* is an upper bound of *x one search*, because
every search reads keys and values of its own."""
GRAPH = {"graph ms": "{graph:ms.2f}", "rest ms": "{besides:ms.2f}", "guessed": "{guessed:.2f}"}  # columns
GRAPHS = """*graph ms* is the replay of the step's CUDA graph between two events, *rest ms* the rest of the step: other
launches, and waits of the device. *guessed* is the share of the passes launched ahead that searches then asked for."""
TRANSFORMERS = """The time of transformers per token is the shorter of two runs. Ours is measured before and after
them; the longer time is compared."""
SOFTMAX = "_log_softmax"  # the kernel after the head
WHERE = "*share* is the part of the time of all kernels in the second half of a search; *us* is the mean of a launch."


def tokens_of(prompt: int, beams: int, new_tokens: int) -> int:
    """Slots that a search takes at most, in whole pages."""
    return prompt + (beams + 1) * (new_tokens + PAGE)


Decoding = Generator[None, None, dict[str, Any]]  # yields after each run; returns a row


def decode(s: Setting, made: Made, engine: Engine, prompt: int, beams: int, searches: int = 1) -> dict[str, Any]:
    """The row of `decoding`, with a copy before each run."""
    return beside(s, decoding(s, made, engine, prompt, beams, searches))


def beside(s: Setting, ours: Decoding, other: Decoding | None = None) -> dict[str, Any]:
    """The row of ours; its `x_other` divides its time by the other's. Their runs take turns with copies."""
    works, rows = [work for work in (other, ours) if work is not None], list[dict[str, Any]]()
    while not rows:
        s.copies.append(on_gpu.copy_bandwidth(COPIES))
        for work in works:
            try:
                next(work)
            except StopIteration as ended:  # of all in the same round
                rows.append(ended.value)
    return rows[-1] | {"x_other": rows[-1]["seconds"] / rows[0]["seconds"]}


def decoding(s: Setting, made: Made, engine: Engine, prompt: int, beams: int, searches: int = 1) -> Decoding:
    """A step of all searches while all of them decode: the median of some runs, after one that records the graphs."""
    draw, new = torch.Generator().manual_seed(0), s.args.new_tokens
    ids = torch.randint(5, engine.shape.vocab_size, (searches, prompt), generator=draw).tolist()
    times, growth, live, graphs, guesses = [], 0, 0, [], Counter()
    for run in range(RUNS + 1):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        drivers: list[Any] = []
        steps: list[tuple[float, int, int]] = []  # after each: the time, tokens so far, searches under way

        def note(driver: Any, steps: list[tuple[float, int, int]] = steps, drivers: list[Any] = drivers) -> None:
            steps.append((time.perf_counter(), driver.work["target"].tokens, len(driver.running)))
            drivers[:] = [driver]

        requests = (Request(one, Trie(beams=beams), max_new_tokens=new, ignore_eos=True) for one in ids)
        with graph_times(engine.runner) as replays:
            for _, outcome in engine.serve(requests, on_step=note):
                if isinstance(outcome, BaseException):
                    raise outcome
                live = outcome.stats["live_nodes_peak"]
        least = searches * (prompt + 2 * beams)
        full = [(at, tokens) for at, tokens, running in steps if running == searches and tokens >= least]
        if len(full) < 2:
            raise ValueError(f"no two steps of all {searches} searches: more --new-tokens are needed")
        (begin, first), (end, last) = full[0], full[-1]
        if run:
            times.append((end - begin) * searches * beams / (last - first))
            graphs.append(largest(replays))
            guesses += getattr(drivers[0], "guesses", Counter())
        growth = torch.cuda.max_memory_allocated() - before
        yield
    graph = min((x for x in graphs if x is not None), default=None)
    seconds, cache = statistics.median(times), engine.pool.bytes_per_token * (prompt + live) / 2
    moved = made.bytes + searches * cache
    return {
        "prompt": prompt, "beams": beams, "searches": searches, "seconds": seconds, "bytes": moved, "growth": growth,
        "of_floor": moved / statistics.median(s.copies[-RUNS:]) / seconds, "tokens_per_second": searches / seconds,
        "graph": graph, "besides": None if graph is None else seconds - graph,
        "guessed": guesses["right"] / guesses.total() if guesses else None,
    }  # fmt: skip


def steps(s: Setting) -> Found:
    """Decoding steps, search and host included: one beam and many, by prompt and compilation."""

    @lru_cache(1)
    def engine(choice: str, prompt: int) -> Engine:
        return s.engine(s.model, tokens_of(prompt, s.args.beams, s.args.new_tokens), compiled=choice == "on")

    def case(choice: str, prompt: int, beams: int) -> dict[str, Any]:
        one, ours = (decoding(s, s.model, engine(choice, prompt), prompt, count) for count in (1, beams))
        return {"compile": choice, **beside(s, ours, one if beams > 1 else None)}

    shapes = itertools.product(sorted({*s.args.compile}), s.args.prefix, (1, s.args.beams))  # off before on
    rows = s.rows((f"prompt {p}, {b} beams, compile {c}", partial(case, c, p, b)) for c, p, b in shapes)
    found = next((r for r in rows if (r["prompt"], r["beams"]) == (s.args.prefix[0], s.args.beams)), {})
    where = f"{s.args.beams} beams, prompt {s.args.prefix[0]}"
    return Found(s.heading, rows, {
        "prompt": "{prompt}", "compile": "{compile}", "beams": "{beams}", "ms per step": "{seconds:ms.2f}",
        **GRAPH, "of floor": "{of_floor:.2f}", "x one beam": "{x_other:.2f}", "growth MB": "{growth:M.1f}",
    }, f"{FLOOR} {GRAPHS} *x one beam* is relative to one beam.", [
        comparison(f"step of {where}, of floor", found.get("of_floor"), 0.80),
        comparison(f"step of {where}, x one beam", found.get("x_other"), 1.10, at_most=True),
    ])  # fmt: skip


def bits(s: Setting) -> Found:
    """Decoding steps with sums in one order, against those without."""

    @cache
    def engine(choice: str) -> Engine:
        with asking(choice):
            return s.engine(s.model, tokens_of(s.args.prefix[0], s.args.beams, s.args.new_tokens))

    def runs(choice: str, prompt: int, beams: int) -> Decoding:
        decodings = decoding(s, s.model, engine(choice), prompt, beams)
        while True:
            with asking(choice):
                try:
                    next(decodings)
                except StopIteration as ended:
                    return {"same_bits": choice, **ended.value}
            yield

    def case(choice: str, *sizes: int) -> dict[str, Any]:
        return beside(s, runs(choice, *sizes), runs("off", *sizes) if choice == "on" else None)

    sizes = itertools.product(s.args.prefix[:1], (s.args.beams, 1), ("off", "on"))
    rows = s.rows((f"prompt {p}, {b} beams, same bits {c}", partial(case, c, p, b)) for p, b, c in sizes)
    found = {row["beams"]: row["x_other"] for row in rows if row["same_bits"] == "on"}
    return Found(s.heading, rows, {
        "prompt": "{prompt}", "beams": "{beams}", "same bits": "{same_bits}", "ms per step": "{seconds:ms.2f}",
        **GRAPH, "x off": "{x_other:.2f}",
    }, f"{GRAPHS} *x off* is relative to the time without it.", [
        comparison(f"step of {beams} beams in one order, x off", found.get(beams), 1.03, at_most=True)
        for beams in (1, s.args.beams)
    ])  # fmt: skip


def searches(s: Setting) -> Found:
    """Many searches at once against one."""
    prompt, beams, most = s.args.prompt, s.args.beams, s.args.searches
    engine = s.engine(s.model, most * tokens_of(prompt, beams, s.args.new_tokens))
    counts = sorted({1, most, *(2**i for i in range(2, most.bit_length()) if 2**i < most)})

    def case(count: int) -> dict[str, Any]:
        one, ours = (decoding(s, s.model, engine, prompt, beams, n) for n in (1, count))
        return beside(s, ours, one if count > 1 else None)

    rows = s.rows((f"{n} searches", partial(case, n)) for n in counts)
    alone = next((row for row in rows if row["searches"] == 1), None)
    for row in rows:
        row["x_one"] = row["searches"] / row["x_other"]
        row["bound"] = row["searches"] * alone["bytes"] / row["bytes"] if alone else None
    found = next((row["x_one"] for row in rows if row["searches"] == most), None)
    return Found(s.heading, rows, {
        "searches": "{searches}", "beams": "{beams}", "prompt": "{prompt}", "ms per step": "{seconds:ms.2f}",
        "tokens/s": "{tokens_per_second:.0f}", "x one search": "{x_one:.1f}", "by bytes": "{bound:.1f}",
        **GRAPH, "of floor": "{of_floor:.2f}",
    }, f"{SEARCHES} {FLOOR} {GRAPHS}", [
        comparison(f"{most} searches of {beams} beams, prompt {prompt}: tokens/s, x one", found, 8.0)])  # fmt: skip


def weights(s: Setting) -> Found:
    """Steps on weights of 8 and 4 bits."""
    prompt, beams = s.args.prefix[0], s.args.beams

    plain = s.engine(s.model, tokens_of(prompt, beams, s.args.new_tokens))

    def case(quant: str) -> dict[str, Any]:
        usual = decoding(s, s.model, plain, prompt, beams)
        if quant == "none":
            return {"weights": "bfloat16", "gigabytes": s.model.bytes / 1e9, **beside(s, usual)}
        made = make(Llama, s.large, s.device, quant)
        engine = s.engine(made, tokens_of(prompt, beams, s.args.new_tokens))
        ours = decoding(s, made, engine, prompt, beams)
        return {"weights": quant, "gigabytes": made.bytes / 1e9, **beside(s, ours, usual)}

    rows = s.rows((f"weights {quant}", partial(case, quant)) for quant in ("none", *SMALL))
    for row in rows:
        row["x_plain"] = 1 / row["x_other"]
    found = next((row["x_plain"] for row in rows if row["weights"] == "int4"), None)
    return Found(s.heading, rows, {
        "weights": "{weights}", "GB": "{gigabytes:.1f}", "prompt": "{prompt}", "beams": "{beams}",
        "ms per step": "{seconds:ms.2f}", "x bfloat16": "{x_plain:.2f}", "of floor": "{of_floor:.2f}",
    }, FLOOR, [comparison(f"int4 weights, prompt {prompt}, x bfloat16", found, 1.6)])  # fmt: skip


def wide(s: Setting) -> Found:
    """Wide beams of a small model with a large vocabulary."""
    prompt, most = s.args.prompt, s.args.wide
    made = make(Qwen3, s.small, s.device)
    engine = s.engine(made, tokens_of(prompt, most, s.args.new_tokens))
    counts = sorted({1, min(64, most), most})
    rows = s.rows((f"{n} beams", partial(decode, s, made, engine, prompt, n)) for n in counts)
    found = max((row["beams"] for row in rows), default=None)
    return Found(f"Qwen3-0.6B's shape, bfloat16, random weights; {s.bandwidths}", rows, {
        "beams": "{beams}", "prompt": "{prompt}", "ms per step": "{seconds:ms.2f}", "of floor": "{of_floor:.2f}",
        "growth MB": "{growth:M.1f}",
    }, FLOOR, [comparison("beams of Qwen3-0.6B's shape", found, most)])  # fmt: skip


def transformers(s: Setting) -> Found:
    """The same beam search by transformers, in a process of its own."""
    prompt, beams, new = s.args.prefix[0], s.args.beams, s.args.new_tokens

    def ours(name: str) -> dict[str, Any]:
        engine = s.engine(s.model, tokens_of(prompt, beams, new))
        return {"engine": name, **decode(s, s.model, engine, prompt, beams)}

    def theirs() -> dict[str, Any]:
        gc.collect()  # the engine, whose parts refer to each other
        torch.cuda.empty_cache()
        ids = torch.randint(5, s.large["vocab_size"], (prompt,)).tolist()
        with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
            more = {"device": s.device.type, "config": s.large}
            spec = peers.spec("transformers", "", "bfloat16", beams, cores(), scratch, **more)
            found = peers.measure(sys.executable, spec, ids, new, 2)
        if "seconds" not in found:
            raise RuntimeError(peers.outcome(found))
        return {"engine": f"transformers {found['versions']['transformers']}", "prompt": prompt, "beams": beams,
                "seconds": 1 / found["steps_per_second"]["max"], "growth": peers.growth(found)}  # fmt: skip

    names = "coppice", "transformers", "coppice again"
    rows = s.rows((name, theirs if name == "transformers" else partial(ours, name)) for name in names)
    seconds = {row["engine"]: row["seconds"] for row in rows}
    slower = max((time for name, time in seconds.items() if name in names), default=None)
    peer = next((time for name, time in seconds.items() if name not in names), None)
    ratio = peer / slower if peer and slower else None
    return Found(s.heading, rows, {
        "engine": "{engine}", "prompt": "{prompt}", "beams": "{beams}", "ms per step": "{seconds:ms.2f}",
        "growth MB": "{growth:M.0f}",
    }, TRANSFORMERS, [
        comparison(f"{beams} beams, prompt {prompt}, x transformers", ratio, 5.0)])  # fmt: skip


# --- where the time goes ---


def where(s: Setting) -> Found:
    """Kernels of the second half of a search, by time; how busy they keep the GPU."""
    prompt, beams = s.args.prefix[0], s.args.beams
    engine = s.engine(s.model, tokens_of(prompt, beams, s.args.new_tokens))
    decode(s, s.model, engine, prompt, beams)
    ran = kernels_of(lambda: [*decoding(s, s.model, engine, prompt, beams)])
    if not ran:
        s.note("where", "the profiler saw no kernels")
        return Found(s.heading, [], {})
    rows, busy, gaps = by_kernel(ran)
    idle = "; ".join(f"{gap:.0f} us after {name}" for gap, name in gaps)
    count = launches_a_pass(ran)
    launched = "" if count is None else f" {count:.0f} launches and copies a pass."
    return Found(f"{s.heading} Kernels run {busy:.1%} of the time; longest gaps: {idle}.{launched}", rows, {
        "kernel": "{kernel}", "share": "{share:.3f}", "launches": "{launches}", "us": "{microseconds:.1f}",
    }, WHERE)  # fmt: skip


def kernels_of(work: Callable[[], object]) -> list[tuple[str, float, float]]:
    """The kernels that work launches: names, beginnings, ends in microseconds."""
    os.environ["TEARDOWN_CUPTI"] = "1"  # or the profiler stays attached, and slows every launch of the later stages
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        work()
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiled.events() or ()
        if event.device_type.name == "CUDA"
    ]


def launches_a_pass(ran: Sequence[tuple[str, float, float]]) -> float | None:
    """Kernels and copies of the last half of what ran, by passes, each with one softmax; None: there is none."""
    names = [name for name, *_ in sorted(ran, key=lambda kernel: kernel[1])][len(ran) // 2 :]
    passes = names.count(SOFTMAX)
    return len(names) / passes if passes else None


def busy(ran: Sequence[tuple[str, float, float]]) -> float:
    """Microseconds in which any kernel ran."""
    total, end = 0.0, -math.inf
    for _, start, stop in sorted(ran, key=lambda kernel: kernel[1]):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def by_kernel(
    ran: Sequence[tuple[str, float, float]], most: int = 24
) -> tuple[list[dict[str, Any]], float, list[tuple[float, str]]]:
    """Sum up the last half of what ran (names, beginnings, ends in microseconds): a row per kernel, the longest first;
    the share of the time in which any ran; the longest gaps, and what ran before each."""
    ran = sorted(ran, key=lambda kernel: kernel[1])[len(ran) // 2 :]
    spent: dict[str, list[float]] = defaultdict(list)
    gaps, end, idle = [], ran[0][1], 0.0
    before = ran[0][0]
    for name, start, stop in ran:
        spent[name].append(stop - start)
        if start > end:
            gaps.append((start - end, before))
            idle += start - end
        if stop > end:
            end, before = stop, name
    total = sum(map(sum, spent.values()))
    rows = []
    for name, times in sorted(spent.items(), key=lambda x: -sum(x[1]))[:most]:
        share, each = sum(times) / total, statistics.mean(times)
        rows.append({"kernel": name[:60], "share": share, "launches": len(times), "microseconds": each})
    return rows, 1 - idle / (end - ran[0][1]), [(gap, name[:40]) for gap, name in sorted(gaps, reverse=True)[:4]]

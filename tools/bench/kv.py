"""KV memory of trie beam search: pages held against live tokens, at the peak and at every step."""

import argparse
import time
from collections.abc import Sequence
from typing import Any

from models.later import later
from tools.bench.checkpoints import add_flags, checkpoint
from tools.bench.flags import add_numbers, add_run_flags
from tools.bench.measure import progress
from tools.bench.report import finish, rows_table, stamp

with later():
    from engine import Engine
    from engine.contract import Search
    from engine.engine import Done, Prefill, Progress
    from search import Trie

LIMIT = 1.10  # kv_bytes_peak / bytes of the live tokens at their peak
LEGEND = f"""*KV / live*: bytes of all pages held over bytes of live tokens (trunk and branches), each at its peak; the
target is at most {LIMIT:.2f}. *unshared*: tokens in one cache per beam. *slack*: slots of held pages without a live
token, counted after every step: the ends of the last pages, and holes that pruning left between live branches; *worst*:
the largest ratio of pages to live tokens, from the 64th step on."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("kv", help="memory of the KV cache by beams", description=__doc__)
    add_flags(parser)
    add_numbers(parser, beams=[1, 4, 15], new_tokens=(256, "end-of-sequence is ignored"))
    parser.add_argument("--prompt", default="Once upon a time", help="(%(default)s)")
    add_run_flags(parser, "benchmarks", "auto", run)


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    made = stamp(argv)
    with checkpoint(args) as (folder, name):
        engine = Engine.load(folder, dtype=args.dtype, threads=args.threads)
        rows = [measure(engine, args.prompt, beams, args.new_tokens) for beams in args.beams]
    pages = f"pages of {engine.pool.page_size} tokens, {rows[0]['bytes_per_token']:,} bytes per token"
    body = "\n\n".join([
        f"{name}, trie beam search, prompt of {rows[0]['prompt_tokens']} tokens, {pages}.",
        rows_table(rows, {
            "beams": "{beams}", "new tokens": "{new_tokens}", "live tokens, peak": "{live_nodes_peak}",
            "KV MB, peak": "{kv_bytes_peak:MB}", "KV / live": "{ratio:.3f}",
            "unshared tokens, peak": "{unshared_nodes_peak}", "unshared / KV": "{unshared_ratio:.2f}",
            "slack, peak": "{slack_max}", "worst": "{worst_step_ratio:.3f}"}),
        LEGEND,
    ])  # fmt: skip
    result = {"model": name, "results": rows}
    finish("kv", made, body, result, args.save)
    for r in rows:
        if r["ratio"] > LIMIT:
            progress(f"beams {r['beams']}: {r['ratio']:.3f} bytes held per live byte, more than {LIMIT:.2f}")
        if r["new_tokens"] < args.new_tokens:
            progress(f"beams {r['beams']}: the model's context ended it after {r['new_tokens']} tokens")
    return result


def measure(
    engine: Engine,
    prompt: str | Sequence[int],
    beams: int,
    new_tokens: int,
    search: Search | None = None,
    **options: Any,
) -> dict[str, Any]:
    """One search, trie beam search by default: peaks from its statistics, after every step (live tokens, pages in use),
    and the processor's seconds, of all threads, for the prompt and after it. `options` are of `Request`; without any,
    end-of-sequence is ignored."""
    pool, series, asked = engine.pool, [], search or Trie(beams=beams)
    result, options = None, options or {"ignore_eos": True}
    began, clock = time.process_time(), list[float]()
    for event in engine.stream(prompt, asked, max_new_tokens=new_tokens, **options):
        if not isinstance(event, Prefill):
            clock.append(time.process_time())
        if isinstance(event, Progress):
            held = len(event.tree.pages_held)
            if held != pool.used_pages:
                raise AssertionError(f"the tree holds {held} pages, the pool counts {pool.used_pages}")
            series.append([event.tree.live_tokens, held])
            if len(series) % 64 == 0:
                progress(f"beams {beams}: step {len(series)} of {new_tokens}")
        elif isinstance(event, Done):
            result = event.result
    assert result is not None
    stats, unit = result.stats, result.stats["kv_bytes_per_token"]
    slack = [pages * pool.page_size - live for live, pages in series]
    return {
        "beams": beams,
        "prompt_tokens": stats["prompt_tokens"],
        "new_tokens": stats["new_tokens"],
        "bytes_per_token": unit,
        "page_tokens": pool.page_size,
        "live_nodes_peak": stats["live_nodes_peak"],
        "kv_bytes_peak": stats["kv_bytes_peak"],
        "ratio": stats["kv_bytes_peak"] / (stats["live_nodes_peak"] * unit),
        "unshared_nodes_peak": stats["unshared_nodes_peak"],
        "unshared_ratio": stats["unshared_nodes_peak"] * unit / stats["kv_bytes_peak"],
        "slack_max": max(slack, default=0),
        "worst_step_ratio": max((pages * pool.page_size / live for live, pages in series[64:]), default=1.0),
        "seconds": stats["prefill_seconds"] + stats["decode_seconds"],
        "prompt_cpu": clock[0] - began,
        "decode_cpu": clock[-1] - clock[0],
        "score": result.outputs[0].score,
        "steps": series,
    }

"""Tree attention and whole steps of a Llama-2-7B against a GPU's limits and other engines.

Weights are random. Times of kernels are those of a CUDA graph that goes through every layer's own cache, so that
nothing is found in the L2 cache that would not be there in a step. Without a GPU it says so and does nothing.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine import Engine
from engine.compiling import compile_model
from engine.graphs import WORDS, make_runner
from engine.loading import LoadedModel
from engine.pool import PagePool
from kernels.tree_attention import tree_attention
from models.config import ModelShape
from models.fields import Fields
from models.llama import Llama
from search import Trie
from tools.bench import peers
from tools.bench.measure import cores, progress
from tools.bench.report import add_save_flag, finish, rows_table, stamp
from tools.kernels.scenes import scene

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 16384,
}
LEGEND = """*GB/s*: bytes of the live keys and values, each counted once, over the time of a layer's attention; *of
copy*: the same over the bandwidth of a large copy, read and written bytes counted. *x FlexAttention*, *x SDPA*: their
time over ours, on contiguous keys and a ready mask. *of floor*: (bytes of the weights, but for the embedding, and of
the live keys and values) / copy bandwidth, over the time of a step, search included. *x one beam*: the step's time over
that with one beam. *x transformers*: its time per token over ours, same prompt and beams."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("gpu", help="kernels and steps against a GPU's limits", description=__doc__)
    parser.add_argument("--prefix", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--queries", type=int, nargs="+", default=[15, 64])
    parser.add_argument("--beams", type=int, default=15)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--peer-prompt", type=int, default=1024, help="for transformers (%(default)s)")
    parser.add_argument("--runs", type=int, default=20, help="of each kernel; the median counts (%(default)s)")
    parser.add_argument("--layers", type=int, default=LLAMA_2_7B["num_hidden_layers"], help="(%(default)s)")
    parser.add_argument("--compile", nargs="+", default=["off", "on"], choices=["off", "on"])
    add_save_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure")
        return {}
    made = stamp(argv)
    config = LLAMA_2_7B | {"num_hidden_layers": args.layers}
    copy = copy_bandwidth(args.runs)
    progress(f"copy: {copy / 1e9:.0f} GB/s")
    with torch.inference_mode():
        attention = [
            measure_attention(config, prefix, queries, args.runs) for prefix in args.prefix for queries in args.queries
        ]
    steps = measure_steps(config, args)
    peer = measure_transformers(config, args)
    for row in attention:
        row["rate"] = row["bytes"] / row["seconds"]
        row["of_copy"] = row["rate"] / copy
        row |= {f"x_{rival}": row[f"{rival}_seconds"] / row["seconds"] for rival in ("flex", "sdpa")}
    for row in steps:
        row["of_floor"] = row["bytes"] / copy / row["seconds"]
    for row in steps:
        row["x_beam"] = row["seconds"] / one_beam(steps, row)["seconds"]
        same = "seconds" in peer and (peer["prompt"], peer["beams"]) == (row["prompt"], row["beams"])
        row["x_peer"] = peer["seconds"] / row["seconds"] if same else None
    body = "\n\n".join([
        f"Llama-2-7B of {args.layers} layers, bfloat16, random weights; copy {copy / 1e9:.0f} GB/s.",
        rows_table(attention, {
            "prefix": "{prefix}", "queries": "{queries}", "us": "{seconds:us.1f}", "GB/s": "{rate:G.0f}",
            "of copy": "{of_copy:.2f}", "x FlexAttention": "{x_flex:.1f}", "x SDPA": "{x_sdpa:.1f}",
            "largest difference": "{difference:.1e}"}),
        rows_table(steps, {
            "prompt": "{prompt}", "compile": "{compile}", "beams": "{beams}", "ms per step": "{seconds:ms.2f}",
            "of floor": "{of_floor:.2f}", "x one beam": "{x_beam:.2f}", "growth MB": "{growth:M.1f}",
            "x transformers": "{x_peer:.1f}"}),
        f"transformers: {describe(peer)}",
        LEGEND,
    ])  # fmt: skip
    result = {"copy_bytes_per_second": copy, "attention": attention, "steps": steps, "transformers": peer}
    finish("gpu", made, body, result, args.save)
    return result


# --- kernels ---


def seconds_of(work: Callable[[], object], runs: int) -> float:
    """Median time of work on the device."""
    return statistics.median(times_of(work, runs))


def times_of(work: Callable[[], object], runs: int) -> list[float]:
    """Seconds of each run of work on the device, by events."""
    times = []
    for _ in range(runs + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return times[3:]


def copy_bandwidth(runs: int) -> float:
    """Bytes per second of a copy on the device, read and written ones counted."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source), runs)


def measure_attention(config: Mapping[str, Any], prefix: int, queries: int, runs: int) -> dict[str, Any]:
    """Attention of one layer: ours, FlexAttention, masked scaled_dot_product_attention."""
    progress(f"attention: prefix {prefix}, {queries} queries")
    L, H = config["num_hidden_layers"], config["num_attention_heads"]
    D = config["hidden_size"] // H
    pool = PagePool(ModelShape(L, H, D, 1, None), prefix // 16 + queries, 16, torch.bfloat16, "cuda")
    k_LGSD, v_LGSD = pool.cache.k_LGSD.normal_(), pool.cache.v_LGSD.normal_()
    s = scene(pool, prefix, queries, word_buckets=WORDS)
    q_THD = torch.randn(queries, H, D, dtype=torch.bfloat16, device="cuda")
    ours = [lambda i=i: tree_attention(q_THD, k_LGSD[i], v_LGSD[i], s.layout, scale=D**-0.5) for i in range(L)]
    seconds = seconds_of(recorded(ours), runs) / L
    packed = [(k_LGSD[i, :, s.slots_S][None], v_LGSD[i, :, s.slots_S][None]) for i in range(L)]
    q_1HTD = q_THD.transpose(0, 1)[None].contiguous()
    sdpa = [lambda k=k, v=v: F.scaled_dot_product_attention(q_1HTD, k, v, attn_mask=s.visible_QS) for k, v in packed]
    flex = flex_attention(q_1HTD, s.visible_QS)
    expected = sdpa[0]()[0].transpose(0, 1)
    return {
        "prefix": prefix,
        "queries": queries,
        "seconds": seconds,
        "bytes": 2 * H * D * 2 * len(s.slots_S),
        "sdpa_seconds": seconds_of(recorded(sdpa), runs) / L,
        "flex_seconds": seconds_of(recorded([lambda k=k, v=v: flex(k, v) for k, v in packed]), runs) / L,
        "difference": float((ours[0]() - expected).abs().max()),
    }


def flex_attention(q_1HTD: Tensor, visible_QS: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """FlexAttention, compiled, with its block mask made beforehand."""
    from torch.nn.attention import flex_attention as flex

    blocks = flex.create_block_mask(
        lambda b, h, q, k: visible_QS[q, k], None, None, *visible_QS.shape, device=visible_QS.device
    )
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return lambda k, v: compiled(q_1HTD, k, v, block_mask=blocks, enable_gqa=True)  # type: ignore[return-value]


def recorded(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """All calls as one CUDA graph."""
    for call in calls[:2]:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


# --- steps ---


class RandomCheckpoint:
    """The part of a checkpoint's interface that a model uses; weights are drawn on the device when read."""

    def __init__(self, config: Mapping[str, Any], device: torch.device):
        self.fields, self.device, self.bytes = Fields(config, "config.json"), device, 0
        self.shapes: dict[str, tuple[int, ...]] = {}

    def check(self, expected: Mapping[str, tuple[int, ...]], **_: Any) -> dict[str, str]:
        """Accept any shapes."""
        self.shapes = dict(expected)
        return {}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Small random numbers; ones for norms."""
        made = {}
        for name in names:
            shape = self.shapes[name]
            x = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
            made[name] = x.normal_(std=0.02) if len(shape) > 1 else x.fill_(1)
            self.bytes += 0 if name == f"{Llama.names.embedding}.weight" else 2 * x.numel()
        return made


def measure_steps(config: Mapping[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Decoding steps, search and host included: one beam and many, by prompt and compilation."""
    progress("making a model")
    checkpoint = RandomCheckpoint(config, torch.device("cuda"))
    model = Llama(checkpoint, torch.bfloat16, torch.device("cuda")).eval()  # type: ignore[arg-type]
    rows = []
    for choice in sorted(args.compile):  # off before on
        if choice == "on":
            compile_model(model)
        for prompt in sorted({args.peer_prompt, *args.prefix}):
            pages = (prompt + (args.beams + 1) * (args.new_tokens + 16)) // 16 + 2
            pool = PagePool(model.shape, pages, 16, torch.bfloat16, "cuda")
            engine = Engine(LoadedModel(make_runner(model, pool, model.shape.vocab_size), model.shape))
            for beams in (1, args.beams):
                progress(f"steps: prompt {prompt}, {beams} beams, compile {choice}")
                rows.append(measure_step(engine, checkpoint.bytes, prompt, beams, args.new_tokens))
                rows[-1]["compile"] = choice
            del engine, pool
    return rows


def measure_step(engine: Engine, weights: int, prompt: int, beams: int, new_tokens: int) -> dict[str, Any]:
    """Median of three searches, after one that records the graphs."""
    ids = torch.randint(5, engine.shape.vocab_size, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    times, stats = [], {}
    for _ in range(4):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        [result] = engine.generate([ids], Trie(beams=beams), max_new_tokens=new_tokens, ignore_eos=True)
        stats = result.stats
        times.append(stats["decode_seconds"] / (stats["steps"] - 1))
    live = (prompt + stats["live_nodes_peak"]) / 2
    return {
        "prompt": prompt,
        "beams": beams,
        "seconds": statistics.median(times[1:]),
        "bytes": weights + live * stats["kv_bytes_per_token"],
        "growth": torch.cuda.max_memory_allocated() - before,
    }


def one_beam(steps: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same step with one beam."""
    return next(r for r in steps if r["beams"] == 1 and all(r[x] == row[x] for x in ("prompt", "compile")))


# --- transformers ---


def measure_transformers(config: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Its beam search on random weights, in a process of its own."""
    progress(f"transformers: prompt {args.peer_prompt}, {args.beams} beams")
    torch.cuda.empty_cache()
    prompt = torch.randint(5, config["vocab_size"], (args.peer_prompt,)).tolist()
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        spec = peers.spec("transformers", "", "bfloat16", args.beams, cores(), scratch, device="cuda", config=config)
        found = peers.measure(sys.executable, spec, prompt, args.new_tokens, 3)
    if "seconds" not in found:
        return {"absent": peers.outcome(found)}
    return {
        "prompt": args.peer_prompt,
        "beams": args.beams,
        "seconds": 1 / found["steps_per_second"]["max"],
        "growth": peers.growth(found),
        "version": found["versions"]["transformers"],
    }


def describe(peer: Mapping[str, Any]) -> str:
    if "seconds" not in peer:
        return peer["absent"]
    return (
        f"{peer['version']}, prompt {peer['prompt']}, {peer['beams']} beams: {peer['seconds'] * 1e3:.1f} ms per token, "
        f"growth {peer['growth'] / 1e6:.0f} MB"
    )

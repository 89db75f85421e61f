"""Stages of single kernels: tree attention beside its rivals, its programs' shapes, products with matrices."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.cache.pool import PagePool
from engine.step.graphs import WORDS
from kernels.experts import Routing, choose, routed
from kernels.tree_attention import tree_attention
from models.shape import ModelShape
from tools.bench import device as on_gpu
from tools.bench.gpu.random_models import code_bytes, random_codes, random_experts
from tools.bench.gpu.setting import PAGE, SMALL, Found, Setting
from tools.bench.report import comparison
from tools.kernels.contenders import Rival, flex, sdpa
from tools.kernels.scenes import scene

ROWS = (1, 16, 32, 64, 256)  # of products
OPTIONS = tuple(  # of programs of tree attention
    {"N": keys, "num_warps": warps, "num_stages": stages}
    for keys, warps, stages in itertools.product((32, 64, 128), (4, 8), (3, 5, 7))
)
ALONE = tuple({"ALONE": 1 << bits} for bits in (14, 15, 17, 18))  # bytes that one program merges
TURNS = ({"TURN": 2}, {"TURN": 4}, {"TURN": 2, "ALONE": 1 << 18})  # shares that it reads at a time
COLD = 1 << 29  # bytes of bfloat16 matrices, of which the first has left the caches when the last is read
MIXTURE = 128, 8, 2048, 768  # experts, those of a row, width, inner width
SHAPE = ("prefix", "queries", "kv_heads")  # of attention
ATTENTION = """*GB/s* divides the bytes of the live keys and values, each counted once, by the time of a layer's
attention in a CUDA graph that goes through every layer's own cache. *of copy* divides that by the bandwidth of a large
copy, with read and written bytes counted. *x FlexAttention* and *x SDPA* divide their times by ours; they get
contiguous keys and a ready mask. Each of these ratios is of times that were measured in turns."""
TUNE = """*x as it is* divides the time of the current choice by that of the other, measured in turns; the row of the
current choice itself shows how far such a ratio is from 1 by chance."""
PRODUCTS = """*of copy* is the bytes of the matrix divided by the time of a product, relative to the bandwidth of a
large copy. *x by int8* and *x by int4* divide the time in bfloat16 (cuBLAS) by that of the same product with weights of
8 or 4 bits. The three products of a row and the copy are measured in turns."""

EXPERTS = """*us* is the time of a layer's experts in a CUDA graph: choice, sorting, products and sums. *of copy* is the
bytes of the experts that any row chose, each counted once, divided by that time, relative to the bandwidth of a large
copy."""


def attention(s: Setting) -> Found:
    """Tree attention of one layer: ours, then FlexAttention and masked scaled_dot_product_attention."""
    H, queries = s.large["num_attention_heads"], sorted({*s.args.queries, s.args.beams})
    heads = [g for g in s.args.kv_heads if H % g == 0] or [H]
    shapes = [*itertools.product(heads, s.args.prefix, queries)]
    compared = shapes[: len(shapes) // len(heads)]
    with torch.inference_mode():
        rows = s.rows((case_of(*shape), partial(attend, s, *shape)) for shape in shapes)
        others: list[dict[str, Any]] = []
        for name, rival in (("SDPA", sdpa), ("FlexAttention", flex)):  # the one that is compiled comes last
            others += s.rows((f"{name}, {case_of(*shape)}", partial(beside, s, rival, *shape)) for shape in compared)
    for row in rows:
        same = [other for other in others if all(other[key] == row[key] for key in SHAPE)]
        for name in ("sdpa", "flex"):
            row[f"x_{name}"] = next((other["x_ours"] for other in same if other["rival"] == name), None)
        row["difference"] = max((other["difference"] for other in same), default=None)
    targets = [
        comparison(
            f"attention over {row['prefix']}, {row['queries']} queries, {row['kv_heads']} key/value heads, of copy",
            row["of_copy"],
            0.85,
        )
        for row in rows
        if row["queries"] == s.args.beams
    ]
    for rival, name in (("flex", "FlexAttention"), ("sdpa", "SDPA")):
        ratios = [row[f"x_{rival}"] for row in rows if row[f"x_{rival}"] is not None]
        targets.append(comparison(f"attention, least x {name}", min(ratios, default=None), 1.0))
    return Found(s.heading, rows, {
        "key/value heads": "{kv_heads}", "prefix": "{prefix}", "queries": "{queries}", "us": "{seconds:us.1f}",
        "GB/s": "{rate:G.0f}", "of copy": "{of_copy:.2f}", "x FlexAttention": "{x_flex:.1f}", "x SDPA": "{x_sdpa:.1f}",
        "largest difference": "{difference:.1e}",
    }, ATTENTION, targets)  # fmt: skip


def case_of(kv_heads: int, prefix: int, queries: int) -> str:
    """The name of a shape of attention."""
    return f"{kv_heads} key/value heads, {prefix} tokens, {queries} queries"


class Layers:
    """Keys and values of all layers, and a tree over them.

    Attributes:
        ours: calls of tree attention, one for each layer.
    """

    def __init__(self, s: Setting, kv_heads: int, prefix: int, queries: int):
        L, H = s.large["num_hidden_layers"], s.large["num_attention_heads"]
        D = s.large["hidden_size"] // H
        pool = PagePool(ModelShape(L, kv_heads, D, 1, None), prefix // PAGE + queries, PAGE, torch.bfloat16, s.device)
        self.k_LGSD, self.v_LGSD = pool.cache.k_LGSD.normal_(), pool.cache.v_LGSD.normal_()
        self.tree = scene(pool, prefix, queries, word_buckets=WORDS)
        self.q_THD = torch.randn(queries, H, D, dtype=torch.bfloat16, device=s.device)
        self.scale, self.bytes = D**-0.5, 2 * kv_heads * D * 2 * len(self.tree.slots_S)
        layers = zip(self.k_LGSD, self.v_LGSD, strict=True)  # a call that knew `self` would keep gigabytes in a cycle
        self.ours = [partial(tree_attention, self.q_THD, *kv, self.tree.layout, scale=self.scale) for kv in layers]

    def speed(self, seconds: float, copy: float) -> dict[str, float]:
        """The figures of our attention from the seconds of all layers and a copy's bytes per second."""
        each = seconds / len(self.ours)
        rate = self.bytes / each
        return {"seconds": each, "bytes": self.bytes, "rate": rate, "of_copy": rate / copy}


def attend(s: Setting, kv_heads: int, prefix: int, queries: int) -> dict[str, Any]:
    """One shape of tree attention."""
    layers = Layers(s, kv_heads, prefix, queries)
    copy, [seconds] = s.beside_copy(on_gpu.recorded(layers.ours))
    return {"prefix": prefix, "queries": queries, "kv_heads": kv_heads, **layers.speed(seconds, copy)}


def beside(s: Setting, rival: Callable[..., Rival], kv_heads: int, prefix: int, queries: int) -> dict[str, Any]:
    """Another attention of the same shape, in turns with ours."""
    layers = Layers(s, kv_heads, prefix, queries)
    pack, run = rival(layers.q_THD, layers.tree, layers.scale)
    calls = [partial(run, *pack(k, v)) for k, v in zip(layers.k_LGSD, layers.v_LGSD, strict=True)]
    ours, theirs = on_gpu.in_turns([on_gpu.recorded(layers.ours), on_gpu.recorded(calls)], s.args.runs)
    difference = float((layers.ours[0]() - calls[0]()).abs().max())
    return {
        "rival": rival.__name__, "prefix": prefix, "queries": queries, "kv_heads": kv_heads,
        "seconds": theirs / len(calls), "x_ours": theirs / ours, "difference": difference,
    }  # fmt: skip


def tune(s: Setting) -> Found:
    """Tree attention by the blocks of keys, warps and stages of its programs, and by how their shares are merged:
    as it is by default, and the best."""
    from kernels.tree_attention import triton  # absent on some machines

    usual, H = triton._sizes, s.large["num_attention_heads"]

    def case(group: int, queries: int, option: dict[str, int]) -> dict[str, Any]:
        sizes, alone = dict(option), option.get("ALONE", triton.ALONE)
        sizes.pop("ALONE", None)
        with torch.inference_mode():
            layers = Layers(s, H // group, s.args.prefix[0], queries)
            plain = on_gpu.recorded(layers.ours)
            with (
                mock.patch.object(triton, "_sizes", lambda *asked, **roomy: usual(*asked, **roomy) | sizes),
                mock.patch.object(triton, "ALONE", alone),
            ):
                copy, (before, seconds) = s.beside_copy(plain, on_gpu.recorded(layers.ours))
        return {"group": group, "queries": queries, "option": option, "x_usual": before / seconds,
                **layers.speed(seconds, copy)}  # fmt: skip

    rows = []
    for group, queries in itertools.product((1, 4), sorted({*s.args.queries, s.args.beams})):
        if H % group == 0:
            found = s.rows((f"group {group}, {queries} queries, {option}", partial(case, group, queries, option))
                           for option in ({}, *TURNS, *ALONE, *OPTIONS))  # fmt: skip
            rows += [*found[:1], *sorted(found[1:], key=lambda row: -row["x_usual"])[:4]]
    for row in rows:
        row["shape"] = ", ".join(f"{name} {value}" for name, value in row["option"].items()) or "as it is"
    return Found(s.heading, rows, {
        "heads to a key": "{group}", "queries": "{queries}", "program": "{shape}", "us": "{seconds:us.1f}",
        "of copy": "{of_copy:.2f}", "x as it is": "{x_usual:.2f}",
    }, TUNE)  # fmt: skip


def products(s: Setting) -> Found:
    """The products of a layer with its matrices, in bfloat16 and in small numbers."""
    E, M = s.large["hidden_size"], s.large["intermediate_size"]
    matrices = {"qkv": (3 * E, E), "out": (E, E), "up": (2 * M, E), "down": (E, M)}
    with torch.inference_mode():
        rows = s.rows((f"{name}, {n} rows", partial(multiply, s, name, *matrices[name], n))
                      for n in ROWS for name in matrices)  # fmt: skip
    return Found(s.heading, rows, {
        "matrix": "{matrix}", "rows": "{rows}", "bfloat16 us": "{seconds:us.1f}", "of copy": "{of_copy:.2f}",
        **{column: form for kind in SMALL for column, form in
           ((f"x by {kind}", f"{{x_{kind}:.2f}}"), (f"{kind} of copy", f"{{of_copy_{kind}:.2f}}"))},
    }, PRODUCTS)  # fmt: skip


def multiply(s: Setting, name: str, outs: int, width: int, rows: int) -> dict[str, Any]:
    """One matrix, by formats; each of several copies in turn, so that none is found in a cache."""
    x_TI = torch.randn(rows, width, dtype=torch.bfloat16, device=s.device)
    copies = min(16, max(2, -(-COLD // (2 * outs * width))))
    weights = [torch.randn(outs, width, dtype=torch.bfloat16, device=s.device) for _ in range(copies)]
    calls: dict[str, list[Callable[[], object]]] = {"bfloat16": [partial(F.linear, x_TI, w) for w in weights]}
    moved = {"bfloat16": 2 * outs * width}
    for kind in SMALL:
        layers = [random_codes(kind, outs, width, s.device) for _ in range(copies)]
        calls[kind], moved[kind] = [partial(layer, x_TI) for layer in layers], code_bytes(layers[0])
    graphs = {"bfloat16": on_gpu.recorded(calls["bfloat16"])}
    for kind in SMALL:
        if (graph := s.attempt(f"{kind} {name}", partial(on_gpu.recorded, calls[kind]))) is not None:
            graphs[kind] = graph
    copy, times = s.beside_copy(*graphs.values())
    seconds = {kind: time / copies for kind, time in zip(graphs, times, strict=True)}
    plain = seconds["bfloat16"]
    found = {"matrix": name, "rows": rows, "seconds": plain, "of_copy": moved["bfloat16"] / plain / copy}
    for kind in SMALL:
        own = seconds.get(kind)
        found[f"x_{kind}"], found[f"of_copy_{kind}"] = (plain / own, moved[kind] / own / copy) if own else (None, None)
    return found


def experts(s: Setting) -> Found:
    """A layer of experts, after the product of its router."""
    with torch.inference_mode():
        rows = s.rows((f"experts in {kind}, {n} rows", partial(route, s, kind, n))
                      for kind in ("none", *SMALL) for n in ROWS)  # fmt: skip
    X, chosen, *_ = MIXTURE
    return Found(f"Qwen3-30B-A3B's shape, {chosen} of {X} experts a row, random weights; {s.bandwidths}", rows, {
        "weights": "{weights}", "rows": "{rows}", "experts read": "{experts}", "us": "{seconds:us.1f}",
        "of copy": "{of_copy:.2f}",
    }, EXPERTS)  # fmt: skip


def route(s: Setting, kind: str, rows: int) -> dict[str, Any]:
    """Random rows; each of several copies of the layer in turn, so that none is found in a cache."""
    X, chosen, E, M = MIXTURE
    shapes, bf16, rules = ((2 * M, E), (E, M)), torch.bfloat16, Routing(chosen, normalized=True)
    x_TE, logits_TX = (torch.randn(rows, size, dtype=bf16, device=s.device) for size in (E, X))
    read = len(choose(logits_TX, rules)[0].unique())
    copies = min(16, max(2, -(-COLD // (2 * 3 * E * M * read))))
    layers = [[random_experts(kind, X, *shape, s.device) for shape in shapes] for _ in range(copies)]
    calls = [partial(routed, x_TE, logits_TX, *layer, rules, "silu") for layer in layers]
    copy, [seconds] = s.beside_copy(on_gpu.recorded(calls))
    tables = [x.table for x in layers[0]]
    size = sum(x.nbytes if isinstance(x, Tensor) else x.codes_OB.nbytes + x.scale_GO.nbytes for x in tables)
    name = "bfloat16" if kind == "none" else kind
    each = seconds / len(calls)
    moved = {"experts": read, "seconds": each, "of_copy": size * read // X / each / copy}
    return {"weights": name, "rows": rows} | moved

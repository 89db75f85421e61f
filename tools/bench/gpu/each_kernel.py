"""The first stage: each Triton kernel once, compared with its definition. It reports the times of the first call,
which compiles, and of later calls; how attention divided its work, and how many programs fit on a multiprocessor."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from engine.cache.pool import PagePool
from engine.progress import ProgressLine
from engine.step.gpu import compiled
from engine.step.packing import Chunk, pack
from kernels.experts import Routing, routed
from kernels.kv_fp8 import DTYPE as FP8
from kernels.kv_kinds import floats, parts, row_width, stored
from kernels.kv_write import HeadTransform, kv_write, rotary_write
from kernels.latent import LatentHeads, absorb_and_write
from kernels.layout import NULL_SLOT, LatentSizes
from kernels.linear.codes import Codes, row_bytes, unpacked
from kernels.rows import NextNodes, activation_mul, add_norm, log_softmax, next_nodes, sigmoid_mul, top_sums, xielu
from kernels.same_bits import asking
from kernels.short_conv import short_conv
from kernels.tree_attention import tree_attention
from models.shape import ModelShape
from tools.bench.gpu.random_models import random_experts
from tools.bench.gpu.recurrent_layers import LAYERS, layer
from tools.bench.gpu.setting import PAGE, SMALL, Found, Setting
from tools.bench.report import comparison
from tools.kernels.scenes import beams, crowded, prompt

LATER = 3  # calls after the first
MOST = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}  # allowed difference from float64
LATENT = LatentSizes(16, 128, 64, 512, 128, 1e-6, True)  # of DeepSeek-V2-Lite
TAPS = 3  # of the short convolution
AHEAD = "compiling all kernels in threads"  # the first case, whose row is in no table
SMOKE = """*error* is the largest difference from the definition (in float64 for floats); that of products, experts and
states is divided by the largest result. *first s* is the time of the first call, which loads the kernel (compiled
before, with the others, in threads), and *us* that of later calls, host included. *cut* describes how attention divides
its work: the rows of a tile; whether tiles are whole, merged by their last program, or merged later; the number of
programs, and how many of them fit on a multiprocessor."""

Plan = Callable[[PagePool], list[Chunk]]
Run = Callable[[str], Tensor]  # by the implementation: "triton" or "reference"


class Case(NamedTuple):
    """A call of a kernel; `most` is the largest allowed difference, `alone` replaces `ALONE` of attention, and a
    `relative` difference is in parts of the largest number of the definition."""

    name: str
    run: Run
    most: float
    alone: int | None = None
    relative: bool = False


def smoke(s: Setting) -> Found:
    """Each kernel once."""
    from kernels.gpu import INTERPRETED  # absent on some machines

    with torch.inference_mode():
        ahead = s.rows([] if INTERPRETED.value else [(AHEAD, partial(compile_ahead, s))])
        rows = s.rows((case.name, partial(once, s, case)) for case in cases(s))
    wrong = sum(not row["right"] for row in rows) + len(s.notes)
    took = "".join(f" Compiled in {row['seconds']:.0f} s." for row in ahead)
    return Found(f"Each kernel once, against its definition.{took}", rows, {
        "kernel": "{name}", "error": "{error:.1e}", "allowed": "{most:.0e}", "right": "{right:yes}",
        "first s": "{first:.2f}", "us": "{seconds:us.1f}", "cut": "{cut}",
    }, SMOKE, [comparison("kernels that fail or are wrong", wrong, 0, at_most=True)])  # fmt: skip


def compile_ahead(s: Setting, rounds: int = 2) -> dict[str, Any]:
    """Compile the kernels of all cases at once, in threads: one after the other they would take minutes. Nothing is
    launched, so a case that cannot be compiled fails when its turn comes. What attention launches depends on its
    compiled kernel, hence a second round."""
    from kernels.gpu import compiling  # absent on some machines

    line = ProgressLine()
    for _ in range(rounds):
        with compiling(lambda done, count: line.tell(compiled(done, count))):
            for case in cases(s):
                with contextlib.suppress(Exception), merging(case):
                    case.run("triton")
    return {"seconds": line.seconds}


def cases(s: Setting) -> Iterator[Case]:
    """All calls."""
    yield from of_attention(s)
    yield from of_others(s)


@contextlib.contextmanager
def merging(case: Case) -> Iterator[None]:
    """Context in which attention merges shares as a case has it."""
    from kernels.tree_attention import triton  # absent on some machines

    with mock.patch.object(triton, "ALONE", triton.ALONE if case.alone is None else case.alone):
        yield


def once(s: Setting, case: Case) -> dict[str, Any]:
    """Call a kernel, and its definition."""
    from kernels.tree_attention import triton  # absent on some machines

    cut, real = [], triton._grid

    def grid(*arguments: Any) -> tuple[int, int]:
        programs, split = real(*arguments)
        cut[:] = [f"{arguments[5]} rows, {('whole', 'last', 'later')[split]}, {programs} programs"]
        cut.extend(f"room {room}" for room in list(triton.ROOM.values())[-1:])
        return programs, split

    with mock.patch.object(triton, "_grid", grid), merging(case):
        found, first = timed(s, lambda: case.run("triton"), 1)
        _, later = timed(s, lambda: case.run("triton"), LATER)
    exact = case.run("reference").double()
    error = float((found.double() - exact).abs().nan_to_num(torch.inf).max())
    if case.relative:
        error /= float(exact.abs().max())
    return {"name": case.name, "error": error, "most": case.most, "right": error <= case.most, "first": first,
            "seconds": later, "cut": ", ".join(cut)}  # fmt: skip


def timed(s: Setting, work: Callable[[], Tensor], calls: int) -> tuple[Tensor, float]:
    """Call `work` several times; returns the last result, and the seconds of a call."""
    began = time.perf_counter()
    for _ in range(calls):
        out = work()
    if s.device.type == "cuda":
        torch.cuda.synchronize()
    return out, (time.perf_counter() - began) / calls


def of_attention(s: Setting) -> Iterator[Case]:
    """Tree attention: tiles of all sizes, whole and cut; windows, caps, dtypes, caches of 8 bits."""
    n, q, H = s.args.prefix[0], s.args.beams, s.large["num_attention_heads"]
    D, few = s.large["hidden_size"] // H, max(1, H // 4)

    def case(name: str, plan: Plan, kv_heads: int = few, dtype: torch.dtype = torch.bfloat16, alone: int | None = None,
             kept: torch.dtype | None = None, **options: Any) -> Case:  # fmt: skip
        run = attention(s, plan, (H, kv_heads, D), dtype, kept, options)
        return Case(f"attention, {name}", run, MOST[dtype], alone)

    def wide(pool: PagePool) -> list[Chunk]:
        return [beams(pool, n, [q] * 3)]

    yield case("one row", lambda pool: [prompt(pool, n, 1)], H)
    yield case(f"{q} rows, a key for each head", wide, H)
    yield case(f"{q} rows, merged later", wide, H, alone=-1)
    yield case(f"{q} rows, 4 heads to a key", wide)
    yield case("64 rows", lambda pool: [beams(pool, n, [64, 64])])
    yield case("a prompt's end, consecutive pages", lambda pool: [prompt(pool, n, min(500, n))])
    yield case("a prompt's end, pages apart", lambda pool: [prompt(crowded(pool), n, min(500, n))])
    yield case("16 trees", lambda pool: [beams(pool, 1 + i * n // 16, [9, 9]) for i in range(16)])
    yield case("a window and a cap, float16", wide, dtype=torch.float16, window=n // 2 + 1, cap=30.0)
    yield case("float32", wide, dtype=torch.float32)
    yield case("a cache in int8", wide, kept=torch.int8)
    yield case("a cache in fp8", wide, kept=FP8)
    yield Case("attention, one order of sums", in_one_order(attention(s, wide, (H, few, D), torch.bfloat16, None, {})),
               MOST[torch.bfloat16])  # fmt: skip
    width = LATENT.width
    for name, plan in (("a prompt's end", lambda pool: [prompt(pool, n, min(500, n))]), (f"{q} rows", wide)):
        run = attention(s, plan, (LATENT.heads, 1, width), torch.bfloat16, None, {"unread": LATENT.rotated})
        yield Case(f"attention, latents, {name}", run, MOST[torch.bfloat16])


def attention(
    s: Setting, plan: Plan, heads: Sequence[int], dtype: torch.dtype,
    kept: torch.dtype | None, options: dict[str, Any],
) -> Run:  # fmt: skip
    """A pass of random queries, keys and values; of latents, if keys have `unread` elements."""
    (H, G, D), unread = heads, options.get("unread", 0)
    made: list[Any] = []

    def run(impl: str) -> Tensor:
        if not made:  # not before its turn
            pool = PagePool(ModelShape(1, 1, 1, 1, None), 16 * (s.args.prefix[0] // PAGE + 40), PAGE)
            layout = pack(plan(pool), PAGE, impl="triton").layout
            k, v = (torch.randn(G, pool.cache.k_LGSD.shape[2], D, dtype=dtype, device=s.device) for _ in range(2))
            made.extend([layout.to(s.device), torch.randn(len(layout.positions_T), H, D, dtype=dtype, device=s.device)])
            made.extend(x if kept is None else cached(x, kept) for x in (k, k if unread else v))
        layout, q, k, v = made
        if impl == "reference":
            q, wide_k = q.double(), floats(parts(k), torch.float64)
            k, v = wide_k, wide_k if unread else floats(parts(v), torch.float64)
        return tree_attention(q, k, v, layout, scale=D**-0.5, impl=impl, **options)[..., unread:]

    return run


def in_one_order(run: Run) -> Run:
    """Calls a kernel as `COPPICE_SAME_BITS=on` does."""

    def asked(impl: str) -> Tensor:
        with asking("on"):
            return run(impl)

    return asked


def cached(x_GSD: Tensor, dtype: torch.dtype) -> Tensor:
    """Floats as a cache of 8 bits."""
    cache = torch.zeros(*x_GSD.shape[:-1], row_width(x_GSD.shape[-1], dtype), dtype=dtype, device=x_GSD.device)
    for part, rows in zip(parts(cache), stored(x_GSD, dtype), strict=True):
        part.copy_(rows)
    return cache


def of_others(s: Setting) -> Iterator[Case]:
    """Products with small numbers; norms, gates and writes of keys and values; log-probabilities and top sums."""
    E, V, q, device, bf16 = s.large["hidden_size"], s.large["vocab_size"], s.args.beams, s.device, torch.bfloat16
    for (kind, group), rows in itertools.product((("int4", 32), ("int8", E), ("float8", 32)), (1, 16, 64)):
        yield Case(f"product, {kind}, {rows} rows", product(s, kind, group, rows), 2e-2, relative=True)
    yield Case("product, floats in one order", product(s, "none", E, q), 2e-2, relative=True)
    for kind in ("none", *SMALL):
        yield Case(f"experts, {kind}", experts(s, kind), 2e-2, relative=True)
    for name, kind in LAYERS.items():
        yield Case(f"states, {name}", layer(kind, q, 1, device), 2e-2, relative=True)
    yield Case("short convolution", convolved(s), 2e-2, relative=True)
    for turned_too in (True, False):
        name = f"latents before attention, {'' if turned_too else 'not '}rotated"
        yield Case(name, latents(s, turned_too), 2e-2, relative=True)
    x_NE, w_E = torch.randn(q, E, dtype=bf16, device=device), torch.ones(E, dtype=bf16, device=device)
    x_THD, x_NV = x_NE.view(q, s.large["num_attention_heads"], -1), torch.randn(q, V, device=device)
    numbers = top_sums(x_NV, [0.0] * q, 2 * q, impl="torch")

    def normed(impl: str) -> Tensor:
        x = wider(x_NE, impl)
        return add_norm(x, [x], (wider(w_E, impl), None), eps=1e-5, impl=impl)[1]

    yield Case("sum and norm", normed, MOST[bf16])
    yield Case("gate", lambda impl: activation_mul(wider(x_NE, impl), "silu", impl=impl), 2 * MOST[bf16])

    def gated(impl: str) -> Tensor:
        x = wider(x_NE, impl)
        return sigmoid_mul(x, x, impl=impl)

    yield Case("gate of values", gated, 2 * MOST[bf16])
    curve_4 = torch.tensor([0.8, 0.6, 0.5, -1e-6], device=device)
    yield Case("xIELU", lambda impl: xielu(wider(x_NE, impl), curve_4, impl=impl), 2e-2, relative=True)
    steps = ("", bf16, 0.0), (" in int8", torch.int8, 1e-2), (" in fp8", FP8, 7e-2)  # of the largest elements
    for name, kept, most in steps:
        yield Case(f"write of keys and values{name}", partial(written, x_THD, kept), most, relative=most > 0)
    yield Case("norms and rotation of heads", partial(turned, x_THD), 2 * MOST[bf16])
    yield Case("log-probabilities", lambda impl: log_softmax(wider(x_NV, impl), V, impl=impl)[0], MOST[torch.float32])
    for k in (2 * q, 2 * s.args.catalogue_beams):
        yield Case(f"top {k} sums", lambda impl, k=k: top_sums(x_NV, [0.0] * q, k, impl=impl)[:-1], 0)
    yield Case("next nodes", partial(nodes, numbers, q, V), 0)


def wider(x: Tensor, impl: str) -> Tensor:
    """Float64 for a definition."""
    return x.double() if impl == "reference" else x


def product(s: Setting, kind: str, group: int, rows: int) -> Run:
    """Rows by a square matrix of random numbers; "none": of floats."""
    E = s.large["hidden_size"]
    x_NE = torch.randn(rows, E, dtype=torch.bfloat16, device=s.device)
    if kind == "none":
        matrix_EE = torch.randn(E, E, dtype=torch.bfloat16, device=s.device)

        def by_floats(impl: str) -> Tensor:
            from kernels.linear.triton import floats  # absent on some machines

            return x_NE.double() @ matrix_EE.double().T if impl == "reference" else floats(x_NE, matrix_EE)

        return by_floats
    codes = torch.randint(120, (E, row_bytes(kind, E)), dtype=torch.uint8, device=s.device)  # type: ignore[arg-type]
    scale = torch.rand(-(-E // group), E, device=s.device).half() / E
    matrix = Codes(kind, group, E, E, codes, scale)  # type: ignore[arg-type]
    exact_NE = x_NE.double() @ unpacked(matrix).double().T

    def run(impl: str) -> Tensor:
        from kernels.linear.triton import linear  # absent on some machines

        return exact_NE if impl == "reference" else linear(x_NE, matrix)

    return run


def experts(s: Setting, kind: str) -> Run:
    """Rows by two of eight random experts."""
    E, q, device = s.large["hidden_size"], s.args.beams, s.device
    up, down = (random_experts(kind, 8, *sizes, device) for sizes in ((E, E), (E, E // 2)))
    x_NE, logits_NX = (torch.randn(q, size, dtype=torch.bfloat16, device=device) for size in (E, 8))
    return lambda impl: routed(x_NE, logits_NX, up, down, Routing(2, normalized=True), "silu", impl=impl)


def convolved(s: Setting) -> Run:
    """The short convolution of LFM2 for tokens that follow each other, and the rows that it keeps."""
    E, T, drawn = s.large["hidden_size"], s.args.beams, partial(torch.randn, dtype=torch.bfloat16, device=s.device)
    x_TF, weight_KE, bias_E, rows_SE = drawn(T, 3 * E), drawn(TAPS, E), drawn(E), drawn(T + TAPS + 1, E)
    rows_SE[NULL_SLOT] = 0
    slots_T = torch.arange(len(rows_SE) - T, len(rows_SE), device=s.device)
    ancestors_TN = slots_T.unsqueeze(1) - torch.arange(1, TAPS, device=s.device)

    def run(impl: str) -> Tensor:
        x, weight, bias, rows = (wider(x, impl) for x in (x_TF, weight_KE, bias_E, rows_SE.clone()))
        return torch.cat([short_conv(x, weight, bias, rows, slots_T, ancestors_TN, impl=impl), rows])

    return run


def latents(s: Setting, turned_too: bool) -> Run:
    """Queries that are multiplied by the matrices of keys, and the cached rows, of latent attention."""
    sizes, T = LATENT, s.args.beams
    drawn = partial(torch.randn, dtype=torch.bfloat16, device=s.device)
    keys_HNC, values_HVC = (drawn(sizes.heads, n, sizes.rank) / n**0.5 for n in (sizes.plain, sizes.value))
    queries_TF, latent_TF = drawn(T, sizes.heads * (sizes.plain + sizes.rotated)), drawn(T, sizes.width)
    angle_TR = torch.linspace(0, 3, T, device=s.device).unsqueeze(1).expand(T, sizes.rotated)
    angles = [x.bfloat16() for x in (angle_TR.cos(), angle_TR.sin())] if turned_too else []
    slots_T = torch.arange(1, T + 1, device=s.device)

    def run(impl: str) -> Tensor:
        queries, latent, keys, values = (wider(x, impl) for x in (queries_TF, latent_TF, keys_HNC, values_HVC))
        heads = LatentHeads.of_stacked(sizes, torch.ones_like(keys[0, 0]), keys, values)
        cache = queries.new_zeros(1, T + 1, sizes.width)
        turns = [wider(x, impl) for x in angles]
        q_THD = absorb_and_write(cache, queries, latent, heads, turns, slots_T, impl=impl)
        return torch.cat([q_THD.flatten(0, 1), cache[0]])

    return run


def written(x_THD: Tensor, kept: torch.dtype, impl: str) -> Tensor:
    """A cache after a write."""
    (T, H, D), device = x_THD.shape, x_THD.device
    k, v = (cached(x_THD.new_zeros(H, T + 1, D), kept) for _ in range(2))
    kv_write(k, v, x_THD, -x_THD, torch.arange(1, T + 1, device=device), impl=impl)
    return torch.cat([floats(parts(x), torch.float64) for x in (k, v)])


def turned(x_THD: Tensor, impl: str) -> Tensor:
    """Queries, normed and rotated."""
    x_THD, (T, H, D) = wider(x_THD, impl), x_THD.shape
    k, v = (torch.zeros(H, T + 1, D, dtype=x_THD.dtype, device=x_THD.device) for _ in range(2))
    angle_TD = torch.linspace(0, 3, T, dtype=torch.float64, device=k.device).unsqueeze(1).expand(T, D)
    angles = tuple(x.to(x_THD.dtype) for x in (angle_TD.cos(), angle_TD.sin()))
    ones, slots_T = (x_THD.new_ones(D), None), torch.arange(1, T + 1, device=k.device)
    return rotary_write(k, v, x_THD, x_THD, x_THD, slots_T, HeadTransform(angles, ones, ones, 1e-5), impl=impl)


def nodes(numbers: Tensor, q: int, V: int, impl: str) -> Tensor:
    """Tokens and sums of the nodes that follow."""
    words_TC = torch.ones(q, 1, dtype=torch.int32, device=numbers.device)
    sums_n, token_n, _ = next_nodes([numbers], [NextNodes(q, {1, 2}, range(q), [1])], words_TC, V, impl=impl)
    return torch.cat([sums_n.double(), token_n.double()])

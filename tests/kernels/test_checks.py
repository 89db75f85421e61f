"""Operators refuse the same inputs, with the same error, whatever the implementation, before anything is read.

Some of these inputs would end the process if C++ took their addresses.
"""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch

from kernels import rows
from kernels.kv_write import kv_copier, kv_write
from kernels.kv_write import torch as kv_torch
from kernels.layout import KVCache, TreeLayout
from kernels.linear import Packed, linear
from kernels.stack import Angles, Matrix, Stack
from kernels.stack.calls import Call, Heads
from kernels.tree_attention import tree_attention
from tests.marks import IMPLS, INTERPRETED, needs_cpp

EVERY_IMPL = [*IMPLS, *(["triton"] if INTERPRETED else [])]
S = 40  # slots of the caches


def refusals(run, impls):
    """The errors of all implementations, which are one."""
    found = set()
    for impl in impls:
        with pytest.raises(ValueError) as refused:
            run(impl)
        found.add(str(refused.value))
    assert len(found) == 1, found
    return found.pop()


# --- KV writes ---


def write_arguments():
    k, v = torch.zeros(3, S, 4), torch.zeros(3, S, 4)
    return {"k_GSD": k, "v_GSD": v, "k_TGD": torch.ones(6, 3, 4), "v_TGD": torch.ones(6, 3, 4)} | {
        "slots_T": torch.tensor([5, 9, 11, 12, 13, 20])
    }


BAD_WRITES = {
    "int32 slots": ("slots_T", lambda x: x.int()),
    "float slots": ("slots_T", lambda x: x.double()),
    "strided slots": ("slots_T", lambda x: x.repeat_interleave(2)[::2]),
    "slots of two dimensions": ("slots_T", lambda x: x.view(2, 3)),
    "one slot without dimensions": ("slots_T", lambda x: x[0]),
    "a slot far away": ("slots_T", lambda x: x.index_fill(0, torch.tensor([5]), 10**9)),
    "a slot just outside": ("slots_T", lambda x: x.index_fill(0, torch.tensor([0]), S)),
    "a slot before the first": ("slots_T", lambda x: x.index_fill(0, torch.tensor([3]), -1)),
    "slots elsewhere": ("slots_T", lambda x: x.to("meta")),
    "more slots than rows": ("slots_T", lambda x: torch.cat([x, x])),
    "keys of another dtype": ("k_TGD", lambda x: x.double()),
    "values of another dtype": ("v_TGD", lambda x: x.bfloat16()),
    "values of another head size": ("v_TGD", lambda x: x[..., :3]),
    "keys of fewer heads": ("k_TGD", lambda x: x[:, :2]),
    "keys elsewhere": ("k_TGD", lambda x: x.to("meta")),
    "a cache in another order": ("k_GSD", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
    "a cache with gaps": ("v_GSD", lambda x: x.repeat(1, 1, 2)[..., ::2]),
    "caches of two sizes": ("v_GSD", lambda x: x[:, : S - 1].contiguous()),
    "caches of two dtypes": ("v_GSD", lambda x: x.double()),
    "a cache of all layers": ("k_GSD", lambda x: x.unsqueeze(0)),
    "an empty cache": ("k_GSD", lambda x: x[:, :0]),
}


@pytest.mark.parametrize("case", BAD_WRITES)
def test_writes_that_are_refused(case):
    name, spoil = BAD_WRITES[case]
    arguments = write_arguments()
    arguments[name] = spoil(arguments[name])
    said = refusals(lambda impl: kv_write(**arguments, impl=impl), EVERY_IMPL)
    assert re.match(r"(slots_T|[kv]_(TGD|GSD)): expected ", said)
    assert all(not arguments[name].any() for name in ("k_GSD", "v_GSD"))  # nothing was written, not even the rest


@needs_cpp
def test_the_operator_of_writes_that_a_compiler_calls_refuses_them_too():
    arguments = write_arguments()
    for case in ("int32 slots", "strided slots", "a slot far away"):
        name, spoil = BAD_WRITES[case]
        with pytest.raises(ValueError, match="slots_T: expected"):
            torch.ops.coppice.kv_write_cpp(**arguments | {name: spoil(arguments[name])})


def test_no_rows_are_written_nowhere():
    for impl in IMPLS:  # a GPU has no launch of no programs
        arguments = {name: x[:0] if x.shape[0] == 6 else x for name, x in write_arguments().items()}
        kv_write(**arguments, impl=impl)


@pytest.mark.parametrize(
    "make", [kv_copier, lambda k, v: lambda *slots: kv_torch.kv_copy(k, v, *slots)], ids=["cpp", "torch"]
)
@pytest.mark.parametrize(("source", "target"), [([1, 2], [3]), ([1], [S]), ([-1], [3]), ([1], [10**9])])
def test_copies_that_are_refused(make, source, target):
    k, v = torch.zeros(2, 3, S, 4), torch.zeros(2, 3, S, 4)
    with pytest.raises(ValueError, match=rf"expected slots below {S}, as many to read as to write, got \["):
        make(k, v)(source, target)
    make(k, v)([], [])


def test_caches_that_are_not_copied():
    k = torch.zeros(2, 3, S, 4)
    for bad in (k.transpose(0, 1), k.double(), k[:, :, :5], k[0], k.to("meta")):
        with pytest.raises(ValueError, match="v_LGSD: expected contiguous float32"):
            kv_copier(k, bad)
        with pytest.raises(ValueError, match=r"[kv]_LGSD: expected"):
            kv_copier(bad, k)


# --- attention ---


def attention_arguments(**changes):
    """Two trees: a prompt of three tokens, and two branch nodes behind a trunk of five tokens in two pages of four."""
    layout = TreeLayout(
        positions_T=torch.tensor([0, 1, 2, 5, 5]),
        write_slots_T=torch.tensor([8, 9, 10, 16, 17]),
        token_starts=torch.tensor([0, 3, 5], dtype=torch.int32),
        trunk_seen_T=torch.tensor([1, 2, 3, 5, 5], dtype=torch.int32),
        trunk_pages_RP=torch.tensor([[2, 0], [3, 5]], dtype=torch.int32),
        trunk_len_R=torch.tensor([3, 5], dtype=torch.int32),
        trunk_runs=torch.tensor([[0, 8, 3], [1, 12, 4], [1, 20, 1]], dtype=torch.int32),
        branch_len_R=torch.tensor([0, 2], dtype=torch.int32),
        branch_slots_RW=torch.tensor([[0] * 32, [16, 17] + [0] * 30]),
        branch_positions_RW=torch.tensor([[0] * 32, [5, 5] + [0] * 30], dtype=torch.int32),
        ancestry_TC=torch.tensor([[0], [0], [0], [1], [2]], dtype=torch.int32),
        page_size=4,
    )
    inputs = {name: changes.pop(name) for name in ("q_THD", "k_GSD", "v_GSD", "window") if name in changes}
    layout = dataclasses.replace(layout, **{name: spoil(getattr(layout, name)) for name, spoil in changes.items()})
    k, v = torch.randn(2, S, 4), torch.randn(2, S, 4)
    arguments = {"q_THD": torch.randn(5, 4, 4), "k_GSD": k, "v_GSD": v, "window": None}
    return arguments | {name: spoil(arguments[name]) for name, spoil in inputs.items()} | {"layout": layout}


def put(*place_and_value):
    *place, value = place_and_value

    def change(x):
        x = x.clone()
        x[tuple(place)] = value
        return x

    return change


LENGTHS = "trunk_len_R", "branch_len_R"
BAD_ATTENTION = {
    "queries of another dtype": ("q_THD", lambda x: x.double()),
    "queries of a head size of their own": ("q_THD", lambda x: x[..., :3]),
    "query heads that share no keys": ("q_THD", lambda x: x[:, :3]),
    "no query heads": ("q_THD", lambda x: x[:, :0]),
    "queries without heads": ("q_THD", lambda x: x[:, 0]),
    "fewer queries than tokens": ("q_THD", lambda x: x[:4]),
    "queries elsewhere": ("q_THD", lambda x: x.to("meta")),
    "keys in another order": ("k_GSD", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
    "fewer values than keys": ("v_GSD", lambda x: x[:, :-1].contiguous()),
    "values of another dtype": ("v_GSD", lambda x: x.half()),
    "a window before the token": ("window", lambda _: -1),
    **{
        f"{name}, {what}": (name, spoil)
        for name in ("positions_T", "write_slots_T", "token_starts", "trunk_seen_T", *LENGTHS, "trunk_runs")
        for what, spoil in {
            "another dtype": lambda x: x.int() if x.dtype == torch.int64 else x.long(),
            "strided": lambda x: x.repeat_interleave(2, 0)[::2],
            "elsewhere": lambda x: x.to("meta"),
        }.items()
    },
    **{
        f"{name}, {what}": (name, spoil)
        for name in ("branch_slots_RW", "branch_positions_RW", "ancestry_TC")
        for what, spoil in {
            "another dtype": lambda x: x.int() if x.dtype == torch.int64 else x.long(),
            "strided": lambda x: (
                x.repeat_interleave(2, 1)[:, ::2] if x.shape[1] > 1 else x.repeat_interleave(2, 0)[::2]
            ),
            "narrow": lambda x: x[:, :-1].contiguous(),
            "one row too few": lambda x: x[:-1],
        }.items()
    },
    "fewer positions": ("positions_T", lambda x: x[:-1]),
    "fewer write slots": ("write_slots_T", lambda x: x[:-1]),
    "fewer lengths": ("trunk_len_R", lambda x: x[:-1]),
    "fewer lengths of branches": ("branch_len_R", lambda x: x[:-1]),
    "fewer page tables": ("trunk_pages_RP", lambda x: x[:-1]),
    "page tables of another dtype": ("trunk_pages_RP", lambda x: x.long()),
    "runs of two numbers": ("trunk_runs", lambda x: x[:, :2].contiguous()),
    "no trees": ("token_starts", lambda x: x[:1]),
    "pages of nothing": ("page_size", lambda _: 0),
    "a write slot far away": ("write_slots_T", put(2, 10**9)),
    "a write slot before the first": ("write_slots_T", put(0, -1)),
    "a branch slot far away": ("branch_slots_RW", put(1, 1, 10**12)),
    "a branch slot just outside": ("branch_slots_RW", put(0, 31, S)),
    "a branch slot before the first": ("branch_slots_RW", put(1, 0, -5)),
    "tokens before the first": ("token_starts", put(0, 1)),
    "trees that overlap": ("token_starts", put(1, 6)),
    "more tokens than there are": ("token_starts", put(2, 6)),
    "a run far away": ("trunk_runs", put(1, 1, 2**31 - 3)),
    "a run just outside": ("trunk_runs", put(0, 1, S - 2)),
    "a run before the first": ("trunk_runs", put(2, 1, -1)),
    "a run of less than nothing": ("trunk_runs", put(2, 2, -1)),
    "a run of no tree": ("trunk_runs", put(2, 0, 2)),
    "a run of a tree before the first": ("trunk_runs", put(0, 0, -1)),
    "a trunk longer than its runs": ("trunk_seen_T", put(3, 6)),
    "a trunk of less than nothing": ("trunk_seen_T", put(1, -1)),
    "a page far away": ("trunk_pages_RP", put(1, 1, 10**9)),
    "a page just outside": ("trunk_pages_RP", put(0, 0, S // 4)),
    "a page before the first": ("trunk_pages_RP", put(1, 0, -1)),
    "a page table too short": ("trunk_pages_RP", lambda x: x[:, :1]),
}


@pytest.mark.parametrize("case", BAD_ATTENTION)
def test_attention_that_is_refused(case):
    name, spoil = BAD_ATTENTION[case]
    arguments = attention_arguments(**{name: spoil})
    said = refusals(lambda impl: tree_attention(**arguments, scale=0.5, impl=impl), EVERY_IMPL)
    assert ": expected " in said or "expected a layout of" in said


@pytest.mark.parametrize("impl", EVERY_IMPL)
def test_attention_that_is_not_refused(impl):
    """Numbers that a layout does not use may be anything: pages behind the trunk, filled up or left over."""
    arguments = attention_arguments(trunk_pages_RP=put(0, 1, 10**9))
    found = tree_attention(**arguments, scale=0.5, impl=impl)
    torch.testing.assert_close(found, tree_attention(**arguments, scale=0.5, impl="reference"))
    smaller = {name: arguments[name][:, :20].contiguous() for name in ("k_GSD", "v_GSD")}
    with pytest.raises(ValueError, match=r"expected .* slots below 20"):  # checked again for another cache
        tree_attention(**arguments | smaller, scale=0.5, impl=impl)


@needs_cpp
@pytest.mark.parametrize("case", BAD_ATTENTION)
def test_the_operator_that_a_compiler_calls_refuses_it_too(case):
    name, spoil = BAD_ATTENTION[case]
    if name in ("write_slots_T", *LENGTHS, "trunk_pages_RP", "page_size"):
        pytest.skip("not an argument of the operator")
    if "elsewhere" in case:
        pytest.skip("torch looks at the meta device itself")
    arguments = attention_arguments(**{name: spoil})
    layout, window = arguments.pop("layout"), arguments.pop("window")
    with pytest.raises(ValueError, match=r"expected|leads out of a cache"):
        torch.ops.coppice.tree_attention_cpp(*arguments.values(), layout.seen, 0.5, window)


@needs_cpp
def test_dtypes_that_cpp_does_not_have_are_refused_by_it_alone():
    arguments = attention_arguments(**dict.fromkeys(("q_THD", "k_GSD", "v_GSD"), torch.Tensor.double))
    assert tree_attention(**arguments, scale=0.5, impl="reference").dtype == torch.float64
    with pytest.raises(ValueError, match="impl 'cpp': expected float32, bfloat16 or float16 on a CPU"):
        tree_attention(**arguments, scale=0.5, impl="cpp")


# --- the stack ---


def matrix(outs: int, width: int, bias: torch.Tensor | None = None) -> Matrix:
    return Matrix(Packed(torch.zeros(-(-outs // 64) * 4, width, 16, 1), outs, width), bias)


def vectors(weight: torch.Tensor, bias: torch.Tensor | None = None) -> SimpleNamespace:
    return SimpleNamespace(weight=weight, bias=bias, eps=1e-5)


def stack(**changes):
    """A layer of two heads, whose matrices nobody reads."""
    on_heads = {"source": "heads", "heads": Heads(0, 2, 2, 2, 4, 2)}
    parts = {"norm": vectors(torch.ones(8)), "qkv": matrix(24, 8), "out": matrix(8, 8, torch.zeros(8)), **changes}

    def product(source: str, target: str, matrix: Matrix) -> Call:
        return Call("product", source, target, matrix=SimpleNamespace(matrix=matrix))

    norms = parts.get("q_norm"), parts.get("k_norm")
    q_norm, k_norm = (norm or vectors(torch.ones(4)) for norm in norms)
    more = {name: parts.get(name, False) for name in ("all_heads", "own_norms")}
    attention = [
        product("read", "heads", parts["qkv"]),
        *([Call("head_norms", target="heads", norm=q_norm, more=k_norm, **on_heads, **more)] if any(norms) else []),
        *([Call("rotate", target="heads", table=parts["table"], **on_heads)] if "table" in parts else []),
        Call("write", **on_heads),
        Call("attend", target="mixed", scale=0.5, **on_heads),
        product("mixed", "out", parts["out"]),
    ]
    convolution = [
        product("read", "gates", parts["qkv"]),
        Call("convolve", "gates", "convolved", norm=parts.get("conv")),
        product("convolved", "out", parts["out"]),
    ]
    mixer = convolution if "conv" in parts else attention
    calls = [
        Call("norm", "stream", "read", norm=parts["norm"]),
        *mixer,
        Call("add", "out", "stream"),
        product("stream", "up", matrix(16, 8)),
        Call("activate", "up", "middle", function="gelu"),
        product("middle", "read", parts.get("down", matrix(8, 16))),
        Call("add", "read", "stream"),
    ]
    return Stack(calls, dtype=torch.float32, width=8)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": vectors(torch.ones(7))},
        {"norm": vectors(torch.ones(8).double())},
        {"norm": vectors(torch.ones(16)[::2])},
        {"norm": vectors(torch.ones(8), torch.ones(9))},
        {"qkv": matrix(23, 8)},
        {"out": matrix(8, 8, torch.zeros(7))},
        {"out": matrix(8, 8, torch.zeros(8).double())},
        {"out": matrix(8, 16)},
        {"down": matrix(8, 8)},
        {"q_norm": vectors(torch.ones(8))},
        {"k_norm": vectors(torch.ones(4), torch.ones(8))},
        {"q_norm": vectors(torch.ones(4)), "all_heads": True},
        {"q_norm": vectors(torch.ones(4)), "own_norms": True},
    ],
)
def test_parts_that_make_no_stack(changes):
    stack()
    with pytest.raises(ValueError, match="expected"):
        stack(**changes)


@needs_cpp
@pytest.mark.parametrize("case", [case for case in BAD_ATTENTION if BAD_ATTENTION[case][0][1:] not in ("_THD", "_GSD")])
def test_a_stack_refuses_what_its_operators_refuse(case, monkeypatch):
    name, spoil = BAD_ATTENTION[case]
    if name == "window":
        pytest.skip("not an argument of the stack's call")
    monkeypatch.setattr("kernels.stack.function", lambda name: pytest.fail(f"{name} was called"))
    layout = attention_arguments(**{name: spoil})["layout"]
    cache = KVCache(torch.zeros(1, 2, S, 4), torch.zeros(1, 2, S, 4))
    with pytest.raises(ValueError, match="expected"):
        stack()(torch.zeros(5, 8), (), cache, layout)


@needs_cpp
@pytest.mark.parametrize("columns", [3, 6])
def test_a_stack_refuses_angles_that_are_no_pairs_of_a_head(columns):
    cache = KVCache(torch.zeros(1, 2, S, 4), torch.zeros(1, 2, S, 4))
    with pytest.raises(ValueError, match="angles: expected an even number of columns, at most 4"):
        stack(table=0)(
            torch.zeros(5, 8), [Angles((torch.ones(5, columns),) * 2)], cache, attention_arguments()["layout"]
        )


@needs_cpp
def test_a_stack_refuses_other_numbers_of_tables():
    cache = KVCache(torch.zeros(1, 2, S, 4), torch.zeros(1, 2, S, 4))
    with pytest.raises(ValueError, match="angles: expected 1 tables, got 0"):
        stack(table=0)(torch.zeros(5, 8), (), cache, attention_arguments()["layout"])


@needs_cpp
def test_a_stack_refuses_what_convolutions_do_not_take():
    layout, kept = attention_arguments()["layout"], KVCache(torch.zeros(1, 2, S, 4), torch.zeros(1, 2, S, 4))
    few, many = (dataclasses.replace(layout, ancestors_TN=torch.zeros(5, n, dtype=torch.int64)) for n in (1, 2))
    conv = vectors(torch.ones(3, 8), torch.zeros(8))
    for bad in (
        vectors(torch.ones(3, 7)),
        vectors(torch.ones(3, 8).double()),
        vectors(torch.ones(3, 8), torch.zeros(7)),
    ):
        with pytest.raises(ValueError, match="a convolution's"):
            stack(conv=bad, qkv=matrix(24, 8))
    with pytest.raises(ValueError, match="convolve: expected rows of 24, got 16"):
        stack(conv=conv, qkv=matrix(16, 8))
    convolving = stack(conv=conv, qkv=matrix(24, 8))
    rows, none = torch.zeros(1, 1, S, 8), (kept.k_LGSD[:0], kept.v_LGSD[:0])
    for cache, other, message in (
        (KVCache(*none, [(rows[..., :7],)], [(1, 0)]), many, "cache of convolutions"),
        (KVCache(*none, [(rows.half(),)], [(1, 0)]), many, "cache of convolutions"),
        (KVCache(*none, [(rows,)], [(1, 0)]), few, "ancestors_TN"),
        (KVCache(*none, [(rows,)], [(1, 0)]), layout, "ancestors"),
        (kept, many, "a stack's cache"),
    ):
        with pytest.raises(ValueError, match=message):
            convolving(torch.zeros(5, 8), (), cache, other)


# --- rows ---

X, W, HEADS, COS = torch.randn(3, 8), torch.ones(8), torch.randn(3, 2, 8), torch.ones(3, 4)
STARTS, SUMS = torch.tensor([[0, 6]]), torch.zeros(1, 2)
BAD_ROWS = {
    "rms_norm, weight": lambda impl: rows.rms_norm(X, W[:7], 1e-5, impl=impl),
    "rms_norm, dtype": lambda impl: rows.rms_norm(X, W.double(), 1e-5, impl=impl),
    "rms_norm, device": lambda impl: rows.rms_norm(X, W.to("meta"), 1e-5, impl=impl),
    "rms_norm, integers": lambda impl: rows.rms_norm(X.long(), W.long(), 1e-5, impl=impl),
    "rms_norm, empty": lambda impl: rows.rms_norm(X[:, :0], W[:0], 1e-5, impl=impl),
    "rms_norm, no rows": lambda impl: rows.rms_norm(X[0, 0], W[0], 1e-5, impl=impl),
    "layer_norm, bias": lambda impl: rows.layer_norm(X, W, W[:1], 1e-5, impl=impl),
    "layer_norm, dtype": lambda impl: rows.layer_norm(X.bfloat16(), W.bfloat16(), W, 1e-5, impl=impl),
    "layer_norm, shape": lambda impl: rows.layer_norm(X, W.view(2, 4), W, 1e-5, impl=impl),
    "rotary, fewer angles": lambda impl: rows.rotary(HEADS, COS[:1], COS[:1], impl=impl),
    "rotary, two shapes": lambda impl: rows.rotary(HEADS, COS, COS[:, :2], impl=impl),
    "rotary, odd": lambda impl: rows.rotary(HEADS, COS[:, :3], COS[:, :3], impl=impl),
    "rotary, wide": lambda impl: rows.rotary(HEADS[..., :2], COS, COS, impl=impl),
    "rotary, dtype": lambda impl: rows.rotary(HEADS, COS.half(), COS.half(), impl=impl),
    "rotary, no heads": lambda impl: rows.rotary(X, COS, COS, impl=impl),
    "activation_mul, odd": lambda impl: rows.activation_mul(X[:, :7], "silu", impl=impl),
    "activation_mul, integers": lambda impl: rows.activation_mul(X.int(), "silu", impl=impl),
    "activation_mul, name": lambda impl: rows.activation_mul(X, "swish", impl=impl),
    "activation, integers": lambda impl: rows.activation(X.int(), "relu", impl=impl),
    "activation, empty": lambda impl: rows.activation(X[:, :0], "relu", impl=impl),
    "activation, name": lambda impl: rows.activation(X, "mish", impl=impl),
    "xielu, numbers": lambda impl: rows.xielu(X, torch.ones(3), impl=impl),
    "xielu, their dtype": lambda impl: rows.xielu(X, torch.ones(4).double(), impl=impl),
    "sparsify, odd": lambda impl: rows.sparsify(X[:, :7], 1.0, impl=impl),
    "sparsify, factor": lambda impl: rows.sparsify(X, float("inf"), impl=impl),
    "add_weighted, no rows": lambda impl: rows.add_weighted(X, X, X, impl=impl),
    "add_weighted, weights": lambda impl: rows.add_weighted(X[:, None], X[:, None], X[:, :2], impl=impl),
    "add_weighted, width": lambda impl: rows.add_weighted(X[:, None], X[:, None, :7], X[:, :1], impl=impl),
    "add_weighted, too many": lambda impl: rows.add_weighted(torch.zeros(2, 17, 4), X[:2, None, :4], X, impl=impl),
    "sigmoid_mul, shape": lambda impl: rows.sigmoid_mul(X, X[:, :7], impl=impl),
    "sigmoid_mul, gates": lambda impl: rows.sigmoid_mul(X, X[:, :3], impl=impl),
    "sigmoid_mul, no gates": lambda impl: rows.sigmoid_mul(X, X[:, :0], impl=impl),
    "sigmoid_mul, dtype": lambda impl: rows.sigmoid_mul(X, X.bfloat16(), impl=impl),
    "sigmoid_mul, integers": lambda impl: rows.sigmoid_mul(X.int(), X.int(), impl=impl),
    "sigmoid_mul, no rows": lambda impl: rows.sigmoid_mul(X[0], X[0], impl=impl),
    "log_softmax, size": lambda impl: rows.log_softmax(X, 9, impl=impl),
    "log_softmax, less than none": lambda impl: rows.log_softmax(X, -1, impl=impl),
    "log_softmax, one row": lambda impl: rows.log_softmax(X[0], 8, impl=impl),
    "top_k, k": lambda impl: rows.top_k(X, 9, impl=impl),
    "top_k, less than none": lambda impl: rows.top_k(X, -1, impl=impl),
    "top_k, integers": lambda impl: rows.top_k(X.long(), 1, impl=impl),
    "top_sums, sums": lambda impl: rows.top_sums(X, [0.0, 0.0], 2, impl=impl),
    "top_sums, k": lambda impl: rows.top_sums(X, [0.0] * 3, 0, impl=impl),
    "top_sums, peaks": lambda impl: rows.top_sums(X, [0.0] * 3, 2, torch.zeros(3, 2), impl=impl),
    "top_sums, no rows": lambda impl: rows.top_sums(X[:0], [], 2, impl=impl),
    "top_sums_of_logits, size": lambda impl: rows.top_sums_of_logits(X, 0, [rows.TopSums([0.0] * 3, 2)], impl=impl),
    "top_sums_of_logits, sums": lambda impl: rows.top_sums_of_logits(X, 8, [rows.TopSums([0.0] * 2, 2)], impl=impl),
    "top_sums_of_logits, k": lambda impl: rows.top_sums_of_logits(X, 8, [rows.TopSums([0.0] * 3, 0)], impl=impl),
    "at_least, k": lambda impl: rows.at_least(X, 0.5, 9, impl=impl),
    "at_least, peaks": lambda impl: rows.at_least(X, 0.5, 2, torch.zeros(3, 1).double(), impl=impl),
    "at_least, strided peaks": lambda impl: rows.at_least(X, 0.5, 2, torch.zeros(3, 2)[:, ::2], impl=impl),
    "gumbel_argmax, keys": lambda impl: rows.gumbel_argmax(X, [1] * 5, impl=impl),
    "gumbel_argmax, large keys": lambda impl: rows.gumbel_argmax(X, [1] * 5 + [1 << 32], impl=impl),
    "gumbel_argmax, small keys": lambda impl: rows.gumbel_argmax(X, [1] * 5 + [-1], impl=impl),
    "window_max, width": lambda impl: rows.window_max(X[0], STARTS, SUMS, 9, impl=impl),
    "window_max, start": lambda impl: rows.window_max(X[0], STARTS, SUMS, 7, impl=impl),
    "window_max, start below 0": lambda impl: rows.window_max(X[0], STARTS - 1, SUMS, 2, impl=impl),
    "window_max, starts": lambda impl: rows.window_max(X[0], STARTS.int(), SUMS, 2, impl=impl),
    "window_max, tape": lambda impl: rows.window_max(X, STARTS, SUMS, 2, impl=impl),
    "window_wins, sums": lambda impl: rows.window_wins(X[0], STARTS, SUMS.double(), X[0, :2], impl=impl),
    "window_wins, best": lambda impl: rows.window_wins(X[0], STARTS, SUMS, X[0, :2].double(), impl=impl),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_rows_that_are_refused(case):
    assert "expected" in refusals(BAD_ROWS[case], ["torch", "cpp"])


# --- products ---


def products(**changes):
    """Arguments of a product."""
    packed = Packed(torch.zeros(4, 8, 16, 1), 3, 8)
    return {"x": torch.ones(2, 8), "matrix": packed, "bias": torch.ones(3), **changes}


BAD_PRODUCTS = {
    "width": {"x": torch.ones(2, 7)},
    "dtype": {"x": torch.ones(2, 8).bfloat16()},
    "float64": {"x": torch.ones(2, 8).double(), "bias": None},
    "integers": {"x": torch.ones(2, 8).long()},
    "bias": {"bias": torch.ones(4)},
    "bias dtype": {"bias": torch.ones(3).double()},
    "strided bias": {"bias": torch.ones(6)[::2]},
    "no rows": {"x": torch.tensor(1.0)},
}


@pytest.mark.parametrize("case", BAD_PRODUCTS)
def test_products_that_are_refused(case, monkeypatch):
    monkeypatch.setattr("kernels.linear.native.function", lambda name: pytest.fail(f"{name} was called"))
    with pytest.raises(ValueError, match="expected"):
        linear(**products(**BAD_PRODUCTS[case]))


BAD_PANELS = {
    "float64": (torch.zeros(4, 8, 16, 1).double(), 3, 8),
    "too few": (torch.zeros(3, 8, 16, 1), 3, 8),
    "another width": (torch.zeros(4, 8, 16, 1), 3, 9),
    "pairs of float32": (torch.zeros(4, 4, 16, 2), 3, 8),
    "strided": (torch.zeros(8, 8, 16, 1)[::2], 3, 8),
    "scales of floats": (torch.zeros(4, 8, 16, 1), 3, 8, torch.ones(3)),
    "int8 without scales": (torch.zeros(4, 2, 16, 4, dtype=torch.uint8), 3, 8),
    "scales of another size": (torch.zeros(4, 2, 16, 4, dtype=torch.uint8), 3, 8, torch.ones(4)),
    "scales of another dtype": (torch.zeros(4, 2, 16, 4, dtype=torch.uint8), 3, 8, torch.ones(3).double()),
}


@pytest.mark.parametrize("case", BAD_PANELS)
def test_panels_that_are_refused(case):
    with pytest.raises(ValueError, match="expected"):
        Packed(*BAD_PANELS[case])

"""Checks of the row-wise operators, the same for every implementation; see the front for arguments."""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.checks import expect, floats, within

ACTIVATIONS = "relu", "gelu", "gelu_tanh", "silu", "quick_gelu", "tanh", "relu_squared"  # C++ numbers them in
GATES = ("clamped_swiglu",)  # this order, and then these, functions of a gate and what it lets through
Vectors = tuple[Tensor, Tensor | None]  # of a norm: its weight, and the bias of a LayerNorm
MOST_ROWS = 16  # of a token, in `add_weighted`
SPAN = 128  # elements of a row whose largest is a peak


LogSoftmax = tuple[Tensor, Tensor, Tensor | None]  # log-probabilities, whether rows are finite, peaks


class TopSums(NamedTuple):
    """A request for the k greatest sums of a number of a row and an element of it, see `kernels.rows.top_sums`.

    Attributes:
        sums: the number of each row; a tensor is float32 on the device of the rows.
        k: how many; fewer are found if fewer are finite.
    """

    sums: Sequence[float] | Tensor
    k: int


class NextNodes(NamedTuple):
    """A request for the nodes that follow the top sums of a search, see `kernels.rows.next_nodes`.

    Attributes:
        width: how many; at most as many as there are sums.
        ends: tokens that end a hypothesis.
        parents: the tokens of the pass that have the rows of the sums, row by row.
        live_C: words of ancestry, as many as the pass has: bits of the slots that nodes have.
    """

    width: int
    ends: Collection[int]
    parents: Sequence[int]
    live_C: Sequence[int]


# --- a function for each operator, with its arguments ---


def rms_norm(x_NE: Tensor, weight_E: Tensor, eps: float) -> None:
    """Rows, and a vector of their width, perhaps more exact than they are."""
    norm_vectors(x_NE, (weight_E, None))


def layer_norm(x_NE: Tensor, weight_E: Tensor, bias_E: Tensor, eps: float) -> None:
    """Rows, and two vectors of their width."""
    vectors(x_NE, weight_E=weight_E, bias_E=bias_E)


def add_norm(
    x_NE: Tensor,
    addends: Sequence[Tensor],
    norm: Vectors | None,
    out_norm: Vectors | None = None,
    *,
    scale: float = 1.0,
    eps: float,
) -> None:
    """Rows, what is added to them, and vectors of their width."""
    if not 1 <= len(addends) <= 2:
        raise ValueError(f"addends: expected one or two, got {len(addends)}")
    for norms in (norm, out_norm):
        norm_vectors(x_NE, norms)
    for addend in addends:
        expect("addends", addend, x_NE.dtype, x_NE.shape, x_NE.device, contiguous=False)


def rotary(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> None:
    """Heads, and the angles that they are rotated by."""
    floats("x_THD", x_THD, 3)
    floats("cos_TR", cos_TR, 2)
    T, _, D = x_THD.shape
    R = cos_TR.shape[1]
    if R % 2 or R > D:
        raise ValueError(f"cos_TR: expected an even number of columns, at most {D}, got {R}")
    expect("cos_TR", cos_TR, x_THD.dtype, (T, R), x_THD.device, contiguous=False)
    expect("sin_TR", sin_TR, x_THD.dtype, (T, R), x_THD.device, contiguous=False)


def activation_mul(x_NM: Tensor, name: str) -> None:
    """Rows of two halves, and the name of a function."""
    function(name, ACTIVATIONS + GATES)
    floats("x_NM", x_NM)
    if x_NM.shape[-1] % 2:
        raise ValueError(f"x_NM: expected rows of two halves, got {list(x_NM.shape)}")


def activation(x_NM: Tensor, name: str) -> None:
    """Rows, and the name of a function."""
    function(name, ACTIVATIONS)
    vectors(x_NM)


def xielu(x_NM: Tensor, curve_4: Tensor) -> None:
    """Rows, and the four numbers of the function."""
    vectors(x_NM)
    expect("curve_4", curve_4, torch.float32, (4,), x_NM.device)


def sparsify(x_NM: Tensor, factor: float) -> None:
    """Rows of two halves, and a finite factor."""
    floats("x_NM", x_NM)
    if x_NM.shape[-1] % 2:
        raise ValueError(f"x_NM: expected rows of two halves, got {list(x_NM.shape)}")
    if not math.isfinite(factor):
        raise ValueError(f"factor: expected a finite number, got {factor}")


def add_weighted(x_TNE: Tensor, more_TME: Tensor, weights_TF: Tensor) -> None:
    """Rows of tokens, other rows of the same tokens, and a weight for each pair."""
    floats("x_TNE", x_TNE, 3)
    floats("more_TME", more_TME, 3)
    (T, N, E), M = x_TNE.shape, more_TME.shape[1]
    if N > MOST_ROWS:
        raise ValueError(f"x_TNE: expected at most {MOST_ROWS} rows of a token, got {N}")
    expect("more_TME", more_TME, x_TNE.dtype, (T, M, E), x_TNE.device, contiguous=False)
    expect("weights_TF", weights_TF, x_TNE.dtype, (T, N * M), x_TNE.device, contiguous=False)


def sigmoid_mul(x_NM: Tensor, gate_NM: Tensor, softplus: bool = False) -> None:
    """Rows, and gates of as many elements each as make a row."""
    floats("x_NM", x_NM, 2)
    floats("gate_NM", gate_NM, 2)
    (N, M), gates = x_NM.shape, gate_NM.shape[1]
    expect("gate_NM", gate_NM, x_NM.dtype, (N, gates), x_NM.device, contiguous=False)
    if M % gates if gates else M:
        raise ValueError(f"gate_NM: expected a divisor of {M} gates, got {gates}")


def log_softmax(x_NV: Tensor, size: int, out: LogSoftmax | None = None) -> None:
    """Rows, a number of their elements, and where the results go."""
    count("size", x_NV, size)
    if out is not None:
        N, V = x_NV.shape
        expect("out", out[0], torch.float32, (N, V), x_NV.device)
        expect("out", out[1], torch.bool, (N,), x_NV.device)
        if out[2] is not None:
            expect("out", out[2], torch.float32, (N, -(-V // SPAN)), x_NV.device)


def top_k(x_NV: Tensor, k: int) -> None:
    """Rows, and a number of their elements."""
    count("k", x_NV, k)


def top_sums(logp_NV: Tensor, sums: Sequence[float] | Tensor, k: int, peaks_NB: Tensor | None = None) -> None:
    """Rows, a sum for each of them, a number of values, and peaks of these rows."""
    floats("logp_NV", logp_NV, 2)
    if isinstance(sums, Tensor):
        expect("sums", sums, torch.float32, sums.shape[:1] or (1,), logp_NV.device)
    if len(sums) != len(logp_NV) or not len(sums):
        raise ValueError(f"sums: expected one for each of {len(logp_NV)} rows, and one or more, got {len(sums)}")
    if k < 1:
        raise ValueError(f"k: expected at least 1, got {k}")
    peaks(logp_NV, peaks_NB)


def next_nodes(numbers: Sequence[Tensor], wanted: Sequence[NextNodes], ancestry_TC: Tensor, vocab_size: int) -> None:
    """Numbers of top sums and a request for each, and ancestry words of the tokens."""
    expect("ancestry_TC", ancestry_TC, torch.int32, ancestry_TC.shape, ancestry_TC.device, contiguous=False)
    if len(numbers) != len(wanted) or not wanted or ancestry_TC.ndim != 2:
        raise ValueError(f"expected numbers for each of {len(wanted)} requests, one or more, got {len(numbers)}")
    for x, each in zip(numbers, wanted, strict=True):
        expect("numbers", x, torch.float64, (len(x),), ancestry_TC.device, contiguous=False)
        if not 0 < each.width <= len(x) // 2:
            raise ValueError(f"width: expected 1 to {len(x) // 2}, the sums that there are, got {each.width}")
        if len(each.live_C) != ancestry_TC.shape[1]:
            raise ValueError(f"live_C: expected {ancestry_TC.shape[1]} words, got {len(each.live_C)}")
        if not each.parents or min(each.parents) < 0 or max(each.parents) >= len(ancestry_TC):
            raise ValueError(f"parents: expected tokens below {len(ancestry_TC)}, got {list(each.parents)}")


def top_sums_of_logits(x_NV: Tensor, size: int, wanted: Sequence[TopSums]) -> None:
    """Rows, a number of their elements, and what is wanted of ranges of them, one after the other."""
    floats("x_NV", x_NV, 2)
    within("size", [size - 1], x_NV.shape[1], "numbers less 1")
    if not wanted or sum(len(sums) for sums, _ in wanted) != len(x_NV):
        raise ValueError(f"wanted: expected sums for {len(x_NV)} rows, got {[len(sums) for sums, _ in wanted]}")
    for sums, k in wanted:
        if not len(sums) or k < 1:
            raise ValueError(f"wanted: expected a row or more and at least 1 sum, got {len(sums)} and {k}")


def at_least(logp_NV: Tensor, least: float, k: int, peaks_NB: Tensor | None = None) -> None:
    """Rows, a number of their elements, and peaks of these rows."""
    count("k", logp_NV, k)
    peaks(logp_NV, peaks_NB)


def gumbel_argmax(logp_NV: Tensor, keys: Sequence[int]) -> None:
    """Rows, and two 32-bit numbers for each."""
    floats("logp_NV", logp_NV, 2)
    if len(keys) != 2 * len(logp_NV):
        raise ValueError(f"keys: expected {2 * len(logp_NV)} keys for {len(logp_NV)} rows, got {len(keys)}")
    within("keys", keys, 1 << 32, "numbers")


def window_max(tape_P: Tensor, start_RW: Tensor, sum_RW: Tensor, width: int) -> None:
    """A tape, the starts of windows on it, and a sum for each of them."""
    floats("tape_P", tape_P, 1)
    expect("sum_RW", sum_RW, torch.float32, start_RW.shape, tape_P.device)
    expect("start_RW", start_RW, torch.int64, sum_RW.shape, tape_P.device)
    if start_RW.dim() != 2 or not 1 <= width <= len(tape_P):
        raise ValueError(f"width: expected windows [rows, windows] of 1 to {len(tape_P)} samples, got {width}")
    if start_RW.numel():
        least, most = map(int, start_RW.aminmax())
        within("start_RW", [least, most], len(tape_P) - width + 1, "starts")


def window_wins(tape_P: Tensor, start_RW: Tensor, sum_RW: Tensor, best_N: Tensor) -> None:
    """The arguments of `window_max`, and a number for each sample."""
    window_max(tape_P, start_RW, sum_RW, len(best_N))
    expect("best_N", best_N, torch.float32, (len(best_N),), tape_P.device)


# --- what they share ---


def vectors(x_NE: Tensor, **vectors: Tensor) -> None:
    """Rows, and vectors of their width and dtype."""
    floats("x_NE", x_NE)
    for name, vector in vectors.items():
        expect(name, vector, x_NE.dtype, x_NE.shape[-1:], x_NE.device, contiguous=False)


def norm_vectors(x_NE: Tensor, norm: Vectors | None) -> None:
    """Rows, and the vectors of a norm; the weight of an RMSNorm is of their dtype or float32."""
    if norm is None:
        return vectors(x_NE)
    weight, bias = norm
    if bias is not None:
        return vectors(x_NE, weight_E=weight, bias_E=bias)
    floats("x_NE", x_NE)
    dtype = torch.float32 if weight.dtype == torch.float32 else x_NE.dtype
    expect("weight_E", weight, dtype, x_NE.shape[-1:], x_NE.device, contiguous=False)


def function(name: str, known: Sequence[str]) -> None:
    """The name of a function."""
    if name not in known:
        raise ValueError(f"name: expected one of {', '.join(known)}, got {name!r}")


def count(name: str, x_NV: Tensor, number: int) -> None:
    """Rows, and a number of their elements."""
    floats("x_NV", x_NV, 2)
    within(name, [number], x_NV.shape[1] + 1, name)


def peaks(x_NV: Tensor, peaks_NB: Tensor | None) -> None:
    """Peaks of these rows, or None."""
    if peaks_NB is not None:
        expect("peaks_NB", peaks_NB, torch.float32, (len(x_NV), -(-x_NV.shape[1] // SPAN)), x_NV.device)

"""What the operators on rows refuse, whatever the implementation; see the front for arguments."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.checks import expect, floats, within

ACTIVATIONS = "relu", "gelu", "gelu_tanh", "silu", "quick_gelu", "tanh"  # C++ numbers them in this order
Vectors = tuple[Tensor, Tensor | None]  # of a norm: its weight, and the bias of a LayerNorm
SPAN = 128  # elements of a row whose largest is a peak


class TopSums(NamedTuple):
    """A request for the k greatest sums of a number of a row and an element of it, see `kernels.rows.top_sums`.

    Attributes:
        sums: the number of each row; a tensor is float32 on the device of the rows.
        k: how many; fewer are found if fewer are finite.
    """

    sums: Sequence[float] | Tensor
    k: int


def vectors(x_NE: Tensor, **vectors: Tensor) -> None:
    """Rows, and vectors of their width and dtype."""
    floats("x_NE", x_NE)
    for name, vector in vectors.items():
        expect(name, vector, x_NE.dtype, x_NE.shape[-1:], x_NE.device, contiguous=False)


def angles(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> None:
    """Heads, and the angles that they are rotated by."""
    floats("x_THD", x_THD, 3)
    floats("cos_TR", cos_TR, 2)
    T, _, D = x_THD.shape
    R = cos_TR.shape[1]
    if R % 2 or R > D:
        raise ValueError(f"cos_TR: expected an even number of columns, at most {D}, got {R}")
    expect("cos_TR", cos_TR, x_THD.dtype, (T, R), x_THD.device, contiguous=False)
    expect("sin_TR", sin_TR, x_THD.dtype, (T, R), x_THD.device, contiguous=False)


def activation(name: str) -> None:
    """The name of a function."""
    if name not in ACTIVATIONS:
        raise ValueError(f"name: expected one of {', '.join(ACTIVATIONS)}, got {name!r}")


def halves(x_NM: Tensor) -> None:
    """Rows of two halves."""
    floats("x_NM", x_NM)
    if x_NM.shape[-1] % 2:
        raise ValueError(f"x_NM: expected rows of two halves, got {list(x_NM.shape)}")


def count(name: str, x_NV: Tensor, number: int) -> None:
    """Rows, and a number of their elements."""
    floats("x_NV", x_NV, 2)
    within(name, [number], x_NV.shape[1] + 1, name)


def peaks(x_NV: Tensor, peaks_NB: Tensor | None) -> None:
    """Peaks of these rows, or None."""
    if peaks_NB is not None:
        expect("peaks_NB", peaks_NB, torch.float32, (len(x_NV), -(-x_NV.shape[1] // SPAN)), x_NV.device)


def sums(logp_NV: Tensor, sums: Sequence[float] | Tensor, k: int) -> None:
    """Rows, a sum for each of them, and a number of values."""
    floats("logp_NV", logp_NV, 2)
    if isinstance(sums, Tensor):
        expect("sums", sums, torch.float32, sums.shape[:1] or (1,), logp_NV.device)
    if len(sums) != len(logp_NV) or not len(sums):
        raise ValueError(f"sums: expected one for each of {len(logp_NV)} rows, and one or more, got {len(sums)}")
    if k < 1:
        raise ValueError(f"k: expected at least 1, got {k}")


def keys(logp_NV: Tensor, keys: Sequence[int]) -> None:
    """Rows, and two 32-bit numbers for each."""
    floats("logp_NV", logp_NV, 2)
    if len(keys) != 2 * len(logp_NV):
        raise ValueError(f"keys: expected {2 * len(logp_NV)} keys for {len(logp_NV)} rows, got {len(keys)}")
    within("keys", keys, 1 << 32, "numbers")


def windows(tape_P: Tensor, start_RW: Tensor, sum_RW: Tensor, width: int) -> None:
    """A tape, the starts of windows on it, and a sum for each of them."""
    floats("tape_P", tape_P, 1)
    expect("sum_RW", sum_RW, torch.float32, start_RW.shape, tape_P.device)
    expect("start_RW", start_RW, torch.int64, sum_RW.shape, tape_P.device)
    if start_RW.dim() != 2 or not 1 <= width <= len(tape_P):
        raise ValueError(f"width: expected windows [rows, windows] of 1 to {len(tape_P)} samples, got {width}")
    if start_RW.numel():
        least, most = map(int, start_RW.aminmax())
        within("start_RW", [least, most], len(tape_P) - width + 1, "starts")

"""Calls the C++ row-wise operators (native.cpp): float32, bfloat16 and float16, a CPU, contiguous except for heads."""

import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.checks import native
from kernels.cpp import KINDS, address, function
from kernels.rows.checks import ACTIVATIONS, GATES, SPAN, TopSums
from kernels.tracing import like, register


def _run(name: str, x: Tensor, *arguments: Tensor | int | float) -> None:
    """Calls C++ with the element type of x, the threads, and the addresses of tensors among the arguments."""
    plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    function(name)(KINDS[x.dtype], torch.get_num_threads(), *plain)


def rms_norm(x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """See the front for arguments."""
    native(x_NE)
    x_NE, width = x_NE.contiguous(), x_NE.shape[-1]
    out_NE = torch.empty_like(x_NE)
    exact = weight_E.dtype == torch.float32
    _run("rms_norm", x_NE, x_NE, weight_E.contiguous(), out_NE, x_NE.numel() // width, width, eps, exact)
    return out_NE


def layer_norm(x_NE: Tensor, weight_E: Tensor, bias_E: Tensor, eps: float) -> Tensor:
    """See the front for arguments."""
    native(x_NE)
    x_NE, weight_E, bias_E, width = x_NE.contiguous(), weight_E.contiguous(), bias_E.contiguous(), x_NE.shape[-1]
    out_NE = torch.empty_like(x_NE)
    _run("layer_norm", x_NE, x_NE, weight_E, bias_E, out_NE, x_NE.numel() // width, width, eps)
    return out_NE


def rotary(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """See the front for arguments."""
    native(x_THD)
    cos_TR, sin_TR = cos_TR.contiguous(), sin_TR.contiguous()
    if x_THD.stride(2) != 1:
        x_THD = x_THD.contiguous()
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype)
    strides = x_THD.stride(0), x_THD.stride(1), out_THD.stride(0)
    _run("rotary", x_THD, x_THD, cos_TR, sin_TR, out_THD, *x_THD.shape, cos_TR.shape[1], *strides)
    return out_THD


def activation_mul(x_NM: Tensor, name: str) -> Tensor:
    """See the front for arguments."""
    native(x_NM)
    x_NM, width = x_NM.contiguous(), x_NM.shape[-1] // 2
    out = _half(x_NM)
    _run("activation_mul", x_NM, (ACTIVATIONS + GATES).index(name), x_NM, out, out.numel() // width, width)
    return out


def activation(x_NM: Tensor, name: str) -> Tensor:
    """See the front for arguments."""
    native(x_NM)
    x_NM, width = x_NM.contiguous(), x_NM.shape[-1]
    out_NM = torch.empty_like(x_NM)
    _run("activation", x_NM, ACTIVATIONS.index(name), x_NM, out_NM, x_NM.numel() // width, width)
    return out_NM


def xielu(x_NM: Tensor, curve_4: Tensor) -> Tensor:
    """See the front for arguments."""
    native(x_NM)
    x_NM, width = x_NM.contiguous(), x_NM.shape[-1]
    out_NM = torch.empty_like(x_NM)
    _run("xielu", x_NM, x_NM, curve_4.contiguous(), out_NM, x_NM.numel() // width, width)
    return out_NM


def sparsify(x_NM: Tensor, factor: float) -> Tensor:
    """See the front for arguments."""
    native(x_NM)
    x_NM, width = x_NM.contiguous(), x_NM.shape[-1] // 2
    out_NM = torch.empty_like(x_NM)
    _run("sparsify", x_NM, x_NM, out_NM, x_NM.numel() // (2 * width), width, factor)
    return out_NM


def add_weighted(x_TNE: Tensor, more_TME: Tensor, weights_TF: Tensor) -> Tensor:
    """See the front for arguments."""
    native(x_TNE)
    x_TNE, more_TME, weights_TF = x_TNE.contiguous(), more_TME.contiguous(), weights_TF.contiguous()
    out_TNE, (T, N, E) = torch.empty_like(x_TNE), x_TNE.shape
    _run("add_weighted", x_TNE, x_TNE, more_TME, weights_TF, out_TNE, T, N, more_TME.shape[1], E)
    return out_TNE


def sigmoid_mul(x_NM: Tensor, gate_NM: Tensor, softplus: bool = False) -> Tensor:
    """See the front for arguments."""
    native(x_NM)
    x_NM, gate_NM = x_NM.contiguous(), gate_NM if gate_NM.stride(1) == 1 else gate_NM.contiguous()
    out_NM, share = torch.empty_like(x_NM), x_NM.shape[1] // max(1, gate_NM.shape[1])
    _run("sigmoid_mul", x_NM, x_NM, gate_NM, out_NM, *x_NM.shape, gate_NM.stride(0), share, softplus)
    return out_NM


def log_softmax(x_NV: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """See the front for arguments."""
    native(x_NV)
    x_NV, out = x_NV.contiguous(), _log_softmax_like(x_NV)
    _run("log_softmax", x_NV, x_NV, *out, *x_NV.shape, size)
    return out


def top_k(x_NV: Tensor, k: int) -> Tensor:
    """See the front for arguments; float32 only."""
    native(x_NV, torch.float32)
    x_NV, out_N2K = x_NV.contiguous(), _pairs(x_NV, k)
    function("top_k")(torch.get_num_threads(), x_NV.data_ptr(), out_N2K.data_ptr(), *x_NV.shape, k)
    return out_N2K


def top_sums(logp_NV: Tensor, sums: Sequence[float], k: int, peaks_NB: Tensor | None = None) -> Tensor:
    """See the front for arguments; float32 only. Values are sorted and ties broken, so that the last number is inf."""
    native(logp_NV, torch.float32)
    logp_NV, sums_N = logp_NV.contiguous(), array("f", sums)
    out = _sums_like(logp_NV, sums, k).fill_(math.inf)
    pointers = logp_NV.data_ptr(), address(peaks_NB), sums_N.buffer_info()[0], out.data_ptr()
    function("top_sums")(*pointers, *logp_NV.shape, len(out) // 2)
    return out


class LogitSums:
    """The arrays that C++ reads and writes to find the top sums of logits; see `top_sums_of_logits`.

    Args:
        wanted: of ranges of rows, one after the other.
        width: of a row.

    Attributes:
        sums, finite, out, parts: memory, see operators.h.
    """

    def __init__(self, wanted: Sequence[TopSums], width: int):
        self.sums, self.parts = array("f"), array("q")
        for sums, k in wanted:
            self.sums.extend(sums.tolist() if isinstance(sums, Tensor) else sums)
            self.parts.extend((len(sums), min(k, len(sums) * width), 0))
        self.finite, self.out = array("b", bytes(len(self.sums))), array("d", bytes(16 * sum(self.parts[1::3])))

    def found(self) -> tuple[list[Tensor], list[bool]]:
        """The sums that C++ found."""
        out, first, found = torch.frombuffer(self.out, dtype=torch.float64), 0, []
        for k, count in zip(self.parts[1::3], self.parts[2::3], strict=True):
            numbers = out if len(self.parts) == 3 else out[first : first + 2 * k]
            found.append(numbers.view(2, k) if count == k else numbers.view(2, k)[:, :count])
            first += 2 * k
        return found, [x == 1 for x in self.finite]


def top_sums_of_logits(x_NV: Tensor, size: int, wanted: Sequence[TopSums]) -> tuple[list[Tensor], list[bool]]:
    """See the front for arguments."""
    native(x_NV)
    x_NV, asked = x_NV.contiguous(), LogitSums(wanted, x_NV.shape[1])
    places = (x.buffer_info()[0] for x in (asked.finite, asked.out, asked.sums, asked.parts))
    _run("top_sums_of_logits", x_NV, x_NV, *places, len(wanted), *x_NV.shape, size)
    return asked.found()


def at_least(logp_NV: Tensor, least: float, k: int, peaks_NB: Tensor | None = None) -> Tensor:
    """See the front for arguments; float32 only."""
    native(logp_NV, torch.float32)
    logp_NV, out_N2K = logp_NV.contiguous(), _pairs(logp_NV, k)
    pointers = logp_NV.data_ptr(), address(peaks_NB), out_N2K.data_ptr()
    function("at_least")(*pointers, *logp_NV.shape, k, least)
    return out_N2K


def gumbel_argmax(logp_NV: Tensor, keys: Sequence[int]) -> Tensor:
    """See the front for arguments."""
    native(logp_NV, torch.float32)
    logp_NV, words = logp_NV.contiguous(), array("I", keys)
    out_N = torch.empty(len(logp_NV), dtype=torch.int64)
    pointers = logp_NV.data_ptr(), words.buffer_info()[0], out_N.data_ptr()
    function("gumbel_argmax")(torch.get_num_threads(), *pointers, *logp_NV.shape)
    return out_N


def window_max(tape_P: Tensor, start_RW: Tensor, sum_RW: Tensor, width: int) -> Tensor:
    """See the front for arguments."""
    native(tape_P, torch.float32)
    tape_P, out_RN = tape_P.contiguous(), _samples(tape_P, start_RW, sum_RW, width)
    pointers = [x.data_ptr() for x in (tape_P, start_RW, sum_RW, out_RN)]
    function("window_max")(torch.get_num_threads(), *pointers, *start_RW.shape, width)
    return out_RN


def window_wins(tape_P: Tensor, start_RW: Tensor, sum_RW: Tensor, best_N: Tensor) -> Tensor:
    """See the front for arguments."""
    native(tape_P, torch.float32)
    tape_P, best_N, out_RW = tape_P.contiguous(), best_N.contiguous(), torch.empty_like(start_RW)
    pointers = [x.data_ptr() for x in (tape_P, start_RW, sum_RW, best_N, out_RW)]
    function("window_wins")(torch.get_num_threads(), *pointers, *start_RW.shape, len(best_N))
    return out_RW


# Empty results: of the operators above and, for compilers, of their fakes.


def _half(x_NM: Tensor) -> Tensor:
    return x_NM.new_empty(*x_NM.shape[:-1], x_NM.shape[-1] // 2)


def _log_softmax_like(x_NV: Tensor, _size: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    N, V = x_NV.shape
    logp_NV, finite_N = x_NV.new_empty(N, V, dtype=torch.float32), x_NV.new_empty(N, dtype=torch.bool)
    return logp_NV, finite_N, x_NV.new_empty(N, -(-V // SPAN), dtype=torch.float32)


def _pairs(x_NV: Tensor, k: int) -> Tensor:
    return x_NV.new_empty(len(x_NV), 2, k, dtype=torch.float64)


def _sums_like(logp_NV: Tensor, _sums: Sequence[float], k: int, _peaks_NB: Tensor | None = None) -> Tensor:
    return logp_NV.new_empty(2 * min(k, logp_NV.numel()) + 1, dtype=torch.float64)


def _samples(tape_P: Tensor, start_RW: Tensor, _sum_RW: Tensor, width: int) -> Tensor:
    return tape_P.new_empty(len(start_RW), width)


register("rms_norm", rms_norm, like)
register("layer_norm", layer_norm, like)
register("rotary", rotary, like)
register("activation_mul", activation_mul, lambda x_NM, name: _half(x_NM))
register("activation", activation, like)
register("xielu", xielu, like)
register("sparsify", sparsify, like)
register("add_weighted", add_weighted, like)
register("sigmoid_mul", sigmoid_mul, like)
register("log_softmax", log_softmax, _log_softmax_like)
register("top_k", top_k, _pairs)
register("top_sums", top_sums, _sums_like)
register("at_least", at_least, lambda x_NV, _least, k, _peaks_NB=None: _pairs(x_NV, k))
register("gumbel_argmax", gumbel_argmax, lambda x_NV, _keys: x_NV.new_empty(len(x_NV), dtype=torch.int64))
register("window_max", window_max, _samples)
register("window_wins", window_wins, lambda _tape_P, start_RW, _sum_RW, _best_N: torch.empty_like(start_RW))

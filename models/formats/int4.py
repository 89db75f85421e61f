"""Int4 linear layers: weights quantised in groups when loaded; activations rounded to int8 in groups on the fly on a
CPU, but kept in their dtype on a GPU."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kernels.linear.panels import LEVELS, shape
from models.formats import coded
from models.formats.floats import PackedLinear, has_kernels
from models.formats.grouped import GroupedLinear, GroupedRows, GroupedWeight
from models.trim import is_mapped, let_go

CHUNK = 1 << 18  # weights that are floats at once, in each thread, while a matrix is quantised
MOST_THREADS = 4  # threads that quantise: the C library keeps megabytes for each
STEPS = 7.0, 7.5, 8.0, 8.5, 9.0, 9.5  # candidates: steps between zero and the largest magnitude of a group
SPANS = 15.0, 15.75, 16.5, 17.25, 18.0  # candidates: steps from the least to the largest element, with a zero


class Int4(NamedTuple):
    """A format: groups of `size` elements share a scale, and with `zeros` a zero. The head's matrix has 8 bits unless
    `head`.

    Each group gets the candidate scale with the least squared error; plain rounding by the largest magnitude is one of
    the candidates. Without zeros a candidate is corrected once by least squares for its codes. Scales are float16 if
    that loses no bits.
    """

    size: int = 32
    zeros: bool = False
    head: bool = False

    def __call__(
        self,
        weights: Iterable[Tensor],
        biases: Sequence[Tensor] | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PackedLinear:
        """Make a layer, see `models.formats.linear.Format`."""
        found = [self.weight(weight) for weight in weights]
        return GroupedLinear(found, biases, dtype=dtype, device=device)

    def why_not(self, device: torch.device) -> str | None:
        """Return why int4 layers cannot run on this machine; None if they can."""
        if device.type != "cpu":
            return coded.why_not(device)
        return None if has_kernels(torch.float32, device) else "int4 weights need the C++ kernels"

    def bytes(self, outs: int, width: int, own: set[torch.dtype], dtype: torch.dtype, device: torch.device) -> int:
        """Return the bytes of a packed matrix, see `models.formats.linear.Format`."""
        scales = self.groups(width) * torch.float16.itemsize * (1 + self.zeros)
        if device.type != "cpu":
            return coded.code_bytes("int4", outs, width, scales)
        panels, steps, lanes, word = shape("int4", outs, width)
        return panels * lanes * (steps * word + scales)

    def group(self, width: int) -> int:
        """Return the number of elements of a group in rows of this width."""
        return min(self.size, width)

    def groups(self, width: int) -> int:
        """Return the number of groups of a row."""
        return -(-width // self.group(width))

    def weight(self, weight_OI: Tensor) -> GroupedWeight:
        """Return a weight [out, in] whose rows are quantised on request."""

        mapped = is_mapped(weight_OI)

        def rows(first: int, last: int) -> GroupedRows:
            wanted_OI = weight_OI[first:last]
            parts = wanted_OI.split(max(1, CHUNK // weight_OI.shape[1]))
            codes, scales, zeros, _ = zip(*_side_by_side(self.quantized, parts), strict=True)
            if mapped:
                let_go(wanted_OI)
            return GroupedRows(torch.cat(codes), torch.cat(scales), torch.cat(zeros) if self.zeros else None)

        outs, width = weight_OI.shape
        return GroupedWeight("int4", (outs, width), self.group(width), rows, levels=LEVELS)

    def quantized(self, weight_OI: Tensor, candidates: Sequence[float] | None = None) -> GroupedRows:
        """Quantise rows in groups.

        Args:
            weight_OI: floats.
            candidates: replace STEPS or SPANS; (8,) or (15,) is plain rounding.
        """
        outs, width = weight_OI.shape
        size = self.group(width)
        groups = self.groups(width)
        x_OGI = torch.zeros(outs, groups * size)
        x_OGI[:, :width] = weight_OI
        x_OGI = x_OGI.view(outs, groups, size)
        if width % size:  # padding does not affect the range of the last group
            x_OGI[:, -1, width % size :] = x_OGI[:, -1, :1]
        quantize = _with_zero if self.zeros else _symmetric
        codes, scale, zero = quantize(x_OGI, candidates or (SPANS if self.zeros else STEPS))
        return GroupedRows(codes.view(outs, -1)[:, :width].to(torch.uint8), scale, zero if self.zeros else None)


Part = TypeVar("Part")
Made = TypeVar("Made")


def _side_by_side(function: Callable[[Part], Made], parts: Sequence[Part]) -> Iterator[Made]:
    """Compute each part in one thread: dozens of small operators would lose more by waiting for threads."""
    threads = torch.get_num_threads()
    if threads == 1 or len(parts) == 1:
        yield from map(function, parts)
        return
    count = min(threads, len(parts), MOST_THREADS)
    with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(function, parts)
    torch.set_num_threads(threads)  # some libraries share the number between threads


def _symmetric(x_OGI: Tensor, candidates: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and zeros of 8: a group's largest magnitude becomes negative, which has one step more."""
    codes, spare = torch.empty_like(x_OGI), torch.empty_like(x_OGI)  # reused: the C library may keep what threads free
    at = torch.abs(x_OGI, out=spare).argmax(-1, keepdim=True)
    extreme = x_OGI.gather(-1, at)
    best = torch.full_like(extreme, -1.0)
    scale = torch.zeros_like(extreme)
    for steps in candidates:
        _steps(x_OGI, extreme / -steps, codes)
        size = torch.mul(codes, codes, out=spare).sum(-1, keepdim=True)
        product = codes.mul_(x_OGI).sum(-1, keepdim=True)
        gain = torch.where(size > 0, product.square() / size, 0)  # the reduction of the squared error
        better = gain > best
        scale = torch.where(better, torch.where(size > 0, product / size, 0), scale)
        best = torch.maximum(best, gain)
    scale = _half(scale)
    return _steps(x_OGI, scale, codes).add_(8), scale.squeeze(-1), torch.full_like(scale.squeeze(-1), 8.0)


def _half(scale: Tensor) -> Tensor:
    """Round scales to float16, except those outside its range: a matrix with such scales keeps float32."""
    size = scale.abs()
    return torch.where((size > 65504) | ((size < 2**-14) & (size > 0)), scale, scale.half().float())


def _steps(x_OGI: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Return the nearest steps from -8 to 7; 0 if the scale is 0."""
    return torch.div(x_OGI, scale, out=out).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-8, 7)


def _with_zero(x_OGI: Tensor, candidates: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and integer zeros for ranges that include 0; candidates go from the whole range of a group
    to smaller ones."""
    least, most = x_OGI.amin(-1, keepdim=True).clamp(max=0), x_OGI.amax(-1, keepdim=True).clamp(min=0)
    best = torch.full_like(least, torch.inf)
    scale, zero = torch.zeros_like(least), torch.zeros_like(least)

    def codes(scale: Tensor, zero: Tensor) -> Tensor:
        return (x_OGI / scale).nan_to_num_(0.0, 0.0, 0.0).round_().add_(zero).clamp_(0, 15)

    for steps in candidates:
        step = _half((most - least) / steps)
        for middle in (least * 15 / steps, (least + most) / 2 - 7.5 * step):
            at = (-middle / step).nan_to_num(0.0, 0.0, 0.0).round().clamp(0, 15)
            error = (codes(step, at).sub_(at).mul_(step) - x_OGI).square_().sum(-1, keepdim=True)
            better = error < best
            scale, zero = torch.where(better, step, scale), torch.where(better, at, zero)
            best = torch.minimum(best, error)
    return codes(scale, zero), scale.squeeze(-1), zero.squeeze(-1)

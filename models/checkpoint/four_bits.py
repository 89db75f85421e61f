"""bitsandbytes' 4-bit matrices (NF4, FP4; Dettmers et al. 2023), which are dequantised when they are read.

For the weight of a module M, `M.weight` has two codes per byte, the first in the high half, and `M.weight.quant_map`
the values of the 16 codes; each `blocksize` elements of the flattened matrix share a scale in `M.weight.absmax`. With
double quantisation the scales are 8-bit codes: `nested_quant_map[code] * nested_absmax[block] + nested_offset`.
`M.weight.quant_state.bitsandbytes__nf4` is JSON: shape, dtype, block sizes, offset. Elements are rounded to that dtype,
as in `bitsandbytes.functional.dequantize_4bit`.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from models.checkpoint.fields import Fields
from models.checkpoint.tensor_files import FETCH_AGAIN, FLOATS, LastFile, tensor_of
from models.checkpoint.tensors import TensorInfo
from models.errors import CheckpointError, show

STATE = re.compile(r"(?P<weight>.+)\.quant_state\.bitsandbytes__(nf4|fp4)")
PARTS = {"quant_map": 16, "absmax": None, "nested_absmax": None, "nested_quant_map": 256}  # -> their sizes
STATE_BYTES = 1 << 12
CHUNK = 1 << 21  # elements that are dequantised at once


@dataclass(frozen=True)
class FourBits(TensorInfo):
    """A matrix as it is after dequantisation: `shape` and `dtype` are those of floats.

    Args:
        own: the file's name of the codes.
        parts: the tensors of codes ("") and of `PARTS`.
        block, nested: elements that share a magnitude; magnitudes that share a nested one, 0 if they are floats.
        offset: added to 8-bit magnitudes.
        turned: the matrix is stored [outputs, inputs], and the model reads it the other way round.
    """

    own: str = ""
    parts: Mapping[str, TensorInfo] = field(default_factory=dict)
    block: int = 64
    nested: int = 0
    offset: float = 0.0
    turned: bool = False

    def read(self) -> Tensor:
        """Return the matrix. Raises CheckpointError if magnitudes are not finite or the file changed."""
        last = LastFile()
        part = {suffix: self._part(suffix, last) for suffix in self.parts}
        largest, numbers, codes = part["absmax"], part["quant_map"].float(), part[""].view(torch.uint8)
        if self.nested:
            scales = part["nested_absmax"].float().repeat_interleave(self.nested)[: len(largest)]
            largest = part["nested_quant_map"].float()[largest.int()] * scales + self.offset
        if not largest.isfinite().all() or not numbers.isfinite().all():
            raise self._error("its magnitudes are not finite")
        whole = torch.empty(math.prod(self.shape), dtype=self.dtype)
        step = max(1, CHUNK // (2 * self.block)) * 2 * self.block
        for first in range(0, len(whole), step):
            octets = codes[first // 2 : (first + step) // 2]
            found = numbers[torch.stack((octets >> 4, octets & 15), -1).flatten().int()][: len(whole) - first]
            scales = largest[first // self.block : (first + step) // self.block].float()
            whole[first : first + step] = found * scales.repeat_interleave(self.block)[: len(found)]
        return whole.view(self.shape[::-1]).T.contiguous() if self.turned else whole.view(self.shape)

    def _part(self, suffix: str, last: LastFile) -> Tensor:
        info, name = self.parts[suffix], f"{self.own}.{suffix}".removesuffix(".")
        found = tensor_of(info, name, last)
        if tuple(found.shape) != info.shape or found.dtype != info.dtype:
            raise self._error("it changed while the model was loaded")
        return found.flatten()

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{show(self.own)}: {what}", where=show(self.file), remedy=FETCH_AGAIN)


def with_four_bits(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors; those that represent a matrix of four bits are replaced by that matrix.

    Raises:
        CheckpointError: tensors are missing or do not fit their quantisation state, or such a state is damaged.
    """
    found, last = dict(tensors), LastFile()
    for name in tensors:
        if state := STATE.fullmatch(name):
            own = state["weight"]
            parts = {suffix: f"{own}.{suffix}".removesuffix(".") for suffix in ("", *PARTS)}
            there = {suffix: tensors[part] for suffix, part in parts.items() if part in tensors}
            found[own] = _matrix(own, _state(tensors[name], name, last), there)
            for part in (name, *parts.values()):
                if part != own:
                    found.pop(part, None)
    return found


def turn(tensors: dict[str, TensorInfo], names: Iterable[str]) -> None:
    """Turn matrices of four bits around that belong to layers of the class Conv1D, which transformers makes Linear."""
    for name in names:
        if isinstance(info := tensors.get(name), FourBits) and not info.turned:
            tensors[name] = replace(info, shape=info.shape[::-1], turned=True)


def _matrix(own: str, state: Fields, parts: Mapping[str, TensorInfo]) -> FourBits:
    shape = state.config.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or any(type(n) is not int or not 0 < n < 2**24 for n in shape):
        raise state.error("shape", "a list of two whole numbers, the outputs and inputs of a matrix")
    names = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS.values()}
    dtype = names[state.choice("dtype", names)]
    block, nested = state.int("blocksize"), state.int("nested_blocksize", 0)
    count = math.prod(shape)
    sizes: dict[str, int | None] = {**PARTS, "": -(-count // 2), "absmax": -(-count // block)}
    if nested:
        sizes["nested_absmax"] = -(-(sizes["absmax"] or 0) // nested)
    for suffix, size in sizes.items():
        part = f"{own}.{suffix}".removesuffix(".")
        if suffix.startswith("nested") and not nested:
            continue
        if suffix not in parts:
            raise CheckpointError(f"missing {show(part)}", where=state.file, remedy=FETCH_AGAIN)
        got, floats = parts[suffix], suffix and not (suffix == "absmax" and nested)
        elements = math.prod(got.shape) * (1 if suffix else got.dtype.itemsize)  # codes may be stored as floats' bytes
        if elements != size or (floats and got.dtype not in FLOATS.values()) or (
            suffix == "absmax" and nested and got.dtype != torch.uint8
        ):  # fmt: skip
            want = f"{size} {'floats' if floats else 'bytes'} for the shape {shape}"
            what = f"{show(part)}: expected {want}, got {list(got.shape)} of {str(got.dtype)[6:]}"
            raise CheckpointError(what, where=show(got.file), remedy=FETCH_AGAIN)
    offset = state.float("nested_offset", 0.0)
    return FourBits(
        parts[""].file, (shape[0], shape[1]), dtype, own=own, parts=parts, block=block, nested=nested, offset=offset
    )


def _state(info: TensorInfo, name: str, last: LastFile) -> Fields:
    """Read the JSON of a state. Raises CheckpointError."""
    where = f"{show(info.file)}: {show(name)}"
    if info.dtype != torch.uint8 or math.prod(info.shape) > STATE_BYTES:
        raise CheckpointError("expected the bytes of a short JSON object", where=where, remedy=FETCH_AGAIN)
    try:
        state = json.loads(bytes(tensor_of(info, name, last).flatten().tolist()))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not valid JSON: {show(error)}", where=where, remedy=FETCH_AGAIN) from error
    if not isinstance(state, dict):
        raise CheckpointError("expected a JSON object", where=where, remedy=FETCH_AGAIN)
    return Fields(state, where)

"""The tensors of a GGUF file in a checkpoint's form: with its names and order of rows; quantised matrices as blocks."""

import itertools
import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.linear.blocks import BLOCKS, Block
from models.checkpoint.experts import EXPERT, MOST_EXPERTS
from models.checkpoint.files import open_regular
from models.checkpoint.tensors import RowReader, TensorInfo
from models.errors import CheckpointError, reason_of, show
from models.formats.grouped import GroupedRows, GroupedWeight
from models.gguf.architectures import INTERLEAVED
from models.gguf.channel_scans import decays
from models.gguf.delta_nets import DELTA_NET, ordered
from models.gguf.latents import HEADS
from models.gguf.later import QKV, curve_of, grouped
from models.gguf.names import checkpoint_name
from models.gguf.reader import FETCH_AGAIN, GGUF, TAILS, HeaderEntry
from models.gguf.rotary import FACTORS
from models.gguf.scans import SCAN, joined, vector
from models.gguf.ternary import I2_S, form, ternary
from models.names import CURVE, HEAD
from models.quantized.parts import Form, ModuleSchemes, Part, Scheme, Source

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS = {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
WORDS = torch.int64, torch.int32, torch.int16, torch.uint8
FORMATS = BLOCKS | {"I2_S": I2_S}
SUPPORTED = ", ".join([*FLOATS, *FORMATS])
PLUS_ONE = (  # architectures whose norms are stored as 1 + weight
    "gemma",
    "gemma2",
    "gemma3",
    "nemotron",
    "qwen3next",
    "qwen35",
    "qwen35moe",
    "muse-glimmer",
)
STREAMS = re.compile(r"model\.altup_(unembed_)?projections\..+")  # one matrix for each
# Frequencies, which are in the configuration, and scales of activations, which are not rounded.
IGNORED = *FACTORS, "attn_rot_embd.weight", ".input_scale"


@dataclass(frozen=True)
class Stored(TensorInfo):
    """A tensor of a GGUF file. A quantised matrix has the dtype uint8 and the shape [outs, bytes of a row].

    Args:
        format: the format of its blocks.
        rows, row_bytes, start: number of rows, bytes of a row, and offset of the first row in the file.
        heads: the number of heads if rows of the matrix are in the order of interleaved rotation; 0: they are not.
        transposed: checkpoints have it [in, out].
        plus_one: the file has 1 + the values, as in norms of Gemma and Qwen3.5.
        negative_exp: the file has minus the exponential of the values, as in decays of gated delta nets; these are
            float64, so that their exponential is what the file has.
        pieces: ranges of rows or elements, in the order of checkpoints; empty: the file has that order.
        columns: ranges of the elements of a row, likewise.
        values: the tensor's numbers, from the metadata; empty: the tensor is in the file.
        below: another tensor, whose rows are this one's last rows.
        scale: a tensor with a number that multiplies all values; None: 1.
    """

    format: str = "F32"
    rows: int = 1
    row_bytes: int = 0
    start: int = 0
    heads: int = 0
    transposed: bool = False
    plus_one: bool = False
    negative_exp: bool = False
    pieces: tuple[range, ...] = ()
    columns: tuple[range, ...] = ()
    values: tuple[float, ...] = ()
    below: "Stored | None" = None
    scale: "Stored | None" = None

    @property
    def block(self) -> Block:
        """The format of its blocks, whose scales are floats if `scale` multiplies them."""
        block = FORMATS[self.format]
        return block if self.scale is None else replace(block, scales="floats")

    def factor(self) -> Tensor | None:
        """Read `scale` from the file, float32 [1]. Raises CheckpointError if it is no number."""
        found = None if self.scale is None else self.scale.read()
        if found is not None and not found.isfinite().all():
            raise CheckpointError("the scale of a tensor is not finite", where=show(self.file), remedy=FETCH_AGAIN)
        return found

    @property
    def elements(self) -> int:
        """The number of its elements."""
        if (block := FORMATS.get(self.format)) is None:
            return super().elements
        own = self.rows * self.row_bytes // block.bytes * block.size
        return own if self.below is None else own + self.below.elements

    def read(self) -> Tensor:
        """Return the tensor: a view of the file if its order is that of checkpoints. Raises CheckpointError."""
        if self.below is not None:
            shape = self.shape[0] - self.below.shape[0], *self.shape[1:]
            return torch.cat([replace(self, shape=shape, below=None).read(), self.below.read()])
        if self.values:
            return torch.tensor(self.values).view(self.shape)
        size, first = self.rows * self.row_bytes, self.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        dtype = (FLOATS | INTEGERS).get(self.format, torch.uint8)
        try:
            with open_regular(self.file) as file:
                if os.fstat(file.fileno()).st_size < self.start + size:
                    raise CheckpointError("the file became shorter while it was read", where=show(self.file))
                # Only its own pages: several tensors are mapped at once, and files may exceed limits on addresses.
                mapped = mmap.mmap(file.fileno(), self.start - first + size, access=mmap.ACCESS_COPY, offset=first)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot be mapped: {reason_of(error)}", where=show(self.file)) from None
        found = torch.frombuffer(mapped, dtype=dtype, count=size // dtype.itemsize, offset=self.start - first)
        found = found.view(self.rows, -1)
        if found.data_ptr() % dtype.itemsize:  # legal in the format, but unsuitable for vector loads
            found = found.clone()
        if len(self.shape) == 1:
            found = found.flatten()
        if self.heads:  # each head's even rows, then the odd ones; copied in the widest words that fit
            size = dtype.itemsize if len(self.shape) == 1 else self.row_bytes
            word = next(x for x in WORDS if size % x.itemsize == 0 and found.data_ptr() % x.itemsize == 0)
            words = found.view(word).unflatten(0, (self.heads, -1, 2))
            found = words.transpose(1, 2).flatten(0, 2).view(dtype)
        if self.pieces:
            found = torch.cat([found[some.start : some.stop] for some in self.pieces])
        if self.columns and self.format not in FORMATS:
            found = torch.cat([found[:, some.start : some.stop] for some in self.columns], 1)
        if self.plus_one:
            found = found.float() - 1
        if self.negative_exp:
            found = found.double().neg().log()
        return found.T if self.transposed else found.view(self.shape)

    def reader(self, name: str) -> "RowReader | BlockReader":
        """Return a reader of rows of the matrix, as floats."""
        rows = RowReader(self, name, self.start)
        return BlockReader(rows, self) if self.format in FORMATS else rows


class BlockReader:
    """Rows of a quantised matrix as float32, read from the file on request: see `RowReader`."""

    def __init__(self, rows: RowReader, info: Stored):
        self.rows, self.info, self.block, self.factor = rows, info, info.block, info.factor()
        self.width = info.row_bytes // self.block.bytes * self.block.size

    def __call__(self, rows: Sequence[int]) -> Tensor:
        """Return [len(rows), width]. Raises CheckpointError if the file has become shorter, or for broken blocks."""
        try:
            return _weight(self.block, self.rows(rows), self.width, self.factor).floats()
        except ValueError as error:
            raise CheckpointError(
                f"{self.rows.name}: {error}", where=show(self.info.file), remedy=FETCH_AGAIN
            ) from None


@dataclass(frozen=True)
class BlockScheme(Scheme):
    """The form in which a quantised weight is stored, see `models.quantized.parts.Scheme`; `info`: its tensor."""

    info: Stored

    def form(self, width: int) -> Block | Form:
        return form(width) if self.info.format == "I2_S" else self.info.block

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        block = self.info.block
        row_bytes = -(-width // block.size) * block.bytes
        return {"weight": Part(((outs, row_bytes),), (torch.uint8,))}

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        info = self.info
        weight = _weight(info.block, source.tensor("weight"), width, info.factor())
        if not info.columns:
            return weight
        order = torch.empty(width, dtype=torch.int64)
        order[torch.cat([torch.arange(some.start, some.stop) for some in info.columns])] = torch.arange(width)
        return replace(weight, order_I=order)


def _weight(block: Block, stored_OB: Tensor, width: int, factor: Tensor | None) -> GroupedWeight:
    """Return the weight whose rows are stored as these blocks, times a factor."""
    if block.number == I2_S.number:
        assert factor is not None
        return ternary(stored_OB, width, factor)

    def rows(first: int, last: int) -> GroupedRows:
        codes_OI, scale_OG, least_OG = block.rows(stored_OB[first:last])
        if not all(x_OG is None or x_OG.isfinite().all() for x_OG in (scale_OG, least_OG)):
            raise ValueError("scales are not finite")
        return GroupedRows(codes_OI, scale_OG if factor is None else scale_OG * factor, least_OG=least_OG)

    shape, stored = (len(stored_OB), width), (stored_OB, block) if factor is None else None
    return GroupedWeight(block.kind, shape, block.group, rows, least=block.least, stored=stored)


def tensors_of(file: GGUF, config: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the tensors by the names of checkpoints; tensors that the architecture lacks keep their own names.

    Args:
        config: from `read_config`.

    Raises:
        CheckpointError: a block format that is not supported, or two tensors of one name.
    """
    found: dict[str, Stored] = {}
    scales = _scales(file)
    beside = {*scales.values()}
    for own, entry in file.tensors.items():
        if own.endswith(IGNORED) or own in beside:
            continue
        if entry.format not in FLOATS | FORMATS | INTEGERS:
            what = f"tensor {show(own)} has the block format {entry.format}, which is not supported"
            raise file.error(what, f"supported: {SUPPORTED}")
        for name, stored in _named(file, config, own, entry):
            if name in found:
                raise file.error(f"two tensors stand for {show(name)}", FETCH_AGAIN)
            found[name] = stored if own not in scales else _scaled(file, scales[own], name, stored)
    joined(file, found)
    if halves := next((name for name, info in found.items() if info.below and (info.scale or info.below.scale)), None):
        what = f"{show(halves)} is two matrices in the file, with scales of their own, which is not supported"
        raise file.error(what, "Use a file in another format.")
    if config["model_type"] == "apertus":
        found |= _curves(file, config["num_hidden_layers"])
    return found


def _scales(file: GGUF) -> dict[str, str]:
    """Map the names of NVFP4 tensors with a scale of their own to the names of the scales."""
    found = {
        own: own.removesuffix("weight") + "scale" for own, entry in file.tensors.items() if entry.format == "NVFP4"
    }
    return {own: scale for own, scale in found.items() if scale in file.tensors}


def _scaled(file: GGUF, own: str, name: str, stored: Stored) -> Stored:
    """Return a tensor, or one expert's, with its scale. Raises CheckpointError if the scales do not fit it."""
    entry, expert = file.tensors[own], re.search(r"\.experts\.(\d+)\.", name)
    number = int(expert[1]) if expert else 0
    if entry.format != "F32" or len(entry.shape) != 1 or (number >= entry.shape[0] if expert else entry.shape != (1,)):
        what = f"tensor {show(own)}: expected a float32 for each matrix, got {entry.format} of {list(entry.shape)}"
        raise file.error(what, FETCH_AGAIN)
    each = torch.float32.itemsize
    scale = Stored(entry.file, (1,), torch.float32, row_bytes=each, start=entry.start + each * number)
    return replace(stored, scale=scale)


def _curves(file: GGUF, layers: int) -> dict[str, Stored]:
    """Return the parameters of layers' activations, which are metadata here."""
    found = {}
    for name, shape in CURVE.items():
        for layer, value in enumerate(curve_of(file, name, layers)):
            found[f"model.layers.{layer}.mlp.act_fn.{name}"] = Stored(file.path, shape, torch.float32, values=(value,))
    return found


def quantization_of(tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> ModuleSchemes | None:
    """Return `Checkpoint.quantization` for these tensors."""
    schemes = {
        name.removesuffix(".weight"): BlockScheme(info) for name, info in tensors.items() if info.format in FORMATS
    }
    for table in ("model.embed_tokens", "transformer.wte", "gpt_neox.embed_in", "transformer.word_embeddings"):
        if config["tie_word_embeddings"] and table in schemes:
            schemes[HEAD] = schemes[table]
    return ModuleSchemes(schemes) if schemes else None


def _named(file: GGUF, config: Mapping[str, Any], own: str, entry: HeaderEntry) -> Iterator[tuple[str, Stored]]:
    """A tensor by its name; files have one tensor for the experts of a layer, for norms that each head has of its own,
    and for matrices of streams."""
    arch = file.fields().str("general.architecture")
    name = checkpoint_name(arch, own) or own
    matrix = name.endswith(".weight") or "gate_up_proj" in name
    dims = 3 if (EXPERT in name or STREAMS.fullmatch(name)) and matrix else 2
    if "{}" in name and len(entry.shape) == dims and entry.shape[0] <= MOST_EXPERTS:
        (count, *shape), rows = entry.shape, math.prod(entry.shape[1:-1])
        parts = (("gate_up_proj", "gate_proj"), ("gate_up_proj", "up_proj")) if "gate_up_proj" in name else (("", ""),)
        rows, shape[0] = rows // len(parts), shape[0] // len(parts)
        for number, (half, (whole, part)) in itertools.product(range(count), enumerate(parts)):
            start = entry.start + (number * len(parts) + half) * rows * entry.row_bytes
            named = name.format(number).replace(whole, part) if whole else name.format(number)
            yield named, _stored(arch, config, named, entry, tuple(shape), rows, start)
        return
    if name.endswith("shared_expert_gate.weight") and len(entry.shape) == 1:
        yield name, _stored(arch, config, name, entry, (1, *entry.shape), 1, entry.start)
        return
    rows, shape = math.prod(entry.shape[:-1]), entry.shape
    if name.endswith(HEADS):
        shape = rows, entry.shape[-1]
    elif name.endswith("bias") and shape[0] == 1:  # ERNIE's routers have a row of them
        shape = shape[-1:]
    whole = _stored(arch, config, name, entry, shape, rows, entry.start)
    if DELTA_NET in name:
        yield from ordered(arch, config, name, whole)
        return
    if arch in ("mamba", "jamba"):
        yield name, decays(name, whole)
        return
    if SCAN.fullmatch(name):
        yield name, vector(name, whole)
        return
    if QKV in name and arch != "bailingmoe2":  # whose checkpoints have them kind by kind too
        yield from grouped(config, name, whole)
        return
    yield name, whole


def _stored(
    arch: str, config: Mapping[str, Any], name: str, entry: HeaderEntry, shape: tuple[int, ...], rows: int, start: int
) -> Stored:
    heads = 0
    if arch in INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        heads = heads if shape[0] % (2 * heads) == 0 else 0  # a shape that differs from the model's is refused later
    plus_one = arch in PLUS_ONE and name.endswith("norm.weight") and entry.format in FLOATS
    plus_one = plus_one and DELTA_NET not in name and (arch, name) != ("muse-glimmer", "model.norm.weight")
    dtype = torch.float32 if plus_one else (FLOATS | INTEGERS).get(entry.format, torch.uint8)
    transposed = False
    if entry.format in FORMATS:
        shape = (rows, entry.row_bytes)
    elif name.endswith(("conv.conv.weight", "conv1d.weight")) and len(shape) == 2:
        shape = (shape[0], 1, shape[1])
    elif arch == "gpt2" and name.startswith("transformer.h.") and len(shape) == 2:
        shape, transposed = shape[::-1], True
    tail = entry.start + math.prod(entry.shape[:-1]) * entry.row_bytes
    scale = Stored(entry.file, (1,), torch.float32, row_bytes=4, start=tail) if entry.format in TAILS else None
    return Stored(
        entry.file, shape, dtype, format=entry.format, rows=rows, row_bytes=entry.row_bytes, start=start, heads=heads,
        transposed=transposed, plus_one=plus_one, scale=scale,
    )  # fmt: skip

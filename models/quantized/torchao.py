"""torchao's tensor subclasses, as torchao 0.18 and transformers 5 write them to safetensors.

For a quantised weight of a module M, the key `M.weight` of the header's metadata has JSON: the subclass (`_type`), and
its attributes (`_data`), of which `block_size` tells how many outputs and inputs share a scale. Its tensors are
`M._weight_qdata`, `M._weight_scale` and, except for floats, `M._weight_zero_point`. The metadata, not the config, say
how a weight is stored.

Int8Tensor and IntxUnpackedToInt8Tensor (an integer of 1 to 8 bits per byte): w = (q - zero) * scale. Float8Tensor:
value * scale. Int4Tensor: q * scale + zero, with two elements per byte in two's complement, the even one in the low
half; scales and zeros are transposed. Int4TilePackedTo4dTensor: (q - 8) * scale + zero, in the order of NVIDIA's tensor
cores (PyTorch's `_convert_weight_to_int4pack`); GPUs of AMD have another order, which the file does not tell.
Activations are not rounded, even if `act_quant_kwargs`, `activation_quantization` or `activation_dtype` ask for it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.linear.panels import ZEROS
from models.checkpoint.fields import Fields
from models.errors import CheckpointError, show
from models.formats.grouped import GroupedWeight
from models.quantized.float8 import Float8
from models.quantized.parts import (
    EMBEDDING,
    FLOATS,
    TRANSPOSED,
    Form,
    Grid,
    Part,
    Quantization,
    Scheme,
    Source,
    smallest,
    unpack,
    unsupported,
)

NAME = "torchao"
NAMES = "tensor_names"  # the key of the metadata that lists all weights
WEIGHT, PREFIX = ".weight", "_weight_"
TILED = 1024  # inputs, to a multiple of which tiles are padded
INTEGERS = {f"int{bits}": bits for bits in range(1, 9)}
TYPES = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Int4Tensor", "Int4TilePackedTo4dTensor", "Float8Tensor")


@dataclass(frozen=True)
class Unpacked(Scheme):
    """Weights as one integer of `bits` bits per byte."""

    bits: int
    grid: Grid

    def form(self, width: int) -> Form:
        group = self.grid.group(width)
        return Form(smallest(self.bits, width, group, zeros=True), group, each=4 if self.bits == 8 else 2)

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        shapes = self.grid.shapes(outs, width)
        return {
            f"{PREFIX}qdata": Part(((outs, width),), (torch.int8,)),
            f"{PREFIX}scale": Part(shapes, FLOATS),
            f"{PREFIX}zero_point": Part(shapes, (torch.int8,), optional=True),
        }

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        stored, found, form = source.tensor(f"{PREFIX}qdata"), source.read(f"{PREFIX}zero_point"), self.form(width)
        scale_OG = self.grid.spread(source.scale(f"{PREFIX}scale"), outs, width)
        half, centre, zero_OG = 1 << self.bits - 1, int(ZEROS[form.kind]), None
        if found is not None and found.any():
            zero_OG = self.grid.spread(found.float() + centre, outs, width)

        def codes(first: int, last: int) -> Tensor:
            part_OI = stored[first:last]
            if self.bits < 8 and (part_OI.min() < -half or part_OI.max() >= half):
                raise source.error(f"{PREFIX}qdata has integers of more than {self.bits} bits")
            return part_OI.view(torch.uint8) + centre  # modulo 256

        return form.weight(outs, width, codes, scale_OG, zero_OG)


@dataclass(frozen=True)
class PlainInt4(Scheme):
    """Weights of four bits in groups of `group` columns, which have minimums."""

    group: int

    def form(self, width: int) -> Form:
        return Form("int4", min(self.group, width), least=True)

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        columns = Part(((-(-width // self.group), outs),), FLOATS)
        return {
            f"{PREFIX}qdata": Part(((outs, -(-width // 2)),), (torch.int8, torch.uint8)),
            f"{PREFIX}scale": columns,
            f"{PREFIX}zero_point": columns,
        }

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        stored, scale_GO = source.tensor(f"{PREFIX}qdata").view(torch.uint8), source.scale(f"{PREFIX}scale")
        least_GO = source.scale(f"{PREFIX}zero_point") - 8 * scale_GO

        def codes(first: int, last: int) -> Tensor:
            return unpack(stored[first:last] ^ 0x88, 4)[:, :width]

        return self.form(width).weight(outs, width, codes, scale_GO.T, None, least_GO.T)


@dataclass(frozen=True)
class TiledInt4(Scheme):
    """The same in tiles of 8 outputs and 16 inputs; outputs are padded to whole tiles, inputs to a multiple of 1024.

    `qdata` is int32 [outs / 8, ins / 128, 32, 4]. In the third dimension element 4 o + p has the output o of a tile. In
    the last, word w has two tiles of inputs: field 4 e + 2 s + h has the input 32 w + 16 s + 8 h + 2 p + e of 128.
    """

    group: int

    def form(self, width: int) -> Form:
        return Form("int4", min(self.group, width), least=True)

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        """Scales and zeros lie beside each other."""
        tiles, ins = -(-outs // 8), -(-width // TILED) * TILED
        return {
            f"{PREFIX}qdata": Part(((tiles, ins // 128, 32, 4),), (torch.int32,)),
            f"{PREFIX}scale_and_zero": Part(((-(-ins // self.group), 8 * tiles, 2),), FLOATS),
        }

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        stored, values_GO2 = source.tensor(f"{PREFIX}qdata"), source.scale(f"{PREFIX}scale_and_zero")
        groups = -(-width // self.group)
        scale_OG, zero_OG = (values_GO2[:groups, :, i].T for i in (0, 1))
        least_OG = zero_OG - 8 * scale_OG

        def codes(first: int, last: int) -> Tensor:
            start = first // 8
            fields = unpack(stored[start : -(-last // 8)], 4).view(-1, stored.shape[1], 8, 4, 4, 2, 2, 2)
            codes_OI = fields.permute(0, 2, 1, 4, 6, 7, 3, 5).flatten(2).flatten(0, 1)
            return codes_OI[first - 8 * start : last - 8 * start, :width]

        return self.form(width).weight(outs, width, codes, scale_OG, None, least_OG)


@dataclass(frozen=True)
class TorchAO(Quantization):
    """A config. `schemes` are those of the quantised modules, by the file's names, see `with_types`."""

    schemes: Mapping[str, Scheme] = field(default_factory=dict)
    where: str = ""

    def scheme(self, module: str, kind: str) -> Scheme | None:
        """Raises CheckpointError for an embedding whose rows cannot be read one by one."""
        found = None if kind == TRANSPOSED else self.schemes.get(module)
        if kind == EMBEDDING and found and not (isinstance(found, Unpacked | Float8) and found.grid.outs == 1):
            raise unsupported(
                Fields({}, self.where), f"torchao: the embedding {show(module)} without scales of each row"
            )
        return found

    def with_types(self, metadata: Mapping[str, str], where: str) -> "TorchAO":
        """Return the config with the schemes that the headers' metadata describe.

        Args:
            where: names the files in errors.

        Raises:
            CheckpointError: the metadata are not those of torchao, or a weight is of an unsupported type.
        """
        schemes = dict(self.schemes)
        for name in _names(metadata, where):
            told = Fields(_object(metadata, name, where), f"{where}, metadata of {show(name)}")
            if told.str("_type") != "Tensor":
                module = name.removesuffix(WEIGHT)
                if module == name:
                    raise unsupported(told, "torchao: quantized tensors that are no weights of modules")
                schemes[module] = _scheme(told)
        return TorchAO(schemes, where)


def parse(fields: Fields) -> TorchAO:
    """Read a config; the rest is in the weight files, see `with_types`."""
    return TorchAO()


def _parsed(metadata: Mapping[str, str], name: str) -> Any:
    """Return the JSON of a key; None if there is none."""
    try:
        return json.loads(metadata[name])
    except (KeyError, ValueError, RecursionError):
        return None


def _names(metadata: Mapping[str, str], where: str) -> list[str]:
    found = _parsed(metadata, NAMES)
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        remedy = "Save the model again with transformers 5 and a torchao of its time, as safetensors."
        raise CheckpointError(f"its metadata do not list torchao's tensors ({NAMES})", where=where, remedy=remedy)
    return found


def _object(metadata: Mapping[str, str], name: str, where: str) -> dict[str, object]:
    found = _parsed(metadata, name)
    if not isinstance(found, dict):
        raise CheckpointError(f"its metadata do not describe {show(name)} (expected a JSON object)", where=where)
    return found


def _scheme(told: Fields) -> Scheme:
    """Return the scheme that a weight's metadata describe. Raises CheckpointError if it is not supported."""
    kind, data = told.str("_type"), told.within("_data")
    if kind not in TYPES:
        raise unsupported(told, f"torchao: _type {kind[:80]!r} (read: {', '.join(TYPES)})")
    if not isinstance(tensors := told.config.get("_tensor_data_names") or [], list):
        raise told.error("_tensor_data_names", "a list of names")
    if refused := [name for name in ("act_pre_scale", "act_quant_scale") if name in tensors]:
        raise unsupported(told, f"torchao: {kind} with {refused[0]}, a scale of activations")
    if kind == "Float8Tensor":
        return Float8(_grid(data), f"{PREFIX}scale", codes=f"{PREFIX}qdata")
    grid = _grid(data)
    if kind in ("Int4Tensor", "Int4TilePackedTo4dTensor"):
        if grid.outs != 1 or grid.ins is None:
            raise unsupported(told, f"torchao: {kind} with block_size {[*grid]} (read: [1, inputs])")
        return (PlainInt4 if kind == "Int4Tensor" else TiledInt4)(grid.ins)
    bits = 8
    if kind == "IntxUnpackedToInt8Tensor":
        dtype = data.within("target_dtype").choice("_data", INTEGERS)
        bits = INTEGERS[dtype]
    return Unpacked(bits, grid)


def _grid(data: Fields) -> Grid:
    """Return which elements share a scale; without a block size, all do."""
    return Grid.block(data, "block_size") if data.config.get("block_size") else Grid(None, None)

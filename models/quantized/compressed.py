"""The `FORMATS` of compressed-tensors up to version 0.20.

w = (q - zero) * weight_scale. `weight_packed` has fields of q + 2^(bits - 1) along the inputs, `weight_zero_point`
similar fields of the zeros along the outputs, lowest first; they may cross words. The other formats store plain
integers, or float8. `input_scale` and `output_scale` are the steps of activations that are rounded alike everywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.linear import Steps
from kernels.linear.panels import LEVELS, ZEROS, GroupKind
from models.checkpoint.fields import Fields
from models.formats.grouped import GroupedWeight
from models.quantized import mxfp4, nvfp4
from models.quantized import parts as p
from models.quantized.float8 import MX, Float8
from models.quantized.parts import Form, Grid, Part, Quantization, Scheme, Source, unsupported

WHOLE = [("int", bits) for bits in range(1, 9)]
FORMATS = {  # formats -> types and bits of their weights
    "pack-quantized": WHOLE,
    "int-quantized": WHOLE,
    "float-quantized": [("float", 8)],
    "naive-quantized": [*WHOLE, ("float", 8)],
    "nvfp4-pack-quantized": [("float", 4)],
    "mxfp4-pack-quantized": [("float", 4)],
    "mxfp8-quantized": [("float", 8)],
}
SMALL = {  # formats that have only one form
    "nvfp4-pack-quantized": nvfp4.COMPRESSED,
    "mxfp4-pack-quantized": mxfp4.COMPRESSED,
    "mxfp8-quantized": Float8(Grid(*MX), "weight_scale"),
}
CLASSES = {p.LINEAR: ("Linear", "Module"), p.EMBEDDING: ("Embedding", "Module")}  # targets that mean torch's classes
INPUT, OUTPUT = "input_scale", "output_scale"
ORDERED = ("group", "dynamic", True)  # values of `actorder` with a `weight_g_idx`, up to version 0.19


@dataclass(frozen=True)
class Integers(Scheme):
    """Weights as integers.

    Args:
        packed: integers are packed into words; otherwise they are int8.
        bits: bits of an integer.
        grid: which elements share a scale.
        zeros: whether there are zero points.
        ordered: whether each column may belong to any group.
        stepped: which of the inputs and outputs of a layer have steps, `INPUT` or `OUTPUT`.
    """

    packed: bool
    bits: int
    grid: Grid
    zeros: bool
    ordered: bool
    stepped: tuple[str, ...] = ()

    def form(self, width: int) -> Form:
        return Form(self._kind(width), self.grid.group(width), zeros=self.zeros)

    def _kind(self, width: int) -> GroupKind:
        bits = self.bits if self.packed else 8
        return p.smallest(bits, width, self.grid.group(width), zeros=self.zeros)

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        shapes = self.grid.shapes(outs, width)
        found = {
            "weight_scale": Part(shapes, p.FLOATS),
            "weight_g_idx": Part(((width,),), p.INTEGERS, optional=not self.ordered),
        }
        if self.packed:
            found["weight_packed"] = Part(((outs, -(-width * self.bits // 32)),), (torch.int32,))
            found["weight_shape"] = Part(((2,),), p.INTEGERS, optional=True)
        else:
            found["weight"] = Part(((outs, width),), (torch.int8,))
        if self.zeros and self._packs_zeros:
            packed = -(-outs * self.bits // 32), self.grid.columns(width)
            found["weight_zero_point"] = Part((packed,), (torch.int32,))
        elif self.zeros:
            found["weight_zero_point"] = Part(shapes, (torch.int8, *p.INTEGERS))
        zero = Part(((), (1,)), (torch.int8, *p.INTEGERS), optional=True)
        for name in self.stepped:
            found |= {name: Part(((), (1,)), p.FLOATS), name.replace("scale", "zero_point"): zero}
        return found

    @property
    def _packs_zeros(self) -> bool:
        return self.packed and self.grid.outs is not None

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        shape = source.read("weight_shape") if self.packed else None
        if shape is not None and shape.tolist() != [outs, width]:
            raise source.error(f"weight_shape is {shape.tolist()}, expected {[outs, width]}")
        grid, bits, scale = self.grid, self.bits if self.packed else 8, source.scale("weight_scale")
        above = int(ZEROS[self._kind(width)]) - 2 ** (bits - 1)  # what codes in memory have more
        stored = source.tensor("weight_packed" if self.packed else "weight")
        zeros = source.tensor("weight_zero_point") if self.zeros else None
        if zeros is not None:
            zeros = p.unpack(zeros.T, bits)[:, :outs].T if self._packs_zeros else zeros.float() + 2 ** (bits - 1)
            zeros = zeros.float() + above
        groups_I = source.read("weight_g_idx")
        if groups_I is not None and groups_I.eq(-1).all():
            groups_I = None  # what some versions stored if nothing was ordered
        order_I = p.order_of(groups_I, grid.group(width), source)

        def codes(first: int, last: int) -> Tensor:
            part = stored[first:last]
            codes_OI = p.unpack(part, bits)[:, :width] + above if self.packed else part.view(torch.uint8) ^ 128
            return codes_OI if order_I is None else codes_OI[:, order_I]

        scale_OG = grid.spread(scale, outs, width)
        zero_OG = None if zeros is None else grid.spread(zeros, outs, width)
        steps = Steps(*(self._step(name, source) for name in (INPUT, OUTPUT)))
        more: dict[str, Any] = {"order_I": order_I, "levels": LEVELS if steps.before else None, "steps": steps}
        return self.form(width).weight(outs, width, codes, scale_OG, zero_OG, **more)

    def _step(self, name: str, source: Source) -> float:
        """Return the step of a layer's inputs or outputs; 0: they are not rounded."""
        if name not in self.stepped:
            return 0.0
        step, zero = source.scale(name).item(), source.read(name.replace("scale", "zero_point"))
        if step <= 0 or (zero is not None and zero.any()):
            raise source.error(f"{name} is {step}, expected a positive number, and no zero point")
        return step


@dataclass(frozen=True)
class Compressed(Quantization):
    """A config: targets with their schemes, in the order in which they are tried; and the modules that stay floats."""

    targets: tuple[tuple[Callable[[str, str], bool], Scheme | None], ...]
    ignore: tuple[Callable[[str, str], bool], ...]

    def scheme(self, module: str, kind: str) -> Scheme | None:
        """The package quantises layers and embeddings of torch's classes only."""
        if kind not in CLASSES or any(ignored(module, kind) for ignored in self.ignore):
            return None
        return next((scheme for meant, scheme in self.targets if meant(module, kind)), None)


def parse(fields: Fields) -> Compressed:
    """Read a config. Raises CheckpointError if it is not supported."""
    sparse = fields.sub("sparsity_config")
    if sparse and sparse.str("format", "dense") != "dense":
        raise unsupported(fields, f"the sparse format {sparse.str('format')!r}")
    if fields.sub("transform_config"):
        raise unsupported(fields, "compressed-tensors with transform_config")
    groups, found = fields.within("config_groups"), {}
    if fields.config.get("config_groups") is None:
        raise fields.error("config_groups", "an object of groups")
    for name in groups.config:
        group = groups.sub(name)
        if group is None or not p.names(group, "targets"):
            raise groups.error(name, "an object with targets")
        found |= dict.fromkeys(p.names(group, "targets"), _scheme(group, fields))
    # The order of the package: names, then expressions, then classes.
    order = sorted(found, key=lambda text: (any(text in names for names in CLASSES.values()), "re:" in text, text))
    targets = tuple((_target(text, fields), found[text]) for text in order)
    return Compressed(targets, tuple(_target(text, fields) for text in p.names(fields, "ignore")))


def _target(text: str, fields: Fields) -> Callable[[str, str], bool]:
    """Return a test of modules: by name, by class, or by an expression (`re:`) that matches the beginning of a name."""
    if not text.startswith("re:"):
        return lambda module, kind: text in (module, *CLASSES[kind])
    expression = p.pattern(text.removeprefix("re:"), fields)
    return lambda module, _: expression.match(module) is not None


def _scheme(group: Fields, fields: Fields) -> Scheme | None:
    """Return the scheme of a group; None: floats. Raises CheckpointError if it is not supported."""
    if not any(group.sub(name) for name in ("weights", "input_activations", "output_activations")):
        return None
    layout, weights = group.str("format", None) or fields.str("format", ""), _arguments(group, "weights")
    if weights is None:
        raise unsupported(fields, f"compressed-tensors that rounds activations of {p.names(group, 'targets')} alone")
    if layout not in FORMATS:
        raise unsupported(fields, f"compressed-tensors in the format {layout!r} (read: {', '.join(FORMATS)})")
    kind, bits = weights.str("type", "int"), weights.int("num_bits", 8)
    zeros = not weights.bool("symmetric", default=True)
    if (kind, bits) not in FORMATS[layout] or (zeros and kind == "float"):
        read = ", ".join(f"{kind} of {bits}" for kind, bits in FORMATS[layout])
        zeros = " with zero points" if zeros else ""
        raise unsupported(fields, f"{layout} with weights of {bits} bits, {kind}{zeros} (read: {read})")
    if weights.config.get("dynamic"):
        raise unsupported(fields, f"{layout} with dynamic weights")
    stepped = _stepped(group, kind, fields)
    if INPUT not in stepped:
        _check_inputs(group, kind, fields)
    if layout in SMALL:
        return SMALL[layout]
    grid = _grid(weights, fields)
    if kind == "float":
        return Float8(grid, "weight_scale")
    ordered = grid.ins is not None and weights.config.get("actorder") in ORDERED
    return Integers(layout == "pack-quantized", bits, grid, zeros, ordered, stepped)


def _arguments(group: Fields, name: str) -> Fields | None:
    """Return how a group's weights or activations are quantised, with names in lower case, as the package reads them;
    None: not at all."""
    if (own := group.sub(name)) is None:
        return None
    return own.changed({key: text.lower() for key in ("type", "strategy") if (text := own.str(key, None)) is not None})


def _grid(weights: Fields, fields: Fields) -> Grid:
    """Return which weights share a scale."""
    size = weights.int("group_size", None, low=-1)
    strategy = weights.str("strategy", None) or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy == "group":
        return Grid.of(weights, "group_size")
    if strategy == "block":
        return Grid.block(weights, "block_structure")
    if strategy not in ("channel", "tensor"):
        raise unsupported(fields, f"the strategy {strategy!r} of weights (read: group, channel, tensor, block)")
    return Grid(1 if strategy == "channel" else None, None)


def _check_inputs(group: Fields, kind: str, fields: Fields) -> None:
    """Raise CheckpointError if activations without static steps are rounded in a way that is not read.

    Those that are read stay floats, with int8 weights as well. The package divides them by their largest magnitude over
    127.5 and rounds. If the largest is negative it becomes a tie, -127.5, so that the last bit of a sum decides between
    -127 and -128: two correct implementations differ as much as either does from floats (1e-2 of the logits' spread).
    """
    inputs = _arguments(group, "input_activations")
    if inputs is None:
        return
    own = inputs.str("type", "int"), inputs.int("num_bits", 8)
    dynamic = inputs.config.get("dynamic") is True
    if own[0] == kind == "float" or (own == ("float", 8) and dynamic):
        return
    token = inputs.str("strategy", "") == "token" and dynamic
    if kind == "float" or own != ("int", 8) or not token or not inputs.bool("symmetric", default=True):
        what = "dynamic float8, or int of 8 bits, symmetric, for each token, dynamic, or for each tensor, static"
        raise unsupported(fields, f"input_activations other than {what}")


def _stepped(group: Fields, kind: str, fields: Fields) -> tuple[str, ...]:
    """Return which activations have static steps of 8 bits, `INPUT` and `OUTPUT`."""
    found = list[str]()
    for name, scale in (("input_activations", INPUT), ("output_activations", OUTPUT)):
        if (own := _arguments(group, name)) is None:
            continue
        whole = kind == "int" and own.str("type", "int") == "int" and own.int("num_bits", 8) == 8
        alike = own.str("strategy", None) in (None, "tensor") and own.int("group_size", None, low=-1) is None
        if whole and alike and not own.config.get("dynamic") and own.bool("symmetric", default=True):
            found.append(scale)
        elif scale == OUTPUT:
            raise unsupported(fields, "output_activations other than int of 8 bits, symmetric, for each tensor, static")
    return tuple(found)

"""compressed-tensors 0.20 and before: `pack-quantized`, `int-quantized`, `float-quantized`, `naive-quantized`.

w = (q - zero) * weight_scale. `weight_packed` has fields of q + 2^(bits - 1) along the inputs, `weight_zero_point` of
the same format such fields of the zeros along the outputs, lowest first. The other formats store plain integers, or
float8.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from models.fields import Fields
from models.grouped import GroupedRows, GroupedWeight
from models.quantized.float8 import Float8Scheme
from models.quantized.parts import (
    FLOATS,
    INTEGERS,
    LINEAR,
    Grid,
    Part,
    Scheme,
    Source,
    block_of,
    names,
    order_of,
    pattern,
    unpack,
    unsupported,
)

FORMATS = {"pack-quantized": ("int",), "int-quantized": ("int",), "float-quantized": ("float",)}
FORMATS["naive-quantized"] = ("int", "float")
CLASSES = ("Linear", "Module")  # names that torch's class of linear layers goes by
ORDERED = ("group", "dynamic")  # values of `actorder` with a `weight_g_idx`, up to version 0.19
LEVELS = 127.5  # activations are divided by their largest magnitude over this


@dataclass(frozen=True)
class IntegerScheme:
    """Weights as integers.

    Args:
        packed: into words; else int8, a byte each.
        bits: of a field.
        grid: which elements share a scale.
        zeros: whether there are zero points.
        ordered: whether columns may have any group.
        levels: of activations.
    """

    packed: bool
    bits: int
    grid: Grid
    zeros: bool
    ordered: bool | None
    levels: float | None

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        """See `Scheme`."""
        shapes, words = self.grid.shapes(outs, width), -(-width * self.bits // 32)
        found = {"weight_scale": Part(shapes, FLOATS)}
        if self.packed:
            found["weight_packed"] = Part(((outs, words),), (torch.int32,))
            found["weight_shape"] = Part(((2,),), INTEGERS, optional=True)
        else:
            found["weight"] = Part(((outs, width),), (torch.int8,))
        if self.zeros and self._packs_zeros:
            zeros = -(-outs * self.bits // 32), self.grid.columns(width)
            found["weight_zero_point"] = Part((zeros,), (torch.int32,))
        elif self.zeros:
            found["weight_zero_point"] = Part(shapes, (torch.int8, *INTEGERS))
        if self.ordered is not None:
            found["weight_g_idx"] = Part(((width,),), INTEGERS, optional=not self.ordered)
        return found

    @property
    def _packs_zeros(self) -> bool:
        return self.packed and self.grid.outs is not None

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        """See `Scheme`."""
        shape = source.read("weight_shape") if self.packed else None
        if shape is not None and shape.tolist() != [outs, width]:
            raise source.error(f"weight_shape is {shape.tolist()}, expected {[outs, width]}")
        grid, bits, scale = self.grid, self.bits if self.packed else 8, source.scale("weight_scale")
        stored = source.tensor("weight_packed" if self.packed else "weight")
        zeros = source.tensor("weight_zero_point") if self.zeros else None
        if zeros is not None:
            zeros = unpack(zeros.T, bits)[:, :outs].T if self._packs_zeros else zeros + 2 ** (bits - 1.0)
        groups_I = source.read("weight_g_idx") if self.ordered is not None else None
        if groups_I is not None and groups_I.eq(-1).all():
            groups_I = None  # written by versions that kept the tensor where nothing was ordered
        order_I = order_of(groups_I, grid.group(width), source)

        def rows(first: int, last: int) -> GroupedRows:
            part = stored[first:last]
            codes_OI = unpack(part, bits)[:, :width] if self.packed else part.view(torch.uint8) ^ 128
            if order_I is not None:
                codes_OI = codes_OI[:, order_I]
            spread = grid.rows(scale, first, last, outs, width)
            zero_OG = None if zeros is None else grid.rows(zeros.float(), first, last, outs, width)
            return GroupedRows(codes_OI, spread, zero_OG)

        kind = "int4" if bits == 4 else "int8"
        return GroupedWeight(kind, (outs, width), grid.group(width), rows, order_I, self.levels)


@dataclass(frozen=True)
class Compressed:
    """A config: the scheme of each target, those that are tried first first, and what stays floats."""

    targets: tuple[tuple["Target", Scheme], ...]
    ignore: tuple["Target", ...]

    @staticmethod
    def parse(fields: Fields) -> "Compressed":
        """Raises CheckpointError for what is not read."""
        sparse = fields.sub("sparsity_config")
        if sparse and sparse.str("format", "dense") != "dense":
            raise unsupported(fields, f"the sparse format {sparse.str('format')!r}")
        for name in ("kv_cache_scheme", "transform_config"):
            if fields.sub(name):
                raise unsupported(fields, f"compressed-tensors with {name}")
        groups, found = fields.sub("config_groups"), {}
        if groups is None:
            raise fields.error("config_groups", "a value")
        for name in groups.config:
            group = groups.sub(name)
            if group is None or not names(group, "targets"):
                raise groups.error(name, "an object with targets")
            scheme = _scheme(group, fields)
            found |= dict.fromkeys(names(group, "targets"), scheme)
        # As the package sorts them: names, then expressions, then classes.
        order = sorted(found, key=lambda target: (target in CLASSES, "re:" in target, target))
        targets = tuple((Target.of(target, fields, "config_groups"), found[target]) for target in order)
        return Compressed(targets, tuple(Target.of(entry, fields, "ignore") for entry in names(fields, "ignore")))

    def scheme(self, module: str, kind: str) -> Scheme | None:
        """See `Quantization`. The package has its way with `Linear` layers only."""
        if kind != LINEAR or any(entry.matches(module) for entry in self.ignore):
            return None
        return next((scheme for target, scheme in self.targets if target.matches(module)), None)


@dataclass(frozen=True)
class Target:
    """A name of a linear layer, of its class, or an expression (`re:`) that matches the begin of a name."""

    text: str
    expression: re.Pattern[str] | None

    @staticmethod
    def of(text: str, fields: Fields, name: str) -> "Target":
        """Raises CheckpointError for an expression that is not valid."""
        return Target(text, pattern(text[3:], fields, name) if text.startswith("re:") else None)

    def matches(self, module: str) -> bool:
        """Whether it is meant."""
        return bool(self.expression.match(module)) if self.expression else self.text in (module, *CLASSES)


def _scheme(group: Fields, fields: Fields) -> Scheme:
    """The scheme of a group. Raises CheckpointError for what is not read."""
    layout = group.str("format", None) or fields.str("format", "")
    weights = group.sub("weights")
    if layout not in FORMATS or weights is None:
        raise unsupported(fields, f"compressed-tensors in the format {layout!r} (read: {', '.join(FORMATS)})")
    kind, bits = weights.str("type", "int"), weights.int("num_bits", 8)
    allowed: Sequence[int] = (8,) if kind == "float" else (4, 8)
    if kind not in FORMATS[layout] or bits not in allowed or weights.config.get("dynamic"):
        raise unsupported(fields, f"{layout} with weights of {bits} bits, {kind} (read: int of 4 and 8, float of 8)")
    if group.sub("output_activations"):
        raise unsupported(fields, f"{layout} with quantised outputs (output_activations)")
    grid, levels = _grid(weights, fields), _levels(group, kind, fields)
    if kind == "float":
        if not weights.bool("symmetric", default=True):
            raise unsupported(fields, f"{layout} with zero points")
        return Float8Scheme(grid, "weight_scale")
    ordered = (weights.config.get("actorder") in (*ORDERED, True)) if weights.config.get("group_size") else None
    zeros = not weights.bool("symmetric", default=True)
    return IntegerScheme(layout == "pack-quantized", bits, grid, zeros, ordered, levels)


def _grid(weights: Fields, fields: Fields) -> Grid:
    """Which weights share a scale."""
    size = weights.int("group_size", None, low=-1)
    strategy = weights.str("strategy", None) or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy == "group":
        return Grid.of(weights, "group_size")
    if strategy == "block":
        return block_of(weights, "block_structure")
    if strategy not in ("channel", "tensor"):
        raise unsupported(fields, f"the strategy {strategy!r} of weights (read: group, channel, tensor, block)")
    return Grid(1 if strategy == "channel" else None, None)


def _levels(group: Fields, kind: str, fields: Fields) -> float | None:
    """How activations are rounded. Those beside float8 weights are not."""
    inputs = group.sub("input_activations")
    if inputs is None:
        return None
    own = inputs.str("type", "int"), inputs.int("num_bits", 8)
    if kind == "float" and own == ("float", 8):
        return None
    token = inputs.str("strategy", "") == "token" and inputs.config.get("dynamic") is True
    if kind == "float" or own != ("int", 8) or not token or not inputs.bool("symmetric", default=True):
        raise unsupported(fields, "input_activations other than int of 8 bits, symmetric, for each token, dynamic")
    return LEVELS

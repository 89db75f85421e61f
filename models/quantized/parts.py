"""Code that the methods share: the tensors that represent a weight, elements that share a scale, bit fields.

Shape legend: O outputs, I inputs, G groups of a row.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.linear.blocks import Block
from kernels.linear.panels import ABOVE, GROUP_STEPS, PANEL, WHOLE, ZEROS, GroupKind, power, shape
from models.checkpoint.fields import REQUIRED, Fields
from models.errors import CheckpointError
from models.formats.grouped import GroupedRows, GroupedWeight

LINEAR, TRANSPOSED = "Linear", "Conv1D"  # transformers' classes; weights of the second are stored [in, out]
EMBEDDING = "Embedding"  # the token embedding, which some methods quantise
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int32, torch.int64)
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)  # of 2, 8 bits
NO_NUMBER, NOT_A_NUMBER = 255, 127  # the 8-bit exponent that means NaN; NaN in e4m3, without the sign
CACHE_SCALES = re.compile(  # keys and values are not rounded by them
    r".*\.self_attn\.(?:(?:[qkv]_proj\.|qkv_proj\.)?(?:[qkv]|kv)_scale|(?:[kv]|qkv)_proj\.output_scale)"
    r"|.*\.[kv]_cache_scale"
)
UNREAD = (  # a remedy
    "docs/quantised.md lists what is read. Otherwise use the model's float32, bfloat16 or float16 checkpoint, "
    "with --quant."
)
Shape = tuple[int, ...]


class Part(NamedTuple):
    """A tensor of a weight as a header must describe it: one of `shapes` and one of `dtypes`."""

    shapes: tuple[Shape, ...]
    dtypes: Collection[torch.dtype]
    optional: bool = False


class Source(NamedTuple):
    """The tensors of one weight, checked by their headers.

    Args:
        read: returns a mapped tensor by the suffix of its name; None if an optional tensor is absent.
        error: makes the error for a fault of this weight.
    """

    read: Callable[[str], Tensor | None]
    error: Callable[[str], CheckpointError]

    def tensor(self, suffix: str) -> Tensor:
        """Return a tensor that is not optional."""
        found = self.read(suffix)
        assert found is not None
        return found

    def scale(self, suffix: str) -> Tensor:
        """Return scales as float32. Raises CheckpointError if one is not finite."""
        scale = self.tensor(suffix).float()
        if not scale.isfinite().all():
            raise self.error(f"{suffix} has values that are not finite")
        return scale

    def numbers(self, suffix: str, codes: Tensor) -> Tensor:
        """Return these bits of e4m3, uint8. Raises CheckpointError if one is NaN."""
        if (codes & NOT_A_NUMBER).max() == NOT_A_NUMBER:
            raise self.error(f"{suffix} has values that are not numbers")
        return codes

    def powers(self, suffix: str) -> Tensor:
        """Return 2^(exponent - 127), float32, for exponents of 8 bits. Raises CheckpointError for that of NaN."""
        exponents = self.tensor(suffix).view(torch.uint8)
        if exponents.eq(NO_NUMBER).any():
            raise self.error(f"{suffix} has values that are no numbers")
        return power(exponents) * 2


class Form(NamedTuple):
    """A weight's form in memory.

    Args:
        kind: the kind of its codes.
        group: the columns that share a scale.
        zeros, least: whether groups have zeros or minimums.
        each: bytes of a scale, a zero or a minimum, as far as that is known before they are read.
    """

    kind: GroupKind
    group: int
    zeros: bool = False
    least: bool = False
    each: int = 2

    def packed_bytes(self, outs: int, width: int) -> int:
        """Return the bytes of a packed matrix."""
        panels, steps, *word = shape(self.kind, outs, width)
        values = self.each * (1 + (self.zeros or self.least))
        return panels * (steps * word[0] * word[1] + PANEL * -(-width // self.group) * values)

    def weight(
        self,
        outs: int,
        width: int,
        codes: Callable[[int, int], Tensor],
        scale_OG: Tensor,
        zero_OG: Tensor | None = None,
        least_OG: Tensor | None = None,
        **more: Any,
    ) -> GroupedWeight:
        """Return a weight of this form.

        Args:
            codes: returns those of rows [first, last), see `GroupedRows`.
            scale_OG, zero_OG, least_OG: of all rows, see `GroupedRows`.
            more: further arguments of `GroupedWeight`.
        """

        def rows(first: int, last: int) -> GroupedRows:
            values = (None if x_OG is None else x_OG[first:last] for x_OG in (zero_OG, least_OG))
            return GroupedRows(codes(first, last), scale_OG[first:last], *values)

        return GroupedWeight(self.kind, (outs, width), self.group, rows, least=self.least, **more)


def smallest(bits: int, width: int, group: int, *, zeros: bool = False) -> GroupKind:
    """Return the smallest kind of whole numbers that has codes of so many bits, rows and groups of these sizes, and
    zeros if they are needed."""
    kinds: tuple[GroupKind, ...] = ("int2", "int4", "int5", "int6", "int8")

    def fits(kind: GroupKind) -> bool:
        step = GROUP_STEPS[kind][0] if kind in WHOLE else 1
        return 2**bits <= 2 * ZEROS[kind] and not (zeros and kind in ABOVE) and width % step == group % step == 0

    return next(filter(fits, kinds))


class Scheme(Protocol):
    """The form in which a weight [outs, width] is stored."""

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        """Return the tensors that represent it, by the suffixes of their names."""
        ...

    def form(self, width: int) -> Form | Block:
        """Return the form in memory of a weight of this width."""
        ...

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        """Return the weight. Raises CheckpointError if a tensor has invalid values."""
        ...


class Quantization(Protocol):
    """A parsed `quantization_config`."""

    def scheme(self, module: str, kind: str) -> Scheme | None:
        """Return how a linear layer's weight is stored, unless the file has it as floats; None: as floats.

        Args:
            module: the layer's name in transformers.
            kind: the layer's class there, `LINEAR` or `TRANSPOSED`; for methods that quantise it also `EMBEDDING`.
        """
        ...


@dataclass(frozen=True)
class Uniform(Quantization):
    """A config with one scheme for layers of some classes. The file itself shows which layers stay floats
    (`modules_to_not_convert`)."""

    common: Scheme
    kinds: tuple[str, ...] = (LINEAR,)

    def scheme(self, module: str, kind: str) -> Scheme | None:
        return self.common if kind in self.kinds else None


@dataclass(frozen=True)
class ModuleSchemes(Quantization):
    """The schemes of the quantised modules by their names; the token embedding may be among them."""

    schemes: Mapping[str, Scheme]

    def scheme(self, module: str, kind: str) -> Scheme | None:
        return self.schemes.get(module)


@dataclass(frozen=True)
class ModuleRules(Quantization):
    """A config: the scheme of most modules, and rules for others (None: floats) in the order of their trial."""

    common: Scheme
    others: tuple[tuple[Callable[[str], object], Scheme | None], ...]

    def scheme(self, module: str, kind: str) -> Scheme | None:
        return next((scheme for meant, scheme in self.others if meant(module)), self.common)


class Grid(NamedTuple):
    """Which elements of a weight share a scale: those of a block of `outs` x `ins`; None: all of them."""

    outs: int | None
    ins: int | None

    @staticmethod
    def of(fields: Fields, name: str, default: int = REQUIRED) -> "Grid":
        """Read a field with the number of columns that share a scale; -1 means all. Raises CheckpointError."""
        size = fields.int(name, default, low=-1)
        if size == 0:
            raise fields.error(name, "a whole number of columns, or -1 for all")
        return Grid(1, None if size == -1 else size)

    @staticmethod
    def block(fields: Fields, name: str, default: Shape = ()) -> "Grid":
        """Read a field with the outs and ins of a block, [128, 128] or "128x128". Raises CheckpointError."""
        value = fields.config.get(name, list(default))
        if isinstance(value, str) and re.fullmatch(r"\d{1,6}x\d{1,6}", value):
            value = [int(size) for size in value.split("x")]
        if not isinstance(value, list) or len(value) != 2 or any(type(size) is not int or size < 1 for size in value):
            raise fields.error(name, "a list of two whole numbers, the outputs and inputs of a block")
        return Grid(*value)

    def group(self, width: int) -> int:
        """Return the number of columns that share a scale."""
        return min(self.ins or width, width)

    def columns(self, width: int) -> int:
        """Return the number of scales of a row."""
        return -(-width // self.group(width))

    def shapes(self, outs: int, width: int) -> tuple[Shape, ...]:
        """Return the shapes that the scales may have."""
        rows, columns = -(-outs // (self.outs or outs)), self.columns(width)
        return ((rows, columns), *([(rows,)] if columns == 1 else []), *([()] if rows == columns == 1 else []))

    def spread(self, x: Tensor, outs: int, width: int) -> Tensor:
        """Return scales, or zeros of the same shape, of all rows: [O, G]."""
        return x.reshape(-1, self.columns(width))[torch.arange(outs) // (self.outs or outs)]


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack words [..., n] of any size to uint8 [..., bits of a row / `bits`]: fields of 1 to 8 bits, lowest first;
    those of 3, 5, 6 and 7 bits cross words."""
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # some "contiguous" ones fail
    if bits == 8:
        return octets
    if 8 % bits == 0:
        return torch.stack([octets >> place & (1 << bits) - 1 for place in range(0, 8, bits)], -1).flatten(-2)
    octets = F.pad(octets, (0, -octets.shape[-1] % bits)).unflatten(-1, (-1, bits))  # `bits` bytes hold eight fields
    whole = (octets.long() << torch.arange(0, 8 * bits, 8)).sum(-1, keepdim=True)
    return (whole >> torch.arange(0, 8 * bits, bits) & (1 << bits) - 1).to(torch.uint8).flatten(-2)


def order_of(groups_I: Tensor | None, group: int, source: Source) -> Tensor | None:
    """Return the order of columns that sorts them by group; None: they are sorted already.

    Raises CheckpointError if a group is missing, or has another size than `group` (the last may be smaller).
    """
    if groups_I is None:
        return None
    even_I = torch.arange(len(groups_I)) // group
    low, high, last = int(groups_I.min()), int(groups_I.max()), int(even_I[-1])
    if low < 0 or high > last:
        raise source.error(f"g_idx: groups from {low} to {high}, expected 0 to {last}")
    order_I = groups_I.argsort(stable=True)
    if not groups_I[order_I].equal(even_I.to(groups_I.dtype)):
        raise source.error(f"g_idx: groups of unequal sizes, expected {group} columns each")
    return None if order_I.equal(torch.arange(len(order_I))) else order_I


def names(fields: Fields, name: str) -> list[str]:
    """Read a field that lists names; an absent or null one is empty. Raises CheckpointError."""
    value = fields.config.get(name) or []
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise fields.error(name, "a list of names")
    return value


def pattern(expression: str, fields: Fields) -> re.Pattern[str]:
    """Compile a config's regular expression. Raises CheckpointError if it is not valid or could match without end."""
    try:
        if not re.search(r"\)[*+{]", expression) and len(re.findall(r"[*+{]", expression)) <= 5:
            return re.compile(expression)
        why = "it repeats too much"
    except (re.error, RecursionError, OverflowError) as error:
        why = str(error)
    raise unsupported(fields, f"the regular expression {expression[:80]!r} is not supported: {why}")


def unsupported(fields: Fields, what: str) -> CheckpointError:
    """Return the error for an unsupported config."""
    return CheckpointError(f"quantization_config: {what}", where=fields.file, remedy=UNREAD)

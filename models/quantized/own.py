"""Our own layout of quantised weights, which `python -m tools.convert FILE.gguf` writes.

w[o, i] = (code[o, i] - zero[o, i / group]) * scale[o, i / group]. For the weight of a module M, `M.codes` has a code in
a byte, or two of four bits (an even input in the low half); `M.scale` and `M.zero` have a number for each group.
Without `M.zero`, codes of four bits stand around 8 and codes of eight bits around 128. `quantization_config` has
`quant_method` "coppice", `version` 1, and in `weights` for each module {"kind": "int4" or "int8", "group": G, "zeros":
true or false}. A head that shares the values of the token embedding is listed beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear.panels import GroupKind
from models.checkpoint.fields import Fields
from models.formats.grouped import GroupedRows, GroupedWeight
from models.quantized.parts import Part, Shape, Source, unsupported

METHOD, VERSION = "coppice", 1
EXACT = (torch.float16, torch.float32)


@dataclass(frozen=True)
class Grouping:
    """How a weight is stored; `scale` is the dtype that one is written in, files may have either of `EXACT`."""

    kind: GroupKind
    group: int
    scale: torch.dtype = torch.float16
    zeros: bool = False

    def layout(self, outs: int, width: int) -> dict[str, tuple[Shape, torch.dtype]]:
        """Shapes and dtypes of the tensors."""
        groups = -(-width // self.group)
        codes = -(-width // 2) if self.kind == "int4" else width
        layout: dict[str, tuple[Shape, torch.dtype]] = {
            "codes": ((outs, codes), torch.uint8),
            "scale": ((outs, groups), self.scale),
        }
        return layout | ({"zero": ((outs, groups), self.scale)} if self.zeros else {})

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        """See `Scheme`."""
        layout = self.layout(outs, width)
        return {name: Part((shape,), (dtype,) if name == "codes" else EXACT) for name, (shape, dtype) in layout.items()}

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        """See `Scheme`."""
        codes, scale = source.tensor("codes"), source.scale("scale")
        zero = source.scale("zero") if self.zeros else None

        def rows(first: int, last: int) -> GroupedRows:
            return self._rows(codes[first:last], scale[first:last], None if zero is None else zero[first:last], width)

        return GroupedWeight(self.kind, (outs, width), self.group, rows)

    def _rows(self, codes: Tensor, scale: Tensor, zero: Tensor | None, width: int) -> GroupedRows:
        if self.kind == "int4":
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, :width]
        return GroupedRows(codes, scale.float(), None if zero is None else zero.float())


class GroupedReader:
    """Rows of a quantised matrix as float32, read from the file when they are asked for: see `RowReader`.

    Args:
        grouping, width: of the matrix.
        parts: readers of the rows of its tensors, by the ends of their names.
        name: of the matrix.
    """

    def __init__(
        self, grouping: Grouping, width: int, parts: Mapping[str, Callable[[Sequence[int]], Tensor]], name: str
    ):
        self.grouping, self.width, self.parts, self.name = grouping, width, parts, name

    def __call__(self, rows: Sequence[int]) -> Tensor:
        """[len(rows), width]. Raises CheckpointError if the file has become shorter."""
        read = {name: part(rows) for name, part in self.parts.items()}
        found = self.grouping._rows(read["codes"], read["scale"], read.get("zero"), self.width)
        shape = (len(rows), self.width)
        return GroupedWeight(self.grouping.kind, shape, self.grouping.group, lambda *_: found).floats()


@dataclass(frozen=True)
class Own:
    """A config: the modules whose weights are quantised."""

    weights: Mapping[str, Grouping]

    def scheme(self, module: str, kind: str) -> Grouping | None:
        """See `Quantization`."""
        return self.weights.get(module)

    @staticmethod
    def config(weights: Mapping[str, Grouping]) -> dict[str, object]:
        """`quantization_config` for these modules."""
        listed = {name: {"kind": g.kind, "group": g.group, "zeros": g.zeros} for name, g in weights.items()}
        return {"quant_method": METHOD, "version": VERSION, "weights": listed}


def parse(fields: Fields) -> Own:
    """Raises CheckpointError for what is not read."""
    if (version := fields.int("version")) != VERSION:
        raise unsupported(fields, f"version {version} of the layout (read: {VERSION})")
    listed = fields.sub("weights") or Fields({}, fields.file, f"{fields.prefix}weights.")
    weights = {}
    for module in listed.config:
        own = listed.sub(module) or Fields({}, fields.file, f"{listed.prefix}{module}.")
        kind: GroupKind = "int4" if own.choice("kind", ("int4", "int8")) == "int4" else "int8"
        weights[module] = Grouping(kind, own.int("group"), zeros=own.bool("zeros", default=False))
    return Own(weights)

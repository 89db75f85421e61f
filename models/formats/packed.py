"""Matrices packed ahead of time (`python -m tools.pack`): how a checkpoint's file describes them.

The file is a safetensors file. Matrices that are multiplied together have one tensor of panels, named `packed:` and the
names of their weights, joined by `+`. int8 and int4 also have scales, `scale:` and the names, and if their groups have
them, zeros (`zero:`) or minimums (`least:`), and units of both. The header's metadata list the matrices' own names,
shapes and dtypes, so that a model checks them like those of any checkpoint. Panels are multiples of 64 bytes and come
first, so that they can be multiplied directly in the mapped file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.linear import Groups, Packed
from kernels.linear.panels import GROUP_KINDS

KEY, VERSION = "coppice_packed", 3
FLOATS = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
PANELS, *_ = PREFIXES = "packed:", "scale:", "zero:", "least:", "unit:", "least_unit:"


class Size(NamedTuple):
    """The size of a packed matrix: outputs, width; the kind and the elements of groups; the levels of activations, and
    whether these are rounded by row."""

    outs: int
    width: int
    kind: str = ""
    group: int = 0
    levels: float = 0.0
    by_row: bool = False

    @staticmethod
    def parse(key: str, entry: Any) -> "Size":
        """Read an entry of the metadata. Raises ValueError if it has another form."""
        types = [*map(type, entry)] if isinstance(entry, list) else []
        if types not in ([int, int, str, int, float, bool], [int, int, str, int, int, bool]):
            wanted = "expected outputs, width, kind, group, levels and by_row"
            raise ValueError(f"the size of {key!a:.80}: {wanted}, got {entry!r:.80}")
        size = Size(*entry)
        if size.kind not in ("", *GROUP_KINDS):
            raise ValueError(f"the size of {key!a:.80}: expected a kind out of {[*GROUP_KINDS]}, got {size.kind!r}")
        return size

    @staticmethod
    def of(packed: Packed) -> "Size":
        """Return the size of a matrix."""
        kind, group = packed.groups[:2] if packed.groups else ("", 0)
        return Size(packed.outs, packed.width, kind, group, packed.levels, packed.by_row)

    def packed(self, panels: Tensor, scale: Tensor | None, *others: Tensor | None) -> Packed:
        """Return the matrix of this size. Raises ValueError if the tensors do not fit it."""
        if not self.kind:
            return Packed(panels, self.outs, self.width, scale, levels=self.levels, by_row=self.by_row)
        if scale is None:
            raise ValueError("groups without scales")
        groups = Groups(self.kind, self.group, scale, *others)  # type: ignore[arg-type]
        return Packed(panels, self.outs, self.width, groups=groups, levels=self.levels, by_row=self.by_row)


@dataclass(frozen=True)
class Packing:
    """The packed matrices of a file, which also has other tensors.

    Args:
        quant: the format of the matrices, a key of `models.formats.linear.FORMATS`.
        matrices: shape and dtype by name of the weight, as in the original checkpoint.
        sizes: the sizes of the packed matrices, by the joined names.
    """

    quant: str
    matrices: dict[str, tuple[tuple[int, ...], torch.dtype]]
    sizes: dict[str, Size]

    @staticmethod
    def parse(metadata: Mapping[str, str]) -> "Packing | None":
        """Read a header's metadata; None: nothing is packed. Raises ValueError if they have another form."""
        if KEY not in metadata:
            return None
        try:
            found = json.loads(metadata[KEY])
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the list of packed matrices is malformed: {error}") from None
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise ValueError(f"packed by another version of coppice, {found!r:.80}")
        parts = [found.get("quant"), found.get("matrices"), found.get("sizes")]
        if [*map(type, parts)] != [str, dict, dict]:
            raise ValueError("the list of packed matrices is malformed: expected quant, matrices and sizes")
        matrices = {name: _matrix(name, entry) for name, entry in found["matrices"].items()}
        sizes = {key: Size.parse(key, entry) for key, entry in found["sizes"].items()}
        return Packing(found["quant"], matrices, sizes)

    def metadata(self) -> dict[str, str]:
        """Return the metadata of a header."""
        matrices = {name: (shape, str(dtype).removeprefix("torch.")) for name, (shape, dtype) in self.matrices.items()}
        found: dict[str, Any] = {"version": VERSION, "quant": self.quant, "matrices": matrices, "sizes": self.sizes}
        return {"format": "pt", KEY: json.dumps(found, separators=(",", ":"))}


def _matrix(name: str, entry: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of an entry of the metadata. Raises ValueError if it has another form."""
    shape, dtype = entry if isinstance(entry, list) and len(entry) == 2 else ([0], "")
    sized = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
    if not sized or not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"the matrix {name!a:.80}: expected a shape and a dtype of floats, got {entry!r:.80}")
    return tuple(shape), DTYPES[dtype]

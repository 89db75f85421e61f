"""Matrices that were packed ahead (`python -m tools.pack`): how a checkpoint's file describes them.

The file is a safetensors file. Matrices that are multiplied together have one tensor of panels, `packed:` and the names
of their weights, joined by `+`. int8 and int4 have scales besides, `scale:` and the names, and zeros, `zero:` and the
names, where groups have some. The header's metadata list the matrices' own names, shapes and dtypes, so that a model
checks them as it checks those of any checkpoint. Panels are multiples of 64 bytes and come first, so that they can be
multiplied where the file is mapped.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.linear import Groups, Packed

KEY, VERSION = "coppice_packed", 2
PANELS, SCALE, ZERO = PREFIXES = "packed:", "scale:", "zero:"


class Size(NamedTuple):
    """Of a packed matrix: outputs, width, and of groups their kind, elements, and the levels of activations."""

    outs: int
    width: int
    kind: str = ""
    group: int = 0
    levels: float = 0.0

    @staticmethod
    def of(packed: Packed) -> "Size":
        """Of a matrix."""
        kind, group = packed.groups[:2] if packed.groups else ("", 0)
        return Size(packed.outs, packed.width, kind, group, packed.levels)

    def packed(self, panels: Tensor, scale: Tensor | None, zero: Tensor | None) -> Packed:
        """The matrix of this size. Raises ValueError for tensors that do not fit it."""
        if not self.kind:
            return Packed(panels, self.outs, self.width, scale, levels=self.levels)
        if scale is None:
            raise ValueError("groups without scales")
        groups = Groups(self.kind, self.group, scale, zero)  # type: ignore[arg-type]
        return Packed(panels, self.outs, self.width, groups=groups, levels=self.levels)


@dataclass(frozen=True)
class Packing:
    """What a file with packed matrices holds besides its other tensors.

    Args:
        quant: the format of the matrices, a key of `models.linear.FORMATS`.
        matrices: shape and dtype by name of the weight, as the checkpoint had it that was packed.
        sizes: of the packed matrices, by the joined names.
    """

    quant: str
    matrices: dict[str, tuple[tuple[int, ...], torch.dtype]]
    sizes: dict[str, Size]

    @staticmethod
    def parse(metadata: Mapping[str, str]) -> "Packing | None":
        """Read a header's metadata; None: nothing is packed. Raises ValueError for metadata of another form."""
        if KEY not in metadata:
            return None
        found = json.loads(metadata[KEY])
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise ValueError(f"packed by another version of coppice, {found!r:.80}")
        try:
            matrices = {
                str(name): (tuple(map(int, shape)), _dtype(dtype)) for name, (shape, dtype) in found["matrices"].items()
            }
            sizes = {
                str(key): Size(int(outs), int(width), str(kind), int(group), float(levels))
                for key, (outs, width, kind, group, levels) in found["sizes"].items()
            }
            return Packing(str(found["quant"]), matrices, sizes)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the list of packed matrices is malformed: {error!r}") from error

    def metadata(self) -> dict[str, str]:
        """The same for a header."""
        matrices = {name: (shape, str(dtype).removeprefix("torch.")) for name, (shape, dtype) in self.matrices.items()}
        found: dict[str, Any] = {"version": VERSION, "quant": self.quant, "matrices": matrices, "sizes": self.sizes}
        return {"format": "pt", KEY: json.dumps(found, separators=(",", ":"))}


def _dtype(name: str) -> torch.dtype:
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    dtypes["float64"] = torch.float64
    return dtypes[name]

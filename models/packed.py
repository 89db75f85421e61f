"""Matrices that were packed ahead (`python -m tools.pack`): how a checkpoint's file describes them.

The file is a safetensors file. Matrices that are multiplied together have one tensor of panels, `packed:` and the names
of their weights, joined by `+`, and for int8 one of scales, `scale:` and the names. The header's metadata list the
matrices' own names, shapes and dtypes, so that a model checks them as it checks those of any checkpoint. Panels are
multiples of 64 bytes and come first, so that they can be multiplied where the file is mapped.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

KEY, VERSION = "coppice_packed", 1
PANELS, SCALE = "packed:", "scale:"


@dataclass(frozen=True)
class Packing:
    """What a file with packed matrices holds besides its other tensors.

    Args:
        quant: the format of the matrices, a key of `models.linear.FORMATS`.
        matrices: shape and dtype by name of the weight, as the checkpoint had it that was packed.
        sizes: outputs and width of the panels, by the joined names.
    """

    quant: str
    matrices: dict[str, tuple[tuple[int, ...], torch.dtype]]
    sizes: dict[str, tuple[int, int]]

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
            sizes = {str(key): (int(outs), int(width)) for key, (outs, width) in found["sizes"].items()}
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

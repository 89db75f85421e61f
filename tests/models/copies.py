"""Copies of golden checkpoints, with other fields and other weights."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.golden.base import edit

GOLDEN = Path(__file__).parents[1] / "golden"


def changed(
    tmp_path: Path,
    variant: str,
    changes: Mapping[str, Any] | None = None,
    tensors: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
) -> Path:
    """The folder of a copy of a golden checkpoint.

    Args:
        variant: one that ends in `_v4` has a config only; the rest is its twin's.
        changes: fields of its config; ABSENT of `tools.golden.base` removes one.
        tensors: makes the stored tensors from those of the checkpoint.
    """
    folder = tmp_path / "checkpoint"
    twin = GOLDEN / variant.removesuffix("_v4")
    shutil.copytree(twin, folder)
    shutil.copy(GOLDEN / variant / "config.json", folder)
    edit(folder / "config.json", changes or {})
    if tensors:
        save_file(tensors(load_file(twin / "model.safetensors")), folder / "model.safetensors")
    return folder

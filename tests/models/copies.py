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
        changes: fields of its config; ABSENT of `tools.golden.base` removes one.
        tensors: makes the stored tensors from those of the checkpoint.
    """
    folder = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN / variant, folder)
    edit(folder / "config.json", changes or {})
    if tensors:
        save_file(tensors(load_file(GOLDEN / variant / "model.safetensors")), folder / "model.safetensors")
    return folder

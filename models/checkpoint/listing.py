"""The files of a model's folder: JSON, and the safetensors headers that list its tensors; refuses other folders."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from models.checkpoint.files import is_file, read_regular
from models.checkpoint.tensor_files import FETCH_AGAIN, read_header
from models.checkpoint.tensors import TensorInfo
from models.errors import CheckpointError, show
from models.folders import is_blob

CONFIG_BYTES, INDEX_BYTES = 1 << 20, 64 << 20
ADAPTERS = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"  # as PEFT writes them
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """Parse a JSON object of at most `limit` bytes. Raises CheckpointError for anything else, or for duplicate keys."""
    try:
        data = read_regular(path, limit)
        if len(data) > limit:
            raise CheckpointError(f"larger than {limit} bytes, the limit for this file", where=show(path))
        value = json.loads(data.decode(), object_pairs_hook=_unique)
    except OSError as error:
        raise CheckpointError(f"the file cannot be read: {error.strerror}", where=show(path)) from error
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        if data.startswith(b"version https://git-lfs"):
            why = "it is a git-LFS pointer"
        raise CheckpointError(f"not valid JSON: {why[:200]}", where=show(path), remedy=FETCH_AGAIN) from error
    if not isinstance(value, dict):
        raise CheckpointError("expected a JSON object", where=show(path), remedy=FETCH_AGAIN)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {show(key)} occurs twice")
    return result


def listed_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Read the headers of all weight files. A single file takes precedence over an index, as in transformers."""
    if (folder / WEIGHTS).exists() or (folder / WEIGHTS).is_symlink():
        return read_header(_inside(folder, WEIGHTS, folder / WEIGHTS))
    index = folder / INDEX
    if not index.exists():
        raise _no_weights(folder)
    weight_map = read_json(index, INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("weight_map: expected an object that maps tensors to files", where=show(index))
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"weight_map: {show(name)}: expected a file name", where=show(index))
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(set(weight_map.values())):
        found = read_header(_inside(folder, file, index))
        for name in found.keys() & tensors.keys():
            where = f"{show(folder)}: {show(tensors[name].file.name)} and {show(file)}"
            raise CheckpointError(f"tensor {show(name)} lies in two files", where=where, remedy=FETCH_AGAIN)
        tensors |= found
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            what = f"weight_map: tensor {show(name)} is not in {show(file)}"
            raise CheckpointError(what, where=show(index), remedy=FETCH_AGAIN)
    return tensors


def header_of(folder: Path, name: str) -> dict[str, TensorInfo]:
    """Read the header of one file of a folder, checked like those of weights. Raises CheckpointError."""
    return read_header(_inside(folder, name, folder / name))


def _inside(folder: Path, name: str, where: Path) -> Path:
    """Return the path of weight file `name`; refuses paths outside the folder, except links of the hub's cache."""
    if not name.endswith(".safetensors") or name != Path(name).name or re.search(r"[/\\:\0]", name):
        raise CheckpointError(f"{show(name)} is no plain name of a .safetensors file", where=show(where))
    path, root = folder / name, folder.resolve()
    try:
        target = path.resolve()
        inside, there = target.is_relative_to(root), is_file(target)
        # snapshots/<revision>/model.safetensors -> ../../blobs/<hash>
        link = re.fullmatch(r"\.\./\.\./blobs/([^/]+)", str(path.readlink())) if path.is_symlink() else None
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name the system cannot hold
        raise CheckpointError(f"{show(name)} cannot be followed", where=show(where)) from error
    if not inside and not (link and is_blob(target, root.parent.parent, link[1])):
        raise CheckpointError(
            f"{show(name)} is a link that leads out of the model folder",
            where=show(where),
            remedy="Put the file itself there.",
        )
    if not there:
        raise CheckpointError(f"{show(name)} is not there", where=show(where), remedy=FETCH_AGAIN)
    return path


def adapter_base(folder: Path) -> str:
    """Return the name, for messages, of the base model of the adapter in a folder; "" if there is none."""
    found = [name for name in ADAPTERS if (folder / name).exists()]
    if not found:
        return ""
    try:
        base = read_json(folder / ADAPTERS[0], CONFIG_BYTES).get("base_model_name_or_path")
    except CheckpointError:
        base = None
    return show(base) if isinstance(base, str) and base else "a model that it does not name"


def adapter_alone(folder: Path, base: str) -> CheckpointError:
    """Return the error for a folder with an adapter but no model."""
    return CheckpointError(
        f"the folder holds an adapter (LoRA) for {base}, not a model",
        where=show(folder),
        remedy=f"Name that model, and the adapter beside it: --model BASE --adapter {show(folder)}; "
        "or merge it into that model (PEFT: merge_and_unload, then save_pretrained).",
    )


def _no_weights(folder: Path) -> CheckpointError:
    """Return the error for a folder without usable weights."""
    if adapter := adapter_base(folder):
        return adapter_alone(folder, adapter)
    files = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
    shards = [name for name in files if name.endswith(".safetensors")]
    if shards:
        what, remedy = f"{show(shards[0])} without {INDEX}", f"Download {INDEX} too, or name a single file {WEIGHTS}."
    elif pickles:
        what = f"the weights are pickles ({show(pickles[0])}), which can run code and are never loaded"
        remedy = "If you trust their source: `python -m tools.convert`."
    else:
        what, remedy = f"the model folder holds neither {WEIGHTS} nor {INDEX}", "Download the model's weights."
    return CheckpointError(what, where=show(folder), remedy=remedy)

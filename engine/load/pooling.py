"""The pooling that a checkpoint prescribes for embeddings: in sentence-transformers files, or in the metadata of a GGUF
file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.words import LAST, MEAN
from models.checkpoint.files import read_regular
from models.checkpoint.headers import Checkpoint
from models.checkpoint.listing import read_json
from models.errors import CheckpointError

MODULES, CONFIG = "modules.json", "config.json"  # CONFIG lies in the folder of the module Pooling
MOST_BYTES = 1 << 16  # bytes of each file
KNOWN = {"mean": MEAN, "mean_tokens": MEAN, "lasttoken": LAST}  # sentence-transformers' words -> ours
GGUF_KNOWN = {1: MEAN, 3: LAST}  # llama.cpp's numbers
PREFIX = "pooling_mode_"


@dataclass(frozen=True)
class Pooling:
    """How embeddings are made if a request does not say it.

    Args:
        pooling: one of `engine.words.POOLINGS`.
        normalize: whether vectors have length 1.
        why_not: an unsupported pooling that the checkpoint asks for, so that requests must name one; else "".
    """

    pooling: str = MEAN
    normalize: bool = True
    why_not: str = ""

    @staticmethod
    def of(checkpoint: Checkpoint) -> "Pooling":
        """Read the pooling of a checkpoint; the default if it prescribes none."""
        try:
            if checkpoint.gguf is not None:
                return _of_metadata(checkpoint.gguf.metadata)
            return _of_modules(checkpoint.folder) if (checkpoint.folder / MODULES).is_file() else Pooling()
        except CheckpointError as error:  # all other requests may still be served
            return Pooling(why_not=error.what)
        except (OSError, ValueError, RecursionError) as error:
            return Pooling(why_not=f"{MODULES} cannot be read: {str(error)[:100]}")


def _of_metadata(metadata: Mapping[str, Any]) -> Pooling:
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    if kind == 0:
        return Pooling()
    if kind not in GGUF_KNOWN:
        raise CheckpointError(f"it is made for llama.cpp's pooling {kind!r:.20}")
    return Pooling(GGUF_KNOWN[kind])


def _of_modules(folder: Path) -> Pooling:
    modules = json.loads(read_regular(folder / MODULES, MOST_BYTES).decode())
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise CheckpointError(f"{MODULES} is no list of modules")
    paths = {str(each.get("type", "")).rpartition(".")[2]: str(each.get("path", "")) for each in modules}
    if other := next((kind for kind in paths if kind not in ("Transformer", "Pooling", "Normalize")), None):
        raise CheckpointError(f"it ends in a module {other[:40]!r}")
    if "Pooling" not in paths:
        raise CheckpointError(f"{MODULES} has no module Pooling")
    path = paths["Pooling"]
    if Path(path).name != path or path == "..":
        raise CheckpointError(f"{MODULES} names a folder outside of the checkpoint")
    return Pooling(_mode(read_json(folder / path / CONFIG, MOST_BYTES)), "Normalize" in paths)


def _mode(config: Mapping[str, Any]) -> str:
    """The pooling that the configuration of a module asks for. Raises CheckpointError."""
    named = config.get("pooling_mode")
    flags = [key.removeprefix(PREFIX) for key, value in config.items() if key.startswith(PREFIX) and value is True]
    modes = [named] if isinstance(named, str) else flags
    if len(modes) != 1 or modes[0] not in KNOWN:
        raise CheckpointError(f"it is made for the pooling {' and '.join(modes)[:80] or 'none'}")
    return KNOWN[modes[0]]

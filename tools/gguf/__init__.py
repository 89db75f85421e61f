"""GGUF files to checkpoints in Hugging Face's layout: `python -m tools.convert FILE.gguf --output DIR`.

Floats stay floats of their dtype; quantised matrices stay quantised, as codes, scales and zeros of groups (see
`models/quantized/own.py`), with the values that ggml gives them. One tensor is in memory at a time.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.text.tokenizer import Tokenizer
from models import FAMILIES
from models.checkpoint.fields import Fields
from models.checkpoint.headers import WEIGHTS, Checkpoint, write_tensors
from models.config import HEAD
from models.quantized import TRANSPOSED
from models.quantized.own import Grouping, Own
from models.quantized.parts import EMBEDDING
from tools.gguf import blocks
from tools.gguf.families import Rows, find_rows, read_config
from tools.gguf.reader import FETCH_AGAIN, GGUF
from tools.gguf.vocabulary import read

IGNORED = "attn_rot_embd.weight"  # frequencies, which are computed


class Target(NamedTuple):
    """A tensor to write.

    Args:
        rows: where its values are.
        part: of a quantised weight, by its name in `Grouping.layout`; "" for floats.
        transposed: it is written [in, out].
        shape, dtype: as written.
        plus_one: the file has 1 + the values, as it has norms of Gemma.
    """

    rows: Rows
    part: str
    transposed: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    plus_one: bool = False


def convert(path: Path, folder: Path, *, progress: bool = False) -> dict[str, Any]:
    """Write the model of a GGUF file into a folder that exists.

    Returns:
        {"architecture", "tensors", "formats" (numbers of the file's tensors), "bytes", "tokenizer"}.

    Raises:
        CheckpointError: damaged, or something in it is not supported.
        UsageError: the package `gguf` is not installed.
    """
    file = GGUF.open(path)
    if file.fields().str("general.type", "model") == "adapter":
        raise file.error("the file holds an adapter (LoRA), not a model", "Merge it into its model first.")
    config, vocabulary = read_config(file), read(file)
    targets, quantized = _plan(file, config)
    if quantized:
        config["quantization_config"] = Own.config(quantized)
    ends: dict[str, Any] = {}
    if vocabulary:
        ends = {"bos_token_id": vocabulary.ids["bos"], "eos_token_id": vocabulary.ends() or None}
        files = vocabulary.files(file.fields(f"{file.fields().str('general.architecture')}.").int("context_length"))
        for name, content in files.items():
            _write(folder / name, content)
        _write(folder / "generation_config.json", ends)
    _write(folder / "config.json", config | ends)
    shapes = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in targets.items()}
    with (folder / WEIGHTS).open("wb") as out:
        write_tensors(out, shapes, {"format": "pt"}, lambda name: _tensor(file, name, targets[name], progress))
    checkpoint = Checkpoint.open(folder)  # it can be read
    if vocabulary:
        Tokenizer.load(folder)
    return {
        "architecture": checkpoint.architecture,
        "tensors": len(targets),
        "formats": Counter(entry.format for entry in file.tensors.values()),
        "bytes": (folder / WEIGHTS).stat().st_size,
        "tokenizer": vocabulary.kind if vocabulary else None,
    }


def _plan(file: GGUF, config: dict[str, Any]) -> tuple[dict[str, Target], dict[str, Grouping]]:
    """The tensors to write by name, and how the quantised modules are stored.

    Raises:
        CheckpointError: a tensor is missing, of another shape or of a format that is not supported, or is one too many.
    """
    family = FAMILIES[config["architectures"][0]]
    c = family.read(Fields(config, str(file.path)))
    kinds, targets, quantized = family.names.kinds(c), dict[str, Target](), dict[str, Grouping]()
    for name, shape in family.names.tensors(c).items():
        if c.tied and name == f"{HEAD}.weight":
            continue
        transposed, module = kinds.get(name) == TRANSPOSED, name.removesuffix(".weight")
        shape = shape[::-1] if transposed else shape
        rows = find_rows(file, config, name, shape)
        format = rows.entry.format
        if format in blocks.BLOCKS and name in kinds:
            quantized[module] = grouping = blocks.BLOCKS[format].grouping
            for part, (size, dtype) in grouping.layout(*shape).items():
                targets[f"{module}.{part}"] = Target(rows, part, False, size, dtype)
        elif format in blocks.FLOATS:
            size = shape[::-1] if transposed else shape
            plus_one = c.plus_one and name.endswith("norm.weight")
            dtype = torch.float32 if plus_one else blocks.FLOATS[format]  # a 1 less may need digits more
            targets[name] = Target(rows, "", transposed, size, dtype, plus_one)
        else:
            stored = next(name for name, entry in file.tensors.items() if entry.start == rows.entry.start)
            what = f"tensor {stored!r} has the block format {format}, which is not supported there"
            raise file.error(what, f"supported: {', '.join([*blocks.FLOATS, *blocks.BLOCKS])}")
    tables = [name.removesuffix(".weight") for name, kind in kinds.items() if kind == EMBEDDING]
    if c.tied and tables[0] in quantized:
        quantized[HEAD] = quantized[tables[0]]
    if extra := [name for name in file.unused() if not name.endswith(IGNORED)]:
        what = f"{len(extra)} tensors have no place in this architecture, {extra[0]!r} for one"
        raise file.error(what, "Is it a variant that is not supported?")
    return targets, quantized


def _tensor(file: GGUF, name: str, target: Target, progress: bool) -> Tensor:
    """Convert a tensor. Raises CheckpointError for scales that are no numbers."""
    rows, entry = target.rows, target.rows.entry
    if progress and target.part in ("", "codes"):
        print(f"{name}: {entry.format} {[rows.last - rows.first, *entry.shape[1:]]}", file=sys.stderr)
    if len(entry.shape) == 1:  # stored as one row; its elements belong to rows of a matrix
        stored = file.rows(entry._replace(shape=(1, *entry.shape)), 0, 1).view(blocks.FLOATS[entry.format]).flatten()
        found = rows.order(stored[rows.first : rows.last])
        return found.float() - 1 if target.plus_one else found
    found = blocks.convert(entry.format, target.part, _pieces(file, rows), rows.last - rows.first, entry.shape[1])
    if target.part in ("scale", "zero") and not found.isfinite().all():
        raise file.error(f"the scales of {name!r} are not finite", FETCH_AGAIN)
    found = rows.order(found)
    return found.T if target.transposed else found.reshape(target.shape)


def _pieces(file: GGUF, rows: Rows) -> Iterator[Tensor]:
    """The rows as they are stored, as many at a time as `blocks.PIECE` has bytes for."""
    step = max(1, blocks.PIECE // rows.entry.row_bytes)
    for first in range(rows.first, rows.last, step):
        yield file.rows(rows.entry, first, min(first + step, rows.last))


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

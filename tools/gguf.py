"""GGUF files to checkpoints in Hugging Face's layout: `python -m tools.convert FILE.gguf --output DIR`.

Floats stay floats of their dtype; quantised matrices stay quantised, as codes, scales and minimums of groups (see
`models/quantized/own.py`), with the values that ggml gives them. One tensor is in memory at a time.
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.text.tokenizer import Tokenizer
from kernels.linear.blocks import BLOCKS, Block
from kernels.linear.panels import exponents
from models.checkpoint.headers import Checkpoint
from models.checkpoint.listing import WEIGHTS
from models.checkpoint.tensor_files import write_tensors
from models.gguf.reader import FETCH_AGAIN
from models.gguf.tensors import Stored
from models.names import HEAD
from models.quantized.own import Grouping, config_of, fields_of_byte

PIECE = 1 << 21  # elements that are converted at a time


class Target(NamedTuple):
    """A tensor to write: `part` of a quantised weight, by its name in `Grouping.layout`, or the whole of floats."""

    name: str
    part: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def convert(path: Path, folder: Path) -> dict[str, Any]:
    """Write the model of a GGUF file into a folder that exists.

    Returns:
        {"architecture", "tensors", "formats" (numbers of the file's tensors), "bytes", "tokenizer"}.

    Raises:
        CheckpointError: damaged, or something in it is not supported.
    """
    source = Checkpoint.open(path)
    config = dict(source.config)
    targets, quantized = dict[str, Target](), dict[str, Grouping]()
    for name, info in source.tensors.items():
        assert isinstance(info, Stored)
        if info.format == "I2_S":
            what = f"{name!r} is of the type I2_S, whose inputs are rounded to 8 bits: a folder would not say so"
            raise source.gguf.error(what, "Use the file itself.")  # type: ignore[union-attr]
        if info.format not in BLOCKS:
            targets[name] = Target(name, "", info.shape, info.dtype)
            continue
        block, module = info.block, name.removesuffix(".weight")
        scale = {"half": torch.float16, "exponents": torch.uint8}.get(block.scales, torch.float32)
        quantized[module] = grouping = Grouping(block.kind, block.group, scale, least=block.least)
        for part, (shape, dtype) in grouping.layout(info.rows, info.elements // info.rows).items():
            targets[f"{module}.{part}"] = Target(name, part, shape, dtype)
    if source.quantization and (scheme := source.quantization.scheme(HEAD, "")) and HEAD not in quantized:
        tables = [module for module in quantized if source.quantization.scheme(module, "") is scheme]
        quantized[HEAD] = quantized[tables[0]]
    if quantized:
        config["quantization_config"] = config_of(quantized)
    write_files(source, config, folder)
    shapes = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in targets.items()}
    with (folder / WEIGHTS).open("wb") as out:
        write_tensors(out, shapes, {"format": "pt"}, lambda name: _tensor(source, targets[name]))
    checkpoint = Checkpoint.open(folder)  # it can be read
    if vocabulary := source.vocabulary:
        Tokenizer.load(folder)
    return {
        "architecture": checkpoint.architecture,
        "tensors": len(targets),
        "formats": Counter(info.format for info in source.tensors.values() if isinstance(info, Stored)),
        "bytes": (folder / WEIGHTS).stat().st_size,
        "tokenizer": vocabulary.kind if vocabulary else None,
    }


def write_files(source: Checkpoint, config: Mapping[str, Any], folder: Path) -> None:
    """Write the files of a checkpoint except the weights: `config`, the end-of-sequence ids, the tokenizer."""
    _write(folder / "config.json", config)
    if vocabulary := source.vocabulary:
        _write(folder / "generation_config.json", source.generation_config or {})
        _write(folder / "tokenizer_config.json", vocabulary.config())
        if vocabulary.has_scores:
            (folder / "tokenizer.model").write_bytes(vocabulary.model())
        else:
            _write(folder / "tokenizer.json", vocabulary.tokenizer())


def _tensor(source: Checkpoint, target: Target) -> Tensor:
    """Convert a tensor. Raises CheckpointError for scales that are no numbers."""
    stored, info = source.read([target.name])[target.name], source.tensors[target.name]
    if not target.part:
        return stored
    assert isinstance(info, Stored)
    block, found = info.block, torch.empty(target.shape, dtype=target.dtype)
    step, first = max(1, PIECE * info.rows // info.elements), 0
    for piece in stored.split(step):
        found[first : first + len(piece)] = _part(block, piece, target.part)
        first += len(piece)
    if target.part == "scale" and (factor := info.factor()) is not None:
        found *= factor
    if target.part != "codes" and not found.isfinite().all():
        what = f"the scales of {target.name!r} are not finite"
        raise source.gguf.error(what, FETCH_AGAIN)  # type: ignore[union-attr]
    return found


def _part(block: Block, stored_OB: Tensor, part: str) -> Tensor:
    """Convert some rows of a tensor."""
    codes, scale, least = block.rows(stored_OB)
    if part != "codes":
        found = scale if part == "scale" else least
        assert found is not None
        return exponents(found) if block.scales == "exponents" else found
    fields = fields_of_byte(block.kind)
    shifts = torch.arange(0, 8, 8 // fields, dtype=torch.uint8)
    return (codes.unflatten(1, (-1, fields)) << shifts).sum(2, dtype=torch.uint8)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""Checkpoints of other formats to safetensors, offline: `python -m tools.convert SRC --output DIR`.

SRC is a GGUF file (see `tools.gguf`), or a folder with pickles (pytorch_model.bin; qmodel.pt of hqq).

Pickles can run code when they are read. Here they are read by torch's restricted unpickler, which builds tensors and
nothing else; torch releases before 2.10 have known holes in it and are refused. Files are mapped and written one after
another. DIR appears when it is complete, with SRC's config and tokenizer files; an error leaves no partial folder.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.app.cli import called, ended, run
from engine.errors import CheckpointError, UsageError
from models.checkpoint.files import open_regular
from models.folders import snapshot
from models.later import later

with later():
    import torch
    from torch import Tensor

    from models.checkpoint.headers import Checkpoint
    from models.checkpoint.hqq import SETTINGS
    from models.checkpoint.listing import CONFIG_BYTES, INDEX_BYTES, read_json
    from models.checkpoint.tensor_files import DTYPES, FETCH_AGAIN, write_tensors
    from models.quantized.hqq import CODES
    from tools import gguf

PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
HQQ_PICKLE = "qmodel.pt"
COPIED = (".json", ".txt", ".model", ".jinja", ".md")
SAFE_TORCH = (2, 10)
ASKS_FOR_MORE = re.compile(r"(?:nsupported (?:global: )?GLOBAL|unrecognized function) (\S+)")


def convert(source: str | Path, folder: str | Path, *, progress: bool = False) -> dict[str, Any]:
    """Write the checkpoint in `source` into the new folder `folder`, its weights as safetensors in their own dtype.

    A GGUF file is converted by `tools.gguf.convert`. Tensors of pickles that share memory are written as separate
    tensors, except a head that the config ties: it is left out.
    Returns {"path", "files", "tensors", "bytes"} (bytes of all tensors), for a GGUF file with further keys.

    Raises:
        CheckpointError: no GGUF file or pickle checkpoint, a damaged one, or pickles that ask for more than tensors.
        UsageError: `folder` is there already, or torch is too old.
    """
    source, folder = Path(source), Path(folder)
    if source.is_file() or source.suffix == ".gguf":
        with new_folder(folder) as partial:
            return {"path": str(folder), "files": 1, **gguf.convert(source, partial)}
    check_torch(torch.__version__)
    source = snapshot(source)
    with new_folder(folder) as partial:
        if not (source / "config.json").is_file():
            raise CheckpointError(
                "the folder holds no config.json", where=str(source), remedy="name the model's folder"
            )
        tied = read_json(source / "config.json", CONFIG_BYTES).get("tie_word_embeddings") is True
        shards = _shards(source)
        names, total = _write_shards(source, partial, shards, tied, progress)
        copy_others(source, partial)
        Checkpoint.open(partial)  # it can be read
    return {"path": str(folder), "files": len(shards), "tensors": names, "bytes": total}


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Context with a folder to write into, which takes the name `folder` when the block ends; a failed one is removed.

    Raises:
        UsageError: `folder` is there already, or cannot be made.
    """
    if folder.exists() or folder.is_symlink():
        raise UsageError("the output folder is there already", where=str(folder), remedy="name a new one, or remove it")
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.absolute().parent))
    except OSError as error:
        raise UsageError(f"the output folder cannot be made: {error.strerror}", where=str(folder)) from None
    try:
        with _stopped_by_signals():
            yield partial
            partial.chmod(0o777 & ~_umask())
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise SystemExit, so that what is half-written is removed."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def copy_others(source: Path, folder: Path) -> None:
    """Copy a checkpoint's configuration, tokenizer and licence, not its weights and their index."""
    for path in sorted(source.iterdir()):
        wanted = path.suffix in COPIED or path.name.startswith(("LICENSE", "NOTICE"))
        if path.is_file() and wanted and not re.search(r"\.(bin|safetensors)\.", path.name):
            shutil.copyfile(path, folder / path.name)


def _write_shards(
    source: Path, partial: Path, shards: dict[str, set[str] | None], tied: bool, progress: bool
) -> tuple[int, int]:
    """Write every shard, and the index if there are several; returns the number of tensors and their bytes."""
    weight_map: dict[str, str] = {}
    total = 0
    for i, (file, expected) in enumerate(shards.items(), 1):
        tensors = _separate(_load(source / file), tied)
        wrong = set() if expected is None else expected ^ tensors.keys()
        if tied:
            wrong.discard("lm_head.weight")
        if wrong:
            what = f"the index and the file disagree about {len(wrong)} tensors, {min(wrong)!r} for one"
            where = f"{source / file}, {PICKLE_INDEX}"
            raise CheckpointError(what, where=where, remedy=FETCH_AGAIN)
        if twice := weight_map.keys() & tensors.keys():
            raise CheckpointError(f"tensor {min(twice)!r} lies in two files", where=str(source / file))
        name = re.sub("pytorch_model|qmodel", "model", file).rpartition(".")[0] + ".safetensors"
        with (partial / name).open("wb") as written:
            write_tensors(written, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        total += size
        if progress:
            print(f"{file} -> {name} ({i}/{len(shards)}): {len(tensors)} tensors, {size:,} B", file=sys.stderr)
        del tensors
    if not {PICKLE, HQQ_PICKLE} & shards.keys():
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return len(weight_map), total


def check_torch(version: str) -> None:
    """Raises UsageError if the restricted unpickler of this torch has known holes (CVE-2025-32434, CVE-2026-24747)."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found or (int(found[1]), int(found[2])) < SAFE_TORCH:
        raise UsageError(
            f"torch {version} does not read pickles safely: torch >= {SAFE_TORCH[0]}.{SAFE_TORCH[1]} is needed",
            remedy="convert with a newer torch; the result runs with this one",
        )


def _shards(source: Path) -> dict[str, set[str] | None]:
    """The files to convert, with the tensors that the index says each holds. A single file wins over an index."""
    for single in (PICKLE, HQQ_PICKLE):
        if (source / single).is_file():
            return {single: None}
    index = source / PICKLE_INDEX
    if not index.is_file():
        there = any(source.glob("*.safetensors"))
        what = "the weights are safetensors already" if there else f"the folder holds neither {PICKLE} nor its index"
        raise CheckpointError(what, where=str(source))
    weight_map = read_json(index, INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("weight_map: expected an object that maps tensors to files", where=str(index))
    shards: dict[str, set[str] | None] = {}
    for name, file in sorted(weight_map.items(), key=lambda item: (str(item[1]), item[0])):
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.bin", file):
            raise CheckpointError(f"weight_map: {file!r} is no plain name of a .bin file"[:300], where=str(index))
        if not (source / file).is_file():
            raise CheckpointError(f"{file} is not there", where=str(index), remedy=FETCH_AGAIN)
        names = shards.setdefault(file, set())
        assert names is not None
        names.add(name)
    return shards


def _load(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a pickle without running any of its code; mapped where its format allows."""
    try:
        with open_regular(path) as file:
            start = file.read(64)
        if start.startswith(b"version https://git-lfs"):
            raise CheckpointError("the file is a git-LFS pointer", where=str(path), remedy="fetch it with git lfs pull")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles that we may refuse yet
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # damaged bytes can make the unpickler raise anything
        if asked := ASKS_FOR_MORE.search(str(error)):
            what = f"the pickle asks for more than tensors ({asked[1]}): refused, nothing of it was run"
            raise CheckpointError(what[:300], where=str(path), remedy="Do not trust this file.") from None
        reason = str(error).split("WeightsUnpickler error: ")[-1].strip().split("\n")[0]  # without torch's advice
        what = f"not a readable pickle of tensors: {type(error).__name__}: {reason}"
        raise CheckpointError(what[:300], where=str(path), remedy=FETCH_AGAIN) from None
    if not isinstance(value, dict) or not value:
        got = "a dictionary without any" if isinstance(value, dict) else type(value).__name__
        raise CheckpointError(f"expected tensors by name, got {got}", where=str(path))
    if path.name == HQQ_PICKLE:
        value = _of_hqq(value, path)
    for name, tensor in value.items():
        if problem := _problem(name, tensor):
            raise CheckpointError(f"{name!r}: {problem}"[:300], where=str(path))
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{name!r}: larger than what the file holds of it"[:300], where=str(path))
    return value


def _of_hqq(modules: dict[Any, Any], path: Path) -> dict[str, Any]:
    """The tensors and settings of hqq's modules by names, in the form of its safetensors; older files have the settings
    in `meta`."""
    found: dict[str, Any] = {}
    for module, given in modules.items():
        if not isinstance(given, dict) or not isinstance(given.get("meta", {}), dict):
            raise CheckpointError(f"{module!r}: expected a module's tensors and settings"[:300], where=str(path))
        parts = {name: value for name, value in given.items() if name != "meta"} | given.get("meta", {})
        for name, value in parts.items():
            if isinstance(value, Tensor):
                found[f"{module}.{name}"] = value
            elif name not in SETTINGS or value is None:
                if isinstance(value, dict) and CODES in parts:
                    what = f"{module!r}: {name!r} is quantised itself, which is not supported"
                    raise CheckpointError(what[:300], where=str(path))
            elif isinstance(value, str | torch.dtype):
                found[f"{module}.{name}"] = torch.tensor([*str(value).encode()], dtype=torch.uint8)
            else:
                try:
                    found[f"{module}.{name}"] = torch.tensor(value, dtype=torch.int64)
                except (TypeError, ValueError, RuntimeError):
                    what = f"{module!r}: expected numbers as {name}, got {value!r}"
                    raise CheckpointError(what[:300], where=str(path)) from None
    return found


def _problem(name: Any, tensor: Any) -> str:
    """Why this cannot be a tensor of a safetensors file; empty if it can."""
    if not isinstance(name, str):
        return f"expected a name, got {type(name).__name__}"
    if name == "__metadata__" or not name.isprintable():
        return "this cannot be the name of a tensor in a safetensors file"
    if isinstance(tensor, dict):
        return "expected a tensor, got a dictionary: this is a training checkpoint, of which the model is a part"
    if not isinstance(tensor, Tensor):
        return f"expected a tensor, got {type(tensor).__name__}"
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return f"expected plain data, got a tensor of layout {tensor.layout} on {tensor.device}"
    if tensor.dtype not in DTYPES.values():
        return f"expected one of the dtypes of safetensors, got {tensor.dtype}"
    return "" if tensor.numel() else f"expected data, got the empty shape {list(tensor.shape)}"


def _separate(tensors: dict[str, Tensor], tied: bool) -> dict[str, Tensor]:
    """Make the tensors contiguous and separate in memory; a tied head that equals the embedding is left out."""
    out: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name in sorted(tensors, key=lambda name: (name.endswith("lm_head.weight"), name)):
        tensor = tensors[name].detach()
        memory = tensor.untyped_storage().data_ptr()
        if memory in seen:
            if tied and name.endswith("lm_head.weight"):
                continue
            tensor = tensor.clone()
        seen.add(memory)
        # A view of part of a storage would otherwise be written with a stride, or refused.
        out[name] = tensor.contiguous()
    return out


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def main(argv: list[str] | None = None) -> int:
    what = "Turn a GGUF file, or a checkpoint with pickled weights, into a folder with safetensors; "
    parser = argparse.ArgumentParser(
        prog=called("python -m tools.convert"), description=f"{what}no code in the pickles is run."
    )
    source = "GGUF file, or model folder with pytorch_model.bin, its shards and index, or hqq's qmodel.pt"
    parser.add_argument("source", metavar="SRC", help=source)
    parser.add_argument("folder", metavar="DIR", nargs="?", help="the same as --output DIR")
    parser.add_argument("--output", metavar="DIR", help="folder to make; must not exist")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    parser.add_argument("-v", "--verbose", action="store_true", help="traceback of errors")
    args = parser.parse_args(argv)
    if (args.folder is None) == (args.output is None):
        parser.error("name the folder to make: --output DIR")

    def work() -> int:
        began = time.perf_counter()
        report = convert(args.source, args.output or args.folder, progress=not args.quiet)
        print(json.dumps({**report, "seconds": round(time.perf_counter() - began, 3)}))
        return 0

    return run(work, args.verbose)


if __name__ == "__main__":
    sys.exit(ended(main))

"""The files that a model needs from a hub repository: one GGUF file, or the safetensors and their companions.

Pickles and code are never among them.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from engine.errors import CheckpointError
from engine.text.tokenizer import FILES
from models.checkpoint.listing import ADAPTERS, CONFIG_BYTES, INDEX, INDEX_BYTES, WEIGHTS, read_json
from models.checkpoint.model_types import with_architecture
from models.checkpoint.wrapped import is_wrapped, text_config
from models.errors import show
from models.folders import PART

USUAL = "Q4_K_M"  # the quantisation that llama.cpp takes if none is named
BESIDE = (  # safetensors; each is read if it is there
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
)
MAX_NAMED = 20  # files of a repository that an error lists
NO_MODEL = re.compile(r"(^|[/._-])(mmproj|imatrix|mtp)([._-]|$)", re.IGNORECASE)  # parts of models, as llama.cpp has it


@dataclass(frozen=True)
class Needed:
    """The files to fetch, and which of them is the model.

    Args:
        files: the files by their paths in the repository.
        gguf: the GGUF file to open, the first of a divided model; "": the folder is the model.
    """

    files: tuple[str, ...]
    gguf: str = ""


def needed(files: Collection[str], file: str, where: str, read: Callable[[str], Path]) -> Needed:
    """Choose the files of a model.

    Args:
        files: all files of the repository, by their paths in it.
        file: the GGUF file that was asked for, or its quantisation; "": the safetensors if there are any, else the
            only GGUF file, else that of the quantisation `USUAL`.
        where: the repository, for messages.
        read: fetches one file and returns its path.

    Raises:
        CheckpointError: no file or several files fit; the error lists them.
    """
    models = gguf_models(files)
    if file:
        return _gguf(_named(file, files, models, where), models)
    if "config.json" in files and not {WEIGHTS, INDEX}.isdisjoint(files):
        return _safetensors(files, where, read)
    usual = [name for name in models if _has(USUAL, name)]
    if len(models) == 1 or len(usual) == 1:
        return _gguf((usual or [*models])[0], models)
    raise _several([*models], where) if models else _nothing(files, where, read)


def architecture_of(path: Path) -> str:
    """The architecture that a config.json names, for several modalities that of the text model; "" if it names none.

    Raises:
        CheckpointError: it is no config, or has no text model that is supported.
    """
    config = with_architecture(read_json(path, CONFIG_BYTES))
    if is_wrapped(config):
        config = text_config(config, show(path))
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def gguf_models(files: Collection[str]) -> dict[str, list[str]]:
    """The GGUF models of a repository: the first file of each, and all its files."""
    found: dict[str, list[str]] = {}
    for name in sorted(files):
        if name.lower().endswith(".gguf") and not NO_MODEL.search(name):
            found.setdefault(PART.sub(r"\1-00001-of-\3.gguf", name), []).append(name)
    return {first: parts for first, parts in found.items() if first in parts}


def _has(quantisation: str, name: str) -> bool:
    """Whether a file's name has a quantisation as a part, as `-hf` of llama.cpp compares: in any case."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(quantisation)}[./-]", name, re.IGNORECASE) is not None


def _named(file: str, files: Collection[str], models: dict[str, list[str]], where: str) -> str:
    """The first file of the model that was asked for."""
    for first, parts in models.items():
        if file in parts:
            return first
    if file in files:
        raise CheckpointError(
            f"{show(file)} is no GGUF file of a model",
            where=where,
            remedy="leave the file out to load the repository's safetensors; pickles and code are never fetched",
        )
    found = [name for name in models if _has(file, name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise _several(found, where)
    listed = f"the GGUF files there are: {_listed([*models])}" if models else f"there are: {_listed(sorted(files))}"
    raise CheckpointError(f"no GGUF file has the name or the quantisation {show(file)}", where=where, remedy=listed)


def _gguf(first: str, models: dict[str, list[str]]) -> Needed:
    return Needed(tuple(models[first]), first)


def _safetensors(files: Collection[str], where: str, read: Callable[[str], Path]) -> Needed:
    weights = [WEIGHTS]
    if WEIGHTS not in files:  # a single file wins over an index, as when the folder is opened
        shards = read_json(read(INDEX), INDEX_BYTES).get("weight_map")
        names = sorted({*map(str, shards.values())}) if isinstance(shards, dict) else []
        if odd := [name for name in names if "/" in name or not name.endswith(".safetensors")]:
            raise CheckpointError(f"{INDEX} names {show(odd[0])}, no safetensors file beside it", where=where)
        if absent := [name for name in names if name not in files]:
            raise CheckpointError(f"{INDEX} names {show(absent[0])}, which the repository does not hold", where=where)
        weights = [INDEX, *names]
    tokenizer = next((name for name in FILES if name in files), None)
    others = [tokenizer] if tokenizer else []
    if tokenizer == "vocab.json":
        others.append("merges.txt")
    return Needed(tuple(name for name in ("config.json", *BESIDE, *others, *weights) if name in files))


def _several(names: list[str], where: str) -> CheckpointError:
    return CheckpointError(
        f"{len(names)} GGUF files suit: {_listed(names)}",
        where=where,
        remedy="name one, or its quantisation, after a colon, such as org/name:Q8_0 or org/name:FILE.gguf",
    )


def _nothing(files: Collection[str], where: str, read: Callable[[str], Path]) -> CheckpointError:
    """The error for a repository without weights that can be used."""
    if ADAPTERS[0] in files:
        base = (
            read_json(read(ADAPTERS[0]), CONFIG_BYTES).get("base_model_name_or_path") or "a model that it does not name"
        )
        what = f"the repository holds an adapter (LoRA) for {show(base)}, not a model"
        remedy = "name that model, fetch the adapter (`hf download`), and give its folder as --adapter"
    elif pickles := sorted(name for name in files if name.endswith((".bin", ".pt", ".pth", ".ckpt"))):
        what = f"the weights are pickles ({show(pickles[0])}), which can run code and are never fetched"
        remedy = "if you trust their source: `hf download` and `python -m tools.convert`"
    else:
        there = _listed(sorted(files))
        what = f"the repository has neither safetensors of a language model nor GGUF files, but: {there}"
        remedy = "look for another version of the model"
    return CheckpointError(what, where=where, remedy=remedy)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return (", ".join(map(show, names[:MAX_NAMED])) or "none") + more

"""Prefixes in files: the keys and values of a long system prompt, evaluated once and read by every later process.

A safetensors file: one or two tensors [L, G, tokens, D] for each kind of row that layers keep; for recurrent layers the
state after the last complete block and the rows that tokens after the prefix read. Its metadata has the tokens, a
description of the model (weights, dtypes, weight format, kind of device, summation order), and a checksum. It contains
no salt.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.cache.pool import PagePool
from engine.cache.states import TrunkStates
from engine.cache.tree import TokenTree
from engine.errors import UsageError, reason_of, shortened
from engine.step.packing import Chunk
from engine.step.runner import Runner
from kernels import same_bits
from kernels.kv_kinds import parts
from models.checkpoint.files import open_regular, replacing
from models.checkpoint.tensor_files import buffer_of, write_tensors
from models.shape import ModelShape

FORMAT, VERSION = "coppice prefix", "3"
LARGEST = float(1 << 20)  # magnitude of keys, values and scales, so that sums of their products stay finite
REMEDY = "make one with --save-prefix and the same flags"


def save_prefix(runner: Runner, model_key: str, path: str | Path, tokens: Sequence[int]) -> None:
    """Evaluate tokens, keep them in the cache of prefixes, and write the cached part to a file.

    Args:
        model_key: see `Task`.

    Raises:
        UsageError: the file cannot be written, prefixes are not kept, or the tokens are invalid or too few.
        KVMemoryError: they do not fit into the cache.
    """
    _check(runner)
    if (kind := runner.model.shape.delta) is not None and len(tokens) < kind.block:
        what = f"the prefix is too short: expected at least {kind.block} tokens, got {len(tokens)}"
        raise UsageError(what, where="recurrent layers keep a state of each whole block of tokens")
    with _tree(runner, tokens, "") as tree:
        while left := len(tokens) - tree.trunk.cached:
            chunk = min(runner.budget, left)
            runner.forward([Chunk(tree, chunk, [], tree.allocate(chunk, []))])
        kept = {name: x_LGSD[:, :, _slots(tree)].cpu() for name, x_LGSD in _parts(runner.pool).items()}
        kept |= {name: x_L[:, places].cpu() for name, (x_L, places) in _recurrent(tree).items()}
    metadata = {"format": FORMAT, "version": VERSION, "model": _model(model_key), "tokens": json.dumps([*tokens])}
    metadata["computed"] = _computed(runner.pool.device)
    try:
        with replacing(Path(path)) as file:
            write_tensors(file, kept, metadata | {"checksum": _checksum(kept, metadata["tokens"])})
    except OSError as error:
        raise UsageError(f"the prefix cannot be written: {error.strerror}", where=str(path)) from error


def load_prefix(runner: Runner, model_key: str, path: str | Path, salt: str = "") -> list[int]:
    """Put a saved prefix into the cache, as if a request of this salt had just used it. Returns its tokens.

    Raises:
        UsageError: the file cannot be read, is no prefix, is damaged, holds values that no model computes, or is
            from another model, format, kind of device or order of sums; prefixes are not kept.
        KVMemoryError: the prefix does not fit into the cache.
    """
    _check(runner)
    tokens, kept = _read(runner, model_key, path)
    with _tree(runner, tokens, salt) as tree:
        tree.allocate(len(tokens), [])
        for name, x_LGSD in _parts(runner.pool).items():
            x_LGSD[:, :, _slots(tree)] = kept[name].to(x_LGSD.device)
        for name, (x_L, places) in _recurrent(tree).items():
            x_L[:, places] = kept[name].to(x_L.device)
    return tokens


@contextmanager
def _tree(runner: Runner, tokens: Sequence[int], salt: str) -> Iterator[TokenTree]:
    """Context with a tree of tokens, to be filled; its evaluated tokens are then kept as a prefix."""
    switch = runner.model.shape.switch_length
    tree = TokenTree(runner.pool, tokens, expected=len(tokens), switch_length=switch)
    tree.salt = salt
    try:
        with torch.inference_mode():
            yield tree
            tree.save()
    finally:
        tree.release()


def _check(runner: Runner) -> None:
    if runner.shared:
        raise UsageError("a prefix in a file is for a model in one process, which has all its heads")
    if runner.pool.prefixes is None:
        if runner.model.shape.steady_length is not None:
            raise UsageError(
                "prefixes of this model cannot be kept", where="its keys depend on how long the sequence was in the end"
            )
        raise UsageError("prefixes are not kept", remedy='load with prefix_cache="on" (--prefix-cache on)')


def _parts(pool: PagePool) -> dict[str, Tensor]:
    """The tensors of a cache whose slots are rows, by the names that a file has for them."""
    groups = ([part for x_LGSD in group for part in parts(x_LGSD)] for group in pool.cache.groups)
    return {f"{i}.{j}": x_LGSD for i, group in enumerate(groups) for j, x_LGSD in enumerate(group)}


def _recurrent(tree: TokenTree) -> dict[str, tuple[Tensor, list[int]]]:
    """The tensors of recurrent layers, by the names that a file has for them, each with the places of a trunk's rows or
    state that later tokens read."""
    states, cached = tree.trunk.states, tree.trunk.cached
    if states is None:
        return {}
    rows_LRW, states_LSHKV = tree.pool.cache.recurrent
    rows = [states.rows[place] for place in range(states.earliest(cached), cached)]
    return {"rows": (rows_LRW, rows), "states": (states_LSHKV, [states.state])}


def _slots(tree: TokenTree) -> Tensor:
    size = tree.pool.page_size
    return torch.tensor([tree.trunk.slot(i, size) for i in range(tree.trunk.cached)], device=tree.pool.device)


def _model(model_key: str) -> str:
    """The key of the model as it is computed, without the name of its folder."""
    return model_key.rpartition("-")[2]


def _computed(device: torch.device) -> str:
    """The conditions that affect bits of keys and values: the kind of device, and a GPU's order of sums."""
    return f"{device.type}, {same_bits.NAME}=on" if device.type != "cpu" and same_bits.asked() else device.type


def _checksum(kept: dict[str, Tensor], tokens: str) -> str:
    checksum = zlib.crc32(tokens.encode())
    for name in sorted(kept):
        checksum = zlib.crc32(buffer_of(kept[name].contiguous()), checksum)
    return f"{checksum:08x}"


def _read(runner: Runner, model_key: str, path: str | Path) -> tuple[list[int], dict[str, Tensor]]:
    """The tokens and tensors of a file, mapped into memory."""
    where = str(path)
    try:
        open_regular(path).close()
        with safe_open(path, framework="pt") as file:
            metadata, kept = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise UsageError(f"the prefix cannot be read: {reason_of(error)}", where=where) from None
    except (SafetensorError, ValueError) as error:
        raise UsageError(f"the file is no prefix, or damaged: {error}", where=where, remedy=REMEDY) from None
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        raise UsageError("the file is no prefix of this version", where=where, remedy=REMEDY)
    if metadata.get("model") != _model(model_key):
        what = "another model, dtype or format of weights or cache made the prefix"
        raise UsageError(what, where=f"{where}, loaded: {model_key}", remedy=REMEDY)
    if (made := metadata.get("computed")) != (ours := _computed(runner.pool.device)):
        what = f"the prefix was computed on {shortened(ascii(made))}, not on {ours!r}"
        raise UsageError(what, where=where, remedy=REMEDY)
    if metadata.get("checksum") != _checksum(kept, metadata.get("tokens", "")):
        raise UsageError("the prefix is damaged: its checksum is another", where=where, remedy=REMEDY)
    try:
        tokens = _tokens(runner.model.shape, metadata.get("tokens", ""))
        _check_tensors(runner.pool, kept, len(tokens))
    except ValueError as error:
        raise UsageError(f"the prefix is not valid: {error}", where=where, remedy=REMEDY) from None
    return tokens, kept


def _tokens(shape: ModelShape, text: str) -> list[int]:
    """The tokens of a file's metadata. Raises ValueError."""
    vocab, reach = shape.vocab_size, shape.max_positions
    least = 1 if shape.delta is None else shape.delta.block
    try:
        tokens = json.loads(text)
    except (ValueError, RecursionError):
        tokens = None
    if not isinstance(tokens, list) or not tokens or any(type(t) is not int or not 0 <= t < vocab for t in tokens):
        raise ValueError(f"tokens: expected a list of ids from 0 to {vocab - 1}, got {shortened(ascii(text))}")
    if len(tokens) < least:
        raise ValueError(f"tokens: expected at least {least}, got {len(tokens)}")
    if reach is not None and len(tokens) > reach:
        raise ValueError(f"tokens: expected at most {reach}, the model's context, got {len(tokens)}")
    return tokens


def _check_tensors(pool: PagePool, kept: dict[str, Tensor], tokens: int) -> None:
    """Check a file's tensors against those of the cache. Raises ValueError."""
    like = {name: (x_LGSD, [*x_LGSD.shape[:2], tokens, x_LGSD.shape[3]]) for name, x_LGSD in _parts(pool).items()}
    if pool.stores is not None:
        counts = tokens - TrunkStates(pool.stores).earliest(tokens), 1
        for name, x_L, count in zip(("rows", "states"), pool.cache.recurrent, counts, strict=True):
            like[name] = x_L, [len(x_L), count, *x_L.shape[2:]]
    if kept.keys() != like.keys():
        raise ValueError(f"expected the tensors {', '.join(like)}, got {shortened(ascii(', '.join(kept)))}")
    for name, (x, shape) in like.items():
        found = kept[name]
        if [*found.shape] != shape or found.dtype != x.dtype:
            want, got = f"{shape} of {x.dtype}", f"{[*found.shape]} of {found.dtype}"
            raise ValueError(f"{name}: expected {want}, got {got}")
        if found.dtype == torch.uint8:  # e4m3
            sound = not bool((found & 127 == 127).any())
        else:
            sound = found.dtype == torch.int8 or bool(found.abs().amax() <= LARGEST)  # NaN is not
        if not sound:
            raise ValueError(f"{name}: expected numbers of at most {LARGEST:.0f}, got larger ones or NaN")

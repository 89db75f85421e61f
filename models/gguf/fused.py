"""Queries, keys and values in one tensor where checkpoints have three: llama.cpp's converter joins them on request."""

import re

from models.checkpoint.fields import Fields
from models.gguf.names import NAMES
from models.gguf.reader import GGUF, TAILS

JOINED = re.compile(r"blk\.(\d{1,5})\.attn_qkv\.(weight|bias)")
JOINED_IN_CHECKPOINTS = ("phi3",)
APART = "self_attn.qkv_proj", "linear_attn.in_proj_qkv"  # names of the tensor in architectures that have three


def split_attention(file: GGUF, keys: Fields) -> None:
    """Put `attn_q`, `attn_k` and `attn_v` in the place of such tensors of `file`; one of another shape stays."""
    arch = file.fields().str("general.architecture")
    names = NAMES[arch]
    if "blk.attn_q" not in names or names.get("blk.attn_qkv", APART[0]) not in APART or arch in JOINED_IN_CHECKPOINTS:
        return
    for name, entry in [*file.tensors.items()]:
        found = JOINED.fullmatch(name)
        if found is None or f"blk.{found[1]}.ssm_conv1d.weight" in file.tensors or entry.format in TAILS:
            continue
        parts, start = _rows(keys, int(found[1]), entry.shape[0]), entry.start
        if not parts:
            continue
        del file.tensors[name]
        matrix, total = len(entry.shape) > 1, sum(parts)
        for part, rows in zip("qkv", parts, strict=True):
            size = rows * entry.row_bytes if matrix else rows * entry.row_bytes // total
            row_bytes = entry.row_bytes if matrix else size  # that of a vector is all of it
            piece = entry._replace(shape=(rows, *entry.shape[1:]), row_bytes=row_bytes, start=start)
            file.tensors[f"blk.{found[1]}.attn_{part}.{found[2]}"] = piece
            start += size


def _rows(keys: Fields, layer: int, total: int) -> tuple[int, int, int] | None:
    """Return the rows of queries, whose gates are among them, of keys and of values; None if the keys do not fit."""

    def here(name: str, default: object) -> object:
        value = keys.config.get(name, default)
        return value if not isinstance(value, list) else value[layer] if layer < len(value) else None

    heads = here("attention.head_count", None)
    shared = here("attention.head_count_kv", heads)
    if type(heads) is not int or type(shared) is not int or heads < 1 or shared < 1:
        return None
    end = "_swa" if here("attention.sliding_window_pattern", False) is True else ""
    usual = here("attention.key_length", total // (heads + 2 * shared))
    key = here(f"attention.key_length{end}", usual)
    value = here(f"attention.value_length{end}", here("attention.value_length", key))
    if type(key) is not int or type(value) is not int or key < 1 or value < 1:
        return None
    queries = total - shared * (key + value)
    return (queries, shared * key, shared * value) if queries > 0 else None

"""The rotary embeddings of GGUF files with Hugging Face's field names; Llama 3's parameters are recovered from its
factors."""

import itertools
import math
import os
import struct
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from models.checkpoint.fields import Fields
from models.checkpoint.files import open_regular
from models.gguf.reader import FETCH_AGAIN, GGUF
from models.rope import RopeConfig, RotaryEmbedding

FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
NEAR = 1e-5  # relative error of frequencies that are rounded


def decimal(value: float) -> float:
    """Return the shortest decimal number that rounds to the same float32: 1e-05 for 9.999999747378752e-06."""
    stored = struct.pack("<f", value)
    return next(short for n in range(1, 18) if struct.pack("<f", short := float(f"{value:.{n}g}")) == stored)


def rotary(file: GGUF, keys: Fields, head_dim: int, context: int, rotated: str) -> dict[str, Any]:
    """Return base and scaling of rotary embeddings, and the rotated share of a head, as fields of a config.

    Args:
        context: the model's longest context, in tokens.
        rotated: how much of a head may be rotated: "some" or "all".

    Raises:
        CheckpointError: it names the key or the tensor.
    """
    dims = keys.int("rope.dimension_count", head_dim, high=head_dim)
    if rotated == "all" and dims != head_dim:
        raise keys.error("rope.dimension_count", f"the size of a head, {head_dim}")
    theta = decimal(keys.float("rope.freq_base", 10000.0, low=1.0, high=1e15))
    share = {"partial_rotary_factor": dims / head_dim} if dims != head_dim else {}
    scaling, top = _scaling(file, keys, theta, dims, context), {}
    if scaling and scaling["rope_type"] == "longrope":  # Phi-3 has the original length there
        top["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return {"rope_theta": theta, "rope_scaling": scaling, **share, **top}


def _scaling(file: GGUF, keys: Fields, theta: float, dims: int, context: int) -> dict[str, Any] | None:
    """Return `rope_scaling` of the configuration."""
    plain, long, short = (factors(file, name, dims // 2) if name in file.tensors else None for name in FACTORS)
    kind = keys.choice("rope.scaling.type", ("none", "linear", "yarn", "longrope"), "none")
    factor = keys.float("rope.scaling.factor", None, low=0.0, high=1e6)
    factor = keys.float("rope.scale_linear", 0.0) if factor is None else factor
    if keys.config.get("rope.scaling.type") == "none":  # and not absent, which means linear
        factor = 0.0
    original = keys.int("rope.scaling.original_context_length", context, high=2**31)
    attention = keys.float("rope.scaling.attn_factor", 1.0)
    if long or short:
        if not (long and short) or plain or kind not in ("none", "longrope"):
            raise keys.error("rope.scaling.type", "factors for long and for short texts, without other scaling")
        scale = max(1.0, context / original)
        if scale > 1 and original == 1:
            raise keys.error("rope.scaling.original_context_length", "more than 1")
        usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        scaling = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        other = {} if math.isclose(attention, usual, rel_tol=1e-6) else {"attention_factor": decimal(attention)}
        return scaling | {"original_max_position_embeddings": original} | other
    if attention != 1.0:
        raise keys.error("rope.scaling.attn_factor", "1, or factors for long and for short texts")
    if plain and any(value != 1.0 for value in plain):
        if kind != "none":
            raise keys.error("rope.scaling.type", f"none, as there is a tensor {FACTORS[0]}")
        return _llama3(file, theta, dims, torch.tensor(plain, dtype=torch.float64))
    if kind == "yarn":
        return _yarn(keys, factor, original)
    if kind == "longrope":
        raise keys.error("rope.scaling.type", f"the tensors {' and '.join(FACTORS[1:])}")
    return {"rope_type": "linear", "factor": decimal(factor)} if factor not in (0.0, 1.0) else None


def _yarn(keys: Fields, factor: float, original: int) -> dict[str, Any]:
    names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
    given = {name: keys.float(f"rope.scaling.{key}", None) for key, name in names.items()}
    scaling = {"rope_type": "yarn", "factor": decimal(factor), "original_max_position_embeddings": original}
    return scaling | {name: decimal(value) for name, value in given.items() if value is not None}


def factors(file: GGUF, name: str, count: int) -> list[float]:
    """Read a tensor of so many positive numbers from the file. Raises CheckpointError if it is another one."""
    values = numbers(file, name, count)
    if not all(1e-6 <= value <= 1e9 for value in values):
        raise file.error(f"tensor {name!r}: expected factors from 1e-06 to 1e+09", FETCH_AGAIN)
    return list(map(decimal, values))


def numbers(file: GGUF, name: str, count: int | None = None) -> tuple[float, ...]:
    """Read a vector of float32, of so many elements if not None. Raises CheckpointError if it is another tensor."""
    entry = file.entry(name)
    if entry.format != "F32" or len(entry.shape) != 1 or count not in (None, *entry.shape):
        wanted = "numbers" if count is None else f"{count} numbers"
        raise file.error(f"tensor {name!r}: expected {wanted} in F32, got {entry.format} {list(entry.shape)}")
    (count,) = entry.shape
    try:
        with open_regular(entry.file) as stored:
            return struct.unpack(f"<{count}f", os.pread(stored.fileno(), 4 * count, entry.start))
    except (OSError, struct.error):
        raise file.error("the file became shorter while it was read", FETCH_AGAIN) from None


def _llama3(file: GGUF, theta: float, dims: int, factors_F: Tensor) -> dict[str, Any]:
    """Find the parameters that give the file's frequencies. Raises CheckpointError if there are none."""
    plain_F = RotaryEmbedding(RopeConfig(dims, theta=theta)).inv_freq.double()

    def error(found: tuple[float, float, float, float]) -> float:
        length, factor, low, high = found
        rope = RopeConfig(dims, "llama3", theta, int(length), factor, low, high)
        return ((RotaryEmbedding(rope).inv_freq * factors_F / plain_F) - 1).abs().max().item()

    best = min(_candidates(plain_F, factors_F), key=error)
    if error(best) > NEAR:
        raise file.error(f"tensor {FACTORS[0]!r}: its factors are not those of Llama 3, and no others are supported")
    names = ("original_max_position_embeddings", "factor", "low_freq_factor", "high_freq_factor")
    return {"rope_type": "llama3", **dict(zip(names, best, strict=True))}


def _candidates(plain_F: Tensor, factors_F: Tensor) -> Iterator[tuple[int, float, float, float]]:
    """Yield parameters to try, the usual ones first: original length, factor, low and high factor of frequencies."""
    largest, lengths = factors_F.max().item(), (8192, *(2**n for n in range(5, 19)))
    slowed = {largest, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0}
    yield from itertools.product(lengths, sorted(slowed, reverse=True), (1.0, 0.5, 2.0), (4.0, 2.5, 8.0))
    for factor in (factor for factor in slowed if factor > 1):
        # Between the two wavelengths 1 / factor_F is a linear function of the frequency.
        between = (factors_F > 1 + 1e-6) & (factors_F < factor * (1 - 1e-6))
        if between.sum() >= 2:
            share = (1 / factors_F[between] - 1 / factor) / (1 - 1 / factor)
            x = plain_F[between] / (2 * math.pi)
            slope = ((share[0] - share[-1]) / (x[0] - x[-1])).item()
            if slope > 0 and (low := x[0].item() - share[0].item() / slope) > 0:
                yield 8192, factor, low * 8192, (low + 1 / slope) * 8192

"""Quantised checkpoints: `quantization_config` of config.json names the method; unsupported ones are refused.

Each method is a file here. It reads the config, names the tensors that represent a weight (`Checkpoint.check` compares
them with the headers) and makes a `GroupedWeight` from them, whose rows are read when a layer packs them.
"""

from collections.abc import Callable

from models.checkpoint.fields import Fields
from models.quantized import (
    auto_round,
    awq,
    bitnet,
    bitsandbytes,
    compressed,
    float8,
    gemma,
    gptq,
    hqq,
    mlx,
    modelopt,
    mxfp4,
    own,
    quanto,
    quark,
    torchao,
)
from models.quantized.parts import Quantization, unsupported

METHODS: dict[str, Callable[[Fields], Quantization | None]] = {
    "auto-round": auto_round.parse,
    "awq": awq.parse,
    "bitnet": bitnet.parse,
    bitsandbytes.NAME: bitsandbytes.parse,
    "compressed-tensors": compressed.parse,
    "coppice": own.parse,
    "fbgemm_fp8": float8.parse_rows,
    "fp8": float8.parse,
    gemma.NAME: gemma.parse,
    "gptq": gptq.parse,
    hqq.NAME: hqq.parse,
    "intel/auto-round": auto_round.parse,  # up to version 0.4
    mlx.METAL: mlx.parse_metal,
    mlx.NAME: mlx.parse,
    "modelopt": modelopt.parse,
    "mxfp4": mxfp4.parse,
    "mxfp8": float8.parse_mxfp8,
    quanto.NAME: quanto.parse,
    quark.NAME: quark.parse,
    torchao.NAME: torchao.parse,
}


def quantization(fields: Fields) -> Quantization | None:
    """Return the quantisation that a config describes; None: floats. Raises CheckpointError if it is not supported."""
    given = fields.sub("quantization_config")
    if given is None:
        return None
    method = given.str("quant_method", "") or (bitsandbytes.NAME if bitsandbytes.described(given) else "")
    if method not in METHODS:
        what = f"weights quantized by {method[:80]!r} are not supported (read: {', '.join(METHODS)})"
        raise unsupported(given, what)
    return METHODS[method](given)

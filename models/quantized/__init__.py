"""Checkpoints that are quantised already: `quantization_config` of config.json decides; what is not read is refused.

A method is a file here. It reads the config, names the tensors that stand for a weight (`Checkpoint.check` compares
them with the headers) and makes a `GroupedWeight` of them, whose rows are read when a layer packs them.
"""

from collections.abc import Callable

from models.checkpoint.fields import Fields
from models.quantized import awq, compressed, float8, gptq, mxfp4, own
from models.quantized.parts import EMBEDDING, LINEAR, TRANSPOSED, Part, Quantization, Scheme, Source, unsupported

__all__ = ["EMBEDDING", "LINEAR", "METHODS", "TRANSPOSED", "Part", "Quantization", "Scheme", "Source", "quantization"]

METHODS: dict[str, Callable[[Fields], Quantization]] = {
    "awq": awq.parse,
    "compressed-tensors": compressed.parse,
    "coppice": own.parse,
    "fp8": float8.parse,
    "gptq": gptq.parse,
    "mxfp4": mxfp4.parse,
}


def quantization(fields: Fields) -> Quantization | None:
    """The quantisation that a config describes; None: floats. Raises CheckpointError for one that is not supported."""
    given = fields.sub("quantization_config")
    if given is None:
        return None
    method = given.str("quant_method", "")
    if method not in METHODS:
        what = f"weights quantized by {method[:80]!r} are not supported (read: {', '.join(METHODS)})"
        raise unsupported(given, what)
    return METHODS[method](given)

"""Checkpoints that are quantised already: `quantization_config` of config.json decides; what is not read is refused.

A method is a file here: its class reads the config, names the tensors that stand for a weight (`Checkpoint.check`
compares them with the headers) and makes a `GroupedWeight` of them, whose rows are read when a layer packs them.
"""

from collections.abc import Callable

from models.fields import Fields
from models.quantized.awq import AWQ
from models.quantized.compressed import Compressed
from models.quantized.float8 import Float8
from models.quantized.gptq import GPTQ
from models.quantized.parts import LINEAR, TRANSPOSED, Part, Quantization, Scheme, Source, unsupported

__all__ = ["LINEAR", "METHODS", "TRANSPOSED", "Part", "Quantization", "Scheme", "Source", "quantization"]

METHODS: dict[str, Callable[[Fields], Quantization]] = {
    "awq": AWQ.parse,
    "compressed-tensors": Compressed.parse,
    "fp8": Float8.parse,
    "gptq": GPTQ.parse,
}


def quantization(fields: Fields) -> Quantization | None:
    """What a config says of quantised weights; None: they are floats. Raises CheckpointError for what is not read."""
    own = fields.sub("quantization_config")
    if own is None:
        return None
    method = own.str("quant_method", "")
    if method not in METHODS:
        raise unsupported(own, f"weights quantized by the method {method[:80]!r} are not supported")
    return METHODS[method](own)

"""NVIDIA's ModelOpt: `quant_algo` FP8, one scale per matrix, or NVFP4. Scales for activations and caches are ignored,
because neither is rounded here."""

from models.checkpoint.fields import Fields
from models.quantized import float8
from models.quantized.nvfp4 import MODELOPT
from models.quantized.parts import Uniform, unsupported


def parse(fields: Fields) -> Uniform:
    """Read a config. Raises CheckpointError if it is not supported."""
    kind = fields.str("quant_algo", "")
    if kind == "FP8":
        return float8.whole()
    if kind == "NVFP4":
        return Uniform(MODELOPT)
    raise unsupported(fields, f"modelopt with quant_algo {kind[:80]!r} (read: FP8, NVFP4)")

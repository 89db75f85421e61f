"""Quantisation configs that a checkpoint has outside `quantization_config` of config.json."""

from pathlib import Path
from typing import Any

from models.checkpoint.fields import Fields
from models.checkpoint.listing import CONFIG_BYTES, read_json
from models.errors import show
from models.quantized.parts import unsupported

FIELD = "quantization_config"
GPTQ, MODELOPT = "quantize_config.json", "hf_quant_config.json"  # files of AutoGPTQ and ModelOpt


def with_quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A folder's config, with the field if something else stands for it.

    Raises:
        CheckpointError: MLX quantised the weights, or a file is damaged.
    """
    given, file = config.get(FIELD), show(folder / "config.json")
    method = given.get("quant_method") if isinstance(given, dict) else None
    if not method and Fields(config, file).sub("quantization"):
        raise unsupported(Fields(config, file), "weights quantized by MLX are not supported")
    if given is not None:
        return config
    if old := config.get("compression_config"):  # up to version 0.8 of compressed-tensors
        return config | {FIELD: old}
    if (folder / GPTQ).exists():
        return config | {FIELD: {"quant_method": "gptq"} | read_json(folder / GPTQ, CONFIG_BYTES)}
    if (folder / MODELOPT).exists():
        own = Fields(read_json(folder / MODELOPT, CONFIG_BYTES), show(folder / MODELOPT)).sub("quantization")
        return config | {FIELD: {"quant_method": "modelopt"} | dict(own.config if own else {})}
    return config

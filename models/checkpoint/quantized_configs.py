"""Quantisation configs that a checkpoint has outside `quantization_config` of config.json."""

from pathlib import Path
from typing import Any

from models.checkpoint.fields import Fields
from models.checkpoint.listing import CONFIG_BYTES, read_json
from models.errors import show
from models.quantized import mlx, quanto

FIELD = "quantization_config"
# Files of AutoGPTQ, ModelOpt and optimum-quanto.
GPTQ, MODELOPT, QUANTO = "quantize_config.json", "hf_quant_config.json", "quanto_qmap.json"


def with_quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return a folder's config, with `quantization_config` if another file or field gives it.

    Raises:
        CheckpointError: a file is damaged.
    """
    given = config.get(FIELD)
    method = given.get("quant_method") if isinstance(given, dict) else None
    if not method and (own := Fields(config, show(folder / "config.json")).sub(mlx.FIELD)):
        return config | {FIELD: {**own.config, "quant_method": mlx.NAME}}
    if given is not None:
        return config
    if old := config.get("compression_config"):  # up to version 0.8 of compressed-tensors
        return config | {FIELD: old}
    if (folder / GPTQ).exists():
        return config | {FIELD: {"quant_method": "gptq"} | read_json(folder / GPTQ, CONFIG_BYTES)}
    if (folder / MODELOPT).exists():
        own = Fields(read_json(folder / MODELOPT, CONFIG_BYTES), show(folder / MODELOPT)).within("quantization")
        return config | {FIELD: {"quant_method": "modelopt"} | dict(own.config)}
    if (folder / QUANTO).exists():
        return config | {FIELD: {"quant_method": quanto.NAME, quanto.MODULES: read_json(folder / QUANTO, CONFIG_BYTES)}}
    return config

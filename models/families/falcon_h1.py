"""Falcon-H1 (TII 2025): layers of attention and a selective scan of Mamba-2 that read the same norm, and an MLP, with
factors of most matrices. Bamba (IBM 2025): layers of attention or a scan, and an MLP."""

from collections.abc import Sequence
from typing import Any

from models.adapters import Adapter
from models.checkpoint.fields import Fields
from models.checkpoint.headers import Checkpoint
from models.config import FULL, RECURRENT, Config, OutputFactors, Recurrent
from models.decoder import Decoder
from models.errors import CheckpointError, show
from models.families.granite_hybrid import SCANS, scans
from models.names import Names
from models.reading import rotary, true_if_absent

NAMES = Names(
    **SCANS,
    norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)


class FalconH1(Decoder):
    """All layers have attention and a scan in parallel."""

    architectures = ("FalconH1ForCausalLM",)
    names = NAMES

    def __init__(self, checkpoint: Checkpoint, *args: Any):
        super().__init__(checkpoint, *args)
        multiplied = checkpoint.gguf is not None or checkpoint.config.get("multiplied")
        self.file = show(checkpoint.folder) if multiplied else None

    def adapt(self, adapters: Sequence[Adapter]) -> None:
        """See `Decoder`. Raises CheckpointError for files of GGUF and MLX, whose matrices have factors that adapters
        lack."""
        if self.file is not None:
            what = "adapters of Falcon-H1 do not fit files of GGUF or MLX, whose matrices are multiplied by factors"
            raise CheckpointError(what, where=self.file, remedy="Load the model from safetensors of transformers.")
        super().adapt(adapters)

    @staticmethod
    def read(fields: Fields) -> Config:
        options = _common(fields, positions=8192)
        layers, biased = options["layers"], options["attention_bias"]
        into, out, key, head = (
            fields.float(f"{name}_multiplier", default=1.0)
            for name in ("attention_in", "attention_out", "key", "lm_head")
        )
        gate, down = _factors(fields, "mlp_multipliers", 2)
        for name, factor in (("lm_head_multiplier", head), ("mlp_multipliers", gate)):
            if not factor:
                raise fields.error(name, "numbers other than 0")
        if biased and into != 1.0:  # the biases would need the inverse
            raise fields.error("attention_in_multiplier", "1, as attention has biases")
        if options["mlp_bias"] and gate != 1.0:
            raise fields.error("mlp_multipliers", "1 as the first, as the MLP has biases")
        return Config(
            **options,
            embedding_scale=fields.float("embedding_multiplier", default=1.0),
            scales=(options["head_dim"] ** -0.5 * key * into**2,) * layers,
            recurrent=_scans(fields, layers, options["width"]),
            mlp_scale=gate,  # of the half that is not activated as well, so that the output has it once too often
            output_factors=OutputFactors(out * into, fields.float("ssm_out_multiplier", default=1.0), down / gate),
            logit_divisor=1.0 / head,
        )


class Bamba(Decoder):
    """Layers are scans except `attn_layer_indices`, whose attention rotates half of each head."""

    architectures = ("BambaForCausalLM",)
    names = NAMES

    @staticmethod
    def read(fields: Fields) -> Config:
        half = {name: value for name, value in fields.config.items() if name != "partial_rotary_factor"}
        options = _common(Fields(half, fields.file, fields.prefix), positions=262144, partial=0.5)
        attention = fields.config.get("attn_layer_indices") or []
        if type(attention) is not list:
            raise fields.error("attn_layer_indices", "a list of layers")
        kinds = [FULL if i in attention else RECURRENT for i in range(options["layers"])]
        recurrent = scans(fields, kinds, options["width"]) if RECURRENT in kinds else None
        return Config(recurrent=recurrent, **options)


def _common(fields: Fields, **rope: Any) -> dict[str, Any]:
    return rotary(fields, kv_heads=8, **rope, eps=1e-5, bias=False) | {
        "mlp_bias": fields.bool("mlp_bias", default=False),
    }


def _scans(fields: Fields, layers: int, width: int) -> Recurrent:
    """Read the scans of a Falcon-H1; the factor of their input is part of the factors of its products."""
    into = fields.float("ssm_in_multiplier", default=1.0)
    normed = fields.bool("mamba_rms_norm", default=False)
    if normed and true_if_absent(fields, "mamba_norm_before_gate"):
        raise fields.error("mamba_norm_before_gate", "false: a norm before the gates is not supported")
    bias = fields.bool("mamba_proj_bias", default=False)
    if fields.bool("projectors_bias", default=False) != bias:
        raise fields.error("projectors_bias", "what mamba_proj_bias is")
    if bias and into != 1.0:
        raise fields.error("ssm_in_multiplier", "1, as scans have biases")
    factors = tuple(into * factor for factor in _factors(fields, "ssm_multipliers", 5))
    values = None
    if fields.config.get("mamba_d_ssm") is not None or "mamba_d_ssm" not in fields.config:
        values = fields.int("mamba_d_ssm", default=1024)
    return scans(fields, [RECURRENT] * layers, width, values, beside=True, normed=normed, factors=factors)


def _factors(fields: Fields, name: str, count: int) -> list[float]:
    """Read a list of numbers; all are 1 if it is absent."""
    found = fields.config.get(name)
    if found is None:
        return [1.0] * count
    if type(found) is not list or len(found) != count:
        raise fields.error(name, f"{count} numbers")
    return [Fields({name: value}, fields.file, fields.prefix).float(name) for value in found]

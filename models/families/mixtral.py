"""Mixtral (Jiang et al. 2024) and Phi-3.5-MoE (Abdin et al. 2024): experts in all layers."""

from models.checkpoint.fields import Fields
from models.config import Config, experts, rotary
from models.decoder import Decoder


class Mixtral(Decoder):
    """A Mistral with experts, whose weights add up to 1."""

    architectures = ("MixtralForCausalLM", "MixtralForSequenceClassification")
    base = "model."

    @staticmethod
    def read(fields: Fields) -> Config:
        fields = with_base(fields)
        kv_heads = None if "num_key_value_heads" in fields.config else 8
        width = fields.int("intermediate_size", default=14336)
        options = rotary(fields, positions=4096 * 32, kv_heads=kv_heads, mlp_width=width)
        layers = options["layers"]
        return Config(
            norm_eps=fields.float("rms_norm_eps", default=1e-5, low=0.0),
            windows=(fields.int("sliding_window", None, high=2**31),) * layers,
            experts=experts(fields, count=8, chosen=2, width=width, layers=[True] * layers, normalized=True),
            **options,
        )


def with_base(fields: Fields) -> Fields:
    """The fields with the rotary base of these families, 1e6, where there is none."""
    base = fields.config.get("rope_theta")
    return Fields({**fields.config, "rope_theta": 1e6 if base is None else base}, fields.file, fields.prefix)

"""Seed-OSS (ByteDance Seed 2025) and InternLM3 (Cai et al. 2024): Llamas with biases on other matrices."""

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.reading import rotary


class SeedOss(Decoder):
    """Biases of queries, keys and values."""

    architectures = ("SeedOssForCausalLM", "SeedOssForSequenceClassification")
    default_pad_token_id = 1

    @staticmethod
    def read(fields: Fields) -> Config:
        return Config(
            **rotary(fields, positions=524288, kv_heads=8, head_dim=128, eps=1e-6, bias=True),
            out_bias=fields.bool("attention_out_bias", default=False),
            mlp_bias=fields.bool("mlp_bias", default=False),
        )


class InternLM3(Decoder):
    """Biases everywhere, or none."""

    architectures = ("InternLM3ForCausalLM",)

    @staticmethod
    def read(fields: Fields) -> Config:
        bias = fields.bool("bias", default=fields.bool("mlp_bias", default=False))  # transformers saves the second
        if fields.bool("qkv_bias", default=fields.bool("attention_bias", default=False)) != bias:
            raise fields.error("qkv_bias", f"the bias, {str(bias).lower()}, as in transformers")
        return Config(
            **rotary(fields, positions=32768, kv_heads=2, head_dim=128, eps=1e-5),
            attention_bias=bias,
            mlp_bias=bias,
        )

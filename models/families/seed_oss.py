"""Seed-OSS (ByteDance Seed 2025), InternLM2 and InternLM3 (Cai et al. 2024): Llamas with biases on other matrices."""

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.names import Names
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


class InternLM2(Decoder):
    """One matrix of queries, keys and values, grouped by key/value head; also InternLM 2.5."""

    architectures = ("InternLM2ForCausalLM",)
    names = Names(
        embedding="model.tok_embeddings",
        attention_norm="attention_norm",
        qkv=("attention.wqkv",),
        out="attention.wo",
        mlp_norm="ffn_norm",
        up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        return Config(
            **rotary(fields, positions=2048, eps=1e-6),
            attention_bias=fields.bool("bias", default=True),
            grouped_qkv="head",
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

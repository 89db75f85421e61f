"""MiniCPM 1, 2 and 4 (OpenBMB 2024, 2025): Llamas with scaled embedding, stream and logits. MiniCPM3 (2024): the same
with latent attention, rotated by halves."""

from typing import Any

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.families.deepseek_v2 import latent_attention
from models.reading import rotary


class MiniCPM(Decoder):
    """A Llama with three multipliers; its sparse attention, which is optional, is not supported."""

    architectures = ("MiniCPMForCausalLM",)

    @staticmethod
    def read(fields: Fields) -> Config:
        if fields.config.get("sparse_config") is not None:
            raise fields.error("sparse_config", "null, for dense attention: sparse attention is not supported")
        if fields.int("num_experts", default=0, low=0):
            raise fields.error("num_experts", "0: MiniCPM with experts is not supported")
        layers = fields.int("num_hidden_layers", high=2**14)
        return Config(
            **multipliers(fields, fields.int("hidden_size"), layers, embedding=1.0, depth=1.0, base=1),
            **rotary(fields, positions=2048, eps=1e-6, bias=False, tied=True),
        )


class MiniCPM3(Decoder):
    """Latent attention and an MLP in all layers, with three multipliers."""

    architectures = ("MiniCPM3ForCausalLM", "MiniCPM3ForSequenceClassification")

    @staticmethod
    def read(fields: Fields) -> Config:
        width, layers = fields.int("hidden_size"), fields.int("num_hidden_layers", high=2**14)
        value = width // fields.int("num_attention_heads", high=2**14)
        sizes = {"rank": 256, "query_rank": 768, "plain": 64, "rotated": 32, "value": value, "mlp_width": 6400}
        options = latent_attention(fields, positions=32768, eps=1e-5, tied=True, interleaved=False, **sizes)
        return Config(
            mlp_bias=fields.bool("mlp_bias", default=False),
            **multipliers(fields, width, layers, embedding=12.0, depth=1.4, base=256),
            **options,
        )


def multipliers(
    fields: Fields, width: int, layers: int, *, embedding: float, depth: float, base: int
) -> dict[str, Any]:
    """Read the factors of embedding, stream and logits, with the defaults for absent fields; null means no factor."""
    deep = fields.float("scale_depth", None if "scale_depth" in fields.config else depth)
    narrow = fields.int("dim_model_base", width if "dim_model_base" in fields.config else base)
    return {
        "embedding_scale": fields.float("scale_emb", embedding),
        "rounded_scale": True,
        "residual_scale": 1.0 if deep is None else deep * layers**-0.5,
        "logit_divisor": width / narrow,
    }

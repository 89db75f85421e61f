"""Falcon 7B, 40B, 180B (Almazrouei et al. 2023) and Falcon 2 (2024): parallel attention and MLP. Falcon RW: one after
the other, with ALiBi instead of rotation."""

from dataclasses import replace
from typing import Any

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.families.bloom import Bloom, slopes
from models.reading import rotary


class Falcon(Decoder):
    """LayerNorms; all queries share one key head, or each group of queries shares one; a single matrix computes all."""

    architectures = ("FalconForCausalLM", "FalconForSequenceClassification")
    base = "transformer."
    default_eos_token_ids = frozenset([11])
    names = replace(Bloom.names, embedding_norm="")

    @staticmethod
    def read(fields: Fields) -> Config:
        width, heads = fields.int("hidden_size"), fields.int("num_attention_heads", high=2**14)
        grouped = fields.bool("new_decoder_architecture", default=False)
        shared = fields.bool("multi_query", default=True)
        kv_heads = fields.int("num_kv_heads", default=heads, high=2**14) if grouped else 1 if shared else heads
        sizes: dict[str, Any] = {"num_key_value_heads": kv_heads, "head_dim": None}
        named = fields.changed(sizes)
        more = {"activation_field": "activation", "mlp_width": fields.int("ffn_hidden_size", default=4 * width)}
        bias, parallel = fields.bool("bias", default=False), fields.bool("parallel_attn", default=True)
        two_norms = grouped and fields.int("num_ln_in_parallel_attn", default=2, high=2) == 2
        options = rotary(named, positions=2048, activation="gelu", tied=True, **more)
        if alibi := fields.bool("alibi", default=False):
            options["rope"] = None
        return Config(
            **options,
            slopes=slopes(heads) if alibi else (),
            coarse_slopes=alibi,
            norm_eps=fields.float("layer_norm_epsilon", default=1e-5, low=0.0),
            rms=False,
            gated=False,
            parallel="own" if two_norms else "shared" if grouped or parallel else "",
            grouped_qkv="head" if grouped or not shared else "",
            attention_bias=bias,
            mlp_bias=bias,
        )

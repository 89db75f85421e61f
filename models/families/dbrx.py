"""DBRX (Databricks 2024): LayerNorms without biases, clipped queries, keys and values, experts in all layers."""

from typing import Any

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.names import Names
from models.reading import experts, rotary

RENAMED = {
    "d_model": ("hidden_size", 2048),
    "n_heads": ("num_attention_heads", 16),
    "n_layers": ("num_hidden_layers", 24),
    "max_seq_len": ("max_position_embeddings", 2048),
    "vocab_size": ("vocab_size", 32000),
}


class Dbrx(Decoder):
    """One matrix computes queries, keys and values."""

    architectures = ("DbrxForCausalLM",)
    base = "transformer."
    names = Names(
        embedding="transformer.wte",
        layer="transformer.blocks.{}.",
        attention_norm="norm_attn_norm.norm_1",
        qkv=("norm_attn_norm.attn.Wqkv",),
        out="norm_attn_norm.attn.out_proj",
        mlp_norm="norm_attn_norm.norm_2",
        router="ffn.router.layer",
        expert=tuple(f"ffn.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")),
        norm="transformer.norm_f",
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        attention, mlp = fields.within("attn_config"), fields.within("ffn_config")
        if mlp.float("moe_normalize_expert_weights", 1.0) != 1.0:
            raise mlp.error("moe_normalize_expert_weights", "1 or null: other norms are not supported")
        named: dict[str, Any] = {own: fields.int(name, default) for name, (own, default) in RENAMED.items()}
        named |= {
            "head_dim": None,
            "num_key_value_heads": attention.int("kv_n_heads", 1, high=2**14),
            "intermediate_size": mlp.int("ffn_hidden_size", 3584),
            "hidden_act": mlp.within("ffn_act_fn").str("name", "silu"),
            "num_experts": mlp.int("moe_num_experts", 4),
            "num_experts_per_tok": mlp.int("moe_top_k", 1),
        }
        if fields.sub("rope_parameters") is None and fields.config.get("rope_theta") is None:
            named["rope_theta"] = attention.float("rope_theta", None)  # which transformers 5.23 ignores
        inner = fields.changed(named)
        options = rotary(inner, positions=2048)
        width, layers = options["mlp_width"], [True] * options["layers"]
        normalized = mlp.config.get("moe_normalize_expert_weights", 1.0) is not None
        return Config(
            norm_eps=1e-5,  # no field of the config
            rms=False,
            norm_bias=False,
            clip=attention.float("clip_qkv", None, low=0.0),
            experts=experts(inner, count=4, chosen=1, width=width, layers=layers, normalized=normalized),
            **options,
        )

"""Ling 2 and Ring 2 (Ant Group 2025): experts as in DeepSeek-V3, attention with norms of heads, partially rotated."""

import re

from models.checkpoint.fields import Fields
from models.checkpoint.headers import Checkpoint
from models.config import Config
from models.decoder import Decoder
from models.families.deepseek_v2 import NAMES
from models.families.deepseek_v3 import note_choice_bias, sigmoids
from models.names import Names
from models.reading import after_dense, experts, rotary
from models.rope import BUFFERS


class BailingMoe2(Decoder):
    """One matrix of queries, keys and values, one below the other; experts after the first layers."""

    architectures = ("BailingMoeV2ForCausalLM",)
    default_eos_token_ids = frozenset([156892])
    ignored = (*BUFFERS, re.compile(r"model\.layers\.(20|32|80)\..*"))  # tensors of draft heads: mini, flash, 1T
    names = Names(
        embedding="model.word_embeddings",
        qkv=("attention.query_key_value",),
        q_norm="attention.query_layernorm",
        k_norm="attention.key_layernorm",
        out="attention.dense",
        choice_bias="mlp.gate.expert_bias",
        shared=NAMES.shared,
    )

    @classmethod
    def view(cls, checkpoint: Checkpoint) -> Checkpoint:
        return note_choice_bias(checkpoint, cls.names)

    @staticmethod
    def read(fields: Fields) -> Config:
        if fields.bool("norm_head", default=False):
            raise fields.error("norm_head", "false: a head that is normed is not supported")
        fields.choice("score_function", ("sigmoid",), default="sigmoid")
        bias, turned = fields.bool("use_bias", default=False), fields.int("rotary_dim", None)
        size = fields.int("head_dim", None) or fields.int("hidden_size") // fields.int("num_attention_heads")
        share = min(turned / size, 1.0) if turned else 1.0
        options = rotary(fields, positions=16384, eps=1e-6, partial=share)
        width, chosen = fields.int("moe_intermediate_size"), fields.int("num_experts_per_tok", high=2**12)
        rules = sigmoids(fields, groups=8, kept=4) | {
            "normalized": chosen > 1,
            "scale": fields.float("routed_scaling_factor", default=1.0),
            "shared_width": width * fields.int("num_shared_experts", default=0, low=0, high=2**8),
        }
        sparse = after_dense(fields, options["layers"], 0)
        return Config(
            attention_bias=bias or fields.bool("use_qkv_bias", default=False),
            out_bias=bias,
            head_norms="each" if fields.bool("use_qk_norm", default=False) else "",
            experts=experts(fields, count=16, chosen=chosen, width=width, layers=sparse, **rules),
            **options,
        )

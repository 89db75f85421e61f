"""GLM-4 (GLM Team 2024), GLM-4-0414 (2025) and the mixtures GLM-4.5 to 4.7 (2025): partially rotated heads."""

import re

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.families.deepseek_v2 import NAMES, mixture
from models.families.deepseek_v3 import sigmoids
from models.names import Names
from models.reading import after_dense, architecture, rotary, true_if_absent
from models.rope import BUFFERS


class Glm(Decoder):
    """A Llama with biases of queries, keys and values, and one matrix for the halves of its MLP."""

    architectures = ("GlmForCausalLM", "GlmForSequenceClassification")
    default_pad_token_id = 151329
    names = Names(up=("mlp.gate_up_proj",))
    default_eos_token_ids = frozenset([151329, 151336, 151338])

    @staticmethod
    def read(fields: Fields) -> Config:
        four = architecture(fields).startswith("Glm4")
        return Config(
            **rotary(fields, positions=131072, kv_heads=2, head_dim=128, partial=0.5, eps=1.5625e-7, bias=True),
            norms=("input", "output") if four else ("input",),
            interleaved=true_if_absent(fields, "rope_interleave"),  # false in GGUF files of GLM-4.1V alone
            out_bias=False,
        )


class Glm4(Glm):
    """Norms of outputs as well."""

    architectures = ("Glm4ForCausalLM", "Glm4ForSequenceClassification")
    default_pad_token_id = 151329
    ignored = (*BUFFERS, re.compile(r"model\.layers\.16\..*"))  # tensors of GLM-OCR's draft head, as in transformers
    names = Names(
        up=("mlp.gate_up_proj",), attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm"
    )


class Glm4Moe(Decoder):
    """Experts that sigmoids choose, after the first layers; in some models norms of heads."""

    architectures = ("Glm4MoeForCausalLM",)
    names = NAMES
    ignored = (*BUFFERS, re.compile(r"model\.layers\.(46|92)\..*"))  # tensors of a draft head, as in transformers

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=131072, kv_heads=8, inner=10944, partial=0.5, eps=1e-5, bias=False)
        sparse, sizes = after_dense(fields, options["layers"], 1), {"count": 128, "chosen": 8, "width": 1408}
        return Config(
            out_bias=False,
            head_norms="each" if fields.bool("use_qk_norm", default=False) else "",
            experts=mixture(fields, sparse, shared=1, scale=1.0, **sizes, **sigmoids(fields, groups=1, kept=1)),
            **options,
        )


class SolarOpen(Decoder):
    """Solar Open (Upstage 2025): fully rotated heads, experts in all layers."""

    architectures = ("SolarOpenForCausalLM",)
    names = NAMES

    @staticmethod
    def read(fields: Fields) -> Config:
        sizes = {"count": 128, "chosen": 8, "width": 1280}
        width = fields.int("moe_intermediate_size", default=sizes["width"])
        more = {"mlp_width": width, "head_dim": 128, "partial": 1.0, "theta": 1e6}
        options = rotary(fields, positions=131072, kv_heads=8, **more, eps=1e-5, bias=False)
        sparse, rules = [True] * options["layers"], sigmoids(fields, groups=1, kept=1)
        return Config(
            out_bias=False,
            experts=mixture(fields, sparse, shared=1, scale=1.0, **sizes, **rules),
            **options,
        )

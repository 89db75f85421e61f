"""EXAONE 3 (LG AI Research 2024): a Llama with other names. EXAONE 4 (2025): output and head norms; in some models,
windows in three of four layers. K-EXAONE (2026): input norms instead, and experts."""

import re
from dataclasses import replace

from models.checkpoint.fields import Fields
from models.config import SLIDING, Config
from models.decoder import Decoder
from models.families.deepseek_v2 import NAMES
from models.families.deepseek_v3 import sigmoids
from models.names import Names
from models.reading import experts, kinds_by_period, renamed, rotary, sparse_layers, window_of, windows
from models.rope import BUFFERS

# The published fields, and those that transformers 5.24 saves.
EXAONE_FIELDS = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}


class Exaone(Decoder):
    """EXAONE 3, 3.5 and Deep."""

    architectures = ("ExaoneForCausalLM",)
    base = "transformer."
    default_eos_token_ids = frozenset([361])
    names = Names(
        embedding="transformer.wte",
        layer="transformer.h.{}.",
        attention_norm="ln_1",
        qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        out="attn.attention.out_proj",
        mlp_norm="ln_2",
        up=("mlp.c_fc_0", "mlp.c_fc_1"),
        down="mlp.c_proj",
        norm="transformer.ln_f",
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        own = renamed(fields, EXAONE_FIELDS)
        return Config(**rotary(own, positions=2048, inner=4 * own.int("hidden_size"), eps=1e-5, tied=True))


class Exaone4(Decoder):
    """A Llama with norms on outputs. If the config has a window, layers without it have no rotary embeddings."""

    architectures = ("Exaone4ForCausalLM", "Exaone4ForSequenceClassification")
    ignored = (*BUFFERS, re.compile(r"(model\.)?mtp\..*"))  # draft heads

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=2048, kv_heads=32, eps=1e-5)
        window = window_of(fields, 4096)
        every = 1
        if window and fields.config.get("layer_types") is None:
            every = fields.int("sliding_window_pattern", default=4)
        kinds = kinds_by_period(fields, options["layers"], every)
        return Config(
            norms=("output",),
            head_norms="each",
            windows=windows(fields, kinds, window),
            ropes=tuple(options["rope"] if kind == SLIDING or window is None else None for kind in kinds),
            **options,
        )


class ExaoneMoe(Decoder):
    """Experts that sigmoids choose, after the first layers."""

    architectures = ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM")
    names = NAMES
    default_eos_token_ids = frozenset([53])
    ignored = Exaone4.ignored

    @staticmethod
    def read(fields: Fields) -> Config:
        c = Exaone4.read(fields)
        sparse = sparse_layers(fields, c.layers, fields.int("first_k_dense_replace", default=1, low=0))
        width = fields.int("moe_intermediate_size", default=1024)
        rules = sigmoids(fields, groups=1, kept=1) | {
            "scale": fields.float("routed_scaling_factor", default=2.5),
            "shared_width": width * fields.int("num_shared_experts", default=1, high=2**8),
        }
        mixed = experts(fields, count=64, chosen=8, width=width, layers=sparse, **rules)
        return replace(c, norms=("input",), experts=mixed)

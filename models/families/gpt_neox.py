"""GPT-NeoX (Black et al. 2022), Pythia (Biderman et al. 2023): parallel attention and MLP, each with its norm; in the
Japanese one (ABEJA 2022) one after the other."""

import re
from dataclasses import replace
from typing import Any

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.names import Names
from models.reading import rotary
from models.rope import BUFFERS


class GPTNeoX(Decoder):
    """LayerNorms, biases, partially rotated heads; one matrix computes queries, keys and values, head by head."""

    architectures = ("GPTNeoXForCausalLM", "GPTNeoXForSequenceClassification")
    base = "gpt_neox."
    ignored = (*BUFFERS, re.compile(r"(gpt_neox\.)?layers\.\d+\.attention\.(masked_)?bias"))
    names = Names(
        embedding="gpt_neox.embed_in",
        layer="gpt_neox.layers.{}.",
        qkv=("attention.query_key_value",),
        out="attention.dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        norm="gpt_neox.final_layer_norm",
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        return Config(
            **_options(fields, partial=0.25, bias=True),
            norm_eps=fields.float("layer_norm_eps", default=1e-5, low=0.0),
            rms=False,
            gated=False,
            parallel="own" if fields.bool("use_parallel_residual", default=True) else "",
            grouped_qkv="head",
            mlp_bias=True,
        )


class GPTNeoXJapanese(Decoder):
    """One matrix has a bias: that after the last layer's attention."""

    architectures = ("GPTNeoXJapaneseForCausalLM",)
    base = "gpt_neox_japanese."
    default_eos_token_ids = frozenset([31999])
    ignored = (*BUFFERS, re.compile(r"(gpt_neox_japanese\.)?layers\.\d+\.attention\.(masked_)?bias"))
    names = replace(
        GPTNeoX.names,
        embedding="gpt_neox_japanese.embed_in",
        layer="gpt_neox_japanese.layers.{}.",
        norm="gpt_neox_japanese.final_layer_norm",
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        width = fields.int("hidden_size") * fields.int("intermediate_multiple_size", default=4, high=2**8)
        return Config(
            **_options(fields, partial=1.0, tied=True, mlp_width=width),
            norm_eps=fields.float("layer_norm_eps", default=1e-5, low=0.0),
            rms=False,
            gated=False,
            grouped_qkv="head",
            out_bias="last",
        )


def _options(fields: Fields, **own: Any) -> dict[str, Any]:
    """Read what `rotary` reads, by the names that fields have here."""
    given = {
        "rope_theta": fields.config.get("rotary_emb_base"),
        "partial_rotary_factor": fields.config.get("rotary_pct"),
    }
    named = fields.changed({"num_key_value_heads": None, **given})
    options = rotary(named, positions=2048, activation="gelu", **own)
    if options["head_dim"] * options["heads"] != options["width"]:
        raise fields.error("head_dim", "hidden_size / num_attention_heads, or nothing")
    return options

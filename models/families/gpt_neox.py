"""GPT-NeoX (Black et al. 2022), Pythia (Biderman et al. 2023): parallel attention and MLP, each with its norm."""

import re

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
        given = {
            "rope_theta": fields.config.get("rotary_emb_base"),
            "partial_rotary_factor": fields.config.get("rotary_pct"),
        }
        named = fields.changed({"head_dim": None, "num_key_value_heads": None, **given})
        return Config(
            **rotary(named, positions=2048, activation="gelu", partial=0.25, bias=True),
            norm_eps=fields.float("layer_norm_eps", default=1e-5, low=0.0),
            rms=False,
            gated=False,
            parallel="own" if fields.bool("use_parallel_residual", default=True) else "",
            grouped_qkv="head",
            mlp_bias=True,
        )

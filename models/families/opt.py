"""OPT (Zhang et al. 2022): learned positions, norms before (or, 350m, after) each block, ReLU."""

import re

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.names import Names
from models.reading import common


class OPT(Decoder):
    """Its embedding may be narrower than its layers, its norms may lack vectors."""

    architectures = ("OPTForCausalLM", "OPTForSequenceClassification")
    ignored = (re.compile(r"(model\.)?decoder\.version"),)
    names = Names(
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        offset=2,  # rows that are never read, once meant for padding
        project=("model.decoder.project_in", "model.decoder.project_out"),
        layer="model.decoder.layers.{}.",
        attention_norm="self_attn_layer_norm",
        out="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        up=("fc1",),
        down="fc2",
        norm="model.decoder.final_layer_norm",
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        width = fields.int("hidden_size")
        heads = fields.int("num_attention_heads", high=2**14)
        if width % heads:
            raise fields.error("hidden_size", f"a multiple of num_attention_heads {heads}")
        before = fields.bool("do_layer_norm_before", default=True)
        embedding_width = fields.int("word_embed_proj_dim", default=width)
        bias = fields.bool("enable_bias", default=True)
        return Config(
            **common(fields, activation="activation_function", default="relu", tied=True),
            width=width,
            embedding_width=embedding_width if embedding_width != width else None,
            mlp_width=fields.int("ffn_dim"),
            layers=fields.int("num_hidden_layers", high=2**14),
            heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            norm_eps=1e-5,  # no field of the config
            rms=False,
            affine=fields.bool("layer_norm_elementwise_affine", default=True),
            gated=False,
            norms=("input",) if before else ("sum",),
            final_norm=before and not fields.bool("_remove_final_layer_norm", default=False),
            attention_bias=bias,
            mlp_bias=bias,
            max_positions=fields.int("max_position_embeddings", default=2048),
        )

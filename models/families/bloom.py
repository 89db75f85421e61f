"""BLOOM (BigScience 2022), MPT (MosaicML 2023): ALiBi; one matrix computes queries, keys and values."""

import re

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.families.gpt2 import sizes
from models.names import Names


class Bloom(Decoder):
    """LayerNorms, also of the embedding; biases; queries, keys and values head by head."""

    architectures = ("BloomForCausalLM", "BloomForSequenceClassification")
    base = "transformer."
    names = Names(
        embedding="transformer.word_embeddings",
        embedding_norm="transformer.word_embeddings_layernorm",
        layer="transformer.h.{}.",
        qkv=("self_attention.query_key_value",),
        out="self_attention.dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        norm="transformer.ln_f",
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        if (width := fields.config.get("n_embed")) is not None:
            fields = fields.changed({"hidden_size": width})
        normed = fields.bool("apply_residual_connection_post_layernorm", default=False)
        names = "hidden_size", "n_head", "n_layer", "n_inner", "seq_length"
        options = sizes(fields, tied=True, positions=2048, names=names)
        return Config(
            **options,
            norms=("stream",) if normed else ("input",),
            embedding_norm=True,
            slopes=slopes(options["heads"]),
            grouped_qkv="head",
            attention_bias=True,
            mlp_bias=True,
        )


class MPT(Decoder):
    """LayerNorms without biases; queries, keys and values may be clipped."""

    architectures = ("MptForCausalLM", "MptForSequenceClassification")
    base = "transformer."
    ignored = (re.compile(r"(transformer\.)?(blocks\.\d+\.)?norm_[12f]\.bias"),)  # zeros, which no model reads
    default_eos_token_ids = frozenset([0])
    names = Names(
        embedding="transformer.wte",
        layer="transformer.blocks.{}.",
        attention_norm="norm_1",
        qkv=("attn.Wqkv",),
        out="attn.out_proj",
        mlp_norm="norm_2",
        up=("ffn.up_proj",),
        down="ffn.down_proj",
        norm="transformer.norm_f",
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        attention = fields.within("attn_config")
        needed = {"alibi": True, "qk_ln": False, "prefix_lm": False}
        for name, value in needed.items():
            if attention.bool(name, default=value) != value:
                raise attention.error(name, str(value).lower())
        attention.choice("attn_type", {"multihead_attention"}, default="multihead_attention")
        if not fields.bool("no_bias", default=True):
            raise fields.error("no_bias", "true")
        if fields.config.get("logit_scale") is not None:
            raise fields.error("logit_scale", "null")
        names = "d_model", "n_heads", "n_layers", "n_inner", "max_seq_len"
        options = sizes(fields, tied=True, positions=2048, names=names)
        scale = attention.float("softmax_scale", default=options["head_dim"] ** -0.5, low=1e-9)
        options |= {"activation": "gelu", "mlp_width": fields.int("expansion_ratio", default=4) * options["width"]}
        return Config(
            **options,
            norm_bias=False,
            scales=(scale,) * options["layers"],
            slopes=slopes(options["heads"], attention.int("alibi_bias_max", default=8, high=2**10)),
            clip=attention.float("clip_qkv", default=None, low=0.0) or None,
        )


def slopes(heads: int, most: float = 8.0) -> tuple[float, ...]:
    """Return ALiBi's slopes: powers of 2 with even distances between exponents, the last one -`most`. If the number of
    heads is no power of 2, those of the next one, from the even ones on."""
    count = 1 << (heads - 1).bit_length()
    each = [2 ** (-most * i / count) for i in range(1, count + 1)]
    return tuple(each if count == heads else (each[1::2] + each[::2])[:heads])

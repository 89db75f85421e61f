"""Phi 1, 1.5 and 2 (Gunasekar et al. 2023, Li et al. 2023): parallel attention and MLP, partially rotated heads.
Persimmon (Adept 2023): the same one after the other, with one matrix for queries, keys and values."""

from dataclasses import replace

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.names import Names
from models.reading import rotary


class Phi(Decoder):
    """LayerNorms, biases everywhere, one norm for attention and MLP."""

    architectures = ("PhiForCausalLM", "PhiForSequenceClassification")
    names = Names(
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        out="self_attn.dense",
        up=("mlp.fc1",),
        down="mlp.fc2",
        norm="model.final_layernorm",
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        return Config(
            **rotary(fields, positions=2048, activation="gelu_new", partial=0.5, even=True),
            norm_eps=fields.float("layer_norm_eps", default=1e-5, low=0.0),
            head_norms="each" if fields.bool("qk_layernorm", default=False) else "",
            rms=False,
            gated=False,
            parallel="shared",
            attention_bias=True,
            mlp_bias=True,
            head_bias=True,
        )


class Persimmon(Decoder):
    """LayerNorms, also of heads, biases everywhere, MLPs with squared ReLU."""

    architectures = ("PersimmonForCausalLM", "PersimmonForSequenceClassification")
    names = replace(Phi.names, qkv=("self_attn.query_key_value",), up=("mlp.dense_h_to_4h",), down="mlp.dense_4h_to_h")

    @staticmethod
    def read(fields: Fields) -> Config:
        named = fields.changed({"num_key_value_heads": None})
        options = rotary(named, positions=16384, activation="relu2", partial=0.5, even=True)
        if options["head_dim"] * options["heads"] != options["width"]:
            raise fields.error("head_dim", "hidden_size / num_attention_heads, or nothing")
        return Config(
            **options,
            norm_eps=fields.float("layer_norm_eps", default=1e-5, low=0.0),
            head_norms="each" if fields.bool("qk_layernorm", default=True) else "",
            rms=False,
            gated=False,
            grouped_qkv="head",
            attention_bias=True,
            mlp_bias=True,
        )

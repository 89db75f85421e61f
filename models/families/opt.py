"""OPT (Zhang et al. 2022): learned positions, norms before (or, 350m, after) each block, ReLU.
BioGPT (Luo et al. 2022), XGLM (Lin et al. 2022) and CTRL (Keskar et al. 2019): scaled embeddings; the positions of the
last two are sines and cosines."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.families.gpt2 import by_own_names, sizes
from models.names import Names


class OPT(Decoder):
    """Its embedding may be narrower than its layers, its norms may lack vectors."""

    architectures = ("OPTForCausalLM", "OPTForSequenceClassification")
    default_pad_token_id = 1
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
        names = "hidden_size", "num_attention_heads", "num_hidden_layers", "ffn_dim", "max_position_embeddings"
        more = {"inner_width": 3072, "activation": ("activation_function", "relu")}
        options = sizes(fields, tied=True, positions=2048, names=names, **more)
        options["norm_eps"] = 1e-5  # no field of the config
        before = fields.bool("do_layer_norm_before", default=True)
        embedding_width = fields.int("word_embed_proj_dim", default=options["width"])
        bias = fields.bool("enable_bias", default=True)
        return Config(
            **options,
            embedding_width=embedding_width if embedding_width != options["width"] else None,
            affine=fields.bool("layer_norm_elementwise_affine", default=True),
            norms=("input",) if before else ("sum",),
            final_norm=before and not fields.bool("_remove_final_layer_norm", default=False),
            attention_bias=bias,
            mlp_bias=bias,
        )


class BioGPT(Decoder):
    """Norms with their usual epsilon, whatever the config says, as in transformers."""

    architectures = ("BioGptForCausalLM", "BioGptForSequenceClassification")
    default_pad_token_id = 1
    base = "biogpt."
    names = replace(
        OPT.names,
        embedding="biogpt.embed_tokens",
        positions="biogpt.embed_positions",
        layer="biogpt.layers.{}.",
        norm="biogpt.layer_norm",
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        names = "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"
        options = {"positions": 1024, "inner_width": 4096, "activation": ("hidden_act", "gelu")}
        return _scaled(fields, (*names, "max_position_embeddings"), **options)


class XGLM(Decoder):
    """Position p is encoded as p + 2; the last of the angles is 1/10,000 of the first."""

    architectures = ("XGLMForCausalLM",)
    ignored = (re.compile(r"(model\.)?embed_positions\.weights"),)
    names = replace(
        OPT.names,
        embedding="model.embed_tokens",
        positions="",
        layer="model.layers.{}.",
        norm="model.layer_norm",
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        if fields.bool("add_cross_attention", default=False):
            raise fields.error("add_cross_attention", "false: decoders of an encoder's output are not supported")
        padding = fields.config.get("pad_token_id")
        if padding is not None and padding not in (0, 1):
            raise fields.error("pad_token_id", "0, 1 or null: the position of this number would be lost")
        names = "d_model", "attention_heads", "num_layers", "ffn_dim", "max_position_embeddings"
        by_own_names(fields, names).int("d_model", low=4)
        options = {"positions": 2048, "inner_width": 4096, "activation": ("activation_function", "gelu")}
        return _scaled(fields, names, **options)

    @staticmethod
    def rates(c: Config) -> Tensor:
        return torch.exp(torch.arange(c.width // 2).float() * -(math.log(10000) / (c.width // 2 - 1)))


class CTRL(Decoder):
    """The head has a bias; one angle more would be 1/10,000 of the first."""

    architectures = ("CTRLLMHeadModel",)
    base = "transformer."
    default_eos_token_ids = frozenset()
    names = Names(
        embedding="transformer.w",
        layer="transformer.h.{}.",
        attention_norm="layernorm1",
        qkv=tuple(f"multi_head_attention.{name}" for name in ("Wq", "Wk", "Wv")),
        out="multi_head_attention.dense",
        mlp_norm="layernorm2",
        up=("ffn.0",),
        down="ffn.2",
        norm="transformer.layernorm",
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        if fields.float("layer_norm_epsilon", default=1e-6) != 1e-6:
            raise fields.error("layer_norm_epsilon", "1e-06, as all norms but the last have it")
        names = "n_embd", "n_head", "n_layer", "dff", "n_positions"
        if (own := by_own_names(fields, names)).int("n_embd") % 2:
            raise own.error("n_embd", "an even number")
        c = _scaled(fields, names, positions=256, inner_width=8192, activation=("activation_function", "relu"))
        return replace(c, activation="relu", norm_eps=1e-6, head_bias=True, embedding_scale=c.width**0.5)

    @staticmethod
    def rates(c: Config) -> Tensor:
        return 1 / torch.pow(10000, torch.arange(0, c.width, 2).float() / c.width)


def _scaled(fields: Fields, names: Sequence[str], **options: Any) -> Config:
    """Read a configuration with biases, and embeddings that are scaled unless the config has it otherwise."""
    found = sizes(fields, tied=True, names=names, **options)
    scale = found["width"] ** 0.5 if fields.bool("scale_embedding", default=True) else 1.0
    return Config(**found, attention_bias=True, mlp_bias=True, embedding_scale=scale)

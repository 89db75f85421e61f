"""Hunyuan, dense and with experts (Tencent 2025): Llamas with an RMSNorm per head on queries and keys after they are
rotated. Hy3 (2026): before, and other experts."""

import re
from dataclasses import replace

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.families.deepseek_v2 import NAMES
from models.names import Names
from models.reading import experts, rotary, sparse_layers
from models.rope import BUFFERS


class HunYuan(Decoder):
    """A Llama with norms of heads, and a base of the rotary embedding that `alpha` stretches."""

    architectures = ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1ForSequenceClassification")
    default_pad_token_id = 0
    names = Names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=2048, eps=1e-5, bias=False)
        rope, dims = options["rope"], options["head_dim"]
        found = fields.sub("rope_scaling") or fields.sub("rope_parameters")
        if rope.kind == "dynamic" and found and (alpha := found.float("alpha", 0.0, low=0.0, high=1e9)):
            options["rope"] = replace(rope, kind="default", theta=rope.theta * alpha ** (dims / (dims - 2)), factor=1.0)
        return Config(
            head_norms="each",
            norms_last=True,
            **options,
        )


class HunYuanMoe(Decoder):
    """Experts in all layers, and a shared expert."""

    architectures = ("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1ForSequenceClassification")
    default_pad_token_id = 0
    names = replace(HunYuan.names, shared=NAMES.shared)

    @staticmethod
    def read(fields: Fields) -> Config:
        c = HunYuan.read(fields)
        counts = {
            "num_experts": _alike(fields, c.layers, "num_local_experts", "num_experts"),
            "num_experts_per_tok": _alike(fields, c.layers, "num_experts_per_tok", "moe_topk"),
        }
        named = fields.changed(counts)
        rules = {"normalized": True, "shared_width": c.mlp_width}
        mixed = experts(named, count=1, chosen=1, width=c.mlp_width, layers=[True] * c.layers, **rules)
        return replace(c, experts=mixed)


class HYV3(Decoder):
    """Experts that sigmoids choose, after the first layer."""

    architectures = ("HYV3ForCausalLM",)
    names = NAMES
    ignored = (*BUFFERS, re.compile(r"model\.layers\.80\..*"))  # tensors of a draft head, as in transformers

    @staticmethod
    def read(fields: Fields) -> Config:
        if fields.bool("mlp_bias", default=False):
            raise fields.error("mlp_bias", "false: experts with biases are not supported")
        width = fields.int("moe_intermediate_size", default=1536)
        sizes = {"kv_heads": 8, "head_dim": 128, "inner": 13312, "theta": 11158840.0}
        options = rotary(fields, positions=131072, **sizes, eps=1e-5, bias=False)
        rules = {
            "scores": "sigmoid",
            "normalized": True,
            "epsilon": 1e-20,
            "scale": fields.float("router_scaling_factor", default=2.826),
            "choice_bias": True,
            "shared_width": width * fields.int("num_shared_experts", default=1, high=2**8),
        }
        sparse = sparse_layers(fields, options["layers"], 1)
        return Config(
            head_norms="each",
            experts=experts(fields, count=192, chosen=8, width=width, layers=sparse, **rules),
            **options,
        )


def _alike(fields: Fields, layers: int, *names: str) -> int:
    """Read a number that a config may give for each layer, by the first of `names` that it has; 1 if it has none."""
    name = next((name for name in names if fields.config.get(name) is not None), names[-1])
    value = fields.config.get(name)
    if type(value) is list:
        if len(value) < layers or any(other != value[0] for other in value[:layers]):
            raise fields.error(name, "one number for all layers")
        value = value[0]
    return Fields({name: value}, fields.file, fields.prefix).int(name, default=1, high=2**12)

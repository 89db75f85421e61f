"""Hunyuan, dense (Tencent 2025): a Llama with an RMSNorm per head on queries and keys after they are rotated."""

from dataclasses import replace

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.names import Names
from models.reading import rotary


class HunYuan(Decoder):
    """A Llama with norms of heads, and a base of the rotary embedding that `alpha` stretches."""

    architectures = ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1ForSequenceClassification")
    names = Names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=2048)
        rope, dims = options["rope"], options["head_dim"]
        found = fields.sub("rope_scaling") or fields.sub("rope_parameters")
        if rope.kind == "dynamic" and found and (alpha := found.float("alpha", 0.0, low=0.0, high=1e9)):
            options["rope"] = replace(rope, kind="default", theta=rope.theta * alpha ** (dims / (dims - 2)), factor=1.0)
        return Config(
            norm_eps=fields.float("rms_norm_eps", default=1e-5, low=0.0),
            attention_bias=fields.bool("attention_bias", default=False),
            head_norms="each",
            norms_last=True,
            **options,
        )

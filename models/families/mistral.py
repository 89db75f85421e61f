"""Mistral (Jiang et al. 2023), Ministral and CWM: Llamas with windows in all or some layers; Ministral 3."""

from dataclasses import replace

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING, Config
from models.decoder import Decoder
from models.reading import layer_types, rotary, windows, with_rope

MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}

CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


class Mistral(Decoder):
    """A Llama with windows and without biases."""

    architectures = (
        "MistralForCausalLM",
        "MistralForSequenceClassification",
        "MinistralForCausalLM",
        "MinistralForSequenceClassification",
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        kv_heads = None if "num_key_value_heads" in fields.config else 8
        options = rotary(fields, positions=4096 * 32, kv_heads=kv_heads)
        # null means none, absent means 4096
        window = fields.int("sliding_window", None, high=2**31) if "sliding_window" in fields.config else 4096
        kinds = layer_types(fields, [SLIDING if window else FULL] * options["layers"])
        return Config(
            norm_eps=fields.float("rms_norm_eps", default=1e-6, low=0.0),
            windows=windows(fields, kinds, window),
            **options,
        )


class Cwm(Decoder):
    """Code World Model (Meta 2025): a Llama with windows in three of four layers."""

    architectures = ("CwmForCausalLM",)
    default_eos_token_ids = frozenset([128001, 128008, 128009])

    @staticmethod
    def read(fields: Fields) -> Config:
        kv_heads, head_dim = (
            None if name in fields.config else size for name, size in (("num_key_value_heads", 8), ("head_dim", 128))
        )
        options = rotary(with_rope(fields, CWM_ROPE), positions=131072, kv_heads=kv_heads, head_dim=head_dim, theta=1e6)
        window = fields.int("sliding_window", None, low=0, high=2**31) if "sliding_window" in fields.config else 8192
        kinds = layer_types(fields, [SLIDING if i % 4 else FULL for i in range(options["layers"])])
        return Config(
            norm_eps=fields.float("rms_norm_eps", default=1e-5, low=0.0),
            mlp_bias=fields.bool("mlp_bias", default=False),
            windows=windows(fields, kinds, window or None),
            **options,
        )


class Ministral3(Decoder):
    """A Llama whose queries grow with their position."""

    architectures = ("Ministral3ForCausalLM", "Ministral3ForSequenceClassification")
    default_pad_token_id = 11

    @staticmethod
    def read(fields: Fields) -> Config:
        found = fields.sub("rope_scaling") or fields.sub("rope_parameters")
        if found is None:
            found = Fields(MINISTRAL3_ROPE, fields.file)
            fields = Fields({**fields.config, "rope_parameters": MINISTRAL3_ROPE}, fields.file)
        kv_heads = None if "num_key_value_heads" in fields.config else 8
        options = rotary(fields, positions=262144, kv_heads=kv_heads, head_dim=128)
        rope, growth = options["rope"], found.float("llama_4_scaling_beta", low=0.0, high=1e6)
        length = rope.original_length
        if rope.kind not in ("llama3", "longrope", "yarn"):
            length = found.int("original_max_position_embeddings", high=2**31)
        options["rope"] = replace(rope, growth=growth, growth_length=length)
        window = fields.int("sliding_window", None, high=2**31)
        eps = fields.float("rms_norm_eps", default=1e-5, low=0.0)
        return Config(norm_eps=eps, windows=(window,) * options["layers"], **options)

"""Mistral (Jiang et al. 2023) and Ministral: Llamas with windows, in all layers or in some."""

from models.config import FULL, SLIDING, Config, layer_types, rotary, windows
from models.decoder import Decoder
from models.fields import Fields


class Mistral(Decoder):
    """A Llama with windows and without biases."""

    architectures = (
        "MistralForCausalLM",
        "MistralForSequenceClassification",
        "MinistralForCausalLM",
        "MinistralForSequenceClassification",
    )
    base = "model."

    @staticmethod
    def read(fields: Fields) -> Config:
        kv_heads = None if "num_key_value_heads" in fields.config else 8
        options = rotary(fields, positions=4096 * 32, kv_heads=kv_heads)
        # null is none, absent is not
        window = fields.int("sliding_window", None, high=2**31) if "sliding_window" in fields.config else 4096
        kinds = layer_types(fields, [SLIDING if window else FULL] * options["layers"])
        return Config(
            norm_eps=fields.float("rms_norm_eps", default=1e-6, low=0.0),
            windows=windows(fields, kinds, window),
            **options,
        )

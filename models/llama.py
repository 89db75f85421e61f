"""Llama 1, 2, 3.x (Touvron et al. 2023) and Mistral, which shares its layout."""

from models.config import Config, architecture, rotary
from models.decoder import Decoder
from models.fields import Fields


class Llama(Decoder):
    """The decoder whose options are the defaults."""

    architectures = (
        "LlamaForCausalLM",
        "LlamaForSequenceClassification",
        "MistralForCausalLM",
        "MistralForSequenceClassification",
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        # By the architecture, as a config may lack `model_type`; transformers' defaults differ.
        mistral = architecture(fields).startswith("Mistral")
        grouped = mistral and "num_key_value_heads" not in fields.config
        options = rotary(fields, positions=4096 * 32 if mistral else 2048, kv_heads=8 if grouped else None)
        if mistral:  # null is none, absent is not
            window = fields.int("sliding_window", None, high=2**31) if "sliding_window" in fields.config else 4096
            options["windows"] = (window,) * options["layers"]
        else:
            options["attention_bias"] = fields.bool("attention_bias", default=False)
            options["mlp_bias"] = fields.bool("mlp_bias", default=False)
        return Config(norm_eps=fields.float("rms_norm_eps", default=1e-6, low=0.0), **options)

"""Qwen2 and Qwen2.5 (Yang et al. 2024): a Llama with biases on queries, keys and values, and windows in some layers;
MiMo (Xiaomi 2025): the same with a draft head, which is left out."""

import re

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING, Config
from models.decoder import Decoder
from models.reading import layer_types, optional_window, rotary, windows
from models.rope import BUFFERS


class Qwen2(Decoder):
    """A Llama with biases on three of the four matrices of attention."""

    architectures = ("Qwen2ForCausalLM", "Qwen2ForSequenceClassification")
    default_eos_token_ids = frozenset([151645])

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=32768, kv_heads=32, eps=1e-6)
        return Config(
            attention_bias=True,
            out_bias=False,
            windows=windows_from(fields, options["layers"]),
            **options,
        )


class MiMo(Qwen2):
    """MiMo-7B."""

    architectures = ("MiMoForCausalLM",)
    ignored = (*BUFFERS, re.compile(r"model\.mtp_layers\..*"))


def windows_from(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Read the window of each layer: if any layer has one, those from `max_window_layers` on or by `layer_types` do."""
    window = optional_window(fields)
    first = fields.int("max_window_layers", default=28, low=0) if window else layers
    kinds = layer_types(fields, [SLIDING if i >= first else FULL for i in range(layers)])
    return windows(fields, kinds, window)

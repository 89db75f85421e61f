"""Qwen3 (Yang et al. 2025): a Llama with an RMSNorm per head on queries and keys, and windows in some layers."""

from models.config import Config, rotary
from models.decoder import Decoder
from models.fields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"


class Qwen3(Decoder):
    """A Llama with norms of heads."""

    architectures = ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification")
    default_eos_token_ids = frozenset([151645])

    @staticmethod
    def read(fields: Fields) -> Config:
        kv_heads = None if "num_key_value_heads" in fields.config else 32
        options = rotary(fields, positions=32768, kv_heads=kv_heads, head_dim=128)
        layers = range(options["layers"])
        window = fields.int("sliding_window", None, high=2**31) if "sliding_window" in fields.config else 4096
        if not fields.bool("use_sliding_window", default=False):
            window = None
        first = fields.int("max_window_layers", default=28, low=0) if window else len(layers)
        kinds = fields.config.get("layer_types") or [SLIDING if i >= first else FULL for i in layers]
        if type(kinds) is not list or len(kinds) != len(layers) or any(kind not in (FULL, SLIDING) for kind in kinds):
            raise fields.error("layer_types", f"{len(layers)} of {FULL} and {SLIDING}")
        if SLIDING in kinds and window is None:
            raise fields.error("sliding_window", "a window, as layer_types has layers of sliding attention")
        return Config(
            norm_eps=fields.float("rms_norm_eps", default=1e-6, low=0.0),
            attention_bias=fields.bool("attention_bias", default=False),
            head_norms=True,
            windows=tuple(window if kind == SLIDING else None for kind in kinds),
            **options,
        )

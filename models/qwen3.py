"""Qwen3 (Yang et al. 2025): a Llama with an RMSNorm per head on queries and keys, and windows in some layers."""

from models.config import FULL, SLIDING, Config, layer_types, rotary, windows
from models.decoder import Decoder
from models.fields import Fields


class Qwen3(Decoder):
    """A Llama with norms of heads."""

    architectures = ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification")
    default_eos_token_ids = frozenset([151645])

    @staticmethod
    def read(fields: Fields) -> Config:
        kv_heads = None if "num_key_value_heads" in fields.config else 32
        options = rotary(fields, positions=32768, kv_heads=kv_heads, head_dim=128)
        window = fields.int("sliding_window", None, high=2**31) if "sliding_window" in fields.config else 4096
        if not fields.bool("use_sliding_window", default=False):
            window = None
        first = fields.int("max_window_layers", default=28, low=0) if window else options["layers"]
        kinds = layer_types(fields, [SLIDING if i >= first else FULL for i in range(options["layers"])])
        return Config(
            norm_eps=fields.float("rms_norm_eps", default=1e-6, low=0.0),
            attention_bias=fields.bool("attention_bias", default=False),
            head_norms="each",
            windows=windows(fields, kinds, window),
            **options,
        )

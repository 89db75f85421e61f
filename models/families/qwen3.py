"""Qwen3 (Yang et al. 2025): a Llama with an RMSNorm per head on queries and keys, and windows in some layers."""

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.families.qwen2 import windows_from
from models.reading import rotary


class Qwen3(Decoder):
    """A Llama with norms of heads."""

    architectures = ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification")
    default_eos_token_ids = frozenset([151645])

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=32768, kv_heads=32, head_dim=128, eps=1e-6, bias=False)
        return Config(
            head_norms="each",
            windows=windows_from(fields, options["layers"]),
            **options,
        )

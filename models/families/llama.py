"""Llama 1, 2, 3.x (Touvron et al. 2023); IQuest-Coder (2026); the text model of Emu3 (BAAI 2024)."""

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.reading import rotary


class Llama(Decoder):
    """The decoder whose options are the defaults."""

    architectures = ("LlamaForCausalLM", "LlamaForSequenceClassification")

    @staticmethod
    def read(fields: Fields) -> Config:
        return Config(
            **rotary(fields, positions=2048, eps=1e-6, bias=False),
            mlp_bias=fields.bool("mlp_bias", default=False),
        )


class IQuestCoder(Llama):
    """IQuest-Coder (IQuest Lab 2026): a Llama with other defaults."""

    architectures = ("IQuestCoderForCausalLM",)

    @staticmethod
    def read(fields: Fields) -> Config:
        if fields.config.get("clip_qkv") is not None:
            raise fields.error("clip_qkv", "nothing: transformers refuses it")
        if fields.bool("use_sliding_window", default=False):
            raise fields.error("use_sliding_window", "false: transformers refuses windows")
        head_dim = None if "head_dim" in fields.config else 128
        return Config(
            **rotary(fields, positions=131072, kv_heads=8, head_dim=head_dim, eps=1e-5, bias=False),
            mlp_bias=fields.bool("mlp_bias", default=False),
        )


class Emu3(Llama):
    """A Llama with other defaults."""

    architectures = ("Emu3ForCausalLM",)
    default_eos_token_ids = frozenset([151850])

    @staticmethod
    def read(fields: Fields) -> Config:
        return Config(**rotary(fields, positions=9216, kv_heads=8, theta=1e6, eps=1e-5))

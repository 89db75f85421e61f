"""Llama 1, 2, 3.x (Touvron et al. 2023); IQuest-Coder (2026); the text models of Llama 3.2 Vision (Meta 2024) and Emu3
(BAAI 2024)."""

import re
from dataclasses import replace

from models.checkpoint.fields import Fields
from models.checkpoint.headers import Checkpoint
from models.checkpoint.tensors import Cut
from models.config import Config
from models.decoder import Decoder
from models.reading import rotary

IMAGE_TOKENS = 8


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
        return Config(
            **rotary(fields, positions=131072, kv_heads=8, head_dim=128, eps=1e-5, bias=False),
            mlp_bias=fields.bool("mlp_bias", default=False),
        )


class Emu3(Llama):
    """A Llama with other defaults."""

    architectures = ("Emu3ForCausalLM",)
    default_eos_token_ids = frozenset([151850])

    @staticmethod
    def read(fields: Fields) -> Config:
        return Config(**rotary(fields, positions=9216, kv_heads=8, theta=1e6, eps=1e-5))


class Mllama(Decoder):
    """Llama 3.2 Vision: without an image, its layers of cross-attention are skipped. The last rows of the table of
    tokens are for tokens of images, which no text has."""

    architectures = ("MllamaForCausalLM",)
    default_eos_token_ids = frozenset([128001])

    @classmethod
    def view(cls, checkpoint: Checkpoint) -> Checkpoint:
        tensors, crossed = checkpoint.tensors, {*cross_layers(checkpoint.fields)}
        layers = {name: re.match(r"(?:model\.)?layers\.(\d+)\.", name) for name in tensors}
        kept = {name: tensors[name] for name, at in layers.items() if at is None or int(at[1]) not in crossed}
        table, size = f"{cls.names.embedding}.weight", checkpoint.fields.int("vocab_size")
        if table in kept and len(shape := kept[table].shape) == 2 and shape[0] == size + IMAGE_TOKENS:
            kept[table] = replace(kept[table], shape=(size, shape[1]), part=Cut(0, 0, size, below=1))
        return replace(checkpoint, tensors=kept)

    @staticmethod
    def read(fields: Fields) -> Config:
        own, crossed = fields.changed({"head_dim": None}), cross_layers(fields)
        options = rotary(own, positions=131072, kv_heads=8, theta=5e5, eps=1e-5)
        return Config(
            **options,
            alone=tuple("none" if i in crossed else "both" for i in range(options["layers"])),
        )


def cross_layers(fields: Fields) -> list[int]:
    """Read the numbers of layers with cross-attention."""
    found = fields.config.get("cross_attention_layers")
    if found is None:
        return [*range(3, 40, 5)]
    if type(found) is not list or any(type(i) is not int for i in found):
        raise fields.error("cross_attention_layers", "numbers of layers")
    return found

"""Phi-3, 3.5, 4-mini (Abdin et al. 2024): a Llama with fused projections and LongRoPE (Ding et al. 2024); the text
model of Phi-4-multimodal (Microsoft 2025)."""

import re

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.names import Names
from models.reading import rotary
from models.rope import BUFFERS

# The first Phi-3 configs call longrope `su`, or `yarn`, which it is not.
ROPE_KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}


class Phi3(Decoder):
    """A Llama with windows; matrices that share an input are stored as one."""

    architectures = ("Phi3ForCausalLM", "Phi3ForSequenceClassification")
    default_pad_token_id = 32000
    names = Names(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))
    default_eos_token_ids = frozenset([32000])

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=4096, partial=1.0, kinds=ROPE_KINDS, original=4096, eps=1e-5)
        window = fields.int("sliding_window", default=None, high=2**31)
        return Config(windows=(window,) * options["layers"], **options)


class Phi4Multimodal(Phi3):
    """A Phi-3 whose checkpoints also hold encoders of images and sounds, and the adapters that go with them."""

    architectures = ("Phi4MultimodalForCausalLM", "Phi4MMForCausalLM")
    default_eos_token_ids = frozenset([199999, 200020])
    ignored = (*BUFFERS, re.compile(r"model\.embed_tokens_extend\..*"), re.compile(r".*\.lora_[AB]\..*"))

    @staticmethod
    def read(fields: Fields) -> Config:
        defaults = {"max_position_embeddings": 131072}
        defaults |= {} if "num_key_value_heads" in fields.config else {"num_key_value_heads": 8}
        given = {name: value for name, value in fields.config.items() if value is not None or name not in defaults}
        return Phi3.read(Fields({**defaults, **given}, fields.file, fields.prefix))

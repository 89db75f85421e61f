"""Qwen3.5 (Qwen Team, 2026): the layers of Qwen3-Next, with other matrices before gated delta nets; dense, or with
experts in every layer."""

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.families.qwen3_next import BESIDE, common, shared
from models.reading import experts
from models.rope import BUFFERS


class Qwen35(Decoder):
    """The dense models."""

    architectures: tuple[str, ...] = ("Qwen3_5ForCausalLM", "Qwen3_5TextForSequenceClassification")
    default_eos_token_ids = frozenset([248046])
    ignored = (*BUFFERS, *BESIDE)
    has_mtp = True

    @staticmethod
    def read(fields: Fields) -> Config:
        return Config(**common(fields, kv_heads=4))


class Qwen35Moe(Qwen35):
    """The models with experts."""

    architectures = ("Qwen3_5MoeForCausalLM",)

    @staticmethod
    def read(fields: Fields) -> Config:
        width = fields.int("moe_intermediate_size", default=512)
        options = common(fields, kv_heads=2, mlp_width=width)
        every = [True] * options["layers"]
        mixed = experts(fields, count=256, chosen=8, width=width, layers=every, normalized=True, **shared(fields))
        return Config(experts=mixed, **options)

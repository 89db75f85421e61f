"""Sarvam (Sarvam AI, 2026): 30B, which is GLM-4.5 with Ling 2's names, and 105B, a DeepSeek-V3."""

from models.checkpoint.fields import Fields
from models.checkpoint.headers import Checkpoint
from models.config import Config
from models.decoder import Decoder
from models.families.bailing import BailingMoe2
from models.families.deepseek_v2 import NAMES, latent_attention, mixture
from models.families.deepseek_v3 import interleaved, note_choice_bias, sigmoids
from models.reading import after_dense, renamed, rotary

# The published fields, and those that transformers saves.
FIELDS = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}


class SarvamMoe(Decoder):
    """Norms of heads, fully rotated; experts that sigmoids choose, after the first layer."""

    architectures = ("SarvamMoEForCausalLM",)
    names = BailingMoe2.names
    default_eos_token_ids = frozenset([1])

    @classmethod
    def view(cls, checkpoint: Checkpoint) -> Checkpoint:
        return note_choice_bias(checkpoint, cls.names)

    @staticmethod
    def read(fields: Fields) -> Config:
        fields = renamed(fields, FIELDS | {"use_qkv_bias": "attention_bias"})
        sizes = {"kv_heads": 4, "head_dim": 64, "inner": 8192, "partial": 1.0, "theta": 8e6}
        options = rotary(fields, positions=131072, eps=1e-6, bias=False, **sizes)
        sparse, rules = after_dense(fields, options["layers"], 1), sigmoids(fields, groups=1, kept=1)
        return Config(
            out_bias=False,
            head_norms="each" if fields.bool("use_qk_norm", default=True) else "",
            experts=mixture(fields, sparse, count=128, width=1024, shared=1, scale=2.5, chosen=6, **rules),
            **options,
        )


class SarvamMla(Decoder):
    """Latent attention, and experts after the first layer."""

    architectures = ("SarvamMLAForCausalLM",)
    names = NAMES
    default_eos_token_ids = frozenset([1])

    @staticmethod
    def read(fields: Fields) -> Config:
        fields = renamed(fields, FIELDS)
        rope = fields.sub("rope_scaling")
        if rope and "deepseek_yarn" in (rope.config.get("type"), rope.config.get("rope_type")):
            fields = fields.changed({"rope_scaling": {**rope.config, "type": None, "rope_type": "yarn"}})
        options = latent_attention(
            fields, positions=4096, mlp_width=16384, query_rank=0, interleaved=interleaved(fields)
        )
        sparse, rules = after_dense(fields, options["layers"], 1), sigmoids(fields, groups=1, kept=1)
        return Config(
            experts=mixture(fields, sparse, count=128, width=2048, shared=1, scale=2.5, chosen=8, **rules), **options
        )

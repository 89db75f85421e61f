"""MiniMax-M2 (MiniMax 2025): experts in all layers, norms over all heads as one row, partially rotated heads."""

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.families.deepseek_v2 import NAMES
from models.reading import experts, rotary


class MiniMaxM2(Decoder):
    """Sigmoids choose the experts, with a bias, and their weights add up to 1."""

    architectures = ("MiniMaxM2ForCausalLM",)
    names = NAMES
    default_eos_token_ids = frozenset([200020])

    @staticmethod
    def read(fields: Fields) -> Config:
        width, head_dim = fields.int("intermediate_size", default=1536), fields.int("head_dim", default=128)
        if fields.config.get("partial_rotary_factor") is None and fields.config.get("rotary_dim") is not None:
            share = fields.int("rotary_dim", high=head_dim) / head_dim  # as in released files
            fields = fields.changed({"partial_rotary_factor": share})
        more = {"mlp_width": width, "head_dim": head_dim, "partial": 1.0, "theta": 5e6}
        options = rotary(fields, positions=196608, kv_heads=8, **more, eps=1e-6)
        rules = {"scores": "sigmoid", "normalized": True, "choice_bias": True}
        return Config(
            head_norms="all",
            experts=experts(fields, count=256, chosen=8, width=width, layers=[True] * options["layers"], **rules),
            **options,
        )

"""Lara Mini (Translated, 2026): gated delta nets, windows and plain attention in turns, experts in every layer."""

from dataclasses import replace
from typing import Any

from models.checkpoint.fields import Fields
from models.config import FULL, RECURRENT, SLIDING, Config, Recurrent
from models.decoder import Decoder
from models.families.qwen3_next import delta_kind
from models.reading import experts, layer_types, rotary, true_if_absent, window_of, windows

KINDS = RECURRENT, SLIDING, RECURRENT, FULL, SLIDING


class LaraMini(Decoder):
    """Norms of heads, which are rotated in layers with a window only; a shared expert without a gate."""

    architectures = ("LaraMiniForCausalLM",)
    names = replace(Decoder.names, recurrent_in=("linear_attn.in_proj",), delta_norm="linear_attn.out_norm.weight")
    default_eos_token_ids = frozenset([151643])

    @staticmethod
    def read(fields: Fields) -> Config:
        width = fields.int("moe_intermediate_size", default=512)
        sizes: dict[str, Any] = {"kv_heads": 4, "head_dim": 128, "mlp_width": width}
        options = rotary(fields, positions=131072, tied=True, eps=1e-6, bias=False, **sizes)
        layers = options["layers"]
        kinds = layer_types(fields, [KINDS[i % len(KINDS)] for i in range(layers)], (RECURRENT, SLIDING, FULL))
        rules = {
            "normalized": true_if_absent(fields, "norm_topk_prob"),
            "shared_width": fields.int("shared_expert_intermediate_size", default=512),
        }
        recurring = tuple(kind == RECURRENT for kind in kinds)
        return Config(
            head_norms="each",
            windows=windows(fields, kinds, window_of(fields, 512)),
            ropes=tuple(options["rope"] if kind == SLIDING else None for kind in kinds),
            recurrent=Recurrent(delta_kind(fields, 8, 16, 128, 128, 4), recurring) if any(recurring) else None,
            experts=experts(fields, count=128, chosen=4, width=width, layers=[True] * layers, **rules),
            **options,
        )

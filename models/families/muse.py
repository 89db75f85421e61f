"""Muse Glimmer (Meta 2026): norms of the embedding and of heads without weights, gated attention, capped logits; layers
without a window are not rotated."""

from dataclasses import replace
from typing import Any

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING, Config
from models.decoder import Decoder
from models.families.afmoe import Afmoe
from models.reading import layer_bases, layer_types, rotary, window_of, windows


class MuseGlimmer(Decoder):
    """Norms on both sides of attention and MLP, those of outputs with a smaller epsilon."""

    architectures = ("MuseGlimmerForCausalLM",)  # only inside a checkpoint with vision
    names = replace(Afmoe.names, mlp_norm="pre_feedforward_layernorm", mlp_out_norm="post_feedforward_layernorm")
    default_eos_token_ids = frozenset([200001])

    @staticmethod
    def read(fields: Fields) -> Config:
        if fields.bool("attention_bias", default=False):
            raise fields.error("attention_bias", "false: biases beside gates without them are not supported")
        sizes: dict[str, Any] = {"kv_heads": 2, "head_dim": 128, "eps": 1e-5}
        options = rotary(fields, positions=131072, activation_field="hidden_activation", **sizes)
        layers, rope = options["layers"], options["rope"]
        full = [(layers - 1 - i) % 4 == 0 for i in range(layers)]
        kinds = layer_types(fields, [FULL if is_full else SLIDING for is_full in full])
        turned = layer_bases(fields, [0.0 if is_full else rope.theta for is_full in full])
        scale = fields.float("qk_scale_factor", default=3.87) * options["head_dim"] ** -0.5
        factor = fields.float("output_multiplier", default=0.19611613513818404)
        if not factor:
            raise fields.error("output_multiplier", "a number other than 0")
        return Config(
            norms=("input", "output"),
            plus_one="layers",
            out_norm_eps=fields.float("post_norm_eps", default=1e-8, low=0.0),
            embedding_norm=True,
            head_norms="plain",
            query_gate="apart",
            windows=windows(fields, kinds, window_of(fields, 2048)),
            ropes=tuple(rope if base else None for base in turned),
            scales=(scale,) * layers,
            logit_divisor=1 / factor,
            logit_cap=fields.float("final_logit_softcapping", default=20.0, low=1e-6),
            **options,
        )

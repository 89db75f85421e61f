"""Laguna (Poolside 2026): heads that differ by layer, with gates of heads or elements; experts that sigmoids choose."""

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING, Config, Uneven
from models.decoder import Decoder
from models.reading import experts, layer_types, ropes, rotary, sparse_layers, window_of, windows

ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}


class Laguna(Decoder):
    """Heads, or their elements, are multiplied by the softplus of a number; each kind of layer has its own rotary
    table."""

    architectures = ("LagunaForCausalLM",)
    default_eos_token_ids = frozenset()

    @staticmethod
    def read(fields: Fields) -> Config:
        if (gating := fields.config.get("gating", True)) not in (True, "per-head", "per-element"):
            raise fields.error("gating", "true, per-head or per-element")
        if fields.bool("moe_apply_router_weight_on_input", default=False):
            raise fields.error("moe_apply_router_weight_on_input", "false: transformers does not support it")
        if fields.float("moe_router_logit_softcapping", default=0.0, low=0.0):
            raise fields.error("moe_router_logit_softcapping", "0: bounds of the router's logits are not supported")
        options = rotary(
            fields, positions=131072, kv_heads=8, head_dim=128, inner=8192, one_rope=False, eps=1e-6, bias=False
        )
        layers, size = options["layers"], options["head_dim"]
        heads, shared = fields.config.get("num_attention_heads_per_layer"), options["kv_heads"]
        heads = [options["heads"]] * layers if heads is None else heads
        if (
            type(heads) is not list
            or len(heads) != layers
            or any(type(count) is not int or not 0 < count <= 2**14 or count % shared for count in heads)
        ):
            raise fields.error("num_attention_heads_per_layer", f"{layers} multiples of num_key_value_heads {shared}")
        kinds = layer_types(fields, [FULL] * layers)
        window = None if fields.config.get("sliding_window") == 0 else window_of(fields, 512)  # 0 in Laguna M.1
        nested = fields.config.get("rope_parameters")
        if nested is None:
            fields = fields.changed({"rope_parameters": ROPES})
        elif not isinstance(nested, dict) or any(not nested.get(kind) for kind in kinds):
            raise fields.error("rope_parameters", f"parameters of {' and '.join(sorted({*kinds}))}")
        bases = {kind: ("", ROPES[kind]["rope_theta"]) for kind in dict.fromkeys(kinds)}
        mixed = experts(
            fields,
            count=256,
            chosen=8,
            width=fields.int("moe_intermediate_size", default=512),
            layers=sparse_layers(fields, layers, 1),
            scores="sigmoid",
            normalized=True,
            scale=fields.float("moe_routed_scaling_factor", default=1.0),
            choice_bias=True,
            shared_width=fields.int("shared_expert_intermediate_size", default=512),
        )
        kept = Uneven(
            ((shared, size),) * layers,
            (*range(layers),),
            (False,) * layers,
            (options["mlp_width"],) * layers,
            (*heads,),
        )
        return Config(
            **options,
            head_norms="each",
            head_gates="elements" if gating == "per-element" else "softplus",
            windows=windows(fields, kinds, window),
            ropes=ropes(fields, kinds, size, options["max_positions"], bases, partial=1.0),
            uneven=kept if len({*heads, options["heads"]}) > 1 else None,
            experts=mixed,
        )

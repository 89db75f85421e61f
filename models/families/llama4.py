"""Llama 4 (Meta 2025): layers that see a chunk of positions, others without rotation, and experts that read their
tokens times the router's scores."""

from models.checkpoint.fields import Fields
from models.config import FULL, Config
from models.decoder import Decoder
from models.families.smollm3 import rotated_layers
from models.names import Names
from models.reading import experts, layer_types, rotary
from models.rope import RopeConfig

CHUNKED = "chunked_attention"


class Llama4(Decoder):
    """The text model. Layers without rotation have queries that grow with their position, and no norms of heads."""

    architectures = ("Llama4ForCausalLM",)
    names = Names(
        up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        router="feed_forward.router",
        expert=tuple(f"feed_forward.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")),
        shared=tuple(f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")),
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        sizes = {"mlp_width": fields.int("intermediate_size_mlp", default=16384), "theta": 5e5}
        options = rotary(fields, positions=131072, kv_heads=8, head_dim=128, **sizes, eps=1e-5, bias=False)
        layers, width = options["layers"], fields.int("intermediate_size", default=8192)
        rotated = rotated_layers(fields, layers)
        kinds = layer_types(fields, [CHUNKED if turned else FULL for turned in rotated], (FULL, CHUNKED))
        size = None if "attention_chunk_size" in fields.config else 8192
        chunk = fields.int("attention_chunk_size", size, high=2**31)
        if CHUNKED in kinds and chunk is None:
            raise fields.error("attention_chunk_size", "a size, as layers have chunked attention")
        growing = _growing(fields, options["head_dim"])
        return Config(
            interleaved=True,
            head_norms="plain" if fields.bool("use_qk_norm", default=True) else "",
            normed=tuple(rotated),
            norms_last=True,
            windows=tuple(chunk if kind == CHUNKED else None for kind in kinds),
            chunks=True,
            ropes=tuple(options["rope"] if turned else growing for turned in rotated),
            experts=experts(
                fields,
                name="num_local_experts",
                count=16,
                chosen=1,
                width=width,
                layers=_mixed(fields, layers),
                scores="sigmoid_of_chosen",
                on_inputs=True,
                shared_width=width,
            ),
            **options,
        )


def _growing(fields: Fields, head_dim: int) -> RopeConfig | None:
    """Return a table that turns nothing and scales queries by their position; None: they are not scaled."""
    tuned = fields.config.get("attn_temperature_tuning", True)  # a number in published files
    if type(tuned) not in (bool, int):
        raise fields.error("attn_temperature_tuning", "true or false")
    growth, length = fields.float("attn_scale", 0.1, low=0.0, high=1e6), fields.int("floor_scale", 8192, high=2**31)
    if not tuned or not growth:
        return None
    return RopeConfig(head_dim, "proportional", growth=growth, growth_length=length, growth_start=1)


def _mixed(fields: Fields, layers: int) -> list[bool]:
    """Return which layers have experts: those in `moe_layers`, or every so many."""
    found = fields.config.get("moe_layers")
    if found is None:
        step = fields.int("interleave_moe_layer_step", default=1)
        return [(i + 1) % step == 0 for i in range(layers)]
    if type(found) is not list or any(type(i) is not int or not 0 <= i < layers for i in found):
        raise fields.error("moe_layers", f"numbers of layers, below {layers}")
    return [i in found for i in range(layers)]

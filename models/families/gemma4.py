"""Gemma 4, text only (Gemma Team 2026): heads that differ from layer to layer, keys and values of earlier layers,
per-layer embeddings, experts in parallel with an MLP."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kernels.experts.routing import Routing
from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING, Config, Experts, LayerInputs, Uneven
from models.decoder import Decoder
from models.families.gemma import cap
from models.names import Names
from models.reading import completed, kinds_by_period, rotary, windows
from models.rope import BUFFERS, RopeConfig

TABLES: Mapping[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


class Gemma4(Decoder):
    """A Gemma whose layers of full attention have wider heads, fewer of keys, and values that are the keys."""

    architectures = ("Gemma4ForCausalLM",)
    uneven = True
    names = Names(
        mlp_norm="pre_feedforward_layernorm",
        router="router.proj",
        expert=("experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj"),
    )
    default_eos_token_ids = frozenset([1])
    # Layers that read the keys and values of others may have matrices for their own.
    ignored = (*BUFFERS, re.compile(r"(model\.)?layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.(weight|bias)"))

    @staticmethod
    def read(fields: Fields) -> Config:
        if fields.str("use_bidirectional_attention", None) not in (None, "vision"):
            raise fields.error("use_bidirectional_attention", "null: a token that sees later ones is not supported")
        options = common(fields, positions=131072, kv_heads=4)
        layers, width, inner = options["layers"], options["width"], options["mlp_width"]
        kinds = (*kinds_by_period(fields, layers, 6)[:-1], FULL)
        sizes = heads(fields, kinds, options["heads"], options["kv_heads"], options["head_dim"])
        reads = shared(fields, kinds, 0)
        doubled = fields.bool("use_double_wide_mlp", default=False)
        widths = [inner * (2 if doubled and reads[i] != i else 1) for i in range(layers)]
        alike = fields.bool("attention_k_eq_v", default=False)
        options["kv_heads"], options["head_dim"] = sizes[0]
        return Config(
            **options,
            windows=windows(fields, kinds, fields.int("sliding_window", 512, high=2**31)),
            ropes=ropes(fields, kinds, sizes, options["max_positions"]),
            uneven=Uneven(sizes, reads, tuple(alike and kind == FULL for kind in kinds), tuple(widths)),
            experts=experts(fields, layers) if fields.bool("enable_moe_block", default=False) else None,
            layer_inputs=inputs(fields, options["vocab_size"], width),
            layer_scales=True,
            logit_cap=cap(fields, "final_logit_softcapping", None),
        )


class Gemma4Unified(Gemma4):
    """A Gemma 4 without per-layer embeddings and experts, whatever the config says of them."""

    architectures = ("Gemma4UnifiedForCausalLM",)

    @staticmethod
    def read(fields: Fields) -> Config:
        own = {
            "max_position_embeddings": fields.int("max_position_embeddings", 262144, high=2**31),
            "sliding_window": fields.int("sliding_window", 1024, high=2**31),
            "hidden_size_per_layer_input": None,
            "enable_moe_block": None,
        }
        return Gemma4.read(fields.changed(own))


def common(fields: Fields, *, positions: int, kv_heads: int, mlp_width: int | None = None) -> dict[str, Any]:
    """Read the arguments of a `Config` that are the same in Gemma 3n and Gemma 4; see `rotary`."""
    found = rotary(
        fields, positions=positions, kv_heads=kv_heads, head_dim=256, mlp_width=mlp_width, tied=True, one_rope=False,
        activation="gelu_pytorch_tanh", activation_field="hidden_activation", eps=1e-6, bias=False,
    )  # fmt: skip
    return found | {
        "embedding_scale": found["width"] ** 0.5,
        "rounded_scale": True,
        "norms": ("input", "output"),
        "scales": (1.0,) * found["layers"],
        "head_norms": "each",
        "value_norms": True,
    }


def heads(fields: Fields, kinds: Sequence[str], queries: int, kv_heads: int, size: int) -> tuple[tuple[int, int], ...]:
    """Read `Uneven.kv_sizes` of layers of these kinds: `per_layer_config` of transformers 5.23 has them; before, layers
    of full attention had fields of their own.

    Raises:
        CheckpointError: it names the field.
    """
    full = {"head_dim": fields.int("global_head_dim", 512, high=2**14)}
    if fields.bool("attention_k_eq_v", default=False) and (given := fields.int("num_global_key_value_heads", None)):
        full["num_key_value_heads"] = given
    every = Fields({str(i): full for i, kind in enumerate(kinds) if kind == FULL}, fields.file)
    if "per_layer_config" in fields.config:
        given = fields.within("per_layer_config")
        numbers = {number.lstrip("0") or "0": own for number, own in given.config.items()}  # "05" if there is "11"
        every = Fields(numbers, given.file, given.prefix)
    found = []
    for i in range(len(kinds)):
        own = every.within(str(i))
        if other := {*own.config} - {"head_dim", "num_key_value_heads"}:
            raise own.error(min(other), "nothing: layers may differ in their heads only")
        sizes = own.int("num_key_value_heads", kv_heads, high=2**14), own.int("head_dim", size, high=2**14)
        if queries % sizes[0] or sizes[1] % 2:
            what = f"heads of an even size, and a divisor of num_attention_heads, which is {queries}"
            raise fields.error("per_layer_config", what)
        found.append(sizes)
    return tuple(found)


def shared(fields: Fields, kinds: Sequence[str], default: int) -> tuple[int, ...]:
    """Return `Uneven.keys_from`: the last layers, `default` if the field is absent, read the keys and values of the
    last earlier layer of their kind."""
    first = len(kinds) - fields.int("num_kv_shared_layers", default, low=0, high=len(kinds) - 1)
    own = {kind: i for i, kind in enumerate(kinds[:first])}
    if {*kinds} - {*own}:
        raise fields.error("num_kv_shared_layers", "a layer of each kind of layer_types before those that share")
    return tuple(i if i < first else own[kind] for i, kind in enumerate(kinds))


def ropes(
    fields: Fields, kinds: Sequence[str], sizes: Sequence[tuple[int, int]], max_positions: int
) -> tuple[RopeConfig, ...]:
    """Read `Config.ropes`, each for the heads of its layer."""
    nested, found = fields.within("rope_parameters"), {}
    for kind, (_, size) in zip(kinds, sizes, strict=True):
        given = nested.sub(kind)
        own = given.config if given else TABLES[kind]
        names = "rope_theta", "partial_rotary_factor"
        part = Fields({"rope_parameters": completed(own, fields, names)}, fields.file)
        found[kind, size] = RopeConfig.from_hf(part, size, max_positions)
    return tuple(found[kind, size] for kind, (_, size) in zip(kinds, sizes, strict=True))


def experts(fields: Fields, layers: int) -> Experts:
    """Read the experts in parallel with the MLP of each layer."""
    count, chosen = fields.int("num_experts", high=2**12), fields.int("top_k_experts", high=2**12)
    if chosen > count:
        raise fields.error("top_k_experts", f"at most num_experts, which is {count}")
    width = fields.int("moe_intermediate_size")
    return Experts(count, width, Routing(chosen, normalized=True), (True,) * layers, beside_mlp=True)


def inputs(fields: Fields, vocab_size: int, width: int) -> LayerInputs | None:
    """Read the per-layer embeddings; None: the model has none."""
    name = "hidden_size_per_layer_input"
    size = fields.int(name, 0, low=0) if name in fields.config else 256  # null: a multimodal model without them
    known = fields.int("vocab_size_per_layer_input", 262144)
    if size and known < vocab_size:
        raise fields.error("vocab_size_per_layer_input", f"vocab_size, {vocab_size}, or more")
    return LayerInputs(size, known, scale=size**0.5, made_scale=width**-0.5) if size else None

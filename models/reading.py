"""Reads the fields of a Hugging Face config that families share, as arguments of a `Config`."""

from collections.abc import Mapping, Sequence
from typing import Any

from kernels.experts.routing import Routing
from models.checkpoint.fields import REQUIRED, Fields
from models.config import FULL, RECURRENT, SLIDING, Experts
from models.rope import RopeConfig

ACTIVATIONS = {  # Hugging Face's names -> those of `kernels.rows.activation`
    **{name: name for name in ("silu", "relu", "gelu", "quick_gelu", "tanh")},
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_tanh"),
    "gelu_python": "gelu",
    "swish": "silu",
    "relu2": "relu_squared",
}
OLD_KINDS = {"attention": FULL, "mamba": RECURRENT}  # transformers' former names of layer kinds


def architecture(fields: Fields) -> str:
    """Return the first of the config's architectures, which `Checkpoint.architecture` checks."""
    return str((fields.config.get("architectures") or [""])[0])


def check_layers_alike(fields: Fields) -> None:
    """Raise CheckpointError if `per_layer_config` gives a layer a field that differs from that of the whole model."""
    given = fields.within("per_layer_config")
    for layer in given.config:
        own = given.within(layer)
        for name, value in own.config.items():
            if value != (fields.config.get(name) if name != "skip" else []):
                raise own.error(name, "the value of all layers: those of this family may not differ")


def common(fields: Fields, *, activation: str, default: str, tied: bool) -> dict[str, Any]:
    """Read the arguments of a `Config` that are the same in every family.

    Args:
        activation, default: the field of the MLP's activation, and its value if it is absent.
        tied: the value of `tie_word_embeddings` if it is absent.
    """
    return {
        "vocab_size": fields.int("vocab_size"),
        "activation": ACTIVATIONS[fields.choice(activation, set(ACTIVATIONS), default=default)],
        "tied": fields.bool("tie_word_embeddings", default=tied),
        # A `...ForSequenceClassification` is a reward model, which scores the text so far.
        "scores": architecture(fields).endswith("ForSequenceClassification"),
    }


def rotary(
    fields: Fields,
    *,
    positions: int,
    activation: str = "silu",
    activation_field: str = "hidden_act",
    kv_heads: int | None = None,
    head_dim: int | None = None,
    mlp_width: int | None = None,
    inner: int = REQUIRED,
    tied: bool = False,
    one_rope: bool = True,
    eps: float | None = None,
    bias: bool | None = None,
    **rope: Any,
) -> dict[str, Any]:
    """Read the arguments of a `Config` that are the same in families with rotary embeddings.

    Args:
        positions, activation, kv_heads, head_dim, inner, tied: values of absent fields; `inner` is that of
            `intermediate_size`. None, and null in the config: as many key/value heads as query heads, and an even share
            of the width.
        activation_field: the name of the activation's field.
        one_rope: all layers share a rotary table; if not, the caller reads `Config.ropes`.
        mlp_width: the MLP's width, for families that do not store it in `intermediate_size`.
        eps, bias: values of `Config.norm_eps` and `attention_bias` if `rms_norm_eps` and `attention_bias` are absent;
            None: the caller reads them.
        rope: see `RopeConfig.from_hf`.

    Raises:
        CheckpointError: naming the field.
    """
    width = fields.int("hidden_size")
    heads = fields.int("num_attention_heads", high=2**14)
    kv_heads = None if "num_key_value_heads" in fields.config else kv_heads
    head_dim = None if "head_dim" in fields.config else head_dim
    shared = fields.int("num_key_value_heads", default=kv_heads or heads, high=2**14)
    if heads % shared:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    if not head_dim and fields.config.get("head_dim") is None and width % heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads {heads}")
    size = fields.int("head_dim", default=head_dim or width // heads, high=2**14)
    if size % 2 and "partial" not in rope:
        raise fields.error("head_dim", "an even number")
    max_positions = fields.int("max_position_embeddings", default=positions, high=2**31)
    found = common(fields, activation=activation_field, default=activation, tied=tied)
    if eps is not None:
        found["norm_eps"] = fields.float("rms_norm_eps", default=eps, low=0.0)
    if bias is not None:
        found["attention_bias"] = fields.bool("attention_bias", default=bias)
    return found | {
        "width": width,
        "heads": heads,
        "kv_heads": shared,
        "head_dim": size,
        "mlp_width": mlp_width or fields.int("intermediate_size", inner),
        "layers": fields.int("num_hidden_layers", high=2**14),
        "max_positions": max_positions,
        "rope": RopeConfig.from_hf(fields, size, max_positions, **rope) if one_rope else None,
    }


def experts(
    fields: Fields,
    *,
    count: int,
    chosen: int,
    width: int,
    layers: Sequence[bool],
    scores: str = "softmax",
    name: str = "num_experts",
    **more: Any,
) -> Experts | None:
    """Read `Config.experts` from the fields that families share; None: no layer has experts.

    Args:
        count, chosen: the number of experts, and of experts per token, if the fields are absent.
        width, layers: see `Experts`.
        scores: see `Routing`.
        name: the field with the number of experts; `num_local_experts` is read if it is absent.
        more: further arguments of `Routing` and of `Experts`.

    Raises:
        CheckpointError: more experts are chosen than exist, or the groups do not fit their number.
    """
    if not any(layers):
        return None
    name = name if fields.config.get(name) is not None else "num_local_experts"
    count = fields.int(name, default=count, high=2**12)
    chosen = fields.int("num_experts_per_tok", default=chosen, high=2**12)
    if chosen > count:
        raise fields.error("num_experts_per_tok", f"at most {name}, which is {count}")
    rules = {field: more.pop(field) for field in Routing._fields if field in more}
    routing = Routing(chosen, scores, **rules)
    _check_groups(fields, routing, name, count)
    return Experts(count, width, routing, tuple(layers), **more)


def _check_groups(fields: Fields, routing: Routing, name: str, count: int) -> None:
    size, rest = divmod(count, routing.groups)
    if rest or size < routing.best:
        raise fields.error("n_group", f"a divisor of {name}, {count}, that leaves groups of {routing.best} or more")
    if routing.kept > routing.groups:
        raise fields.error("topk_group", f"at most n_group, which is {routing.groups}")
    if routing.chosen > (most := size * routing.kept):
        raise fields.error("num_experts_per_tok", f"at most the {most} experts of topk_group groups")


def layer_types(fields: Fields, default: Sequence[str], kinds: Sequence[str] = (FULL, SLIDING)) -> tuple[str, ...]:
    """Read the kind of each layer from the field `layer_types`; `default` if that is absent.

    Raises:
        CheckpointError: another number of layers, or a kind that is not one of `kinds`.
    """
    found = fields.config.get("layer_types") or list(default)
    if type(found) is list:
        found = [OLD_KINDS.get(kind, kind) if type(kind) is str else kind for kind in found]
    if type(found) is not list or len(found) != len(default) or any(kind not in kinds for kind in found):
        raise fields.error("layer_types", f"{len(default)} of {' and '.join(kinds)}")
    return tuple(found)


def kinds_by_period(fields: Fields, layers: int, period: int, others: str = SLIDING) -> tuple[str, ...]:
    """Read `layer_types`; if it is absent, every `period`-th layer has full attention."""
    return layer_types(fields, [others if i % period else FULL for i in range(1, layers + 1)], (FULL, others))


def layer_bases(fields: Fields, absent: Sequence[float]) -> Sequence[float]:
    """Read the rotary base of each layer from the field `layer_rope_theta`, 0 if it rotates nothing; `absent`: those if
    the field is absent.

    Raises:
        CheckpointError: another number of layers, or no base.
    """
    bases = fields.config.get("layer_rope_theta")
    if bases is None:
        return absent
    valid = type(bases) is list and len(bases) == len(absent)
    if not valid or any(type(base) not in (int, float) or not (base == 0 or 1 < base <= 1e15) for base in bases):
        raise fields.error("layer_rope_theta", f"{len(absent)} numbers, 0 or above 1")
    return bases


def after_dense(fields: Fields, layers: int, dense: int) -> list[bool]:
    """Whether each layer has experts: all but the first ones do, `dense` if `first_k_dense_replace` is absent."""
    first = fields.int("first_k_dense_replace", default=dense, low=0)
    return [i >= first for i in range(layers)]


def sparse_layers(fields: Fields, layers: int, dense: int, step: int = 1) -> list[bool]:
    """Whether each layer has experts, by the field `mlp_layer_types`; if that is absent, all but the first `dense` do
    whose numbers are multiples of `step`.

    Raises:
        CheckpointError: another number of layers, or a kind that is neither `dense` nor `sparse`.
    """
    kinds = fields.config.get("mlp_layer_types")
    if kinds is None:
        return [i >= dense and i % step == 0 for i in range(layers)]
    if type(kinds) is not list or len(kinds) != layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise fields.error("mlp_layer_types", f"{layers} of dense and sparse")
    return [kind == "sparse" for kind in kinds]


def with_rope(fields: Fields, rope: Mapping[str, Any]) -> Fields:
    """Return the fields, with these rotary parameters if the config has none."""
    if fields.config.get("rope_parameters") is not None or fields.sub("rope_scaling"):
        return fields
    return fields.changed({"rope_parameters": rope})


def window_of(fields: Fields, absent: int) -> int | None:
    """Read the window of layers that have one: null means none."""
    return fields.int("sliding_window", None if "sliding_window" in fields.config else absent, high=2**31)


def optional_window(fields: Fields) -> int | None:
    """Read the window of layers that have one, if `use_sliding_window` is true."""
    if not fields.bool("use_sliding_window", default=False):
        return None
    return window_of(fields, 4096)


def renamed(fields: Fields, names: Mapping[str, str]) -> Fields:
    """Return the fields, those that `names` maps to other names under these too; null does not count."""
    given = {ours: fields.config.get(name) for name, ours in names.items()}
    return fields.changed({name: value for name, value in given.items() if value is not None})


def true_if_absent(fields: Fields, name: str) -> bool:
    """Read a flag that transformers takes as true if it is absent, and as false if it is null."""
    return fields.bool(name, default=name not in fields.config)


def windows(fields: Fields, kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """Return `Config.windows` of layers of these kinds: sliding ones have the window of the field `sliding_window`.

    Raises:
        CheckpointError: a layer has sliding attention, but there is no window.
    """
    if SLIDING in kinds and window is None:
        raise fields.error("sliding_window", "a window, as layer_types has layers of sliding attention")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def completed(own: Mapping[str, Any], fields: Fields, names: Sequence[str]) -> dict[str, Any]:
    """Return the rotary parameters of a kind of layers; the top level completes them, as in transformers."""
    return {name: fields.config[name] for name in names if fields.config.get(name) is not None} | dict(own)


def ropes(
    fields: Fields,
    kinds: Sequence[str],
    head_dim: int,
    max_positions: int,
    bases: Mapping[str, tuple[str, float]],
    partial: float | None = None,
) -> tuple[RopeConfig, ...]:
    """Read `Config.ropes` of layers of these kinds, whose rotary tables differ.

    `rope_parameters` of transformers 5 has an object for each kind; before, `rope_scaling` applied to full attention,
    and each kind had its own field for the base.

    Args:
        bases: maps each kind to the name of that field, and the base if the field is absent.
        partial: see `RopeConfig.from_hf`.

    Raises:
        CheckpointError: naming the field.
    """
    nested, tables = fields.within("rope_parameters"), {}
    names = ["partial_rotary_factor"]
    names += [] if any(name for name, _ in bases.values()) else ["rope_theta"]
    for kind, (name, base) in bases.items():
        scaling, own = fields.within("rope_scaling"), nested.within(kind).config
        stretched = scaling.config if kind == FULL else {}
        if scaling.str("type", "default") != "default" and scaling.str("rope_type", None) is None:
            raise scaling.error("type", "the kind as rope_type: transformers ignores the older name here")
        found = {**own, **stretched}
        if own:
            found = completed(found, fields, names)
        if found.get("rope_theta") is None:
            found["rope_theta"] = fields.float(name, base, low=1.0, high=1e15) if name else base
        part = Fields({"rope_parameters": found}, fields.file)
        tables[kind] = RopeConfig.from_hf(part, head_dim, max_positions, partial=partial)
    if len({table.switch_length for table in tables.values()} - {None}) > 1:
        raise fields.error("rope_parameters", "one original_max_position_embeddings of longrope for all layers")
    return tuple(tables[kind] for kind in kinds)

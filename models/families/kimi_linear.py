"""Kimi Linear (Kimi Team, 2025): gated delta nets whose decays differ from element to element of a key in most layers,
latent attention without rotary embeddings in the others, the experts of DeepSeek-V3."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kernels.layout import DeltaKind
from models.checkpoint.fields import Fields
from models.config import FULL, RECURRENT, Config, Recurrent
from models.decoder import Decoder
from models.families.deepseek_v2 import NAMES, latent_attention, mixture
from models.families.deepseek_v3 import sigmoids
from models.reading import layer_types, sparse_layers

LISTS = {"kda_layers": RECURRENT, "full_attn_layers": FULL}
PUBLISHED = {  # names of fields in files -> those that families share
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
ONLY: dict[str, Any] = {  # values of fields of Kimi's own code that are supported
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
    "mla_use_output_gate": False,
    "routed_expert_hidden_size": None,
    "attn_res_block_size": None,
}
ONLY_DELTA: dict[str, Any] = {"use_full_rank_gate": False, "gate_lower_bound": None}  # the same of `linear_attn_config`


class KimiLinear(Decoder):
    """An MLP in the first layers, experts in the others."""

    architectures = ("KimiLinearForCausalLM",)
    names = replace(
        NAMES,
        recurrent_in=tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "g_b", "b", "f_b")),
        recurrent_low=("self_attn.g_a_proj", "self_attn.f_a_proj"),
        recurrent_out="self_attn.o_proj",
        delta_taps="self_attn.conv1d.weight",
        delta_decay="self_attn.A_log",
        delta_bias="self_attn.dt_bias",
        delta_norm="self_attn.o_norm.weight",
    )
    default_eos_token_ids = frozenset([163586])

    @staticmethod
    def read(fields: Fields) -> Config:
        fields = fields.changed({new: fields.config[old] for old, new in PUBLISHED.items() if old in fields.config})
        own = fields.within("linear_attn_config")
        for some, values in ((fields, ONLY), (own, ONLY_DELTA)):
            for name, value in values.items():
                if some.config.get(name) not in (None, value):
                    raise some.error(name, f"{value}: others are not supported".lower())
        unrotated = fields.changed({"rope_parameters": None, "rope_scaling": None, "partial_rotary_factor": None})
        options = latent_attention(
            unrotated, positions=1048576, mlp_width=9216, query_rank=0, eps=1e-5, interleaved=False
        )
        latent, layers = options["latent"], options["layers"]
        options |= {"rope": None, "scales": ((latent.plain + latent.rotated) ** -0.5,) * layers}
        sparse = sparse_layers(fields, layers, fields.int("first_k_dense_replace", default=1, low=0))
        rules = {"count": 256, "width": 1024, "shared": 1, "scale": 2.446, "name": "num_experts"}
        rules |= {"chosen": fields.int("num_experts_per_tok", default=8)} | sigmoids(fields, groups=1, kept=1)
        kinds = kinds_of(fields, own, layers)
        return Config(experts=mixture(fields, sparse, **rules), recurrent=delta_nets(fields, own, kinds), **options)


def kinds_of(fields: Fields, own: Fields, layers: int) -> tuple[str, ...]:
    """Read the kind of each layer from `layer_types`; if that is absent, from the lists in `linear_attn_config`, which
    number the first layer 1. Raises CheckpointError naming the field."""
    default = [FULL if i and i % 4 == 0 else RECURRENT for i in range(layers)]
    if fields.config.get("layer_types") is None and all(name in own.config for name in LISTS):
        found: dict[int, str] = {}
        for name, kind in LISTS.items():
            numbers = own.config[name]
            if type(numbers) is not list or any(type(i) is not int or not 0 < i <= layers for i in numbers):
                raise own.error(name, f"a list of layers, numbers from 1 to {layers}")
            if {*numbers} & {*found}:
                raise own.error(name, "layers that kda_layers does not have")
            found |= dict.fromkeys(numbers, kind)
        if len(found) < layers:
            raise own.error("full_attn_layers", "all layers that kda_layers does not have")
        default = [found[i] for i in range(1, layers + 1)]
    return layer_types(fields, default, (FULL, RECURRENT))


def delta_nets(fields: Fields, own: Fields, kinds: Sequence[str]) -> Recurrent | None:
    """Read the layers with a gated delta net, whose sizes in `linear_attn_config` take precedence."""
    if RECURRENT not in kinds:
        return None
    fields.choice("hidden_act", ("silu", "swish"), default="silu")
    sizes = (("num_heads", "num_heads", 32, 2**16), ("head_dim", "head_dim", 128, 2**16),
             ("short_conv_kernel_size", "conv_kernel_dim", 4, 64))  # fmt: skip
    heads, size, taps = (
        own.int(name, default=fields.int(f"linear_{other}", default=absent, high=most), high=most)
        for name, other, absent, most in sizes
    )
    kind = DeltaKind(heads, heads, size, size, taps, key_decays=True)
    return Recurrent(kind, tuple(each == RECURRENT for each in kinds), sigmoid=True, rank=size)

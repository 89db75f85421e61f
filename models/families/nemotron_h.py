"""Nemotron-H, Nemotron Nano 2, Nemotron 3 (NVIDIA 2025): layers that are selective scans of Mamba-2, or attention that
rotates nothing, or MLPs with the square of ReLU, or experts of that kind."""

import re
from typing import Any

from kernels.layout import ScanKind
from models.checkpoint.fields import Fields
from models.config import FULL, RECURRENT, Config, Experts, Recurrent
from models.decoder import Decoder
from models.families.deepseek_v3 import sigmoids
from models.families.granite_hybrid import step_limits
from models.names import Names
from models.reading import experts, layer_types, rotary
from models.rope import BUFFERS

MLP, EXPERTS = "mlp", "moe"
LETTERS = {"M": RECURRENT, "*": FULL, "-": MLP, "E": EXPERTS}  # letters of `hybrid_override_pattern`
OLD_NAMES = {  # former names of fields, which take precedence in transformers
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
}


class NemotronH(Decoder):
    """Each layer is one part with one norm, all under one name."""

    architectures = ("NemotronHForCausalLM",)
    names = Names(
        embedding="model.embeddings",
        norm="model.norm_f",
        attention_norm="norm",
        mlp_norm="norm",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        out="mixer.o_proj",
        up=("mixer.up_proj",),
        down="mixer.down_proj",
        recurrent_in=("mixer.in_proj",),
        recurrent_out="mixer.out_proj",
        delta_taps="mixer.conv1d.weight",
        delta_decay="mixer.A_log",
        delta_bias="mixer.dt_bias",
        delta_norm="mixer.norm.weight",
        scan_shift="mixer.conv1d.bias",
        scan_skip="mixer.D",
        router="mixer.gate",
        choice_bias="mixer.gate.e_score_correction_bias",
        expert=("mixer.experts.{}.up_proj", "mixer.experts.{}.down_proj"),
        shared=("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
    )
    ignored = (*BUFFERS, re.compile(r"mtp\..+"))

    @staticmethod
    def read(fields: Fields) -> Config:
        renamed = {new: fields.config[old] for old, new in OLD_NAMES.items() if old in fields.config}
        fields = fields.changed(renamed)
        kinds = kinds_of(fields)
        sizes = fields.changed({"num_hidden_layers": len(kinds)})
        options: dict[str, Any] = rotary(
            sizes, positions=4096, activation="relu2", activation_field="mlp_hidden_act", kv_heads=8,
            head_dim=128, inner=21504, one_rope=False,
        )  # fmt: skip
        return Config(
            **options,
            norm_eps=fields.float("layer_norm_epsilon", default=1e-5, low=0.0),
            gated=False,
            mlp_bias=fields.bool("mlp_bias", default=False),
            alone=tuple("mlp" if kind in (MLP, EXPERTS) else "attention" for kind in kinds),
            experts=_experts(fields, kinds),
            recurrent=_scans(fields, kinds) if RECURRENT in kinds else None,
        )


def kinds_of(fields: Fields) -> tuple[str, ...]:
    """Read the kind of each layer from a list or a string of letters. Raises CheckpointError naming the field."""
    name = "layers_block_type" if fields.config.get("layers_block_type") is not None else "layer_types"
    found, pattern = fields.config.get(name), fields.str("hybrid_override_pattern", None)
    if found is None:
        found = [LETTERS.get(letter, letter) for letter in pattern] if pattern else [*LETTERS.values()]
        name = "hybrid_override_pattern"
    every = Fields({"layer_types": found}, fields.file)
    try:
        kinds = layer_types(every, found if isinstance(found, list) else [], tuple(LETTERS.values()))
    except type(every.error("", "")):
        raise fields.error(name, f"a list of {', '.join(LETTERS.values())}, or letters of {''.join(LETTERS)}") from None
    return kinds


def _experts(fields: Fields, kinds: tuple[str, ...]) -> Experts | None:
    if EXPERTS in kinds and fields.bool("mlp_bias", default=False):
        raise fields.error("mlp_bias", "false, as there are layers of experts")
    sizes = {
        "width": fields.int("moe_intermediate_size", default=7688),
        "shared_width": fields.int("moe_shared_expert_intermediate_size", default=7688),
        "scale": fields.float("routed_scaling_factor", default=1.0),
        "latent": fields.int("moe_latent_size", default=0),
    }
    layers, rules = [kind == EXPERTS for kind in kinds], sigmoids(fields, groups=1, kept=1)
    return experts(fields, count=8, chosen=2, name="n_routed_experts", layers=layers, **sizes, **rules)


def _scans(fields: Fields, kinds: tuple[str, ...]) -> Recurrent:
    fields.choice("mamba_hidden_act", ("silu", "swish"), default="silu")
    heads, size = fields.int("mamba_num_heads", default=128, high=2**16), fields.int("mamba_head_dim", default=64)
    groups, state = fields.int("n_groups", default=8), fields.int("ssm_state_size", default=128, high=2**16)
    if heads % groups:
        raise fields.error("n_groups", f"a divisor of mamba_num_heads {heads}")
    kind = ScanKind(groups, heads, state, size, fields.int("conv_kernel", default=4, high=64))
    biases = fields.bool("use_bias", default=False), fields.bool("use_conv_bias", default=True)
    return Recurrent(kind, tuple(each == RECURRENT for each in kinds), False, *biases, step_limits(fields))

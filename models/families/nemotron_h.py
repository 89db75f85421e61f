"""Nemotron-H, Nemotron Nano 2 (NVIDIA 2025): layers that are selective scans of Mamba-2, or attention that rotates
nothing, or MLPs with the square of ReLU."""

import re
from typing import Any

from kernels.layout import ScanKind
from models.checkpoint.fields import Fields
from models.config import FULL, RECURRENT, Config, Recurrent
from models.decoder import Decoder
from models.families.granite_hybrid import step_limits
from models.names import Names
from models.reading import layer_types, rotary
from models.rope import BUFFERS

MLP, EXPERTS = "mlp", "moe"
LETTERS = {"M": RECURRENT, "*": FULL, "-": MLP, "E": EXPERTS}  # of `hybrid_override_pattern`
OLD_NAMES = {  # of fields, which win in transformers
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
    )
    ignored = (*BUFFERS, re.compile(r"mtp\..+"))

    @staticmethod
    def read(fields: Fields) -> Config:
        renamed = {new: fields.config[old] for old, new in OLD_NAMES.items() if old in fields.config}
        fields = Fields({**fields.config, **renamed}, fields.file, fields.prefix)
        kinds = kinds_of(fields)
        sizes = Fields({**fields.config, "num_hidden_layers": len(kinds)}, fields.file, fields.prefix)
        options: dict[str, Any] = rotary(
            sizes, positions=4096, activation="relu2", activation_field="mlp_hidden_act", kv_heads=8,
            head_dim=128, mlp_width=fields.int("intermediate_size", default=21504), one_rope=False,
        )  # fmt: skip
        return Config(
            **options,
            norm_eps=fields.float("layer_norm_epsilon", default=1e-5, low=0.0),
            gated=False,
            mlp_bias=fields.bool("mlp_bias", default=False),
            alone=tuple("mlp" if kind == MLP else "attention" for kind in kinds),
            recurrent=_scans(fields, kinds) if RECURRENT in kinds else None,
        )


def kinds_of(fields: Fields) -> tuple[str, ...]:
    """The kind of each layer, of a list or of a string of letters. Raises CheckpointError naming the field."""
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
    if EXPERTS in kinds:
        raise fields.error(name, "no layers of experts: those of this family are not supported")
    if FULL not in kinds:
        raise fields.error(name, "at least one layer of attention")
    return kinds


def _scans(fields: Fields, kinds: tuple[str, ...]) -> Recurrent:
    fields.choice("mamba_hidden_act", ("silu", "swish"), default="silu")
    heads, size = fields.int("mamba_num_heads", default=128, high=2**16), fields.int("mamba_head_dim", default=64)
    groups, state = fields.int("n_groups", default=8), fields.int("ssm_state_size", default=128, high=2**16)
    if heads % groups:
        raise fields.error("n_groups", f"a divisor of mamba_num_heads {heads}")
    kind = ScanKind(groups, heads, state, size, fields.int("conv_kernel", default=4, high=64))
    biases = fields.bool("use_bias", default=False), fields.bool("use_conv_bias", default=True)
    return Recurrent(kind, tuple(each == RECURRENT for each in kinds), False, *biases, step_limits(fields))

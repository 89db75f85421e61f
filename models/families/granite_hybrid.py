"""Granite 4 (IBM 2025): Mamba-2's selective scans (Dao and Gu, 2024) in most layers or in none, attention in the
others, mostly without rotary embeddings; an MLP for all tokens, in some models in parallel with experts."""

import math
from collections.abc import Sequence
from typing import Any

from kernels.layout import ScanKind
from models.checkpoint.fields import Fields
from models.config import FULL, RECURRENT, Config, Recurrent
from models.decoder import Decoder
from models.families.granite import factors
from models.names import Names
from models.reading import experts, layer_types, rotary, true_if_absent

SCANS: dict[str, Any] = {  # fields of `Names`
    "recurrent_in": ("mamba.in_proj",),
    "recurrent_out": "mamba.out_proj",
    "delta_taps": "mamba.conv1d.weight",
    "delta_decay": "mamba.A_log",
    "delta_bias": "mamba.dt_bias",
    "delta_norm": "mamba.norm.weight",
}


class GraniteHybrid(Decoder):
    """A Granite whose layers are scans or attention; one matrix computes both halves of the MLP."""

    architectures = ("GraniteMoeHybridForCausalLM",)
    names = Names(
        **SCANS,
        up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
        shared=("shared_mlp.input_linear", "shared_mlp.output_linear"),
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        shared = fields.int("shared_intermediate_size", default=1024)
        options: dict[str, Any] = rotary(fields, positions=2048, mlp_width=shared)
        layers = options["layers"]
        if not fields.config.get("layer_types"):
            fields = fields.changed({"layer_types": fields.config.get("layers_block_type")})
        kinds = layer_types(fields, [RECURRENT] * layers, (FULL, RECURRENT))
        if fields.config.get("position_embedding_type") != "rope":
            options["rope"] = None
        if fields.int("num_local_experts", default=8, low=0, high=2**12):
            width = fields.int("intermediate_size", default=11008)
            rules = {"scores": "softmax_of_chosen", "shared_width": shared}
            options["experts"] = experts(fields, count=8, chosen=2, width=width, layers=[True] * layers, **rules)
        recurrent = scans(fields, kinds, options["width"]) if RECURRENT in kinds else None
        return Config(recurrent=recurrent, **factors(fields, layers), **options)


def scans(fields: Fields, kinds: Sequence[str], width: int, values: int | None = None, **more: Any) -> Recurrent:
    """Read the Mamba-2 layers, whose convolution has the activation of the MLP.

    Args:
        width: the model's width.
        values: elements of all heads; None: `mamba_expand` times `width`.
        more: further arguments of `Recurrent`.

    Raises:
        CheckpointError: it names the field.
    """
    fields.choice("hidden_act", ("silu", "swish"), default="silu")
    what = "mamba_expand * hidden_size" if values is None else "mamba_d_ssm"
    values = values or fields.int("mamba_expand", default=2, high=2**8) * width
    heads, groups = fields.int("mamba_n_heads", default=128, high=2**16), fields.int("mamba_n_groups", default=1)
    if values % heads:
        raise fields.error("mamba_n_heads", f"a divisor of {what} {values}")
    if fields.config.get("mamba_d_head", "auto") not in ("auto", values // heads):
        raise fields.error("mamba_d_head", f"{what} / mamba_n_heads, which is {values // heads}")
    if heads % groups:
        raise fields.error("mamba_n_groups", f"a divisor of mamba_n_heads {heads}")
    size, taps = fields.int("mamba_d_state", default=256, high=2**16), fields.int("mamba_d_conv", default=4, high=64)
    biases = fields.bool("mamba_proj_bias", default=False), true_if_absent(fields, "mamba_conv_bias")
    kind, layers = ScanKind(groups, heads, size, values // heads, taps), tuple(each == RECURRENT for each in kinds)
    return Recurrent(kind, layers, False, *biases, step_limits(fields), **more)


def step_limits(fields: Fields) -> tuple[float, float]:
    """Read `Recurrent.steps` from the field `time_step_limit`."""
    steps = fields.config.get("time_step_limit", [0.0, math.inf])
    if type(steps) is list:  # transformers' form of values that JSON lacks
        steps = [math.inf if step == {"__float__": "Infinity"} else step for step in steps]
    numbers = type(steps) is list and [type(step) in (int, float) for step in steps] == [True, True]
    if not numbers or not 0 <= steps[0] <= steps[1]:
        raise fields.error("time_step_limit", "two numbers, the least step and the greatest")
    return float(steps[0]), float(steps[1])

"""Mamba (Gu and Dao 2023) and Falcon Mamba (TII 2024): every layer is a scan by channels alone."""

from typing import Any

from kernels.layout import ChannelKind
from models.checkpoint.fields import Fields
from models.config import Config, Recurrent
from models.decoder import Decoder
from models.families.mamba2 import CONTEXT
from models.names import Names
from models.reading import common


class MambaModel(Decoder):
    """Nothing is kept of a token but for the end of a text."""

    architectures = ("MambaForCausalLM",)
    default_eos_token_ids = frozenset([0])
    names = Names(
        embedding="model.embeddings",
        norm="model.norm_f",
        attention_norm="norm",
        recurrent_in=("mixer.in_proj",),
        recurrent_out="mixer.out_proj",
        delta_taps="mixer.conv1d.weight",
        delta_decay="mixer.A_log",
        scan_shift="mixer.conv1d.bias",
        scan_skip="mixer.D",
        scan_low="mixer.x_proj",
        scan_step="mixer.dt_proj",
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        return Config(**_options(fields))


class FalconMamba(Decoder):
    """The inputs of steps, B and C are normed, by norms without weights."""

    architectures = ("FalconMambaForCausalLM",)
    default_eos_token_ids = frozenset([0])
    names = MambaModel.names

    @staticmethod
    def read(fields: Fields) -> Config:
        eps = fields.float("mixer_rms_eps", default=1e-6, low=0.0)
        return Config(**_options(fields, part_norms="plain", eps=eps))


def rank_of(fields: Fields, name: str, width: int) -> int:
    """Read how many elements the inputs of steps are made from: a 16th of the width if the field is "auto"."""
    if fields.config.get(name, "auto") == "auto":
        return -(-width // 16)
    return fields.int(name, high=2**16)


def _options(fields: Fields, **more: Any) -> dict[str, Any]:
    """Read the arguments of a `Config`; `more`: of `Recurrent`."""
    fields.choice("hidden_act", ("silu", "swish"), default="silu")
    width, layers = fields.int("hidden_size", default=768), fields.int("num_hidden_layers", default=32, high=2**14)
    channels = fields.int("expand", default=2, high=2**8) * width
    state, taps = fields.int("state_size", default=16, high=2**16), fields.int("conv_kernel", default=4, high=64)
    biases = fields.bool("use_bias", default=False), fields.bool("use_conv_bias", default=True)
    kind, rank = ChannelKind(1, 1, state, channels, taps), rank_of(fields, "time_step_rank", width)
    return common(fields, activation="hidden_act", default="silu", tied=True) | {
        "width": width,
        "mlp_width": width,
        "layers": layers,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 2,
        "norm_eps": fields.float("layer_norm_epsilon", default=1e-5, low=0.0),
        "max_positions": CONTEXT,
        "alone": ("attention",) * layers,
        "recurrent": Recurrent(kind, (True,) * layers, False, *biases, rank=rank, **more),
    }

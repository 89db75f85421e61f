"""Mamba (Gu and Dao 2023) and Falcon Mamba (TII 2024): every layer is a scan by channels alone."""

from dataclasses import replace
from typing import Any

from kernels.layout import ChannelKind
from models.checkpoint.fields import Fields
from models.config import Config, Recurrent
from models.decoder import Decoder
from models.families.mamba2 import scans_alone
from models.families.nemotron_h import NemotronH


class MambaModel(Decoder):
    """Nothing is kept of a token but for the end of a text."""

    architectures = ("MambaForCausalLM",)
    default_eos_token_ids = frozenset([0])
    names = replace(NemotronH.names, scan_low="mixer.x_proj", scan_step="mixer.dt_proj")

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
    options = scans_alone(fields, width=768, layers=32, tied=True)
    width, layers = options["width"], options["layers"]
    channels = fields.int("expand", default=2, high=2**8) * width
    state, taps = fields.int("state_size", default=16, high=2**16), fields.int("conv_kernel", default=4, high=64)
    biases = fields.bool("use_bias", default=False), fields.bool("use_conv_bias", default=True)
    kind, rank = ChannelKind(1, 1, state, channels, taps), rank_of(fields, "time_step_rank", width)
    return options | {"recurrent": Recurrent(kind, (True,) * layers, False, *biases, rank=rank, **more)}

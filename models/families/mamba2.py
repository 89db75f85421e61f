"""Mamba-2 (Dao and Gu, 2024, "Transformers are SSMs"), as Mamba-Codestral: every layer is a selective scan alone."""

from typing import Any

from kernels.layout import ScanKind
from models.checkpoint.fields import Fields
from models.config import Config, Recurrent
from models.decoder import Decoder
from models.families.granite_hybrid import step_limits
from models.families.nemotron_h import NemotronH
from models.reading import common

CONTEXT = 2**20  # a text has no limit; llama.cpp's files have this


class Mamba2(Decoder):
    """Nothing is kept of a token but for the end of a text."""

    architectures = ("Mamba2ForCausalLM",)
    names = NemotronH.names

    @staticmethod
    def read(fields: Fields) -> Config:
        options = scans_alone(fields, width=4096, layers=64, tied=False)
        width, layers = options["width"], options["layers"]
        heads, size = fields.int("num_heads", default=128, high=2**16), fields.int("head_dim", default=64, high=2**16)
        groups, expand = fields.int("n_groups", default=8), fields.int("expand", default=2, high=2**8)
        if heads * size != expand * width:
            raise fields.error("num_heads", f"expand * hidden_size / head_dim, which is {expand * width / size:g}")
        if heads % groups:
            raise fields.error("n_groups", f"a divisor of num_heads {heads}")
        state, taps = fields.int("state_size", default=128, high=2**16), fields.int("conv_kernel", default=4, high=64)
        biases = fields.bool("use_bias", default=False), fields.bool("use_conv_bias", default=True)
        kind = ScanKind(groups, heads, state, size, taps)
        return Config(**options, recurrent=Recurrent(kind, (True,) * layers, False, *biases, step_limits(fields)))


def scans_alone(fields: Fields, *, width: int, layers: int, tied: bool) -> dict[str, Any]:
    """Read the arguments of a `Config` of which every layer is a scan alone; arguments are values of absent fields."""
    fields.choice("hidden_act", ("silu", "swish"), default="silu")
    options = common(fields, activation="hidden_act", default="silu", tied=tied)
    width, layers = fields.int("hidden_size", default=width), fields.int("num_hidden_layers", layers, high=2**14)
    return options | {
        "width": width,
        "mlp_width": width,
        "layers": layers,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 2,
        "norm_eps": fields.float("layer_norm_epsilon", default=1e-5, low=0.0),
        "max_positions": CONTEXT,
        "alone": ("attention",) * layers,
    }

"""Jamba (AI21 Labs 2024): scans by channels of Mamba in most layers, attention that rotates nothing in the others;
experts in some layers, in some models in none."""

from kernels.layout import ChannelKind
from models.checkpoint.fields import Fields
from models.config import Config, Recurrent
from models.decoder import Decoder
from models.families.granite_hybrid import SCANS
from models.families.mamba import rank_of
from models.names import Names
from models.reading import experts, rotary


class Jamba(Decoder):
    """The inputs of steps, B and C are normed; the weights of experts are parts of the softmax of all."""

    architectures = ("JambaForCausalLM", "JambaForSequenceClassification")
    default_pad_token_id = 0
    names = Names(
        **SCANS,
        scan_norms=("mamba.dt_layernorm", "mamba.b_layernorm", "mamba.c_layernorm"),
        norm="model.final_layernorm",
        mlp_norm="pre_ff_layernorm",
        up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        router="feed_forward.router",
        expert=tuple(f"feed_forward.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")),
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        mlp = fields.int("intermediate_size", default=14336)
        options = rotary(fields, positions=262144, kv_heads=8, mlp_width=mlp, one_rope=False, eps=1e-6)
        fields.choice("hidden_act", ("silu", "swish"), default="silu")  # of the convolutions too
        layers, width = options["layers"], options["width"]
        attends, mixed = _every(fields, "attn_layer", layers, 8, 4), _every(fields, "expert_layer", layers, 2, 1)
        if not any(attends):
            raise fields.error("attn_layer_offset", f"below num_hidden_layers {layers}: a layer of attention")
        if fields.int("num_experts", default=fields.int("num_local_experts", default=16), high=2**12) == 1:
            mixed = [False] * layers
        channels = fields.int("mamba_expand", default=2, high=2**8) * width
        state, taps = fields.int("mamba_d_state", default=16, high=2**16), fields.int("mamba_d_conv", 4, high=64)
        biases = fields.bool("mamba_proj_bias", default=False), fields.bool("mamba_conv_bias", default=True)
        kind, rank = ChannelKind(1, 1, state, channels, taps), rank_of(fields, "mamba_dt_rank", width)
        recurs = tuple(not each for each in attends)
        scans = Recurrent(kind, recurs, False, *biases, rank=rank, part_norms="own")
        return Config(
            **options,
            experts=experts(fields, count=16, chosen=2, width=mlp, layers=mixed),
            recurrent=scans if any(recurs) else None,
        )


def _every(fields: Fields, name: str, layers: int, period: int, offset: int) -> list[bool]:
    """Read which layers are of a kind: one in each period, the one at the offset."""
    period = fields.int(f"{name}_period", default=period)
    offset = fields.int(f"{name}_offset", default=offset, low=0)
    if offset >= period:
        raise fields.error(f"{name}_offset", f"below {name}_period {period}")
    return [i % period == offset for i in range(layers)]

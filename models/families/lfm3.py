"""LFM3 (Liquid AI, 2026): an LFM2 with windows in some layers, gates of heads, and norms of outputs as well."""

from dataclasses import replace

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING, Config
from models.decoder import Decoder
from models.families.lfm2 import CONV, LFM2, convs
from models.names import Names
from models.reading import completed, layer_types, rotary, window_of, windows
from models.rope import RopeConfig

ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}


class LFM3(Decoder):
    """Short convolutions, and attention of all tokens or of a window, each with its rotary table."""

    architectures = ("Lfm3ForCausalLM",)
    names = replace(
        LFM2.names,
        q_norm=Names.q_norm,
        k_norm=Names.k_norm,
        out=Names.out,
        attention_out_norm="post_operator_norm",
        mlp_out_norm="post_ffn_norm",
    )
    default_eos_token_ids = frozenset([124900])

    @staticmethod
    def read(fields: Fields) -> Config:
        config = {name: value for name, value in fields.config.items() if name != "hidden_act"}  # fixed
        fields = Fields(config, fields.file, fields.prefix)
        options = rotary(fields, positions=128_000, kv_heads=4, head_dim=128, tied=True, one_rope=False, bias=False)
        default = [FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else CONV for i in range(options["layers"])]
        kinds = layer_types(fields, default, (CONV, FULL, SLIDING))
        tables = {kind: rope(fields, kind, options) for kind in dict.fromkeys(kinds) if kind != CONV}
        eps = "norm_eps" if config.get("rms_norm_eps") is None else "rms_norm_eps"
        return Config(
            norm_eps=fields.float(eps, default=1e-5, low=0.0),
            norms=("input", "output") if fields.bool("use_sandwich_norm", default=True) else ("input",),
            head_norms="each",
            head_gates=fields.bool("use_attention_gate", default=True),
            windows=windows(fields, kinds, window_of(fields, 256)),
            ropes=tuple(map(tables.get, kinds)),
            convs=convs(fields, kinds, options["width"], 7),
            **options,
        )


def rope(fields: Fields, kind: str, options: dict[str, int]) -> RopeConfig:
    """The rotary table of layers of a kind."""
    nested = fields.sub("rope_scaling") or fields.sub("rope_parameters") or Fields(ROPES, fields.file)
    if (given := nested.sub(kind)) is None:
        raise nested.error(kind, "an object, as layer_types has layers of this kind")
    base = fields.float("rope_theta", default=1e6, low=1.0, high=1e15)
    part = Fields({"rope_parameters": completed(given.config, fields, ["partial_rotary_factor"])}, fields.file)
    return RopeConfig.from_hf(part, options["head_dim"], options["max_positions"], theta=base)

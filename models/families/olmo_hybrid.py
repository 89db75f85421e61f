"""OLMo Hybrid (Team OLMo, 2026): gated delta nets in most layers, the attention of OLMo 3 in the others."""

from dataclasses import replace

from models.checkpoint.fields import REQUIRED, Fields
from models.config import FULL, RECURRENT, Config, Recurrent
from models.decoder import Decoder
from models.families.qwen3_next import delta_kind
from models.reading import layer_types, rotary


class OlmoHybrid(Decoder):
    """Norms of inputs in layers with a gated delta net, norms of outputs in those with attention."""

    architectures = ("OlmoHybridForCausalLM",)
    names = replace(
        Decoder.names,
        recurrent_in=tuple(f"linear_attn.{name}_proj" for name in "qkvgba"),
        delta_norm="linear_attn.o_norm.weight",
        recurrent_out="linear_attn.o_proj",
    )
    default_eos_token_ids = frozenset([100257])

    @staticmethod
    def read(fields: Fields) -> Config:
        rope = fields.sub("rope_scaling") or fields.within("rope_parameters")
        base = rope.config if "rope_theta" in rope.config else fields.config
        unrotated = "rope_theta" in base and base["rope_theta"] is None
        options = rotary(fields, positions=65536, one_rope=not unrotated, eps=1e-6, bias=False)
        layers, heads = options["layers"], options["heads"]
        default = [RECURRENT if (i + 1) % 4 else FULL for i in range(layers)]
        kinds = layer_types(fields, default if FULL in default else [*default[:-1], FULL], (FULL, RECURRENT))
        if {*kinds} != {FULL, RECURRENT}:
            raise fields.error("layer_types", f"at least one layer of {FULL} and one of {RECURRENT}")
        keys = fields.int("linear_num_key_heads", heads, high=2**16)
        size = fields.int("linear_key_head_dim", int(0.75 * options["width"] / keys) or REQUIRED, high=2**16)
        kind = delta_kind(fields, keys, heads, size, 2 * size, 4)
        most = 2.0 if fields.bool("linear_allow_neg_eigval", default=True) else 1.0
        recurring = tuple(each == RECURRENT for each in kinds)
        return Config(
            recurrent=Recurrent(kind, recurring, most=most, eps=1e-5, norms=("input",)),
            norms=("output",),
            head_norms="all",
            **options,
        )

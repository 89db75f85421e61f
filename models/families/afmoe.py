"""AFMoE, Trinity (Arcee AI 2025): windows in the layers with rotary embeddings, gated attention, experts."""

from models.checkpoint.fields import Fields
from models.config import SLIDING, Config
from models.decoder import Decoder
from models.families.deepseek_v2 import NAMES
from models.names import Names
from models.reading import experts, kinds_by_period, rotary, window_of, windows


class Afmoe(Decoder):
    """Norms of inputs, of outputs and of heads; experts that sigmoids choose, after the first layers."""

    architectures = ("AfmoeForCausalLM",)
    names = Names(
        qkv=("self_attn.gate_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        mlp_norm="pre_mlp_layernorm",
        mlp_out_norm="post_mlp_layernorm",
        shared=NAMES.shared,
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        if fields.bool("attention_bias", default=False):
            raise fields.error("attention_bias", "false: biases beside gates without them are not supported")
        options = rotary(fields, positions=16384, head_dim=128, inner=6144, eps=1e-5)
        every = fields.int("global_attn_every_n_layers", default=4)
        kinds = kinds_by_period(fields, options["layers"], every)
        dense = fields.int("num_dense_layers", default=1, low=0)
        sparse = [i >= dense for i in range(options["layers"])]
        width = fields.int("moe_intermediate_size", default=1408)
        rules = {
            "scores": "sigmoid",
            "normalized": True,
            "epsilon": 1e-20,
            "scale": fields.float("route_scale", default=1.0),
            "choice_bias": True,
            "shared_width": width * fields.int("num_shared_experts", default=2, high=2**8),
        }
        return Config(
            norms=("input", "output"),
            head_norms="each",
            query_gate="apart",
            windows=windows(fields, kinds, window_of(fields, 1024)),
            ropes=tuple(options["rope"] if kind == SLIDING else None for kind in kinds),
            experts=experts(fields, count=64, chosen=6, width=width, layers=sparse, **rules),
            embedding_scale=options["width"] ** 0.5 if fields.bool("mup_enabled", default=False) else 1.0,
            **options,
        )

"""OLMoE (Muennighoff et al. 2024): experts in all layers, norms over all heads as one row."""

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.reading import experts, rotary


class Olmoe(Decoder):
    """A Llama with experts and norms of queries and keys."""

    architectures = ("OlmoeForCausalLM",)
    default_eos_token_ids = frozenset([50279])

    @staticmethod
    def read(fields: Fields) -> Config:
        if fields.float("clip_qkv", default=None) is not None:
            raise fields.error("clip_qkv", "null: clipped queries, keys and values are not supported")
        width = fields.int("intermediate_size", default=2048)
        options = rotary(fields, positions=4096, mlp_width=width)
        if options["head_dim"] * options["heads"] != options["width"]:
            raise fields.error("head_dim", "hidden_size / num_attention_heads, or nothing")
        layers = [True] * options["layers"]
        normalized = fields.bool("norm_topk_prob", default=False)
        return Config(
            norm_eps=fields.float("rms_norm_eps", default=1e-5, low=0.0),
            attention_bias=fields.bool("attention_bias", default=False),
            head_norms="all",
            experts=experts(fields, count=64, chosen=8, width=width, layers=layers, normalized=normalized),
            **options,
        )

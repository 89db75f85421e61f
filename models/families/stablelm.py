"""StableLM and StableLM 2 (Bellagente et al. 2024): a Llama with LayerNorms and partially rotated heads."""

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.names import Names
from models.reading import rotary


class StableLM(Decoder):
    """A gated MLP parallel to attention or after it; biases of queries, keys, values; in some models norms of heads."""

    architectures = ("StableLmForCausalLM", "StableLmForSequenceClassification")
    names = Names(q_norm="self_attn.q_layernorm.norms.{}", k_norm="self_attn.k_layernorm.norms.{}")
    default_eos_token_ids = frozenset([0])

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=4096, kv_heads=32, partial=0.25, even=True)
        if options["head_dim"] * options["heads"] != options["width"]:
            raise fields.error("head_dim", "hidden_size / num_attention_heads")
        return Config(
            norm_eps=fields.float("layer_norm_eps", default=1e-5, low=0.0),
            rms=False,
            head_norms="own" if fields.bool("qk_layernorm", default=False) else "",
            parallel="shared" if fields.bool("use_parallel_residual", default=False) else "",
            attention_bias=fields.bool("use_qkv_bias", default=False),
            out_bias=False,
            **options,
        )

"""StableLM and StableLM 2 (Bellagente et al. 2024): a Llama with LayerNorms and heads that are rotated in part."""

from models.checkpoint.fields import Fields
from models.config import Config, rotary
from models.decoder import Decoder


class StableLM(Decoder):
    """A gated MLP beside attention or after it; biases of queries, keys and values."""

    architectures = ("StableLmForCausalLM", "StableLmForSequenceClassification")
    default_eos_token_ids = frozenset([0])
    base = "model."

    @staticmethod
    def read(fields: Fields) -> Config:
        kv_heads = None if "num_key_value_heads" in fields.config else 32
        options = rotary(fields, positions=4096, kv_heads=kv_heads, partial=0.25)
        if options["head_dim"] * options["heads"] != options["width"]:
            raise fields.error("head_dim", "hidden_size / num_attention_heads")
        if fields.bool("qk_layernorm", default=False):
            raise fields.error("qk_layernorm", "false: a LayerNorm for each head is not supported")
        return Config(
            norm_eps=fields.float("layer_norm_eps", default=1e-5, low=0.0),
            rms=False,
            parallel=fields.bool("use_parallel_residual", default=False),
            attention_bias=fields.bool("use_qkv_bias", default=False),
            out_bias=False,
            **options,
        )

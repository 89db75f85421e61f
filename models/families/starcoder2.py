"""StarCoder 2 (Lozhkov et al. 2024): LayerNorms, biases everywhere, a plain MLP, grouped-query attention."""

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.names import Names
from models.reading import rotary


class Starcoder2(Decoder):
    """A GPT-2 with rotary embeddings and a window."""

    architectures = ("Starcoder2ForCausalLM", "Starcoder2ForSequenceClassification")
    names = Names(up=("mlp.c_fc",), down="mlp.c_proj")
    default_eos_token_ids = frozenset([50256])

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=4096, activation="gelu_pytorch_tanh", kv_heads=2, tied=True)
        bias = fields.bool("use_bias", default=True)
        return Config(
            norm_eps=fields.float("norm_epsilon", default=1e-5, low=0.0),
            rms=False,
            gated=False,
            attention_bias=bias,
            mlp_bias=bias,
            windows=(fields.int("sliding_window", None, high=2**31),) * options["layers"],
            **options,
        )

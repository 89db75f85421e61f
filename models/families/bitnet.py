"""BitNet b1.58 (Ma et al., 2025, "BitNet b1.58 2B4T Technical Report"): a Llama with squared ReLU, and norms before the
last matrices of attention and MLP. `models.quantized.bitnet` reads matrices of -1, 0 and 1."""

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.reading import rotary


class BitNet(Decoder):
    """A Llama with such norms."""

    architectures = ("BitNetForCausalLM",)
    default_eos_token_ids = frozenset([128001])

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=2048, activation="relu2", kv_heads=5, theta=5e5, eps=1e-5, bias=False)
        if options["head_dim"] * options["heads"] != options["width"]:
            raise fields.error("head_dim", "hidden_size / num_attention_heads, or nothing")
        return Config(
            sub_norms=True,
            **options,
        )

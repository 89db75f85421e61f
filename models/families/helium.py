"""Helium (Kyutai 2025): a Llama with interleaved rotation."""

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.reading import rotary


class Helium(Decoder):
    """No bias after attention."""

    architectures = ("HeliumForCausalLM", "HeliumForSequenceClassification")
    default_pad_token_id = 3

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=4096, kv_heads=20, head_dim=128, theta=1e5, eps=1e-8, bias=False)
        if options["head_dim"] * options["heads"] != options["width"]:
            raise fields.error("head_dim", "hidden_size / num_attention_heads")
        return Config(
            interleaved=True,
            out_bias=False,
            mlp_bias=fields.bool("mlp_bias", default=False),
            **options,
        )

"""MiniCPM3 (OpenBMB 2024): latent attention rotated by halves, and scaled embedding, stream and logits."""

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.families.deepseek_v2 import latent_attention


class MiniCPM3(Decoder):
    """Latent attention and an MLP in all layers, with three multipliers."""

    architectures = ("MiniCPM3ForCausalLM", "MiniCPM3ForSequenceClassification")

    @staticmethod
    def read(fields: Fields) -> Config:
        width, layers = fields.int("hidden_size"), fields.int("num_hidden_layers", high=2**14)
        value = width // fields.int("num_attention_heads", high=2**14)
        sizes = {"rank": 256, "query_rank": 768, "plain": 64, "rotated": 32, "value": value, "mlp_width": 6400}
        options = latent_attention(fields, positions=32768, eps=1e-5, tied=True, interleaved=False, **sizes)
        depth = fields.float("scale_depth", None if "scale_depth" in fields.config else 1.4)  # null: no factor
        base = fields.int("dim_model_base", width if "dim_model_base" in fields.config else 256)
        return Config(
            mlp_bias=fields.bool("mlp_bias", default=False),
            embedding_scale=fields.float("scale_emb", 12.0),
            rounded_scale=True,
            residual_scale=1.0 if depth is None else depth * layers**-0.5,
            logit_divisor=width / base,
            **options,
        )

"""Nemotron 3 and 4, Minitron (Parmar et al. 2024), AFM-4.5B (Arcee AI 2025), Jais 2: MLPs with squared ReLU."""

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.names import Names
from models.reading import rotary


class Nemotron(Decoder):
    """LayerNorms that multiply by 1 + weight, partially rotated heads."""

    architectures = ("NemotronForCausalLM", "NemotronForSequenceClassification")
    names = Names(up=("mlp.up_proj",))
    default_eos_token_ids = frozenset([3])

    @staticmethod
    def read(fields: Fields) -> Config:
        return Config(
            **rotary(fields, positions=4096, activation="relu2", partial=0.5, bias=False),
            norm_eps=fields.float("norm_eps", default=1e-5, low=0.0),
            rms=False,
            plus_one=True,
            gated=False,
            mlp_bias=fields.bool("mlp_bias", default=False),
        )


class Arcee(Decoder):
    """A Llama with such an MLP."""

    architectures = ("ArceeForCausalLM", "ArceeForSequenceClassification")
    names = Names(up=("mlp.up_proj",))
    default_eos_token_ids = frozenset([128001])

    @staticmethod
    def read(fields: Fields) -> Config:
        return Config(
            **rotary(fields, positions=4096, activation="relu2", eps=1e-5, bias=False),
            gated=False,
            mlp_bias=fields.bool("mlp_bias", default=False),
        )


class Jais2(Decoder):
    """Jais 2 (Inception 2025): LayerNorms, and biases everywhere."""

    architectures = ("Jais2ForCausalLM",)
    names = Names(up=("mlp.up_proj",))
    default_eos_token_ids = frozenset([150024])

    @staticmethod
    def read(fields: Fields) -> Config:
        return Config(
            **rotary(fields, positions=8192, activation="relu2", bias=True),
            norm_eps=fields.float("layer_norm_eps", default=1e-5, low=0.0),
            rms=False,
            gated=False,
            mlp_bias=fields.bool("mlp_bias", default=True),
        )

"""OLMo 1 (Groeneveld et al. 2024): LayerNorms without weights. OLMo 2 and 3 (Team OLMo 2025): norms on the outputs of
attention and MLP, and over all heads as one row."""

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING, Config
from models.decoder import Decoder
from models.reading import architecture, kinds_by_period, ropes, rotary, window_of, windows

BASE = 500000.0  # base of OLMo 3's rotary embedding


class Olmo1(Decoder):
    """A Llama whose norms have neither weights nor biases."""

    architectures = ("OlmoForCausalLM", "OlmoForSequenceClassification")
    default_eos_token_ids = frozenset([50279])
    default_pad_token_id = 1

    @staticmethod
    def read(fields: Fields) -> Config:
        return Config(
            norm_eps=1e-5,  # no field of the config
            rms=False,
            affine=False,
            clip=fields.float("clip_qkv", None, low=0.0),
            **rotary(fields, positions=2048, bias=False),
        )


class Olmo(Decoder):
    """A Llama with norms on outputs; OLMo 3 has windows in three of four layers, which have a separate rotary table."""

    architectures = (
        "Olmo2ForCausalLM",
        "Olmo2ForSequenceClassification",
        "Olmo3ForCausalLM",
        "Olmo3ForSequenceClassification",
    )
    default_eos_token_ids = frozenset([50279])
    default_pad_token_id = 1

    @staticmethod
    def read(fields: Fields) -> Config:
        third = architecture(fields).startswith("Olmo3")
        # `rope_parameters` of OLMo 3 have an object for each kind of layer.
        plain = fields.changed({"rope_parameters": None, "rope_scaling": None}) if third else fields
        options = rotary(plain, positions=2048, eps=1e-5, bias=False)
        if third:
            kinds = kinds_by_period(fields, options["layers"], 4)
            bases = {FULL: ("rope_theta", BASE), SLIDING: ("", BASE)}  # as transformers reads older files
            options["windows"] = windows(fields, kinds, window_of(fields, 4096))
            options["ropes"] = ropes(fields, kinds, options["head_dim"], options["max_positions"], bases)
        return Config(
            norms=("output",),
            head_norms="all",
            **options,
        )

"""gpt-oss (OpenAI 2025): experts with clamped gates and biases in all layers, attention sinks, windows in every other
layer."""

from typing import Any

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING, Config
from models.decoder import Decoder
from models.reading import experts, layer_types, rotary, window_of, windows

CLAMPED, ALPHA, LIMIT = "clamped_swiglu", 1.702, 7.0  # the gates, and their constants, which the kernels require
YARN = {  # the default if the config has no rotary fields
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOss(Decoder):
    """A mixture of experts whose matrices all have biases."""

    architectures = ("GptOssForCausalLM", "GptOssForSequenceClassification")
    default_eos_token_ids = frozenset([200002, 200012])

    @staticmethod
    def read(fields: Fields) -> Config:
        if not fields.sub("rope_scaling") and not fields.sub("rope_parameters"):
            fields = fields.changed({"rope_parameters": YARN})
        clamped_gates(fields)
        fields = fields.changed({"hidden_act": None})  # which the gates do not depend on
        width = fields.int("intermediate_size", default=2880)
        sizes = {"kv_heads": 8, "head_dim": 64, "mlp_width": width, "theta": 150000.0, "eps": 1e-5, "bias": True}
        options: dict[str, Any] = rotary(fields, positions=131072, **sizes) | {"activation": CLAMPED}
        layers = options["layers"]
        kinds = layer_types(fields, [FULL if i % 2 else SLIDING for i in range(layers)])
        return Config(
            sinks=True,
            windows=windows(fields, kinds, window_of(fields, 128)),
            experts=experts(
                fields,
                count=128,
                chosen=4,
                width=width,
                layers=[True] * layers,
                scores="softmax_of_chosen",
                bias=True,
            ),
            **options,
        )


def clamped_gates(fields: Fields) -> None:
    """Check the constants of clamped gates. Raises CheckpointError, which names the field, if they are others."""
    for name, only in (("swiglu_alpha", ALPHA), ("swiglu_limit", LIMIT)):
        if fields.float(name, only) != only:
            raise fields.error(name, f"{only:g}: other gates are not supported")

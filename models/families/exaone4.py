"""EXAONE 4 (LG AI Research 2025): output and head norms; in some models, windows in three of four layers."""

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING, Config
from models.decoder import Decoder
from models.reading import layer_types, rotary, windows


class Exaone4(Decoder):
    """A Llama normed after its parts. Where the config has a window, layers without it rotate nothing."""

    architectures = ("Exaone4ForCausalLM", "Exaone4ForSequenceClassification")

    @staticmethod
    def read(fields: Fields) -> Config:
        kv_heads = None if "num_key_value_heads" in fields.config else 32
        options = rotary(fields, positions=2048, kv_heads=kv_heads)
        window = fields.int("sliding_window", None, high=2**31) if "sliding_window" in fields.config else 4096
        every = 1
        if window and fields.config.get("layer_types") is None:
            every = fields.int("sliding_window_pattern", default=4)
        kinds = layer_types(fields, [SLIDING if (i + 1) % every else FULL for i in range(options["layers"])])
        return Config(
            norm_eps=fields.float("rms_norm_eps", default=1e-5, low=0.0),
            norms=("output",),
            head_norms="each",
            windows=windows(fields, kinds, window),
            ropes=tuple(options["rope"] if kind == SLIDING or window is None else None for kind in kinds),
            **options,
        )

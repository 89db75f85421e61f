"""SmolLM3 (Bakouch et al. 2025): a Llama in which some layers have no rotary embeddings, and may have windows."""

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING, Config
from models.decoder import Decoder
from models.reading import layer_types, rotary, windows


class SmolLM3(Decoder):
    """A Llama in which some layers have no rotary embeddings."""

    architectures = ("SmolLM3ForCausalLM", "SmolLM3ForSequenceClassification")
    default_eos_token_ids = frozenset([128001])
    default_pad_token_id = 128004

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=32768, kv_heads=4, tied=True, theta=2e6, eps=1e-6, bias=False)
        rotated = rotated_layers(fields, options["layers"])
        window = fields.int("sliding_window", None, high=2**31)
        sliding = fields.bool("use_sliding_window", default=False) and window is not None
        kinds = layer_types(fields, [SLIDING if sliding and not turned else FULL for turned in rotated])
        return Config(
            mlp_bias=fields.bool("mlp_bias", default=False),
            windows=windows(fields, kinds, window),
            ropes=tuple(options["rope"] if turned else None for turned in rotated),
            **options,
        )


def rotated_layers(fields: Fields, layers: int) -> list[bool]:
    """Return which layers rotate queries and keys: those with a 1 in `no_rope_layers`. An empty list counts as
    absent."""
    found = fields.config.get("no_rope_layers")
    if found is None or found == []:
        interval = fields.int("no_rope_layer_interval", default=4)
        return [(i + 1) % interval != 0 for i in range(layers)]
    if type(found) is not list or len(found) < layers or any(turned not in (0, 1) for turned in found):
        raise fields.error("no_rope_layers", f"{layers} numbers, 1 for each layer that rotates, 0 for others")
    return [bool(turned) for turned in found[:layers]]

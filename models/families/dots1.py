"""dots.llm1 (rednote-hilab 2025): a Qwen3 with DeepSeek-V3's experts."""

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING, Config
from models.decoder import Decoder
from models.families.deepseek_v2 import NAMES, mixture
from models.families.deepseek_v3 import sigmoids
from models.reading import after_dense, layer_types, rotary, window_of, windows


class Dots1(Decoder):
    """Experts after the first layers, norms of heads, windows in the last layers."""

    architectures = ("Dots1ForCausalLM",)
    names = NAMES

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=2048, kv_heads=32, inner=10944, eps=1e-6, bias=False)
        window = window_of(fields, 4096)
        first = fields.int("max_window_layers", default=62, low=0) if window else options["layers"]
        kinds = layer_types(fields, [SLIDING if i >= first else FULL for i in range(options["layers"])])
        sparse = after_dense(fields, options["layers"], 0)
        rules = sigmoids(fields, groups=1, kept=1, normalized=False)
        if any(sparse):
            rules |= {"count": fields.int("n_routed_experts"), "shared": fields.int("n_shared_experts")}
        return Config(
            head_norms="each",
            windows=windows(fields, kinds, window),
            experts=mixture(fields, sparse, width=1408, scale=1.0, **rules) if any(sparse) else None,
            **options,
        )

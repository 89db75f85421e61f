"""GPT-2 (Radford et al. 2019): learned positions, matrices stored [in, out]."""

import re
from typing import Any

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.names import Names
from models.reading import common


class GPT2(Decoder):
    """LayerNorms before each block, biases in all layers, attention scaled by layer if the config has it so."""

    architectures = ("GPT2LMHeadModel", "GPT2ForSequenceClassification")
    base = "transformer."  # OpenAI's own checkpoints lack it
    ignored = (re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"),)  # the causal mask and what it masks with
    default_eos_token_ids = frozenset([50256])
    names = Names(
        embedding="transformer.wte",
        positions="transformer.wpe",
        layer="transformer.h.{}.",
        attention_norm="ln_1",
        qkv=("attn.c_attn",),
        out="attn.c_proj",
        mlp_norm="ln_2",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        norm="transformer.ln_f",
        transposed=True,
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        options = sizes(fields, tied=True, positions=1024)
        if fields.bool("add_cross_attention", default=False):
            raise fields.error("add_cross_attention", "false: decoders of an encoder's output are not supported")
        fields.bool("reorder_and_upcast_attn", default=False)  # how half precision rounds: the kernels have their way
        scale = options["head_dim"] ** -0.5 if fields.bool("scale_attn_weights", default=True) else 1.0
        by_layer = fields.bool("scale_attn_by_inverse_layer_idx", default=False)
        return Config(
            **options,
            attention_bias=True,
            mlp_bias=True,
            scales=tuple(scale / (i + 1 if by_layer else 1) for i in range(options["layers"])),
        )


def sizes(fields: Fields, *, tied: bool, positions: int) -> dict[str, Any]:
    """Arguments of a `Config` by GPT-2's names of fields.

    Args:
        tied, positions: the values of `tie_word_embeddings` and `n_positions` where they are absent.

    Raises:
        CheckpointError: naming the field.
    """
    width, heads = fields.int("n_embd"), fields.int("n_head", high=2**14)
    if width % heads:
        raise fields.error("n_embd", f"a multiple of n_head {heads}")
    return common(fields, activation="activation_function", default="gelu_new", tied=tied) | {
        "width": width,
        "mlp_width": fields.int("n_inner", default=4 * width),
        "layers": fields.int("n_layer", high=2**14),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": width // heads,
        "norm_eps": fields.float("layer_norm_epsilon", default=1e-5, low=0.0),
        "rms": False,
        "gated": False,
        "max_positions": fields.int("n_positions", default=positions),
    }

"""GPT-2 (Radford et al. 2019): learned positions, matrices stored [in, out]."""

import re

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
        width = fields.int("n_embd")
        heads = fields.int("n_head", high=2**14)
        if width % heads:
            raise fields.error("n_embd", f"a multiple of n_head {heads}")
        if fields.bool("add_cross_attention", default=False):
            raise fields.error("add_cross_attention", "false: decoders of an encoder's output are not supported")
        fields.bool("reorder_and_upcast_attn", default=False)  # how half precision rounds: the kernels have their way
        layers = fields.int("n_layer", high=2**14)
        scale = (width // heads) ** -0.5 if fields.bool("scale_attn_weights", default=True) else 1.0
        by_layer = fields.bool("scale_attn_by_inverse_layer_idx", default=False)
        return Config(
            **common(fields, activation="activation_function", default="gelu_new", tied=True),
            width=width,
            mlp_width=fields.int("n_inner", default=4 * width),
            layers=layers,
            heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            norm_eps=fields.float("layer_norm_epsilon", default=1e-5, low=0.0),
            rms=False,
            gated=False,
            attention_bias=True,
            mlp_bias=True,
            scales=tuple(scale / (i + 1 if by_layer else 1) for i in range(layers)),
            max_positions=fields.int("n_positions", default=1024),
        )

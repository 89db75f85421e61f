"""GPT-J (Wang and Komatsuzaki 2021): attention and MLP side by side, heads of which neighbours are rotated, in part."""

import re

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.names import Names
from models.reading import common
from models.rope import RopeConfig


class GPTJ(Decoder):
    """LayerNorms, biases of MLP and head, one norm for attention and MLP."""

    architectures = ("GPTJForCausalLM", "GPTJForSequenceClassification")
    base = "transformer."
    ignored = (re.compile(r"(transformer\.)?h\.\d+\.attn\.((masked_)?bias|embed_positions)"),)
    default_eos_token_ids = frozenset([50256])
    names = Names(
        embedding="transformer.wte",
        layer="transformer.h.{}.",
        attention_norm="ln_1",
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        out="attn.out_proj",
        up=("mlp.fc_in",),
        down="mlp.fc_out",
        norm="transformer.ln_f",
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        width, heads = fields.int("n_embd"), fields.int("n_head", high=2**14)
        if width % heads:
            raise fields.error("n_embd", f"a multiple of n_head {heads}")
        rotated = fields.int("rotary_dim", *([] if "rotary_dim" in fields.config else [64]), high=width // heads)
        if rotated % 2:
            raise fields.error("rotary_dim", "an even number")
        return Config(
            **common(fields, activation="activation_function", default="gelu_new", tied=False),
            width=width,
            mlp_width=fields.int("n_inner", default=4 * width),
            layers=fields.int("n_layer", high=2**14),
            heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            norm_eps=fields.float("layer_norm_epsilon", default=1e-5, low=0.0),
            rms=False,
            gated=False,
            parallel=True,
            interleaved=True,
            mlp_bias=True,
            head_bias=True,
            rope=RopeConfig(rotated),
            max_positions=fields.int("n_positions", default=2048),
        )

"""GPT-J (Wang and Komatsuzaki 2021), CodeGen (Nijkamp et al. 2022): parallel attention and MLP, interleaved partial
rotation."""

import re
from dataclasses import replace

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.families.gpt2 import sizes
from models.names import Names
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
        options = sizes(fields, tied=False, positions=2048)
        given = "rotary_dim" in fields.config  # null is refused
        rotated = fields.int("rotary_dim", *([] if given else [64]), high=options["head_dim"])
        if rotated > options["head_dim"]:
            raise fields.error("rotary_dim", f"at most {options['head_dim']}, the size of a head (64 if absent)")
        if rotated % 2:
            raise fields.error("rotary_dim", "an even number")
        return Config(
            **options,
            parallel="shared",
            interleaved=True,
            mlp_bias=True,
            head_bias=True,
            rope=RopeConfig(rotated),
        )


class CodeGen(GPTJ):
    """One matrix computes queries, values and keys, for each quarter of the heads."""

    architectures = ("CodeGenForCausalLM",)
    ignored = (*GPTJ.ignored, re.compile(r"(transformer\.)?h\.\d+\.attn\.causal_mask"))
    names = replace(GPTJ.names, qkv=("attn.qkv_proj",))

    @staticmethod
    def read(fields: Fields) -> Config:
        c = GPTJ.read(fields)
        if c.heads % 4:
            raise fields.error("n_head", "a multiple of 4")
        return replace(c, grouped_qkv="quarters")

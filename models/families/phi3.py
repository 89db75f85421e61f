"""Phi-3, 3.5, 4-mini (Abdin et al. 2024): a Llama with fused projections and LongRoPE (Ding et al. 2024)."""

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.names import Names
from models.reading import rotary

# The first Phi-3 configs call longrope `su`, or `yarn`, which it is not.
ROPE_KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}


class Phi3(Decoder):
    """A Llama with windows; matrices that share an input are stored as one."""

    architectures = ("Phi3ForCausalLM", "Phi3ForSequenceClassification")
    names = Names(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))
    default_eos_token_ids = frozenset([32000])

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=4096, partial=1.0, kinds=ROPE_KINDS, original=4096)
        window = fields.int("sliding_window", default=None, high=2**31)
        eps = fields.float("rms_norm_eps", default=1e-5, low=0.0)
        return Config(norm_eps=eps, windows=(window,) * options["layers"], **options)

"""Apertus (Swiss AI Initiative, 2025): a Llama with norms of heads and a learned activation, xIELU, in an MLP without
gates; 1.5 (2026): its head may have the text tokens only."""

from models.checkpoint.fields import Fields
from models.config import XIELU, Config
from models.decoder import Decoder
from models.names import Names
from models.reading import ACTIVATIONS, rotary, with_rope

ROPE = {  # the default of a config without one
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


class Apertus(Decoder):
    """Norms of heads, other names of norms, and an activation with four learned parameters in each layer."""

    architectures = ("ApertusForCausalLM", "Apertus1p5TextForCausalLM")
    names = Names(attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm", up=("mlp.up_proj",))

    @staticmethod
    def read(fields: Fields) -> Config:
        fields = with_rope(fields, ROPE)
        learned = fields.choice("hidden_act", {XIELU, *ACTIVATIONS}, default=XIELU) == XIELU
        plain = fields.changed({"hidden_act": None}) if learned else fields
        options = rotary(plain, positions=65536, theta=12e6, eps=1e-5, bias=False)
        rows = options["vocab_size"]
        options["vocab_size"] = kept = fields.int("output_vocab_size", default=rows)
        if kept > rows:
            raise fields.error("output_vocab_size", f"at most vocab_size, which is {rows}")
        return Config(
            head_norms="each",
            gated=False,
            embedding_rows=rows if kept < rows else None,
            **{**options, "activation": XIELU} if learned else options,
        )

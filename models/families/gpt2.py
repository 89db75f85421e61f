"""GPT-2 (Radford et al. 2019): learned positions, matrices stored [in, out]. GPT (Radford et al. 2018): the same with
norms after the sums. GPT-Neo (Black et al. 2021): windows in every other layer, matrices stored as usual."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
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
    ignored = (re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"),)  # the causal mask and its fill value
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
        fields.bool("reorder_and_upcast_attn", default=False)  # changes rounding in half precision only
        scale = options["head_dim"] ** -0.5 if fields.bool("scale_attn_weights", default=True) else 1.0
        by_layer = fields.bool("scale_attn_by_inverse_layer_idx", default=False)
        return Config(
            **options,
            attention_bias=True,
            mlp_bias=True,
            scales=tuple(scale / (i + 1 if by_layer else 1) for i in range(options["layers"])),
        )


class GPT(GPT2):
    """No final norm; the default of its activation's field is the approximation by tanh."""

    architectures = ("OpenAIGPTLMHeadModel", "OpenAIGPTForSequenceClassification")
    default_eos_token_ids = frozenset()
    names = replace(GPT2.names, embedding="transformer.tokens_embed", positions="transformer.positions_embed")

    @staticmethod
    def read(fields: Fields) -> Config:
        kinds = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}
        activation = kinds[fields.choice("afn", kinds, default="gelu")]
        options: dict[str, Any] = sizes(fields, tied=True, positions=512) | {"activation": activation}
        return Config(**options, norms=("sum",), final_norm=False, attention_bias=True, mlp_bias=True)


class GPTNeo(Decoder):
    """No biases of queries, keys and values, whose scores are not scaled."""

    architectures = ("GPTNeoForCausalLM", "GPTNeoForSequenceClassification")
    base = "transformer."
    ignored = (re.compile(r"(transformer\.)?h\.\d+\.attn\.attention\.(masked_)?bias"),)
    default_eos_token_ids = frozenset([50256])
    names = replace(
        GPT2.names,
        qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        out="attn.attention.out_proj",
        transposed=False,
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        names = "hidden_size", "num_heads", "num_layers", "intermediate_size", "max_position_embeddings"
        options = sizes(fields, tied=True, positions=2048, names=names)
        layers, window = options["layers"], fields.int("window_size", default=256, high=2**31)
        return Config(
            **options,
            out_bias=True,
            mlp_bias=True,
            scales=(1.0,) * layers,
            windows=tuple(window if kind == "local" else None for kind in _kinds(fields, layers)),
        )


def _kinds(fields: Fields, layers: int) -> list[str]:
    """Read the attention of each layer, "global" or "local": a list, or lists of kinds with repetition counts."""
    name = "attention_layers" if fields.config.get("attention_layers") is not None else "attention_types"
    found = fields.config.get(name)
    if name == "attention_types":
        found = [[["global", "local"], 12]] if found is None else found
        try:  # no further than needed: repetitions may exceed memory
            each = (kinds for kinds, times in found[:layers] if kinds for _ in range(times))
            found = list(islice(chain.from_iterable(each), layers + 1))
        except (TypeError, ValueError, KeyError):
            found = None
    if type(found) is not list or len(found) != layers or any(kind not in ("global", "local") for kind in found):
        raise fields.error(name, f"global or local for each of {layers} layers")
    return found


SIZES = "n_embd", "n_head", "n_layer", "n_inner", "n_positions"
USUAL = "hidden_size", "num_attention_heads", "num_hidden_layers", "", "max_position_embeddings"
ONE_NAME = "seq_length", "max_seq_len"  # lengths that transformers reads by this name only


def by_own_names(fields: Fields, names: Sequence[str] = SIZES) -> Fields:
    """Return the fields with those in `USUAL`, which take precedence as in transformers, by the family's `names`."""
    pairs = zip(names, USUAL, strict=True)
    given = {own: fields.config.get(usual) for own, usual in pairs if own not in ONE_NAME}
    return fields.changed({own: value for own, value in given.items() if value is not None})


def sizes(
    fields: Fields,
    *,
    tied: bool,
    positions: int,
    names: Sequence[str] = SIZES,
    inner_width: int | None = None,
    activation: tuple[str, str] = ("activation_function", "gelu_new"),
) -> dict[str, Any]:
    """Read the arguments of a `Config` from GPT-2's fields.

    Args:
        tied, positions: the values of `tie_word_embeddings` and `n_positions` if they are absent.
        names: the family's names of these fields; those in `USUAL` are read as well.
        inner_width: the MLP's width if it is absent; None: four times that of the stream.
        activation: the family's name of the activation's field, and its value if it is absent.

    Raises:
        CheckpointError: it names the field.
    """
    embd, head, layer, inner, length = names
    fields = by_own_names(fields, names)
    width, heads = fields.int(embd), fields.int(head, high=2**14)
    if width % heads:
        raise fields.error(embd, f"a multiple of {head} {heads}")
    return common(fields, activation=activation[0], default=activation[1], tied=tied) | {
        "width": width,
        "mlp_width": fields.int(inner, default=inner_width or 4 * width),
        "layers": fields.int(layer, high=2**14),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": width // heads,
        "norm_eps": fields.float("layer_norm_epsilon", default=1e-5, low=0.0),
        "rms": False,
        "gated": False,
        "max_positions": fields.int(length, default=positions),
    }

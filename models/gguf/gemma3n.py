"""Gemma 3n in GGUF files: streams, sparse gates by their quantiles, per-layer embeddings."""

import math
from typing import Any

from models.checkpoint.fields import Fields
from models.gguf.reader import GGUF
from models.gguf.rotary import decimal
from models.gguf.sizes import gated, named, windows

CAP, SWA = "final_logit_softcapping", "rope.freq_base_swa"  # keys that first converters left out


def gemma3n(file: GGUF, keys: Fields) -> dict[str, Any]:
    """Return the configuration. Raises CheckpointError naming the key or the tensor."""
    window = keys.int("attention.sliding_window", 0, low=0, high=2**31)
    config = gated(file, keys, rotated="all") | windows(keys, window, 5) | named("Gemma3nForCausalLM", "gemma3n_text")
    layers, table = range(config["num_hidden_layers"]), "per_layer_token_embd.weight"
    return config | {
        "intermediate_size": [file.entry(f"blk.{i}.ffn_up.weight").shape[0] for i in layers],
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "rope_local_base_freq": decimal(keys.float(SWA, 10000.0, low=1.0, high=1e15)),
        "num_kv_shared_layers": keys.int("attention.shared_kv_layers", low=0),
        "altup_num_inputs": keys.int("altup.num_inputs"),
        "altup_active_idx": keys.int("altup.active_idx", low=0),
        "laurel_rank": file.entry("blk.0.laurel_l.weight").shape[0],
        "hidden_size_per_layer_input": keys.int("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": file.entry(table).shape[0],
        "activation_sparsity_pattern": _shares(keys),
        CAP: decimal(keys.float(CAP, 30.0)),
    }


def _shares(keys: Fields) -> list[float] | None:
    """Return the shares of gates that are 0, from their quantiles; -inf, the quantile of no gates, is the only number
    that is not finite. None: the usual shares, as in llama.cpp."""
    name = "activation_sparsity_scale"
    if (quantiles := keys.config.get(name)) is None:
        return None
    if type(quantiles) is not list or any(type(x) is not float or not -math.inf <= x < math.inf for x in quantiles):
        raise keys.error(name, "quantiles of the normal distribution")
    return [round((1 + math.erf(x / math.sqrt(2))) / 2, 6) for x in quantiles]

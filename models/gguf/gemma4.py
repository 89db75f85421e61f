"""Gemma 4 in GGUF files: heads by layer, shared keys, per-layer embeddings, the rotated part of full-attention
heads."""

from typing import Any

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING
from models.gguf.experts import experts
from models.gguf.reader import FETCH_AGAIN, GGUF
from models.gguf.rotary import FACTORS, decimal, numbers

LEAST_STILL = 1e29  # the least factor of pairs that do not rotate


def layers(file: GGUF, keys: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that only Gemma 4 has.

    Args:
        config: a config with the sizes that all layers share, and `layer_types`.

    Raises:
        CheckpointError: it names the key or the tensor.
    """
    kinds, width = config["layer_types"], config["intermediate_size"]
    count = len(kinds)
    shared = keys.int("attention.shared_kv_layers", 0, low=0, high=count - 1)
    full = [i for i in range(count - shared) if kinds[i] == FULL]
    found: dict[str, Any] = {
        "per_layer_config": _heads(keys, config, kinds),
        "rope_parameters": _ropes(file, keys, kinds),
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in file.tensors for i in full),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_double_wide_mlp": shared > 0 and file.entry(f"blk.{count - 1}.ffn_up.weight").shape[0] == 2 * width,
        "hidden_size_per_layer_input": keys.int("embedding_length_per_layer_input", 0, low=0),
    }
    if found["hidden_size_per_layer_input"]:
        found["vocab_size_per_layer_input"] = file.entry("per_layer_token_embd.weight").shape[0]
    if keys.config.get("expert_count"):
        mixed = experts(file, keys)
        found |= {"enable_moe_block": True, "top_k_experts": mixed.pop("num_experts_per_tok"), **mixed}
    return found


def _heads(keys: Fields, config: dict[str, Any], kinds: list[str]) -> dict[str, dict[str, int]]:
    """Return the number of key/value heads of each layer, and their size."""
    given, sizes = keys.config.get("attention.head_count_kv"), {}
    for kind, end in ((FULL, ""), (SLIDING, "_swa")):
        sizes[kind] = keys.int(f"attention.key_length{end}", config["head_dim"], high=2**14)
        for name in (f"attention.value_length{end}", f"rope.dimension_count{end}"):
            if keys.int(name, sizes[kind], high=2**14) != sizes[kind]:
                raise keys.error(name, f"the attention.key_length{end}, {sizes[kind]}")
    counts = given if isinstance(given, list) else [given or config["num_attention_heads"]] * len(kinds)
    if len(counts) != len(kinds) or any(type(n) is not int for n in counts):
        raise keys.error("attention.head_count_kv", f"a number, or {len(kinds)} of them")
    every = zip(counts, kinds, strict=True)
    return {str(i): {"num_key_value_heads": n, "head_dim": sizes[kind]} for i, (n, kind) in enumerate(every)}


def _ropes(file: GGUF, keys: Fields, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """Return the rotary embeddings of both kinds of layers. Factors of angles show which pairs of full attention
    rotate."""
    if keys.str("rope.scaling.type", "none") != "none":
        raise keys.error("rope.scaling.type", "none")
    bases = (("rope.freq_base", 1e6), ("rope.freq_base_swa", 1e4))
    full, sliding = (decimal(keys.float(name, base, low=1.0, high=1e15)) for name, base in bases)
    found: dict[str, Any] = {SLIDING: {"rope_type": "default", "rope_theta": sliding}}
    found[FULL] = {"rope_type": "proportional", "rope_theta": full, "partial_rotary_factor": 1.0}
    if FULL in kinds and FACTORS[0] in file.tensors:
        found[FULL]["partial_rotary_factor"] = _share(file)
    return found


def _share(file: GGUF) -> float:
    """Return the share of pairs whose factor is 1; those of other pairs are so large that the pairs do not rotate."""
    values = numbers(file, FACTORS[0])
    turned = values.count(1.0)
    if values[:turned] != (1.0,) * turned or any(value < LEAST_STILL for value in values[turned:]):
        raise file.error(
            f"tensor {FACTORS[0]!r}: expected ones and then factors of {LEAST_STILL:g} or more", FETCH_AGAIN
        )
    return turned / len(values)

"""Mixtures of experts in GGUF files, as configurations with Hugging Face's field names."""

from typing import Any

from models.checkpoint.fields import Fields
from models.gguf.reader import FETCH_AGAIN, GGUF

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # llama.cpp's numbers of the functions of experts' logits


def experts(file: GGUF, keys: Fields, *, scores: int = SOFTMAX, some: bool = False) -> dict[str, Any]:
    """Return the fields of a mixture of experts.

    Args:
        scores: the architecture's function of logits.
        some: some layers may have no experts: `mlp_only_layers`.
    """
    if keys.int("expert_gating_func", 0, low=0) not in (0, scores):  # 0: not specified
        raise keys.error("expert_gating_func", str(scores))
    for key in ("expert_group_count", "interleave_moe_layer_step"):
        if keys.int(key, 1, low=0) > 1:
            raise keys.error(key, "1: more are not supported")
    if scores != SIGMOID and keys.float("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise keys.error("expert_weights_scale", "1")
    layers = range(keys.int("block_count", high=2**14))
    dense = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in file.tensors]
    if len(dense) == len(layers) or (dense and not some):
        raise keys.error("expert_count", f"experts in {'some' if some else 'all'} layers, got none in {dense[:5]}")
    first = next(i for i in layers if i not in dense)
    name = f"blk.{first}.ffn_down_exps.weight"
    if len(file.entry(name).shape) != 3:
        raise file.error(f"tensor {name!r}: expected three dimensions, got {list(file.entry(name).shape)}", FETCH_AGAIN)
    count = {"num_experts": keys.int("expert_count"), "num_experts_per_tok": keys.int("expert_used_count")}
    more = {"mlp_only_layers": dense} if some else {}
    return count | {"moe_intermediate_size": file.entry(name).shape[-1]} | more


def mlp_kinds(dense: list[int], layers: int) -> list[str]:
    """Return the kinds of layers' MLPs as configurations name them, given the layers without experts."""
    return ["dense" if i in dense else "sparse" for i in range(layers)]

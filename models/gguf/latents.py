"""Models with latent attention in GGUF files (`deepseek2`), as configurations with Hugging Face's field names."""

from typing import Any

from models.checkpoint.fields import Fields
from models.gguf.experts import SIGMOID, SOFTMAX
from models.gguf.reader import GGUF
from models.gguf.rotary import decimal, rotary

HEADS = "self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"  # files store a matrix for each head


def latents(file: GGUF, keys: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of latent attention.

    Args:
        sizes: the fields of width, heads and layers.

    Raises:
        CheckpointError: it names the key.
    """
    split = keys.config.get("attention.key_length_mla") is not None
    end, low = ("_mla" if split else ""), "blk.0.attn_q_a.weight"
    rotated, whole = keys.int("rope.dimension_count"), keys.int(f"attention.key_length{end}", high=2**13)
    if rotated >= whole:
        raise keys.error("rope.dimension_count", f"less than attention.key_length{end}, which is {whole}")
    rope = rotary(file, keys, rotated, sizes["max_position_embeddings"], "all")
    if (share := keys.float("rope.scaling.yarn_log_multiplier", 0.0)) and rope["rope_scaling"]:
        # Files give a tenth of it, and no `mscale`, which is equal in published models: cos and sin are not scaled.
        both = round(10 * decimal(share), 7)
        rope["rope_scaling"] |= {"mscale": both, "mscale_all_dim": both}
    return sizes | rope | {
        "num_key_value_heads": sizes["num_attention_heads"],
        "attention_bias": any(name.endswith(".attn_kv_a_mqa.bias") for name in file.tensors),
        "kv_lora_rank": keys.int("attention.kv_lora_rank"),
        "q_lora_rank": file.entry(low).shape[0] if low in file.tensors else None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": whole - rotated,
        "v_head_dim": keys.int(f"attention.value_length{end}"),
        "kv_b_split": split,
    }  # fmt: skip


def mixture(file: GGUF, keys: Fields, layers: int) -> dict[str, Any]:
    """Return the fields of experts, and the architecture whose rules choose them.

    Raises:
        CheckpointError: it names the key.
    """
    sparse = [f"blk.{i}.ffn_gate_inp.weight" in file.tensors for i in range(layers)]
    first = sparse.index(True) if any(sparse) else layers
    if not all(sparse[first:]):
        raise keys.error("leading_dense_block_count", f"experts in all layers from {first} on")
    biased = any(name.endswith("exp_probs_b.bias") for name in file.tensors)
    scores = keys.int("expert_gating_func", 0, low=0) or (SIGMOID if biased else SOFTMAX)  # 0: not specified
    if scores not in (SOFTMAX, SIGMOID):
        raise keys.error("expert_gating_func", f"{SOFTMAX} or {SIGMOID}")
    normalized, groups = keys.bool("expert_weights_norm", default=False), keys.int("expert_group_count", 1, low=0) or 1
    if scores == SOFTMAX and any(sparse) and normalized:
        raise keys.error("expert_weights_norm", "false, as weights are parts of a softmax")
    fields: dict[str, Any] = {"first_k_dense_replace": first}
    if any(sparse):
        fields |= {
            "n_routed_experts": keys.int("expert_count"),
            "num_experts_per_tok": keys.int("expert_used_count"),
            "moe_intermediate_size": keys.int("expert_feed_forward_length"),
            "n_shared_experts": keys.int("expert_shared_count"),
            "routed_scaling_factor": decimal(keys.float("expert_weights_scale", 1.0)) or 1.0,  # 0: none
            "norm_topk_prob": normalized,
            "n_group": groups,
            "topk_group": keys.int("expert_group_used_count", 1, low=0) or 1,
        }
    if scores == SIGMOID:
        return fields | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    method = {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}
    return fields | method | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}

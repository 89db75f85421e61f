"""The Hugging Face names of the tensors in GGUF files, by architecture."""

import re

_LLAMA = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "cls.output": "score",
    "blk.attn_norm": "input_layernorm",
    "blk.attn_q": "self_attn.q_proj",
    "blk.attn_k": "self_attn.k_proj",
    "blk.attn_v": "self_attn.v_proj",
    "blk.attn_qkv": "self_attn.qkv_proj",
    "blk.attn_q_norm": "self_attn.q_norm",
    "blk.attn_k_norm": "self_attn.k_norm",
    "blk.attn_output": "self_attn.o_proj",
    "blk.ffn_norm": "post_attention_layernorm",
    "blk.ffn_gate": "mlp.gate_proj",
    "blk.ffn_up": "mlp.up_proj",
    "blk.ffn_down": "mlp.down_proj",
}
_OUTPUT_NORMS = {
    "blk.post_attention_norm": "post_attention_layernorm",
    "blk.post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA2 = {**_LLAMA, **_OUTPUT_NORMS, "blk.ffn_norm": "pre_feedforward_layernorm"}
_LAYER_INPUTS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "blk.inp_gate": "per_layer_input_gate",
    "blk.proj": "per_layer_projection",
    "blk.post_norm": "post_per_layer_input_norm",
}
_GEMMA3N = {
    **_GEMMA2,
    **_LAYER_INPUTS,
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
    "blk.altup_correct_coef": "altup.correction_coefs",
    "blk.altup_correct_scale": "altup.correct_output_scale",
    "blk.altup_predict_coef": "altup.prediction_coefs",
    "blk.altup_router": "altup.modality_router",
    "blk.altup_router_norm": "altup.router_norm",
    "blk.laurel_l": "laurel.linear_left",
    "blk.laurel_r": "laurel.linear_right",
    "blk.laurel_post_norm": "laurel.post_laurel_norm",
}
_GEMMA4 = {
    **_GEMMA2,
    **_LAYER_INPUTS,
    "blk.layer_output_scale": "layer_scalar",
    "blk.ffn_gate_inp": "router.proj",
    "blk.ffn_gate_inp.scale": "router.scale",
    **dict.fromkeys(("blk.ffn_down_exps.scale", "blk.ffn_gate_inp.per_expert_scale"), "router.per_expert_scale"),
    **{f"blk.ffn_{part}_exps": f"experts.{{}}.{part}_proj" for part in ("gate", "up", "gate_up", "down")},
    "blk.pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "blk.post_ffw_norm_1": "post_feedforward_layernorm_1",
    "blk.post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "cls.output": "score",
    "blk.attn_norm": "ln_1",
    "blk.attn_qkv": "attn.c_attn",
    "blk.attn_output": "attn.c_proj",
    "blk.ffn_norm": "ln_2",
    "blk.ffn_up": "mlp.c_fc",
    "blk.ffn_down": "mlp.c_proj",
}
_LFM2 = {
    **_LLAMA,
    **dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm"),
    "blk.attn_norm": "operator_norm",
    "blk.attn_q_norm": "self_attn.q_layernorm",
    "blk.attn_k_norm": "self_attn.k_layernorm",
    "blk.attn_output": "self_attn.out_proj",
    "blk.ffn_norm": "ffn_norm",
    "blk.ffn_gate": "feed_forward.w1",
    "blk.ffn_down": "feed_forward.w2",
    "blk.ffn_up": "feed_forward.w3",
    "blk.shortconv.in_proj": "conv.in_proj",
    "blk.shortconv.conv": "conv.conv",
    "blk.shortconv.out_proj": "conv.out_proj",
}
_EXPERTS = {  # {} is the number of an expert: files store the matrices of all experts in one tensor
    "blk.ffn_gate_inp": "mlp.gate",
    "blk.ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "blk.ffn_up_exps": "mlp.experts.{}.up_proj",
    "blk.ffn_down_exps": "mlp.experts.{}.down_proj",
    "blk.ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj",
}
_SHARED = {
    "blk.ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "blk.ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "blk.ffn_up_shexp": "mlp.shared_expert.up_proj",
    "blk.ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_QWEN35 = {name: own for name, own in _LLAMA.items() if name != "blk.ffn_norm"} | {
    "blk.post_attention_norm": "post_attention_layernorm",
    "blk.attn_qkv": "linear_attn.in_proj_qkv",
    "blk.attn_gate": "linear_attn.in_proj_z",
    "blk.ssm_alpha": "linear_attn.in_proj_a",
    "blk.ssm_beta": "linear_attn.in_proj_b",
    "blk.ssm_ba": "linear_attn.in_proj_ba",
    "blk.ssm_a": "linear_attn.A_log",
    "blk.ssm_conv1d": "linear_attn.conv1d",
    "blk.ssm_dt": "linear_attn.dt_bias",
    "blk.ssm_norm": "linear_attn.norm",
    "blk.ssm_out": "linear_attn.out_proj",
}
_SHARED_MLP = {f"blk.ffn_{part}_shexp": f"shared_mlp.{part}_proj" for part in ("gate", "up", "down")}  # see `scans`
_SHARED_LINEAR = {"blk.ffn_up_shexp": "shared_mlp.input_linear", "blk.ffn_down_shexp": "shared_mlp.output_linear"}
_GRANITE4 = {
    **{name: own.replace("mlp.", "shared_mlp.") for name, own in _LLAMA.items()},
    **_EXPERTS,
    **_SHARED_MLP,
    "blk.ssm_in": "mamba.in_proj",
    "blk.ssm_conv1d": "mamba.conv1d",
    "blk.ssm_dt": "mamba.dt_bias",
    "blk.ssm_a": "mamba.A_log",
    "blk.ssm_d": "mamba.D",
    "blk.ssm_norm": "mamba.norm",
    "blk.ssm_out": "mamba.out_proj",
}
_NEMOTRON_H = {
    "token_embd": "model.embeddings",
    "output_norm": "model.norm_f",
    "output": "lm_head",
    "blk.attn_norm": "norm",
    **{f"blk.attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
    "blk.attn_output": "mixer.o_proj",
    "blk.ffn_up": "mixer.up_proj",
    "blk.ffn_down": "mixer.down_proj",
    "blk.ffn_gate_inp": "mixer.gate",
    "blk.exp_probs_b": "mixer.gate.e_score_correction_bias",
    **{f"blk.ffn_{part}_exps": f"mixer.experts.{{}}.{part}_proj" for part in ("up", "down")},
    **{f"blk.ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
    **{name: own.replace("mamba.", "mixer.") for name, own in _GRANITE4.items() if ".ssm_" in name},
}
_FALCON_H1 = {
    **{name: own.replace("mlp.", "feed_forward.") for name, own in _LLAMA.items()},
    **{name: own for name, own in _GRANITE4.items() if ".ssm_" in name},
    "output_norm": "model.final_layernorm",
    "blk.ffn_norm": "pre_ff_layernorm.weight",
}
BARE = (  # checkpoints' names with these ends have no further suffix
    "expert_bias",
    "e_score_correction_bias",
    ".sinks",
    ".A_log",
    ".dt_bias",
    ".D",
    "router.scale",
    "per_expert_scale",
    "layer_scalar",
    "correct_output_scale",
    "pre_ff_layernorm.weight",
)
_MAMBA = {
    "token_embd": "model.embeddings",
    "output_norm": "model.norm_f",
    "output": "lm_head",
    "blk.attn_norm": "norm",
    "blk.ssm_x": "mixer.x_proj",
    **{name: own.replace("mamba.", "mixer.") for name, own in _GRANITE4.items() if ".ssm_" in name},
    "blk.ssm_dt": "mixer.dt_proj",
}
_JAMBA = {
    **{name: own.replace("mlp.", "feed_forward.") for name, own in (_LLAMA | _EXPERTS).items()},
    **{name: own.replace("mixer.", "mamba.") for name, own in _MAMBA.items() if ".ssm_" in name},
    **{f"blk.ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
    "output_norm": "model.final_layernorm",
    "blk.ffn_norm": "pre_ff_layernorm",
    "blk.ffn_gate_inp": "feed_forward.router",
}
_LFM2_EXPERTS = {own: name.replace("mlp.", "feed_forward.") for own, name in _EXPERTS.items()}
_GPT_OSS = {
    **{name: own for name, own in _LLAMA.items() if name != "blk.ffn_norm"},
    **_EXPERTS,
    "blk.post_attention_norm": "post_attention_layernorm",
    "blk.attn_sinks": "self_attn.sinks",
}
_DEEPSEEK2 = {
    "blk.attn_q_a": "self_attn.q_a_proj",
    "blk.attn_q_a_norm": "self_attn.q_a_layernorm",
    "blk.attn_q_b": "self_attn.q_b_proj",
    "blk.attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "blk.attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "blk.attn_kv_b": "self_attn.kv_b_proj",
    "blk.attn_k_b": "self_attn.k_b_proj",
    "blk.attn_v_b": "self_attn.v_b_proj",
    "blk.exp_probs_b": "mlp.gate.e_score_correction_bias",
    **{f"blk.ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
_PHI2 = {
    "output_norm": "model.final_layernorm",
    "blk.attn_output": "self_attn.dense",
    "blk.ffn_up": "mlp.fc1",
    "blk.ffn_down": "mlp.fc2",
}
_GLM = {"blk.ffn_up": "mlp.gate_up_proj"}
_GLM4 = _GLM | {
    "blk.post_attention_norm": "post_self_attn_layernorm",
    "blk.post_ffw_norm": "post_mlp_layernorm",
}
_AFTER = {name.replace("ffn_norm", "post_attention_norm"): own for name, own in _LLAMA.items()}  # the MLP's norm
_APERTUS = {"blk.attn_norm": "attention_layernorm", "blk.ffn_norm": "feedforward_layernorm"}
_SIGMOIDS = _EXPERTS | {name: own for name, own in _DEEPSEEK2.items() if "shexp" in name or "probs" in name}
_AFMOE = _SIGMOIDS | {
    "blk.attn_gate": "self_attn.gate_proj",
    "blk.ffn_norm": "pre_mlp_layernorm",
    "blk.post_attention_norm": "post_attention_layernorm",
    "blk.post_ffw_norm": "post_mlp_layernorm",
    "blk.exp_probs_b": "mlp.gate.e_score_correction_bias",
}
_SUB_NORMS = {"blk.attn_sub_norm": "self_attn.attn_sub_norm", "blk.ffn_sub_norm": "mlp.ffn_sub_norm"}
_GATES = {"blk.attn_gate": "self_attn.gate_proj"}
_LLAMA4 = {name: own.replace("mlp.", "feed_forward.") for name, own in (_LLAMA | _EXPERTS | _SHARED).items()}
_DBRX = {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.norm_f",
    "output": "lm_head",
    "blk.attn_norm": "norm_attn_norm.norm_1",
    "blk.attn_qkv": "norm_attn_norm.attn.Wqkv",
    "blk.attn_output": "norm_attn_norm.attn.out_proj",
    "blk.attn_output_norm": "norm_attn_norm.norm_2",
    "blk.ffn_gate_inp": "ffn.router.layer",
    **{f"blk.ffn_{part}_exps": f"ffn.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
}
_NEOX = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "blk.attn_qkv": "attention.query_key_value",
    "blk.attn_output": "attention.dense",
    "blk.ffn_up": "mlp.dense_h_to_4h",
    "blk.ffn_down": "mlp.dense_4h_to_h",
}
_FALCON = _NEOX | {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "blk.attn_qkv": "self_attention.query_key_value",
    "blk.attn_output": "self_attention.dense",
}
_MPT = {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.norm_f",
    "blk.attn_norm": "norm_1",
    "blk.attn_qkv": "attn.Wqkv",
    "blk.attn_output": "attn.out_proj",
    "blk.ffn_norm": "norm_2",
    "blk.ffn_up": "ffn.up_proj",
    "blk.ffn_down": "ffn.down_proj",
}
LAYERS = {
    **dict.fromkeys(("gpt2", "starcoder", "falcon", "bloom"), "transformer.h"),
    "gptneox": "gpt_neox.layers",
    **dict.fromkeys(("dbrx", "mpt"), "transformer.blocks"),
}
_BAILING = {
    "token_embd": "model.word_embeddings",
    "blk.attn_qkv": "attention.query_key_value",
    "blk.attn_q_norm": "attention.query_layernorm",
    "blk.attn_k_norm": "attention.key_layernorm",
    "blk.attn_output": "attention.dense",
    "blk.exp_probs_b": "mlp.gate.expert_bias",
}
_HUNYUAN = {"blk.attn_q_norm": "self_attn.query_layernorm", "blk.attn_k_norm": "self_attn.key_layernorm"}
NAMES = {
    **dict.fromkeys(("mistral3", "qwen2", "qwen2vl", "qwen3", "qwen3vl", "gemma", "granite", "smollm3"), _LLAMA),
    **dict.fromkeys(("ernie4_5", "paddleocr", "arcee", "nemotron", "command-r", "cohere2", "olmo", "jais2"), _LLAMA),
    **dict.fromkeys(("minicpm", "exaone", "internlm2"), _LLAMA),
    "bailingmoe2": _LLAMA | _SIGMOIDS | _BAILING,
    "apertus": _LLAMA | _APERTUS,
    "chatglm": _LLAMA | _GLM,
    "glm4": _LLAMA | _GLM4,
    **dict.fromkeys(("dots1", "ernie4_5-moe", "exaone-moe", "minimax-m2"), _LLAMA | _SIGMOIDS),
    **dict.fromkeys(("hy_v3", "cohere2moe"), _LLAMA | _SIGMOIDS),
    "laguna": _LLAMA | _SIGMOIDS | _SHARED | _GATES,
    "muse-glimmer": {name: own for name, own in _GEMMA2.items() if not name.endswith(("q_norm", "k_norm"))} | _GATES,
    "glm4moe": _AFTER | _SIGMOIDS,
    "seed_oss": _AFTER,
    "llama4": _LLAMA4 | {"blk.ffn_gate_inp": "feed_forward.router"},
    "dbrx": _DBRX,
    "afmoe": _LLAMA | _AFMOE,
    "starcoder2": _LLAMA | {"blk.ffn_up": "mlp.c_fc", "blk.ffn_down": "mlp.c_proj"},
    "gptneox": _LLAMA | _NEOX,
    "falcon": _LLAMA | _FALCON,
    "bloom": _LLAMA | _FALCON | {"token_embd_norm": "transformer.word_embeddings_layernorm"},
    "mpt": _MPT | {name: _LLAMA[name] for name in ("output", "cls.output")},
    "starcoder": _GPT2,
    **dict.fromkeys(("bitnet", "bitnet-25", "bitnet-b1.58"), _LLAMA | _SUB_NORMS),
    **dict.fromkeys(("llama", "qwen3moe", "qwen3vlmoe", "olmoe", "mellum"), _LLAMA | _EXPERTS),
    "granitemoe": _LLAMA | _EXPERTS | _SHARED_MLP,
    "granite_swa": _LLAMA | _EXPERTS | _SHARED_LINEAR | {"blk.attn_sinks": "self_attn.sinks"},
    "qwen35": _QWEN35,
    **dict.fromkeys(("qwen3next", "qwen35moe"), _QWEN35 | _EXPERTS | _SHARED),
    "qwen2moe": _LLAMA | _EXPERTS | _SHARED,
    **dict.fromkeys(("gemma2", "gemma3"), _GEMMA2),
    "gemma3n": _GEMMA3N,
    "gemma4": _GEMMA4,
    **dict.fromkeys(("deepseek2", "mistral4", "minicpm3"), _LLAMA | _EXPERTS | _DEEPSEEK2),
    "gpt2": _GPT2,
    "gpt-oss": _GPT_OSS,
    "granitehybrid": _GRANITE4,
    "falcon-h1": _FALCON_H1,
    "mamba": _MAMBA,
    "mamba2": _NEMOTRON_H,
    "jamba": _JAMBA,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON_H),
    "hunyuan-dense": _LLAMA | _HUNYUAN,
    "hunyuan-moe": _LLAMA | _HUNYUAN | _SIGMOIDS,
    "lfm2": _LFM2,
    "lfm2moe": _LFM2 | _LFM2_EXPERTS | {"blk.exp_probs_b": "feed_forward.expert_bias"},
    **dict.fromkeys(
        ("olmo2", "exaone4"),
        {name: own for name, own in _LLAMA.items() if name not in ("blk.attn_norm", "blk.ffn_norm")} | _OUTPUT_NORMS,
    ),
    "phi2": _LLAMA | _PHI2,
    "stablelm": _LLAMA | {f"blk.attn_{x}_norm": f"self_attn.{x}_layernorm.norms.{{}}" for x in "qk"},
    "phi3": _LLAMA | {"blk.ffn_up": "mlp.gate_up_proj"},
}


def checkpoint_name(architecture: str, stored: str) -> str | None:
    """Return the name of a tensor in checkpoints; None if the architecture has no such tensor.

    In the name of a tensor with all experts, norms of all heads, or matrices of streams, {} stands for the number of
    one.
    """
    found = re.fullmatch(r"(?:blk\.(0|[1-9]\d{0,4})\.)?([\w.]+?)(?:\.(weight|bias))?", stored)
    if found is None:
        return None
    layer, part, end = found.groups()
    name = NAMES[architecture].get(part if layer is None else f"blk.{part}")
    if name is None or (end is None and not name.endswith(BARE)):
        return None
    layers = LAYERS.get(architecture, "model.layers")
    name = name if name.endswith(BARE) else f"{name}.{end}"
    return name if layer is None else f"{layers}.{layer}.{name}"

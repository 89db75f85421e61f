"""The architectures of GGUF files as configurations with Hugging Face's field names.

Anything that a configuration cannot express is refused with an error that names it: a file that loads computes what its
model computes.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING
from models.errors import nearest
from models.gguf import gemma4
from models.gguf.channel_scans import jamba, mamba
from models.gguf.delta_nets import delta_nets, without_draft_layers
from models.gguf.experts import SIGMOID, SOFTMAX_OF_CHOSEN, experts
from models.gguf.fused import split_attention
from models.gguf.gemma3n import gemma3n
from models.gguf.latents import latents, mixture
from models.gguf.later import LATER, LATER_READ
from models.gguf.reader import GGUF
from models.gguf.rotary import decimal, rotary
from models.gguf.scans import falcon_h1, mamba2, nemotron_h, scans
from models.gguf.sizes import alike, attention, epsilon, gated, mlp_width, named, windows
from models.gguf.windowed import cohere2moe, laguna, mellum, muse_glimmer

EMBEDDING, HEAD, SCORE = "token_embd.weight", "output.weight", "cls.output.weight"
OTHER_MATH = (  # keys that change the computation, and that no configuration here can express
    *("expert_count", "attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias", "use_parallel_residual"),
    *("attention.temperature_scale", "attn_logit_softcapping", "final_logit_softcapping"),
    *("rope.scaling.yarn_log_multiplier", "rope.scaling.alpha"),
)
OTHER_SCALES = "logit_scale", "residual_scale", "embedding_scale", "rope.scaling.yarn_ext_factor"
GRANITE = {  # Granite's fields for them
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "logits_scaling": "logit_scale",
    "residual_multiplier": "residual_scale",
}
CAPS = "attn_logit_softcapping", "final_logit_softcapping"  # the fields have the same names
# Values without effect. llama.cpp saves -1 and these caps where they are not used.
NEUTRAL = dict.fromkeys(OTHER_SCALES[:3], (1,)) | {OTHER_SCALES[3]: (1, -1), CAPS[0]: (50,), CAPS[1]: (30,)}
READ = {  # the keys above that each architecture reads
    "granite": GRANITE.values(),
    "minicpm": OTHER_SCALES[:3],
    **dict.fromkeys(("granitemoe", "granite_swa", "granitehybrid"), (*GRANITE.values(), "expert_count")),
    **dict.fromkeys(("llama", "qwen2moe", "qwen3moe", "qwen3vlmoe", "olmoe"), ("expert_count",)),
    **dict.fromkeys(("lfm2moe", "gpt-oss"), ("expert_count",)),
    **dict.fromkeys(("qwen3next", "qwen35moe", "nemotron_h_moe", "hunyuan-moe", "jamba"), ("expert_count",)),
    "gemma2": (*CAPS, "attention.scale"),
    "gemma3": (CAPS[1], "attention.scale"),
    "gemma3n": CAPS[1:],
    "gemma4": (CAPS[1], "expert_count"),
    "mistral3": ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
    "stablelm": ("use_parallel_residual",),
    "deepseek2": ("expert_count", "rope.scaling.yarn_log_multiplier"),
    "mistral4": ("expert_count", "rope.scaling.yarn_log_multiplier", "attention.temperature_scale"),
    **dict.fromkeys(("laguna", "mellum"), ("expert_count",)),
    "cohere2moe": ("expert_count", "logit_scale"),
    "muse-glimmer": ("logit_scale", CAPS[1]),
    **LATER_READ,
}
INTERLEAVED = (  # rows of queries and keys are in the order of interleaved rotation
    "llama",
    "granite",
    "granitemoe",
    "granite_swa",
    "granitehybrid",
    "nemotron_h",
    "nemotron_h_moe",
    "mistral3",
    "smollm3",
    "arcee",
    "olmo",
    "minicpm",
    "internlm2",
    "muse-glimmer",
)
SWA_BASE = "rope.freq_base_swa"  # of layers with a window; llama.cpp saves 10000 where no layer uses it
ONE_BASE = "afmoe", "gemma2", "gpt-oss", "llama4"  # whose layers with a window use it, but share one base here
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_config(file: GGUF) -> dict[str, Any]:
    """Make config.json. Raises CheckpointError for an unsupported architecture, or keys that do not fit."""
    if file.fields().str("general.type", "model") == "adapter":
        raise file.error("the file holds an adapter (LoRA), not a model", "Merge it into its model first.")
    if not file.tensors:
        raise file.error("the file holds no tensors", "It may be a vocabulary alone: name the model's file.")
    name = file.fields().str("general.architecture")
    if name not in ARCHITECTURES:
        what = f"general.architecture: {name[:80]!r} is not supported"
        raise file.error(what, nearest(name, ARCHITECTURES, "docs/checkpoints.md lists those that are"))
    keys = file.fields(f"{name}.")
    for key in (*OTHER_MATH, *OTHER_SCALES):
        value = keys.config.get(key)
        if value and value not in NEUTRAL.get(key, ()) and key not in READ.get(name, ()):
            raise keys.error(key, "nothing: it is not supported")
    base = keys.float("rope.freq_base", 10000.0)
    if name in ONE_BASE and keys.float(SWA_BASE, base) != base:
        raise keys.error(SWA_BASE, "the rope.freq_base")
    if keys.bool("attention.causal", default=True) is False:
        raise keys.error("attention.causal", "true")
    if EMBEDDING not in file.tensors and HEAD in file.tensors:  # converted from a checkpoint that kept only the head
        file.tensors[EMBEDDING] = file.tensors.pop(HEAD)
    split_attention(file, keys)
    config = ARCHITECTURES[name](file, keys)
    if SCORE in file.tensors:
        config["architectures"] = [config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")]
    return config | {
        "vocab_size": file.entry(EMBEDDING).shape[0],
        "tie_word_embeddings": HEAD not in file.tensors and SCORE not in file.tensors,
        "dtype": _dtype(file),
    }


# --- architectures ---


def _llama(file: GGUF, keys: Fields) -> dict[str, Any]:
    config = gated(file, keys, rotated="all") | {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    window = keys.int("attention.sliding_window", 0, low=0, high=2**31)
    if keys.config.get("expert_count"):
        if config.pop("attention_bias") or config.pop("mlp_bias"):
            raise keys.error("expert_count", "nothing, as the layers have biases")
        mixed = experts(file, keys)
        config |= {"intermediate_size": mixed.pop("moe_intermediate_size"), "sliding_window": window or None}
        return config | mixed | named("MixtralForCausalLM", "mixtral")
    if not window:
        return config | named("LlamaForCausalLM", "llama")
    if config.pop("attention_bias") or config.pop("mlp_bias"):
        raise keys.error("attention.sliding_window", "nothing, as the layers have biases")
    return config | named("MistralForCausalLM", "mistral") | {"sliding_window": window}


def _granite(file: GGUF, keys: Fields) -> dict[str, Any]:
    switch, arch = "rope.scaling.finetuned", file.fields().str("general.architecture")
    if arch in ("granite", "granitemoe") and not keys.bool(switch, default=True):  # no rotation
        raise keys.error(switch, "true")
    config = _llama(file, keys) | named("GraniteForCausalLM", "granite")
    for word, key in GRANITE.items():
        config[word] = decimal(keys.float(key, 1.0))
    return config | {"attention_multiplier": decimal(keys.float("attention.scale", config["head_dim"] ** -0.5))}


def _bitnet(file: GGUF, keys: Fields) -> dict[str, Any]:
    """`bitnet` is the architecture of older models, the others are those of BitNet b1.58 2B4T."""
    older = file.fields().str("general.architecture") == "bitnet"
    config = gated(file, keys, rotated="all") | {"hidden_act": "silu" if older else "relu2"}
    return config | {"attention_bias": False} | named("BitNetForCausalLM", "bitnet")


def _minicpm(file: GGUF, keys: Fields) -> dict[str, Any]:
    config = _granite(file, keys)
    absent = {  # from older files: those of MiniCPM-2B (llama.cpp inverts the last)
        "embedding_scale": 12.0,
        "residual_scale": 1.4 * config["num_hidden_layers"] ** -0.5,
        "logit_scale": config["hidden_size"] / 256,
    }
    scales = {word: absent[key] for word, key in GRANITE.items() if key in absent and not keys.config.get(key)}
    return config | scales


def _granitemoe(file: GGUF, keys: Fields) -> dict[str, Any]:
    mixed, shared = experts(file, keys), keys.int("expert_shared_feed_forward_length", 0, low=0)
    plain = keys.changed({"expert_count": None})
    width = {"intermediate_size": mixed.pop("moe_intermediate_size")}
    config = _granite(file, plain) | width | mixed
    if not shared:
        return config | named("GraniteMoeForCausalLM", "granitemoe")
    return config | named("GraniteMoeSharedForCausalLM", "granitemoeshared") | {"shared_intermediate_size": shared}


def _granite_swa(file: GGUF, keys: Fields) -> dict[str, Any]:
    window, flags = "attention.sliding_window", keys.config.get("attention.rope_pattern")
    plain, mixed = keys.changed({window: 0}), keys.config.get("expert_count")
    config = (_granitemoe if mixed else _granite)(file, plain)
    theta, layers = config["rope_theta"], config["num_hidden_layers"]
    if flags is None:
        flags = [True] * layers
    if not isinstance(flags, list) or len(flags) != layers or any(type(flag) is not bool for flag in flags):
        raise keys.error("attention.rope_pattern", f"{layers} flags")
    bases = {"layer_rope_theta": [theta if flag else 0.0 for flag in flags]}
    kind = ("GraniteMoeSWAForCausalLM", "granitemoe_swa") if mixed else ("GraniteSWAForCausalLM", "granite_swa")
    return config | windows(keys, keys.int(window, high=2**31), 4, first=True) | bases | named(*kind)


def _granitehybrid(file: GGUF, keys: Fields) -> dict[str, Any]:
    name = "attention.head_count_kv"  # 0 for layers of Mamba-2
    shared = keys.config.get(name)
    if not isinstance(shared, list) or len(shared) != keys.int("block_count", high=2**14):
        raise keys.error(name, "a number for each layer")
    plain = keys.changed({name: [heads for heads in shared if heads], "expert_count": None})
    config = _granite(file, plain) | named("GraniteMoeHybridForCausalLM", "granitemoehybrid")
    config |= scans(file, keys, config["hidden_size"])
    if not keys.config.get("expert_count"):
        return config | {"num_local_experts": 0, "shared_intermediate_size": config["intermediate_size"]}
    mixed = experts(file, keys)
    counts = {"num_local_experts": mixed["num_experts"], "num_experts_per_tok": mixed["num_experts_per_tok"]}
    width = keys.int("expert_shared_feed_forward_length")
    return config | counts | {"intermediate_size": mixed["moe_intermediate_size"], "shared_intermediate_size": width}


def _mistral3(file: GGUF, keys: Fields) -> dict[str, Any]:
    config = _llama(file, keys)
    growth = keys.float("attention.temperature_scale", 0.0)
    if not growth:
        return config
    rope = (config.pop("rope_scaling") or {"rope_type": "default"}) | {"rope_theta": config.pop("rope_theta")}
    if factor := keys.float("rope.scaling.yarn_log_multiplier", 0.0):  # both are equal, so they cancel out
        rope |= {"mscale": decimal(factor), "mscale_all_dim": decimal(factor)}
    original = keys.int("rope.scaling.original_context_length", config["max_position_embeddings"], high=2**31)
    rope |= {"llama_4_scaling_beta": decimal(growth), "original_max_position_embeddings": original}
    window = {"sliding_window": config.get("sliding_window")}
    return config | window | named("Ministral3ForCausalLM", "ministral3") | {"rope_parameters": rope}


def _smollm3(file: GGUF, keys: Fields) -> dict[str, Any]:
    config = _llama(file, keys) | named("SmolLM3ForCausalLM", "smollm3")
    # The file does not say which layers have no rotation: every fourth, as in the only model of this architecture.
    return config | {"no_rope_layers": [int(i % 4 != 3) for i in range(config["num_hidden_layers"])]}


def _qwen(file: GGUF, keys: Fields) -> dict[str, Any]:
    if keys.int("attention.sliding_window", 0, low=0, high=2**31):
        raise keys.error("attention.sliding_window", "nothing: which layers it is for is not in the file")
    config = gated(file, keys, rotated="all")
    arch, bias = file.fields().str("general.architecture"), "blk.0.attn_q.bias" in file.tensors
    if arch.endswith("moe"):
        second = arch == "qwen2moe"
        norm = {"norm_topk_prob": keys.bool("expert_weights_norm", default=not second)}
        config |= experts(file, keys, some=True) | norm
        if not second:
            return config | {"attention_bias": bias} | named("Qwen3MoeForCausalLM", "qwen3_moe")
        shared = {"shared_expert_intermediate_size": keys.int("expert_shared_feed_forward_length")}
        return config | shared | {"qkv_bias": bias} | named("Qwen2MoeForCausalLM", "qwen2_moe")
    if arch.startswith("qwen2"):
        return config | named("Qwen2ForCausalLM", "qwen2")
    return config | {"attention_bias": bias} | named("Qwen3ForCausalLM", "qwen3")


def _qwen35(file: GGUF, keys: Fields) -> dict[str, Any]:
    keys = without_draft_layers(file, keys)
    config = {"partial_rotary_factor": 1.0} | gated(file, keys, rotated="some") | delta_nets(file, keys)
    if (arch := file.fields().str("general.architecture")) == "qwen35":
        return config | named("Qwen3_5ForCausalLM", "qwen3_5_text")
    config |= experts(file, keys, some=arch == "qwen3next")
    config["shared_expert_intermediate_size"] = keys.int("expert_shared_feed_forward_length")
    norm = keys.bool("expert_weights_norm", default=True)
    # Files of Qwen3-Next store the matrices of gated delta nets like Qwen3.5.
    if arch == "qwen3next" and "linear_num_key_heads" not in config:
        return config | {"norm_topk_prob": norm} | named("Qwen3NextForCausalLM", "qwen3_next")
    if config.pop("mlp_only_layers", None):
        raise keys.error("expert_count", "experts in all layers, as there are gated delta nets")
    if not norm:
        raise keys.error("expert_weights_norm", "true")
    return config | named("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text")


def _phi3(file: GGUF, keys: Fields) -> dict[str, Any]:
    window = keys.int("attention.sliding_window", 0, low=0, high=2**31) or None  # 0: none
    config = gated(file, keys, rotated="some") | named("Phi3ForCausalLM", "phi3")
    config["intermediate_size"] //= 2  # gate and up are one matrix
    # Without a padding token, transformers' default may lie outside the vocabulary.
    return config | {"sliding_window": window, "pad_token_id": None}


def _phi2(file: GGUF, keys: Fields) -> dict[str, Any]:
    config = attention(file, keys) | named("PhiForCausalLM", "phi")
    rope = rotary(file, keys, config.pop("head_dim"), config["max_position_embeddings"], "some")
    share = {"partial_rotary_factor": 1.0} | rope
    return config | share | {"hidden_act": "gelu_new", "layer_norm_eps": epsilon(keys, "attention.layer_norm_epsilon")}


def _gpt2(file: GGUF, keys: Fields) -> dict[str, Any]:
    width = keys.int("embedding_length")
    return named("GPT2LMHeadModel", "gpt2") | {
        "n_embd": width,
        "n_layer": keys.int("block_count", high=2**14),
        "n_head": keys.int("attention.head_count", high=2**14),
        "n_positions": file.entry("position_embd.weight").shape[0],
        "n_inner": file.entry("blk.0.ffn_up.weight").shape[0],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": epsilon(keys, "attention.layer_norm_epsilon"),
    }


def _gemma(file: GGUF, keys: Fields) -> dict[str, Any]:
    return gated(file, keys, rotated="all") | named("GemmaForCausalLM", "gemma") | {"hidden_act": "gelu_pytorch_tanh"}


def _gemma2(file: GGUF, keys: Fields) -> dict[str, Any]:
    window = keys.int("attention.sliding_window", 4096, high=2**31)
    caps = {name: decimal(keys.float(name)) for name in CAPS if keys.config.get(name) is not None}
    return _sized(file, keys, window, period=2, whole=46) | named("Gemma2ForCausalLM", "gemma2") | caps


def _gemma3(file: GGUF, keys: Fields) -> dict[str, Any]:
    window = keys.int("attention.sliding_window", 0, low=0, high=2**31)
    config = _sized(file, keys, window, period=6, whole=62) | named("Gemma3ForCausalLM", "gemma3_text")
    cap = keys.float(CAPS[1], 0.0)
    base = decimal(keys.float(SWA_BASE, 10000.0, low=1.0, high=1e15))
    return config | {"rope_local_base_freq": base, CAPS[1]: decimal(cap) if cap else None}


def _gemma4(file: GGUF, keys: Fields) -> dict[str, Any]:
    full = keys.changed({"attention.head_count_kv": None})  # may differ by layer
    window, cap = keys.int("attention.sliding_window", 0, low=0, high=2**31), keys.float(CAPS[1], 0.0)
    config = attention(file, full) | windows(keys, window, 6) | named("Gemma4ForCausalLM", "gemma4_text")
    config |= {"rms_norm_eps": epsilon(keys, "attention.layer_norm_rms_epsilon")}
    return config | gemma4.layers(file, keys, config) | {CAPS[1]: decimal(cap) if cap else None}


def _sized(file: GGUF, keys: Fields, window: int, *, period: int, whole: int) -> dict[str, Any]:
    """Return the fields that Gemma 2 and 3 have in common; `whole`: the number of layers of the largest model."""
    config = gated(file, keys, rotated="all") | windows(keys, window, period)
    large = config["num_hidden_layers"] == whole  # where, as in llama.cpp, the factor of scores is not the head's size
    scalar = config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
    if abs(keys.float("attention.scale", own := scalar**-0.5) / own - 1) > 1e-6:  # converters leave it out
        raise keys.error("attention.scale", f"{own:.6g}")
    return config | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar}


def _olmo2(file: GGUF, keys: Fields) -> dict[str, Any]:
    config = gated(file, keys, rotated="all")
    window = keys.int("attention.sliding_window", 0, low=0, high=2**31)
    if not window:
        return config | named("Olmo2ForCausalLM", "olmo2")
    base, scaling = config.pop("rope_theta"), config.pop("rope_scaling") or {"rope_type": "default"}
    local = decimal(keys.float(SWA_BASE, base, low=1.0, high=1e15))
    ropes = {FULL: scaling | {"rope_theta": base}, SLIDING: {"rope_type": "default", "rope_theta": local}}
    return config | windows(keys, window, 4) | named("Olmo3ForCausalLM", "olmo3") | {"rope_parameters": ropes}


def _olmoe(file: GGUF, keys: Fields) -> dict[str, Any]:
    config, mixed = gated(file, keys, rotated="all"), experts(file, keys)
    norm = {"norm_topk_prob": keys.bool("expert_weights_norm", default=False)}
    width = {"intermediate_size": mixed.pop("moe_intermediate_size")}
    return config | width | mixed | norm | named("OlmoeForCausalLM", "olmoe")


def _gpt_oss(file: GGUF, keys: Fields) -> dict[str, Any]:
    config, mixed = gated(file, keys, rotated="all"), experts(file, keys, scores=SOFTMAX_OF_CHOSEN)
    config |= windows(keys, keys.int("attention.sliding_window", 0, low=0, high=2**31), 2)
    if config["rope_scaling"]:
        config["rope_scaling"]["truncate"] = False  # as in the only model; the file does not say
    more = {"intermediate_size": mixed.pop("moe_intermediate_size"), "num_local_experts": mixed.pop("num_experts")}
    bias = {"attention_bias": "blk.0.attn_q.bias" in file.tensors}
    return config | more | mixed | bias | named("GptOssForCausalLM", "gpt_oss")


def _deepseek2(file: GGUF, keys: Fields) -> dict[str, Any]:
    keys = without_draft_layers(file, keys)
    sizes = _latent_sizes(file, keys)
    return latents(file, keys, sizes) | mixture(file, keys, sizes["num_hidden_layers"])


def _mistral4(file: GGUF, keys: Fields) -> dict[str, Any]:
    # Files whose source had transformers' names lack the first key: its value is that of the only model then.
    growth, normalized = keys.float("attention.temperature_scale", 0.1), "expert_weights_norm"
    config = _deepseek2(file, keys.changed({normalized: None}))
    if config["model_type"] != "deepseek_v2":
        raise keys.error("expert_gating_func", "1, as weights are parts of a softmax")
    rope = (config["rope_scaling"] or {}) | {"llama_4_scaling_beta": decimal(growth)}
    more = {"norm_topk_prob": keys.bool(normalized, default=False), "rope_scaling": rope}
    return config | more | named("Mistral4ForCausalLM", "mistral4")


def _latent_sizes(file: GGUF, keys: Fields) -> dict[str, Any]:
    """Return the sizes of a model with latent attention."""
    return {
        "hidden_size": keys.int("embedding_length"),
        "intermediate_size": mlp_width(file, keys),
        "num_hidden_layers": keys.int("block_count", high=2**14),
        "num_attention_heads": alike(keys, "attention.head_count"),
        "max_position_embeddings": keys.int("context_length", high=2**31),
        "hidden_act": "silu",
        "rms_norm_eps": epsilon(keys, "attention.layer_norm_rms_epsilon"),
    }


def _hunyuan(file: GGUF, keys: Fields) -> dict[str, Any]:
    config = gated(file, keys, rotated="all") | {"attention_bias": "blk.0.attn_q.bias" in file.tensors}
    if file.fields().str("general.architecture") == "hunyuan-dense":
        return config | named("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense")
    mixed, shared = experts(file, keys), "expert_shared_feed_forward_length"
    width = mixed.pop("moe_intermediate_size")
    if keys.int(shared) != width:
        raise keys.error(shared, f"the width of the experts, {width}")
    return config | mixed | {"intermediate_size": width} | named("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe")


def _minicpm3(file: GGUF, keys: Fields) -> dict[str, Any]:
    sizes = _latent_sizes(file, keys)
    value = sizes["hidden_size"] // sizes["num_attention_heads"]  # files give neither this nor multipliers
    more = Fields({"attention.value_length": value, **keys.config}, keys.file, keys.prefix)
    return latents(file, more, sizes) | named("MiniCPM3ForCausalLM", "minicpm3")


def _lfm2(file: GGUF, keys: Fields) -> dict[str, Any]:
    name = "attention.head_count_kv"  # 0 for layers with a convolution
    shared = keys.config.get(name)
    if not isinstance(shared, list):
        raise keys.error(name, "a number for each layer")
    if keys.int("attention.sliding_window", 0, low=0, high=2**31):
        raise keys.error("attention.sliding_window", "nothing: it is not supported")
    attention = keys.changed({name: [heads for heads in shared if heads]})
    config = gated(file, attention, rotated="all") | named("Lfm2ForCausalLM", "lfm2")
    config["norm_eps"] = config.pop("rms_norm_eps")
    config["layer_types"] = [FULL if heads else "conv" for heads in shared]
    config["conv_L_cache"] = keys.int("shortconv.l_cache", high=64)
    return config | {"block_auto_adjust_ff_dim": False}  # the width is that of the matrices


def _lfm2moe(file: GGUF, keys: Fields) -> dict[str, Any]:
    config = _lfm2(file, keys) | experts(file, keys, scores=SIGMOID, some=True)
    dense = config.pop("mlp_only_layers")
    if dense != [*range(len(dense))]:
        raise keys.error("leading_dense_block_count", f"the first layers, got layers {dense} without experts")
    del config["block_auto_adjust_ff_dim"]
    more = {
        "num_dense_layers": len(dense),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in file.tensors),
        "norm_topk_prob": keys.bool("expert_weights_norm", default=True),
        "routed_scaling_factor": decimal(keys.float("expert_weights_scale", 1.0)) or 1.0,  # 0: none
    }
    return config | more | named("Lfm2MoeForCausalLM", "lfm2_moe")


def _stablelm(file: GGUF, keys: Fields) -> dict[str, Any]:
    config = attention(file, keys) | named("StableLmForCausalLM", "stablelm")
    rope = rotary(file, keys, config["head_dim"], config["max_position_embeddings"], "some")
    more = {
        "hidden_act": "silu",
        "layer_norm_eps": epsilon(keys, "attention.layer_norm_epsilon"),
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,  # whatever the key says, as in llama.cpp
        "use_qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors,
    }
    return config | {"partial_rotary_factor": 1.0} | rope | more


ARCHITECTURES: dict[str, Callable[[GGUF, Fields], dict[str, Any]]] = {
    "llama": _llama,
    "mistral3": _mistral3,
    "qwen2": _qwen,
    "qwen2vl": _qwen,
    "qwen3": _qwen,
    "qwen2moe": _qwen,
    "qwen3moe": _qwen,
    "qwen3vl": _qwen,
    "qwen3vlmoe": _qwen,
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _qwen35),
    "phi2": _phi2,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
    "mistral4": _mistral4,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3n": gemma3n,
    "gemma4": _gemma4,
    "granite": _granite,
    "granitemoe": _granitemoe,
    "granite_swa": _granite_swa,
    "granitehybrid": _granitehybrid,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), nemotron_h),
    "falcon-h1": falcon_h1,
    "mamba": mamba,
    "mamba2": mamba2,
    "jamba": jamba,
    **dict.fromkeys(("hunyuan-dense", "hunyuan-moe"), _hunyuan),
    **dict.fromkeys(("exaone", "internlm2"), _llama),
    **dict.fromkeys(("bitnet", "bitnet-25", "bitnet-b1.58"), _bitnet),
    "minicpm": _minicpm,
    "minicpm3": _minicpm3,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2moe,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "laguna": laguna,
    "mellum": mellum,
    "cohere2moe": cohere2moe,
    "muse-glimmer": muse_glimmer,
    **LATER,
}


def _dtype(file: GGUF) -> str:
    """Return the dtype of most float matrices."""
    found = Counter(DTYPES[e.format] for e in file.tensors.values() if len(e.shape) > 1 and e.format in DTYPES)
    return found.most_common(1)[0][0] if found else "float32"

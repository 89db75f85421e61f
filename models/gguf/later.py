"""Architectures of GGUF files that are variants of Llama or GPT-2, as configurations with Hugging Face's field
names."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from models.checkpoint.fields import Fields
from models.config import FULL, XIELU
from models.gguf.delta_nets import without_draft_layers
from models.gguf.experts import SIGMOID, experts, mlp_kinds
from models.gguf.latents import mixture
from models.gguf.reader import GGUF
from models.gguf.rotary import decimal, rotary
from models.gguf.sizes import attention, epsilon, gated, mlp_width, named, windows
from models.names import CURVE

LAYER_NORM, CLIP = "attention.layer_norm_epsilon", "attention.clamp_kqv"
ONE_STEP = {"interleave_moe_layer_step": 1}  # in place of a step that an architecture allows
CHUNK = 8192  # positions of a chunk of Llama 4
QKV = ".query_key_value."  # marks matrices of all three, which files store kind by kind
Ordered = TypeVar("Ordered", bound=Any)  # `models.gguf.tensors.Stored`


def grouped(config: Mapping[str, Any], name: str, stored: Ordered) -> Iterator[tuple[str, Ordered]]:
    """Yield queries, keys and values in the order of checkpoints: grouped by key head."""
    heads = config["num_attention_heads"]
    size = config["hidden_size"] // heads
    shared, rest = divmod(stored.shape[0] - heads * size, 2 * size)
    if rest or shared < 1 or heads % shared:  # a shape that differs from the model's is refused later
        yield name, stored
        return
    each = heads // shared
    starts = [(first, count) for g in range(shared) for first, count in
              ((g * each, each), (heads + g, 1), (heads + shared + g, 1))]  # fmt: skip
    yield name, replace(stored, pieces=tuple(range(i * size, (i + n) * size) for i, n in starts))


def _has(file: GGUF, part: str) -> bool:
    return f"blk.0.{part}" in file.tensors


def _partial(file: GGUF, keys: Fields) -> dict[str, Any]:
    """Return the fields of a gated decoder with RMSNorms whose heads are partly rotated."""
    config = {"partial_rotary_factor": 1.0} | gated(file, keys, rotated="some")
    return config | {"attention_bias": _has(file, "attn_q.bias")}


def _with_layer_norms(file: GGUF, keys: Fields, rotated: str, name: str) -> dict[str, Any]:
    """Return the fields of a decoder with LayerNorms; `name`: the field of their epsilon."""
    config = attention(file, keys)
    rope = rotary(file, keys, config["head_dim"], config["max_position_embeddings"], rotated)
    share = {"partial_rotary_factor": 1.0} if rotated == "some" else {}
    return config | share | rope | {name: epsilon(keys, LAYER_NORM)}


def _has_sections(keys: Fields) -> bool:
    """Whether rotation has sections for text, rows and columns of images, whose positions in a text are the same."""
    sections = keys.config.get("rope.dimension_sections") or []
    if not isinstance(sections, list) or any(type(one) is not int or one < 0 for one in sections):
        raise keys.error("rope.dimension_sections", "a list of sizes")
    return any(sections)


def _glm(file: GGUF, keys: Fields) -> dict[str, Any]:
    config = _partial(file, keys)
    config["intermediate_size"] //= 2  # gate and up are one matrix
    # Files of GLM-4.1V, whose positions have sections, have rows of queries and keys in the order of halves.
    config["rope_interleave"] = not _has_sections(keys)
    four = file.fields().str("general.architecture") == "glm4"
    return config | (named("Glm4ForCausalLM", "glm4") if four else named("GlmForCausalLM", "glm"))


def _sigmoids(file: GGUF, keys: Fields) -> dict[str, Any]:
    """Return the fields of experts whose weights are sigmoids."""
    mixed = mixture(file, keys, keys.int("block_count", high=2**14))
    if mixed["model_type"] != "deepseek_v3":
        raise keys.error("expert_gating_func", f"{SIGMOID}, as weights are sigmoids")
    return mixed


def _glm4moe(file: GGUF, keys: Fields) -> dict[str, Any]:
    keys = without_draft_layers(file, keys)
    config = _partial(file, keys) | {"use_qk_norm": _has(file, "attn_q_norm.weight")}
    return config | _sigmoids(file, keys) | named("Glm4MoeForCausalLM", "glm4_moe")


def _bailing(file: GGUF, keys: Fields) -> dict[str, Any]:
    keys = without_draft_layers(file, keys)
    config, mixed = _partial(file, keys), _sigmoids(file, keys)
    del config["attention_bias"]
    if not mixed.get("norm_topk_prob", True):
        raise keys.error("expert_weights_norm", "true")
    more = {
        "num_experts": mixed.pop("n_routed_experts", None),
        "num_shared_experts": mixed.pop("n_shared_experts", None),
        "use_qkv_bias": _has(file, "attn_qkv.bias"),
        "use_qk_norm": _has(file, "attn_q_norm.weight"),
    }
    return config | mixed | more | named("BailingMoeV2ForCausalLM", "bailing_moe_v2")


def _dots1(file: GGUF, keys: Fields) -> dict[str, Any]:
    config, more = gated(file, keys, rotated="all"), {"sliding_window": None}
    config["attention_bias"] = _has(file, "attn_q.bias")
    return config | more | _sigmoids(file, keys) | named("Dots1ForCausalLM", "dots1")


def _hy3(file: GGUF, keys: Fields) -> dict[str, Any]:
    keys = without_draft_layers(file, keys)
    config, mixed = gated(file, keys, rotated="all"), experts(file, keys, scores=SIGMOID, some=True)
    if not keys.bool("expert_weights_norm", default=False):
        raise keys.error("expert_weights_norm", "true")
    dense, width = mixed.pop("mlp_only_layers"), mixed["moe_intermediate_size"]
    kinds = mlp_kinds(dense, config["num_hidden_layers"])
    return config | mixed | named("HYV3ForCausalLM", "hy_v3") | {
        "attention_bias": _has(file, "attn_q.bias"),
        "mlp_layer_types": kinds,
        "num_shared_experts": file.entry(f"blk.{kinds.index('sparse')}.ffn_down_shexp.weight").shape[-1] // width,
        "router_scaling_factor": decimal(keys.float("expert_weights_scale", 1.0)) or 1.0,  # 0: none
    }  # fmt: skip


def _minimax(file: GGUF, keys: Fields) -> dict[str, Any]:
    config, mixed = gated(file, keys, rotated="some"), experts(file, keys, scores=SIGMOID)
    sizes = {"intermediate_size": mixed.pop("moe_intermediate_size"), "num_local_experts": mixed.pop("num_experts")}
    if keys.float("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise keys.error("expert_weights_scale", "1")
    return config | sizes | mixed | named("MiniMaxM2ForCausalLM", "minimax_m2")


def _afmoe(file: GGUF, keys: Fields) -> dict[str, Any]:
    config, mixed = gated(file, keys, rotated="all"), experts(file, keys, scores=SIGMOID, some=True)
    dense = mixed.pop("mlp_only_layers")
    if dense != [*range(len(dense))]:
        raise keys.error("leading_dense_block_count", f"the first layers, got layers {dense} without experts")
    if not keys.bool("expert_weights_norm", default=False):
        raise keys.error("expert_weights_norm", "true")
    more = {
        "num_dense_layers": len(dense),
        "num_shared_experts": keys.int("expert_shared_count"),
        "route_scale": decimal(keys.float("expert_weights_scale", 1.0)) or 1.0,  # 0: none
        "mup_enabled": True,  # as in llama.cpp
    }
    kinds = windows(keys, keys.int("attention.sliding_window", high=2**31), 4)
    return config | mixed | more | kinds | named("AfmoeForCausalLM", "afmoe")


def _ernie(file: GGUF, keys: Fields) -> dict[str, Any]:
    config = gated(file, keys, rotated="all") | {"use_bias": _has(file, "attn_q.bias")}
    if file.fields().str("general.architecture") == "paddleocr":
        return config | named("PaddleOCRForCausalLM", "paddleocr_vl_text")
    return config | named("Ernie4_5ForCausalLM", "ernie4_5")


def _ernie_moe(file: GGUF, keys: Fields) -> dict[str, Any]:
    config = gated(file, keys, rotated="all") | named("Ernie4_5_MoeForCausalLM", "ernie4_5_moe")
    step = keys.int("interleave_moe_layer_step", 1)
    mixed = experts(file, keys.changed(ONE_STEP), some=True)
    first, width = keys.int("leading_dense_block_count", 0, low=0), mixed["moe_intermediate_size"]
    sparse = [i for i in range(config["num_hidden_layers"]) if i not in mixed["mlp_only_layers"]]
    shared = f"blk.{sparse[0]}.ffn_down_shexp.weight"
    return config | {
        "moe_num_experts": mixed["num_experts"],
        "moe_k": mixed["num_experts_per_tok"],
        "moe_intermediate_size": width,
        "moe_num_shared_experts": file.entry(shared).shape[-1] // width if shared in file.tensors else 0,
        "moe_layer_start_index": first,
        "moe_layer_end_index": sparse[-1],
        "moe_layer_interval": step,
    }


def _exaone4(file: GGUF, keys: Fields) -> dict[str, Any]:
    window = keys.int("attention.sliding_window", 0, low=0, high=2**31)
    return gated(file, keys, rotated="all") | windows(keys, window, 4) | named("Exaone4ForCausalLM", "exaone4")


def _exaone_moe(file: GGUF, keys: Fields) -> dict[str, Any]:
    keys = without_draft_layers(file, keys)
    if keys.int("expert_gating_func", SIGMOID, low=0) not in (0, SIGMOID):  # 0: not specified
        raise keys.error("expert_gating_func", str(SIGMOID))
    keys.int("attention.sliding_window", high=2**31)
    config, mixed = _exaone4(file, keys), mixture(file, keys, keys.int("block_count", high=2**14))
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    mixed = {names.get(name, name): value for name, value in mixed.items()}
    return config | mixed | named("ExaoneMoeForCausalLM", "exaone_moe")


def _llama4(file: GGUF, keys: Fields) -> dict[str, Any]:
    """Chunks and positions without rotation are those of llama.cpp, which files do not give."""
    config, window = gated(file, keys, rotated="all"), keys.int("attention.sliding_window", CHUNK, low=0)
    if window not in (0, CHUNK):
        raise keys.error("attention.sliding_window", f"0 or {CHUNK}")
    layers, sparse = [*range(config["num_hidden_layers"])], list[int]()
    if keys.config.get("expert_count"):
        mixed = experts(file, keys.changed(ONE_STEP), scores=SIGMOID, some=True)
        sparse = [i for i in layers if i not in mixed["mlp_only_layers"]]
        sizes = {"intermediate_size": mixed["moe_intermediate_size"], "num_local_experts": mixed["num_experts"]}
        config |= {"intermediate_size_mlp": config["intermediate_size"], **sizes}
        config["num_experts_per_tok"] = mixed["num_experts_per_tok"]
    else:
        config["intermediate_size_mlp"] = config["intermediate_size"]
    more = {"moe_layers": sparse, "use_qk_norm": keys.int("expert_count", 0, low=0) != 128}
    more["attention_bias"] = _has(file, "attn_q.bias")
    if not window:
        more |= {"no_rope_layers": [1] * len(layers), "layer_types": [FULL] * len(layers)}
    return config | more | named("Llama4ForCausalLM", "llama4_text")


def _dbrx(file: GGUF, keys: Fields) -> dict[str, Any]:
    c, mixed = _with_layer_norms(file, keys, "all", "norm_eps"), experts(file, keys)
    if c["norm_eps"] != 1e-5:
        raise keys.error(LAYER_NORM, "1e-5")
    return named("DbrxForCausalLM", "dbrx") | {
        "d_model": c["hidden_size"],
        "n_heads": c["num_attention_heads"],
        "n_layers": c["num_hidden_layers"],
        "max_seq_len": c["max_position_embeddings"],
        "rope_theta": c["rope_theta"],
        "rope_scaling": c["rope_scaling"],
        "attn_config": {
            "kv_n_heads": c["num_key_value_heads"],
            "clip_qkv": _clip(keys),
        },
        "ffn_config": {
            "ffn_hidden_size": mixed["moe_intermediate_size"],
            "moe_num_experts": mixed["num_experts"],
            "moe_top_k": mixed["num_experts_per_tok"],
        },
    }


def _olmo(file: GGUF, keys: Fields) -> dict[str, Any]:
    config = _with_layer_norms(file, keys, "all", "norm_eps")
    if config.pop("norm_eps") != 1e-5:
        raise keys.error(LAYER_NORM, "1e-5")
    return config | {"hidden_act": "silu", "clip_qkv": _clip(keys)} | named("OlmoForCausalLM", "olmo")


def _jais2(file: GGUF, keys: Fields) -> dict[str, Any]:
    more = {"hidden_act": "relu2", "attention_bias": _has(file, "attn_q.bias"), "mlp_bias": _has(file, "ffn_up.bias")}
    return _with_layer_norms(file, keys, "all", "layer_norm_eps") | more | named("Jais2ForCausalLM", "jais2")


def _seed_oss(file: GGUF, keys: Fields) -> dict[str, Any]:
    biases = {
        name: _has(file, f"{part}.bias")
        for name, part in (("attention_bias", "attn_q"), ("attention_out_bias", "attn_output"), ("mlp_bias", "ffn_up"))
    }
    return gated(file, keys, rotated="all") | biases | named("SeedOssForCausalLM", "seed_oss")


def _arcee(file: GGUF, keys: Fields) -> dict[str, Any]:
    more = {"hidden_act": "relu2", "attention_bias": _has(file, "attn_q.bias"), "mlp_bias": _has(file, "ffn_up.bias")}
    return gated(file, keys, rotated="all") | more | named("ArceeForCausalLM", "arcee")


def _apertus(file: GGUF, keys: Fields) -> dict[str, Any]:
    config = gated(file, keys, rotated="all")
    for name in CURVE:
        curve_of(file, name, config["num_hidden_layers"])
    rope = (config.pop("rope_scaling") or {"rope_type": "default"}) | {"rope_theta": config.pop("rope_theta")}
    more = {"hidden_act": XIELU, "rope_parameters": rope, "attention_bias": _has(file, "attn_q.bias")}
    return config | more | named("ApertusForCausalLM", "apertus")


def curve_of(file: GGUF, name: str, layers: int) -> list[float]:
    """Return one of the activation's parameters for each layer, which checkpoints store as tensors. Their keys do not
    begin with the architecture."""
    keys, key = file.fields(), f"xielu.{name}"
    value = keys.config.get(key)
    values = value if isinstance(value, list) else [value] * layers
    if len(values) != layers:
        raise keys.error(key, f"a number, or {layers} of them")
    return [Fields({key: value}, keys.file, keys.prefix).float(key) for value in values]


def _nemotron(file: GGUF, keys: Fields) -> dict[str, Any]:
    more = {"hidden_act": "relu2", "attention_bias": _has(file, "attn_q.bias"), "mlp_bias": _has(file, "ffn_up.bias")}
    return _with_layer_norms(file, keys, "some", "norm_eps") | more | named("NemotronForCausalLM", "nemotron")


def _starcoder2(file: GGUF, keys: Fields) -> dict[str, Any]:
    window = keys.int("attention.sliding_window", 0, low=0, high=2**31) or None
    more = {"use_bias": _has(file, "attn_q.bias"), "sliding_window": window, "hidden_act": "gelu_pytorch_tanh"}
    return _with_layer_norms(file, keys, "all", "norm_epsilon") | more | named("Starcoder2ForCausalLM", "starcoder2")


def _cohere(file: GGUF, keys: Fields) -> dict[str, Any]:
    config = _with_layer_norms(file, keys, "all", "layer_norm_eps") | {"hidden_act": "silu"}
    config |= {"logit_scale": decimal(keys.float("logit_scale")), "attention_bias": _has(file, "attn_q.bias")}
    if file.fields().str("general.architecture") == "command-r":
        return config | {"use_qk_norm": _has(file, "attn_q_norm.weight")} | named("CohereForCausalLM", "cohere")
    kinds = windows(keys, keys.int("attention.sliding_window", high=2**31), 4)
    return config | kinds | named("Cohere2ForCausalLM", "cohere2")


def _gptneox(file: GGUF, keys: Fields) -> dict[str, Any]:
    config = _with_layer_norms(file, keys, "some", "layer_norm_eps") | named("GPTNeoXForCausalLM", "gpt_neox")
    return config | {
        "rotary_emb_base": config.pop("rope_theta"),
        "rotary_pct": config.pop("partial_rotary_factor"),
        "hidden_act": "gelu",  # the file does not say
        "attention_bias": _has(file, "attn_qkv.bias"),
        "use_parallel_residual": keys.bool("use_parallel_residual", default=True),
    }


def _falcon(file: GGUF, keys: Fields) -> dict[str, Any]:
    config = _with_layer_norms(file, keys, "all", "layer_norm_epsilon") | named("FalconForCausalLM", "falcon")
    heads, width, two = config["num_attention_heads"], config["hidden_size"], _has(file, "attn_norm_2.weight")
    if two:  # this is the norm of attention; the other one is that of the MLP
        for end in ("weight", "bias"):
            for i in range(config["num_hidden_layers"]):
                for old, new in (("attn_norm", "ffn_norm"), ("attn_norm_2", "attn_norm")):
                    file.tensors[f"blk.{i}.{new}.{end}"] = file.entry(f"blk.{i}.{old}.{end}")
                    del file.tensors[f"blk.{i}.{old}.{end}"]
    shared = (file.entry("blk.0.attn_qkv.weight").shape[0] * heads // width - heads) // 2  # regardless of the key
    new = two or 1 < shared < heads
    return config | {
        "alibi": False,
        "activation": "gelu",
        "bias": _has(file, "attn_qkv.bias"),
        "ffn_hidden_size": mlp_width(file, keys),
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": 2 if two else 1,
        "num_kv_heads": shared,
        "multi_query": shared == 1,
    }


def _bloom(file: GGUF, keys: Fields) -> dict[str, Any]:
    return named("BloomForCausalLM", "bloom") | {
        "hidden_size": keys.int("embedding_length"),
        "num_hidden_layers": keys.int("block_count", high=2**14),
        "num_attention_heads": keys.int("attention.head_count", high=2**14),
        "n_inner": mlp_width(file, keys),
        "seq_length": keys.int("context_length", high=2**24),
        "layer_norm_epsilon": epsilon(keys, LAYER_NORM),
    }


def _clip(keys: Fields) -> float | None:
    return decimal(keys.float(CLIP, 0.0, low=0.0)) or None


def _mpt(file: GGUF, keys: Fields) -> dict[str, Any]:
    width, most = keys.int("embedding_length"), "attention.max_alibi_bias"
    ratio, rest = divmod(mlp_width(file, keys), width)
    if rest:
        raise keys.error("feed_forward_length", f"a multiple of embedding_length {width}")
    if (steepest := keys.float(most, low=0.0, high=1024.0)) < 1 or steepest % 1:
        raise keys.error(most, "a whole number from 1 on: models without ALiBi are not supported")
    attention = {"alibi_bias_max": int(steepest), "clip_qkv": _clip(keys)}
    return named("MptForCausalLM", "mpt") | {
        "d_model": width,
        "n_layers": keys.int("block_count", high=2**14),
        "n_heads": keys.int("attention.head_count", high=2**14),
        "expansion_ratio": ratio,
        "max_seq_len": keys.int("context_length", high=2**24),
        "layer_norm_epsilon": epsilon(keys, LAYER_NORM),
        "attn_config": attention,
    }


def _starcoder(file: GGUF, keys: Fields) -> dict[str, Any]:
    heads = keys.int("attention.head_count", high=2**14)
    keys.int("attention.head_count_kv", high=1)
    return named("GPTBigCodeForCausalLM", "gpt_bigcode") | {
        "n_embd": keys.int("embedding_length"),
        "n_layer": keys.int("block_count", high=2**14),
        "n_head": heads,
        "n_positions": file.entry("position_embd.weight").shape[0],
        "n_inner": file.entry("blk.0.ffn_up.weight").shape[0],
        "multi_query": True,
        "activation_function": "gelu_pytorch_tanh",
        "layer_norm_epsilon": epsilon(keys, LAYER_NORM),
    }


LATER: dict[str, Callable[[GGUF, Fields], dict[str, Any]]] = {
    **dict.fromkeys(("chatglm", "glm4"), _glm),
    "glm4moe": _glm4moe,
    "bailingmoe2": _bailing,
    "dots1": _dots1,
    "minimax-m2": _minimax,
    "afmoe": _afmoe,
    "hy_v3": _hy3,
    **dict.fromkeys(("ernie4_5", "paddleocr"), _ernie),
    "ernie4_5-moe": _ernie_moe,
    "exaone4": _exaone4,
    "exaone-moe": _exaone_moe,
    "llama4": _llama4,
    "dbrx": _dbrx,
    "olmo": _olmo,
    "jais2": _jais2,
    "seed_oss": _seed_oss,
    "arcee": _arcee,
    "apertus": _apertus,
    "nemotron": _nemotron,
    "starcoder2": _starcoder2,
    **dict.fromkeys(("command-r", "cohere2"), _cohere),
    "gptneox": _gptneox,
    "falcon": _falcon,
    "bloom": _bloom,
    "mpt": _mpt,
    "starcoder": _starcoder,
}
LATER_READ = {  # see `models.gguf.architectures.READ`
    **dict.fromkeys(("glm4moe", "dots1", "minimax-m2", "afmoe", "ernie4_5-moe", "exaone-moe"), ("expert_count",)),
    **dict.fromkeys(("bailingmoe2", "hy_v3"), ("expert_count",)),
    **dict.fromkeys(("command-r", "cohere2"), ("logit_scale",)),
    "gptneox": ("use_parallel_residual",),
    "llama4": ("expert_count",),
    "dbrx": ("expert_count", CLIP),
    "olmo": (CLIP,),
    "mpt": (CLIP, "attention.max_alibi_bias"),
}

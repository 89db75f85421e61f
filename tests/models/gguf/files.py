"""GGUF files of golden checkpoints, written as llama.cpp's convert_hf_to_gguf.py writes them, by the `gguf` package."""

import itertools
import json
import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from models import FAMILIES
from models.checkpoint.fields import Fields
from models.checkpoint.listing import WEIGHTS
from models.checkpoint.tensor_files import write_tensors
from models.families.laguna import ROPES
from models.gguf.architectures import CAPS, GRANITE, INTERLEAVED
from models.gguf.rotary import FACTORS
from models.gguf.tensors import PLUS_ONE

gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install gguf")
ARCHITECTURES = {
    **{"llama": "llama", "mistral": "llama", "ministral3": "mistral3", "phi": "phi2", "phi3": "phi3"},
    **{
        name: name
        for name in ("gemma", "gemma2", "gpt2", "granite", "lfm2", "olmo2", "qwen2", "qwen3", "smollm3", "stablelm")
    },
    **{"gemma3_text": "gemma3", "gemma3n_text": "gemma3n", "gemma4_text": "gemma4"},
    **{"hunyuan_v1_dense": "hunyuan-dense", "olmo3": "olmo2"},
    **{"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe", "mixtral": "llama"},
    **{"qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"},
    **{
        "granitemoe": "granitemoe",
        "granitemoeshared": "granitemoe",
        "granitemoehybrid": "granitehybrid",
        "lfm2_moe": "lfm2moe",
        "gpt_oss": "gpt-oss",
        **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), "deepseek2"),
        "mistral4": "mistral4",
        **{"olmo": "olmo", "jais2": "jais2", "minicpm3": "minicpm3"},
        **{"exaone_moe": "exaone-moe", "hunyuan_v1_moe": "hunyuan-moe"},
    },
    **{name: name for name in ("glm4", "dots1", "afmoe", "ernie4_5", "exaone4", "seed_oss", "arcee", "nemotron")},
    **{"apertus": "apertus", "internlm3": "llama", "nemotron_h": "nemotron_h", "falcon_h1": "falcon-h1"},
    **{"mamba": "mamba", "falcon_mamba": "mamba", "jamba": "jamba", "mamba2": "mamba2"},
    **{"glm": "chatglm", "glm4_moe": "glm4moe", "solar_open": "glm4moe", "minimax_m2": "minimax-m2"},
    **{"ernie4_5_moe": "ernie4_5-moe", "starcoder2": "starcoder2", "cohere": "command-r", "cohere2": "cohere2"},
    **{"gpt_neox": "gptneox", "falcon": "falcon", "gpt_bigcode": "starcoder", "llama4_text": "llama4", "dbrx": "dbrx"},
    **{"bloom": "bloom", "mpt": "mpt", "minicpm": "minicpm", "exaone": "exaone", "internlm2": "internlm2"},
    "bailing_moe": "bailingmoe2",
    **{"laguna": "laguna", "mellum": "mellum", "cohere2_moe": "cohere2moe", "muse_glimmer_text": "muse-glimmer"},
    **{"hy_v3": "hy_v3", "bitnet": "bitnet-b1.58", "granite_swa": "granite_swa", "granitemoe_swa": "granite_swa"},
    **{"glm4v_text": "glm4", "glm4v_moe_text": "glm4moe", "paddleocr_vl": "paddleocr"},
}
# Architectures that the package does not have yet, and those that name their tensors alike.
LIKE = {"laguna": "step35", "mellum": "qwen3moe", "cohere2moe": "cohere2", "muse-glimmer": "afmoe", "hy_v3": "dots1"}
LIKE |= dict.fromkeys(("bitnet-25", "bitnet-b1.58"), "bitnet") | {"granite_swa": "granitehybrid"}
PACKAGE_NAMES = {  # parts of names in checkpoints, and what the package has for them
    **{".language_model.": ".", "self_attn.g_proj": "self_attn.gate_proj"},
    **{"attn_sub_norm": "inner_attn_ln", "ffn_sub_norm": "ffn_layernorm"},
}
DEFAULTS = {  # of fields that these configurations lack, by model_type
    "laguna": {"rope_parameters": ROPES},
    "granite_swa": {"attention_multiplier": 1.0},
    "paddleocr_vl": {"max_position_embeddings": 131072, "rope_theta": 500000.0},
}
MAMBA = {"conv_kernel": 4, "state_size": 16, "expand": 2, "time_step_rank": "auto"}  # fields that may be absent
JAMBA = {"attn_layer_period": 8, "attn_layer_offset": 4, "mamba_dt_rank": "auto"}
GOLDEN = Path(__file__).parents[2] / "golden"
WIDE = {"vocab_size": 104, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
WIDE |= {"moe_shared_expert_intermediate_size": 256, "mamba_num_heads": 8, "mamba_head_dim": 32}
WIDE |= {"n_embd": 256, "n_inner": 512, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512}
PARTS = {  # of mixtures of experts, by the ends of their names in transformers
    **{f"{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},  # of layers without them
    "gate.weight": "ffn_gate_inp.weight",
    "router.weight": "ffn_gate_inp.weight",
    "router.bias": "ffn_gate_inp.bias",
    "gate.bias": "ffn_gate_inp.bias",
    "expert_bias": "exp_probs_b.bias",
    "experts.down_proj": "ffn_down_exps.weight",
    "experts.up_proj": "ffn_up_exps.weight",
    **dict.fromkeys(
        (f"{own}e_score_correction_bias" for own in ("", "gate.", "gate.moe_statics.", "experts.")), "exp_probs_b.bias"
    ),
    "gate.expert_bias": "exp_probs_b.bias",
    **dict.fromkeys(("router.gate.weight", "gate.wg.weight"), "ffn_gate_inp.weight"),
    **{f"shared_mlp.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
    **{f"shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
    "shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    **{f"shared_expert.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
}
GEMMA4 = {  # those that the package has no names for, by the ends of their names in transformers
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
}
SHARES = {
    **dict.fromkeys(("phi2", "chatglm", "glm4", "glm4moe", "nemotron"), 0.5),
    "gptneox": 0.25,
    **dict.fromkeys(("stablelm", "qwen3next", "qwen35", "qwen35moe"), 0.25),
}  # of heads, rotated
EPSILONS = {  # of LayerNorms
    **dict.fromkeys(("phi2", "stablelm", "command-r", "cohere2", "gptneox", "jais2", "olmo"), "layer_norm_eps"),
    **dict.fromkeys(("dbrx", "cohere2moe"), "layer_norm_eps"),
    **{"nemotron": "norm_eps", "starcoder2": "norm_epsilon", "falcon": "layer_norm_epsilon"},
}
MUSE_NORM = "muse-glimmer", "model.norm.weight"
F32, CONTROL, NORMAL = gguf.GGMLQuantizationType.F32, 3, 1
APART = 1000  # `kernels.linear.blocks.Block.number` of a second form of a number


def make_known(name, number, size, octets):
    """Add a format that the package does not have."""
    types = gguf.GGMLQuantizationType
    if name not in types.__members__:
        made = int.__new__(types, number)
        made._name_, made._value_ = name, number
        types._member_map_[name] = types._value2member_map_[number] = made
        gguf.GGML_QUANT_SIZES[made] = size, octets
    return types[name]


class Signs(getattr(gguf.quants, "__Quant"), qtype=make_known("Q1_0", 41, 128, 18)):
    @classmethod
    def dequantize_blocks(cls, blocks):
        scale = blocks[:, :2].view(np.float16).astype(np.float32)
        return np.where(np.unpackbits(blocks[:, 2:], axis=1, bitorder="little"), scale, -scale)


class FourNumbers(getattr(gguf.quants, "__Quant"), qtype=make_known("Q2_0", 42, 64, 18)):
    @classmethod
    def dequantize_blocks(cls, blocks):
        fields = (blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(len(blocks), -1)
        return blocks[:, :2].view(np.float16).astype(np.float32) * (fields.astype(np.float32) - 1)


class WideFourNumbers(FourNumbers, qtype=make_known("Q2_0_G128", APART + 42, 128, 34)):
    pass


def permute(x, heads):
    """Rows of queries or keys to the order of interleaved rotation."""
    return x.reshape(heads, 2, len(x) // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def halved(x, heads, rotated):
    """Rows of queries or keys whose first ones in each head go from pairs to halves, as files of GLM-4.1V have them."""
    rows = x.reshape(heads, -1, *x.shape[1:])
    return np.concatenate([rows[:, :rotated:2], rows[:, 1:rotated:2], rows[:, rotated:]], 1).reshape(x.shape)


HALVES = {  # where a block has its float16 scales and minimums
    **dict.fromkeys(("Q1_0", "Q2_0", "Q2_0_G128", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q6_K": (208,),
        "TQ1_0": (52,),
        "TQ2_0": (64,),
        "IQ1_M": (48,),
        "MXFP4": (),
        "NVFP4": (),
    },
}


def put_scale(data, format, place, values):
    """Write a scale or minimum of blocks, uint8 [..., bytes]; of IQ1_M a quarter lies in each of four words."""
    octets = values.astype(np.float16)[..., None].view(np.uint8)
    if format == "IQ1_M":
        quarters = np.stack([octets & 15, octets >> 4], -1).reshape(*octets.shape[:-1], 4)
        data[..., 49::2] = data[..., 49::2] & 15 | quarters << 4
    else:
        data[..., place : place + 2] = octets


def blocks(shape, format, seed, std=0.05):
    """Random blocks of a format that the package cannot quantise to, of values of about this deviation."""
    draw, (size, octets) = np.random.default_rng(seed), gguf.GGML_QUANT_SIZES[format]
    data = draw.integers(0, 256, (math.prod(shape) // size, octets), dtype=np.uint8)
    if format.name == "NVFP4":
        data[:, :4] = draw.integers(4, 13, (len(data), 4))  # of scales around 2^-7
    factors = draw.uniform(0.5, 1.5, (len(HALVES[format.name]), len(data)))

    def scaled(by):
        for at, of in zip(HALVES[format.name], factors, strict=True):
            put_scale(data, format.name, at, of * by)
        return gguf.quants.dequantize(data, format)

    scaled(std / scaled(1.0).std())
    return data.reshape(*shape[:-1], -1)


def stored(name, values, format):
    """A tensor as a file holds it in a format."""
    try:
        return gguf.quants.quantize(values, format)
    except NotImplementedError:
        return blocks(values.shape, format, sum(name.encode()), values.std().item())


def decays(x):
    """Return decays as the converter computes them; numpy's exponentials differ in the last bit."""
    return -torch.from_numpy(x).exp().numpy()


class File:
    """A file to write: its metadata and tensors may be changed before `write`.

    Args:
        folder: a checkpoint.
        format: of matrices; vectors are float32.
        formats: of some tensors, by their names in the file.
        split: of a latent: there is a matrix of keys and one of values; older files have both in one.
    """

    def __init__(self, folder, format=F32, formats=None, split=True):
        self.split, self.folder, self.format, self.formats = split, folder, format, formats or {}
        self.config = json.loads((folder / "config.json").read_text())
        self.config = self.config.get("text_config", self.config)
        if self.config["model_type"] in DEFAULTS:
            self.config = DEFAULTS[self.config["model_type"]] | self.config
        if "layers_block_type" in self.config:
            self.config["num_hidden_layers"] = len(self.config["layers_block_type"])
        if self.config["model_type"] == "dbrx":
            attention, mlp = self.config["attn_config"], self.config["ffn_config"]
            own = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
            self.config |= {name: self.config[key] for name, key in own.items()}
            self.config |= {"max_position_embeddings": self.config["max_seq_len"], "clip_qkv": attention["clip_qkv"]}
            self.config |= {"num_key_value_heads": attention["kv_n_heads"], "num_experts": mlp["moe_num_experts"]}
            self.config |= {"num_experts_per_tok": mlp["moe_top_k"], "rope_theta": attention["rope_theta"]}
        if "num_layers" in self.config:
            self.config |= {"num_hidden_layers": self.config["num_layers"]}
            self.config |= {"rms_norm_eps": self.config.get("layer_norm_epsilon", 1e-5)}
        if self.config["model_type"] == "minicpm":
            c, layers = self.config, self.config["num_hidden_layers"]
            depth = layers**0.5 if c["scale_depth"] is None else c["scale_depth"]
            c |= {"embedding_multiplier": c["scale_emb"], "residual_multiplier": depth * layers**-0.5}
            c |= {"logits_scaling": c["hidden_size"] / (c["dim_model_base"] or c["hidden_size"])}
        self.rope = {key: self.config[key] for key in ("rope_theta", "partial_rotary_factor") if key in self.config}
        found = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        self.rope |= found.get("full_attention", found)
        self.local = found.get("sliding_attention", {}).get("rope_theta", self.config.get("rope_local_base_freq"))
        self.arch = ARCHITECTURES[self.config["model_type"]]
        if self.arch == "nemotron_h" and "moe_intermediate_size" in self.config:
            self.arch = "nemotron_h_moe"
        self.tensors, self.types, self.curves = {}, {}, {}
        self.raw_shapes = {}  # bytes of rows, of tensors that have more bytes
        self._tensors()
        self.keys = {f"{self.arch}.{key}": value for key, value in self._keys() if value is not None}
        # These keys do not begin with the architecture.
        self.keys |= {key: [values[i] for i in sorted(values)] for key, values in self.curves.items()}
        self.keys |= self.vocabulary()

    def _tensors(self):
        c = self.config
        heads = next((c[name] for name in ("num_attention_heads", "n_head", "n_heads") if name in c), 1)  # scans: none
        layers = next(c[name] for name in ("num_hidden_layers", "n_layer", "n_layers") if name in c)
        kinds = {text: kind for kind, text in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(kinds[LIKE.get(self.arch, self.arch)], layers)
        own = {}  # matrices of experts, and norms of heads, that have one each
        for name, tensor in load_file(self.folder / "model.safetensors").items():
            values = tensor.float().numpy()
            for one, other in PACKAGE_NAMES.items():
                name = name.replace(one, other)
            if ".vision_" in name or ".visual." in name:
                continue
            if ".linear_attn." in name:
                self._delta_net(*name.removeprefix("model.layers.").split(".linear_attn."), values)
                continue
            if part := re.search(r"\.(mamba|mixer)\.(conv1d|A_log)", name) if self.arch in ("mamba", "jamba") else None:
                values = values.squeeze(1) if part[2] == "conv1d" and values.ndim == 3 else values
                values = decays(values) if part[2] == "A_log" else values
            if self.arch.startswith("nemotron_h"):
                name = name.replace("model.", "backbone.")
            if self.arch == "bloom":
                name = name.removeprefix("transformer.")
            if self.arch == "falcon-h1":
                values = self._multiplied(name.split(".")[-2], values)
            if self.arch.startswith(("granite", "nemotron_h", "falcon-h1", "mamba2")) and (
                part := re.search(r"layers\.(\d+)\.(mamba|mixer|shared_mlp)\.(?!._proj|up|down|gate|exp|sh)(.+)", name)
            ):
                self._granite4(*part.groups(), values)
                continue
            if self.arch == "gemma4" and (
                part := re.search(r"layers\.(\d+)\.((?:experts|router)\..+|layer_scalar)", name)
            ):
                if one := re.fullmatch(r"experts\.(\d+)\.(\w+)_proj\.weight", part[2]):
                    own.setdefault(f"blk.{part[1]}.ffn_{one[2]}_exps.weight", {})[int(one[1])] = values
                    continue
                name, matrix = GEMMA4[part[2]], "proj" in part[2] and "router" not in part[2]
                self.add(f"blk.{part[1]}.{name}", values, self.format if matrix else F32)
                continue
            if stream := re.fullmatch(r"model\.altup_(unemb)?(?:ed_)?projections\.(\d)\.weight", name):
                own.setdefault(f"altup_{'unembd_' if stream[1] else ''}proj.weight", {})[int(stream[2])] = values
                continue
            name += ".weight" if name.endswith("altup.correct_output_scale") else ""
            if curve := re.fullmatch(r".+\.(\d+)\.mlp\.act_fn\.(\w+)", name):
                self.curves.setdefault(f"xielu.{curve[2]}", {})[int(curve[1])] = values.item()
                continue
            if self.arch in PLUS_ONE and name.endswith("norm.weight") and (self.arch, name) != MUSE_NORM:
                values = values + 1
            mixed = re.fullmatch(r"\w+\.layers\.(\d+)\.(?:mlp|mixer|feed_forward|block_sparse_moe)\.(.+)", name)
            if mixed and self.arch == "gpt-oss" and "." not in mixed[2].removeprefix("experts."):
                self._in_turns(f"blk.{mixed[1]}.ffn_", mixed[2], values)
                continue
            if self.arch == "llama4" and mixed and mixed[2].startswith("experts.") and values.ndim == 3:
                values = values.swapaxes(1, 2)
            if self.arch == "dbrx" and ".experts.mlp." in name:
                values = values.reshape(c["num_experts"], -1, values.shape[1])
                values = values.swapaxes(1, 2) if name.endswith("w2") else values
                self.add(names.get_name(name) + ".weight", values, self.format)
                continue
            if mixed and mixed[2] == "experts.gate_up_proj" and self.arch == "granite_swa":
                self.add(f"blk.{mixed[1]}.ffn_gate_up_exps.weight", values, self.format)
                continue
            if mixed and mixed[2] == "experts.gate_up_proj":
                for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                    self.add(f"blk.{mixed[1]}.ffn_{part}_exps.weight", half, self.format)
                continue
            if mixed and (one := re.fullmatch(r"experts\.(\d+)\.(\w+)_proj\.(weight|bias)", mixed[2])):
                own.setdefault(f"blk.{mixed[1]}.ffn_{one[2]}_exps.{one[3]}", {})[int(one[1])] = values
                continue
            if mixed and mixed[2] in PARTS and c.keys() & {"num_experts_per_tok", "moe_k", "moe_topk"}:
                format = F32 if values.ndim == 1 or re.search("gate_inp|bias", PARTS[mixed[2]]) else self.format
                self.add(f"blk.{mixed[1]}.{PARTS[mixed[2]]}", values, format)
                continue
            if norm := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.([qk])_layernorm\.norms\.(\d+)\.weight", name):
                own.setdefault(f"blk.{norm[1]}.attn_{norm[2]}_norm.weight", {})[int(norm[3])] = values
                continue
            if self.arch in ("deepseek2", "mistral4") and name.endswith("kv_b_proj.weight") and self.split:
                layer, plain = name.split(".")[2], c["qk_nope_head_dim"]
                both = values.reshape(heads, plain + c["v_head_dim"], -1)
                for key, x in (("k", both[:, :plain].swapaxes(1, 2)), ("v", both[:, plain:])):
                    format = self.format if x.shape[-1] % gguf.GGML_QUANT_SIZES[self.format][0] == 0 else F32
                    self.add(f"blk.{layer}.attn_{key}_b.weight", x, format)
                continue
            if ".conv.conv." in name:
                values = values.squeeze(1)
            if self.arch == "granite_swa" and name.endswith(".sinks"):
                self.add(f"blk.{name.split('.')[2]}.attn_sinks.weight", values)
                continue
            if c["model_type"] == "glm4v_text" and (part := re.search(r"\.([qk])_proj\.", name)):
                rotated = int(self.head_dim * self.rope.get("partial_rotary_factor", 0.5))
                values = halved(values, heads if part[1] == "q" else c["num_key_value_heads"], rotated)
            if self.arch == "internlm2" and name.endswith("wqkv.weight"):
                size, layer = self.head_dim, name.split(".")[2]
                q, k, v = np.split(self._one_after_the_other(values, heads), [size * heads, -len(values) // 4])
                for part, x, n in (("q", q, heads), ("k", k, c["num_key_value_heads"]), ("v", v, None)):
                    self.add(f"blk.{layer}.attn_{part}.weight", permute(x, n) if n else x, self.format)
                continue
            if "query_key_value." in name and self.arch != "bailingmoe2":
                values = self._one_after_the_other(values, heads)
            if self.arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
                values = np.ascontiguousarray(values.T)
            if self.arch in INTERLEAVED and "q_proj" in name:
                values = permute(values, heads)
            if self.arch in INTERLEAVED and "k_proj" in name:
                values = permute(values, c.get("num_key_value_heads") or heads)
            key = names.get_name(name, try_suffixes=(".weight", ".bias"))
            key = "cls.output.weight" if name == "score.weight" else key
            bare = key.endswith((".weight", ".bias", ".ffn_norm", ".ssm_a", ".ssm_d"))
            bare = bare and not (key.endswith(".ffn_norm") and self.arch != "falcon-h1")  # as its converter has it
            key = key if bare else f"{key}.weight"  # sinks
            vector = values.ndim == 1 or key == "position_embd.weight" or "shortconv.conv" in key
            vector = vector or key.endswith((".ssm_a", ".ssm_conv1d.weight"))
            usual = F32 if vector else self.format
            if values.shape[-1] % gguf.GGML_QUANT_SIZES[usual][0]:  # as llama-quantize does
                usual = F32 if values.shape[-1] % 32 else gguf.GGMLQuantizationType.Q8_0
            self.add(key, values, usual)
        if self.arch == "muse-glimmer":  # norms of heads without weights, and a factor
            for i, (part, factor) in itertools.product(
                range(layers), {"q": c.get("qk_scale_factor", 3.87), "k": 1}.items()
            ):
                self.add(f"blk.{i}.attn_{part}_norm.weight", np.full(c["head_dim"], factor, np.float32))
        for name, matrices in own.items():
            format = self.format if name.endswith(("exps.weight", "proj.weight")) else F32
            self.add(name, np.stack([matrices[i] for i in range(len(matrices))]), format)
        if self.rope.get("rope_type") == "proportional":
            size = dict(self._keys())["attention.key_length"]
            turned = int(size * self.rope["partial_rotary_factor"] / 2)
            self.add(FACTORS[0], np.array([1.0] * turned + [1e30] * (size // 2 - turned), np.float32))
        if self.rope.get("rope_type") == "llama3":
            self.add(FACTORS[0], self._llama3())
        for name, key in zip(FACTORS[1:], ("long_factor", "short_factor"), strict=True):
            if key in self.rope:
                self.add(name, np.array(self.rope[key], np.float32))

    def _one_after_the_other(self, x, heads):
        """Queries, keys and values of groups: all queries first."""
        size = self.config.get("hidden_size", self.config.get("n_embed")) // heads
        shared = (len(x) // size - heads) // 2
        groups = x.reshape(shared, heads // shared + 2, size, *x.shape[1:])
        parts = groups[:, :-2], groups[:, -2], groups[:, -1]
        return np.concatenate([part.reshape(-1, *x.shape[1:]) for part in parts])

    def _mamba(self):
        c = {**MAMBA, **self.config}
        yield from (("block_count", c["num_hidden_layers"]), ("context_length", 2**20))
        yield from (("embedding_length", c["hidden_size"]), ("feed_forward_length", 0), ("attention.head_count", 0))
        yield "attention.layer_norm_rms_epsilon", c["layer_norm_epsilon"]
        if self.arch == "mamba2":
            yield from (("ssm.conv_kernel", c["conv_kernel"]), ("ssm.state_size", c["state_size"]))
            yield from (("ssm.group_count", c["n_groups"]), ("ssm.time_step_rank", c["num_heads"]))
            yield "ssm.inner_size", c["num_heads"] * c["head_dim"]
            return
        yield "ssm.dt_b_c_rms", c["model_type"] == "falcon_mamba"
        yield from self._scans(c["conv_kernel"], c["state_size"], c["expand"], c["time_step_rank"])

    def _scans(self, taps, states, expand, rank):
        width = self.config["hidden_size"]
        yield from (("ssm.conv_kernel", taps), ("ssm.state_size", states), ("ssm.inner_size", expand * width))
        yield "ssm.time_step_rank", -(-width // 16) if rank == "auto" else rank

    def _granite4(self, layer, module, part, x):
        """A tensor of a scan, or of the MLP that all tokens have."""
        c, matrix = self.config, part.endswith(("_proj.weight", "_linear.weight"))
        if module == "shared_mlp":
            end = "_shexp" if c["num_local_experts"] else ""
            names = ("gate", "up") if part == "input_linear.weight" else ("down",)
            names = ("up",) if self.arch == "granite_swa" and len(names) == 2 else names  # both in one
            found = {f"ffn_{n}{end}.weight": half for n, half in zip(names, np.split(x, len(names)), strict=True)}
        elif part == "A_log":
            found = {"ssm_a": decays(x)[:, None]}
        elif part == "norm.weight":
            found = {"ssm_norm.weight": x.reshape(c.get("mamba_n_groups", c.get("n_groups")), -1)}
        else:
            own = {"in_proj": "ssm_in", "out_proj": "ssm_out", "conv1d": "ssm_conv1d"}
            name = {"D": "ssm_d", "dt_bias": "ssm_dt.bias"}.get(part) or ".".join(
                (own[part.split(".")[0]], part.split(".")[1])
            )
            found = {name: x[:, None] if part == "D" else x.squeeze(1) if part == "conv1d.weight" else x}
        for name, values in found.items():
            format = self.format if matrix and values.shape[-1] % gguf.GGML_QUANT_SIZES[self.format][0] == 0 else F32
            key = f"blk.{layer}.{name}"
            self.add(key, values, format)

    def _multiplied(self, part, x):
        """A tensor of Falcon-H1 times the factors of its outputs."""
        c = self.config
        into, key, (gate, down) = c["attention_in_multiplier"], c["key_multiplier"], c["mlp_multipliers"]
        factors = {
            **{"q_proj": into, "k_proj": key * into, "v_proj": into, "o_proj": c["attention_out_multiplier"]},
            **{"gate_proj": gate, "down_proj": down, "out_proj": c["ssm_out_multiplier"]},
            **{"lm_head": c["lm_head_multiplier"], "embed_tokens": c["embedding_multiplier"]},
        }
        if part == "in_proj":
            keys = c["mamba_n_groups"] * c["mamba_d_state"]
            parts = np.split(x, np.cumsum([c["mamba_d_ssm"], c["mamba_d_ssm"], keys, keys]))
            each = [y * factor for y, factor in zip(parts, c["ssm_multipliers"], strict=True)]
            return np.concatenate(each) * c["ssm_in_multiplier"]
        return x * factors.get(part, 1.0)

    def _delta_net(self, layer, part, x):
        """A tensor of a gated delta net; heads of values go from [keys, of each] to [of each, keys]."""
        c, part = self.config, part.removesuffix(".weight")
        G, H, K, V = (c[f"linear_{n}"] for n in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
        if part == "in_proj_qkvz":
            q, k, v, z = np.split(x.reshape(G, -1, x.shape[1]), np.cumsum([K, K, H // G * V]), axis=1)
            qkv = np.concatenate([y.reshape(-1, x.shape[1]) for y in (q, k, v)])
            self.add(f"blk.{layer}.attn_qkv.weight", qkv, self.format)
            self.add(f"blk.{layer}.attn_gate.weight", z.reshape(-1, x.shape[1]), self.format)
            return
        if self.arch != "qwen3next" and part != "norm":
            axis, first = int(part == "out_proj"), 2 * G * K if part in ("in_proj_qkv", "conv1d") else 0
            size = 1 if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else V
            y = np.moveaxis(x, axis, 0)
            tail = y[first:].reshape(G, H // G, size, *y.shape[1:]).swapaxes(0, 1).reshape(-1, *y.shape[1:])
            x = np.moveaxis(np.concatenate([y[:first], tail]), 0, axis)
        own = {"in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate", "in_proj_a": "ssm_alpha", "in_proj_b": "ssm_beta",
               "in_proj_ba": "ssm_ba", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out"}  # fmt: skip
        if part in ("A_log", "dt_bias"):
            self.add(f"blk.{layer}.ssm_{'a' if part == 'A_log' else 'dt.bias'}", decays(x) if part == "A_log" else x)
            return
        x, key = x.squeeze(1) if part == "conv1d" else x, f"blk.{layer}.{own[part]}.weight"
        matrix = part in ("in_proj_qkv", "in_proj_z", "out_proj", "in_proj_a", "in_proj_b", "in_proj_ba")
        format = self.format if matrix else F32
        if x.shape[-1] % gguf.GGML_QUANT_SIZES[format][0]:
            format = gguf.GGMLQuantizationType.Q8_0
        self.add(key, x, format)

    def _in_turns(self, layer, name, values):
        """Tensors of all experts of a layer of gpt-oss, [in, out] with gates and ups in turns, and their biases."""
        part, bias = name.removeprefix("experts.").partition("_proj")[::2]
        values = values if bias else values.swapaxes(1, 2)
        halves = {"gate": values[:, ::2], "up": values[:, 1::2]} if part == "gate_up" else {part: values}
        for half, own in halves.items():
            self.add(f"{layer}{half}_exps.{'bias' if bias else 'weight'}", own, F32 if bias else self.format)

    def add(self, name, values, format=F32):
        """A tensor of floats, in a format, or in that of its name."""
        format = self.formats.get(name, format)
        self.tensors[name], self.types[name] = stored(name, np.ascontiguousarray(values), format), format

    def _llama3(self):
        r, factors = self.rope, []
        for freq in 1.0 / (r["rope_theta"] ** (torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim)):
            length, low, high = r["original_max_position_embeddings"], r["low_freq_factor"], r["high_freq_factor"]
            wave = 2 * math.pi / freq
            smooth = (length / wave - low) / (high - low)
            between = 1 / ((1 - smooth) / r["factor"] + smooth)
            factors.append(1 if wave < length / high else r["factor"] if wave > length / low else between)
        return np.array(factors, np.float32)

    @property
    def head_dim(self):
        return self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]

    def _keys(self):
        c, r = self.config, self.rope
        if self.arch in ("gpt2", "starcoder"):
            yield "attention.head_count_kv", 1 if c.get("multi_query") else None
            yield from (("block_count", c["n_layer"]), ("context_length", c["n_positions"]))
            yield from (("embedding_length", c["n_embd"]), ("feed_forward_length", 4 * c["n_embd"]))
            yield from (("attention.head_count", c["n_head"]),)
            yield "attention.layer_norm_epsilon", c.get("layer_norm_epsilon", 1e-5)
            return
        if self.arch in ("bloom", "mpt"):
            yield from self._alibi()
            return
        if self.arch in ("mamba", "mamba2"):
            yield from self._mamba()
            return
        if self.arch == "jamba":
            c = self.config = {**JAMBA, **c}
            attends = [i % c["attn_layer_period"] == c["attn_layer_offset"] for i in range(c["num_hidden_layers"])]
            c["layer_types"] = ["full_attention" if each else "mamba" for each in attends]
            yield from self._scans(c["mamba_d_conv"], c["mamba_d_state"], c["mamba_expand"], c["mamba_dt_rank"])
        whole = c["model_type"] == "solar_open"
        share = r.get("partial_rotary_factor", c.get("rotary_pct", 1.0 if whole else SHARES.get(self.arch, 1.0)))
        share = c["rotary_dim"] / self.head_dim if "rotary_dim" in c else share
        rotated = int(share * self.head_dim)
        yield from (("block_count", c["num_hidden_layers"]), ("context_length", c["max_position_embeddings"]))
        yield from (("embedding_length", c["hidden_size"]), ("feed_forward_length", c.get("intermediate_size")))
        yield "attention.head_count", c["num_attention_heads"]
        shared, types = (
            c.get("num_key_value_heads") or c["num_attention_heads"],
            c.get("layer_types") or c.get("layers_block_type", []),
        )
        without = [t in ("conv", "mamba") or (t == "linear_attention" and "mamba_n_heads" in c) for t in types]
        without = [kind != "full_attention" for kind in types] if self.arch.startswith("nemotron_h") else without
        yield "attention.head_count_kv", [0 if each else shared for each in without] if any(without) else shared
        yield "shortconv.l_cache", c.get("conv_L_cache")
        yield "attention.key_length", c.get("head_dim")
        yield "attention.value_length", c.get("head_dim")
        eps = None if "rms_norm_eps" in c else EPSILONS.get(self.arch)
        yield (
            "attention.layer_norm_rms_epsilon",
            None if eps else c.get("rms_norm_eps", c.get("norm_eps", 1e-6 if self.arch == "seed_oss" else 1e-5)),
        )
        if self.arch != "falcon-h1":  # which has factors of the same names in its matrices
            yield from ((key, c.get(word)) for word, key in GRANITE.items())
        yield "attention.layer_norm_epsilon", c.get(eps, 1e-5) if eps else None
        yield from (("logit_scale", c.get("logit_scale")), ("attention.clamp_kqv", c.get("clip_qkv")))
        yield "use_parallel_residual", c.get("use_parallel_residual")
        yield from ((key, c.get(key)) for key in CAPS)
        flags = [kind == "sliding_attention" for kind in types] or c.get("sliding_window_pattern")
        yield from (("attention.sliding_window_pattern", flags), ("rope.freq_base_swa", self.local))
        window = c.get("sliding_window") if c.get("use_sliding_window", True) else None
        yield "attention.sliding_window", (window or 0) if self.arch == "phi3" else window
        yield from (("rope.dimension_count", rotated), ("rope.freq_base", r.get("rope_theta", 10000.0)))
        if sections := r.get("mrope_section"):
            yield "rope.dimension_sections", [*sections, 0, 0][:4]
        if r.get("rope_type") in ("linear", "yarn"):
            yield from (("rope.scaling.type", r["rope_type"]), ("rope.scaling.factor", r["factor"]))
        if "long_factor" in r:
            length = c.get("original_max_position_embeddings", r.get("original_max_position_embeddings"))
            scale = c["max_position_embeddings"] / length
            yield "rope.scaling.original_context_length", length
            yield "rope.scaling.attn_factor", math.sqrt(1 + math.log(scale) / math.log(length))
        elif r.get("rope_type") == "yarn":
            yield "rope.scaling.original_context_length", r["original_max_position_embeddings"]
            yield "rope.scaling.yarn_attn_factor", r.get("attention_factor")
        counts = (c[name] for name in ("num_experts", "num_local_experts", "moe_num_experts") if name in c)
        yield "expert_count", next(counts, None)
        yield "expert_used_count", c.get("num_experts_per_tok", c.get("moe_k"))
        yield "interleave_moe_layer_step", c.get("moe_layer_interval", c.get("interleave_moe_layer_step"))
        yield "attention.clamp_kqv", c.get("clip_qkv")
        if self.arch == "llama4" and "chunked_attention" not in types and types:
            yield "attention.sliding_window", 0
        yield "expert_shared_feed_forward_length", c.get("shared_expert_intermediate_size")
        yield "expert_weights_norm", c.get("norm_topk_prob")
        yield "expert_weights_scale", c.get("routed_scaling_factor")
        if self.arch in ("qwen3next", "qwen35", "qwen35moe"):
            yield "rope.dimension_sections", [11, 11, 10, 0]
            yield "attention.recurrent_layers", [kind == "linear_attention" for kind in types] or None
            yield "full_attention_interval", c.get("full_attention_interval")
            yield "ssm.conv_kernel", c.get("linear_conv_kernel_dim")
            yield "ssm.state_size", c.get("linear_key_head_dim")
            yield "ssm.group_count", c.get("linear_num_key_heads")
            yield "ssm.time_step_rank", c.get("linear_num_value_heads")
            yield "ssm.inner_size", c.get("linear_num_value_heads", 0) * c.get("linear_value_head_dim", 0) or None
        if self.arch in ("granitemoe", "granitehybrid"):
            yield "expert_shared_feed_forward_length", c.get("shared_intermediate_size")
        if self.arch == "granitehybrid":
            yield "rope.scaling.finetuned", c.get("position_embedding_type") == "rope"
        if self.arch in ("granitehybrid", "falcon-h1"):
            yield "ssm.conv_kernel", c["mamba_d_conv"]
            yield "ssm.state_size", c["mamba_d_state"]
            yield "ssm.group_count", c["mamba_n_groups"]
            yield "ssm.time_step_rank", c["mamba_n_heads"]
            yield "ssm.inner_size", c.get("mamba_d_ssm") or c["mamba_expand"] * c["hidden_size"]
        if self.arch.startswith("nemotron_h"):
            yield "feed_forward_length", [c["intermediate_size"] if kind in ("mlp", "moe") else 0 for kind in types]
            yield "expert_shared_feed_forward_length", c.get("moe_shared_expert_intermediate_size")
            yield "expert_count", c.get("n_routed_experts")
            yield "expert_group_count", c.get("n_group")
            yield "attention.layer_norm_rms_epsilon", c["layer_norm_epsilon"]
            yield "ssm.conv_kernel", c["conv_kernel"]
            yield "ssm.state_size", c["ssm_state_size"]
            yield "ssm.group_count", c["n_groups"]
            yield "ssm.time_step_rank", c["mamba_num_heads"]
            yield "ssm.inner_size", c["mamba_num_heads"] * c["mamba_head_dim"]
        if self.arch == "gemma3n":
            yield from self._gemma3n()
        if self.arch == "gemma4":
            yield from self._gemma4()
        if self.arch in ("deepseek2", "mistral4"):
            yield from self._latents()
        if self.arch == "minicpm3":
            yield "attention.key_length", c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
            yield "rope.dimension_count", c["qk_rope_head_dim"]
            yield from (("attention.kv_lora_rank", c["kv_lora_rank"]), ("attention.q_lora_rank", c["q_lora_rank"]))
        if self.arch == "exaone-moe":
            yield "expert_gating_func", 2
            yield "expert_weights_norm", c.get("norm_topk_prob", True)
            yield "expert_weights_scale", c.get("routed_scaling_factor", 2.5)
            yield "expert_shared_count", c.get("num_shared_experts", 1)
            yield "expert_feed_forward_length", c["moe_intermediate_size"]
            yield "leading_dense_block_count", c.get("first_k_dense_replace", 1)
        if self.arch == "hunyuan-moe":
            yield from (("expert_used_count", c["moe_topk"][0]), ("expert_weights_norm", True))
            yield "expert_shared_feed_forward_length", c["intermediate_size"]
        if self.arch == "bailingmoe2":
            yield from (("expert_group_count", c["n_group"]), ("expert_group_used_count", c["topk_group"]))
        if self.arch in ("glm4moe", "dots1", "afmoe", "ernie4_5-moe", "bailingmoe2"):
            yield from self._sigmoids()
        if self.arch in LIKE and self.arch != "bitnet-b1.58":
            yield from self._windowed()
        if self.arch == "mistral4":
            yield "expert_weights_norm", c.get("norm_topk_prob", True)
            yield "attention.temperature_scale", r["llama_4_scaling_beta"]
        if self.arch == "mistral3":
            yield "attention.temperature_scale", r["llama_4_scaling_beta"]
            yield "rope.scaling.yarn_log_multiplier", r.get("mscale_all_dim", 0.0)

    def _alibi(self):
        c = FAMILIES[self.config["architectures"][0]].read(Fields(self.config, "config.json"))
        yield from (("block_count", c.layers), ("context_length", c.max_positions), ("embedding_length", c.width))
        yield from (("feed_forward_length", c.mlp_width), ("attention.head_count", c.heads))
        yield "attention.layer_norm_epsilon", c.norm_eps
        if self.arch == "mpt":
            yield from (("attention.max_alibi_bias", 8.0), ("attention.clamp_kqv", c.clip))

    def _gemma3n(self):
        c = FAMILIES["Gemma3nForCausalLM"].read(Fields(self.config, "config.json"))
        yield from (("altup.num_inputs", c.streams.count), ("altup.active_idx", c.streams.active))
        yield "attention.sliding_window_pattern", [window is not None for window in c.windows]
        yield "attention.shared_kv_layers", self.config["num_kv_shared_layers"]
        yield "embedding_length_per_layer_input", c.layer_inputs.width
        yield "feed_forward_length", [*c.uneven.mlp_widths]
        yield "activation_sparsity_scale", [-math.inf if x is None else x for x in c.sparsity]

    def _gemma4(self):
        c = FAMILIES["Gemma4ForCausalLM"].read(Fields(self.config, "config.json"))
        for name, (_, size) in (
            ("_swa", c.uneven.kv_sizes[c.windows.index(self.config["sliding_window"])]),
            ("", c.uneven.kv_sizes[-1]),
        ):
            for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
                yield f"{key}{name}", size
        yield "attention.sliding_window_pattern", [window is not None for window in c.windows]
        yield "attention.head_count_kv", [heads for heads, _ in c.uneven.kv_sizes]
        yield "attention.shared_kv_layers", self.config.get("num_kv_shared_layers", 0)
        yield "embedding_length_per_layer_input", self.config["hidden_size_per_layer_input"]
        yield "feed_forward_length", [*c.uneven.mlp_widths]
        yield "expert_used_count", self.config.get("top_k_experts")

    def _windowed(self):
        own = self.config
        names = {"muse_glimmer_text": "MuseGlimmerForCausalLM"}
        c = FAMILIES[names.get(own["model_type"]) or own["architectures"][0]].read(Fields(own, "config.json"))
        if self.arch != "hy_v3":
            yield "attention.sliding_window_pattern", [window is not None for window in c.windows]
        if self.arch != "cohere2moe":
            yield "attention.layer_norm_rms_epsilon", c.norm_eps
        if self.arch in ("muse-glimmer", "hy_v3", "granite_swa"):
            yield "rope.freq_base", next(rope for rope in c.ropes or (c.rope,) if rope).theta
        if self.arch == "granite_swa":
            yield "attention.rope_pattern", [rope is not None for rope in c.ropes]
            yield "expert_shared_feed_forward_length", own.get("shared_intermediate_size")
            return
        if self.arch == "muse-glimmer":
            yield from (("logit_scale", 1 / c.logit_divisor), ("final_logit_softcapping", c.logit_cap))
            return
        yield from (("expert_feed_forward_length", c.experts.width), ("expert_weights_norm", True))
        if self.arch == "laguna":
            size, ropes = own["head_dim"], own["rope_parameters"]
            yield "attention.head_count", own.get("num_attention_heads_per_layer", own["num_attention_heads"])
            share = ropes.get("sliding_attention", {}).get("partial_rotary_factor", 1)
            yield "rope.dimension_count_swa", int(size * share)
        if self.arch in ("laguna", "hy_v3"):
            yield from (("expert_gating_func", 2), ("expert_weights_scale", c.experts.routing.scale))
            yield "expert_shared_feed_forward_length", c.experts.shared_width
        if self.arch == "cohere2moe":
            yield "expert_gating_func", 2 if own.get("expert_selection_fn") == "sigmoid" else 1
            yield "expert_shared_count", own["num_shared_experts"]

    def _sigmoids(self):
        c = self.config
        first = c.get("first_k_dense_replace", c.get("num_dense_layers", c.get("moe_layer_start_index", 1)))
        yield "leading_dense_block_count", 0 if c["model_type"] == "solar_open" else first
        shared = c.get("n_shared_experts", c.get("num_shared_experts", c.get("moe_num_shared_experts", 1)))
        yield from (("expert_shared_count", shared), ("expert_feed_forward_length", c["moe_intermediate_size"]))
        if self.arch != "ernie4_5-moe":
            yield from (("expert_gating_func", 2), ("expert_count", c.get("n_routed_experts", c.get("num_experts"))))
            yield "expert_weights_norm", c.get("norm_topk_prob", True)
            yield "expert_weights_scale", c.get("routed_scaling_factor", c.get("route_scale", 1.0))

    def _latents(self):
        c, r = self.config, self.rope
        rank, rotated, value = c["kv_lora_rank"], c["qk_rope_head_dim"], c["v_head_dim"]
        whole, end = c["qk_nope_head_dim"] + rotated, "_mla" if self.split else ""
        if self.split:
            yield from (("attention.key_length", rank + rotated), ("attention.value_length", rank))
        yield from ((f"attention.key_length{end}", whole), (f"attention.value_length{end}", value))
        yield from (("attention.kv_lora_rank", rank), ("attention.q_lora_rank", c["q_lora_rank"]))
        yield from (("attention.head_count_kv", 1), ("rope.dimension_count", rotated))
        yield "leading_dense_block_count", c.get("first_k_dense_replace", 1)
        yield "expert_count", c.get("n_routed_experts")
        yield "expert_shared_count", c.get("n_shared_experts")
        yield "expert_feed_forward_length", c.get("moe_intermediate_size", c["intermediate_size"])
        yield from (("expert_group_count", c.get("n_group")), ("expert_group_used_count", c.get("topk_group")))
        if "n_routed_experts" in c:
            yield "expert_gating_func", 1 if c["model_type"] in ("deepseek_v2", "mistral4") else 2
        if "mscale_all_dim" in r:
            yield "rope.scaling.yarn_log_multiplier", 0.1 * r["mscale_all_dim"]

    def vocabulary(self):
        """Keys of the checkpoint's tokenizer: byte-level BPE, or BPE with scores as `gguf.LlamaHfVocab` writes it."""
        data = json.loads((self.folder / "tokenizer.json").read_text(encoding="utf-8"))
        config = json.loads((self.folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        added = {token["content"]: token for token in data["added_tokens"]}
        vocab = data["model"]["vocab"] | {content: token["id"] for content, token in added.items()}
        tokens = sorted(vocab, key=vocab.get)
        special = {token: CONTROL if added[token]["special"] else 4 for token in added}
        bytes_ = [token.startswith("<0x") for token in tokens]
        types = [special.get(token, 6 if byte else NORMAL) for token, byte in zip(tokens, bytes_, strict=True)]
        spaced = data["model"].get("byte_fallback")
        keys = {"tokens": tokens, "token_type": types, "model": "llama" if spaced else "gpt2"}
        if spaced:
            keys["scores"] = [-1000.0] * len(tokens)
        else:
            merges = data["model"]["merges"]
            keys |= {"pre": "gpt-2", "merges": [m if isinstance(m, str) else " ".join(m) for m in merges]}
        for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown"}.items():
            if f"{name}_token" in config:
                spelled = config[f"{name}_token"]
                keys[f"{key}_token_id"] = vocab[spelled["content"] if isinstance(spelled, dict) else spelled]
        keys["add_bos_token"] = "TemplateProcessing" in json.dumps(data["post_processor"])
        found = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
        templates = config.get("chat_template", [])
        if isinstance(templates, str):
            templates = [{"name": "default", "template": templates}]
        for entry in templates:
            default = entry["name"] == "default"
            found[f"tokenizer.chat_template{'' if default else '.' + entry['name']}"] = entry["template"]
        names = [entry["name"] for entry in templates if entry["name"] != "default"]
        return found | ({"tokenizer.chat_templates": names} if names else {})

    def write(self, path):
        """Returns the path."""
        writer = gguf.GGUFWriter(path, self.arch)
        for key, value in self.keys.items():
            add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
            add.get(type(value), writer.add_float32)(key, value)
        for name, tensor in self.tensors.items():
            raw = None if self.types[name] in (F32, gguf.GGMLQuantizationType.F16) else self.types[name]
            writer.add_tensor(name, tensor, raw_shape=self.raw_shapes.get(name), raw_dtype=raw)
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            step()
        writer.close()
        if max(self.types.values()) > APART:
            self._with_its_number(path)
        return path

    def _with_its_number(self, path):
        """Give the second form of a format the number of the first."""
        data = bytearray(path.read_bytes())
        for name, kind in self.types.items():
            if kind > APART:
                at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
                at += 4 + 8 * struct.unpack_from("<I", data, at)[0]
                assert struct.unpack_from("<I", data, at)[0] == kind
                struct.pack_into("<I", data, at, kind - APART)
        path.write_bytes(data)

    def floats(self, name):
        """A tensor's values as the package sees them, float32."""
        return torch.from_numpy(gguf.quants.dequantize(self.tensors[name], self.types[name]).copy())


def random(folder, variant, **changes):
    """A checkpoint of random weights, of a golden one's configuration with `changes`. Returns the folder."""
    folder.mkdir()
    for path in (GOLDEN / variant.removesuffix("_v4")).glob("*token*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((GOLDEN / variant / "config.json").read_text())
    config |= {key: value for key, value in changes.items() if key in config}
    (folder / "config.json").write_text(json.dumps(config))
    family, draw, tensors = FAMILIES[config["architectures"][0]], torch.Generator().manual_seed(5), {}
    c = family.read(Fields(config, "config.json"))
    for name, shape in family.names.tensors(c).items():
        scale = 0.2 if len(shape) < 2 else shape[-1] ** -0.5  # more of norms, and attention is all or nothing
        tensors[name] = torch.randn(shape, generator=draw) * scale + ("norm" in name or ".ln_" in name)
    if c.tied:
        del tensors["lm_head.weight"]
    with (folder / WEIGHTS).open("wb") as file:
        write_tensors(file, tensors)
    return folder


def sentencepiece_file():
    """A file whose vocabulary has pieces with scores, as those of Llama 2 and Gemma have."""
    file = File(GOLDEN / "llama/plain")
    file.folder = GOLDEN / "text/prepend"
    file.keys |= file.vocabulary()
    file.keys["tokenizer.ggml.scores"] = [-float(i) for i in range(len(file.keys["tokenizer.ggml.tokens"]))]
    file.tensors["token_embd.weight"] = file.tensors["output.weight"] = file.tensors["token_embd.weight"].repeat(9, 0)
    return file

"""Folders that mlx-lm wrote: golden models in its names and forms, as floats and quantised, beside the models
themselves. `converted` does what `sanitize` of its models does, read from its sources."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import CheckpointError, Engine
from models.checkpoint.headers import Checkpoint
from models.formats.floats import has_kernels
from models.quantized import mlx
from tools import pack
from tools.golden import quantized as recipes

GOLDEN = Path(__file__).parents[2] / "golden"
GROUP = 8  # of a size that rows of golden models are multiples of; MLX has groups of 32 and more
NORM = re.compile(r".*(input_layernorm|post_attention_layernorm|model\.norm|q_norm|k_norm)\.weight")
DENSE = [
    "lfm2/plain",
    "apertus/plain",
    "qwen3_5/recurrent",
    "wrapped/gemma3",
    "wrapped/lfm2_vl",
    "wrapped/gemma4",
    "gemma4/inputs",
    "gpt_neox/plain",
    "granite/hybrid",
    "granite/scans",
]
EXPERTS = [
    *(
        f"experts/{name}"
        for name in (
            "qwen3",
            "qwen2",
            "qwen3_next_recurrent",
            "qwen3_5_recurrent",
            "mixtral",
            "phi",
            "olmoe",
            "granite",
        )
    ),
    *(f"experts/{name}" for name in ("lfm2", "dots", "afmoe", "minimax")),
    *("gpt_oss/plain", "deepseek/plain", "deepseek/three", "deepseek/glm", "nemotron_h/experts", "gemma4/experts"),
    *("laguna/plain", "published/ling"),
]


def stacked(name, tensor):
    """The tensors of the experts of a layer, from one of transformers, which has gates above or between the others."""
    part = name.rpartition(".experts.")[2]
    if "gpt_oss" in name:
        tensor = tensor if part.endswith("_bias") else tensor.mT
        if part.startswith("down_proj"):
            return {"down_proj": tensor}
        return {"gate_proj": tensor[:, ::2], "up_proj": tensor[:, 1::2]}
    if part.startswith("gate_up_proj") or "input_linear" in name:
        gate, up = tensor.chunk(2, 1)
        return {"gate_proj": gate, "up_proj": up}
    return {"up_proj" if part.startswith("up_proj") else "down_proj": tensor}


PLACES = {  # of the experts of a layer, by `model_type`
    "mixtral": "block_sparse_moe.switch_mlp", "phimoe": "block_sparse_moe.switch_mlp",
    "minimax_m2": "block_sparse_moe.switch_mlp", "granitemoe": "block_sparse_moe.switch_mlp",
    "gpt_oss": "mlp.experts", "afmoe": "mlp.experts", "dots1": "mlp.experts", "lfm2_moe": "feed_forward.switch_mlp",
    "nemotron_h": "mixer.switch_mlp", "gemma4_text": "experts.switch_glu",
}  # fmt: skip


def converted(config, tensors):
    """The tensors as mlx-lm has them."""
    kind, found, several = config["model_type"], {}, {}
    for name, tensor in tensors.items():
        if kind == "gpt_neox":
            name = re.sub(r"^(gpt_neox\.)?(layers\.)?", lambda m: "model." + ("h." if m[2] else ""), name)
            found[name.replace("model.lm_head.", "model.embed_out.")] = tensor
            continue
        if kind == "granitemoehybrid" and not config["num_local_experts"] and ".shared_mlp." in name:
            halves = tensor.chunk(2) if "input" in name else [tensor]
            parts = ("gate_proj", "up_proj") if "input" in name else ("down_proj",)
            layer = name.partition("shared_mlp.")[0]
            found |= {f"{layer}mlp.{part}.weight": half for part, half in zip(parts, halves, strict=True)}
            continue
        if expert := re.fullmatch(
            r"(.*layers\.\d+\.)(?:.+\.)?(experts\.\w+_proj(?:_bias)?|(?:in|out)put_linear\.weight)", name
        ):
            place = expert[1] + PLACES.get(kind, "mlp.switch_mlp")
            fc = {"up_proj": "fc1", "down_proj": "fc2"} if kind == "nemotron_h" else {}
            end = "bias" if name.endswith("_bias") else "weight"
            parts = stacked(("gpt_oss" if kind == "gpt_oss" else "") + name, tensor)
            found |= {f"{place}.{fc.get(part, part)}.{end}": x for part, x in parts.items()}
            continue
        if kind in ("mixtral", "phimoe", "minimax_m2"):
            name = re.sub(r"\.mlp\.(gate|router|e_score_correction_bias)", r".block_sparse_moe.\1", name)
            name = name.replace(".block_sparse_moe.router.", ".block_sparse_moe.gate.")
        if one := re.fullmatch(r"(.+\.mlp)\.experts\.(\d+)\.(.+)", name):
            several.setdefault(f"{one[1]}.switch_mlp.{one[3]}", []).append(tensor)  # files have them in order
            continue
        router = {"laguna": "proj.", "bailing_moe": "gate_proj."}.get(kind, "")
        name = name.replace(".mlp.gate.weight", f".mlp.gate.{router}weight")
        name = name.replace(".mlp.experts.e_score", ".mlp.gate.e_score")
        if kind == "lfm2_moe":
            for one, other in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
                name = name.replace(f"{one}.weight", f"{other}.weight")
        if name.startswith("model.language_model."):
            name = name.replace("model.language_model.", "language_model.model.")
        if "conv1d.weight" in name or "conv.conv.weight" in name:
            tensor = tensor.moveaxis(2, 1)
        if kind.startswith(("qwen3_next", "qwen3_5")) and NORM.fullmatch(name) and tensor.dim() == 1:
            tensor = tensor.float() + 1  # rounded to bfloat16 in real files
        if name.endswith(("alpha_p", "alpha_n")):
            tensor = tensor.squeeze()
        if "kv_b_proj" in name and kind in ("deepseek_v3", "glm4_moe_lite"):
            heads = tensor.unflatten(0, (config["num_attention_heads"], -1))
            keys, values = heads.split((config["qk_nope_head_dim"], config["v_head_dim"]), 1)
            prefix = name.removesuffix("kv_b_proj.weight")
            found |= {f"{prefix}embed_q.weight": keys.mT, f"{prefix}unembed_out.weight": values}
            continue
        found[name] = tensor
    return found | {name: torch.stack(parts) for name, parts in several.items()}


def written(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors", {"format": "mlx"})
    return folder


def logits(folder):
    return Engine.load(folder, dtype="float32", quant="none", kv_memory=1 << 22, cache="off").logits([*range(3, 40)])


def source(variant):
    config = json.loads((GOLDEN / variant / "config.json").read_text())
    tensors = {}
    for file in sorted((GOLDEN / variant).glob("model*.safetensors")):
        tensors |= load_file(file)
    return config, tensors


@pytest.mark.parametrize("variant", [*DENSE, *EXPERTS])
def test_names_and_forms(variant, tmp_path):
    """Folders that mlx-lm converted and did not quantise."""
    config, tensors = source(variant)
    folder = written(tmp_path / "mlx", config, converted(config, tensors))
    expected = logits(GOLDEN / variant)
    assert (logits(folder) - expected).abs().max() <= 1e-5 * expected.std()


OTHERS = ["wrapped/gemma4", "gpt_neox/plain", "granite/hybrid", "granite/scans"]


@pytest.mark.parametrize("variant", [*OTHERS, *EXPERTS])
def test_codes(variant, tmp_path, monkeypatch):
    """All matrices, embeddings and routers quantised, which MLX does; some with settings of their own, by the names in
    the file; the same model of floats beside it."""
    monkeypatch.setattr(mlx, "GROUPS", (GROUP,))
    config, tensors = source(variant)
    tensors = {name: tensor.float() for name, tensor in converted(config, tensors).items()}
    codes, floats, own = dict(tensors), dict(tensors), {}
    for i, (name, tensor) in enumerate(sorted(tensors.items())):
        inputs = name.endswith(".weight") and not re.search(r"conv|norm|vision|visual", name)
        if tensor.dim() < 2 or not inputs or tensor.shape[-1] % GROUP:
            continue
        if variant.startswith("granite/") and ".mlp." in name:
            i = 1  # both halves of an MLP alike
        module, bits = name.removesuffix(".weight"), 8 if i % 3 else 4
        if bits == 8:
            own[module] = {"group_size": GROUP, "bits": 8}
        method = recipes.mlx(bits, GROUP, torch.bfloat16 if i % 2 else torch.float16)
        parts = method.store(tensor.flatten(0, -2))
        floats[name] = method.restore(parts).view(tensor.shape)
        codes |= {f"{module}.{suffix}": x.unflatten(0, tensor.shape[:-1]) for suffix, x in parts.items()}
    assert own and len(codes) > len(floats)
    quantisation = {"group_size": GROUP, "bits": 4, "mode": "affine"} | own
    quantised = config | dict.fromkeys(("quantization", "quantization_config"), quantisation)
    expected = logits(written(tmp_path / "floats", config, floats))
    found = logits(written(tmp_path / "codes", quantised, codes))
    assert (found - expected).abs().max() <= 1e-3 * expected.std()


def multiplied(config, tensors):
    """The tensors of a Falcon-H1 with the factors of their outputs, but those of keys and values."""
    c, keys = config, config["mamba_n_groups"] * config["mamba_d_state"]
    parts = [c["mamba_d_ssm"], c["mamba_d_ssm"], keys, keys, c["mamba_n_heads"]]
    mixed = torch.cat([torch.full((n, 1), x) for n, x in zip(parts, c["ssm_multipliers"], strict=True)])
    factors = {
        "embed_tokens": c["embedding_multiplier"],
        "lm_head": c["lm_head_multiplier"],
        "self_attn.o_proj": c["attention_out_multiplier"],
        "mamba.out_proj": c["ssm_out_multiplier"],
        "gate_proj": c["mlp_multipliers"][0],
        "down_proj": c["mlp_multipliers"][1],
        "in_proj": c["ssm_in_multiplier"] * mixed,
    }
    ends = {f"{end}.weight": factor for end, factor in factors.items()}
    return {
        name: x.float() * next((factor for end, factor in ends.items() if name.endswith(end)), 1.0)
        for name, x in converted(config, tensors).items()
    }


@pytest.mark.parametrize("tied", [False, True])
def test_factors_of_falcon_h1(tied, tmp_path):
    """They are in the matrices, of which a tied head has that of the embedding; adapters would lack them."""
    config, tensors = source("falcon_h1/plain")
    config |= {"attention_in_multiplier": 1.0, "tie_word_embeddings": tied}
    tensors = {name: x for name, x in tensors.items() if not tied or name != "lm_head.weight"}
    expected = logits(written(tmp_path / "plain", config, tensors))
    folder = written(tmp_path / "mlx", config, multiplied(config, tensors))
    assert (logits(folder) - expected).abs().max() <= 1e-5 * expected.std()
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["k_proj"], "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    name = "base_model.model.model.layers.0.self_attn.k_proj.lora_{}.weight"
    shapes = {"A": (2, 24), "B": (20, 2)}
    save_file({name.format(x): torch.ones(shape) for x, shape in shapes.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="adapters of Falcon-H1 do not fit files of GGUF or MLX"):
        Engine.load(folder, adapters=[adapter], dtype="float32", kv_memory=1 << 22)


@pytest.mark.parametrize("change, message", [
    ({"attention_in_multiplier": 1.2}, "attention_in_multiplier: expected 1"),
    ({"embedding_multiplier": 0.0, "tie_word_embeddings": True}, "expected numbers other than 0"),
    ({"embedding_multiplier": "a", "tie_word_embeddings": True}, "expected numbers other than 0"),
])  # fmt: skip
def test_factors_of_falcon_h1_that_are_refused(change, message, tmp_path):
    config, tensors = source("falcon_h1/plain")
    made = multiplied(config, tensors)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(written(tmp_path / "mlx", config | {"attention_in_multiplier": 1.0} | change, made))


def test_codes_of_the_head_of_internlm2(tmp_path, monkeypatch):
    monkeypatch.setattr(mlx, "GROUPS", (GROUP,))
    config, tensors = source("published/internlm2")
    method, head = recipes.mlx(8, GROUP, torch.float16), "output.weight"
    parts = method.store(tensors[head].float())
    expected = logits(written(tmp_path / "floats", config, tensors | {head: method.restore(parts)}))
    codes = tensors | {f"output.{suffix}": x for suffix, x in parts.items()}
    quantised = config | {"quantization": {"group_size": GROUP, "bits": 8, "mode": "affine"}}
    assert (logits(written(tmp_path / "codes", quantised, codes)) - expected).abs().max() <= 1e-3 * expected.std()


def test_two_spellings_of_a_tensor(tmp_path):
    config, tensors = source("experts/qwen3")
    twice = {"model.layers.0.mlp.experts.2.up_proj.weight": torch.ones(20, 24)}
    folder = written(tmp_path / "mlx", config, converted(config, tensors) | twice)
    with pytest.raises(CheckpointError, match=r"switch_mlp.up_proj.weight and .* are both|and .*switch_mlp.* are both"):
        Checkpoint.open(folder)


def test_a_convolution_of_one_tap_does_not_tell(tmp_path):
    """Both forms have the same shape: the norms of a folder of transformers stay as they are."""
    config, tensors = source("qwen3_5/recurrent")
    config |= {"linear_conv_kernel_dim": 1}
    tensors = {name: x[..., -1:] if name.endswith("conv1d.weight") else x for name, x in tensors.items()}
    norm = "model.layers.0.input_layernorm.weight"
    assert Checkpoint.open(written(tmp_path / "one", config, tensors)).read([norm])[norm].equal(tensors[norm])


def test_tensors_of_wrong_forms(tmp_path):
    """They are named as the model needs them, from headers alone."""
    config, tensors = source("experts/qwen3_next_recurrent")
    for name, change in {
        "mlp.switch_mlp.up_proj.weight": lambda x: x[:, :-1],
        "linear_attn.conv1d.weight": lambda x: x[:, :-1],
        "mlp.gate.weight": lambda x: x[:, :-1],
    }.items():
        made = converted(config, tensors)
        made[f"model.layers.0.{name}"] = change(made[f"model.layers.0.{name}"])
        end = name.replace("switch_mlp.up_proj", r"experts.\d+.up_proj")
        with pytest.raises(CheckpointError, match=rf"layers.0.{end} in model.safetensors: expected"):
            Engine.load(written(tmp_path / name, config, made))


@pytest.mark.skipif(not has_kernels(torch.float32, torch.device("cpu")), reason="packing needs the C++ kernels")
def test_what_is_packed(tmp_path):
    """Floats are, under the usual names; codes are not, nor are matrices of a latent that lie head by head."""
    for variant in ("experts/qwen3_next_recurrent", "gpt_oss/plain"):
        config, tensors = source(variant)
        folder = written(tmp_path / config["model_type"], config, converted(config, tensors))
        pack.pack(folder, tmp_path / f"{config['model_type']}-packed")
        assert logits(tmp_path / f"{config['model_type']}-packed").equal(logits(folder))
    with pytest.raises(CheckpointError, match="quantised already"):
        pack.pack(GOLDEN / "quantized" / "mlx", tmp_path / "codes")
    config, tensors = source("deepseek/three")
    with pytest.raises(CheckpointError, match="cannot be packed head by head"):
        pack.pack(written(tmp_path / "latent", config, converted(config, tensors)), tmp_path / "heads")

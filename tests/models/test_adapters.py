"""Adapters: logits as peft's; what is refused, and how."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine
from models.adapters import Adapter
from models.errors import CheckpointError
from tests.marks import needs_cpp, needs_int8, needs_interpreter
from tests.models.copies import changed

GOLDEN = Path(__file__).parents[1] / "golden"
ADAPTERS = json.loads((GOLDEN / "adapters" / "golden.json").read_text())
LOGITS = load_file(GOLDEN / "adapters" / "golden.safetensors")
OPTIONS: dict[str, Any] = {"kv_memory": "4M", "threads": 2}


@cache
def loaded(name: str, **options: Any) -> Engine:
    model = GOLDEN / ADAPTERS[name]["model"]
    names = [other for other in ADAPTERS if ADAPTERS[other]["model"] == ADAPTERS[name]["model"]]
    return Engine.load(model, adapters=[GOLDEN / "adapters" / each for each in names], **(OPTIONS | options))


@pytest.mark.parametrize("name", ADAPTERS)
def test_logits_are_those_of_peft(name: str):
    engine, ids = loaded(name, dtype="float32"), ADAPTERS[name]["ids"]
    want = LOGITS[f"logits.{name}"]
    got = engine.logits(ids, name)[-len(want) :, : want.shape[1]]
    assert (got - want).abs().max() <= 2e-5 * want.abs().max()
    assert (engine.logits(ids, "none")[-len(want) :, : want.shape[1]] - want).abs().max() > 0.1


def merged(name: str, folder: Path) -> Path:
    """The model with the adapter's products added to its weights in float64: an independent definition."""
    model, adapter = GOLDEN / ADAPTERS[name]["model"], GOLDEN / "adapters" / name
    shutil.copytree(model, folder)
    config, factors = (
        json.loads((adapter / "adapter_config.json").read_text()),
        load_file(adapter / "adapter_model.safetensors"),
    )
    weights = {key: x.double() for key, x in load_file(model / "model.safetensors").items()}
    for key, a in factors.items():
        if ".lora_A." not in key:
            continue
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        added = factors[key.replace("lora_A", "lora_B")].double() @ a.double() * config["lora_alpha"] / len(a)
        weights[f"{module}.weight"] += added.T if config["fan_in_fan_out"] else added
    save_file({key: x.float().contiguous() for key, x in weights.items()}, folder / "model.safetensors")
    return folder


MODEL, BACKBONE = "base_model.model.model.", "base_model.model.backbone."  # beginnings of names
MATRICES = [  # of layers that few families have: model, matrix, outputs, width
    ("falcon_h1/plain", "layers.1.mamba.in_proj", 124, 24),
    ("falcon_h1/plain", "layers.1.mamba.out_proj", 24, 40),
    ("falcon_h1/plain", "layers.1.self_attn.k_proj", 20, 24),
    ("falcon_h1/plain", "layers.1.self_attn.o_proj", 24, 40),
    ("falcon_h1/plain", "layers.1.feed_forward.gate_proj", 40, 24),
    ("falcon_h1/plain", "layers.1.feed_forward.down_proj", 24, 40),
    ("granite/scans", "layers.0.mamba.in_proj", 124, 24),
    ("granite/scans", "layers.0.mamba.out_proj", 24, 48),
    ("jamba/plain", "layers.0.mamba.x_proj", 34, 48),
    ("jamba/plain", "layers.2.mamba.out_proj", 24, 48),
    ("jamba/plain", "layers.1.self_attn.k_proj", 12, 24),
    ("lfm3/plain", "layers.1.self_attn.g_proj", 4, 24),
    ("zamba2/plain", "layers.1.mamba_decoder.mamba.in_proj", 140, 24),
    ("zamba2/plain", "layers.2.linear", 24, 24),
]
MAMBA = [
    ("mamba/plain", "layers.0.mixer.in_proj", 96, 24),
    ("mamba/plain", "layers.1.mixer.x_proj", 34, 48),
    ("mamba/plain", "layers.2.mixer.dt_proj", 48, 2),
]
SINGLE = [  # of families whose published names begin in two ways
    ("nemotron_h/plain", "layers.0.mixer.in_proj", 102, 24),
    ("nemotron_h/plain", "layers.1.mixer.up_proj", 40, 24),
    ("nemotron_h/plain", "layers.2.mixer.k_proj", 20, 24),
    ("nemotron_h/plain", "layers.3.mixer.down_proj", 24, 40),
    ("apertus/plain", "layers.1.mlp.up_proj", 40, 24),
]


@pytest.mark.parametrize(
    ("begin", "variant", "matrix", "outs", "width"),
    [*((MODEL, *one) for one in MATRICES), *((BACKBONE, *one) for one in MAMBA)]
    + [(begin, *one) for begin in (MODEL, BACKBONE) for one in SINGLE],
)
def test_answers_are_those_of_a_matrix_with_the_sum(
    begin: str, variant: str, matrix: str, outs: int, width: int, tmp_path: Path
):
    draw, text = torch.Generator().manual_seed(3), [(7 * i * i + 3 * i) % 101 + 3 for i in range(70)]
    a, b = torch.randn(2, width, generator=draw) / 8, torch.randn(outs, 2, generator=draw) / 8
    folder = tmp_path / "adapter"
    folder.mkdir()
    factors = {f"{begin}{matrix}.lora_{x}.weight": y for x, y in (("A", a), ("B", b))}
    save_file(factors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": [matrix.split(".")[-1]]}
    (folder / "adapter_config.json").write_text(json.dumps(config))

    def summed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        [name] = (name for name in tensors if name.endswith(f".{matrix}.weight"))
        return tensors | {name: tensors[name].float() + 2 * b @ a}

    def load(model: Path, **adapters: Any) -> Engine:
        return Engine.load(model, dtype="float32", **OPTIONS | {"kv_memory": "16M"}, **adapters)

    want = load(changed(tmp_path / "summed", variant, {}, summed)).logits(text)
    found = load(GOLDEN / variant, adapters=[folder]).logits(text, "adapter")
    plain, least = load(GOLDEN / variant).logits(text), 1e-2 if variant == "granite/scans" else 1e-3
    assert (found - want).abs().max() < 1e-4 < least < (found - plain).abs().max()


@pytest.mark.parametrize("name", ["llama_all", "gpt2_all", "phi3_fused", "opt_all"])
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        pytest.param({"quant": "int8"}, marks=needs_int8),
        pytest.param({"quant": "int4"}, marks=needs_cpp),
    ],
    ids=str,
)
def test_beside_rounded_weights(name: str, options: dict[str, Any], tmp_path: Path):
    """The rounding of the base is what is off, and not that of the adapter."""
    ids, options = ADAPTERS[name]["ids"], {"dtype": "float32"} | options
    plain, base = loaded(name, dtype="float32"), loaded(name, **options)
    exact = Engine.load(merged(name, tmp_path / "merged"), dtype="float32", **OPTIONS).logits(ids)
    off = (base.logits(ids, "none") - plain.logits(ids, "none")).norm() / plain.logits(ids, "none").norm()
    assert (plain.logits(ids, name) - exact).norm() <= 1e-5 * exact.norm()
    assert 0 < (base.logits(ids, name) - exact).norm() / exact.norm() <= 2 * off


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("quant", [pytest.param("int8", marks=needs_int8), pytest.param("int4", marks=needs_cpp)])
def test_logits_beside_codes_are_those_of_peft(name: str, quant: str):
    """They are off by what they are without the adapter: by the rounding of the base."""
    plain, base, ids = loaded(name, dtype="float32"), loaded(name, dtype="float32", quant=quant), ADAPTERS[name]["ids"]
    want = LOGITS[f"logits.{name}"]
    without, unrounded = (engine.logits(ids, "none") for engine in (base, plain))
    off = (base.logits(ids, name)[-len(want) :, : want.shape[1]] - want).norm() / want.norm()
    assert off <= 2 * (without - unrounded).norm() / unrounded.norm()


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_operators_one_by_one_compute_the_same(impl: str):
    name = "gpt2_all"
    engine, ids = loaded(name, dtype="float64"), ADAPTERS[name]["ids"]
    engine.runner.impl = impl
    want = LOGITS[f"logits.{name}"]
    assert (engine.logits(ids, name)[-len(want) :] - want).abs().max() <= 2e-5 * want.abs().max()


@needs_interpreter
@pytest.mark.parametrize("name", ["llama_all", "gpt2_all"])
def test_operators_of_a_gpu_run_beside_adapters(name: str):
    """Some calls of a layer run together there; an adapter's stay between them."""
    engine, ids = loaded(name, dtype="float32", parallel=2), ADAPTERS[name]["ids"]
    engine.runner.impl = "triton"
    want = LOGITS[f"logits.{name}"]
    assert (engine.logits(ids, name)[-len(want) :] - want).abs().max() <= 2e-5 * want.abs().max()


def test_a_factor_of_the_command_line_scales_what_is_added():
    model, folder = GOLDEN / "llama" / "gqa", GOLDEN / "adapters" / "llama_all"
    ids = ADAPTERS["llama_all"]["ids"]
    adapters = {"zero": (folder, 0.0), "one": folder, "also": f"{folder}=1.0"}
    engine = Engine.load(model, adapters=adapters, dtype="float32", **OPTIONS)
    none, zero, one, also, first = (engine.logits(ids, name) for name in ("none", "zero", "one", "also", None))
    assert zero.equal(none) and zero.equal(first) and one.equal(also) and not one.equal(none)


def copied(tmp_path: Path, name: str = "llama_all", **changes: Any) -> Path:
    folder = tmp_path / "adapter"
    shutil.copytree(GOLDEN / "adapters" / name, folder)
    config = json.loads((folder / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_dora": True}, "adapters with DoRA are not supported"),
        ({"peft_type": "LOHA"}, "adapters of the kind LOHA are not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save names lm_head, of which the file has no weight"),
        ({"ensure_weight_tying": True}, "adapters with an embedding and a head that stay tied"),
        ({"use_secrets": True}, "use_secrets"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: pissa"),
        ({"rank_pattern": {"(": 1}}, "rank_pattern: expected an object that maps patterns"),
        ({"rank_pattern": {"q_proj": 3}}, "expected factors of rank 3"),
        ({"r": 9}, "expected factors of rank 9"),
        ({"lora_alpha": "much"}, "lora_alpha: expected a number"),
    ],
    ids=str,
)
def test_other_kinds_are_refused_by_name(changes: dict[str, Any], says: str, tmp_path: Path):
    with pytest.raises(CheckpointError, match=says):
        Adapter.open(copied(tmp_path, **changes))


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "eva", "mica", "orthogonal"])
def test_factors_may_start_from_anything_that_keeps_the_base(start: bool | str | None, tmp_path: Path):
    plain = Adapter.open(copied(tmp_path / "plain"))
    assert Adapter.open(copied(tmp_path / "other", init_lora_weights=start)).modules == plain.modules


@pytest.mark.parametrize(("saved", "shape"), [("norm", [32]), ("layers.0.mlp.up_proj", [48, 32])])
def test_other_replaced_modules_are_refused_by_name(saved: str, shape: list[int], tmp_path: Path):
    """`modules_to_save` may name a parent of theirs."""
    folder = copied(tmp_path, modules_to_save=[saved.removesuffix(".up_proj")])
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {f"{MODEL}{saved}.weight": torch.ones(shape)}, file)
    with pytest.raises(CheckpointError, match=f"model.{saved}: it is replaced, which is supported for") as refused:
        Engine.load(GOLDEN / "llama" / "gqa", adapters=[folder], **OPTIONS)
    assert "merge_and_unload" in refused.value.remedy


@pytest.mark.parametrize(
    ("model", "name", "change", "says"),
    [
        ("llama/gqa", "llama_whole", {"lm_head.bias": torch.ones(104)}, "lm_head: the model has no bias"),
        ("llama/gqa", "llama_whole", {"model.embed_tokens.bias": torch.ones(32)}, "tokens: the model has no bias"),
        ("phi/plain", "phi_whole", {"lm_head.bias": torch.ones(7)}, r"bias: expected a tensor \[104\], got \[7\]"),
        ("phi/plain", "phi_whole", {"lm_head.weight": None}, "lm_head has a bias and lacks the weight"),
    ],
)
def test_other_biases_beside_replaced_weights_are_refused(
    model: str, name: str, change: dict[str, torch.Tensor | None], says: str, tmp_path: Path
):
    file = copied(tmp_path, name) / "adapter_model.safetensors"
    tensors = load_file(file) | {f"base_model.model.{key}": x for key, x in change.items()}
    save_file({key: x for key, x in tensors.items() if x is not None}, file)
    with pytest.raises(CheckpointError, match=says):
        Engine.load(GOLDEN / model, adapters=[file.parent], **OPTIONS)


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_biases_are_refused_where_there_are_any(bias: str, tmp_path: Path):
    folder = copied(tmp_path, bias=bias)
    plain = Adapter.open(copied(tmp_path / "plain"))
    assert Adapter.open(folder).modules == plain.modules, "the base has no biases"
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if ".q_proj." in name).partition(".lora_")[0] + ".bias"
    save_file(tensors | {name: torch.zeros(32)}, file)
    with pytest.raises(CheckpointError, match=rf"biases \(bias: {bias}\)"):
        Adapter.open(folder)


@pytest.mark.parametrize(
    ("rename", "says"),
    [
        (("layers.0.self_attn.q_proj.lora_A", "embed_tokens.lora_embedding_C"), "no factor of LoRA of a linear layer"),
        (("layers.0.self_attn.q_proj", "embed_tokens"), "embed_tokens: expected factors from 104 elements to 32"),
        (("q_proj.lora_A", "q_proj.lora_A.other"), "no factor of LoRA"),
        (
            ("layers.0.self_attn.q_proj", "layers.9.self_attn.q_proj"),
            "layers.9.self_attn.q_proj: the model has no such",
        ),
        (("model.layers.0.self_attn.q_proj", "lm_head"), "lm_head: expected factors from 32 elements to 104, got 32"),
        (("layers.0.self_attn.q_proj", "layers.0.mlp.down_proj.q"), "the model has no such linear layer"),
    ],
    ids=str,
)
def test_modules_that_the_model_lacks(rename: tuple[str, str], says: str, tmp_path: Path):
    file = copied(tmp_path) / "adapter_model.safetensors"
    save_file({key.replace(*rename): x for key, x in load_file(file).items()}, file)
    with pytest.raises(CheckpointError, match=says) as refused:
        Engine.load(GOLDEN / "llama" / "gqa", adapters=[file.parent], **OPTIONS)
    assert str(file.parent) in refused.value.where and "merge_and_unload" in refused.value.remedy


def test_damaged_files(tmp_path: Path):
    folder = copied(tmp_path)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(key for key in tensors if "lora_A" in key)
    save_file(tensors | {first: torch.full_like(tensors[first], float("nan"))}, file)
    with pytest.raises(CheckpointError, match="values that are not finite"):
        Engine.load(GOLDEN / "llama" / "gqa", adapters=[folder], **OPTIONS)
    save_file({key: x for key, x in tensors.items() if key != first}, file)
    with pytest.raises(CheckpointError, match="has one factor of LoRA and lacks the other"):
        Adapter.open(folder)
    file.write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError, match="a pickle lies where safetensors should be"):
        Adapter.open(folder)
    file.rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"are a pickle \(adapter_model.bin\)"):
        Adapter.open(folder)
    with pytest.raises(CheckpointError, match="adapter: there is no such folder"):
        Adapter.open(folder / "nothing")
    with pytest.raises(CheckpointError, match=r"adapter: the folder holds no adapter_config\.json"):
        Adapter.open(GOLDEN / "llama" / "gqa")


def test_an_adapter_of_another_model_names_its_base():
    with pytest.raises(CheckpointError, match="does not fit the model") as refused:
        Engine.load(GOLDEN / "llama" / "gqa", adapters=[GOLDEN / "adapters" / "qwen2_rslora"], **OPTIONS)
    assert "It was made for qwen2/plain" in refused.value.remedy

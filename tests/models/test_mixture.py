"""Mixtures of experts: spellings of their names, without C++, in every format, and what is refused."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.load.budget import table
from engine.load.options import LoadOptions
from kernels import cpp
from kernels.experts import routed
from kernels.linear.codes import Codes
from kernels.linear.reference import unpacked
from models import load_model
from models.adapters import Adapter
from models.checkpoint.experts import EXPERT
from models.checkpoint.headers import Checkpoint
from models.checkpoint.sizes import measure
from models.checkpoint.spellings import spelled_alike
from models.checkpoint.tensors import TensorInfo
from models.checkpoint.weights import Weights
from models.errors import CheckpointError
from models.formats.coded import CodedLinear, of_packed
from models.formats.floats import FloatLinear
from models.mixture import Mixture
from models.sharding import Partition, Shard
from search import Greedy, Trie
from tests.engine.step.test_graphs import engines
from tests.marks import needs_cpp, needs_interpreter
from tests.models.answers import load
from tests.models.formats.test_coded import on_triton
from tools.golden.base import edit
from tools.pack import pack

GOLDEN = Path(__file__).parents[1] / "golden/experts"
CPU = torch.device("cpu")
PROMPT = [*range(3, 30)]
# As published checkpoints have the two tensors of transformers 5, and the router.
PUBLISHED = {
    "qwen2": ("mlp.experts.{}.{}_proj.weight", ("gate", "up", "down"), "mlp.gate."),
    "mixtral": ("block_sparse_moe.experts.{}.{}.weight", ("w1", "w3", "w2"), "block_sparse_moe.gate."),
    "phi": ("block_sparse_moe.experts.{}.{}.weight", ("w1", "w3", "w2"), "block_sparse_moe.gate."),
    "lfm2": ("feed_forward.experts.{}.{}.weight", ("w1", "w3", "w2"), "feed_forward.gate."),
}


def copied(variant, folder, change):
    """A golden checkpoint whose tensors `change` turns into others."""
    shutil.copytree(GOLDEN / variant, folder)
    tensors = {}
    for name, x in load_file(GOLDEN / variant / "model.safetensors").items():
        tensors |= change(name, x)
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    return folder


def test_experts_as_floats_beside_a_quantised_shared_expert(tmp_path):
    """Those of Llama 4 are columns, however the shared expert is stored."""

    def change(kind, name, x):
        if "shared_expert" not in name:
            return {name: x}
        scale = x.float().abs().amax(1, keepdim=True) / 127
        q = (x / scale).round()
        words, shape = (q.to(torch.int8) ^ -128).view(torch.int32), torch.tensor(q.shape)
        stored = {f"{name}_packed": words, f"{name}_scale": scale, f"{name}_shape": shape}
        return stored if kind == "packed" else {name: q * scale}

    folders = [copied("../llama4/plain", tmp_path / kind, partial(change, kind)) for kind in ("floats", "packed")]
    args = {"num_bits": 8, "symmetric": True, "strategy": "channel", "type": "int"}
    groups = {"g": {"targets": ["re:.*shared_expert.*"], "weights": args}}
    quantized = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    edit(folders[1] / "config.json", {"quantization_config": quantized})
    expected, found = (load(folder).logits(PROMPT) for folder in folders)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", PUBLISHED)
def test_names_of_published_checkpoints(variant, tmp_path):
    spelled, parts, router = PUBLISHED[variant]

    def change(name, x):
        name = re.sub(r"(mlp|feed_forward)\.(gate|router)\.", router, name)
        layer, stacked, part = re.sub(r"(mlp|feed_forward)\.experts", "experts", name).partition("experts.")
        if part == "gate_up_proj":
            halves = zip(parts, x.chunk(2, 1), strict=False)
            return {layer + spelled.format(i, part): half[i] for part, half in halves for i in range(len(x))}
        if part == "down_proj" and stacked:
            return {layer + spelled.format(i, parts[2]): x[i] for i in range(len(x))}
        return {name: x}

    folder = copied(variant, tmp_path / "model", change)
    names = Checkpoint.open(folder).tensors.keys()
    assert names == Checkpoint.open(GOLDEN / variant).tensors.keys()
    assert load(folder).logits(PROMPT).equal(load(GOLDEN / variant).logits(PROMPT))


def test_names_of_published_granites(tmp_path):
    others = {
        "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
        "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
        "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
    }

    def change(name, x):
        for one, other in others.items():
            name = name.replace(one, other)
        return {name: x}

    folder = copied("granite_shared", tmp_path / "model", change)
    assert load(folder).logits(PROMPT).equal(load(GOLDEN / "granite_shared").logits(PROMPT))


def test_one_matrix_twice_is_refused():
    info = TensorInfo(Path("model.safetensors"), (2, 8, 4), torch.float32)
    one = TensorInfo(Path("model.safetensors"), (4, 4), torch.float32)
    names = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.1.up_proj.weight"
    with pytest.raises(CheckpointError, match=r"gate_up_proj.* and .*1.up_proj.weight.* are both"):
        spelled_alike(dict(zip(names, (info, one), strict=True)))
    odd = TensorInfo(Path("model.safetensors"), (2, 7, 4), torch.float32)
    assert [*spelled_alike({names[0]: odd})] == [names[0]]  # no two halves: refused as a tensor that is not known


@pytest.mark.parametrize("variant", ["qwen2", "lfm2", "phi", "granite_shared"])
def test_without_cpp(variant, monkeypatch):
    expected = load(GOLDEN / variant)
    monkeypatch.setattr(Mixture, "_matrices", lambda self: None)
    engine = load(GOLDEN / variant)
    assert engine.runner.model.stack is None
    assert torch.allclose(engine.logits(PROMPT), expected.logits(PROMPT), atol=1e-5)
    results = [each.generate([PROMPT], Trie(beams=4), max_new_tokens=8)[0].outputs for each in (engine, expected)]
    assert [x.token_ids for x in results[0]] == [x.token_ids for x in results[1]]


@needs_cpp
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quant", ["none", "int8", "int4", "int4-zeros"])
def test_formats(quant, dtype):
    """In the native stack; the router stays as it is, and prompts beside each other do not change each other."""
    engine, exact = load(GOLDEN / "qwen2", quant=quant, dtype=dtype), load(GOLDEN / "qwen2")
    model = engine.runner.model
    assert model.stack is not None
    assert model.layers[0].mlp.router.packed.dtype == torch.bfloat16  # of the file
    found, expected = engine.logits(PROMPT).float(), exact.logits(PROMPT)
    error = (found - expected).norm() / expected.norm()
    assert error < {"none": 0.02, "int8": 0.1, "int4": 0.5, "int4-zeros": 0.5}[quant]
    prompts = [PROMPT[:n] for n in (5, 11, 27)]
    together = engine.generate(prompts, Trie(beams=3), max_new_tokens=6)
    for prompt, result in zip(prompts, together, strict=True):
        [alone] = engine.generate([prompt], Trie(beams=3), max_new_tokens=6)
        assert [(x.token_ids, x.logprob) for x in alone.outputs] == [(x.token_ids, x.logprob) for x in result.outputs]


@needs_cpp
@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
def test_packed_ahead(quant, tmp_path):
    pack(GOLDEN / "mixtral", tmp_path / "packed", quant=quant)
    found, expected = load(tmp_path / "packed"), load(GOLDEN / "mixtral", quant=quant)
    assert found.logits(PROMPT).equal(expected.logits(PROMPT))
    with pytest.raises(CheckpointError, match="packed ahead run on a CPU only"):
        load_model(Checkpoint.open(tmp_path / "packed"), torch.float32, torch.device("cuda"))


@pytest.mark.parametrize("variant", ["qwen3", "mixtral"])
def test_experts_that_are_stored_quantised(variant, tmp_path):
    """In e4m3, by the names of published checkpoints; the router and attention stay floats."""
    spelled, parts, _ = PUBLISHED.get(variant, PUBLISHED["qwen2"])
    floats = {}

    def quantised(name, x):
        layer, _, part = re.sub(r"mlp\.experts", "experts", name).partition("experts.")
        if part not in ("gate_up_proj", "down_proj"):
            return {name: x}
        matrices = zip(parts, x.chunk(2, 1), strict=False) if part == "gate_up_proj" else [(parts[2], x)]
        found = {}
        for kind, every in matrices:
            for i, weight in enumerate(every.float()):
                module = layer + spelled.format(i, kind).removesuffix(".weight")
                small, scale = (weight / 0.01).to(torch.float8_e4m3fn), torch.full((1, 1), 0.01)
                found |= {f"{module}.weight": small, f"{module}.weight_scale_inv": scale}
                floats[f"{module}.weight"] = small.float() * scale
        return found

    folder = copied(variant, tmp_path / "quantised", quantised)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    (folder / "config.json").write_text(json.dumps(config))
    other = copied(variant, tmp_path / "floats", lambda name, x: {} if "experts." in name else {name: x})
    save_file(load_file(other / "model.safetensors") | floats, other / "model.safetensors")
    found, expected = load(folder), load(other)
    assert torch.allclose(found.logits(PROMPT), expected.logits(PROMPT), atol=1e-4)
    if found.runner.model.stack is not None:
        assert found.runner.model.layers[0].mlp.matrices.experts[0].up.packed.groups.kind == "float8"


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Experts and heads of latents are stacked, and matrices kept as a GPU has them."""
    real = Weights.linear

    def linear(self, *names, **options):
        layer = real(self, *names, **options)
        if isinstance(layer, FloatLinear):
            layer.weights, layer.joined = [unpacked(layer.packed).to(layer.dtype)], True
        else:
            biases, parts = None if layer.bias is None else [layer.bias], getattr(layer.packed, "parts", [layer.packed])
            codes = [of_packed(part, CPU) for part in parts]
            layer.whole = CodedLinear(codes, biases, dtype=layer.dtype, device=CPU)
        layer.packed = None
        return layer

    monkeypatch.setattr(Weights, "linear", linear)
    monkeypatch.setattr("models.mixture.stacks", lambda device: True)
    monkeypatch.setattr("models.latent.stacks", lambda device: True)


ON_GPU = ["granite_shared", "lfm2", "mixtral", "olmoe", "phi", "qwen2_windows", "qwen3"]
ON_GPU += ["../gpt_oss/mxfp4", "../gpt_oss/plain", "../deepseek/groups", "../deepseek/three", "../deepseek/glm"]
ON_GPU += ["qwen3_5_recurrent", "qwen3_next_recurrent", "../granite/scans_experts"]
ON_GPU += ["../llama4/plain", "../llama4/steps", "../relatives/dbrx", "../relatives/kolibri"]
ON_GPU += [
    "../mistral/mistral4",
    "../laguna/plain",
    "../deepseek/axk1",
    "aria",
    "minimax_three",
    "../nemotron_h/latent",
]


@needs_interpreter
@needs_cpp
@pytest.mark.full(unless=lambda variant: variant in ("lfm2", "../gpt_oss/mxfp4", "../deepseek/groups"))
@pytest.mark.parametrize("variant", ON_GPU)
def test_golden_logits_and_tokens_in_graphs_of_a_gpu(variant, as_on_a_gpu):
    folder = GOLDEN / variant
    golden = json.loads((folder / "golden.json").read_text())
    _, graphs = engines(folder, "triton")
    entries = [entry for entry in golden["logits"] if len(entry["prompt_ids"]) >= 17]
    entry = min(entries, key=lambda entry: len(entry["prompt_ids"]))
    expected_TV = load_file(folder / "golden.safetensors")[entry["tensor"]]
    error_T = (graphs.logits(entry["prompt_ids"])[-entry["rows"] :] - expected_TV).abs().amax(-1)
    assert (error_T / (expected_TV.amax(-1) - expected_TV.amin(-1))).max() < 1e-5
    run = min((run for run in golden["runs"] if run["search"] == "greedy"), key=lambda run: len(run["prompt_ids"]))
    for _ in range(3):  # a graph is recorded by the second pass of its size
        [result] = graphs.generate([run["prompt_ids"]], Greedy(), max_new_tokens=3, ignore_eos=run["ignore_eos"])
        assert result.outputs[0].token_ids == run["outputs"][0]["token_ids"][:3]
        if graphs.runner.record.replayed:
            break
    assert graphs.runner.record.replayed


@needs_interpreter
@needs_cpp
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_small_numbers_on_a_gpu(quant, as_on_a_gpu, monkeypatch):
    """Logits are those of the definition with the same matrices."""
    model = load(GOLDEN / "qwen3", quant=quant)
    assert all(isinstance(x.table, Codes) for x in model.runner.model.layers[0].mlp.stacked)
    found = on_triton(model).logits(PROMPT)
    monkeypatch.setattr("models.mixture.routed", partial(routed, impl="reference"))
    torch.testing.assert_close(on_triton(model).logits(PROMPT), found, rtol=1e-4, atol=1e-4)


@needs_cpp
def test_experts_in_several_formats_are_refused_on_a_gpu(as_on_a_gpu, monkeypatch):
    real = Weights.linear

    def linear(self, *names, **options):
        layer = real(self, *names, **options)
        layer.weights = layer.weights * (2 if EXPERT in names[0] else 1)
        return layer

    monkeypatch.setattr(Weights, "linear", linear)
    with pytest.raises(CheckpointError, match=r"experts of one format and order, unlike those of .*0\.gate_proj"):
        load(GOLDEN / "qwen3")


def test_bytes_of_a_token():
    size = measure(Checkpoint.open(GOLDEN / "qwen3"), torch.float32, CPU)
    experts = size.config.experts
    assert experts is not None
    assert size.chosen > 0 and size.chosen % experts.count == 0
    assert size.touched == size.matrices - size.chosen // experts.count * (experts.count - experts.routing.chosen)
    plain = measure(Checkpoint.open(GOLDEN.parent / "qwen3/plain"), torch.float32, CPU)
    assert (plain.touched, plain.chosen) == (plain.matrices, 0)
    shown = table(LoadOptions(GOLDEN / "qwen3"), lambda beams: Trie(beams=beams), 8)
    assert "A token chooses 3 of 6 experts of a layer: a pass of one token reads" in shown
    assert ("(int4) of matrices" in shown) is (not cpp.why_not())  # it needs the C++ kernels


def test_what_experts_do_not_have_is_refused(tmp_path):
    checkpoint = Checkpoint.open(GOLDEN / "qwen3")
    config = load_model(checkpoint, torch.float32, CPU).config
    with pytest.raises(CheckpointError, match="cannot be divided among processes"):
        Partition.of(config, Shard(0, 2), "model")
    for module in ("mlp.experts.0.up_proj", "mlp.gate"):
        name = f"base_model.model.model.layers.0.{module}"
        factors = {f"{name}.lora_A.weight": torch.ones(4, 24), f"{name}.lora_B.weight": torch.ones(6, 4)}
        save_file(factors, tmp_path / "adapter_model.safetensors")
        (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
        with pytest.raises(CheckpointError, match="LoRA of experts, and of what chooses them, is not supported"):
            load(GOLDEN / "qwen3", adapters=[tmp_path])
    assert Adapter.open(tmp_path)


def test_adapters_of_attention(tmp_path):
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {f"{name}.lora_A.weight": torch.ones(4, 24), f"{name}.lora_B.weight": torch.ones(32, 4)}
    save_file(factors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    engine = load(GOLDEN / "qwen3", adapters=[tmp_path])
    plain = load(GOLDEN / "qwen3").logits(PROMPT)
    assert engine.logits(PROMPT, "none").equal(plain) and not torch.allclose(engine.logits(PROMPT), plain, atol=0.1)

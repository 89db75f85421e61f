"""Attention with a latent in whole models: what the cache keeps, formats, prefixes, preemption, what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Request
from engine.step.driver import Driver
from engine.step.jobs import Job
from kernels.same_bits import asking
from models import load_model
from models.checkpoint.headers import Checkpoint
from models.checkpoint.sizes import measure
from models.errors import CheckpointError
from models.formats.floats import PackedLinear
from models.shard import Shard
from search import Trie
from tests.invariants import check_pool
from tests.marks import needs_cpp, needs_int8
from tests.models.answers import QUANTS, TEXT, load
from tests.models.copies import GOLDEN, changed
from tools.pack import pack

CPU = torch.device("cpu")
PLAIN, GROUPS, THREE, GLM = (f"deepseek/{name}" for name in ("plain", "groups", "three", "glm"))
GROWN, UNROTATED = "mistral/mistral4", "kimi_linear/kinds"
KV_B = "model.layers.1.self_attn.kv_b_proj"


def off(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def test_the_cache_keeps_a_latent_and_a_key_of_each_token():
    engine = load(GOLDEN / PLAIN)
    pool, layers = engine.pool, 3
    assert pool.bytes_per_token == layers * (16 + 8) * 4
    assert pool.cache.k_LGSD is pool.cache.v_LGSD and [len(group) for group in pool.cache.groups] == [1]
    assert pool.cache.k_LGSD.shape[0] == layers and pool.cache.k_LGSD.shape[1:] == (1, pool.cache.k_LGSD.shape[2], 24)
    small = load(GOLDEN / PLAIN, kv_dtype="int8").pool
    assert small.bytes_per_token == layers * (16 + 8 + 2)


@pytest.mark.parametrize("variant", [PLAIN, UNROTATED])
def test_one_operator_prepares_attention_on_a_gpu(variant):
    """Rotated or not."""
    codes = [call.code for call in load(GOLDEN / variant).runner.model.layers[0].together]
    assert "latent" in codes and not {"absorb", "rotate", "write"} & {*codes}


def test_static_steps_of_heads_are_not_ignored(tmp_path):
    def quantised(tensors):
        scale = tensors[f"{KV_B}.weight"].float().abs().amax(1, keepdim=True) / 127
        codes = (tensors[f"{KV_B}.weight"].float() / scale).round().to(torch.int8)
        own = {"weight": codes, "weight_scale": scale, "input_activation_scale": torch.tensor(step)}
        return tensors | {f"{KV_B}.{name}": tensor for name, tensor in own.items()}

    for step in (0.0, 0.1):
        config = {"quantization_config": {"quant_method": "gemma", "num_bits": 8}}
        folder = changed(tmp_path / str(step), PLAIN, config, quantised)
        if not step:
            assert load(folder).logits(TEXT[:5]).isfinite().all()
            continue
        with pytest.raises(CheckpointError, match=r"1\.self_attn\.kv_b_proj.*static steps of activations"):
            load(folder)


@pytest.mark.parametrize("variant", [PLAIN, GROUPS])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_prefixes_pressure_and_company_change_nothing(variant, kv_dtype, monkeypatch):
    """To the bit: the last key's slot is copied when beams agree, prompts are read in chunks, searches begin anew."""
    options = {"kv_dtype": kv_dtype, "threads": 1}
    engine = load(GOLDEN / variant, **options)
    prompts, search = [TEXT[:40], [*TEXT[:40], 5, 6], TEXT[10:50]], Trie(beams=4, num_return_sequences=4)

    def answers(engine):
        found = dict(engine.serve([Request(prompt, search, 30, ignore_eos=True) for prompt in prompts]))
        return [[(x.token_ids, x.logprob) for x in found[i].outputs] for i in range(len(prompts))]

    alone = []
    for prompt in prompts:
        [result] = load(GOLDEN / variant, **options).generate([prompt], search, max_new_tokens=30, ignore_eos=True)
        alone.append([(x.token_ids, x.logprob) for x in result.outputs])

    def same(found):
        for ours, theirs in zip(found, alone, strict=True):
            assert [ids for ids, _ in ours] == [ids for ids, _ in theirs]
            assert [x for _, x in ours] == pytest.approx([x for _, x in theirs], abs=1e-4)

    same(answers(engine))
    engine.runner.budget = 19
    same(answers(engine))
    cached = load(GOLDEN / variant, prefix_cache="on", **options)
    same(answers(cached))
    same(answers(cached))
    assert cached.pool.prefixes is not None and cached.pool.prefixes.hits > 0

    preempted, preempt = list[Job](), Driver._preempt
    monkeypatch.setattr(Driver, "_preempt", lambda driver, job: (preempted.append(job), preempt(driver, job))[1])
    small = load(GOLDEN / variant, **options | {"kv_memory": 200 * engine.pool.bytes_per_token})
    same(answers(small))
    assert preempted
    check_pool(small.pool, [])


@QUANTS
@pytest.mark.parametrize("variant", [PLAIN, THREE])
def test_quantised_weights_are_near(variant, quant):
    exact, found = (load(GOLDEN / variant, quant=quant) for quant in ("none", quant))
    matrices = [engine.runner.model.layers[0].attention.heads.keys[0] for engine in (exact, found)]
    assert len({*map(type, matrices)}) == 2
    assert 0 < off(found.logits(TEXT), exact.logits(TEXT)) < (0.1 if quant == "int8" else 0.8)


@pytest.mark.parametrize("kind", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"kv_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("variant", [PLAIN, GLM])
def test_other_numbers_are_near(variant, kind):
    assert 0 < off(load(GOLDEN / variant, **kind).logits(TEXT).float(), load(GOLDEN / variant).logits(TEXT)) < 0.05


@needs_cpp
@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
def test_packed_ahead(quant, tmp_path):
    pack(GOLDEN / GROUPS, tmp_path / "packed", quant=quant)
    found, expected = load(tmp_path / "packed").logits(TEXT), load(GOLDEN / GROUPS, quant=quant).logits(TEXT)
    assert found.equal(expected)


def test_matrices_of_heads_that_are_stored_quantised(tmp_path):
    """In e4m3: the matrix that makes keys and values is dequantised."""
    weight = load_file(GOLDEN / PLAIN / "model.safetensors")[f"{KV_B}.weight"].float()
    small = (weight / 0.01).to(torch.float8_e4m3fn)

    def quantised(tensors):
        return tensors | {f"{KV_B}.weight": small, f"{KV_B}.weight_scale_inv": torch.full((1, 1), 0.01)}

    kind = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [*small.shape]}}
    found = load(changed(tmp_path / "small", PLAIN, kind, quantised)).logits(TEXT)
    floats = {f"{KV_B}.weight": small.float() * torch.tensor(0.01)}
    expected = load(changed(tmp_path / "floats", PLAIN, {}, lambda tensors: tensors | floats)).logits(TEXT)
    assert off(found, expected) < 1e-6 < off(found, load(GOLDEN / PLAIN).logits(TEXT))


@needs_cpp
@pytest.mark.parametrize("quant", ["none", pytest.param("int8", marks=needs_int8), "int4"])
def test_sizes_are_those_of_the_model(quant):
    size = measure(Checkpoint.open(GOLDEN / GROUPS), torch.float32, CPU, quant)
    model = load_model(Checkpoint.open(GOLDEN / GROUPS), torch.float32, CPU, quant)
    found = [layer.packed for layer in model.modules() if isinstance(layer, PackedLinear)]
    parts = [
        part for x in found for part in (x.panels, x.scale_O, *(x.groups[2:] if x.groups else ())) if part is not None
    ]
    assert size.matrices == sum(part.nbytes for part in parts)
    assert size.shape.kv_bytes_per_token(torch.float32) == 3 * 24 * 4


@needs_cpp
@pytest.mark.parametrize("kind", ["floats", "packed ahead"])
def test_a_gpu_has_the_matrices_of_heads_as_floats(kind, tmp_path, monkeypatch):
    """Beside matrices that were packed ahead, too; sizes count them."""
    folder = GOLDEN / PLAIN
    if kind == "packed ahead":
        pack(GOLDEN / PLAIN, folder := tmp_path / "packed", quant="none")
    expected = load(folder).logits(TEXT)
    monkeypatch.setattr("models.latent.stacks", lambda device: True)
    model = (engine := load(folder)).runner.model
    stacked = [x for layer in model.layers for x in layer.attention.heads.stacked]
    assert {x.dtype for x in stacked} == {torch.float32} and stacked[0].shape[2] == stacked[1].shape[2] == 16
    assert off(engine.logits(TEXT), expected) < 1e-5
    found = [layer.packed for layer in model.modules() if isinstance(layer, PackedLinear)]
    size = measure(Checkpoint.open(folder), torch.float32, CPU)
    assert size.matrices == sum(x.nbytes for x in stacked) + sum(packed.panels.nbytes for packed in found)


@needs_int8
def test_heads_on_a_gpu_stay_floats_beside_int8(monkeypatch):
    monkeypatch.setattr("models.latent.stacks", lambda device: True)
    exact, found = (load(GOLDEN / PLAIN, quant=quant) for quant in ("none", "int8"))
    heads = [engine.runner.model.layers[1].attention.heads.stacked for engine in (exact, found)]
    assert all(x.equal(y) for x, y in zip(*heads, strict=True))
    assert 0 < off(found.logits(TEXT), exact.logits(TEXT)) < 0.1


def one_by_one(tensors):
    """By the names of published checkpoints."""
    found = {}
    for name, x in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for i, both in enumerate(x):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    found[f"{name.removesuffix('gate_up_proj')}{i}.{part}.weight"] = half.clone()
        elif name.endswith("experts.down_proj"):
            found |= {f"{name.removesuffix('down_proj')}{i}.down_proj.weight": y.clone() for i, y in enumerate(x)}
        else:
            found[name] = x
    return found


@pytest.mark.parametrize(("variant", "layer"), [(PLAIN, 0), (THREE, 61), (GLM, 47)])
def test_published_names_and_draft_heads(variant, layer, tmp_path):
    more = {f"model.layers.{layer}.enorm.weight": torch.ones(24)} if layer else {}
    found = load(changed(tmp_path, variant, {}, lambda tensors: one_by_one(tensors) | more))
    assert found.logits(TEXT).equal(load(GOLDEN / variant).logits(TEXT))


def adapter(folder, module, outs, width):
    draw = torch.Generator().manual_seed(3)
    a, b = torch.randn(2, width, generator=draw) / 8, torch.randn(outs, 2, generator=draw) / 8
    folder.mkdir()
    name = f"base_model.model.{module}"
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    return 2 * b @ a


@pytest.mark.parametrize(
    ("variant", "module", "outs", "width"),
    [
        *((GROUPS, "q_a_proj", 14, 24), (GROUPS, "q_b_proj", 72, 14)),
        *((GROUPS, "kv_a_proj_with_mqa", 24, 24), (GROUPS, "o_proj", 24, 48)),
        *((GROWN, "q_a_proj", 18, 24), (GROWN, "q_b_proj", 44, 18)),
    ],
)
def test_an_adapter_is_added_to_a_matrix(variant, module, outs, width, tmp_path):
    name = f"model.layers.1.self_attn.{module}"
    added = adapter(tmp_path / "adapter", name, outs, width)

    def summed(tensors):
        return tensors | {f"{name}.weight": tensors[f"{name}.weight"].float() + added}

    merged = load(changed(tmp_path / "merged", variant, {}, summed)).logits(TEXT)
    found = load(GOLDEN / variant, adapters=[tmp_path / "adapter"]).logits(TEXT, "adapter")
    assert (found - merged).abs().max() < 1e-3 < 1e-2 < (found - load(GOLDEN / variant).logits(TEXT)).abs().max()


def test_what_is_refused(tmp_path):
    adapter(tmp_path / "adapter", KV_B, 88, 16)
    with pytest.raises(CheckpointError, match="keys and values of a latent is not supported"):
        load(GOLDEN / GROUPS, adapters=[tmp_path / "adapter"])
    with pytest.raises(CheckpointError, match="latent attention cannot be divided among processes"):
        load(GOLDEN / "deepseek/dense", shard=Shard(0, 2))
    with (
        asking("on"),
        pytest.raises(CheckpointError, match=r"same bits in any batch on a GPU(?s:.*)COPPICE_SAME_BITS"),
    ):
        load_model(Checkpoint.open(GOLDEN / PLAIN), torch.float32, torch.device("cuda"))

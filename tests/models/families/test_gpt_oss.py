"""gpt-oss: layers without C++, formats, searches, and its experts in MXFP4 and as floats, however a file has them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.linear.blocks import BLOCKS
from models.checkpoint.headers import Checkpoint
from models.checkpoint.spellings import spelled_alike
from models.checkpoint.tensors import TensorInfo
from models.errors import CheckpointError
from models.mixture import Mixture
from search import Trie
from tests.marks import needs_cpp
from tests.models.answers import load
from tests.models.copies import changed
from tests.models.test_families import read
from tools.golden.base import ABSENT

GOLDEN = Path(__file__).parents[2] / "golden/gpt_oss"
PROMPT = [*range(3, 60)]
GATES = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("variant", ["plain", "mxfp4"])
def test_without_cpp(variant, monkeypatch):
    expected = load(GOLDEN / variant)
    monkeypatch.setattr(Mixture, "_matrices", lambda self: None)
    engine = load(GOLDEN / variant)
    assert engine.runner.model.stack is None
    assert torch.allclose(engine.logits(PROMPT), expected.logits(PROMPT), atol=1e-4)


@needs_cpp
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"quant": "int8"}, {"quant": "int4"}, {"kv_dtype": "int8"}], ids=str)
def test_formats(options, dtype):
    """In the native stack; prompts beside each other do not change each other. At single places a choice tips over."""
    engine = load(GOLDEN / "plain", dtype=dtype, **options)
    exact = load(GOLDEN / "plain").logits(PROMPT)
    assert engine.runner.model.stack is not None
    error = ((engine.logits(PROMPT).float() - exact).norm(dim=-1) / exact.norm(dim=-1)).median()
    assert error < {"int8": 0.06, "int4": 0.5}.get(options.get("quant"), 0.02)
    prompts = [PROMPT[:n] for n in (5, 17, 40)]
    together = engine.generate(prompts, Trie(beams=3), max_new_tokens=6)
    for prompt, result in zip(prompts, together, strict=True):
        [alone] = engine.generate([prompt], Trie(beams=3), max_new_tokens=6)
        assert [(x.token_ids, x.logprob) for x in alone.outputs] == [(x.token_ids, x.logprob) for x in result.outputs]


def as_floats(tensors):
    """The same checkpoint with experts [in, out], by our own reading of the blocks."""
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    found = {}
    for name, x in tensors.items():
        if name.endswith("_blocks"):
            codes = torch.stack((x & 15, x >> 4), -1).flatten(-2).long()
            numbers = sizes[codes % 8] * (1 - 2 * (codes // 8))
            exponents = tensors[name.replace("_blocks", "_scales")].double() - 127
            whole = numbers.double() * exponents.exp2().unsqueeze(-1)
            found[name.removesuffix("_blocks")] = whole.flatten(-2).transpose(1, 2).float().contiguous()
        elif not name.endswith("_scales"):
            found[name] = x
    return found


def test_mxfp4_is_exact(tmp_path):
    """The matrices are those of the floats, to the bit; the answers are alike."""
    folder = changed(tmp_path, "gpt_oss/mxfp4", {"quantization_config": ABSENT}, as_floats)
    ours, theirs = Checkpoint.open(GOLDEN / "mxfp4"), Checkpoint.open(folder)
    for part, shape in (("gate_proj", (64, 32)), ("up_proj", (64, 32)), ("down_proj", (32, 64))):
        name = f"model.layers.1.mlp.experts.4.{part}.weight"
        weight = ours.grouped(name, name, shape, "Linear", biased=True)
        assert weight is not None and weight.floats().equal(theirs.read([name])[name].float())
        assert weight.floats(3, 5).equal(theirs.read([name])[name][3:5].float())
    found, expected = load(GOLDEN / "mxfp4"), load(folder)
    torch.testing.assert_close(found.logits(PROMPT), expected.logits(PROMPT), rtol=1e-4, atol=1e-4)
    if found.runner.model.stack is not None:
        up = found.runner.model.layers[0].mlp.matrices.experts[0].up.packed
        assert up.groups.kind == "float4" and up.groups.size == 32 and up.groups.scale.dtype == torch.uint8


def test_experts_in_turns():
    """Gates are the even columns; blocks and biases are cut alike. Without biases a tensor is another family's."""
    file, experts = Path("model.safetensors"), "layers.7.mlp.experts."
    every = {"gate_up_proj": (2, 32, 128), "gate_up_proj_bias": (2, 128), "gate_up_proj_blocks": (2, 128, 1, 16)}
    headers = {experts + name: TensorInfo(file, shape, torch.uint8) for name, shape in every.items()}
    found = spelled_alike(headers)
    assert {info.shape for name, info in found.items() if name.endswith("1.up_proj.weight")} == {(64, 32)}
    assert found[f"{experts}1.up_proj.weight_blocks"].shape == (64, 1, 16) and len(found) == 12
    stored = torch.arange(2 * 32 * 128).view(2, 32, 128)
    up, gate = (found[f"{experts}1.{part}_proj.weight"].part for part in ("up", "gate"))
    assert up is not None and up.of(stored).equal(stored[1].T[1::2])
    assert gate is not None and gate.of(stored).equal(stored[1, :, ::2].T)
    del headers[f"{experts}gate_up_proj_bias"], headers[f"{experts}gate_up_proj_blocks"]
    assert spelled_alike(headers)[f"{experts}1.up_proj.weight"].shape == (16, 128)
    odd = {f"{GATES}_bias": TensorInfo(file, (2, 7), torch.float32)}
    assert [*spelled_alike(odd)] == [*odd]  # no two halves: refused as a tensor that is not known


def set_scale(tensors):
    tensors[f"{GATES}_scales"][1, 3, 0] = 255
    return tensors


def without_scales(tensors):
    return {name: x for name, x in tensors.items() if name != f"{GATES}_scales"}


def short_blocks(tensors):
    return tensors | {f"{GATES}_blocks": tensors[f"{GATES}_blocks"][..., :8].contiguous()}


def odd_biases(tensors):
    return tensors | {f"{GATES}_bias": tensors[f"{GATES}_bias"][:, 1:].contiguous()}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (set_scale, "experts.1.up_proj: weight_scales has values that are no numbers"),
        (without_scales, "missing .*experts.0.gate_proj.weight_scales"),
        (short_blocks, r"gate_proj.weight_blocks.*expected \[64, 1, 16\] of uint8, got \[64, 1, 8\]"),
        (odd_biases, "missing .*gate_proj.bias .nearest: .*gate_up_proj_bias"),
    ],
)
def test_damaged_blocks_are_refused(tmp_path, change, what):
    with pytest.raises(CheckpointError, match=what):
        load(changed(tmp_path, "gpt_oss/mxfp4", None, change))


def test_a_width_that_is_no_multiple_of_blocks(tmp_path):
    folder = changed(tmp_path, "gpt_oss/mxfp4")
    config = json.loads((folder / "config.json").read_text())
    config |= {"intermediate_size": 72}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for i in range(3):
        experts = f"model.layers.{i}.mlp.experts."
        tensors[f"{experts}gate_up_proj_blocks"] = torch.zeros(6, 144, 1, 16, dtype=torch.uint8)
        tensors[f"{experts}gate_up_proj_scales"] = torch.full((6, 144, 1), 127, dtype=torch.uint8)
        tensors[f"{experts}gate_up_proj_bias"] = torch.zeros(6, 144)
        tensors[f"{experts}down_proj_blocks"] = torch.zeros(6, 32, 3, 16, dtype=torch.uint8)
        tensors[f"{experts}down_proj_scales"] = torch.full((6, 32, 3), 127, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="blocks of 32 elements, expected a width that is a multiple, got 72"):
        load(folder)


def test_bytes_of_blocks():
    from models.checkpoint.sizes import measure

    size = measure(Checkpoint.open(GOLDEN / "mxfp4"), torch.float32, torch.device("cpu"))
    widths = ((64, 32), (64, 32), (32, 64))
    assert size.chosen == 3 * 6 * sum(BLOCKS["MXFP4"].packed_bytes(*shape) for shape in widths)
    assert BLOCKS["MXFP4"].packed_bytes(64, 96) == 64 * 96 * 4.25 / 8  # a scale of 8 bits for 32


def test_fields():
    plain = read("GptOssForCausalLM")
    experts = plain.experts
    assert (experts.count, experts.routing.chosen, experts.routing.scores) == (128, 4, "softmax_of_chosen")
    assert (plain.head_dim, plain.windows, plain.rope.kind) == (64, (128, None) * 2, "yarn")
    assert (plain.rope.theta, plain.rope.truncate, plain.rope.original_length) == (150000.0, False, 4096)
    assert plain.attention_bias and plain.sinks and experts.bias and plain.activation == "clamped_swiglu"
    assert read("GptOssForCausalLM", num_key_value_heads=None).kv_heads == 4
    assert read("GptOssForCausalLM", hidden_act="gelu") == plain  # transformers does not read it
    for field, value in (
        ("swiglu_limit", 6.0), ("swiglu_alpha", 1.0), ("sliding_window", 0),
        ("sliding_window", None), ("layer_types", ["chunked_attention"] * 4), ("num_experts_per_tok", 200),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=field):
            read("GptOssForCausalLM", **{field: value})

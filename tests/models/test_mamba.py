"""Mamba, Falcon Mamba and Jamba: int8 and int4 weights, adapters, packed files, Triton, what is kept, what is
refused."""

import pytest
import torch

from models.errors import CheckpointError
from models.shard import Shard
from search import Greedy
from tests.marks import needs_cpp, needs_interpreter
from tests.models.answers import QUANTS, TEXT, check_quantised, check_triton, load
from tests.models.copies import GOLDEN, changed
from tools.pack import pack

VARIANTS = ["mamba/plain", "mamba/falcon", "jamba/plain", "jamba/experts"]


@QUANTS
@pytest.mark.parametrize("variant", VARIANTS)
def test_quantised_weights_are_near(variant, quant):
    # Norms enlarge errors of B and C, which random states add up.
    check_quantised(variant, quant, 0.2 if quant == "int8" else 0.7)


def test_half_precision_is_near():
    for variant in VARIANTS:
        exact, found = (load(GOLDEN / variant, dtype=dtype).logits(TEXT) for dtype in ("float32", "bfloat16"))
        assert (found - exact).norm() < 0.1 * exact.norm()


@needs_cpp
def test_packed_ahead(tmp_path):
    pack(GOLDEN / "jamba/plain", tmp_path / "packed", quant="int8")
    found, plain = load(tmp_path / "packed").logits(TEXT), load(GOLDEN / "jamba/plain", quant="int8").logits(TEXT)
    assert found.equal(plain)


@needs_interpreter
@pytest.mark.parametrize("variant", ["mamba/plain", "jamba/experts"])
def test_answers_of_triton(variant):
    check_triton(variant)


def test_names_of_first_files(tmp_path):
    """Which call the table of tokens "embedding"."""

    def named(tensors):
        return {name.replace("backbone.embeddings.", "backbone.embedding."): x for name, x in tensors.items()}

    found = load(changed(tmp_path, "mamba/plain", {}, named))
    assert found.logits(TEXT).equal(load(GOLDEN / "mamba/plain").logits(TEXT))


def test_experts_of_published_files(tmp_path):
    """Each has matrices of its own."""

    def apart(tensors):
        found = dict[str, torch.Tensor]()
        for name, x in tensors.items():
            if name.endswith("experts.gate_up_proj"):
                for i, (gate, up) in enumerate(one.chunk(2) for one in x):
                    begin = f"{name.removesuffix('gate_up_proj')}{i}."
                    found |= {f"{begin}gate_proj.weight": gate.clone(), f"{begin}up_proj.weight": up.clone()}
            elif name.endswith("experts.down_proj"):
                begin = name.removesuffix("down_proj")
                found |= {f"{begin}{i}.down_proj.weight": one.clone() for i, one in enumerate(x)}
            else:
                found[name] = x
        return found

    found = load(changed(tmp_path, "jamba/experts", {}, apart)).logits(TEXT)
    assert found.equal(load(GOLDEN / "jamba/experts").logits(TEXT))


@pytest.mark.parametrize("variant", VARIANTS)
def test_matrices_are_stored_as_codes(variant, tmp_path):
    """Those of steps too, whose biases the scan adds."""
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"all": {"targets": ["Linear"], "weights": weights}},
    }

    def rounded(tensors, coded):
        found = dict(tensors)
        for name in [name for name in tensors if name.endswith("_proj.weight") and tensors[name].ndim == 2]:
            scale = tensors[name].float().abs().amax(1, keepdim=True) / 127
            codes = (tensors[name].float() / scale).round()
            found[name] = codes.to(torch.int8) if coded else codes * scale
            if coded:
                found[f"{name}_scale"] = scale
        return found

    coded = changed(tmp_path / "coded", variant, {"quantization_config": config}, lambda x: rounded(x, True))
    floats = changed(tmp_path / "floats", variant, {}, lambda x: rounded(x, False))
    found, want = load(coded).logits(TEXT), load(floats).logits(TEXT)
    assert (found - want).norm() < 1e-5 * want.norm()


def test_what_a_token_keeps():
    """A row is three times as wide as the channels, plus B; a state has K numbers for each channel."""
    shape = load(GOLDEN / "mamba/plain").runner.model.shape
    assert (shape.row_bytes, shape.state_bytes) == (4 * 3 * (3 * 48 + 16), 4 * 3 * 48 * 16)
    shape = load(GOLDEN / "jamba/plain").runner.model.shape
    assert shape.kv_bytes_per_token(torch.float32) == 2 * 4 * 2 * 6, "keys and values of the one layer of attention"


def test_a_long_text_takes_no_more_memory():
    """A greedy search keeps the rows of a block, those before it that the convolution reads, and two states."""
    engine, most = load(GOLDEN / "mamba/plain"), [0, 0]
    stores = engine.pool.stores
    for _ in engine.stream(TEXT, Greedy(), max_new_tokens=40, ignore_eos=True):
        most = [max(most[0], stores.rows.used), max(most[1], stores.states.used)]
    assert most[0] <= 8 and most[1] <= 3


def test_what_is_refused(tmp_path):
    for variant in ("mamba/plain", "jamba/plain"):
        with pytest.raises(CheckpointError, match="recurrent layers cannot be divided among processes"):
            load(GOLDEN / variant, shard=Shard(0, 2))
    with pytest.raises(CheckpointError, match=r"missing model.layers.0.mamba.b_layernorm.weight"):
        gone = "model.layers.0.mamba.b_layernorm.weight"
        load(changed(tmp_path, "jamba/plain", {}, lambda x: {n: t for n, t in x.items() if n != gone}))

"""Floats of 8 bits in a checkpoint that is not quantised: they are their values."""

import pytest
import torch

from engine import Engine
from engine.errors import NumericsError
from models.errors import CheckpointError
from search import Greedy
from tests.models.copies import changed

TEXT = [5, 9, 40, 3, 77, 12, 9, 6]
SMALL = torch.float8_e4m3fn, torch.float8_e5m2


def cast(small, wide=None):
    """A function that casts matrices, and back if `wide` is given."""
    return lambda tensors: {
        name: x if x.ndim < 2 else x.to(small) if wide is None else x.to(small).to(wide) for name, x in tensors.items()
    }


@pytest.mark.parametrize("small", SMALL, ids=str)
@pytest.mark.parametrize("variant", ["llama/plain", "gpt2/plain", "experts/mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_floats_of_8_bits_are_their_values(variant, small, dtype, tmp_path):
    options = {"dtype": dtype, "kv_memory": "16M", "threads": 1}
    found, expected = (
        Engine.load(changed(tmp_path / how, variant, {"dtype": "bfloat16"}, cast(*which)), **options).logits(TEXT)
        for how, which in (("small", (small,)), ("wide", (small, torch.bfloat16)))
    )
    assert torch.equal(found, expected)


def test_a_scale_beside_them_is_refused(tmp_path):
    """They would be quantised weights of a config that does not say so."""

    def scaled(tensors):
        name = "model.layers.0.self_attn.q_proj.weight"
        return cast(SMALL[0])(tensors) | {f"{name}_scale": torch.ones(1)}

    with pytest.raises(CheckpointError, match=r"unknown model\.layers\.0\.self_attn\.q_proj\.weight_scale"):
        Engine.load(changed(tmp_path, "llama/plain", {}, scaled))


def test_what_is_no_number_is_found(tmp_path):
    def damaged(tensors):
        found = cast(SMALL[0])(tensors)
        found["model.layers.1.mlp.up_proj.weight"].view(torch.uint8)[3, 4] = 0x7F
        return found

    engine = Engine.load(changed(tmp_path, "llama/plain", {}, damaged), dtype="float32", kv_memory="16M")
    with pytest.raises(NumericsError, match="layer 2 of 2"):
        engine.generate([TEXT], Greedy(), max_new_tokens=2)

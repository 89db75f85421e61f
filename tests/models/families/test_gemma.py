"""Gemma: configs refused, absent fields and null, and fields that mean nothing."""

from pathlib import Path

import pytest
import torch

from engine import Engine
from models.checkpoint.headers import Checkpoint
from models.errors import CheckpointError
from models.families.gemma import Gemma2, Gemma3
from models.norms import Norm
from tests.models.copies import changed
from tools.golden.base import ABSENT

GOLDEN = Path(__file__).parents[2] / "golden/gemma"
TEXT = [(7 * i * i + 3 * i) % 101 + 3 for i in range(40)]


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("one", {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected false"),
        ("two", {"sliding_window": None}, "sliding_window: expected a window"),
        ("two", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping: expected a number from 1e-06"),
        ("two", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: expected a number from 1e-06"),
        ("two", {"hidden_activation": "mish"}, "hidden_activation: expected one of"),
        ("two", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types: expected 3"),
        ("three", {"layer_types": ["full_attention"]}, "layer_types: expected 3"),
        ("three", {"rope_parameters": {"full_attention": {"rope_type": "cubic"}}}, "rope_type: expected one of"),
        ("three", {"rope_parameters": {"sliding_attention": 3}}, "rope_parameters.sliding_attention: expected an obj"),
        ("three_v4", {"rope_local_base_freq": 0}, "rope_local_base_freq: expected a number from 1"),
        ("three_v4", {"sliding_window_pattern": 0}, "sliding_window_pattern: expected a whole number from 1"),
    ],
)
def test_refusals_name_what_is_wrong(tmp_path, variant, changes, message):
    with pytest.raises(CheckpointError, match=message):
        Engine.load(changed(tmp_path, f"gemma/{variant}", changes), dtype="float32")


@pytest.mark.parametrize("kind", ["ForCausalLM", "ForConditionalGeneration"])
def test_other_gemmas_are_refused_by_name(tmp_path, kind):
    inside = {"text_config": {"model_type": "t5gemma_text"}} if kind != "ForCausalLM" else {}
    folder = changed(tmp_path, "gemma/three", {"architectures": [f"T5Gemma{kind}"], "model_type": "t5gemma"} | inside)
    with pytest.raises(CheckpointError, match=f"architecture 'T5Gemma{kind}'"):
        Engine.load(folder)


def test_a_cap_that_is_absent_is_not_null(tmp_path):
    folder = changed(
        tmp_path, "gemma/two_full", dict.fromkeys(["attn_logit_softcapping", "final_logit_softcapping"], ABSENT)
    )
    config = Gemma2.read(Checkpoint.open(folder).fields)
    assert (config.attention_cap, config.logit_cap) == (50.0, 30.0)
    config = Gemma2.read(Checkpoint.open(GOLDEN / "two_full").fields)
    assert (config.attention_cap, config.logit_cap) == (None, None)


def test_gemma_3_caps_no_scores(tmp_path):
    """Nor does transformers, which reads the field and makes no use of it."""
    folder = changed(tmp_path, "gemma/three", {"attn_logit_softcapping": 0.1})
    found = [Engine.load(path, dtype="float32").logits(TEXT) for path in (folder, GOLDEN / "three")]
    assert found[0].equal(found[1])


def test_tables_and_windows_by_layer():
    config = Gemma3.read(Checkpoint.open(GOLDEN / "three").fields)
    assert config.windows == (16, None, 16) and [config.table(i) for i in range(3)] == [0, 1, 0]
    kinds = [(rope.kind, rope.theta, rope.factor) for rope in config.tables()]
    assert kinds == [("default", 100.0, 1.0), ("linear", 5000.0, 8.0)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["one", "two", "three"])
def test_half_precision_is_close(variant, dtype):
    """Roundings, and nothing that a norm or a scale in the wrong dtype would add."""
    exact = Engine.load(GOLDEN / variant, dtype="float32").logits(TEXT)
    found = Engine.load(GOLDEN / variant, dtype=dtype).logits(TEXT)
    spread = exact.amax(-1) - exact.amin(-1)
    error = ((found.float() - exact).pow(2).mean(-1).sqrt() / spread).mean()
    assert error < 20 * torch.finfo(getattr(torch, dtype)).eps / 8


@pytest.mark.parametrize("variant", ["two", "three"])  # the second norms heads, too
def test_one_plus_the_weight_of_norms_is_float32_in_every_dtype(variant):
    """Transformers adds 1 in float32 as well."""
    half, full = (
        Engine.load(GOLDEN / variant, dtype=dtype, kv_memory="1M", cache="off") for dtype in ("bfloat16", "float32")
    )
    models = (engine.runner.model.modules() for engine in (half, full))
    norms, exact = ([module.weight for module in modules if isinstance(module, Norm)] for modules in models)
    assert len(norms) > 8 and all(one.equal(other) for one, other in zip(norms, exact, strict=True))
    found, wanted = half.logits(TEXT), full.logits(TEXT)
    assert (found - wanted).square().mean().sqrt() < 0.02 * wanted.std()

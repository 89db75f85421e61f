"""Checkpoints whose config names no architecture, and those saved without the prefix of the whole model."""

import pytest

from engine import Engine
from models import FAMILIES
from models.checkpoint.model_types import LANGUAGE_MODELS, with_architecture
from models.errors import CheckpointError
from tests.models.copies import GOLDEN, changed
from tools.golden.base import ABSENT

TEXT = [5, 9, 40, 3, 77, 12, 9, 6]


def test_every_language_model_has_a_model_type():
    named = {name for name in FAMILIES if name.endswith(("ForCausalLM", "LMHeadModel"))}
    assert named - {*LANGUAGE_MODELS.values()} == {"ExaoneMoEForCausalLM", "PhiMoEForCausalLM"}  # second names
    assert {*LANGUAGE_MODELS.values()} <= {*FAMILIES}


def test_an_architecture_that_is_named_wins():
    config = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}
    assert with_architecture(config) == config
    assert with_architecture({"model_type": ["llama"]}) == {"model_type": ["llama"]}
    for kept in ("PhimoeModel", "LlavaForConditionalGeneration", ["LlamaForCausalLM"], 7):
        config = {"model_type": "phimoe", "architectures": [kept]}
        assert with_architecture(config) == config


def test_a_model_type_wins_over_the_language_model_of_another(tmp_path):
    """A window that a Llama has no use for, and a Mistral has."""
    config = {"sliding_window": 3, "layer_types": None}
    folders = [
        changed(tmp_path / name, "mistral/window", config | {"architectures": [name]})
        for name in ("MistralForCausalLM", "LlamaForCausalLM")
    ]
    expected, found = (Engine.load(folder, dtype="float32").logits(TEXT) for folder in folders)
    assert found.equal(expected)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("llama", "LLaMAForCausalLM"), ("ernie4_5", "Ernie4_5_ForCausalLM"), ("phimoe", "PhiMoEForCausalLM")],
)
def test_early_spellings_of_a_language_model(kind, name):
    config = {"model_type": kind, "architectures": [name]}
    assert with_architecture(config) == config | {"architectures": [LANGUAGE_MODELS[kind]]}


@pytest.mark.parametrize("variant", ["gpt2/plain", "llama/gqa", "hunyuan/plain"])
def test_a_config_without_architectures(tmp_path, variant):
    expected = Engine.load(GOLDEN / variant, dtype="float32").logits(TEXT)
    for i, nothing in enumerate((ABSENT, None, [])):
        folder = changed(tmp_path / str(i), variant, {"architectures": nothing})
        assert Engine.load(folder, dtype="float32").logits(TEXT).equal(expected)
    folder = changed(tmp_path / "unknown", variant, {"architectures": None, "model_type": "hourglass"})
    with pytest.raises(CheckpointError, match="architecture ''"):
        Engine.load(folder)


@pytest.mark.parametrize("variant", ["llama/gqa", "llama/tied", "phi/plain", "phi3/plain", "lfm2/plain", "gemma/three"])
def test_names_without_the_prefix(tmp_path, variant):
    folder = changed(
        tmp_path, variant, tensors=lambda stored: {name.removeprefix("model."): x for name, x in stored.items()}
    )
    expected = Engine.load(GOLDEN / variant, dtype="float32").logits(TEXT)
    assert Engine.load(folder, dtype="float32").logits(TEXT).equal(expected)


@pytest.mark.parametrize(
    ("variant", "base"),
    [("llama/gqa", "model."), ("llama/tied", "model."), ("opt/plain", "model."), ("gpt2/plain", "transformer.")],
)
def test_names_with_the_prefix_added_by_a_module_around_the_model(tmp_path, variant, base):
    folder = changed(tmp_path, variant, tensors=lambda stored: {base + name: x for name, x in stored.items()})
    expected = Engine.load(GOLDEN / variant, dtype="float32").logits(TEXT)
    assert Engine.load(folder, dtype="float32").logits(TEXT).equal(expected)

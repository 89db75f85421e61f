"""Muse Glimmer: norms with two epsilons, defaults, what is refused."""

import json

import pytest

from models.checkpoint.fields import Fields
from models.checkpoint.wrapped import text_config
from models.config import Config
from models.errors import CheckpointError
from models.families.muse import MuseGlimmer
from tests.marks import needs_interpreter
from tests.models.answers import QUANTS, check_quantised, check_triton, load
from tests.models.copies import GOLDEN, changed

WHOLE = {"architectures": ["MuseGlimmerForConditionalGeneration"], "model_type": "muse_glimmer"}


def read(**changes) -> Config:
    text = text_config(WHOLE | {"text_config": {"model_type": "muse_glimmer_text", **changes}}, "config.json")
    return MuseGlimmer.read(Fields(text, "config.json"))


@QUANTS
def test_quantised_weights_are_near(quant):
    check_quantised("muse/others", quant, 0.1 if quant == "int8" else 0.5)


@needs_interpreter
def test_answers_of_triton():
    """A norm whose epsilon is not that of outputs' norms is no part of their fused launch."""
    check_triton("muse/others")


@pytest.mark.parametrize("field", ["post_norm_eps", "rms_norm_eps"])
def test_both_epsilons_are_used(tmp_path, field):
    config = json.loads((GOLDEN / "muse/others/config.json").read_text())["text_config"]
    folder = changed(tmp_path, "muse/others", {"text_config": config | {field: 0.1}})
    found, other = (load(each).logits([*range(5, 30)]) for each in (folder, GOLDEN / "muse/others"))
    assert (found - other).abs().max() > 1e-3
    layer = load(folder).runner.model.layers[0]
    own, rest = layer.mlp_residual.output.eps, {layer.attention_residual.input.eps, layer.attention.q_norm.eps}
    assert (own, rest) == ((0.1, {1e-3}) if field == "post_norm_eps" else (0.5, {0.1}))


def test_defaults_are_those_of_transformers():
    c = read()
    assert (c.width, c.mlp_width, c.layers, c.heads, c.kv_heads, c.head_dim) == (6656, 19968, 52, 32, 2, 128)
    assert (c.norm_eps, c.out_norm_eps, c.activation, c.max_positions) == (1e-5, 1e-8, "silu", 131072)
    assert c.windows[:5] == (2048, 2048, 2048, None, 2048) and [i for i in range(5) if c.ropes[i] is None] == [3]
    assert (c.scale(0), c.logit_cap) == (pytest.approx(3.87 * 128**-0.5), 20.0)
    assert c.logit_divisor == pytest.approx((6656 / 256) ** 0.5)
    few = read(num_hidden_layers=2, layer_rope_theta=[5.0, 0], rope_theta=7.0)
    assert few.windows == (2048, None) and few.ropes[0].theta == 7.0, "as in transformers: a layer's own is a flag"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias: expected false"),
        ({"output_multiplier": 0}, "output_multiplier: expected a number other than 0"),
        ({"layer_rope_theta": [0]}, "layer_rope_theta: expected 52 numbers, 0 or above 1"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected 52 of"),
        ({"post_norm_eps": -1.0}, "post_norm_eps"),
    ],
)
def test_refusals_name_the_field(changes, message):
    with pytest.raises(CheckpointError, match=message):
        read(**changes)

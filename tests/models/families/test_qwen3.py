"""Qwen3: configs refused, windows that a flag turns off, and the page that shows how it was added."""

import json
import re
from pathlib import Path

import pytest

from engine import Engine
from models.errors import CheckpointError
from tests.models.copies import changed

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden/qwen3"
LINEAR = {"rope_type": "linear", "factor": 2.0}
TEXT = [(7 * i * i + 3 * i) % 101 + 3 for i in range(40)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads 4"),
        ({"head_dim": 7}, "head_dim: expected an even number"),
        ({"head_dim": None}, r"q_proj.weight in .*expected \[24, 24\]"),
        ({"attention_bias": True}, "missing model.layers.0.self_attn.q_proj.bias"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window: expected a window"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected 2 of full_attention and sliding_attention"),
        ({"layer_types": ["full_attention", "linear"]}, "layer_types: expected 2 of"),
        ({"layer_types": 3}, "layer_types: expected 2 of"),
        ({"use_sliding_window": "yes"}, "use_sliding_window: expected true or false"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window: expected"),
        ({"rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}}, "this family rotates whole heads"),
    ],
)
def test_refusals_name_what_is_wrong(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        Engine.load(changed(tmp_path, "qwen3/plain", changes), dtype="float32")


def test_a_window_that_the_flag_turns_off(tmp_path):
    plain = Engine.load(GOLDEN / "plain", dtype="float32").logits(TEXT)
    other = changed(tmp_path, "qwen3/plain", {"sliding_window": 8, "max_window_layers": 0})
    assert Engine.load(other, dtype="float32").logits(TEXT).equal(plain)
    seen = json.loads((other / "config.json").read_text()) | {"use_sliding_window": True}
    (other / "config.json").write_text(json.dumps(seen))
    assert not Engine.load(other, dtype="float32").logits(TEXT).equal(plain)


def test_the_page_shows_the_whole_family():
    page = (ROOT / "docs/add-a-model.md").read_text(encoding="utf-8")
    code, *_ = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert code == (ROOT / "models/families/qwen3.py").read_text(encoding="utf-8")

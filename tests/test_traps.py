"""Traps of docs/checkpoints.md that no single part guards: whole folders, through the engine."""

import json
from pathlib import Path

import pytest

from engine import Engine
from engine.text.tokenizer import Tokenizer
from tools.random_checkpoint import make

SHAPE = {"layers": 1, "width": 16, "mlp": 16, "heads": 2, "vocab": 300, "max_positions": 64}


@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "T5Tokenizer", None, 3])
def test_tokenizer_class_changes_nothing(tmp_path: Path, name: object):
    """tokenizer.json is what counts: a class that stands beside it is often wrong."""
    make(tmp_path, **SHAPE)
    text = " two  spaces\nand a tab\t</s>, été"
    expected = Tokenizer.load(tmp_path).encode(text)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name, "legacy": True}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode(text) == expected and tokenizer.decode(expected) == text


def test_a_template_and_a_tokenizer_that_both_begin(tmp_path: Path):
    make(tmp_path, **SHAPE)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    engine = Engine.load(tmp_path, threads=1, kv_memory=1 << 16)
    assert engine.template
    ids = engine.tokenizer.encode_rendered(engine.template.render([{"role": "user", "content": "ab"}]))
    assert ids == engine.tokenizer.encode("ab") and ids.count(engine.tokenizer.bos_token_id) == 1


def test_ends_of_sequence_that_only_generation_config_lists(tmp_path: Path):
    make(tmp_path, **SHAPE)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    engine = Engine.load(tmp_path, threads=1, kv_memory=1 << 16)
    assert engine.eos_token_ids == {2, 7, 9}

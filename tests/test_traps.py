"""Traps of docs/checkpoints.md that no single part guards: whole folders, through the engine."""

import json
from pathlib import Path

import pytest

from engine import Engine
from engine.errors import CheckpointError
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


def test_without_a_tokenizer_json_the_class_says_how_texts_are_split(tmp_path: Path):
    """By `tokenizer_class`, by that of config.json, or by `model_type`, which is what counts for Qwen 2."""
    golden = Path(__file__).parent / "golden" / "text" / "qwen2_merges"
    for file in ("vocab.json", "merges.txt", "added_tokens.json"):
        (tmp_path / file).write_bytes((golden / file).read_bytes())

    def ids(name: object, kind: str | None, inner: str | None = None) -> list[int]:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "tokenizer_class": inner}))
        return Tokenizer.load(tmp_path).encode("12 e\u0301")

    digits, whole = ids("Qwen2Tokenizer", "llama"), ids("GPT2Tokenizer", "llama")
    assert len(digits) == len(whole) and digits != whole  # "12" is one token for GPT-2, "é" for Qwen
    assert ids("GPT2Tokenizer", "qwen2") == ids(None, "qwen3") == ids(None, None, "Qwen2TokenizerFast") == digits
    assert ids("CodeGenTokenizer", None) == ids("PreTrainedTokenizerFast", None) == ids(None, "opt") == ids(3, None)
    assert ids(None, "opt") == whole and ids("GPTNeoXTokenizer", None) == ids(None, "gpt_neox") not in (digits, whole)
    assert ids(None, "qwen3_5_text") == ids("Qwen3_5Tokenizer", None) == digits
    with pytest.raises(CheckpointError, match="'RobertaTokenizer'"):
        ids("RobertaTokenizerFast", "opt")


def test_tokens_that_only_other_files_list(tmp_path: Path):
    make(tmp_path, **SHAPE)
    path, size = tmp_path / "tokenizer_config.json", Tokenizer.load(tmp_path).size
    config = json.loads(path.read_text()) | {"eos_token": "<|im_end|>"}
    entry = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    listed = {size + 1: {"content": "<tool>", "special": False}, size: {"content": "<|im_end|>", "special": True}}
    path.write_text(json.dumps(config | {"added_tokens_decoder": {str(i): listed[i] | entry for i in listed}}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.size == size + 2 and tokenizer.eos_token_id == size
    assert tokenizer.encode_rendered([("<|im_end|><tool>", True)]) == [size, size + 1]
    assert tokenizer.encode("a<|im_end|>")[-1] < size <= tokenizer.encode("a<tool>")[-1]
    assert tokenizer.decode([size, size + 1]) == "<tool>"

    path.write_text(json.dumps(config))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size, "<tool>": size + 1}))
    assert Tokenizer.load(tmp_path).encode_rendered([("<|im_end|><tool>", True)]) == [size, size + 1]
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size + 7}))
    with pytest.raises(CheckpointError, match=f"would be {size}, not {size + 7}"):
        Tokenizer.load(tmp_path)


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

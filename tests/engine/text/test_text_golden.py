"""Tokens, decoded text and rendered chats equal to those of transformers and sentencepiece (tools/golden_text.py)."""

import json
from pathlib import Path

import pytest

from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "text"
CHATTING = ["bytelevel", "prepend", "metaspace", "gemma", "qwen", "tekken"]
OLDER = ["gpt2", "gpt_neox_merges", "opt", "qwen2_merges", "sp_bpe", "sp_legacy", "sp_unigram", "tekken_ranks", "kimi"]


@pytest.fixture(scope="module", params=CHATTING + OLDER)
def case(request):
    golden = json.loads((GOLDEN / f"{request.param}.json").read_text(encoding="utf-8"))
    return GOLDEN / request.param, Tokenizer.load(GOLDEN / request.param), golden


def streamed(tokenizer, ids) -> str:
    stream = tokenizer.stream()
    return "".join(stream.push([i]) for i in ids) + stream.finish()


def test_texts(case):
    _, tokenizer, golden = case
    assert len(golden["texts"]) > 15
    for text in golden["texts"]:
        assert tokenizer.encode(text["text"]) == text["ids"]
        assert tokenizer.decode(text["ids"]) == streamed(tokenizer, text["ids"]) == text["decoded"]
        if "decoded_special" in text:
            assert tokenizer.decode(text["ids"], skip_special=False) == text["decoded_special"]


def test_decodes(case):
    _, tokenizer, golden = case
    for decode in golden["decodes"]:
        text = tokenizer.decode(decode["ids"])
        assert text == streamed(tokenizer, decode["ids"])
        for tag in ("[THINK]", "[/THINK]"):  # special tokens; without them nothing would part a thought from its answer
            text = text.replace(tag, "")
        assert text == decode["decoded"]


def test_chats(case):
    folder, tokenizer, golden = case
    template = ChatTemplate.load(folder, tokenizer)
    assert (template is None) == ("chats" not in golden)
    for chat in golden.get("chats", ()):
        assert template
        spans = template.render(chat["messages"], add_generation_prompt=chat["add_generation_prompt"])
        assert spans == [(chat["text"], True)]
        assert tokenizer.encode_rendered(spans) == chat["ids"]


def test_added_tokens(case):
    _, tokenizer, golden = case
    for text in golden.get("rendered", ()):
        assert tokenizer.encode_rendered([(text["text"], True)]) == text["ids"]
        assert tokenizer.encode(text["text"], add_special=False, parse_special=True) == text["ids"]

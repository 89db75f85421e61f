"""Tokens, decoded text and rendered chats equal to those of transformers (made by tools/golden_text.py)."""

import json
from pathlib import Path

import pytest

from engine.template import ChatTemplate
from engine.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent.parent / "golden" / "text"


@pytest.fixture(scope="module", params=["bytelevel", "prepend", "metaspace"])
def case(request):
    tokenizer = Tokenizer.load(GOLDEN / request.param)
    template = ChatTemplate.load(GOLDEN / request.param, tokenizer)
    assert template is not None
    return tokenizer, template, json.loads((GOLDEN / f"{request.param}.json").read_text(encoding="utf-8"))


def test_texts(case):
    tokenizer, _, golden = case
    for text in golden["texts"]:
        assert tokenizer.encode(text["text"]) == text["ids"]
        assert tokenizer.decode(text["ids"]) == text["decoded"]
        assert tokenizer.decode(text["ids"], skip_special=False) == text["decoded_special"]


def test_chats(case):
    tokenizer, template, golden = case
    for chat in golden["chats"]:
        spans = template.render(chat["messages"], add_generation_prompt=chat["add_generation_prompt"])
        assert spans == [(chat["text"], True)]
        assert tokenizer.encode_rendered(spans) == chat["ids"]


def test_decodes(case):
    tokenizer, _, golden = case
    for decode in golden["decodes"]:
        assert tokenizer.decode(decode["ids"]) == decode["decoded"]
        stream = tokenizer.stream()
        assert "".join(stream.push([i]) for i in decode["ids"]) + stream.finish() == decode["decoded"]

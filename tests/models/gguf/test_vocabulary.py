"""Tokenizers of GGUF files: the ids of the tokenizers that they were made of."""

import json

import pytest
from sentencepiece import SentencePieceProcessor

from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from models.checkpoint.headers import Checkpoint
from tests.models.gguf.files import GOLDEN, File


def texts(name):
    """Texts of a golden file, and words of them put together in many ways."""
    golden = json.loads((GOLDEN / f"text/{name}.json").read_text(encoding="utf-8"))
    found = [text["text"] for text in golden["texts"]]
    words = [word for text in found for word in text.split(" ")]
    step = [" ".join(words[i % 7 :: i]) for i in range(3, 150)]
    return [*found, *step, *("  ".join(words[i : i + 9]) + "\n" * (i % 3) for i in range(0, len(words), 5))]


def tokenizer_of(file, path):
    """The vocabulary and the tokenizer of a file."""
    checkpoint = Checkpoint.open(file.write(path.with_suffix(".gguf")))
    return checkpoint.vocabulary, Tokenizer.of(checkpoint)


@pytest.mark.parametrize("name, pre", [("bytelevel", "llama-bpe"), ("prepend", None)])
def test_tokenizers_give_the_ids_of_their_own_files(name, pre, tmp_path):
    file = File(GOLDEN / "llama/plain")
    file.folder = GOLDEN / "text" / name
    # The key of the first vocabulary for unknown tokens stays, and is an ordinary token of the second.
    file.keys |= file.vocabulary() | ({"tokenizer.ggml.pre": pre} if pre else {})
    (_, ours), theirs = tokenizer_of(file, tmp_path / "file"), Tokenizer.load(file.folder)
    for text in texts(name):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.special_tokens.items() >= theirs.special_tokens.items() - {("pad_token", "<unk>")}
    chats = json.loads((GOLDEN / f"text/{name}.json").read_text(encoding="utf-8"))["chats"]
    template = ChatTemplate.load(tmp_path / "file.gguf", ours)
    for chat in chats:
        spans = template.render(chat["messages"], add_generation_prompt=chat["add_generation_prompt"])
        assert spans == [(chat["text"], True)]


def test_scores_of_a_sentencepiece_model(tmp_path):
    folder = GOLDEN / "text/sp_bpe"
    model = SentencePieceProcessor(str(folder / "tokenizer.model"))
    ids = range(model.get_piece_size())
    kinds = {1: None, 2: model.is_unknown, 3: model.is_control, 5: model.is_unused, 6: model.is_byte}
    file = File(GOLDEN / "llama/plain")
    file.keys |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [next((k for k, test in kinds.items() if test and test(i)), 1) for i in ids],
        **{f"tokenizer.ggml.{name}_token_id": i for name, i in (("bos", model.bos_id()), ("eos", model.eos_id()))},
    }
    _, ours = tokenizer_of(file, tmp_path / "file")
    for text in texts("sp_bpe"):
        assert ours.encode(text, add_special=False) == model.encode(text)
        assert ours.encode(text)[0] == model.bos_id()
        assert ours.decode(model.encode(text)) == model.decode(model.encode(text))


def test_what_ends_a_text(tmp_path):
    file = File(GOLDEN / "llama/plain")
    tokens = ["<unk>", "<s>", "</s>", "<|eot_id|>", "<|im_end|>", "[PAD5]"]
    file.keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [2, 3, 3, 3, 1, 5]}
    file.keys |= {
        "tokenizer.ggml.eom_token_id": 0,
        "tokenizer.chat_template.tools": "T",
        "tokenizer.chat_template": "D",
    }
    file.keys["tokenizer.chat_templates"] = ["tools"]
    read, ours = tokenizer_of(file, tmp_path / "file")
    assert read.ends() == [2, 0, 3]  # <|im_end|> is an ordinary token here
    assert ours.size == 5  # padding is no token
    templates = ours.config["chat_template"]
    assert templates == [{"name": "default", "template": "D"}, {"name": "tools", "template": "T"}]

"""Prompts for infilling: the forms of models' tokens, and texts that spell such tokens."""

import pytest
import tokenizers

from engine.errors import UsageError
from engine.text.prompting import FORMS, infill
from engine.text.tokenizer import Tokenizer

LETTERS = [*map(chr, range(33, 127)), *"▁｜"]


def tokenizer(folder, special, decoder=None):
    """A tokenizer of characters with control tokens."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(LETTERS)}, []))
    library.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in special])
    if decoder is not None:
        library.decoder = decoder
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.prefix)
def test_forms(tmp_path, form):
    marks = [mark for mark in (form.prefix, form.suffix, form.middle) if mark]
    made = tokenizer(tmp_path, [*marks, *form.ends])
    ids, ends = infill(made, "ab", f"c{form.suffix}")
    first, second = f"{form.prefix}ab", f"{form.suffix}c{form.suffix}"
    text = second + first if form.suffix_first else first + second
    assert made.decode(ids, skip_special=False).replace(" ", "") == text + form.middle
    every = {made.encode_rendered([(mark, True)])[0] for mark in marks}
    assert [token for token in ids if token in every] == [
        made.encode_rendered([(mark, True)])[0] for mark in ([*marks[:2]][::-1] if form.suffix_first else marks)
    ], "the suffix's own spelling became a control token"
    assert ends == {made.encode_rendered([(end, True)])[0] for end in form.ends}


def test_a_tokenizer_without_such_tokens(tmp_path):
    with pytest.raises(UsageError, match="no tokens for filling in"):
        infill(tokenizer(tmp_path, ["<fim_prefix>"]), "a", "b")

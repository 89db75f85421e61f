"""Vocabularies of GGUF files in the cache: the same tokenizer, and the lists of the file are not read again."""

import os
import threading
from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from models import file_cache
from models.checkpoint.headers import Checkpoint
from models.file_cache import FileCache
from models.gguf import cached_vocabulary, reader
from models.gguf.cached_vocabulary import CachedVocabulary, NewVocabulary
from models.gguf.reader import GGUF, Skipped
from tests.models.gguf.files import GOLDEN, File, sentencepiece_file

TEXTS = ["", "a", " Once upon a time,\nthere  was", "<s>x</s>", "żółw 日本語 🙂", "  two", "1234567"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Every list is long, and files may have been written just now."""
    for module in (reader, cached_vocabulary):
        monkeypatch.setattr(module, "LONG", 1)
    monkeypatch.setattr(file_cache, "TICK", -3600)
    return FileCache(tmp_path / "cache", 1 << 30)


def opened(path, cache):
    """The checkpoint and its tokenizer, once what was made is written."""
    checkpoint = Checkpoint.open(path, cache)
    tokenizer = Tokenizer.of(checkpoint)
    assert tokenizer is not None
    if isinstance(checkpoint.vocabulary, NewVocabulary):
        checkpoint.vocabulary.keep()
    for thread in threading.enumerate():
        if thread.name == "coppice-file-cache":
            thread.join()
    return checkpoint, tokenizer


def merged():
    """A file of byte-level BPE."""
    file = File(GOLDEN / "llama/plain")
    file.folder = GOLDEN / "text/bytelevel"
    file.keys |= file.vocabulary() | {"tokenizer.ggml.pre": "llama-bpe"}
    return file


FILES = {
    "bytes": merged,
    "pieces with scores": sentencepiece_file,
    "pieces without scores": lambda: File(GOLDEN / "llama/plain"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_later_start_has_the_same_tokenizer(kind, cache, tmp_path, monkeypatch):
    path = FILES[kind]().write(tmp_path / "file.gguf")
    (plain, want), (first, new) = opened(path, None), opened(path, cache)
    assert type(first.vocabulary) is NewVocabulary and len([*cache.folder.iterdir()]) == 1
    monkeypatch.setattr(reader._Header, "elements", lambda *_: pytest.fail("a list was read"))
    later, found = opened(path, cache)
    assert type(later.vocabulary) is CachedVocabulary
    for tokenizer in (new, found):
        assert tokenizer.fingerprint == want.fingerprint and tokenizer.config == want.config
        assert tokenizer.special_tokens == want.special_tokens and tokenizer.special_ids == want.special_ids
        for text in TEXTS:
            for special in (False, True):
                assert tokenizer.encode(text, parse_special=special) == want.encode(text, parse_special=special)
        assert tokenizer.decode([*range(want.size)]) == want.decode([*range(want.size)])
    assert later.config == plain.config and later.eos_token_ids == plain.eos_token_ids
    assert later.tensors == plain.tensors and later.bos_token_id == plain.bos_token_id


def test_long_lists_are_skipped(cache, tmp_path):
    path = merged().write(tmp_path / "file.gguf")
    whole = GGUF.open(path)
    again = GGUF.open(path, whole.lists)
    skipped = {key for key, value in again.metadata.items() if isinstance(value, Skipped)}
    assert {"tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"} <= skipped
    assert all(again.metadata[key].count == len(whole.metadata[key]) for key in skipped)
    assert again.tensors == whole.tensors and again.lists == {}
    assert GGUF.open(path, dict.fromkeys(whole.lists, 1 << 40)) == whole  # ends that lie outside are no ends


def test_a_file_that_changed_is_read_again(cache, tmp_path):
    file = merged()
    path = file.write(tmp_path / "file.gguf")
    before, status = opened(path, cache)[1], path.stat()
    tokens: Any = file.keys["tokenizer.ggml.tokens"]
    last = max(range(len(tokens)), key=lambda i: (len(tokens[i]), i))
    old = tokens[last]
    content = path.read_bytes()
    at = content.index(len(old.encode()).to_bytes(8, "little") + old.encode()) + 8
    with path.open("r+b") as stream:  # in place, as long as before, its time set back
        stream.seek(at)
        stream.write(bytes([content[at] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    checkpoint = Checkpoint.open(path, cache)
    assert type(checkpoint.vocabulary) is NewVocabulary
    assert checkpoint.vocabulary.tokens[last] != old and before.fingerprint


def test_what_is_damaged_is_read_again(cache, tmp_path, capfd):
    path = merged().write(tmp_path / "file.gguf")
    opened(path, cache)
    [kept] = cache.folder.iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    assert type(Checkpoint.open(path, cache).vocabulary) is NewVocabulary
    assert "cut short" in capfd.readouterr().err


def test_a_token_with_a_zero_byte_is_not_kept(cache, tmp_path):
    file = merged()
    tokens: Any = file.keys["tokenizer.ggml.tokens"]
    tokens[-1] = "a\0b"
    path = file.write(tmp_path / "file.gguf")
    opened(path, cache)
    assert not cache.folder.exists()


def test_merges_that_the_library_refused_are_not_kept(cache, tmp_path):
    path = merged().write(tmp_path / "file.gguf")
    checkpoint = Checkpoint.open(path, cache)
    Tokenizer.of(checkpoint)
    vocabulary = checkpoint.vocabulary
    assert isinstance(vocabulary, NewVocabulary) and vocabulary._tokenizer
    assert vocabulary.checked_merges() and vocabulary._tokenizer is None


def test_short_vocabularies_are_not_kept(tmp_path):
    cache = FileCache(tmp_path / "cache", 1 << 30)
    path = merged().write(tmp_path / "file.gguf")
    checkpoint, _ = opened(path, cache)
    assert not isinstance(checkpoint.vocabulary, NewVocabulary) and not cache.folder.exists()


@pytest.mark.parametrize("texts", [[], ["a"], ["a", "", "b"], ["", ""]])
def test_texts_are_joined_and_parted(texts):
    joined = cached_vocabulary._joined(texts)
    assert joined is not None and cached_vocabulary._texts(memoryview(joined)) == texts


@pytest.mark.parametrize("texts", [[""], ["a\0b"], ["a", "\0"]])
def test_texts_that_cannot_be_told_apart(texts):
    assert cached_vocabulary._joined(texts) is None

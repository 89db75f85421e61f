"""Parsed GGUF vocabularies in cache files, so that later starts skip the lists in the metadata.

Texts are stored joined by zero bytes and split again in one call.
"""

import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from models.file_cache import CachedFile, FileCache, changed_since, identity, in_background, name_of
from models.gguf.reader import GGUF, LONG, parts_of
from models.gguf.vocabulary import FileVocabulary, ModelPieces, kind_of, read

BPE = ("vocab", "merges")  # parts of a tokenizer.json's model that have sections of their own


def open_gguf(path: Path, cache: FileCache | None) -> tuple[GGUF, FileVocabulary | None]:
    """Return the headers of a model's files, and its vocabulary; None: it has none. Raises CheckpointError.

    Args:
        cache: may have the vocabulary; otherwise a `NewVocabulary` can be stored there. None: nothing is stored.
    """
    if cache is None:
        file = GGUF.open(path)
        return file, read(file)
    opened, first = time.time(), parts_of(path)[0]
    try:
        known = identity([first])
    except OSError:  # opening it reports the fault
        return open_gguf(path, None)
    name = name_of("vocabulary", known)
    if found := cache.open(name):
        file = GGUF.open(path, dict(found.facts["lists"]))
        return file, CachedVocabulary(file, found)
    file = GGUF.open(path)
    kind = kind_of(file)
    new = kind is not None and len(file.metadata.get("tokenizer.ggml.tokens", ())) >= LONG
    return file, NewVocabulary(file, kind, cache, name, known, opened) if kind and new else read(file)


class NewVocabulary(FileVocabulary):
    """A vocabulary that can be cached: it remembers the results of its methods.

    Args:
        file, kind: see `FileVocabulary`.
        cache, name: the folder of files, and the name there.
        identity: the identity of the model's first file.
        opened: a moment of `time.time` before that file was read.
    """

    def __init__(self, file: GGUF, kind: str, cache: FileCache, name: str, identity: str, opened: float):
        super().__init__(file, kind)
        self._cache, self._name, self._identity, self._opened = cache, name, identity, opened
        self._config: dict[str, Any] | None = None
        self._model: bytes | None = None
        self._tokenizer: dict[str, Any] | None = None

    def config(self) -> dict[str, Any]:
        self._config = super().config()
        return self._config

    def model(self) -> bytes:
        self._model = super().model()
        return self._model

    def tokenizer(self) -> dict[str, Any]:
        self._tokenizer = super().tokenizer()
        return self._tokenizer

    def checked_merges(self) -> list[tuple[str, str]]:
        """The library refused the merges of `tokenizer`, which is therefore not cached."""
        self._tokenizer = None
        return super().checked_merges()

    def keep(self) -> None:
        """Write the results in a thread, while the weights are read; then drop them."""
        config, model, tokenizer = self._config, self._model, self._tokenizer
        self._config = self._model = self._tokenizer = None
        facts = {"lists": [*self.file.lists.items()], "ids": self.ids, "ends": self.ends(), "config": config}

        def work() -> None:
            sections = self._sections(facts, model, tokenizer)
            with suppress(OSError):  # the file has been removed
                path = self.file.path
                if sections and not changed_since([path], self._opened) and identity([path]) == self._identity:
                    self._cache.write(self._name, facts, [memoryview(section) for section in sections])

        if config is not None:
            in_background(work)

    def _sections(
        self, facts: dict[str, Any], model: bytes | None, tokenizer: dict[str, Any] | None
    ) -> list[bytes] | None:
        """Return the large parts; smaller ones join `facts`. None: nothing was made, or a text contains a zero byte."""
        if model is not None:
            names, kinds = self.pieces
            joined = _joined(names)
            return None if joined is None else [model, joined, bytes(kinds)]
        if tokenizer is None:
            return None
        bpe = tokenizer["model"]
        facts["tokenizer"] = tokenizer | {"model": {key: bpe[key] for key in bpe if key not in BPE}}
        lefts, rights = zip(*bpe["merges"], strict=True) if bpe["merges"] else ((), ())
        parts = [_joined([*bpe["vocab"]]), _joined(lefts), _joined(rights)]
        ids = array("I", bpe["vocab"].values()).tobytes()
        return None if None in parts else [ids, *(part for part in parts if part is not None)]


class CachedVocabulary(FileVocabulary):
    """A vocabulary from the cache. It has no lists, only the results that `FileVocabulary` computes from them.

    Args:
        file: the header, without its lists.
        found: the file in the cache.
    """

    def __init__(self, file: GGUF, found: CachedFile):
        self.file, self.ids, self._found = file, found.facts["ids"], found

    def ends(self) -> list[int]:
        return self._found.facts["ends"]

    def config(self) -> dict[str, Any]:
        return self._found.facts["config"]

    @cached_property
    def has_scores(self) -> bool:
        return "tokenizer" not in self._found.facts

    def model(self) -> bytes:
        return bytes(self._found.sections[0])

    @cached_property
    def pieces(self) -> ModelPieces:
        return ModelPieces(_texts(self._found.sections[1]), [*self._found.sections[2]])

    def tokenizer(self) -> dict[str, Any]:
        spec: Mapping[str, Any] = self._found.facts["tokenizer"]
        ids, *texts = self._found.sections
        tokens, lefts, rights = map(_texts, texts)
        vocab = dict(zip(tokens, memoryview(ids).cast("I").tolist(), strict=True))
        return {**spec, "model": {**spec["model"], "vocab": vocab, "merges": [*zip(lefts, rights, strict=True)]}}


def _joined(texts: Sequence[str]) -> bytes | None:
    """Join texts; None: they could not be split again, because of a zero byte, or of a single text that is empty."""
    joined = "\0".join(texts)
    return joined.encode() if joined.count("\0") == max(0, len(texts) - 1) and (joined or not texts) else None


def _texts(joined: memoryview) -> list[str]:
    """Split joined texts."""
    return str(joined, "utf-8").split("\0") if joined.nbytes else []

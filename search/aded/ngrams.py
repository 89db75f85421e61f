"""Stores of counted tri-grams: files of 12 bytes per entry, sorted, read through a memory map.

The file, in the machine's byte order: a header (`models.checkpoint.token_files`), then the keys of all entries,
ascending, 64 bits each, then their counts, 32 bits each. The key of tri-gram (a, b, c) is the number abc in base 2^21.
The entry with c = REST counts all omitted successors of (a, b), so that the counts after a bi-gram sum to its own count
(eq. 1 of ADED).
"""

import functools
import itertools
import os
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.contract import Task
from engine.drafts.backoff import BITS
from engine.errors import UsageError
from models.checkpoint.files import locked, replacing
from models.checkpoint.tensor_files import buffer_of
from models.checkpoint.token_files import TokenFileKind, TokenFileWriter

REST = (1 << BITS) - 1
NGRAM_FILE = TokenFileKind("n-gram store", b"COPPICE3", 1, "Q")  # count: entries
SUCCESSORS = 12  # the paper's t: successors kept per bi-gram
WAIT = 60.0  # seconds to wait for another run that writes a store
PIECE = 1 << 20  # entries that are checked at a time
MAX_LOOPED = 512  # the most entries that a loop adds up; for more, tensors are faster
REMEDY = "count one for this model: python -m tools.ngrams --model DIR --input FILES --output FILE"

Run = tuple[Tensor, Tensor]  # keys, ascending and distinct: int64; and their counts: int64, or int32 of a store


class Successors(NamedTuple):
    """Tokens that followed a context, most frequent first, and their counts; `total` includes tokens left out."""

    tokens: list[int]
    counts: list[int]
    total: int


NONE = Successors([], [], 0)


class NGramStore:
    """A store, mapped into memory. Made by `open_store`.

    Args:
        path: the file.

    Raises:
        UsageError: it cannot be read, is no store, is damaged, or has entries that no text can produce.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            found = NGRAM_FILE.read(path, lambda entries: 12 * entries)
        except ValueError as error:
            raise UsageError(str(error), where=str(path), remedy=REMEDY) from error
        self.vocab_size, self.fingerprint, [entries], self._body = found
        self.keys, self.counts = self._body[: 8 * entries].cast("q"), self._body[8 * entries :].cast("I")
        if fault := _fault(*self.run(), self.vocab_size):
            raise UsageError(f"the n-gram store is not valid: {fault}", where=str(path), remedy=REMEDY)

    def __len__(self) -> int:
        """Return the number of entries: tri-grams, and one entry per bi-gram for its omitted successors."""
        return len(self.keys)

    def check(self, vocab_size: int, fingerprint: str) -> None:
        """Check that the store was counted with the model's tokenizer, see `vocabulary`. Raises UsageError."""
        if self.fingerprint != fingerprint or self.vocab_size > vocab_size:
            what = "the n-gram store was counted with another model's tokenizer"
            raise UsageError(what, where=str(self.path), remedy=REMEDY)

    @functools.lru_cache(maxsize=1 << 16)  # noqa: B019  (a process has few stores, each for good)
    def after_pair(self, a: int, b: int) -> Successors:
        """The successors of the tokens a, b."""
        key = (a << BITS | b) << BITS
        start = bisect_left(self.keys, key)
        end = bisect_left(self.keys, key + REST + 1, start)
        if start == end:
            return NONE
        tokens, counts = [k & REST for k in self.keys[start:end]], self.counts[start:end].tolist()
        total = sum(counts)
        ranked = sorted((-n, t) for n, t in zip(counts, tokens, strict=True) if t != REST)
        return Successors([t for _, t in ranked], [-n for n, _ in ranked], total)

    @functools.lru_cache(maxsize=1 << 16)  # noqa: B019
    def after(self, b: int) -> Successors:
        """The 12 most frequent successors of the token b, by the tri-grams that begin with b and the successor."""
        start, end = bisect_left(self.keys, b << 2 * BITS), bisect_left(self.keys, (b + 1) << 2 * BITS)
        if end - start <= MAX_LOOPED:
            found: dict[int, int] = {}
            for key, n in zip(self.keys[start:end], self.counts[start:end], strict=True):
                token = key >> BITS & REST
                found[token] = found.get(token, 0) + n
            ranked = sorted((-n, token) for token, n in found.items())[:SUCCESSORS]
            return Successors([t for _, t in ranked], [-n for n, _ in ranked], sum(found.values()))
        keys, counts = self.run(start, end)
        tokens, place = torch.unique_consecutive(keys >> BITS & REST, return_inverse=True)
        sums = torch.zeros_like(tokens).scatter_add_(0, place, counts.long())
        order = torch.argsort(sums, descending=True, stable=True)[:SUCCESSORS]
        return Successors(tokens[order].tolist(), sums[order].tolist(), int(sums.sum()))

    def run(self, start: int = 0, end: int | None = None) -> Run:
        """Entries as tensors that share the store's memory."""
        end = len(self) if end is None else end
        if start == end:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
        first = 8 * len(self)
        keys = torch.frombuffer(self._body, dtype=torch.int64, count=end - start, offset=8 * start)
        counts = torch.frombuffer(self._body, dtype=torch.int32, count=end - start, offset=first + 4 * start)
        return keys, counts


def _fault(keys: Tensor, counts: Tensor, vocab: int) -> str:
    """Return the fault of a store's entries, see the top; "" if there is none. Tokens must be less than `vocab`."""
    if not 0 < vocab < REST:
        return f"expected a vocabulary of 1 to {REST - 1} tokens, got {vocab}"
    for at in range(0, len(keys), PIECE):
        some, after = keys[at : at + PIECE], keys[at + 1 : at + PIECE + 1]
        if not (after > some[: len(after)]).all():
            return "expected tri-grams in ascending order, each once"
        first, second, third = some >> 2 * BITS, some >> BITS & REST, some & REST
        if not ((first >= 0) & (first < vocab) & (second < vocab) & ((third < vocab) | (third == REST))).all():
            return f"expected token ids from 0 to {vocab - 1}"
        if not (counts[at : at + PIECE] > 0).all():
            return f"expected counts from 1 to {2**31 - 1}"
    return ""


def open_store(path: str | Path) -> NGramStore:
    """The store in a file, read and checked again only when the file has changed. Raises UsageError."""
    try:
        stat = os.stat(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"the n-gram store cannot be read: {error}", where=str(path), remedy=REMEDY) from error
    return _open(os.path.realpath(path), stat.st_mtime_ns, stat.st_size, stat.st_ino)


@functools.lru_cache(maxsize=4)
def _open(path: str, *_: int) -> NGramStore:
    return NGramStore(path)


def vocabulary(task: Task) -> tuple[int, str]:
    """Size and fingerprint of a task's vocabulary, as `NGramStore.check` and `add_to_store` take them."""
    return task.vocab_size, task.tokenizer.fingerprint if task.tokenizer is not None else ""


# --- counting ---


def count(tokens: Sequence[int] | Tensor) -> Run:
    """The tri-grams of one text."""
    t = torch.as_tensor(tokens, dtype=torch.int64)
    keys = ((t[:-2] << BITS | t[1:-1]) << BITS) | t[2:] if len(t) > 2 else t[:0]
    return torch.unique(keys, return_counts=True)


def merge(runs: Sequence[Run], successors: int = SUCCESSORS, *, block: int = 1 << 21) -> Iterator[Run]:
    """Add counts up, a range of keys at a time; the memory needed does not grow with the runs.

    Args:
        runs: counts of several texts or stores.
        successors: the number of most frequent successors kept per bi-gram, at least 4. 0 keeps all.
        block: approximate number of entries that are merged at a time.

    Yields:
        runs with ascending keys.
    """
    step = max(1, block // 64 // max(1, len(runs)))
    samples = torch.cat([keys[step - 1 :: step] for keys, _ in runs]).sort().values
    borders = (samples[63::64] >> BITS << BITS).unique().tolist()  # a context is never split
    for low, high in itertools.pairwise([0, *borders, (1 << 3 * BITS) - 1]):
        parts = []
        for keys, counts in runs:
            start, end = torch.searchsorted(keys, torch.tensor([low, high])).tolist()
            parts.append((keys[start:end], counts[start:end]))
        keys, place = torch.unique(torch.cat([k for k, _ in parts]), return_inverse=True)
        counts = torch.zeros_like(keys).scatter_add_(0, place, torch.cat([c for _, c in parts]).long())
        if len(keys):
            yield _cut(keys, counts, successors) if successors else (keys, counts)


def _cut(keys: Tensor, counts: Tensor, successors: int) -> Run:
    """Keep the most frequent successors of each bi-gram (among equals the lower token), and add the others into one."""
    rest = keys & REST == REST
    order = torch.argsort(torch.where(rest, -1, counts), descending=True, stable=True)
    order = order[torch.argsort(keys[order] >> BITS, stable=True)]
    _, place, sizes = torch.unique_consecutive(keys[order] >> BITS, return_inverse=True, return_counts=True)
    rank = torch.arange(len(keys)) - (sizes.cumsum(0) - sizes)[place]
    out = torch.empty_like(rest)
    out[order] = rank >= successors
    keys, place = torch.unique(torch.where(out, keys | REST, keys), return_inverse=True)
    return keys, torch.zeros_like(keys).scatter_add_(0, place, counts)


# --- writing ---


def write_store(path: str | Path, runs: Iterable[Run], vocab_size: int, fingerprint: str) -> int:
    """Write a store; a write that fails leaves no file, or the old one.

    Args:
        path: the file.
        runs: runs whose keys ascend from each to the next; counts above 2^31 - 1 are written as 2^31 - 1.
        vocab_size: tokens are less than this.
        fingerprint: the tokenizer's; empty without a tokenizer.

    Returns:
        the number of entries written.

    Raises:
        UsageError: the file cannot be written, or the vocabulary is too large.
    """
    if vocab_size >= REST:
        raise UsageError(f"n-gram stores hold vocabularies of less than {REST} tokens, this has {vocab_size}")
    path = Path(path)
    try:
        with replacing(path, 0o666) as file, tempfile.TemporaryFile(dir=path.parent) as tail:
            writer, entries = TokenFileWriter(NGRAM_FILE, file), 0
            for keys, counts in runs:
                entries += len(keys)
                keys, counts = keys.contiguous(), counts.clamp(max=2**31 - 1).int().contiguous()
                writer.add(buffer_of(keys))
                tail.write(buffer_of(counts))
            tail.seek(0)
            while piece := tail.read(1 << 20):
                writer.add(piece)
            writer.finish(vocab_size, fingerprint, entries)
    except OSError as error:
        raise UsageError(f"the n-gram store cannot be written: {error}", where=str(path)) from error
    return entries


def add_to_store(path: str | Path, run: Run, vocab_size: int, fingerprint: str) -> None:
    """Add counts to a store, which is made if the file does not exist.

    Raises:
        UsageError: the file is no store of this tokenizer, or cannot be written.
    """
    try:
        with locked(Path(path).resolve().parent, WAIT):
            runs = [run]
            if Path(path).exists():
                store = open_store(path)
                store.check(vocab_size, fingerprint)
                runs.append(store.run())
            write_store(path, merge(runs), vocab_size, fingerprint)
    except BlockingIOError:
        what = f"the n-gram store cannot be written: another program has locked its folder for {WAIT} s"
        raise UsageError(what, where=str(path), remedy="let every run save to a store of its own") from None
    except OSError as error:
        raise UsageError(f"the n-gram store cannot be written: {error.strerror}", where=str(path)) from error

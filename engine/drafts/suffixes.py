"""Drafts from suffixes: what followed earlier occurrences of the text's end, in this request and in finished ones.

SuffixDecoding (arXiv 2411.04975). A request's own text takes precedence; the texts of finished requests are in a
`SuffixStore`, which drops the oldest. `kernels.suffixes` finds the matches and estimates the probabilities.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engine.drafts import Draft
from engine.errors import UsageError, reason_of
from kernels import suffixes
from kernels.suffixes import BOUNDARY, MOST_MATCHED, MOST_NODES, Suffixes, token_bits
from models.checkpoint.files import locked, replacing
from models.checkpoint.token_files import TokenFileKind, TokenFileWriter

CAPACITY = 10_000_000  # tokens of ended requests: 158 MB when full
FIRST_CAPACITY, GROWTH = 1 << 16, 4  # tokens that a store has room for at first, and the factor by which it grows
LEAST_SCORE = 1 / 256
OWN_BONUS = 2  # a match in the request's own text counts as if it were this many tokens longer
MOST_OWN = 1 << 18  # newest tokens of a request that are searched
LEAST_REPEATED = 64  # first tokens of a text that are not stored again
PIECE = 16  # tokens of a branch that become text at once


@dataclass
class TextOwner:
    """The texts of one salt in a store.

    Args:
        number: the number in the marks of their symbols.
        end: the count of written symbols after the last of them.
    """

    number: int
    end: int = 0


class SuffixStore:
    """The texts of ended requests, in bounded memory. Texts of one salt match those of this salt only.

    Args:
        vocab_size: tokens are less than this.
        fingerprint: the tokenizer's; "" if there is none.
        capacity: tokens that are kept, a boundary for each text included.

    Raises:
        UsageError: the capacity or the vocabulary is out of range.
    """

    def __init__(self, vocab_size: int, fingerprint: str = "", capacity: int = CAPACITY):
        try:
            Suffixes(capacity, vocab_size)  # takes no memory before it is written to
            self.text = Suffixes(min(capacity, FIRST_CAPACITY), vocab_size)
        except ValueError as error:
            raise UsageError(f"the suffix store cannot be made: {error}") from error
        self.capacity = capacity
        self.vocab_size, self.fingerprint, self.impl = vocab_size, fingerprint, suffixes.best()
        self._owners: dict[bytes, TextOwner] = {}  # by the digest of their salt, the least recently added first
        self._free_numbers = list[int]()  # numbers below the next one
        self._next_number = 0

    def __len__(self) -> int:
        """Tokens that are kept, a boundary for each text included."""
        return len(self.text)

    def mark(self, salt: str) -> int | None:
        """The mark of a salt's symbols; None if it has none."""
        owner = self._owners.get(_digest(salt))
        return None if owner is None else owner.number << self.text.token_bits

    def add(self, salt: str, tokens: Sequence[int]) -> None:
        """Add an ended text; a long beginning that the store has already is left out, as in a conversation's next turn.

        Raises ValueError for tokens out of the vocabulary.
        """
        digest = _digest(salt)
        owner = self._owners.pop(digest, None) or TextOwner(self._number())
        self._owners[digest] = owner
        mark = owner.number << self.text.token_bits
        repeated = suffixes.known(self.text, tokens, mark, impl=self.impl)
        if repeated == len(tokens):
            return
        if repeated >= LEAST_REPEATED:
            tokens = tokens[repeated - MOST_MATCHED :]
        self._make_room(1 + len(tokens))
        suffixes.add(self.text, [BOUNDARY, *tokens], mark, impl=self.impl)
        owner.end = self.text.fields.written

    def _make_room(self, symbols: int) -> None:
        """Take more memory if `symbols` more symbols need it and the capacity allows it; all chains are made again."""
        old, room = self.text, self.text.fields.capacity
        while room < min(len(old) + symbols, self.capacity):
            room = min(GROWTH * room, self.capacity)
        if room == old.fields.capacity:
            return
        self.text = Suffixes(room, self.vocab_size)
        for part in old.parts():
            suffixes.add(self.text, part, impl=self.impl)
        for owner in self._owners.values():
            owner.end += self.text.fields.written - old.fields.written

    def _number(self) -> int:
        """A number for a new salt; if all are taken, that of the salt that had no text for the longest time."""
        if self._free_numbers:
            return self._free_numbers.pop()
        if self._next_number < most_salts(self.vocab_size):
            self._next_number += 1
            return self._next_number - 1
        owner = self._owners.pop(next(iter(self._owners)))
        self.text.forget(self.text.fields.written - owner.end)
        return owner.number

    def save(self, path: str | Path) -> None:
        """Write the texts to a file, which is replaced as a whole. It holds digests of salts. Raises UsageError."""
        written = self.text.fields.written
        owners = [
            (owner.number, written - owner.end, digest)
            for digest, owner in self._owners.items()
            if written - owner.end < len(self.text)
        ]
        write_texts(path, SavedTexts(self.vocab_size, self.fingerprint, self.text.parts(), owners))

    def load(self, path: str | Path) -> None:
        """Read texts into an empty store; if they exceed its capacity, only the newest.

        Raises:
            UsageError: the file cannot be read, is damaged, or has the texts of another tokenizer.
        """
        assert not len(self), "the store has texts"
        saved = read_texts(path, self.vocab_size, self.fingerprint)
        self._make_room(sum(map(len, saved.parts)))
        for part in saved.parts:
            suffixes.add(self.text, part[-self.capacity :], impl=self.impl)
        written = self.text.fields.written
        kept = [owner for owner in saved.owners if owner[1] < len(self)]
        self._owners = {digest: TextOwner(number, written - age) for number, age, digest in kept}
        taken = {owner.number for owner in self._owners.values()}
        self._next_number = max(taken, default=-1) + 1
        self._free_numbers = [number for number in range(self._next_number) if number not in taken]


def full_store_bytes() -> int:
    """Bytes of a full store of the default capacity. It takes no more while it grows, because the new memory is not
    written to before the old one is copied."""
    return Suffixes(CAPACITY, 2).nbytes


def _digest(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class SuffixDrafter:
    """The drafter of an engine: opens a `SuffixRequest` for each request, and keeps ended texts.

    Args:
        store: the store of ended texts.
    """

    def __init__(self, store: SuffixStore):
        self.store = store

    def open(self, salt: str | None, prompt: Sequence[int]) -> "SuffixRequest":
        return SuffixRequest(self.store, salt, prompt)


class SuffixRequest:
    """Drafts for one request; see `engine.drafts.RequestDrafter`.

    The text is the part that all beams share. A long branch also becomes text, a piece at a time, because the samples
    of one request resemble each other.

    Args:
        store: the store of ended texts.
        salt: the request's salt; None: it uses no other request's text and leaves none.
        prompt: token ids.
    """

    def __init__(self, store: SuffixStore, salt: str | None, prompt: Sequence[int]):
        self.store, self.salt, self.prompt = store, salt, list(prompt)
        self._text = self._empty(len(prompt))
        self._tail, self._length = list[int](), 0  # the last tokens of the text, and how many it has
        self._pieces = set[tuple[int, ...]]()  # pieces of branches: the place of their end, and their tokens
        self.learn(self.prompt)

    def learn(self, tokens: Sequence[int]) -> None:
        self._append(tokens)
        self._tail = [*self._tail, *tokens[-MOST_MATCHED:]][-MOST_MATCHED:]
        self._length += len(tokens)

    def draft(self, ahead: Sequence[int], nodes: int, depth: int) -> Draft:
        if len(ahead) >= 2 * PIECE:
            self._learn_branch(ahead)
        tail = [*self._tail, *ahead[-MOST_MATCHED:]]
        sources = [(self._text, 0, OWN_BONUS)]
        if self.salt is not None and (mark := self.store.mark(self.salt)) is not None:
            sources.append((self.store.text, mark, 0))
        nodes = min(nodes, MOST_NODES)
        return Draft(*suffixes.propose(sources, tail, nodes, depth, LEAST_SCORE, impl=self.store.impl))

    def close(self, tokens: Sequence[int]) -> None:
        if self.salt is not None:
            self.store.add(self.salt, [*self.prompt, *tokens])

    def _learn_branch(self, ahead: Sequence[int]) -> None:
        """Add the last whole piece of a branch to the text, with the tokens before it, unless it was added already."""
        end = (self._length + len(ahead)) // PIECE * PIECE - self._length
        start = end - PIECE
        piece = (self._length + end, *ahead[start:end])
        if start < 0 or piece in self._pieces:
            return
        self._pieces.add(piece)
        self._append([BOUNDARY, *[*self._tail, *ahead[:start]][-PIECE // 2 :], *ahead[start:end], BOUNDARY])
        self._append(self._tail[-PIECE // 2 :])  # context for the tokens that follow

    def _append(self, symbols: Sequence[int]) -> None:
        wanted = len(self._text) + len(symbols)
        if self._text.fields.capacity < min(wanted, MOST_OWN):
            old, self._text = self._text, self._empty(wanted)
            for part in old.parts():
                suffixes.add(self._text, part, impl=self.store.impl)
        suffixes.add(self._text, symbols, impl=self.store.impl)

    def _empty(self, length: int) -> Suffixes:
        """An empty text with room for more than twice `length` tokens."""
        return Suffixes(min(2 * length + 512, MOST_OWN), self.store.vocab_size, fine=True)


SUFFIX_FILE = TokenFileKind("suffix store", b"COPPICES", 1, "QI", padding=4)  # counts: symbols, salts
OWNER = struct.Struct("=II16s")  # the number in marks, the age of the newest symbol, less one, the digest of the salt
MOST_SALTS = 1 << 20
WAIT = 60.0  # seconds to wait for another run that writes the file
PIECE_SYMBOLS = 1 << 18  # symbols written at a time
REMEDY = "remove the file, or name another"


def most_salts(vocab_size: int) -> int:
    """The number of salts that marks can tell apart; the highest mark is that of boundaries."""
    return min(MOST_SALTS, (1 << 32 - token_bits(vocab_size)) - 1)


class SavedTexts(NamedTuple):
    """The texts of a store.

    Attributes:
        vocab_size: tokens are less than this.
        fingerprint: the tokenizer's; "" for none.
        parts: symbols, memoryviews of 32 bits, oldest first.
        owners: number, age of the newest symbol less one, and digest of each salt, the least recently added first.
    """

    vocab_size: int
    fingerprint: str
    parts: Sequence[memoryview]
    owners: Sequence[tuple[int, int, bytes]]


def write_texts(path: str | Path, texts: SavedTexts) -> None:
    """Write texts; a write that fails leaves no file, or the old one. Only its owner can read it. Raises UsageError."""
    path = Path(path)
    try:
        with locked(path.resolve().parent, WAIT), replacing(path) as file:
            writer = TokenFileWriter(SUFFIX_FILE, file)
            for part in texts.parts:
                for at in range(0, len(part), PIECE_SYMBOLS):
                    writer.add(bytes(part[at : at + PIECE_SYMBOLS]))
            writer.add(b"".join(OWNER.pack(*owner) for owner in texts.owners))
            writer.finish(texts.vocab_size, texts.fingerprint, sum(map(len, texts.parts)), len(texts.owners))
    except BlockingIOError:
        what = f"the suffix store cannot be written: another program has locked its folder for {WAIT} s"
        raise UsageError(what, where=str(path), remedy="let every run save to a file of its own") from None
    except OSError as error:
        raise UsageError(f"the suffix store cannot be written: {reason_of(error)}", where=str(path)) from error


def read_texts(path: str | Path, vocab_size: int, fingerprint: str) -> SavedTexts:
    """Read texts of a tokenizer through a memory map.

    Raises:
        UsageError: the file cannot be read, is of another kind, version or tokenizer, is damaged, or holds symbols that
            no text has.
    """

    def refuse(what: str) -> UsageError:
        return UsageError(what, where=str(path), remedy=REMEDY)

    try:
        saved = SUFFIX_FILE.read(path, lambda symbols, salts: 4 * symbols + OWNER.size * salts)
    except ValueError as error:
        raise refuse(str(error)) from error
    vocab, end, bits = saved.vocab_size, 4 * saved.counts[0], token_bits(vocab_size)
    if saved.fingerprint != fingerprint or not 0 < vocab < 1 << 31 or token_bits(vocab) != bits:
        raise refuse("the suffix store has the texts of another model's tokenizer")
    symbols, owners = saved.body[:end].cast("I"), [*OWNER.iter_unpack(saved.body[end:])]
    if fault := _fault(symbols, owners, vocab_size):
        raise refuse(f"the suffix store is not valid: {fault}")
    return SavedTexts(vocab, fingerprint, [symbols], owners)


def _fault(symbols: memoryview, owners: Sequence[tuple[int, int, bytes]], vocab: int) -> str:
    """The fault of texts; "" if there is none."""
    numbers = [number for number, *_ in owners]
    if len(set(numbers)) < len(numbers) or max(numbers, default=0) >= most_salts(vocab):
        return "expected a number of its own for each salt"
    if len({digest for *_, digest in owners}) < len(owners) or any(age >= len(symbols) for _, age, _ in owners):
        return "expected a newest token for each salt"
    place = suffixes.foreign(symbols, vocab, numbers, impl=suffixes.best())
    if place < len(symbols):
        return f"expected token ids from 0 to {vocab - 1}, of the salts that it lists, got {symbols[place]:#x}"
    return ""

"""Catalogues: memory-mapped files of the items that an output may be, as a trie of token sequences.

Nodes are numbered breadth first, edges in the order of their parents and tokens, so that edge e leads to node e + 1.
The file, in the machine's byte order: a header (`models.checkpoint.token_files`), then

    id starts     int64 [items + 1]    where the id of each item begins; items are in the order of the nodes they end at
    tokens        int32 [edges]
    first edges   int32 [edges + 2]    of each node the first edge below it; the last entry is the number of edges
    ends          int32 [items]        the nodes at which items end, ascending
    ids           bytes                JSON values, one after the other

An edge takes 8 bytes, an item 12 and its id.
"""

import functools
import itertools
import json
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import UsageError, reason_of, shortened
from engine.rules.constraint import Allowed, Constraint, State, longs, pieces
from engine.text.tokenizer import Tokenizer
from models.checkpoint.token_files import TokenFileKind

CATALOGUE_FILE = TokenFileKind("catalogue", b"COPPICEC", 1, "QQQ")  # counts: edges, items, bytes of ids
WIDE = 64  # steps from this many nodes on are faster with tensors than one by one
PIECE = 1 << 20  # entries of an array checked at a time
REMEDY = "make one for this model: python -m tools.catalogue --model DIR --input items.jsonl --output FILE"
ENDED = -1  # the state after the end of an item


class Catalogue:
    """Items, each a sequence of tokens with an id, in a file that `python -m tools.catalogue` made.

    Args:
        path: the file.

    Attributes:
        items, edges: how many there are.

    Raises:
        UsageError: it cannot be read, is no catalogue, is damaged, or does not hold a trie.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            found = CATALOGUE_FILE.read(path, lambda edges, items, ids: layout(edges, items)[-1] + ids)
        except ValueError as error:
            raise self._refused(str(error)) from error
        self.vocab_size, self.fingerprint, (self.edges, self.items, ids), view = found
        starts = layout(self.edges, self.items)
        parts = [view[a:b] for a, b in itertools.pairwise(starts)]
        self._ids = view[starts[-1] :]
        self._tokens, self._first = (part.cast("i") for part in parts[1:3])
        if not 0 < self.edges < 1 << 31 or not 0 < self.items <= self.edges:
            raise self._refused(f"the catalogue has {self.edges} edges and {self.items} items")
        kinds = (torch.int64, self.items + 1), (torch.int32, self.edges), (torch.int32, self.edges + 2)
        arrays = [
            torch.frombuffer(view, dtype=dtype, count=count, offset=at)
            for (dtype, count), at in zip([*kinds, (torch.int32, self.items)], starts, strict=False)
        ]
        self._id_starts, self._tokens_E, self._first_N, self._end_I = arrays
        if fault := _fault(self._id_starts, self._tokens_E, self._first_N, self._end_I, self.vocab_size, ids):
            raise self._refused(f"the catalogue is not valid: {fault}")

    def _refused(self, what: str) -> UsageError:
        return UsageError(what, where=str(self.path), remedy=REMEDY)

    def check(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        """Check that the items consist of a model's tokens, given its tokenizer, if any. Raises UsageError."""
        fingerprint = tokenizer.fingerprint if tokenizer is not None else ""
        if self.fingerprint != fingerprint or self.vocab_size > vocab_size:
            raise self._refused("the catalogue was made with another tokenizer than the model's")

    def children(self, nodes: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """The node after each node and token; ENDED without one, and after ENDED."""
        if len(nodes) < WIDE:
            return [*map(self._child, nodes, tokens)]
        node_N, token_N = longs(nodes), longs(tokens)
        low_N, end_N = self._edges(node_N)
        high_N = end_N
        for _ in range(int((end_N - low_N).max()).bit_length()):  # a binary search in the edges of all nodes at once
            middle_N = (low_N + high_N) >> 1
            less_N = (self._tokens_E[middle_N.clamp(max=self.edges - 1)] < token_N) & (low_N < high_N)
            low_N, high_N = torch.where(less_N, middle_N + 1, low_N), torch.where(less_N, high_N, middle_N)
        found_N = (low_N < end_N) & (self._tokens_E[low_N.clamp(max=self.edges - 1)] == token_N)
        return torch.where(found_N, low_N + 1, ENDED).tolist()

    def _child(self, node: int, token: int) -> int:
        if node == ENDED:
            return ENDED
        end = self._first[node + 1]
        edge = bisect_left(self._tokens, token, self._first[node], end)
        return edge + 1 if edge < end and self._tokens[edge] == token else ENDED

    def _edges(self, node_N: Tensor) -> tuple[Tensor, Tensor]:
        """The first edge below each node, and the one after its last; none below ENDED."""
        start_N, end_N = self._first_N[node_N].long(), self._first_N[node_N + 1].long()  # -1 is the last entry
        return start_N, torch.where(node_N == ENDED, start_N, end_N)

    def ends(self, node_N: Tensor) -> tuple[Tensor, Tensor]:
        """For each node the place of the item that ends there, and whether one does."""
        place_N = torch.searchsorted(self._end_I, node_N.int())
        return place_N, self._end_I[place_N.clamp(max=self.items - 1)] == node_N

    def after(self, node_N: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens after some nodes, int64, ascending after a node, node after node; and how many each has."""
        start_N, end_N = self._edges(node_N)
        return self._tokens_E[pieces(start_N, end_N - start_N)].long(), end_N - start_N

    def ids(self, outputs: Sequence[Sequence[int]]) -> list[str | int | None]:
        """For each of some token sequences, without an end-of-sequence token, the id of the item that has it; None if
        there is none."""
        nodes, lengths = [0] * len(outputs), [*map(len, outputs)]
        for tokens in zip(*outputs, strict=False):  # as far as all have tokens
            nodes = self.children(nodes, tokens)
        for at in range(min(lengths, default=0), max(lengths, default=0)):
            going = [i for i, tokens in enumerate(outputs) if at < len(tokens)]
            after = self.children([nodes[i] for i in going], [outputs[i][at] for i in going])
            for i, node in zip(going, after, strict=True):
                nodes[i] = node
        place_N, ends_N = self.ends(longs(nodes))
        found = iter(self._ids_at(place_N[ends_N]))
        return [next(found) if ends else None for ends in ends_N.tolist()]

    def _ids_at(self, place_n: Tensor) -> list[str | int]:
        """The ids of the items at these places. Raises UsageError."""
        starts, ends = self._id_starts[place_n].tolist(), self._id_starts[place_n + 1].tolist()
        texts = [bytes(self._ids[start:end]) for start, end in zip(starts, ends, strict=True)]
        found = _values(b"[" + b",\n".join(texts) + b"]")  # no JSON string has a line break
        if len(found) != len(texts) or not {*map(type, found)} <= {str, int}:
            for place, text in zip(place_n.tolist(), texts, strict=True):
                if [*map(type, _values(b"[" + text + b"]"))] not in ([str], [int]):
                    what = f"expected a string or an integer, got {shortened(ascii(text))}"
                    raise self._refused(f"the id of item {place}: {what}")
        return found


class Items(Constraint):
    """An output that is an item of a catalogue, followed by an end-of-sequence token.

    An item that is the beginning of another may end or continue. If no token ends an output, it ends after an item
    that no other continues, with the finish reason "constraint". A state is a node of the trie.

    Args:
        catalogue: the items.
        eos: tokens that end an output, ascending.
    """

    def __init__(self, catalogue: Catalogue, eos: Sequence[int]):
        self.catalogue, self.eos = catalogue, list(eos)

    def start(self, prompt: Sequence[int]) -> State:
        return 0

    def advance(self, state: State, token: int) -> State:
        return self.advance_all([state], [token])[0]

    def advance_all(self, states: Sequence[State], tokens: Sequence[int]) -> list[State]:
        return self.catalogue.children(states, tokens)

    def allowed(self, states: Sequence[State]) -> Allowed:
        node_N = longs(states)
        token_M, count_N = self.catalogue.after(node_N)
        allowed = Allowed(token_M, count_N)
        if not self.eos or not len(end_n := self.catalogue.ends(node_N)[1].nonzero()):
            return allowed
        end_M = (end_n << 32 | torch.tensor(self.eos)).view(-1)
        key_M = torch.cat([allowed.row_M << 32 | token_M, end_M]).unique()  # sorted by state, then by token
        return Allowed(key_M & (1 << 32) - 1, torch.bincount(key_M >> 32, minlength=len(states)))

    def items(self, outputs: Sequence[Sequence[int]]) -> list[str | int | None]:
        return self.catalogue.ids(outputs)


def open_catalogue(path: str | Path) -> Catalogue:
    """The catalogue in a file, read and checked again only when the file has changed. Raises UsageError."""
    try:
        stat = os.stat(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"the catalogue cannot be read: {reason_of(error)}", where=str(path), remedy=REMEDY) from error
    return _open(os.path.realpath(path), stat.st_mtime_ns, stat.st_size, stat.st_ino)


@functools.lru_cache(maxsize=4)
def _open(path: str, *_: int) -> Catalogue:
    return Catalogue(path)


def _values(text: bytes) -> list[Any]:
    """The values of a list in JSON; none if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return []


def _fault(id_starts: Tensor, tokens_E: Tensor, first_N: Tensor, end_I: Tensor, vocab: int, ids: int) -> str:
    """The fault of the arrays of a file, see the top; "" if there is none.

    Args:
        vocab: tokens are less than this.
        ids: bytes of the ids.
    """
    edges = len(tokens_E)
    low, high = (int(x) for x in tokens_E.aminmax())
    if low < 0 or high >= vocab:
        return f"tokens: expected ids from 0 to {vocab - 1}, got {low} to {high}"
    if first_N[0] != 0 or first_N[-1] != edges or not _all(first_N, lambda x, _: x[1:] >= x[:-1]):
        return f"first edges: expected to rise from 0 to {edges}"
    if not _all(first_N[:-1], lambda x, at: x >= torch.arange(at, at + len(x), dtype=torch.int32)):
        return "first edges: expected edges that lead to later nodes"  # edge e leads to node e + 1: no walk comes back

    def rises(x: Tensor, at: int) -> Tensor:
        places = torch.tensor([at + 1, at + len(x)], dtype=torch.int32)
        low, high = torch.searchsorted(first_N, places).tolist()
        rising = x[1:] > x[:-1]  # a difference could wrap around
        rising[first_N[low:high] - at - 1] = True  # the first edge of a node
        return rising

    if not _all(tokens_E, rises):
        return "tokens: expected to rise from edge to edge below a node"
    if end_I[0] < 1 or end_I[-1] > edges or not _all(end_I, lambda x, _: x[1:] > x[:-1]):
        return f"ends: expected to rise, from 1 to {edges} at most"
    leaves = sum(int((x[1:] == x[:-1]).sum()) for x, _ in _pieces(first_N))
    if sum(int((first_N[x + 1] == first_N[x]).sum()) for x in end_I.split(PIECE)) != leaves:
        return "ends: expected an item to end at every node without edges"
    if id_starts[0] != 0 or id_starts[-1] != ids or not _all(id_starts, lambda x, _: x[1:] > x[:-1]):
        return f"id starts: expected to rise from 0 to {ids}"
    return ""


def _all(x: Tensor, holds: Callable[[Tensor, int], Tensor]) -> bool:
    """Whether a property holds in all pieces of an array, each given with its place."""
    return all(bool(holds(piece, at).all()) for piece, at in _pieces(x))


def _pieces(x: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Pieces of an array, each with its start, to save memory; adjacent pieces share one element."""
    for at in range(0, max(1, len(x) - 1), PIECE):
        yield x[at : at + PIECE + 1], at


def layout(edges: int, items: int) -> list[int]:
    """The offsets of a file's arrays behind its header, in their order, and then of the ids."""
    sizes = 8 * (items + 1), 4 * edges, 4 * (edges + 2), 4 * items
    return [sum(sizes[:i]) for i in range(len(sizes) + 1)]

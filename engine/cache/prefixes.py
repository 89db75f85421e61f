"""PrefixCache: the trunks of finished requests, kept in pages that no tree holds, for prompts with the same beginning.

A radix tree of tokens and pages. A page that no tree holds is idle: the pool counts it as free, and takes it when no
other page is left, least recently used first, from the ends of sequences. A tree that uses cached pages shares them
with the cache, and never writes to them. A tree that holds a page of the cache holds all pages before it, so if any
page of a sequence is idle, its last one is.

Sequences are separated by a key: the salt of a request, so that response times do not reveal what others have asked;
the variant of rotary embeddings with which keys were rotated; and the adapter with which they were computed.
"""

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_EVICTED = 256  # most pages evicted at once: neighbours, so that a trunk finds room in one piece
EVICTED_SHARE = 16  # but no more than this part of the pool
Key = tuple[str, bool, int]  # salt; long variant of rotary embeddings; number of the adapter


@dataclass(eq=False)
class Segment:
    """Tokens and the pages that hold their keys and values; a leaf's last page may be partly filled."""

    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    above: "Segment | None" = None
    below: dict[Hashable, "Segment"] = field(default_factory=dict)  # by the tokens of the first page


class PrefixCache:
    """The cached prefixes of one pool.

    Args:
        pool: the `PagePool` of the pages.
        most: maximum of idle pages.

    Attributes:
        lookups, hits: prompts looked up, and those found at least in part.
        asked_tokens, reused_tokens: tokens of these prompts, and how many of them were found.
    """

    def __init__(self, pool: Any, most: int):
        self.pool, self.most = weakref.proxy(pool), most  # a cycle would keep tensors until the garbage collector runs
        self.lookups = self.hits = self.asked_tokens = self.reused_tokens = 0
        self._roots: dict[Key, Segment] = {}
        self._segments: dict[Segment, None] = {}  # the least recently used first, and each after those below it

    def note(self, asked: int, reused: int) -> None:
        """Count a prompt."""
        self.lookups += 1
        self.hits += reused > 0
        self.asked_tokens += asked
        self.reused_tokens += reused

    def match(self, tokens: Sequence[int], key: Key) -> tuple[list[int], int]:
        """The pages that hold a prefix of these tokens, and the length of that prefix; the last page may also hold
        other tokens.

        The caller must hold the pages before it takes any other page.
        """
        path, pages, length = self._walk(list(tokens), key)
        self._touch(path)
        return pages, length

    def insert(self, tokens: Sequence[int], pages: Sequence[int], key: Key) -> list[int]:
        """Keep the pages of a tree.

        Args:
            tokens: all tokens in the pages.
            pages: held by the tree.

        Returns:
            Cached pages with the same first tokens, which the tree takes in place of its own.
        """
        tokens, size = list(tokens), self.pool.page_size
        if not tokens:
            return []
        path, found, length = self._walk(tokens, key, whole=True)
        above = path[-1] if path else self._roots.setdefault(key, Segment())
        inside = length - sum(len(segment.tokens) for segment in path[:-1])
        if path and inside < len(above.tokens):
            above = path[-1] = self._split(above, inside // size)
        rest = Segment(tokens[length:], list(pages[len(found) :]), above)
        beside = [*above.below.values()] if size > 1 else []
        if rest.tokens and not any(_begins(other.tokens[:size], rest.tokens) for other in beside):
            above.below[self._name(rest.tokens)] = rest
            self.pool.keep(rest.pages)
            path.append(rest)
            for other in beside:
                if _begins(rest.tokens, other.tokens):  # a partly filled page whose tokens this one has too
                    self._drop(other, 1)
        self._touch(path)
        return found

    def evict(self, most: int = MOST_EVICTED) -> int:
        """Free pages at the end of the least recently used sequence. Returns how many; 0 if none is idle."""
        # A segment with an idle page precedes those above it, so the first one is a leaf.
        leaf = next((segment for segment in self._segments if self.pool.is_idle(segment.pages[-1])), None)
        if leaf is None:
            return 0
        count, most = 1, min(most, MOST_EVICTED, self.pool.pages // EVICTED_SHARE, len(leaf.pages))
        while count < most and self.pool.is_idle(leaf.pages[-1 - count]):
            count += 1
        self._drop(leaf, count)
        return count

    def trim(self) -> None:
        """Drop idle pages beyond the allowed number."""
        while self.pool.idle_pages > self.most and self.evict(self.pool.idle_pages - self.most):
            pass

    def clear(self) -> None:
        """Forget everything; trees keep what they hold."""
        for segment in self._segments:
            self.pool.drop(segment.pages)
        self._roots, self._segments = {}, {}

    # --- the tree ---

    def _name(self, tokens: list[int]) -> Hashable:
        size = self.pool.page_size
        return tokens[0] if size == 1 else tuple(tokens[:size])

    def _walk(self, tokens: list[int], key: Key, whole: bool = False) -> tuple[list[Segment], list[int], int]:
        """The segments along these tokens, their matching pages, and the number of matching tokens; with `whole`,
        without partially matching pages."""
        path, pages, length, size = [], list[int](), 0, self.pool.page_size
        segment = self._roots.get(key)
        while segment is not None and length < len(tokens):
            below, rest = segment.below, tokens[length:]
            following = below.get(self._name(rest))
            if following is None and size > 1 and not whole:
                page = rest[:size]
                following = max(below.values(), key=lambda s: shared_length(s.tokens[:size], page), default=None)
            if following is None or not (same := shared_length(following.tokens, rest)):
                break
            if whole and following.tokens != rest:
                same -= same % size
            path.append(following)
            pages += following.pages[: -(-same // size)]
            length += same
            segment = following if same == len(following.tokens) and not same % size else None
        return path, pages, length

    def _split(self, segment: Segment, pages: int) -> Segment:
        """Split a segment after some pages; returns the first part."""
        assert segment.above is not None
        cut = pages * self.pool.page_size
        first = Segment(segment.tokens[:cut], segment.pages[:pages], segment.above)
        segment.above.below[self._name(first.tokens)] = first
        segment.tokens, segment.pages, segment.above = segment.tokens[cut:], segment.pages[pages:], first
        first.below[self._name(segment.tokens)] = segment
        return first

    def _touch(self, path: Sequence[Segment]) -> None:
        """Mark the segments of a path as the most recently used."""
        for segment in reversed(path):
            self._segments.pop(segment, None)
            self._segments[segment] = None

    def _drop(self, leaf: Segment, pages: int) -> None:
        """Forget the last pages of a leaf, and the leaf if it has no other."""
        left, above = len(leaf.pages) - pages, leaf.above
        assert above is not None
        self.pool.drop(leaf.pages[left:])
        name = self._name(leaf.tokens)
        leaf.pages, leaf.tokens = leaf.pages[:left], leaf.tokens[: left * self.pool.page_size]
        if left:
            return
        del above.below[name], self._segments[leaf]
        if above.above is None and not above.below:
            self._roots = {key: root for key, root in self._roots.items() if root is not above}


def shared_length(first: Sequence[int], *others: Sequence[int], start: int = 0) -> int:
    """The length of the common prefix of sequences; the first `start` elements are known to be equal and are not
    compared."""
    shared = len(first)
    for other in others:
        if shared == start:
            break
        shared = min(shared, len(other))
        head, tail = first[start:shared], other[start:shared]
        if head != tail:
            shared = next((i for i, (x, y) in enumerate(zip(head, tail, strict=True), start) if x != y), shared)
    return shared


def _begins(tokens: Sequence[int], first: Sequence[int]) -> bool:
    return tokens[: len(first)] == first

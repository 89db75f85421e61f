"""The rows and states of recurrent layers: which nodes have them, and which ones a trunk keeps. See `DeltaPaths`."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from engine.errors import KVMemoryError
from kernels.layout import NULL_SLOT, NULL_STATE, TRASH_SLOT, DeltaKind


class Held(NamedTuple):
    """The row of a token, and the state after it; NULL_STATE if no block ends with it."""

    row: int
    state: int = NULL_STATE


class Store:
    """Numbered entries that trees take and return, lowest first, so that memory that was never needed is not touched.

    Args:
        first, count: the numbers of the entries.
        name: the word for the entries in messages.

    Attributes:
        evict: drops entries of cached prefixes when none is free; returns whether there were any.
        others: place -> number of its holders after the first.
        flag: see `PagePool.flag`.
    """

    def __init__(self, first: int, count: int, name: str):
        self.count, self.name, self.used = count, name, 0
        self.evict: Callable[[], bool] = lambda: False
        self.flag = "--kv-memory"
        self.others: Counter[int] = Counter()
        self._free = [*range(first, first + count)]

    def take(self) -> int:
        """Take an entry. Raises KVMemoryError if none is left."""
        while not self._free and self.evict():
            pass
        if not self._free:
            raise KVMemoryError(
                f"the KV cache is full: all {self.count} {self.name} of recurrent layers are in use",
                remedy=f"give {self.flag} more, or ask for fewer beams or new tokens",
            )
        self.used += 1
        return heapq.heappop(self._free)

    def hold(self, place: int) -> None:
        """Add a holder to an entry, which must not be written to from then on."""
        self.others[place] += 1

    def give(self, place: int) -> None:
        """Return an entry."""
        if place in self.others:
            self.others[place] -= 1
            if not self.others[place]:
                del self.others[place]
            return
        heapq.heappush(self._free, place)
        self.used -= 1
        assert self.used >= 0


class Stores:
    """The rows and states of a pool.

    Args:
        kind: the kind of the recurrent layers.
        rows, states: how many rows and states trees may take.
    """

    def __init__(self, kind: DeltaKind, rows: int, states: int):
        first = max(NULL_SLOT, TRASH_SLOT) + 1
        self.kind, self.rows, self.states = kind, Store(first, rows, "rows"), Store(NULL_STATE + 1, states, "states")

    def take(self, position: int) -> Held:
        """Take the row of a token at a position, and its state if a block ends with it. Raises KVMemoryError."""
        row = self.rows.take()
        if (position + 1) % self.kind.block:
            return Held(row)
        try:
            return Held(row, self.states.take())
        except KVMemoryError:
            self.rows.give(row)
            raise

    def give(self, held: Iterable[Held]) -> None:
        """Give rows and states back."""
        for row, state in held:
            self.rows.give(row)
            if state != NULL_STATE:
                self.states.give(state)


class TrunkStates:
    """A trunk's share: one state, after all its complete blocks, and the rows that later tokens may read.

    A pass that ends blocks of a trunk produces the next state; the previous one is kept until the next pass, because
    this one may fail.

    Attributes:
        rows: rows by their positions.
        state, folded: the state, and how many tokens it covers.
        before: the previous state and its number of tokens, while it is kept.
    """

    def __init__(self, stores: Stores):
        self.stores, self._whole = stores, stores.kind.whole
        self.rows: dict[int, int] = {}
        self.state, self.folded = NULL_STATE, 0
        self.before: tuple[int, int] | None = None

    @property
    def held(self) -> tuple[list[int], list[int]]:
        """The rows and the states that are held."""
        states = [self.state, *([] if self.before is None else self.before[:1])]
        return [*self.rows.values()], [state for state in states if state != NULL_STATE]

    def earliest(self, length: int) -> int:
        """The earliest of the first `length` tokens whose row later tokens may read."""
        return max(0, self._whole(length) - self.stores.kind.taps + 1)

    def extend(self, length: int, tokens: int) -> None:
        """Take rows and states for a pass over tokens after the first `length`. Raises KVMemoryError: took none."""
        self.settle(length)
        end, taken, state = length + tokens, dict[int, int](), NULL_STATE
        try:
            for position in range(max(length, self.earliest(end)), end):
                taken[position] = self.stores.rows.take()
            if self._whole(end) > self.folded:
                state = self.stores.states.take()
        except KVMemoryError:
            for row in taken.values():
                self.stores.rows.give(row)
            raise
        self.rows |= taken
        if state != NULL_STATE:
            self.before = self.state, self.folded
            self.state, self.folded = state, self._whole(end)

    def append(self, length: int, held: Sequence[Held]) -> None:
        """Take over the rows and states of branch nodes that have become the tokens after the first `length`."""
        for position, (row, state) in enumerate(held, length):
            self.rows[position] = row
            if state != NULL_STATE:
                self._give_state(self.state)
                self.state, self.folded = state, position + 1
        self.settle(length + len(held))

    def adopt(self, folded: int, state: int, rows: dict[int, int]) -> None:
        """Share the entries that others hold for a trunk's first tokens, in place of its own: the state after `folded`
        tokens, and rows by their positions."""
        self.stores.states.hold(state)
        for row in rows.values():
            self.stores.rows.hold(row)
        self.truncate(0)
        self.state, self.folded, self.rows = state, folded, rows

    def settle(self, length: int) -> None:
        """Return the rows and states that no pass after the first `length` tokens reads."""
        if self.before is not None:
            self._give_state(self.before[0])
            self.before = None
        self._keep_rows(self.earliest(length), length)

    def truncate(self, length: int) -> int:
        """Forget the tokens after the first `length`. Returns how many are left: none if their state is not kept."""
        if self.before is not None and self.before[1] == self._whole(length) < self.folded:
            self._give_state(self.state)
            (self.state, self.folded), self.before = self.before, None
        rows = range(self.earliest(length), length)
        if self.folded != self._whole(length) or any(position not in self.rows for position in rows):
            length = 0
            self._give_state(self.state)
            self.state, self.folded = NULL_STATE, 0
            self.settle(0)
        self._keep_rows(0, length)
        return length

    def base(self, position: int, first: int | None = None) -> int:
        """The state at the beginning of a token's block.

        Args:
            first: the first trunk token that the pass evaluates, if the token is in the trunk; None if it is below the
                trunk.
        """
        length, state = self._whole(position), (self.state, self.folded)
        if first is not None and self.before is not None and length <= first:
            state = self.before
        assert length == state[1] or (first is not None and first < length <= self.folded)
        return state[0] if length else NULL_STATE

    def _keep_rows(self, first: int, end: int) -> None:
        for position in [p for p in self.rows if not first <= p < end]:
            self.stores.rows.give(self.rows.pop(position))

    def _give_state(self, state: int) -> None:
        if state != NULL_STATE:
            self.stores.states.give(state)

"""KeptStates: the states of recurrent layers that cached prefixes keep, and the rows that tokens after them read.

The prefix cache stores every prefix once, so the slot of a token identifies the prefix that ends with it. A state takes
as much memory as the keys and values of hundreds of tokens, so few are kept: `TokenTree.save` and `keep` choose them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.cache.states import Stores, TrunkStates


@dataclass(eq=False)
class KeptState:
    """A state, and the rows stored with it.

    Args:
        state: the state after the prefix, which consists of complete blocks.
        before: rows of the prefix's last tokens, in order, which convolutions after it read.
        after: rows of tokens in the next block, by their slots, because prefixes may diverge there.
    """

    state: int
    before: list[int]
    after: dict[int, int] = field(default_factory=dict)


class KeptStates:
    """The states and rows of the cached prefixes of one pool. Trees hold them as well; nothing is copied.

    The least recently used entries are dropped when a tree needs a state or a row and none is free (so the cache never
    causes a refusal), and when their page is dropped.

    Args:
        stores, page_size: the pool's.
        most_rows, most_states: the most rows and states that are kept.
        spacing: tokens between states within prompts, see `keep`.

    Attributes:
        states: kept states by the slot of their prefix's last token, in order of use.
    """

    def __init__(self, stores: Stores, page_size: int, most_rows: int, most_states: int, spacing: int):
        self.page_size = page_size
        self.stores, self.most_rows, self.most_states, self.spacing = stores, most_rows, most_states, spacing
        self.states: dict[int, KeptState] = {}
        self.row_count = 0
        self._blocks: dict[int, int] = {}  # slot of a row after a state -> slot of that state
        stores.rows.evict = stores.states.evict = self.evict

    def find(self, pages: Sequence[int], length: int) -> int:
        """How many of the first `length` tokens of a cached prefix, which these pages hold, a trunk can reuse."""
        kind = self.stores.kind
        for folded in range(kind.whole(length), 0, -kind.block):
            if (kept := self.states.get(self._slot(pages, folded - 1))) is not None:
                end = folded
                while end < length and self._slot(pages, end) in kept.after:
                    end += 1
                return end
        return 0

    def share(self, pages: Sequence[int], length: int, states: TrunkStates) -> None:
        """Give a trunk the state and rows for as many tokens as `find` returned, replacing its own."""
        folded = self.stores.kind.whole(length)
        slot = self._slot(pages, folded - 1)
        kept = self.states[slot]
        rows = dict(zip(range(folded - len(kept.before), folded), kept.before, strict=True))
        rows |= {place: kept.after[self._slot(pages, place)] for place in range(folded, length)}
        states.adopt(folded, kept.state, rows)
        self._use(slot)

    def keep(self, pages: Sequence[int], length: int, states: TrunkStates, inside: bool = False) -> None:
        """Keep the state of a trunk, and the rows stored with it.

        Args:
            pages: the trunk's pages; the cache has the first `length` tokens in them.
            inside: the position is within a prompt and other prompts need not share it: keep the state only if the
                tokens since the last kept state take as many bytes as a state, so that states at most double the memory
                of a prompt.
        """
        folded, rows, taps = states.folded, states.rows, self.stores.kind.taps
        if not 0 < folded <= length:
            return
        if inside and folded - self.find(pages, folded) < self.spacing:
            return
        if (slot := self._slot(pages, folded - 1)) not in self.states:
            before = [rows[position] for position in range(max(0, folded - taps + 1), folded)]
            self.stores.states.hold(states.state)
            self._hold(before)
            self.states[slot] = KeptState(states.state, before)
        kept = self.states[slot]
        for position in range(folded, length):
            if (at := self._slot(pages, position)) not in kept.after:
                self._hold([rows[position]])
                kept.after[at] = rows[position]
                self._blocks[at] = slot
        self._use(slot)
        while len(self.states) > self.most_states or self.row_count > self.most_rows:
            self.evict()

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the states and rows of tokens whose slots the cache drops."""
        for slot in slots:
            if slot in self.states:
                self._drop(slot)
            if (block := self._blocks.pop(slot, None)) is not None:
                self._give([self.states[block].after.pop(slot)])

    def evict(self) -> bool:
        """Drop the least recently used entry. Returns whether there was one."""
        for slot in self.states:
            self._drop(slot)
            return True
        return False

    def _slot(self, pages: Sequence[int], place: int) -> int:
        return pages[place // self.page_size] * self.page_size + place % self.page_size

    def _use(self, slot: int) -> None:
        self.states[slot] = self.states.pop(slot)

    def _hold(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.stores.rows.hold(row)
        self.row_count += len(rows)

    def _give(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.stores.rows.give(row)
        self.row_count -= len(rows)

    def _drop(self, slot: int) -> None:
        kept = self.states.pop(slot)
        for each in kept.after:
            del self._blocks[each]
        self._give([*kept.before, *kept.after.values()])
        self.stores.states.give(kept.state)

"""The slots of one tree: its trunk's, in order, and its branches'."""

import heapq
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.cache.pool import PagePool
from engine.cache.states import Held, TrunkStates
from engine.errors import KVMemoryError

FREE, RESERVED = -1, -2  # in the place of a node
Wish = Callable[[int], int | None]  # position -> page


@dataclass
class Trunk:
    """Tokens in order and the pages that hold the keys and values of the first `cached` of them."""

    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    long_rope: bool = False  # rotary embeddings of a sequence longer than the model's switch length
    adapter: int = 0  # the number of the adapter that keys and values were computed with; 0: none
    salt: str | None = None  # the only salt with which its pages are cached; None: none is cached
    runs: list[list[int]] = field(default_factory=list)  # [first page, pages] of each contiguous piece
    states: TrunkStates | None = None  # rows and states of recurrent layers; None if the model has none

    def reserve(self, pool: PagePool, tokens: int, first: int) -> None:
        """Take pages for `tokens` tokens, from `first` on if those are free. Raises KVMemoryError."""
        before, wish = len(self.pages), first
        try:
            while len(self.pages) * pool.page_size < tokens:
                if not pool.is_free(wish):
                    wish, _ = pool.roomiest()
                page = pool.take(wish)
                self._append(page)
                wish = page + 1
        except KVMemoryError:
            self.trim(pool, before)
            raise

    def _append(self, page: int) -> None:
        self.pages.append(page)
        if self.runs and sum(self.runs[-1]) == page:
            self.runs[-1][1] += 1
        else:
            self.runs.append([page, 1])

    def _pop(self) -> int:
        self.runs[-1][1] -= 1
        if not self.runs[-1][1]:
            self.runs.pop()
        return self.pages.pop()

    def share(self, pool: PagePool, pages: Sequence[int]) -> None:
        """Replace the first pages by pages that others hold too."""
        old = self.pages
        pool.hold(page for i, page in enumerate(pages) if i >= len(old) or old[i] != page)
        pool.give(*(page for page, other in zip(old, pages, strict=False) if page != other))
        self.pages, self.runs = [], []
        for page in [*pages, *old[len(pages) :]]:
            self._append(page)

    def own_end(self, pool: PagePool) -> None:
        """Become the only holder of the last page, copying it if necessary, because it will be written to. Raises
        KVMemoryError."""
        old, size = self.pages[-1], pool.page_size
        if not pool.is_shared(old):
            return
        pool.give(old)  # it may be the only page that can be taken; its contents remain until a pass writes to it
        try:
            new = pool.take()
        except KVMemoryError:
            pool.hold([old])
            raise
        if new != old:
            pool.copy([*range(old * size, (old + 1) * size)], [*range(new * size, (new + 1) * size)])
        self._pop()
        self._append(new)

    def trim(self, pool: PagePool, pages: int) -> None:
        """Return all pages except the first ones."""
        while len(self.pages) > pages:
            pool.give(self._pop())

    def truncate(self, pool: PagePool, cached: int) -> None:
        """Forget the keys and values after the first `cached` tokens, or all of them if recurrent layers must start
        again."""
        self.cached = cached if self.states is None else self.states.truncate(cached)
        self.trim(pool, -(-self.cached // pool.page_size))

    def slot(self, place: int, page_size: int) -> int:
        """The slot in the pool of the token at this position."""
        return self.pages[place // page_size] * page_size + place % page_size

    def latest(self, end: int, count: int, page_size: int) -> list[int]:
        """Pool slots of the `count` tokens before the `end`-th, the latest first; fewer if there are fewer."""
        return [self.slot(place, page_size) for place in range(end - 1, max(end - count, 0) - 1, -1)]

    def release(self, pool: PagePool) -> None:
        """Give all pages back."""
        self.truncate(pool, 0)


class BranchSlots:
    """Slots of branch nodes. Slot s is in the tree's page s // page_size; pages are taken from the pool as needed.

    Attributes:
        count: slots that nodes have.
        owner: the node that has each slot; -1 if it is free, -2 if it is reserved.
        table: for each slot, its slot in the pool (int64) and its token's position (int32); 0 if it is free.
        held: rows and states of recurrent layers, by slots; empty if the model has no such layers.
    """

    def __init__(self, pool: PagePool):
        self.pool, self.size = pool, pool.page_size
        self.clear()

    def clear(self) -> None:
        """Reset: no slot and no page is in use."""
        self.pages: list[int] = []  # in the pool; -1: given back
        self.load: list[int] = []  # slots in use of each page
        self.lost: list[int] = []  # heap of the indices of `pages` that are -1
        self.free: list[int] = []  # heap: the lowest goes first, which keeps the table short
        self.owner: list[int] = []
        self.table = (array("q"), array("i"))
        self.held: dict[int, Held] = {}
        self.count = 0

    @property
    def page_count(self) -> int:
        """How many pages of the pool are held."""
        return len(self.pages) - len(self.lost)

    @property
    def pages_held(self) -> list[int]:
        """The pages of the pool that are held."""
        return [page for page in self.pages if page >= 0]

    def take(self, nodes: Sequence[int], positions: Sequence[int], wish: Wish = lambda _: None) -> list[int]:
        """Take a slot for each node. A new page is the one that `wish` returns for the position, if it is free.

        Raises:
            KVMemoryError: the pool is full; nothing was taken.
        """
        taken, size, stores, free, pages, load = [], self.size, self.pool.stores, self.free, self.pages, self.load
        owner, (places, table_positions) = self.owner, self.table
        try:
            for node, position in zip(nodes, positions, strict=True):
                held = None if stores is None else stores.take(position)
                try:
                    slot = heapq.heappop(free) if free else self._add_page(wish(position))
                except KVMemoryError:
                    self._give([] if held is None else [held])
                    raise
                if held is not None:
                    self.held[slot] = held
                i, rest = divmod(slot, size)
                load[i] += 1
                owner[slot] = node
                places[slot], table_positions[slot] = pages[i] * size + rest, position
                taken.append(slot)
        except KVMemoryError:
            self.give_up(taken)
            raise
        self.count += len(taken)
        return taken

    def reserve(self, positions: Sequence[int], wish: Wish = lambda _: None) -> list[int]:
        """Reserve slots, as in `take`, for nodes that are not known yet; `assign` or `give_up` ends the
        reservation."""
        slots = self.take([RESERVED] * len(positions), positions, wish)
        self.count -= len(slots)
        return slots

    def assign(self, slot: int, node: int) -> None:
        """Assign a reserved slot to a node."""
        self.owner[slot] = node
        self.count += 1

    def give_up(self, slots: Sequence[int]) -> None:
        """Give reserved slots back."""
        self.count += len(slots)
        self.release(slots)

    def _add_page(self, wish: int | None) -> int:
        """Take a page; returns its first slot, the others are free."""
        page, size = self.pool.take(wish), self.size
        if self.lost:
            i = heapq.heappop(self.lost)
            self.pages[i] = page
        else:
            i = len(self.pages)
            self.pages.append(page)
            self.load.append(0)
            self.owner.extend([FREE] * size)
            for column in self.table:
                column.extend([0] * size)
        for s in range(i * size + 1, (i + 1) * size):
            heapq.heappush(self.free, s)
        return i * size

    def release(self, slots: Sequence[int]) -> None:
        """Return slots, and the pages that this empties."""
        if not slots:
            return
        size, owner, load, (places, positions) = self.size, self.owner, self.load, self.table
        if self.held:
            self._give(self.detach(slots))
        for slot in slots:
            owner[slot] = FREE
            places[slot] = positions[slot] = 0
            load[slot // size] -= 1
        self.count -= len(slots)
        empty = [i for i in {slot // size for slot in slots} if not load[i]]
        self.pool.give(*(self.pages[i] for i in empty))
        for i in empty:
            self.pages[i] = -1
        self.lost += empty
        self.free = [s for s in [*self.free, *slots] if self.pages[s // size] >= 0]
        heapq.heapify(self.free)
        self._shorten()

    def detach(self, slots: Iterable[int]) -> list[Held]:
        """Hand the rows and states that recurrent layers keep for slots over to the caller."""
        return [held for slot in slots if (held := self.held.pop(slot, None)) is not None]

    def _give(self, held: Iterable[Held]) -> None:
        if self.pool.stores is not None:
            self.pool.stores.give(held)

    def release_all(self) -> None:
        """Give everything back."""
        self._give(self.held.values())
        self.pool.give(*self.pages_held)
        self.clear()

    def _shorten(self) -> None:
        """Remove lost pages from the end of the table."""
        end = len(self.pages)
        while end and self.pages[end - 1] < 0:
            end -= 1
        del self.pages[end:], self.load[end:]
        for column in (self.owner, *self.table):
            del column[end * self.size :]
        self.lost = [i for i in self.lost if i < end]
        heapq.heapify(self.lost)

    def pages_emptied(self, slots: Iterable[int]) -> int:
        """How many pages would return to the pool with these slots."""
        left = list(self.load)
        for slot in slots:
            left[slot // self.size] -= 1
        return sum(before > 0 == after for before, after in zip(self.load, left, strict=True))

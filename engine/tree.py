"""TokenTree: the tokens of one search, those that all share (the trunk) and those that compete (the branches)."""

import heapq
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.errors import KVMemoryError
from engine.pool import PagePool

NO_SLOT = -1  # not evaluated yet
IN_TRUNK = -2  # keys and values lie in the trunk
FREED = -3


@dataclass
class Trunk:
    """Tokens in order and the pages that hold the keys and values of the first `cached` of them."""

    tokens: list[int]
    pages: list[int]
    cached: int = 0
    stretched: bool = False  # evaluated as part of a sequence longer than the model's switch length

    def release(self, pool: PagePool) -> None:
        """Give all pages back."""
        pool.give(*self.pages)
        self.pages, self.cached = [], 0


class TokenTree:
    """A tree of tokens over one pool. Nodes are integers, parents come before children.

    A node is identified by its path: growing the same token twice under one parent gives the same node. A node takes
    a slot when it is evaluated and loses it when `keep` leaves it out. The trunk is what every live node descends
    from; `keep` promotes the stem that live nodes have come to share, bringing its keys and values there.

    Args:
        pool: where keys and values live.
        prompt: at least one token.
        expected: tokens the trunk may grow to; a hint for contiguous memory.
        trunk: an earlier tree's trunk to take over; what it shares with the prompt is not evaluated again.
        switch_length: see `ModelShape`. A tree holds keys and values of one kind at a time, those of sequences up to
            this length or those of longer ones, and `regimes` and `enter` change between them.
    """

    def __init__(
        self,
        pool: PagePool,
        prompt: Sequence[int],
        *,
        expected: int = 0,
        trunk: Trunk | None = None,
        switch_length: int | None = None,
    ):
        if not prompt:
            raise ValueError("expected a prompt of at least one token")
        self.pool = pool
        self.switch_length = switch_length
        self.prompt_length = len(prompt)
        self.trunk = Trunk(list(prompt), [])
        self._runs: list[list[int]] = []  # [first page, pages] of each contiguous piece of the trunk
        if trunk is not None:
            self._adopt(trunk)
        self.reused = self.trunk.cached  # prompt tokens that need no evaluation
        wanted = -(-max(expected, len(prompt)) // pool.page_size)
        self._claim = pool.claim(wanted) if not self.trunk.pages else range(0)
        # One row per node; dead rows stay until the tree goes.
        self._token: list[int] = [self.trunk.tokens[-1]]
        self._parent: list[int] = [-1]
        self._position: list[int] = [len(prompt) - 1]
        self._slot: list[int] = [IN_TRUNK]
        self._bits: dict[int, int] = {}  # of the latest nodes: ancestors in branch slots, itself included
        self._spent: list[int] = []  # nodes whose bits went into those of the latest: to be dropped next
        self._children: dict[int, dict[int, int]] = {}  # of the live nodes that have any: token -> child
        self._leaves: dict[int, None] = {0: None}  # ordered, so that nothing depends on hashing
        self._kept: set[int] = {0}
        self.root = 0
        # Branch slots: slot s lies in page _branch_pages[s // page_size] (-1: given back) of the pool.
        self._branch_pages: list[int] = []
        self._lost_pages: list[int] = []  # heap of the indices that are -1
        self._page_load: list[int] = []
        self._table = (array("q"), array("i"))  # per slot: its slot in the pool, its token's position
        self._free_slots: list[int] = []  # heap: the lowest goes first, which keeps the table short
        self._slot_owner: list[int] = []
        self.live_branches = 0
        self._paths_length = len(prompt)  # sum of the leaves' path lengths
        self.peak_live = self.peak_unshared = self.peak_pages = 0

    # --- reading ---

    def token(self, node: int) -> int:
        """The node's token."""
        return self._token[node]

    def parent(self, node: int) -> int:
        """The node's parent; -1 for the first root."""
        return self._parent[node]

    def position(self, node: int) -> int:
        """The token's place in its sequence, counted from 0 at the prompt's first token."""
        return self._position[node]

    def is_evaluated(self, node: int) -> bool:
        """Whether keys and values of the node and all before it are in the cache."""
        if self._slot[node] == IN_TRUNK:
            return self._position[node] < self.trunk.cached
        return self._slot[node] >= 0

    def can_evaluate(self, nodes: Iterable[int]) -> bool:
        """Whether all of these are live nodes of this tree that are not evaluated yet."""
        slots = self._slot
        for node in nodes:
            if type(node) is not int or not 0 <= node < len(slots):
                return False
            if slots[node] != NO_SLOT and (node != self.root or self.is_evaluated(node)):
                return False
        return True

    @property
    def grown(self) -> int:
        """How many nodes there have been, live or not: they are numbered from 0."""
        return len(self._token)

    def is_live(self, node: int) -> bool:
        """Whether the node may still be grown from and evaluated."""
        return self._slot[node] != FREED and (self._slot[node] != IN_TRUNK or node == self.root)

    def path(self, node: int) -> list[int]:
        """The tokens from the prompt's end to the node: what it has generated."""
        tail = []
        while self._slot[node] != IN_TRUNK:
            tail.append(self._token[node])
            node = self._parent[node]
        return self.trunk.tokens[self.prompt_length : self._position[node] + 1] + tail[::-1]

    def descend(self, tokens: Sequence[int]) -> int:
        """The deepest live node on the path of these generated tokens; the root if they leave the trunk."""
        trunk = self.settled_from(0)
        if list(tokens[: len(trunk)]) != trunk:
            return self.root
        node = self.root
        for token in tokens[len(trunk) :]:
            if token not in (children := self._children.get(node, {})):
                break
            node = children[token]
        return node

    def settled_from(self, start: int) -> list[int]:
        """Generated tokens that every live node shares, from the start-th on."""
        return self.trunk.tokens[self.prompt_length + start :]

    @property
    def live_tokens(self) -> int:
        """Tokens that hold a slot: evaluated trunk and branches."""
        return self.trunk.cached + self.live_branches

    @property
    def room(self) -> int:
        """Tokens that all pages of the pool hold, whoever has them now."""
        return self.pool.pages * self.pool.page_size

    @property
    def page_count(self) -> int:
        """How many pages of the pool the tree holds."""
        return len(self.trunk.pages) + len(self._branch_pages) - len(self._lost_pages)

    @property
    def pages_held(self) -> list[int]:
        return self.trunk.pages + [p for p in self._branch_pages if p >= 0]

    # --- growing and pruning ---

    def grow(self, parents: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Children of live nodes, one per (parent, token); they take no slot until they are evaluated.

        Returns:
            node ids, in the order given; an existing child for a token that the parent already has.
        """
        return [self.child(parent, token) for parent, token in zip(parents, tokens, strict=True)]

    def grow_path(self, node: int, tokens: Iterable[int]) -> list[int]:
        """A chain of tokens below a node; the ids of its nodes."""
        chain = []
        for token in tokens:
            chain.append(node := self.child(node, token))
        return chain

    def child(self, parent: int, token: int) -> int:
        """A live node's child for a token, grown if it is not there yet."""
        if children := self._children.get(parent):
            if token in children:
                return children[token]
        elif not self.is_live(parent):
            raise ValueError(f"node {parent} is not live: it was dropped by keep()")
        return self._grow_one(parent, token)

    def _grow_one(self, parent: int, token: int) -> int:
        node = len(self._token)
        position = self._position[parent] + 1
        self._token.append(token)
        self._parent.append(parent)
        self._position.append(position)
        self._slot.append(NO_SLOT)
        if parent in self._children:
            self._children[parent][token] = node
        else:
            self._children[parent] = {token: node}
            del self._leaves[parent]
            self._paths_length -= position
        self._leaves[node] = None
        self._paths_length += position + 1
        return node

    def keep(self, nodes: Iterable[int]) -> None:
        """Free every node that is neither one of these nor an ancestor of one; promote the stem they share."""
        self._kept = kept = set(nodes)
        for node in kept:
            if not self.is_live(node):
                raise ValueError(f"node {node} is not live: it was dropped by an earlier keep()")
        if not kept:
            raise ValueError("expected at least one node to keep")
        if len(kept) == 1:
            return self._keep_path(*kept)
        self._promote(self._prune())

    def _keep_path(self, node: int) -> None:
        """Move the path to a node into the trunk and drop all branches at once, which is cheaper than one by one."""
        stem = []
        while node != self.root:
            stem.append(node)
            node = self._parent[node]
        stem.reverse()
        source = [self._table[0][slot] for n in stem if (slot := self._slot[n]) >= 0]
        self.pool.give(*(page for page in self._branch_pages if page >= 0))
        self._clear_slots()
        self._extend_trunk(source)  # of the pages given back enough are left
        for siblings in self._children.values():
            for n in siblings.values():
                self._slot[n] = FREED
        for n in stem:
            self._slot[n] = IN_TRUNK
            self.trunk.tokens.append(self._token[n])
            self.root = n
        self._bits.clear()
        self._children.clear()
        self._leaves = {self.root: None}
        self._paths_length = self._position[self.root] + 1

    def _prune(self) -> list[int]:
        """Drop the nodes that are not kept; returns their slots, which are the caller's to give back."""
        kept, children, leaves, slot_of, slots = self._kept, self._children, self._leaves, self._slot, []
        for node in [leaf for leaf in leaves if leaf not in kept]:
            while node not in children and node not in kept and node != self.root:
                if slot_of[node] >= 0:
                    slots.append(slot_of[node])
                parent, position = self._parent[node], self._position[node]
                slot_of[node] = FREED
                del leaves[node]
                self._paths_length -= position + 1
                siblings = children[parent]
                del siblings[self._token[node]]
                if not siblings:
                    del children[parent]
                    leaves[parent] = None
                    self._paths_length += position
                node = parent
        return slots

    def _promote(self, free: list[int]) -> None:
        """Move the stem below the root into the trunk, up to the first kept node or fork; give slots back."""
        stem = []
        node = self.root
        while node not in self._kept and len(children := self._children[node]) == 1:
            [node] = children.values()
            stem.append(node)
        slots = [slot for n in stem if (slot := self._slot[n]) >= 0]
        size = self.pool.page_size
        missing = -(-(len(self.trunk.tokens) + len(slots)) // size) - len(self.trunk.pages)
        if slots and missing > self.pool.free_pages:
            emptied = Counter(slot // size for slot in free + slots)
            if missing > self.pool.free_pages + sum(self._page_load[i] == n for i, n in emptied.items()):
                stem, slots = [], []  # it stays in the branches, where it already has its slots
        source = [self._table[0][slot] for slot in slots]
        self._release_slots(free + slots)
        if not stem:
            return
        if slots:
            promoted = sum(1 << slot for slot in slots)
            self._extend_trunk(source)
            for n in self._bits:
                self._bits[n] &= ~promoted
        for n in stem:
            self.trunk.tokens.append(self._token[n])
            del self._children[self._parent[n]]
            self._slot[n] = IN_TRUNK
        self.root = stem[-1]

    def _extend_trunk(self, source: Sequence[int]) -> None:
        """Bring the keys and values of slots in the pool to the trunk's end; the slots were given back just now.

        Room is there. What waits in its place already is not copied, and the rest is read before any is written.
        """
        if not source:
            return
        start = len(self.trunk.tokens)
        self._reserve_trunk(start + len(source))
        moves = [(s, t) for i, s in enumerate(source) if s != (t := self._trunk_slot(start + i))]
        if moves:
            self.pool.copy([s for s, _ in moves], [t for _, t in moves])
        self.trunk.cached = start + len(source)
        self._note_peaks()

    # --- what the packer asks ---

    def pending(self, nodes: Iterable[int]) -> tuple[int, list[int]]:
        """What must be evaluated to know `nodes`: the number of trunk tokens, and branch nodes, parents first."""
        need: set[int] = set()
        for node in nodes:
            if not self.is_live(node):
                raise ValueError(f"node {node} is not live: it was dropped by keep()")
            while self._slot[node] == NO_SLOT and node not in need:
                need.add(node)
                node = self._parent[node]
        return len(self.trunk.tokens) - self.trunk.cached, sorted(need)

    def pages_wanted(self, nodes: Iterable[int], more: int) -> int:
        """How many pages the tree has to take to evaluate `nodes`, and then `more` branch nodes below them."""
        trunk, branches = self.pending(nodes)
        size, slots = self.pool.page_size, len(branches) + more - len(self._free_slots)
        return -(-(self.trunk.cached + trunk) // size) - len(self.trunk.pages) + max(0, -(-slots // size))

    @property
    def least_span(self) -> int:
        """Every token is evaluated as part of a sequence at least this long."""
        return self.switch_length + 1 if self.trunk.stretched and self.switch_length is not None else 0

    def regimes(self, nodes: Iterable[int]) -> list[tuple[bool, list[int]]]:
        """Nodes by what their sequences need: (stretched, nodes), the kind that the tree holds now first."""
        if self.switch_length is None:
            return [(False, list(nodes))]
        kinds: dict[bool, list[int]] = {self.trunk.stretched: [], not self.trunk.stretched: []}
        for node in nodes:
            kinds[self._position[node] >= self.switch_length].append(node)
        return [(kind, group) for kind, group in kinds.items() if group]

    def enter(self, stretched: bool) -> None:
        """Hold keys and values of this kind from now on; those of the other are given up, to be evaluated afresh."""
        if stretched == self.trunk.stretched:
            return
        self.trunk.stretched = stretched
        self.unplace(self.trunk.cached, [n for n in self._slot_owner if n >= 0])

    def place(self, trunk_tokens: int, nodes: Sequence[int]) -> list[int]:
        """Take slots for the next trunk tokens and for branch nodes (parents first).

        Returns:
            their slots in the pool, trunk first.

        Raises:
            KVMemoryError: the pool is full; nothing was taken.
        """
        start, taken = self.trunk.cached, []
        for node in self._spent:
            self._bits.pop(node, None)
        try:
            self._reserve_trunk(start + trunk_tokens)
            for node in nodes:
                slot = self._take_slot(self._position[node])
                taken.append(slot)
                self._slot_owner[slot] = node
                self._table[0][slot], self._table[1][slot] = self._pool_slot(slot), self._position[node]
                self._slot[node] = slot
                self._bits[node] = self.ancestry(self._parent[node]) | 1 << slot
        except KVMemoryError:
            self.unplace(0, nodes[: len(taken)])
            raise
        self._spent = [self._parent[node] for node in nodes]
        self.trunk.cached = start + trunk_tokens
        self._note_peaks()
        return [self._trunk_slot(start + i) for i in range(trunk_tokens)] + [self._table[0][slot] for slot in taken]

    def _note_peaks(self) -> None:
        self.peak_live = max(self.peak_live, self.live_tokens)
        self.peak_unshared = max(self.peak_unshared, self._paths_length)
        self.peak_pages = max(self.peak_pages, self.page_count)

    def unplace(self, trunk_tokens: int, nodes: Sequence[int]) -> None:
        """Undo `place` after a pass that failed."""
        self._release_slots([self._slot[node] for node in nodes])
        for node in nodes:
            self._slot[node] = NO_SLOT
        self.trunk.cached -= trunk_tokens
        self._trim_trunk(-(-self.trunk.cached // self.pool.page_size))

    def ancestry(self, node: int) -> int:
        """The node's ancestors among the branch slots and itself: bit s is slot s."""
        bits = 0  # a bit per slot and node would add up to more than the cache: only the latest nodes have theirs
        while self._slot[node] != IN_TRUNK and node not in self._bits:
            bits |= 1 << self._slot[node]
            node = self._parent[node]
        return bits | self._bits.get(node, 0)

    def branch_table(self) -> tuple["array[int]", "array[int]"]:
        """Of every branch slot, its slot in the pool and its token's position; 0 where it is free. To be read only."""
        return self._table

    def page_runs(self) -> list[tuple[int, int]]:
        """(first page, pages) of each contiguous piece of the trunk, in order."""
        return [(first, pages) for first, pages in self._runs]

    def trunk_runs(self) -> list[tuple[int, int]]:
        """(first slot, length) of each contiguous piece of the evaluated trunk, in order."""
        size, left = self.pool.page_size, self.trunk.cached
        runs = []
        for first, pages in self._runs:
            runs.append((first * size, min(pages * size, left)))
            left -= pages * size
        return runs

    # --- the end ---

    def retire(self) -> Trunk:
        """End the tree but hand on its trunk, pages included."""
        self._drop_branches()
        trunk, self.trunk, self._runs = self.trunk, Trunk([], []), []
        trunk.tokens = trunk.tokens[: trunk.cached]
        return trunk

    def release(self) -> None:
        """End the tree and give every page back. Safe to call twice."""
        self._drop_branches()
        self.trunk.release(self.pool)
        self._runs = []

    def _drop_branches(self) -> None:
        self.pool.give(*(page for page in self._branch_pages if page >= 0))
        self._clear_slots()
        self.pool.unclaim(self._claim)
        self._claim = range(0)

    def _clear_slots(self) -> None:
        """No branch has a slot any more."""
        self._branch_pages, self._page_load, self._free_slots, self._slot_owner = [], [], [], []
        self._lost_pages, self._table = [], (array("q"), array("i"))
        self.live_branches = 0

    # --- slots and pages ---

    def _adopt(self, trunk: Trunk) -> None:
        shared = 0
        limit = min(trunk.cached, len(self.trunk.tokens) - 1)  # the last prompt token must be evaluated to be answered
        while shared < limit and trunk.tokens[shared] == self.trunk.tokens[shared]:
            shared += 1
        self.trunk.pages, self.trunk.cached, self.trunk.stretched = trunk.pages, shared, trunk.stretched
        trunk.pages, trunk.cached = [], 0
        for page in self.trunk.pages:
            self._note_run(page)
        self._trim_trunk(-(-shared // self.pool.page_size))

    def _reserve_trunk(self, tokens: int) -> None:
        pages, before = self.trunk.pages, len(self.trunk.pages)
        try:
            while len(pages) * self.pool.page_size < tokens:
                wish = pages[-1] + 1 if pages else self._claim.start
                if not self.pool.is_free(wish):
                    wish, _ = self.pool.roomiest()
                pages.append(self.pool.take(wish))
                self._note_run(pages[-1])
        except KVMemoryError:
            self._trim_trunk(before)
            raise

    def _trim_trunk(self, pages: int) -> None:
        while len(self.trunk.pages) > pages:
            self.pool.give(self.trunk.pages.pop())
            self._runs[-1][1] -= 1
            if not self._runs[-1][1]:
                self._runs.pop()

    def _note_run(self, page: int) -> None:
        if self._runs and sum(self._runs[-1]) == page:
            self._runs[-1][1] += 1
        else:
            self._runs.append([page, 1])

    def _trunk_slot(self, place: int) -> int:
        size = self.pool.page_size
        return self.trunk.pages[place // size] * size + place % size

    def _pool_slot(self, slot: int) -> int:
        size = self.pool.page_size
        return self._branch_pages[slot // size] * size + slot % size

    def _take_slot(self, position: int) -> int:
        size = self.pool.page_size
        if self._free_slots:
            slot = heapq.heappop(self._free_slots)
        else:
            wish = None
            if size == 1:  # where the trunk will want the token, should it come to that
                wish = self.trunk.pages[-1] + 1 + position - len(self.trunk.pages)
            page = self.pool.take(wish if wish in self._claim else None)
            if self._lost_pages:
                i = heapq.heappop(self._lost_pages)
                self._branch_pages[i] = page
            else:
                i = len(self._branch_pages)
                self._branch_pages.append(page)
                self._page_load.append(0)
                for column in (self._slot_owner, *self._table):
                    column.extend([0] * size)
                self._slot_owner[-size:] = [-1] * size
            slot = i * size
            for s in range(slot + 1, slot + size):
                heapq.heappush(self._free_slots, s)
        self._page_load[slot // size] += 1
        self.live_branches += 1
        return slot

    def _release_slots(self, slots: Sequence[int]) -> None:
        """Give slots of branch nodes back, and the pages that are empty without them."""
        if not slots:
            return
        size, owners, loads, (places, positions) = self.pool.page_size, self._slot_owner, self._page_load, self._table
        for slot in slots:
            self._bits.pop(owners[slot], None)
            owners[slot] = -1
            places[slot] = positions[slot] = 0
            loads[slot // size] -= 1
        self.live_branches -= len(slots)
        empty = [i for i in {slot // size for slot in slots} if not loads[i]]
        self.pool.give(*(self._branch_pages[i] for i in empty))
        for i in empty:
            self._branch_pages[i] = -1
        self._lost_pages += empty
        self._free_slots = [s for s in [*self._free_slots, *slots] if self._branch_pages[s // size] >= 0]
        heapq.heapify(self._free_slots)
        self._shorten()

    def _shorten(self) -> None:
        """Cut what is lost off the end of the table of branch slots."""
        end = len(self._branch_pages)
        while end and self._branch_pages[end - 1] < 0:
            end -= 1
        del self._branch_pages[end:], self._page_load[end:]
        for column in (self._slot_owner, *self._table):
            del column[end * self.pool.page_size :]
        self._lost_pages = [i for i in self._lost_pages if i < end]
        heapq.heapify(self._lost_pages)

    def check_invariants(self) -> None:
        """Everything the tree keeps twice agrees; for tests."""
        size = self.pool.page_size
        live = [n for n in range(len(self._token)) if self._slot[n] not in (FREED, IN_TRUNK)] + [self.root]
        children: dict[int, list[int]] = {n: [] for n in live}
        for n in live:
            if n != self.root:
                assert self._parent[n] in children, f"live node {n} lost its parent"
                children[self._parent[n]].append(n)
                assert self._children[self._parent[n]][self._token[n]] == n
                assert self._position[n] == self._position[self._parent[n]] + 1
        for n in live:
            assert sorted(self._children.get(n, {}).values()) == children[n], n
            assert (n in self._leaves) == (not children[n]), n
            if n != self.root and self._slot[n] >= 0:
                assert self._slot_owner[self._slot[n]] == n
                assert self.ancestry(n) == (self.ancestry(self._parent[n]) | 1 << self._slot[n])
                assert self._parent[n] == self.root or self._slot[self._parent[n]] >= 0
        assert sorted(self._children) == sorted(n for n in live if children[n])
        assert len(self._leaves) == sum(not c for c in children.values())
        assert self._paths_length == sum(self._position[n] + 1 for n in self._leaves)
        assert sorted(self._lost_pages) == [i for i, page in enumerate(self._branch_pages) if page < 0]
        for s, n in enumerate(self._slot_owner):
            entry = (self._pool_slot(s), self._position[n]) if n >= 0 else (0, 0)
            assert (self._table[0][s], self._table[1][s]) == entry
        owners = [n for n in self._slot_owner if n >= 0]
        assert sorted(owners) == sorted(n for n in live if self._slot[n] >= 0)
        assert self.live_branches == len(owners) == sum(self._page_load)
        assert len(self._slot_owner) == size * len(self._branch_pages)
        free = [s for s, n in enumerate(self._slot_owner) if n < 0 and self._branch_pages[s // size] >= 0]
        assert sorted(self._free_slots) == free
        for i, page in enumerate(self._branch_pages):
            assert (page >= 0) == (self._page_load[i] > 0)
        assert self._position[self.root] == len(self.trunk.tokens) - 1
        assert self.trunk.cached <= len(self.trunk.tokens)
        assert len(self.trunk.pages) == -(-self.trunk.cached // size), (len(self.trunk.pages), self.trunk.cached)
        assert len(set(self.pages_held)) == len(self.pages_held) == self.page_count
        assert [p for first, n in self._runs for p in range(first, first + n)] == self.trunk.pages

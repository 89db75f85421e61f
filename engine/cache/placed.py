"""The nodes of a tree with their slots in a pool: which node has which slot, and what a pass reads."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from engine.cache.drafts import DraftedNode
from engine.cache.nodes import IN_TRUNK, NO_SLOT, Nodes
from engine.cache.pool import PagePool
from engine.cache.prefixes import shared_length
from engine.cache.slots import BranchSlots, Trunk
from engine.cache.states import Held, TrunkStates
from engine.errors import KVMemoryError
from kernels.layout import NULL_STATE


class PlacedNodes(Nodes):
    """Nodes that take slots from a pool when they are evaluated. `TokenTree` prunes them.

    Args:
        pool, prompt, expected, trunk: see `TokenTree`.

    Attributes:
        slots: the slots of branches.
        peak_live, peak_unshared, peak_pages, peak_state_bytes: the maxima so far of tokens with slots, tokens of all
            paths, pages, and bytes of recurrent layers.
    """

    def __init__(self, pool: PagePool, prompt: Sequence[int], expected: int = 0, trunk: Trunk | None = None):
        super().__init__(prompt)
        self.pool, self.slots = pool, BranchSlots(pool)
        if trunk is not None:
            self._adopt(trunk)
        if pool.stores is not None and self.trunk.states is None:
            self.trunk.states = TrunkStates(pool.stores)
        wanted = -(-max(expected, len(prompt)) // pool.page_size)
        self._claim = pool.claim(wanted) if not self.trunk.pages else range(0)
        self._bits: dict[int, int] = {}  # latest node -> bits of the branch slots of its ancestors and itself
        self._spent: list[int] = []  # nodes whose bits are part of those of the latest nodes: to be dropped next
        self.peak_live = self.peak_unshared = self.peak_pages = self.peak_state_bytes = 0

    # --- reading ---

    def is_evaluated(self, node: int) -> bool:
        """Whether the cache holds the keys and values of the node and its ancestors."""
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
    def live_tokens(self) -> int:
        """The number of tokens that hold a slot: evaluated trunk and branches."""
        return self.trunk.cached + self.slots.count

    @property
    def live_branches(self) -> int:
        """Branch nodes that hold a slot."""
        return self.slots.count

    @property
    def room(self) -> int:
        """Tokens that all pages of the pool hold, free or not."""
        return self.pool.pages * self.pool.page_size

    @property
    def page_count(self) -> int:
        """How many pages of the pool the tree holds."""
        return len(self.trunk.pages) + self.slots.page_count

    @property
    def held_bytes(self) -> int:
        """Bytes of its pages, and of its rows and states of recurrent layers."""
        return self.page_count * self.pool.page_bytes + self._held_state_bytes()

    @property
    def pages_held(self) -> list[int]:
        """The pages of the pool that the tree holds."""
        return self.trunk.pages + self.slots.pages_held

    # --- slots ---

    def pending(self, nodes: Iterable[int]) -> tuple[int, list[int]]:
        """The tokens to evaluate for `nodes`: the number of trunk tokens, and branch nodes, parents first."""
        need: set[int] = set()
        for node in nodes:
            if not self.is_live(node):
                raise ValueError(f"node {node} is not live: it was dropped by keep()")
            while self._slot[node] == NO_SLOT and node not in need:
                need.add(node)
                node = self._parent[node]
        return len(self.trunk.tokens) - self.trunk.cached, sorted(need)

    def pages_wanted(self, nodes: Iterable[int], more: int) -> int:
        """The number of pages that the tree must take to evaluate `nodes`, and then `more` branch nodes below them."""
        trunk, branches = self.pending(nodes)
        size, slots = self.pool.page_size, len(branches) + more - len(self.slots.free)
        return -(-(self.trunk.cached + trunk) // size) - len(self.trunk.pages) + max(0, -(-slots // size))

    def allocate(self, trunk_tokens: int, nodes: Sequence[int]) -> list[int]:
        """Take slots for the next trunk tokens and for branch nodes (parents first), which are to be evaluated.

        Returns:
            their slots in the pool, trunk first.

        Raises:
            KVMemoryError: the pool is full; nothing was taken.
        """
        trunk, start, slots, size = self.trunk, self.trunk.cached, self.slots, self.pool.page_size
        self._forget_spent()
        try:
            self._reserve_trunk(trunk_tokens)
            if trunk.states is not None:
                trunk.states.extend(start, trunk_tokens)
            taken = slots.take(nodes, [*map(self._position.__getitem__, nodes)], self._wish)
        except KVMemoryError:
            trunk.truncate(self.pool, start)
            raise
        for node, slot in zip(nodes, taken, strict=True):
            self._place(node, slot)
        self._spent = [self._parent[node] for node in nodes]
        trunk.cached = start + trunk_tokens
        self._note_peaks()
        return [trunk.slot(start + i, size) for i in range(trunk_tokens)] + [slots.table[0][slot] for slot in taken]

    def _wish(self, position: int) -> int | None:
        """The page where the trunk will want the token at a position if it gets that far; with pages of one token."""
        pages = self.trunk.pages
        wish = pages[-1] + 1 + position - len(pages) if self.pool.page_size == 1 and pages else -1
        return wish if wish in self._claim else None

    def _place(self, node: int, slot: int) -> None:
        self._slot[node] = slot
        self._bits[node] = self.ancestry(self._parent[node]) | 1 << slot

    def _forget_spent(self) -> None:
        for node in self._spent:
            self._bits.pop(node, None)

    def _reserve_trunk(self, tokens: int) -> None:
        """Take pages for the trunk's next tokens: after its last page, or where the claim begins if that page is
        another tree's. Raises KVMemoryError."""
        trunk, claim = self.trunk, self._claim
        if tokens and trunk.cached % self.pool.page_size:
            trunk.own_end(self.pool)
        follows = trunk.pages and (not claim or trunk.pages[-1] in claim)
        trunk.reserve(self.pool, trunk.cached + tokens, trunk.pages[-1] + 1 if follows else claim.start)

    def _note_peaks(self) -> None:
        self.peak_live = max(self.peak_live, self.live_tokens)
        self.peak_unshared = max(self.peak_unshared, self._paths_length)
        self.peak_pages = max(self.peak_pages, self.page_count)
        self.peak_state_bytes = max(self.peak_state_bytes, self._held_state_bytes())

    def _held_state_bytes(self) -> int:
        if self.trunk.states is None:
            return 0
        rows, states = map(len, self.states_held)
        return rows * self.pool.row_bytes + states * self.pool.state_bytes

    def _adopt(self, trunk: Trunk) -> None:
        """Take over an earlier trunk's pages for the prefix that it shares with the prompt."""
        limit = min(trunk.cached, len(self.trunk.tokens) - 1)  # the last prompt token is evaluated for its logits
        shared = shared_length(trunk.tokens[:limit], self.trunk.tokens)
        self.trunk = replace(trunk, tokens=self.trunk.tokens)
        trunk.pages, trunk.runs, trunk.cached, trunk.states = [], [], 0, None
        self.trunk.truncate(self.pool, shared)

    # --- for the packer ---

    def ancestry(self, node: DraftedNode | int) -> int:
        """Bits of the branch slots of the node and its ancestors: bit s is slot s."""
        if isinstance(node, DraftedNode):
            return 1 << node.slot | self.ancestry(node.parent)
        if (bits := self._bits.get(node)) is not None:
            return bits
        bits = 0  # bits of all nodes would take more memory than the cache: only the latest nodes store theirs
        while self._slot[node] != IN_TRUNK and node not in self._bits:
            bits |= 1 << self._slot[node]
            node = self._parent[node]
        return bits | self._bits.get(node, 0)

    def held(self, node: DraftedNode | int) -> Held | None:
        """The row and state of a node that is evaluated or about to be; None if it is in the trunk."""
        slot = node.slot if isinstance(node, DraftedNode) else self._slot[node]
        return None if slot == IN_TRUNK else self.slots.held[slot]

    @property
    def states_held(self) -> tuple[list[int], list[int]]:
        """The rows and the states of recurrent layers that the tree holds."""
        rows, states = ([], []) if self.trunk.states is None else self.trunk.states.held
        held = self.slots.held.values()
        return rows + [each.row for each in held], states + [each.state for each in held if each.state != NULL_STATE]

    def latest_ancestors(self, node: DraftedNode | int, count: int) -> list[int]:
        """Slots in the pool of an evaluated node's `count` latest ancestors, parents first; fewer if it has fewer."""
        found, table, slot = [], self.slots.table[0], self._slot
        node = node.parent if isinstance(node, DraftedNode) else self._parent[node]
        while isinstance(node, DraftedNode):
            found.append(table[node.slot])
            node = node.parent
        if len(found) >= count:
            return found[:count]
        while len(found) < count and slot[node] != IN_TRUNK:
            found.append(table[slot[node]])
            node = self._parent[node]
        return found + self.trunk.latest(self._position[node] + 1, count - len(found), self.pool.page_size)

    def trunk_runs(self, tokens: int | None = None) -> list[tuple[int, int]]:
        """(first slot, length) of each contiguous piece of the trunk's first tokens, in order; None: all evaluated."""
        size, left = self.pool.page_size, self.trunk.cached if tokens is None else tokens
        runs = []
        for first, pages in self.trunk.runs:
            runs.append((first * size, min(pages * size, left)))
            left -= pages * size
        return runs

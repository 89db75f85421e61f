"""TokenTree: the tokens of one search, in a trunk shared by all sequences and in branches, with their slots."""

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from engine.cache.drafts import DraftedNode, Drafts
from engine.cache.nodes import FREED, IN_TRUNK, NO_SLOT
from engine.cache.placed import PlacedNodes
from engine.cache.pool import PagePool
from engine.cache.slots import Trunk
from engine.cache.states import Held
from engine.errors import KVMemoryError


class TreeObserver(Protocol):
    """Is told of every change of a tree, after it."""

    def kept(self, nodes: set[int]) -> None:
        """`keep` was called with these nodes."""

    def allocated(self, trunk_tokens: int, nodes: Sequence[int], slots: Sequence[int]) -> None:
        """Trunk tokens and branch nodes got slots; `slots` are those of the nodes in the pool."""

    def adopted(self, node: int, slot: int) -> None:
        """A node was grown that had been drafted; `slot` is its slot in the pool."""

    def released(self, trunk_tokens: int, nodes: Sequence[int], slots: Sequence[int]) -> None:
        """Trunk tokens and branch nodes lost their slots because a pass failed or the rotary embeddings change."""

    def ended(self) -> None:
        """The branches are freed; this may be called twice."""


class TokenTree(PlacedNodes):
    """A tree of tokens over one pool.

    A node takes a slot when it is evaluated and loses it when `keep` drops the node. `keep` promotes the stem that all
    live nodes share: its keys and values move into the trunk.

    Args:
        pool: holds the keys and values.
        prompt: at least one token.
        expected: number of tokens to which the trunk may grow; a hint for contiguous memory.
        trunk: an earlier tree's trunk to take over; the prefix that it shares with the prompt is not evaluated again.
        switch_length: see `ModelShape`. A tree holds keys and values of one variant of rotary embeddings at a time,
            that of sequences up to this length or that of longer ones; `by_rope` and `use_rope` change between them.

    Attributes:
        observer: see `TreeObserver`; None by default.
        drafts: nodes that were evaluated before the search has grown them.
        salt: the salt of cached prefixes, see `PrefixCache`; None (the default): the tree neither uses nor leaves any.
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
        super().__init__(pool, prompt, expected, trunk)
        self.switch_length = switch_length
        self.observer: TreeObserver | None = None
        self.salt: str | None = None
        self.reused = self.trunk.cached  # prompt tokens that need no evaluation
        self._stops: Collection[int] = ()  # lengths of the trunk after which a pass ends, so that states are kept
        self._read = 0  # trunk tokens in the cache when the variant of rotary embeddings last changed
        self.drafts = Drafts()
        self._reserved: list[int] | None = None  # branch slots, see `reserve`
        self.use_rope(switch_length is not None and len(prompt) > switch_length)

    # --- pruning ---

    def keep(self, nodes: Iterable[int]) -> None:
        """Free every node that is neither one of these nor an ancestor of one; promote the shared stem."""
        kept = set(nodes)
        for node in kept:
            if not self.is_live(node):
                raise ValueError(f"node {node} is not live: it was dropped by an earlier keep()")
        if not kept:
            raise ValueError("expected at least one node to keep")
        if self.drafts and self.pool.free_pages < 2:
            self.drop_drafts()  # so that the stem has room in the trunk
        if len(kept) == 1 and not self._reserved and not self.drafts:
            self._keep_path(*kept)
        else:
            self._promote(kept, self._prune(kept))
        if self.drafts.rows:
            self.drafts.rows = {node: row for node, row in self.drafts.rows.items() if self.is_live(node)}
        if self.observer is not None:
            self.observer.kept(kept)

    def _keep_path(self, node: int) -> None:
        """Move the path to a node into the trunk and drop all branches at once, which is faster than one by one."""
        stem = []
        while node != self.root:
            stem.append(node)
            node = self._parent[node]
        stem.reverse()
        table, _ = self.slots.table
        slots = [slot for n in stem if (slot := self._slot[n]) >= 0]
        source, held = [table[slot] for slot in slots], self.slots.detach(slots)
        self.slots.release_all()
        self._extend_trunk(source, held)  # the released pages suffice
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

    def _prune(self, kept: set[int]) -> list[int]:
        """Drop the nodes that are not kept; returns their slots, which the caller must release."""
        children, leaves, slot_of, slots = self._children, self._leaves, self._slot, []
        for node in [leaf for leaf in leaves if leaf not in kept]:
            while node not in children and node not in kept:
                if slot_of[node] >= 0:
                    slots.append(slot_of[node])
                    self._bits.pop(node, None)
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
        if self.drafts:
            self.slots.give_up(self.drafts.drop_below([node for node in self.drafts.below if slot_of[node] == FREED]))
        return slots

    def _promote(self, kept: set[int], free: list[int]) -> None:
        """Move the stem below the root into the trunk, up to the first kept node or fork; release the slots `free`."""
        stem = []
        node = self.root
        while node not in kept and len(children := self._children[node]) == 1:
            [node] = children.values()
            stem.append(node)
        if stem and self.drafts:
            self.slots.give_up(self.drafts.drop_below([self.root, *stem[:-1]]))
        slots = [slot for n in stem if (slot := self._slot[n]) >= 0]
        size = self.pool.page_size
        missing = -(-(len(self.trunk.tokens) + len(slots)) // size) - len(self.trunk.pages)
        if slots and missing > self.pool.free_pages + self.slots.pages_emptied(free + slots):
            stem, slots = [], []  # the stem stays in the branches, with its slots
        source, held = [self.slots.table[0][slot] for slot in slots], self.slots.detach(slots)
        self.slots.release(free + slots)
        if not stem:
            return
        if slots:
            promoted = sum(1 << slot for slot in slots)
            self._extend_trunk(source, held)
            for n in stem:
                self._bits.pop(n, None)
            for n in self._bits:
                self._bits[n] &= ~promoted
        for n in stem:
            self.trunk.tokens.append(self._token[n])
            del self._children[self._parent[n]]
            self._slot[n] = IN_TRUNK
        self.root = stem[-1]

    def _extend_trunk(self, source: Sequence[int], held: Sequence[Held]) -> None:
        """Copy the keys and values of slots to the trunk's end; the caller has just released these slots. What
        recurrent layers `held` there is not copied.

        The pool has room. Slots that are already in place are not copied; the others are all read before any is
        written.
        """
        if not source:
            return
        start, trunk, size = len(self.trunk.tokens), self.trunk, self.pool.page_size
        self._reserve_trunk(len(source))
        moves = [(s, t) for i, s in enumerate(source) if s != (t := trunk.slot(start + i, size))]
        if moves:
            self.pool.copy([s for s, _ in moves], [t for _, t in moves])
        if trunk.states is not None:
            trunk.states.append(start, held)
        trunk.cached = start + len(source)
        self._note_peaks()

    # --- for the packer ---

    @property
    def least_span(self) -> int:
        """The minimum span of a token, the sequence length by which a pass chooses its rotary embeddings."""
        return self.switch_length + 1 if self.trunk.long_rope and self.switch_length is not None else 0

    def by_rope(self, nodes: Iterable[int]) -> list[tuple[bool, list[int]]]:
        """Nodes grouped by the rotary embeddings that their sequences need: (long, nodes), the tree's current variant
        first."""
        if self.switch_length is None:
            return [(False, list(nodes))]
        groups: dict[bool, list[int]] = {self.trunk.long_rope: [], not self.trunk.long_rope: []}
        for node in nodes:
            groups[self._position[node] >= self.switch_length].append(node)
        return [(long, group) for long, group in groups.items() if group]

    def use_rope(self, long: bool) -> None:
        """Hold keys and values of this variant from now on; those of the other variant are dropped and must be
        evaluated again."""
        if long != self.trunk.long_rope:
            self.trunk.long_rope = long
            self.drop_drafts()
            if self.trunk.cached > self.reused:
                self._read = self.trunk.cached
            else:  # nothing was evaluated after the trunk that was taken over
                self.reused = 0
            self.release_slots(self.trunk.cached, [n for n in self.slots.owner if n >= 0])

    def allocate(self, trunk_tokens: int, nodes: Sequence[int]) -> list[int]:
        """Take slots for tokens that are to be evaluated, see `PlacedNodes.allocate`."""
        taken = super().allocate(trunk_tokens, nodes)
        if self.observer is not None:
            self.observer.allocated(trunk_tokens, nodes, taken[trunk_tokens:])
        return taken

    # --- drafts ---

    def has_row(self, node: int) -> bool:
        """Whether the row of a node is known because it was drafted: an `Evaluate` of only such nodes needs no pass."""
        return node in self.drafts.rows

    def reach(self, node: int, limit: int) -> int:
        """How many tokens ahead of a node may be drafted in an output of at most `limit` tokens: its last is not
        evaluated, and rotary embeddings do not change within a pass."""
        at = self._position[node]
        reach = self.prompt_length + limit - 2 - at
        if self.switch_length is not None and at < self.switch_length:
            reach = min(reach, self.switch_length - 1 - at)
        return reach

    def draft(self, parent: DraftedNode | int, token: int) -> tuple[DraftedNode, bool]:
        """The drafted child of an evaluated node for a token that the search has not grown there, and whether it is
        new, to be evaluated. Raises KVMemoryError."""
        if (known := self.drafts.children(parent).get(token)) is not None:
            return known, False
        position = 1 + (parent.position if isinstance(parent, DraftedNode) else self._position[parent])
        [slot] = self.slots.reserve([position], self._wish)
        node = self.drafts.add(parent, token, position, slot)
        self.peak_pages = max(self.peak_pages, self.page_count)
        return node, True

    def _grow_one(self, parent: int, token: int) -> int:
        node = super()._grow_one(parent, token)
        if self.drafts.below and (drafted := self.drafts.grown(node, parent, token)) is not None:
            self.slots.assign(drafted.slot, node)
            self._place(node, drafted.slot)
            self._note_peaks()
            if self.observer is not None:
                self.observer.adopted(node, self.slots.table[0][drafted.slot])
        return node

    def drop_draft(self, node: DraftedNode) -> None:
        """Forget a drafted node and all below it."""
        self.slots.give_up(self.drafts.drop(node))

    def drop_drafts(self) -> int:
        """Forget all drafted nodes, and drafted leaves that were never asked for; returns how many."""
        slots = self.drafts.drop_below([*self.drafts.below])
        self.slots.give_up(slots)
        leaves = [node for node in self.drafts.rows if node not in self._children and self._slot[node] >= 0]
        for node in leaves:
            self.forget_row(node)
        return len(slots) + len(leaves)

    def forget_row(self, node: int) -> None:
        """Take back the slots of a drafted node and everything below it, so that they are evaluated again if needed."""
        below = [node]
        for each in below:
            below += self._children.get(each, {}).values()
            self.drafts.rows.pop(each, None)
        self.slots.give_up(self.drafts.drop_below(below))
        self.release_slots(int(node == self.root), [each for each in below if self._slot[each] >= 0])

    # --- for looking ahead ---

    def reserve(self, count: int, position: int) -> tuple[list[int], list[int]]:
        """Reserve slots for nodes at a position that are not known yet; for a single node in a tree without branches,
        the trunk's next slot. `adopt` or `give_up` ends the reservation.

        Returns:
            their slots in the pool, and their branch slots (none for the trunk's next slot).

        Raises:
            KVMemoryError: the pool is full; nothing was taken.
        """
        assert self._reserved is None
        self._reserved = []
        try:
            if count == 1 and not self.slots.count:
                self._reserve_trunk(1)
                return [self.trunk.slot(self.trunk.cached, self.pool.page_size)], []
            self._reserved = self.slots.reserve([position] * count)
        except KVMemoryError:
            self.give_up()
            raise
        return [self.slots.table[0][slot] for slot in self._reserved], self._reserved

    def adopt(self, nodes: Sequence[int]) -> None:
        """Assign the reserved slots to new nodes, in order; without branches, to the trunk's next token."""
        assert self._reserved is not None and len(nodes) == len(self._reserved)
        self._forget_spent()
        for node, slot in zip(nodes, self._reserved, strict=True):
            self.slots.assign(slot, node)
            self._place(node, slot)
        self._spent = [self._parent[node] for node in nodes]
        self.trunk.cached += not nodes
        self._reserved = None
        self._note_peaks()

    def give_up(self) -> None:
        """Return the reserved slots, if there are any."""
        if self._reserved is not None:
            self.slots.give_up(self._reserved)
            self.trunk.truncate(self.pool, self.trunk.cached)
            self._reserved = None

    def release_slots(self, trunk_tokens: int, nodes: Sequence[int]) -> None:
        """Undo `allocate` after a pass that failed."""
        places = [self.slots.table[0][self._slot[node]] for node in nodes]
        self.slots.release([self._slot[node] for node in nodes])
        for node in nodes:
            self._slot[node] = NO_SLOT
            self._bits.pop(node, None)
        self.trunk.truncate(self.pool, self.trunk.cached - trunk_tokens)
        if self.observer is not None:
            self.observer.released(trunk_tokens, nodes, places)

    # --- cached prefixes ---

    def reuse(self) -> int:
        """Reuse cached pages for the trunk's tokens, except the last one, which is evaluated. Returns how many tokens
        need no evaluation."""
        trunk, before = self.trunk, self.trunk.cached
        if self.pool.prefixes is None or self.salt is None:
            return 0
        size, kept = self.pool.page_size, self.pool.kept_states
        pages, cached = self.pool.prefixes.match(trunk.tokens[:-1], (self.salt, trunk.long_rope, trunk.adapter))
        if kept is not None:
            kind, end = kept.stores.kind, self.prompt_length
            self._stops = {kind.whole(cached), end - kind.block * (end % kind.block == 0)}
            cached = kept.find(pages, cached)
        if cached <= before:
            return 0
        trunk.share(self.pool, pages[: -(-cached // size)])
        trunk.cached = cached
        if kept is not None and trunk.states is not None:
            kept.share(pages, cached, trunk.states)
        self.reused += max(0, min(cached, self.prompt_length) - max(before, self._read))  # a token counts once
        return cached - before

    def save(self, going_on: bool = False) -> None:
        """Give the evaluated part of the trunk to the prefix cache, and hold the cache's pages where it already has the
        same.

        States of recurrent layers are kept at the trunk's end, at the end of the prompt, where this prompt diverges
        from an earlier one, and at intervals within a prompt.

        Args:
            going_on: save only full pages.
        """
        trunk, size = self.trunk, self.pool.page_size
        cached = trunk.cached - trunk.cached % size if going_on else trunk.cached
        if self.pool.prefixes is None or self.salt is None:
            return
        pages = trunk.pages[: -(-cached // size)]
        found = self.pool.prefixes.insert(trunk.tokens[:cached], pages, (self.salt, trunk.long_rope, trunk.adapter))
        if found != pages[: len(found)]:
            trunk.share(self.pool, found)
        if self.pool.kept_states is not None and trunk.states is not None:
            if cached and trunk.pages[(cached - 1) // size] not in self.pool.kept:
                cached -= 1 + (cached - 1) % size  # the cache has that page of another tree, with tokens after these
            inside = going_on and trunk.cached != self.prompt_length and trunk.cached not in self._stops
            self.pool.kept_states.keep(trunk.pages, cached, trunk.states, inside)

    def until_stop(self, tokens: int) -> int:
        """How many of the next trunk tokens a pass may evaluate: fewer if a state is to be kept among them."""
        start = self.trunk.cached
        return min([tokens, *(stop - start for stop in self._stops if stop > start)])

    # --- the end ---

    def retire(self) -> Trunk:
        """End the tree and return its trunk with the pages."""
        self._drop_branches()
        trunk, self.trunk = self.trunk, Trunk([])
        trunk.tokens = trunk.tokens[: trunk.cached]
        return trunk

    def release(self) -> None:
        """End the tree and return all pages to the pool. It may be called twice."""
        self._drop_branches()
        self.trunk.release(self.pool)

    def _drop_branches(self) -> None:
        self.give_up()
        self.drafts = Drafts()
        self.slots.release_all()
        self.pool.unclaim(self._claim)
        self._claim = range(0)
        if self.observer is not None:
            self.observer.ended()

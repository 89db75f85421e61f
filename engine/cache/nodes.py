"""The nodes of one search's token tree, as arrays; this module takes and frees no cache memory."""

from collections.abc import Iterable, Sequence

from engine.cache.slots import Trunk

NO_SLOT = -1  # not evaluated yet
IN_TRUNK = -2  # keys and values lie in the trunk
FREED = -3


class Nodes:
    """A trunk shared by all sequences, and nodes below it. Nodes are integers; parents come before children.

    A node is identified by its path: growing the same token twice under one parent returns the same node. Every live
    node descends from the trunk.

    Args:
        prompt: at least one token.

    Attributes:
        prompt_length: number of tokens of the prompt.
        trunk: the trunk's tokens and their pages.
        root: the node of the trunk's last token.
    """

    def __init__(self, prompt: Sequence[int]):
        if not prompt:
            raise ValueError("expected a prompt of at least one token")
        self.prompt_length = len(prompt)
        self.trunk = Trunk(list(prompt))
        # One row per node, live or not.
        self._token: list[int] = [self.trunk.tokens[-1]]
        self._parent: list[int] = [-1]
        self._position: list[int] = [len(prompt) - 1]
        self._slot: list[int] = [IN_TRUNK]
        self._children: dict[int, dict[int, int]] = {}  # live node that has children -> token -> child
        self._leaves: dict[int, None] = {0: None}  # ordered, so that nothing depends on hashing
        self.root: int = 0
        self._paths_length = len(prompt)  # sum of the leaves' path lengths

    # --- reading ---

    def token(self, node: int) -> int:
        """The node's token."""
        return self._token[node]

    def parent(self, node: int) -> int:
        """The node's parent; -1 for the first root."""
        return self._parent[node]

    def position(self, node: int) -> int:
        """The token's index in its sequence; the prompt's first token has 0."""
        return self._position[node]

    def children(self, node: int) -> dict[int, int]:
        """A live node's children, by their tokens; not to be changed."""
        return self._children.get(node, {})

    @property
    def grown(self) -> int:
        """The number of nodes ever grown, live or not; they are numbered from 0."""
        return len(self._token)

    def is_live(self, node: int) -> bool:
        """Whether the node may have new children and may be evaluated."""
        return self._slot[node] != FREED and (self._slot[node] != IN_TRUNK or node == self.root)

    def path(self, node: int) -> list[int]:
        """The generated tokens up to the node."""
        tail, slots, tokens, parents = [], self._slot, self._token, self._parent
        while slots[node] != IN_TRUNK:
            tail.append(tokens[node])
            node = parents[node]
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
        """The generated tokens of the trunk, from the start-th on."""
        return self.trunk.tokens[self.prompt_length + start :]

    # --- growing ---

    def grow(self, parents: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Grow children of live nodes, one per (parent, token); they take no slot until they are evaluated.

        Returns:
            node ids, in the given order; the existing child if the parent already has one for the token.
        """
        return [self.child(parent, token) for parent, token in zip(parents, tokens, strict=True)]

    def grow_path(self, node: int, tokens: Iterable[int]) -> list[int]:
        """Grow a chain of tokens below a node; returns the ids of its nodes."""
        chain = []
        for token in tokens:
            chain.append(node := self.child(node, token))
        return chain

    def child(self, parent: int, token: int) -> int:
        """A live node's child for a token, grown if it does not exist yet."""
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

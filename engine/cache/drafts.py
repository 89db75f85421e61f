"""The drafted nodes of a tree, which are evaluated before its search has grown them and hidden from it until then."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class DraftedNode:
    """A token that the search has not asked for, with the slot of its keys and values.

    Attributes:
        parent: a drafted node, or the id of a node that the search has grown.
        position: the token's position in its sequence.
        slot: a branch slot.
        row: the stored part of its row, see `engine.step.drafting`; None until its pass has ended.
    """

    token: int
    parent: "DraftedNode | int"
    position: int
    slot: int
    row: Any = None
    children: dict[int, "DraftedNode"] = field(default_factory=dict)  # by token


class Drafts:
    """The drafted nodes below the nodes of a tree, and the rows of nodes that were drafted before they were grown.

    Attributes:
        below: node -> token -> drafted child.
        rows: drafted node -> the stored part of its row, until the search asks for it.
    """

    def __init__(self):
        self.below: dict[int, dict[int, DraftedNode]] = {}
        self.rows: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return bool(self.below)

    def __iter__(self) -> Iterator[DraftedNode]:
        """All drafted nodes, parents first."""
        return self._all(self.below.values())

    @staticmethod
    def _all(groups: Iterable[dict[int, DraftedNode]]) -> Iterator[DraftedNode]:
        stack = [node for group in groups for node in group.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def children(self, parent: "DraftedNode | int") -> dict[int, DraftedNode]:
        """The drafted children of a node, by token; not to be changed."""
        return parent.children if isinstance(parent, DraftedNode) else self.below.get(parent, {})

    def add(self, parent: "DraftedNode | int", token: int, position: int, slot: int) -> DraftedNode:
        """Add a drafted child of a node."""
        node = DraftedNode(token, parent, position, slot)
        siblings = parent.children if isinstance(parent, DraftedNode) else self.below.setdefault(parent, {})
        siblings[token] = node
        return node

    def grown(self, node: int, parent: int, token: int) -> DraftedNode | None:
        """The drafted node that the search has now grown as `node`, which is no longer hidden; None if there is
        none."""
        siblings = self.below.get(parent)
        drafted = siblings.pop(token, None) if siblings else None
        if siblings is not None and not siblings:
            del self.below[parent]
        if drafted is None:
            return None
        if drafted.children:
            self.below[node] = drafted.children
            for child in drafted.children.values():
                child.parent = node
        self.rows[node] = drafted.row
        return drafted

    def drop_below(self, nodes: Iterable[int]) -> list[int]:
        """Forget the drafted nodes below these nodes; returns their slots, which the caller must release."""
        return [node.slot for node in self._all([self.below.pop(node, {}) for node in nodes])]

    def drop(self, node: DraftedNode) -> list[int]:
        """Forget a drafted node and everything below it; returns their slots, which the caller must release."""
        siblings = node.parent.children if isinstance(node.parent, DraftedNode) else self.below[node.parent]
        del siblings[node.token]
        if not siblings and not isinstance(node.parent, DraftedNode):
            del self.below[node.parent]
        return [node.slot, *(below.slot for below in self._all([node.children]))]

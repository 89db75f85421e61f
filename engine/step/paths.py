"""The rows and states that recurrent layers read and write in a pass, from the trees of its chunks."""

from collections.abc import Sequence

from torch import Tensor

from engine.cache.drafts import DraftedNode
from engine.cache.tree import TokenTree
from kernels.delta_net.chains import chains_of
from kernels.layout import NULL_SLOT, NULL_STATE, TRASH_SLOT, DeltaKind, DeltaPaths


class PathColumns:
    """The columns of `DeltaPaths`, tree by tree.

    Args:
        kind: the kind of the recurrent layers.
        chained: whether `chain` is called at the end, for a GPU.

    Attributes:
        levels: see `DeltaPaths`.
    """

    def __init__(self, kind: DeltaKind, chained: bool = False):
        self.kind, self.chained = kind, chained
        self.rows: list[int] = []
        self.paths: list[int] = []
        self.lengths: list[int] = []
        self.bases: list[int] = []
        self.folds: list[int] = []
        self.chains: list[int] = []
        self.levels: tuple[int, ...] = ()

    def add(self, tree: TokenTree, trunk_tokens: int, nodes: Sequence[int | DraftedNode]) -> None:
        """Add the next tokens of a trunk, and branch nodes (parents first); they have rows and states already."""
        states, end = tree.trunk.states, tree.trunk.cached
        assert states is not None
        first, start = end - trunk_tokens, len(self.rows)

        def in_trunk(position: int) -> int:
            return -1 - (start + position - first) if position >= first else states.rows[position]

        for position in range(first, end):
            path = [in_trunk(p) for p in range(position - 1, position - self._count(position) - 1, -1)]
            fold = states.state if (position + 1) % self.kind.block == 0 else NULL_STATE
            row = states.rows.get(position, TRASH_SLOT)
            self._append(row, position, path, states.base(position, first), fold)
        numbers: dict[int | DraftedNode, int] = {}
        for node in nodes:
            position = node.position if isinstance(node, DraftedNode) else tree.position(node)
            path, at, block = [], _parent(tree, node), self.kind.whole(position)
            count, base = self._count(position), NULL_STATE
            while (held := tree.held(at)) is not None:
                above = position - 1 - len(path)
                if above < block and base == NULL_STATE:
                    base = held.state
                if len(path) >= count and (base != NULL_STATE or block == 0):
                    break
                path.append(-1 - numbers[at] if at in numbers else held.row)
                at = _parent(tree, at)
            else:
                last = position - 1 - len(path)  # the last position in the trunk
                path += [in_trunk(p) for p in range(last, position - count - 1, -1)]
                if base == NULL_STATE:
                    base = states.base(position)
            held = tree.held(node)
            assert held is not None
            numbers[node] = len(self.rows)
            self._append(held.row, position, path[:count], base, held.state)

    def _count(self, position: int) -> int:
        """How many ancestors a token reads: those in its block, and before the taps of its convolution."""
        return min(position, max(position % self.kind.block, self.kind.taps - 1))

    def _append(self, row: int, position: int, path: list[int], base: int, fold: int) -> None:
        self.rows.append(row)
        self.paths += path + [NULL_SLOT] * (self.kind.reach - len(path))
        self.lengths.append(position % self.kind.block)
        self.bases.append(base)
        self.folds.append(fold)

    def pad(self, tokens: int) -> None:
        """Add padding tokens: the first ones of their sequences, whose results are not kept."""
        self.rows += [TRASH_SLOT] * tokens
        self.paths += [NULL_SLOT] * tokens * self.kind.reach
        for column in (self.lengths, self.bases, self.folds):
            column += [0] * tokens

    def chain(self) -> None:
        """Find the chains of the tokens, padded with empty ones to the number of tokens."""
        parents = self.paths[:: self.kind.reach]
        chains, self.levels = chains_of(parents, self.lengths, self.bases, self.folds)
        self.chains = [number for chain in chains for number in chain]
        self.chains += [0, 0] * (len(parents) - len(chains))

    @property
    def numbers(self) -> list[int]:
        """All columns, in the order that `paths_of` expects."""
        return self.rows + self.lengths + self.bases + self.folds + self.paths + self.chains


def width_of(kind: DeltaKind, chained: bool) -> int:
    """How many of `PathColumns.numbers` there are for each token."""
    return 4 + kind.reach + 2 * chained


def paths_of(numbers: Tensor, tokens: int, kind: DeltaKind) -> DeltaPaths:
    """The paths of `tokens` tokens in `PathColumns.numbers`, int64."""
    rest = len(numbers) - tokens * (4 + kind.reach)
    *columns, paths, chains = numbers.split([*([tokens] * 4), tokens * kind.reach, rest])
    rows_T, lengths_T, bases_T, folds_T = columns
    chains_N2 = chains.view(-1, 2) if rest else None
    return DeltaPaths(rows_T, paths.view(tokens, kind.reach), lengths_T, bases_T, folds_T, chains_N2)


def _parent(tree: TokenTree, node: int | DraftedNode) -> int | DraftedNode:
    return node.parent if isinstance(node, DraftedNode) else tree.parent(node)

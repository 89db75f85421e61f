"""The paths of recurrent layers against a naive model: rows and states hold the tokens that they are of."""

import contextlib
import random

import pytest
import torch

from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.errors import KVMemoryError
from engine.step.paths import PathColumns, paths_of
from kernels.layout import BLOCK, NULL_SLOT, NULL_STATE, TRASH_SLOT, CacheKind, DeltaKind
from models.shape import ModelShape
from tests.invariants import check_recurrent, check_tree

KIND = DeltaKind(1, 1, 1, 1, taps=4)
SHAPE = ModelShape(2, 1, 1, 100, None, kept=(CacheKind(1, 1), KIND))


class Memory:
    """Runs passes as the operator is defined: reads and writes token by token."""

    def __init__(self, pool):
        self.pool, self.rows, self.states = pool, {}, {NULL_STATE: ()}

    def run(self, tree, trunk, nodes, drafts=()):
        columns = PathColumns(KIND)
        columns.add(tree, trunk, [*nodes, *drafts])
        paths = paths_of(torch.tensor(columns.numbers), len(columns.rows), KIND)
        first = tree.trunk.cached - trunk
        whole = [tuple(tree.trunk.tokens[: i + 1]) for i in range(first, first + trunk)]
        for node in [*nodes, *drafts]:
            tail = []
            while not isinstance(node, int):
                tail.append(node.token)
                node = node.parent
            whole.append((*tree.trunk.tokens[: tree.prompt_length], *tree.path(node), *tail[::-1]))
        read = (paths.rows_T, paths.lengths_T, paths.bases_T, paths.folds_T, paths.paths_TN)
        for t, (row, length, base, fold, path) in enumerate(zip(*(x.tolist() for x in read), strict=True)):
            position = len(whole[t]) - 1
            block = position // BLOCK * BLOCK
            assert length == position - block and self.states[base] == whole[t][:block]
            for i in range(min(position, max(length, KIND.taps - 1))):
                kept = whole[-1 - path[i]] if path[i] < 0 else self.rows[path[i]]
                assert path[i] >= -t and kept == whole[t][: position - i], (position, i)
            assert all(each == NULL_SLOT for each in path[max(length, KIND.taps - 1) :])
            if row != TRASH_SLOT:
                self.rows[row] = whole[t]
            assert (fold != NULL_STATE) == (position % BLOCK == BLOCK - 1)
            if fold != NULL_STATE:
                self.states[fold] = whole[t]

    def check(self, trees):
        for tree in trees:
            check_tree(tree)
        check_recurrent(self.pool, [tree.states_held for tree in trees])


def evaluate(memory, tree, nodes, budget=10**9):
    """Passes of so many tokens."""
    trunk, todo = tree.pending(nodes)
    while trunk or todo:
        now = min(trunk, budget)
        some = todo[: budget - now] if now == trunk else []
        tree.allocate(now, some)
        memory.run(tree, now, some)
        trunk, todo = trunk - now, todo[len(some) :]


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("seed", range(3))
def test_random_trees_read_what_they_are_made_of(seed, page):
    rng = random.Random(seed)
    pool = PagePool(SHAPE, 6000 // page, page, rows=3000, states=200)
    memory, trees = Memory(pool), [TokenTree(pool, list(range(n))) for n in (1, 32, 95)]
    for _ in range(9):
        for tree in trees:
            live = [node for node in range(len(tree._slot)) if tree.is_live(node)]
            grown = [tree.root]
            for _ in range(rng.randint(1, 4)):
                grown += tree.grow_path(rng.choice(live), [rng.randrange(9) for _ in range(rng.choice([1, 3, 20, 40]))])
            asked = [node for node in grown if not tree.is_evaluated(node)]
            with contextlib.suppress(KVMemoryError):
                evaluate(memory, tree, asked, rng.choice([3, 40, 999]))
            memory.check(trees)
            if rng.random() < 0.3:  # a pass that failed, or never ran
                trunk, todo = tree.pending(tree.grow_path(rng.choice([n for n in live if tree.is_live(n)]), [1, 2]))
                tree.allocate(trunk, todo)
                tree.release_slots(trunk, todo)
            if rng.random() < 0.3 and tree.is_evaluated(tree.root):
                node, drafted = tree.root, []
                for _ in range(35):
                    node, new = tree.draft(node, 50 + rng.randrange(2)) if rng.random() < 0.9 else (node, False)
                    drafted += [node] if new else []
                tree.allocate(0, [])
                memory.run(tree, 0, [], drafted)
                if rng.random() < 0.5:
                    tree.grow_path(tree.root, [50, 50, 51])
                else:
                    tree.drop_drafts()
            if rng.random() < 0.7:
                some = [node for node in grown if tree.is_live(node)]
                tree.keep(rng.sample(some, min(len(some), rng.choice([1, 1, 2, 5]))))
            memory.check(trees)
    for i, tree in enumerate(trees):
        trunk = tree.retire()
        cut = rng.choice([len(trunk.tokens), len(trunk.tokens) - 1, len(trunk.tokens) // 2])
        trees[i] = TokenTree(pool, [*trunk.tokens[:cut], 7, 8], trunk=trunk)
        evaluate(memory, trees[i], [trees[i].root])
    memory.check(trees)
    for tree in trees:
        tree.release()
    memory.check([])
    assert pool.used_pages == 0


def test_a_prompt_keeps_a_state_and_the_rows_that_later_tokens_read():
    pool = PagePool(SHAPE, 500, 1, rows=100, states=3)
    memory, tree = Memory(pool), TokenTree(pool, list(range(300)))
    evaluate(memory, tree, [tree.root], budget=100)
    rows, states = tree.states_held
    assert len(rows) <= BLOCK + KIND.taps + 15 and len(states) == 2  # some of them until the next pass
    evaluate(memory, tree, tree.grow([tree.root] * 5, range(5)))
    rows, states = tree.states_held
    assert len(rows) == 300 - 288 + KIND.taps - 1 + 5 and len(states) == 1


def test_beams_share_the_states_of_what_they_share():
    pool = PagePool(SHAPE, 900, 1, rows=900, states=30)
    memory, tree = Memory(pool), TokenTree(pool, [1])
    stem = tree.grow_path(tree.root, [2] * 70)
    beams = tree.grow([stem[-1]] * 15, range(15))
    evaluate(memory, tree, [tree.root, *beams, *stem])
    assert len(tree.states_held[1]) == 2
    tree.keep(beams)
    assert len(tree.states_held[1]) == 1 and tree.trunk.states is not None and tree.trunk.states.folded == 64
    memory.check([tree])

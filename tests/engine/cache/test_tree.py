"""TokenTree and PagePool by themselves: invariants after every operation, contents against a naive model."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache.pool import PagePool
from engine.cache.slots import Trunk
from engine.cache.tree import TokenTree
from engine.errors import KVMemoryError
from models.shape import ModelShape
from tests.invariants import check_pool, check_tree

SHAPE = ModelShape(layers=1, kv_heads=1, head_dim=1, vocab_size=100, max_positions=None)


def pool_of(pages, page_size=4):
    pool = PagePool(SHAPE, pages, page_size)
    for cache in (pool.cache.k_LGSD, pool.cache.v_LGSD):
        cache[:, :, page_size:] = float("nan")
    return pool


def check(pool, *trees, extra=()):
    for tree in trees:
        check_tree(tree)
    check_pool(pool, [page for tree in trees for page in tree.pages_held] + list(extra))


def evaluate(tree, nodes):
    """Do what a pass does: take slots, and write keys that are hashes of the whole path."""
    trunk, todo = tree.pending(nodes)
    slots = tree.allocate(trunk, todo)
    first = tree.trunk.cached - trunk
    for i, slot in enumerate(slots):
        path = tree.trunk.tokens[: first + i + 1] if i < trunk else whole_path(tree, todo[i - trunk])
        tree.pool.cache.k_LGSD[0, 0, slot] = fingerprint(path)
        tree.pool.cache.v_LGSD[0, 0, slot] = len(path) - 1
    return slots


def whole_path(tree, node):
    return tree.trunk.tokens[: tree.prompt_length] + tree.path(node)


def fingerprint(path):
    value = 7
    for token in path:
        value = (value * 31 + token + 1) % 8191  # exact in float32
    return float(value)


def visible(tree, node):
    """Fingerprints of the tokens that a node sees through table, runs and bits, by position."""
    k, v = (x[0, 0, :, 0].tolist() for x in (tree.pool.cache.k_LGSD, tree.pool.cache.v_LGSD))
    slots = [slot + i for slot, n in tree.trunk_runs() for i in range(n)]
    positions = list(range(len(slots)))
    table, places = tree.slots.table
    own = [s for s in range(len(table)) if tree.ancestry(node) >> s & 1]
    assert tree.ancestry(node) >> len(table) == 0
    slots += [table[s] for s in own]
    positions += [places[s] for s in own]
    assert sorted(positions) == list(range(tree.position(node) + 1))
    assert [v[s] for s in slots] == positions
    seen = {p: k[s] for p, s in zip(positions, slots, strict=True)}
    return [seen[p] for p in sorted(seen)]


def expected(tree, node):
    path = whole_path(tree, node)
    return [fingerprint(path[: i + 1]) for i in range(len(path))]


SEEDS = st.integers(0, 2**32 - 1)


class Forest(RuleBasedStateMachine):
    """Any number of trees over one small pool, and what a dictionary of paths says about them."""

    @initialize(pages=st.integers(6, 40), page_size=st.integers(1, 6), seed=SEEDS)
    def begin(self, pages, page_size, seed):
        self.pool = pool_of(pages if page_size > 1 else 4 * pages, page_size)
        self.trees: list[TokenTree] = []
        self.live: list[dict[tuple[int, ...], int]] = []  # per tree: path from the prompt's end -> node
        self.trunks: list[Trunk] = []
        self.open(seed)
        self.grow(seed)

    def some(self, seed):
        """A random tree and the source of all further choices."""
        rng = random.Random(seed)
        i = rng.randrange(len(self.trees))
        return rng, i, self.trees[i], self.live[i]

    @precondition(lambda self: len(self.trees) < 3)
    @rule(seed=SEEDS)
    def open(self, seed):
        rng = random.Random(seed)
        length, salt = rng.randint(1, 20), rng.randint(0, 2)
        prompt = [(i * i + (salt if i > 6 else 0)) % 5 for i in range(length)]
        trunk = self.trunks.pop() if self.trunks else None
        shared, cached = 0, trunk.cached if trunk else 0
        while trunk and shared < min(cached, length - 1) and trunk.tokens[shared] == prompt[shared]:
            shared += 1
        tree = TokenTree(self.pool, prompt, expected=rng.choice([0, 60]), trunk=trunk)
        assert tree.reused == shared and (trunk is None or not trunk.pages)
        self.trees.append(tree)
        self.live.append({(): tree.root})

    @rule(seed=SEEDS)
    def grow(self, seed):
        rng, _, tree, live = self.some(seed)
        for _ in range(rng.randint(1, 3)):
            paths = [rng.choice(list(live)) for _ in range(rng.randint(1, 4))]
            tokens = [rng.randrange(3) for _ in paths]
            nodes = tree.grow([live[p] for p in paths], tokens)
            for path, token, node in zip(paths, tokens, nodes, strict=True):
                child = (*path, token)
                assert live.setdefault(child, node) == node and tree.path(node) == list(child)
                assert tree.token(node) == token and tree.position(node) == tree.prompt_length + len(child) - 1

    @rule(seed=SEEDS)
    def evaluate(self, seed):
        rng, _, tree, live = self.some(seed)
        nodes = [live[rng.choice(list(live))] for _ in range(rng.randint(1, 6))]
        before = (tree.trunk.cached, tree.live_branches, sorted(tree.pages_held))
        try:
            evaluate(tree, nodes)
        except KVMemoryError:
            assert before == (tree.trunk.cached, tree.live_branches, sorted(tree.pages_held))
        else:
            assert all(tree.is_evaluated(n) for n in nodes)

    @rule(seed=SEEDS)
    def place_and_undo(self, seed):
        """A pass in which the model fails."""
        rng, _, tree, live = self.some(seed)
        before = (tree.trunk.cached, tree.live_branches, sorted(tree.pages_held))
        trunk, todo = tree.pending([live[rng.choice(list(live))]])
        some = rng.randint(0, trunk)
        nodes = todo[: rng.randint(0, len(todo))] if some == trunk else []
        try:
            tree.allocate(some, nodes)
        except KVMemoryError:
            return
        tree.release_slots(some, nodes)
        assert tree.pending([])[0] == trunk and not any(tree.is_evaluated(n) for n in nodes)
        assert before == (tree.trunk.cached, tree.live_branches, sorted(tree.pages_held))

    @rule(seed=SEEDS)
    def keep(self, seed):
        rng, i, tree, live = self.some(seed)
        if rng.random() < 0.6:  # all leaves below a node: the stem that they share is promoted
            stem = rng.choice(list(live))
            inner = {p[:-1] for p in live if p}
            paths = [p for p in live if p[: len(stem)] == stem and p not in inner]
        else:
            paths = [rng.choice(list(live)) for _ in range(rng.randint(1, 8))]
        evaluated = {p: tree.is_evaluated(n) for p, n in live.items()}
        tree.keep([live[p] for p in paths])
        stays = {p for p in live if any(q[: len(p)] == p for q in paths)}
        root = tuple(tree.path(tree.root))
        for path, node in live.items():
            assert tree.is_live(node) == (path in stays and len(path) >= len(root)), path
        stem = paths[0]
        for q in paths:
            while q[: len(stem)] != stem:
                stem = stem[:-1]
        assert stem[: len(root)] == root
        if root != stem:  # only for want of memory
            assert self.pool.free_pages < 1 + len(stem)
        self.live[i] = {p: live[p] for p in live if p in stays and len(p) >= len(root)}
        assert {p: tree.is_evaluated(n) for p, n in self.live[i].items()} == {p: evaluated[p] for p in self.live[i]}
        assert tree.settled_from(0) == list(root) and tree.settled_from(len(root)) == []

    @rule(seed=SEEDS)
    def descend(self, seed):
        rng, _, tree, live = self.some(seed)
        path = rng.choice(list(live))
        assert tree.descend(path) == tree.descend([*path, 99]) == live[path]
        assert tree.descend([9, *path[1:]]) == tree.root

    @precondition(lambda self: len(self.trees) > 1)
    @rule(seed=SEEDS, retire=st.booleans())
    def end(self, seed, retire):
        _, i, tree, _ = self.some(seed)
        if retire:
            trunk = tree.retire()
            assert len(trunk.tokens) == trunk.cached
            if trunk.pages:
                self.trunks.append(trunk)
        tree.release()
        tree.release()
        del self.trees[i], self.live[i]

    @precondition(lambda self: len(self.trunks) > 1)
    @rule()
    def forget(self):
        self.trunks.pop(0).release(self.pool)

    @invariant()
    def books_add_up(self):
        if not hasattr(self, "pool"):
            return
        check(self.pool, *self.trees, extra=[page for trunk in self.trunks for page in trunk.pages])
        for tree, live in zip(self.trees, self.live, strict=True):
            evaluated = [n for n in live.values() if tree.is_evaluated(n)]
            assert tree.live_branches == sum(n != tree.root for n in evaluated)
            for node in evaluated:
                assert visible(tree, node) == expected(tree, node)
            table, _ = tree.slots.table
            assert len(table) % self.pool.page_size == 0
            for start in range(0, len(table), self.pool.page_size):  # whole pages that nobody uses are given back
                if start + self.pool.page_size == len(table):
                    assert any(table[start:])

    def teardown(self):
        if hasattr(self, "pool"):
            for tree in self.trees:
                tree.release()
            for trunk in self.trunks:
                trunk.release(self.pool)
            check_pool(self.pool, [])


Forest.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestForest = Forest.TestCase


def test_a_node_that_was_dropped_cannot_be_used():
    tree = TokenTree(pool_of(8), [1])
    a, b = tree.grow([tree.root] * 2, [1, 2])
    evaluate(tree, [a, b])
    tree.keep([a])
    grow, keep, pending = (lambda: tree.grow([b], [1])), (lambda: tree.keep([a, b])), (lambda: tree.pending([b]))
    for use in (grow, keep, pending):
        with pytest.raises(ValueError, match=f"node {b} is not live"):
            use()
        check(tree.pool, tree)
    with pytest.raises(ValueError, match="at least one node"):
        tree.keep([])
    with pytest.raises(ValueError, match="at least one token"):
        TokenTree(tree.pool, [])
    check(tree.pool, tree)


def test_a_root_that_was_passed_cannot_be_used():
    tree = TokenTree(pool_of(8), [1])
    old = tree.root
    [a] = tree.grow([old], [3])
    evaluate(tree, [a])
    tree.keep([a])
    assert tree.root == a and not tree.is_live(old) and tree.is_evaluated(old)
    with pytest.raises(ValueError, match="not live"):
        tree.grow([old], [4])


def test_a_freed_slot_is_reused_at_once_and_nobody_sees_the_old_token():
    pool = pool_of(3)
    tree = TokenTree(pool, [1, 2, 3, 4])
    evaluate(tree, [tree.root])
    a, b = tree.grow([tree.root] * 2, [5, 6])
    evaluate(tree, [a, b])
    [c] = tree.grow([a], [7])
    tree.keep([c, a])  # keeps a inside: nothing is promoted past it
    children = tree.grow([a] * 5, range(10, 15))
    slots = evaluate(tree, [c, *children][:4])
    assert len(set(slots)) == 4 and pool.used_pages <= 3
    check(pool, tree)


def test_a_kept_inner_node_is_not_promoted_past():
    tree = TokenTree(pool_of(8), [1, 2])
    a, b, c = tree.grow_path(tree.root, [3, 4, 5])
    evaluate(tree, [c])
    tree.keep([b, c])
    assert tree.root == b and tree.settled_from(0) == [3, 4] and tree.is_live(c) and not tree.is_live(a)
    check(tree.pool, tree)


def test_promotion_of_a_stem_of_which_only_the_beginning_is_evaluated():
    tree = TokenTree(pool_of(8), [1, 2])
    chain = tree.grow_path(tree.root, [3, 4, 5, 6])
    evaluate(tree, [chain[1]])
    tree.keep([chain[3]])
    assert tree.root == chain[3] and tree.trunk.cached == 4 and tree.pending([tree.root]) == (2, [])
    assert tree.is_evaluated(chain[1]) and not tree.is_evaluated(chain[2])
    check(tree.pool, tree)
    evaluate(tree, [tree.root])
    assert visible(tree, tree.root) == expected(tree, tree.root) and tree.live_branches == 0


def test_promotion_without_memory_leaves_the_stem_where_it_is():
    pool = pool_of(2)  # one page for a prompt that fills it, one for the branches
    tree = TokenTree(pool, [1, 2, 3, 4])
    chain = tree.grow_path(tree.root, [5, 6])
    leaves = tree.grow([chain[1]] * 2, [7, 8])
    evaluate(tree, leaves)
    assert pool.free_pages == 0
    root = tree.root
    tree.keep(leaves)
    assert tree.root == root and all(map(tree.is_live, chain)) and tree.is_evaluated(chain[1])
    assert all(visible(tree, leaf) == expected(tree, leaf) for leaf in leaves)
    check(pool, tree)
    tree.keep(leaves[1:])  # one path alone finds room in what the others leave
    assert tree.root == leaves[1] and tree.live_branches == 0
    assert visible(tree, tree.root) == expected(tree, tree.root)
    check(pool, tree)


@pytest.mark.parametrize("kept", [1, 2])
def test_with_pages_of_one_token_a_branch_waits_where_the_trunk_will_want_it(kept, monkeypatch):
    pool = pool_of(40, page_size=1)
    tree = TokenTree(pool, [1, 2, 3], expected=20)
    first, second = (tree.grow_path(tree.root, [token, 5, 6, 7]) for token in (8, 9))
    forks = tree.grow([first[-1]] * 2, [1, 2])
    slots = evaluate(tree, [*first, *second, *forks])[3:]
    assert slots[:4] == list(range(tree.trunk.pages[-1] + 1, tree.trunk.pages[-1] + 5))
    monkeypatch.setattr(pool, "copy", lambda *_: pytest.fail("nothing needs to be copied"))
    tree.keep(forks[:kept])
    assert tree.trunk_runs() == [(tree.trunk.pages[0], tree.trunk.cached)] and tree.trunk.cached == 7 + (kept == 1)
    assert all(visible(tree, fork) == expected(tree, fork) for fork in forks[:kept])
    check(pool, tree)


def test_retiring_with_branches_and_an_unfinished_prompt():
    pool = pool_of(10)
    tree = TokenTree(pool, list(range(10)))
    tree.allocate(7, [])
    trunk = tree.retire()
    assert trunk.tokens == list(range(7)) and trunk.cached == 7
    check(pool, extra=trunk.pages)
    tree.release()
    check(pool, extra=trunk.pages)
    trunk.release(pool)
    trunk.release(pool)
    check(pool)

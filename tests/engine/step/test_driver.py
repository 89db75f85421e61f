"""Trees through the driver: every log-probability a search is told equals that of a fresh full-sequence forward.

Searches here are random walks that grow, keep and ask at will. The pool starts full of NaN and is checked after every
step.
"""

import functools
import itertools
import random
from dataclasses import dataclass, field

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine, Evaluate, KVMemoryError, NumericsError, Output, Report, SearchResult
from engine.cache.pool import PagePool
from engine.contract.checks import ContractError
from engine.load.loading import LoadedModel
from engine.load.pools import make_pools
from engine.step.driver import Driver
from engine.step.jobs import Job
from engine.step.runner import Runner
from tests.invariants import check_pool, check_tree
from tools.random_checkpoint import make

VOCAB = 48
POISON = 5  # its embedding is NaN in the poisoned checkpoint; walks leave it out
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}


class Exact(torch.Tensor):
    """Logits that stay in float64 where the engine asks for float32."""

    def float(self, *_):
        return self.as_subclass(torch.Tensor)


@dataclass
class Wide:
    """A model whose logits are `Exact`."""

    model: object

    @property
    def shape(self):
        return self.model.shape  # type: ignore[attr-defined]

    def forward(self, *args):
        return self.model.forward(*args)

    def logits(self, hidden_NE):
        return self.model.logits(hidden_NE).as_subclass(Exact)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make(folder, layers=2, width=32, mlp=40, heads=4, kv_heads=2, vocab=VOCAB, max_positions=512, seed=3)
    return folder


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return functools.cache(lambda dtype: Engine.load(checkpoint, dtype=dtype, kv_memory=1 << 20))


@dataclass
class Bench:
    """An engine in one dtype with a pool of chosen size, and its own oracle."""

    engine: Engine
    dtype: str
    vocab: int = VOCAB
    oracle: Engine = field(init=False)

    def __post_init__(self):
        model = Wide(self.engine.runner.model) if self.dtype == "float64" else self.engine.runner.model
        self.oracle = Engine(LoadedModel(Runner(model, self.engine.pool, self.vocab), self.engine.shape))
        self.known = {}

    def driver(self, pages=400, page_size=4, parallel=16, **options):
        shape, kind = self.engine.shape, getattr(torch, self.dtype)
        pool = PagePool(shape, pages, page_size, kind)
        for cache in itertools.chain(*pool.cache.groups):
            cache[:, :, 1:] = float("nan")  # all but the slot that is zero for ever
        return Driver({"target": Runner(self.oracle.runner.model, pool, self.vocab, **options)}, parallel)

    def expected(self, sequence):
        """Log-probabilities after a sequence; one fresh forward answers for its prefixes too."""
        if sequence not in self.known:
            logp_TV = self.oracle.logits(list(sequence)).log_softmax(-1)
            for i in range(len(sequence)):
                self.known.setdefault(sequence[: i + 1], logp_TV[i])
        return self.known[sequence]

    def check(self, records):
        for sequence, row in sorted(records, key=lambda r: -len(r[0])):
            torch.testing.assert_close(row, self.expected(sequence), rtol=0, atol=TOLERANCE[self.dtype])


@pytest.fixture(params=["float64", "float32"])
def bench(request, loaded):
    return Bench(loaded(request.param), request.param)


@pytest.fixture
def bench64(loaded):
    return Bench(loaded("float64"), "float64")


def random_tokens(rng, count):
    return [rng.choice([t for t in range(VOCAB) if t != POISON]) for _ in range(count)]


@dataclass
class Walk:
    """A search that wanders about its tree; notes each answer with the sequence that it is about."""

    seed: int
    prompt: list[int]
    steps: int = 8
    width: int = 6
    depth: int = 3
    prune: float = 0.6  # chance of a keep() after each step
    bold: bool = False  # drops nodes and asks again when memory runs out
    records: list = field(default_factory=list)
    refused: int = 0
    tree: object = None

    def start_on(self, driver, trunk=None):
        def start(run):
            self.records, self.refused = [], 0  # it may be preempted and start again
            self.tree = driver.open_tree(run, "target", self.prompt, len(self.prompt) + self.steps, trunk)
            return self.go(self.tree)

        return start

    def go(self, tree):
        rng = random.Random(self.seed)
        live = [tree.root]
        for _ in range(self.steps):
            check_tree(tree)
            unknown = [n for n in live if not tree.is_evaluated(n)]
            nodes = rng.sample(unknown, rng.randint(1, len(unknown)))
            try:
                logp_NV, _ = yield Evaluate(tree, nodes)
            except KVMemoryError:
                check_tree(tree)
                self.refused += 1
                if not self.bold:
                    raise
                keep = rng.choice(nodes)
                tree.keep([keep])
                live = [n for n in live if tree.is_live(n)]
                if not tree.is_evaluated(keep):
                    yield from self.ask_alone(tree, keep)
                nodes, logp_NV = [], ()
            check_tree(tree)
            self.note(tree, nodes, logp_NV)
            live = self.grow(tree, rng, live)
            if rng.random() < self.prune:
                live = self.keep(tree, rng, live)
            if not any(not tree.is_evaluated(n) for n in live):
                live += tree.grow([rng.choice(live)], random_tokens(rng, 1))
            yield Report(info={"live": len(live)})
        return SearchResult([Output(tree.path(max(live)), None, None, "length")])

    def ask_alone(self, tree, node):
        logp_NV, _ = yield Evaluate(tree, [node])
        self.note(tree, [node], logp_NV)

    def note(self, tree, nodes, logp_NV):
        for node, row in zip(nodes, logp_NV, strict=True):
            self.records.append(((*self.prompt, *tree.path(node)), row.clone()))

    def grow(self, tree, rng, live):
        """Up to `depth` levels at once: drafts of which the middle was never asked."""
        frontier, grown = list(live), []
        for _ in range(rng.randint(1, self.depth)):
            parents = [rng.choice(frontier) for _ in range(rng.randint(1, self.width))]
            frontier = tree.grow(parents, random_tokens(rng, len(parents)))
            grown += frontier
        return list(dict.fromkeys([*live, *grown]))

    def keep(self, tree, rng, live):
        if rng.random() < 0.5:  # everything below some node: its stem is promoted
            stem = tree.path(rng.choice(live))
            kept = [n for n in live if tree.path(n)[: len(stem)] == stem]
        else:
            kept = rng.sample(live, rng.randint(1, min(4, len(live))))
        tree.keep(kept)
        return [n for n in live if tree.is_live(n)]


def finish(driver, walks, on_step=None):
    """Run walks to their end; the pool is checked after every step and empty at last."""
    pool = driver.runners["target"].pool
    runs = [driver.submit(Job(walk.start_on(driver))) for walk in walks]
    while driver.busy:
        driver.step()
        for run in driver.running:
            for tree in run.trees:
                check_tree(tree)
        check_pool(pool, [p for run in driver.running for tree in run.trees for p in tree.pages_held])
        if on_step:
            on_step(driver)
    check_pool(pool, [])
    return runs


def drive(driver, prompt, steps):
    """Run a search alone to its end, by a generator function of its tree."""
    run = driver.submit(Job(lambda run: steps(driver.open_tree(run, "target", prompt))))
    while driver.busy:
        driver.step()
    raise_errors([run])


def raise_errors(runs):
    for run in runs:
        if run.error:
            raise run.error


def walks_of(seed, count, **options):
    rng = random.Random(seed)
    return [Walk(seed * 100 + i, random_tokens(rng, rng.choice([1, 3, 4, 5, 16, 40])), **options) for i in range(count)]


@pytest.mark.parametrize("seed", range(6))
def test_one_tree(bench, seed):
    [walk] = walks_of(seed, 1, steps=12)
    raise_errors(finish(bench.driver(), [walk]))
    assert len(walk.records) >= 12
    bench.check(walk.records)


@pytest.mark.parametrize("seed", range(3))
def test_several_trees_in_one_pass(bench, seed):
    walks = walks_of(50 + seed, 5)
    together = []
    driver = bench.driver(page_size=[2, 4, 16][seed])
    runs = finish(driver, walks, lambda d: together.append(len(d.running)))
    raise_errors(runs)
    assert max(together) == 5
    for walk in walks:
        bench.check(walk.records)


@pytest.mark.parametrize("budget", [1, 2, 7, 13])
def test_chunks(bench64, budget):
    walks = walks_of(70 + budget, 4, steps=5, width=8)
    raise_errors(finish(bench64.driver(budget=budget), walks))
    for walk in walks:
        bench64.check(walk.records)


@pytest.mark.parametrize("seed", range(3))
def test_padding(bench, seed):
    """Tokens and words padded to buckets, the slots that padding touches filled with NaN from the start."""
    walks = walks_of(90 + seed, 3, width=10)
    driver = bench.driver(token_buckets=(8, 24, 64, 256), word_buckets=(1, 3, 9))
    raise_errors(finish(driver, walks))
    for walk in walks:
        bench.check(walk.records)


def test_wide_trees(bench64):
    """Hundreds of branches: many words of ancestry."""
    walks = walks_of(7, 2, steps=6, width=70, prune=0.3)
    raise_errors(finish(bench64.driver(pages=600), walks))
    assert max(len(walk.records) for walk in walks) > 100
    for walk in walks:
        bench64.check(walk.records)


@pytest.mark.parametrize(("pages", "budget"), [(20, 256), (15, 9), (24, 40)])
def test_sent_back_when_the_pool_is_full_and_to_the_same_result(bench64, pages, budget):
    def walks():
        return [Walk(i, random_tokens(random.Random(i), 12), steps=6, width=4, prune=0.4) for i in range(5)]

    alone, crowd, returned = walks(), walks(), []
    for walk in alone:
        raise_errors(finish(bench64.driver(pages=pages), [walk]))
    driver = bench64.driver(pages=pages, budget=budget)
    runs = finish(driver, crowd, lambda d: returned.append(any(job.gave_way for job in d.waiting)))
    raise_errors(runs)
    assert any(returned), "nobody was sent back: the pool is too large for this test"
    for one, other, run in zip(alone, crowd, runs, strict=True):
        assert [s for s, _ in one.records] == [s for s, _ in other.records] and other.refused == 0
        for (_, a), (_, b) in zip(one.records, other.records, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
        bench64.check(other.records)
        assert run.result.stats["prefill_seconds"] >= 0 and run.result.stats["decode_seconds"] >= 0


@pytest.mark.parametrize("seed", range(4))
def test_a_lone_search_may_drop_nodes_and_ask_again(bench64, seed):
    walk = Walk(seed, random_tokens(random.Random(seed), 9), steps=10, width=12, prune=0.4, bold=True)
    raise_errors(finish(bench64.driver(pages=7), [walk]))
    assert walk.refused
    bench64.check(walk.records)


def test_a_request_of_several_passes_that_fails_is_undone_whole(bench64):
    """Two passes went well, the third finds the pool full: the search may ask again for any of the nodes."""
    told, prompt = [], [1, 2, 3, 4]

    def steps(tree):
        nodes = tree.grow([tree.root] * 20, range(10, 30))
        try:
            yield Evaluate(tree, [tree.root, *nodes])
        except KVMemoryError:
            tree.keep(nodes[:2])
        check_tree(tree)
        logp_NV, _ = yield Evaluate(tree, [tree.root, *nodes[:2]])
        told.extend(zip([tuple(prompt), (*prompt, 10), (*prompt, 11)], logp_NV, strict=True))
        return SearchResult([Output([], None, None, "length")])

    drive(bench64.driver(pages=4, budget=6), prompt, steps)
    bench64.check(told)


def test_a_lone_search_that_does_not_catch_fails_and_the_pool_is_whole(bench64):
    walk = Walk(1, random_tokens(random.Random(1), 9), steps=10, width=20)
    [run] = finish(bench64.driver(pages=5), [walk])
    assert isinstance(run.error, KVMemoryError) and run.result is None and walk.refused == 1


def test_a_prompt_that_does_not_fit(bench64):
    walk = Walk(1, random_tokens(random.Random(1), 30))
    small = Walk(2, [3, 4], steps=2, width=2, depth=1)
    runs = finish(bench64.driver(pages=6, budget=7), [walk, small])
    assert isinstance(runs[0].error, KVMemoryError)
    assert runs[1].error is None
    bench64.check(small.records)


@pytest.mark.parametrize("after", [1, 2, 4])
def test_closing_midway_leaves_the_pool_whole(bench64, after):
    driver = bench64.driver(budget=20)
    runs = [driver.submit(Job(walk.start_on(driver))) for walk in walks_of(3, 4)]
    for _ in range(after):
        driver.step()
    pool = driver.runners["target"].pool
    assert pool.used_pages
    driver.close()
    check_pool(pool, [])
    assert not driver.busy and all(run.result is None for run in runs)
    raise_errors(finish(driver, walks := walks_of(4, 2)))  # and it can be used again
    for walk in walks:
        bench64.check(walk.records)


@pytest.mark.parametrize("seed", range(4))
def test_a_trunk_handed_on_is_as_good_as_a_fresh_one(bench64, seed):
    rng = random.Random(seed)
    driver = bench64.driver(page_size=[2, 4, 5, 16][seed], budget=[256, 6, 256, 3][seed])
    pool = driver.runners["target"].pool
    trunk, prompt, reused = None, random_tokens(rng, 9), 0
    for turn in range(5):
        walk = Walk(seed * 10 + turn, prompt, steps=5)
        handed = []
        run = driver.submit(Job(walk.start_on(driver, trunk), retire=handed.append))
        while driver.busy:
            driver.step()
            held = [p for r in driver.running for t in r.trees for p in t.pages_held]
            check_pool(pool, held + [p for h in handed for p in h.pages])
        raise_errors([run])
        bench64.check(walk.records)
        reused += run.result.stats["reused_tokens"]
        [trunk] = handed
        assert trunk.tokens[: len(prompt)] == prompt and len(trunk.tokens) == trunk.cached
        answer = run.result.outputs[0].token_ids
        prompt = prompt + answer + random_tokens(rng, 5) if turn != 2 else [*prompt[:6], 7, 7, 7]
    assert reused > 20
    trunk.release(pool)
    check_pool(pool, [])


@pytest.mark.parametrize("ask", ["the root again", "nothing"])
def test_a_search_that_asks_wrongly_fails_alone(bench64, ask):
    def start(run):
        tree = driver.open_tree(run, "target", [1, 2, 3])

        def go():
            yield Evaluate(tree, [tree.root])
            yield Evaluate(tree, [tree.root] if ask == "the root again" else [])

        return go()

    driver, other = bench64.driver(), Walk(1, [1, 2, 3])
    run, beside = driver.submit(Job(start)), driver.submit(Job(other.start_on(driver)))
    while driver.busy:
        driver.step()
    assert isinstance(run.error, ContractError) and "node" in str(run.error)
    raise_errors([beside])
    check_pool(driver.runners["target"].pool, [])


def test_rows_come_in_the_order_asked_duplicates_included(bench64):
    seen = []

    def steps(tree):
        nodes = tree.grow_path(tree.root, [9, 8, 7])
        logp_NV, _ = yield Evaluate(tree, [nodes[2], tree.root, nodes[0], nodes[2]])
        seen.extend(zip([(1, 2, 3, 9, 8, 7), (1, 2, 3), (1, 2, 3, 9), (1, 2, 3, 9, 8, 7)], logp_NV, strict=True))
        return SearchResult([Output([], None, None, "length")])

    for budget in (256, 2):
        seen.clear()
        drive(bench64.driver(budget=budget), [1, 2, 3], steps)
        bench64.check(seen)


def test_a_padded_vocabulary_is_never_a_token(loaded):
    engine = loaded("float32")
    runner = Runner(engine.runner.model, engine.pool, VOCAB - 7)
    walk = Walk(1, [1, 2, 3], steps=2)
    raise_errors(finish(Driver({"target": runner}), [walk]))
    for sequence, row in walk.records:
        assert row[VOCAB - 7 :].eq(float("-inf")).all()
        expected = engine.logits(list(sequence))[-1].log_softmax(-1)[: VOCAB - 7]
        torch.testing.assert_close(row[: VOCAB - 7], expected, rtol=0, atol=1e-4)


# --- numerics ---


@pytest.fixture(scope="module")
def poisoned(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("poisoned")
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    return Engine.load(folder, dtype="float32", kv_memory=1 << 18)


@pytest.mark.parametrize("budget", [256, 3])
def test_nan_ends_one_search_and_touches_no_other(poisoned, loaded, budget):
    bench = Bench(loaded("float32"), "float32")
    memory = 40 * 16 * poisoned.pool.bytes_per_token
    [pool] = make_pools([(poisoned.shape, torch.float32)], torch.device("cpu"), memory)
    driver = Driver({"target": Runner(poisoned.runner.model, pool, VOCAB, budget=budget)}, parallel=3)
    walks = walks_of(11, 6, steps=4)
    for i in (0, 3):
        walks[i].prompt = [*walks[i].prompt[:4], POISON, 9, 8]
    runs = finish(driver, walks)
    for i, (walk, run) in enumerate(zip(walks, runs, strict=True)):
        if i in (0, 3):
            assert isinstance(run.error, NumericsError) and run.error.exit_code == 5 and not walk.records
            assert "NaN" in str(run.error) and run.result is None
        else:
            raise_errors([run])
            bench.check(walk.records)


def test_a_search_may_catch_nan_and_drop_the_node(poisoned):
    told = []

    def steps(tree):
        yield Evaluate(tree, [tree.root])
        bad, good = tree.grow([tree.root] * 2, [POISON, 7])
        try:
            yield Evaluate(tree, [bad])
        except NumericsError:
            tree.keep([good])
            check_tree(tree)
        more = tree.grow([good, good], [8, 9])  # one of them takes the slot that holds NaN
        told.append((yield Evaluate(tree, more)).rows_NV)
        return SearchResult([Output([], None, None, "length")])

    drive(Driver({"target": poisoned.runner}), [1, 2, 3], steps)
    expected = [poisoned.logits([1, 2, 3, 7, t])[-1].log_softmax(-1) for t in (8, 9)]
    torch.testing.assert_close(told[0], torch.stack(expected), rtol=0, atol=1e-4)
    check_pool(poisoned.pool, [])

"""An answer in parts is the answer of all rows at once, whichever passes brought them."""

import random
from pathlib import Path

import pytest
import torch

from engine import Choices, Engine
from engine.cache.tree import TokenTree
from engine.contract import Evaluate
from engine.contract.top_sums import TopSums
from engine.step.partial import PartialRows, PartialSums, known_rows, partial_answer
from kernels.rows import top_sums
from search import Trie
from tests.engine.cache.test_tree import pool_of

MODEL = Path(__file__).parents[2] / "golden/llama/plain"
EOS = 2


@pytest.fixture(scope="module")
def engine():
    return Engine.load(MODEL, dtype="float32", kv_memory="8M", threads=1)


def random_answer(seed, wanted):
    """A request, and its answers from all rows at once and from parts: two passes, and rows that are known."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tree = TokenTree(pool_of(9), [1])
    nodes = tree.grow([tree.root] * 6, range(6))
    rows_NV = torch.randn(6, 30, generator=generator).log_softmax(1)
    known = {nodes[i]: (rng.randrange(30), -0.5) for i in rng.sample(range(6), 2)}
    rows_NV[[nodes.index(node) for node in known]] = known_rows(known, 30, torch.device("cpu"))
    request = Evaluate(tree, nodes, top_sums=TopSums([rng.random() for _ in nodes], 8) if wanted else None)
    answer = partial_answer(request, 30)
    assert isinstance(answer, PartialSums if wanted else PartialRows)
    answer.add_known(known, torch.device("cpu"))
    rest = [node for node in nodes if node not in known]
    for part in (rest[:1], rest[1:]):
        part_NV = rows_NV[[nodes.index(node) for node in part]]
        if (asked := answer.wants(part)) is not None:
            answer.take(part, part_NV, top_sums(part_NV, *asked))
        answer.add(part, part_NV)
    return request.answer(rows_NV), answer.answer()


@pytest.mark.parametrize("wanted", [False, True], ids=["rows", "top sums"])
@pytest.mark.parametrize("seed", range(8))
def test_parts_give_what_the_rows_give(seed, wanted):
    whole, parts = random_answer(seed, wanted)
    assert whole.rows_NV.equal(parts.rows_NV)
    assert whole.numbers is parts.numbers is None or whole.numbers.equal(parts.numbers)


def test_sums_of_nodes_out_of_order_come_from_rows():
    """Parts are merged by the order of nodes."""
    tree = TokenTree(pool_of(4), [1])
    a, b = tree.grow([tree.root] * 2, [3, 4])
    assert isinstance(partial_answer(Evaluate(tree, [b, a], top_sums=TopSums([0.0, 0.0], 1)), 9), PartialRows)


@pytest.mark.parametrize(
    "options", [{}, {"constraint_scores": "model"}, {"constraint_scores": "renormalised"}], ids=str
)
def test_a_step_of_several_passes_finds_the_same(engine, options, monkeypatch):
    rng = random.Random(6)
    if options:
        items = [[rng.randrange(10, 50) for _ in range(rng.randint(1, 4))] for _ in range(300)]
        options = options | {"constraint": Choices(items, [EOS])}
    found = []
    for budget in (256, 7):
        monkeypatch.setattr(engine.runner, "budget", budget)
        search = Trie(beams=20, num_return_sequences=20)
        [result] = engine.generate([[5, 6, 7]], search, eos_token_ids=[EOS], max_new_tokens=5, **options)
        found.append([(output.token_ids, round(output.score, 4)) for output in result.outputs])
    assert found[0] == found[1] and len(found[0]) == 20

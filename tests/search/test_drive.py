"""`drive` runs a correct search, says what it did, and notices what breaks the contract."""

from dataclasses import dataclass

import pytest
import torch

from engine.errors import KVMemoryError
from search import Evaluate, Output, Report, Search, SearchResult
from tests.search.drive import drive


@dataclass(frozen=True)
class Twofold(Search):
    """Evaluates the root, then two children; with a fault, it does something else as well."""

    fault: str = ""

    def run(self, task):
        tree, best = task.tree, [0] if self.fault == "settled" else [1]
        yield Evaluate(tree, [tree.root])
        if self.fault == "again":
            yield Evaluate(tree, [tree.root])
        yield Report(settled=[1], best=lambda: best)
        tokens = {"same": [1, 1], "token": [1, 7]}.get(self.fault, [1, 2])
        yield Evaluate(tree, tree.grow([tree.root] * 2, tokens))
        return SearchResult([] if self.fault == "nothing" else [Output(best, -1.0, -1.0, "length")])


def row(path):
    return torch.log_softmax(torch.tensor([0.0, 1.0, 2.0]), -1)


def test_what_a_search_did():
    run = drive(Twofold(), row)
    assert run.paths == [[()], [(1,), (2,)]] and run.evaluated == 3
    assert [(one.model, one.live, one.needed) for one in run.passes] == [("target", 3, 0), ("target", 5, 2)]
    assert run.settled == run.told[0].best == [1] and run.outputs == [[1]]
    assert drive(Twofold(), row, close_after=1).result is None
    with pytest.raises(KVMemoryError):
        drive(Twofold(), row, pages=4)


@pytest.mark.parametrize(
    ("fault", "said"),
    {
        "again": "nodes not evaluated yet",
        "settled": "not what was settled",
        "same": "a node is asked for twice",
        "token": "integers from 0 to 2, got 7",
        "nothing": "at least one Output",
    }.items(),
)
def test_what_breaks_the_contract(fault, said):
    with pytest.raises(AssertionError, match=said):
        drive(Twofold(fault), row)

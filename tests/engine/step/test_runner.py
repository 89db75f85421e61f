"""A runner's answers: rows in the order asked, whatever the budget; edits, reads and hidden rows."""

from pathlib import Path

import pytest
import torch

from engine import Engine
from engine.cache.tree import TokenTree
from engine.contract.top_sums import TopSums
from engine.rules.constrained import Edit
from engine.step.packing import Chunk
from engine.step.runner import Keep, PassWork
from kernels.rows import top_sums
from tests.invariants import check_pool

MODEL, PROMPT = Path(__file__).parents[2] / "golden/llama/plain", [5, 6, 7, 8]


@pytest.fixture(scope="module")
def runner():
    return Engine.load(MODEL, dtype="float32", kv_memory="1M", threads=1).runner


@pytest.fixture
def chunk(runner):
    tree = TokenTree(runner.pool, PROMPT)
    yield Chunk(tree, 4, [], tree.allocate(4, []))
    tree.release()
    check_pool(runner.pool, [])


def test_logits_do_not_depend_on_the_budget(runner, monkeypatch):
    whole_TV = runner.logits(PROMPT)
    monkeypatch.setattr(runner, "budget", 3)
    torch.testing.assert_close(runner.logits(PROMPT), whole_TV, rtol=0, atol=1e-4)


def test_rows_edits_reads_and_hidden_rows(runner, chunk):
    expected_TV = runner.logits(PROMPT).log_softmax(-1)
    kept = []
    edit = Edit(slice(1, 2), lambda rows_NV: rows_NV.fill_(-1.0), "log-probabilities")
    reads = [(slice(0, 1), lambda rows_NV, peaks_NB: rows_NV.sum(1).double()), (slice(1, 2), TopSums([0.5], 2))]
    keep = Keep(slice(2, 4), lambda hidden_TE: kept.append(hidden_TE.clone()))
    logp_NV, finite, numbers = runner.evaluate(PassWork([chunk], [3, 1], reads, [edit], [keep]))
    torch.testing.assert_close(logp_NV[0], expected_TV[3], rtol=0, atol=1e-4)
    assert logp_NV[1].eq(-1).all() and finite == [True, True] and kept[0].shape[0] == 2
    assert numbers[0].item() == pytest.approx(float(logp_NV[0].sum()), rel=1e-5)
    assert numbers[1].equal(top_sums(logp_NV[1:], [0.5], 2))


def test_a_pass_that_nobody_asks_of_has_no_rows(runner, chunk):
    logp_NV, finite, numbers = runner.evaluate(PassWork([chunk], []))
    assert logp_NV.numel() == 0 and finite == [] and numbers == []

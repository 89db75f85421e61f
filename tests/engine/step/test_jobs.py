"""The tokens that a request has left to evaluate, and its rows among those of a batch."""

import pytest

from engine.cache.tree import TokenTree
from engine.contract import Evaluate
from engine.contract.top_sums import TopSums
from engine.step.jobs import Batch, Job, Work
from engine.step.packing import Chunk
from engine.step.partial import Pending, partial_answer
from tests.engine.cache.test_tree import pool_of


def asking(request):
    """A job that waits for the answer to a request."""
    pending = Pending(request, request.tree.by_rope(request.nodes), partial_answer(request, 30))
    pending.begin()
    return Job(lambda job: iter(()), trees=[request.tree], pending=pending)


def share(batch, job, trunk_tokens, nodes):
    tree = job.pending.request.tree
    slots = tree.allocate(trunk_tokens, nodes)
    job.pending.allocated(trunk_tokens, nodes)
    batch.add(job, Chunk(tree, trunk_tokens, nodes, slots))


@pytest.fixture
def tree():
    return TokenTree(pool_of(40), [1, 2, 3])


def test_a_request_is_evaluated_over_several_passes(tree):
    a, b = tree.grow_path(tree.root, [4, 5])
    job, batch = asking(Evaluate(tree, [tree.root, b])), Batch("target", None, 0.0)
    pending = job.pending
    assert (pending.left, pending.trunk_left, pending.nodes_left) == (5, 3, [a, b])
    share(batch, job, 2, [])
    assert pending.left == 3 and not batch.asked and batch.shares[0].nodes == []
    share(batch, job, 1, [a])
    assert batch.asked == [2] and batch.shares[1].nodes == [tree.root]  # a is on the way only
    share(batch, job, 0, [b])
    assert batch.asked == [2, 4] and batch.shares[2].rows == slice(1, 2) and batch.tokens == 5 and not pending.left
    assert pending.trunk_allocated == 3 and pending.nodes_allocated == [a, b]


def test_reads_are_of_the_rows_that_they_want(tree):
    other = TokenTree(tree.pool, [9])
    plain = asking(Evaluate(tree, [tree.root], lambda rows, peaks: rows))
    sums = asking(Evaluate(other, [other.root], top_sums=TopSums([-1.0], 4)))
    batch = Batch("target", None, 0.0)
    share(batch, plain, 3, [])
    share(batch, sums, 1, [])
    assert [rows for rows, _ in batch.reads] == [slice(0, 1), slice(1, 2)]
    assert batch.reads[0][1] is plain.pending.request.read and batch.reads[1][1] == TopSums([-1.0], 4)
    assert batch.readers == batch.shares and batch.shares[0].top_sums is None
    assert batch.shares[1].top_sums == TopSums([-1.0], 4)


def test_work_adds_up():
    work = Work()
    work.add(5, 0.5)
    work.add(2, 0.25)
    assert (work.passes, work.tokens, work.seconds) == (2, 7, 0.75)

"""The inputs of a pass: tokens, positions and ancestry of many trees side by side, and padding that nobody sees."""

import pytest
import torch

from engine.cache.tree import TokenTree
from engine.step.packing import Chunk, Packer, bucket, pack
from kernels.layout import NULL_SLOT, TRASH_SLOT, WORD
from tests.engine.cache.test_tree import pool_of


@pytest.fixture
def chunks():
    """A prompt of three tokens with a fork below, and one node of a tree whose prompt is evaluated already."""
    pool = pool_of(40, 2)
    one, two = TokenTree(pool, [5, 6, 7]), TokenTree(pool, [9])
    two.allocate(1, [])
    a, b = one.grow([one.root] * 2, [1, 2])
    [c] = one.grow([a], [3])
    [d] = two.grow([two.root], [4])
    return [Chunk(one, 3, [a, b, c], one.allocate(3, [a, b, c])), Chunk(two, 0, [d], two.allocate(0, [d]))]


def test_trees_lie_side_by_side(chunks):
    packed = pack(chunks, 2)
    layout = packed.layout
    assert packed.tokens_T.tolist() == [5, 6, 7, 1, 2, 3, 4]
    assert layout.positions_T.tolist() == [0, 1, 2, 3, 3, 4, 1]
    assert packed.spans_T.tolist() == [3, 3, 3, 4, 4, 5, 2]  # the whole prompt, or the sequence up to the token
    assert layout.write_slots_T.tolist() == [slot for chunk in chunks for slot in chunk.slots]
    assert layout.token_starts.tolist() == [0, 6, 7] and layout.trunk_seen_T.tolist() == [1, 2, 3, 3, 3, 3, 1]
    assert layout.trunk_len_R.tolist() == [3, 1]
    assert layout.ancestry_TC.flatten().tolist() == [0, 0, 0, 0b001, 0b010, 0b101, 0b001]
    assert layout.branch_slots_RW[0, :3].tolist() == list(chunks[0].slots[3:])
    assert layout.branch_positions_RW[0, :3].tolist() == [3, 3, 4]
    for tree, runs in ((0, chunks[0].tree.trunk_runs()), (1, chunks[1].tree.trunk_runs())):
        assert [tuple(run[1:]) for run in layout.trunk_runs.tolist() if run[0] == tree] == runs


def test_padding_sees_nothing_and_writes_to_the_trash(chunks):
    packed = pack(chunks, 2, token_buckets=(4, 16), word_buckets=(2,), tree_buckets=(4,))
    layout = packed.layout
    assert len(packed.tokens_T) == 16 and layout.ancestry_TC.shape == (16, 2)
    assert layout.write_slots_T[7:].eq(TRASH_SLOT).all() and layout.ancestry_TC[7:].eq(0).all()
    assert layout.trunk_seen_T[7:].eq(0).all() and layout.token_starts.tolist() == [0, 6, 16, 16, 16]
    assert layout.branch_slots_RW.shape == (4, 2 * WORD) and layout.branch_slots_RW[2:].eq(NULL_SLOT).all()


def test_latest_ancestors(chunks):
    """For short convolutions: the slots of the tokens before each token, the latest first or from the branch."""
    found = pack(chunks, 2, ancestors=2).layout.ancestors_TN
    trunk, (a, _, _) = chunks[0].slots[:3], chunks[0].slots[3:]
    assert found[0].tolist() == [NULL_SLOT] * 2 and found[2].tolist() == [trunk[1], trunk[0]]
    assert found[3].tolist() == [trunk[2], trunk[1]] and found[5].tolist() == [a, trunk[2]]


def test_a_packer_fills_the_tensors_that_it_keeps(chunks):
    """A pass of the same sizes lies in the same memory, and every field of it is new."""
    packer, trees = Packer(2, ancestors=2, page_buckets=(4,), frames=1), [chunk.tree for chunk in chunks]
    last = [chunk.nodes[-1] for chunk in chunks]
    places = []
    for _ in range(3):
        last = [tree.grow([node], [8 + node])[0] for tree, node in zip(trees, last, strict=True)]
        pair = [Chunk(tree, 0, [n], tree.allocate(0, [n])) for tree, n in zip(trees, last, strict=True)]
        found, fresh = packer.pack(pair), pack(pair, 2, ancestors=2, page_buckets=(4,))
        places.append(found.layout.positions_T.data_ptr())
        assert found.tokens_T.equal(fresh.tokens_T) and found.spans_T.equal(fresh.spans_T)
        for name, x in vars(fresh.layout).items():
            assert not isinstance(x, torch.Tensor) or getattr(found.layout, name).equal(x), name
    assert len({*places}) == 1
    assert packer.pack(chunks).tokens_T.tolist() == [5, 6, 7, 1, 2, 3, 4]  # of other sizes: in other memory


def test_buckets():
    assert [bucket(n, (4, 16)) for n in (1, 4, 5, 17)] == [4, 4, 16, 17] and bucket(3, None) == 3

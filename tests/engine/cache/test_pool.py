"""PagePool by itself: claims are wishes, pages are exact, the reserved slots are nobody's."""

import pytest
import torch

from engine.cache.pool import PagePool
from engine.cache.states import Stores
from engine.errors import KVMemoryError
from kernels.layout import DeltaKind
from tests.engine.cache.test_tree import SHAPE, pool_of
from tests.invariants import check_pool


def test_a_claim_reserves_nothing():
    pool = pool_of(4)
    wish = pool.claim(4)
    assert pool.claim(1) == range(0) and pool.free_pages == 4
    taken = [pool.take() for _ in range(4)]
    with pytest.raises(KVMemoryError, match="all 4 pages of 4 tokens"):
        pool.take(1)
    pool.give(taken[0])
    pool.unclaim(wish)
    check_pool(pool, taken[1:])
    assert pool.take(taken[1]) == taken[0]  # a wish for a page in use gets another
    with pytest.raises(ValueError, match="pages >= 1"):
        PagePool(SHAPE, 0)


def test_a_page_given_back_inside_another_claim_can_be_claimed_again():
    pool = pool_of(6)
    first = pool.claim(3)
    pages = [pool.take(p) for p in first]
    for page in pages:
        pool.give(page)
    second = pool.claim(3)
    assert second == first
    pool.unclaim(first)
    assert pool.take(second.start) == second.start
    check_pool(pool, [second.start])


def test_null_and_trash_slots_are_never_given_out():
    pool = pool_of(3)
    assert 0 not in [pool.take() for _ in range(3)]
    assert pool.cache.k_LGSD[:, :, :4].eq(0).all() and torch.isnan(pool.cache.k_LGSD[:, :, 4:]).all()


@pytest.mark.parametrize("limit, flag", [(None, "--kv-memory"), (1 << 30, "--memory")])
def test_a_full_pool_names_the_flag_that_bounds_it(limit, flag):
    pool, stores = pool_of(1), Stores(DeltaKind(1, 1, 1, 1, taps=4), rows=1, states=1)
    pool.stores = stores
    pool.bound(limit)
    pool.take()
    stores.take(0)
    for take in (pool.take, lambda: stores.take(0)):
        with pytest.raises(KVMemoryError, match=f"give {flag} more, or"):
            take()

"""Slots of branches and pages of trunks: redundant state agrees, and every page comes back."""

import random

import pytest

from engine.cache.slots import BranchSlots, Trunk
from engine.cache.states import Stores
from engine.errors import KVMemoryError
from kernels.layout import BLOCK, DeltaKind
from tests.engine.cache.test_tree import pool_of
from tests.invariants import check_pool, check_slots


@pytest.mark.parametrize("page_size", [1, 3])
def test_slots_come_and_go(page_size):
    """Against a dictionary; what a full pool refuses changes nothing."""
    rng, pool = random.Random(page_size), pool_of(12, page_size)
    slots, held, reserved = BranchSlots(pool), {}, []
    for node in range(400):
        try:
            if rng.random() < 0.3:
                reserved += slots.reserve([node])
            else:
                [held[node]] = slots.take([node], [node + 7])
        except KVMemoryError:
            assert len(held) + len(reserved) == 12 * page_size
            gone = rng.sample(sorted(held), len(held) // 2)
            emptied, before = slots.pages_emptied([held[n] for n in gone]), pool.free_pages
            slots.release([held.pop(n) for n in gone])
            assert pool.free_pages == before + emptied
        if reserved and rng.random() < 0.3:
            slots.assign(reserved[0], node + 1000)
            held[node + 1000] = reserved.pop(0)
            slots.give_up(reserved)
            reserved = []
        check_slots(slots)
        check_pool(pool, slots.pages_held)
        assert {n: s for s, n in enumerate(slots.owner) if n >= 0} == held and slots.count == len(held)
        assert len({slots.table[0][s] for s in held.values()}) == len(held)
    slots.release_all()
    check_pool(pool, [])


@pytest.mark.parametrize(("rows", "states"), [(None, None), (30, 9), (7, 9), (30, 1)])
@pytest.mark.parametrize("reserve", [False, True])
def test_many_slots_are_taken_or_none(rows, states, reserve):
    """Whether the pages, the rows or the states of recurrent layers are the first that do not suffice."""
    pool = pool_of(3, 4)
    if rows is not None:
        pool.stores = Stores(DeltaKind(1, 1, 1, 1, taps=4), rows, states)
    slots = BranchSlots(pool)
    held = slots.take([0, 1], [5, BLOCK - 1])

    def state():
        used = (pool.stores.rows.used, pool.stores.states.used) if pool.stores is not None else ()
        return slots.count, [*slots.owner], [[*column] for column in slots.table], {**slots.held}, pool.used_pages, used

    before, positions = state(), [6, 7, BLOCK - 1, 9, 10, 11, *range(12, 17)]
    for _ in range(2):
        with pytest.raises(KVMemoryError):
            slots.reserve(positions) if reserve else slots.take(range(2, 13), positions)
        assert state() == before
        check_slots(slots)
    taken = slots.take([2, 3], [6, 7])
    assert len({*held, *taken}) == 4 and slots.count == 4 and slots.take([], []) == slots.reserve([]) == []
    slots.release_all()
    check_pool(pool, [])
    assert pool.stores is None or pool.stores.rows.used == pool.stores.states.used == 0


def test_a_shared_last_page_is_copied_before_it_is_written():
    pool = pool_of(4)
    one, two = Trunk([1, 2, 3]), Trunk([1, 2, 3])
    one.reserve(pool, 3, 1)
    pool.cache.k_LGSD[0, 0, one.slot(2, 4)] = 5.0
    two.share(pool, one.pages)
    assert two.pages == one.pages and pool.used_pages == 1
    two.own_end(pool)
    assert two.pages != one.pages and pool.used_pages == 2 and two.runs == [[two.pages[0], 1]]
    assert pool.cache.k_LGSD[0, 0, two.slot(2, 4)] == 5.0
    one.release(pool)
    two.release(pool)
    check_pool(pool, [])


def test_pages_that_a_full_pool_refuses_are_given_back():
    pool = pool_of(3)
    trunk = Trunk([])
    trunk.reserve(pool, 4, 1)
    with pytest.raises(KVMemoryError):
        trunk.reserve(pool, 17, 2)
    assert len(trunk.pages) == 1 == pool.used_pages and trunk.runs == [[trunk.pages[0], 1]]

"""The rows and states of recurrent layers: who has them, and what a trunk keeps when passes succeed or fail."""

import pytest

from engine.cache.states import Held, Stores, TrunkStates
from engine.errors import KVMemoryError
from kernels.layout import BLOCK, NULL_STATE, ChannelKind, DeltaKind

KIND = DeltaKind(1, 1, 1, 1, taps=4)


def test_whole_blocks():
    assert [KIND.whole(n) for n in (0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 5)] == [0, 0, 0, BLOCK, 3 * BLOCK]
    assert [ChannelKind(1, 1, 2, 3, taps=2).whole(n) for n in (3, 4, 33)] == [0, 4, 32]


def test_a_node_has_a_state_where_a_block_ends():
    stores = Stores(KIND, rows=3, states=1)
    first, last = stores.take(BLOCK - 2), stores.take(BLOCK - 1)
    assert first.state == NULL_STATE and last.state != NULL_STATE and first.row != last.row
    with pytest.raises(KVMemoryError, match="all 1 states of recurrent layers are in use"):
        stores.take(2 * BLOCK - 1)
    assert (stores.rows.used, stores.states.used) == (2, 1)  # the row that was taken first was given back
    stores.take(0)
    with pytest.raises(KVMemoryError, match="all 3 rows of recurrent layers are in use"):
        stores.take(0)
    stores.give([last])
    assert stores.take(BLOCK - 1) == last


def test_a_pass_that_failed_gives_the_state_before_back():
    stores = Stores(KIND, rows=90, states=3)
    trunk = TrunkStates(stores)
    trunk.extend(0, 40)
    assert trunk.folded == BLOCK and (first := trunk.state) != NULL_STATE
    trunk.extend(40, 40)
    assert trunk.folded == 2 * BLOCK and trunk.state != first and trunk.before == (first, BLOCK)
    assert trunk.base(40, 40) == trunk.base(63, 40) == first and trunk.base(64, 40) == trunk.state
    assert trunk.truncate(40) == 40 and (trunk.state, trunk.folded, trunk.before) == (first, BLOCK, None)
    trunk.extend(40, 40)
    trunk.settle(80)
    assert stores.states.used == 1 and trunk.truncate(40) == 0  # the state of 40 tokens is gone
    assert stores.states.used == stores.rows.used == 0 and trunk.state == NULL_STATE


def test_a_pass_without_room_takes_nothing():
    stores = Stores(KIND, rows=10, states=3)
    trunk = TrunkStates(stores)
    trunk.extend(0, 5)
    with pytest.raises(KVMemoryError, match="rows"):
        trunk.extend(5, 9)
    assert stores.rows.used == len(trunk.rows) == 5 and trunk.truncate(5) == 5


def test_a_stem_brings_its_rows_and_its_latest_state():
    stores = Stores(KIND, rows=200, states=9)
    trunk = TrunkStates(stores)
    trunk.extend(0, 20)
    held = [stores.take(position) for position in range(20, 100)]
    trunk.append(20, held)
    assert trunk.folded == 96 and trunk.state == held[95 - 20].state
    assert sorted(trunk.rows) == [*range(93, 100)] and trunk.rows[99] == held[-1].row
    assert (stores.rows.used, stores.states.used) == (7, 1)
    assert Held(3) == (3, NULL_STATE)

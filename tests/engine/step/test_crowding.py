"""Whose search gives way in a full cache, by what clients hold and by how often they gave way."""

from types import SimpleNamespace

import pytest

from engine.errors import KVMemoryError
from engine.step.crowding import TIMES_TO_GIVE_WAY, check_share, held_pages, who_gives_way
from engine.step.jobs import Job

POOL = SimpleNamespace(flag="--kv-memory", pages=10, page_size=16)


def job(client, pages, gave_way=0, pool=POOL):
    trees = [SimpleNamespace(page_count=pages, pool=pool), SimpleNamespace(page_count=99, pool=None)]
    return Job(lambda job: iter(()), trees=trees, client=client, gave_way=gave_way)


def test_pages_of_other_pools_do_not_count():
    assert held_pages([job("a", 3), job("b", 0), job("a", 2)], POOL) == {"a": 5, "b": 0}


def test_the_latest_search_of_the_client_that_holds_the_most():
    running = [job("a", 2), job("b", 3), job("a", 2), job("b", 0)]
    assert who_gives_way(running, POOL) is running[2]
    running = [job("a", 2), job("b", 2)]  # of equals the one that started last
    assert who_gives_way(running, POOL) is running[1]


def test_who_gave_way_often_is_left_out_while_there_is_another():
    running = [job("a", 1), job("b", 8, TIMES_TO_GIVE_WAY)]
    assert who_gives_way(running, POOL) is running[0]
    assert who_gives_way(running[1:], POOL) is running[1]


def test_a_client_with_more_than_its_share_is_refused():
    mine, running = job("a", 6), [job("a", 6), job("b", 4)]
    check_share(mine, running, POOL, 0.6)
    check_share(mine, running, POOL, 1)
    with pytest.raises(KVMemoryError, match="one client may have 5"):
        check_share(mine, running, POOL, 0.5)

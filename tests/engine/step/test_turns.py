"""Who is in a pass that has no room for all, and that no request waits for ever."""

from types import SimpleNamespace

import pytest

from engine.step.jobs import Job
from engine.step.turns import first_turn, in_order, least_room, note_turn, within

ROOM = 256


def job(left, client="", missed=0, waited=0):
    found = Job(lambda job: iter(()), client=client, missed=missed)
    found.pending = SimpleNamespace(left=left, waited=waited)  # type: ignore[assignment]
    return found


def one_pass(jobs, room=ROOM):
    """The tokens that each search gets in a pass: what the driver does with turns, but for memory."""
    first, kept = first_turn(jobs, room)
    shares = {}
    for each in in_order(jobs):
        kept = 0 if each is first else kept
        if room > kept:
            shares[id(each)] = min(each.pending.left, room - kept)
            room -= shares[id(each)]
    note_turn(jobs, [each for each in jobs if id(each) in shares])
    return [shares.get(id(each), 0) for each in jobs]


def test_all_that_fit_are_in_a_pass():
    assert one_pass([job(200), job(1), job(15)]) == [200, 1, 15]


def test_a_long_prompt_gets_what_the_short_requests_leave():
    assert one_pass([job(1000), job(1), job(15)]) == [240, 1, 15]


def test_of_two_prompts_the_shorter_one_ends_first():
    assert one_pass([job(1000, waited=3), job(900, waited=5)]) == [0, 256]  # both turns are its own
    assert one_pass([job(1000, waited=5), job(900, waited=3)]) == [128, 128]


@pytest.mark.parametrize("mine", ["theirs", "mine"])
@pytest.mark.parametrize("prompt", [65, 100, 2000])
def test_a_prompt_is_read_beside_wide_searches_without_end(mine, prompt):
    wide = [job(64, "theirs") for _ in range(15)]
    prompt_job = job(prompt, mine)
    passes = 0
    while prompt_job.pending.left:
        *shares, own = one_pass([*wide, prompt_job])
        assert sum(shares) + own == ROOM
        prompt_job.pending.left -= own
        for each, share in zip(wide, shares, strict=True):
            each.pending.left = each.pending.left - share or 64  # it asks anew
            each.pending.waited *= each.pending.left < 64
        passes += 1
        assert passes <= 2 * len(wide) + 2 * -(-prompt // (ROOM // 2))


def test_a_prompt_is_read_beside_shorter_ones_that_keep_coming():
    prompt, passes = job(600), 0
    while prompt.pending.left:
        short = [job(256) for _ in range(8)]
        prompt.pending.left -= one_pass([*short, prompt])[-1]
        passes += 1
    assert passes <= 6


def test_a_new_client_has_its_part_at_once():
    wide = [job(64, "theirs", waited=50 + i) for i in range(15)]
    new = job(200, "mine")
    new.missed = Job(lambda job: iter(())).missed
    assert one_pass([*wide, new])[-1] == 128


def test_the_requests_of_one_client_do_not_shorten_the_wait_of_another():
    many = [job(500, "many", missed=i, waited=100) for i in range(8)]  # one of them was in the last pass
    assert first_turn([*many, job(500, "few", missed=1)], ROOM)[0].client == "few"


def test_equals_take_turns():
    jobs = [job(64) for _ in range(12)]
    seen = [0] * 12
    for _ in range(9):
        for i, share in enumerate(one_pass(jobs)):
            seen[i] += share
            jobs[i].pending.waited *= not share
    assert seen == [3 * 64] * 12


def test_predictions_leave_room_for_those_that_wait():
    assert least_room([], ROOM) == 0
    assert least_room([job(3), job(4)], ROOM) == 7
    assert least_room([job(3), job(1000)], ROOM) == 128


def with_rows(count, **others):
    found = job(count, **others)
    found.pending.asked = {*range(count)}
    return found


def test_rows_are_limited_in_order():
    jobs = [with_rows(count) for count in (1, 3, 6, 9)]
    assert within(jobs, jobs[0], None) == jobs == within(jobs, jobs[0], 19)
    assert within(jobs, jobs[2], 16) == jobs[:3]
    assert within(jobs, jobs[3], 10) == [jobs[0], jobs[3]]  # the first turn is before the order
    assert within(jobs, jobs[3], 4) == [jobs[3]]
    assert within([], None, 4) == []


def test_every_search_gets_its_rows():
    jobs, seen = [with_rows(count) for count in (16, 16, 1, 1, 9)], [0] * 5
    for _ in range(12):
        first, _ = first_turn(jobs, ROOM)
        chosen = within(in_order(jobs), first, 16)
        assert sum(each.pending.left for each in chosen) <= 16
        note_turn(jobs, chosen)
        for i, each in enumerate(jobs):
            seen[i] += each in chosen
            each.pending.waited *= each not in chosen
    assert min(seen) >= 3

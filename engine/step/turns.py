"""The order of requests in a pass that has no room for all of them.

Short requests come first: others decode while a long prompt fills the rest. A long one would wait for as long as wide
searches ask anew after each pass, or shorter prompts keep coming. Therefore up to half of a pass is kept for one:
of the client that has had no part in a pass for longest, the request that has waited for longest.
"""

from collections.abc import Sequence

from engine.step.jobs import Job, Pending

KEPT_PART = 2  # one part in so many of a pass


def in_order(jobs: Sequence[Job]) -> list[Job]:
    """The searches that ask, those for the fewest tokens first; of equals the one that has waited for longest."""
    return sorted(jobs, key=lambda job: (_asked(job).left, -_asked(job).waited))


def first_turn(jobs: Sequence[Job], room: int) -> tuple[Job | None, int]:
    """The search for which a part of a pass is kept, and how many tokens; None: no search asks.

    Args:
        room: tokens of the pass.
    """
    missed: dict[str, int] = {}  # client -> passes since a search of its had a part in one
    for job in jobs:
        missed[job.client] = min(job.missed, missed.get(job.client, job.missed))
    first = max(jobs, key=lambda job: (missed[job.client], _asked(job).waited), default=None)
    return first, 0 if first is None else min(_asked(first).left, room // KEPT_PART)


def least_room(jobs: Sequence[Job], budget: int) -> int:
    """How many of the tokens of a pass are not for predictions, while searches wait: what these ask for, or a part."""
    return min(sum(_asked(job).left for job in jobs), budget // KEPT_PART)


def note_turn(jobs: Sequence[Job], evaluated: Sequence[Job]) -> None:
    """Note a pass: which searches asked, and which of them have a part in it."""
    served = {id(job) for job in evaluated}
    for job in jobs:
        job.missed = 0 if id(job) in served else job.missed + 1
        if job.pending is not None:
            job.pending.waited += 1


def _asked(job: Job) -> Pending:
    assert job.pending is not None
    return job.pending

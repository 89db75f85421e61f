"""The order of requests in a pass that has no room for all of them.

Short requests come first, so that they decode while a long prompt fills the rest. A long request would wait as long as
wide searches ask again after each pass, or shorter prompts keep arriving. Therefore up to half of a pass is reserved
for one request: the one that has waited longest, of the client that has been in no pass for longest.
"""

from collections.abc import Sequence

from engine.step.jobs import Job
from engine.step.partial import Pending

KEPT_PART = 2  # the part of a pass that is reserved is 1 / KEPT_PART


def in_order(jobs: Sequence[Job]) -> list[Job]:
    """The searches that wait for rows, in ascending order of tokens; among equals the one that waited longest first."""
    return sorted(jobs, key=lambda job: (_asked(job).left, -_asked(job).waited))


def first_turn(jobs: Sequence[Job], room: int) -> tuple[Job | None, int]:
    """The search for which a part of a pass is kept, and how many tokens; None: no search asks.

    Args:
        room: tokens of the pass.
    """
    missed: dict[str, int] = {}  # client -> passes since one of its searches was in one
    for job in jobs:
        missed[job.client] = min(job.missed, missed.get(job.client, job.missed))
    first = max(jobs, key=lambda job: (missed[job.client], _asked(job).waited), default=None)
    return first, 0 if first is None else min(_asked(first).left, room // KEPT_PART)


def least_room(jobs: Sequence[Job], budget: int) -> int:
    """How many tokens of a pass waiting searches get before predictions: all that they ask for, or a part of a pass."""
    return min(sum(_asked(job).left for job in jobs), budget // KEPT_PART)


def note_turn(jobs: Sequence[Job], evaluated: Sequence[Job]) -> None:
    """Note a pass: the searches that asked, and those that it evaluates."""
    served = {id(job) for job in evaluated}
    for job in jobs:
        job.missed = 0 if id(job) in served else job.missed + 1
        if job.pending is not None:
            job.pending.waited += 1


def _asked(job: Job) -> Pending:
    assert job.pending is not None
    return job.pending

"""The order of requests in a pass that has no room for all of them.

Short requests come first, so that they decode while a long prompt fills the rest. A long request would wait as long as
wide searches ask again after each pass, or shorter prompts keep arriving. Therefore up to half of a pass is reserved
for one request: the one that has waited longest, of the client that has been in no pass for longest.

Where `--memory` limits the rows of log-probabilities of a pass, that request gets its rows first, and the others, in
their order, as many as are left.
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


def within(jobs: Sequence[Job], first: Job | None, rows: int | None) -> list[Job]:
    """The searches whose rows a pass has room for, in their order.

    Args:
        jobs: searches that wait for rows.
        first: one of them, which is in the pass even if it asks for more rows.
        rows: most rows of the pass; None: no limit.
    """
    if rows is None or first is None:
        return [*jobs]
    left, found = rows - rows_asked([first]), []
    for job in jobs:
        count = 0 if job is first else rows_asked([job])
        if job is first or count <= left:
            found.append(job)
            left -= count
    return found


def rows_asked(jobs: Sequence[Job]) -> int:
    """The rows that some searches wait for."""
    return sum(len(_asked(job).asked) for job in jobs)


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

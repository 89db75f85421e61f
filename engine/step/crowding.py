"""Chooses the search to preempt when the KV cache is full, so that no client blocks another one.

The latest search of the client that holds the most pages is preempted. If there are several clients, a part of each
pool is reserved for those that hold less: what one client may hold is limited (`Driver.share`).
"""

from collections import Counter
from collections.abc import Sequence

from engine.cache.pool import PagePool
from engine.errors import KVMemoryError
from engine.step.jobs import Job

TIMES_TO_GIVE_WAY = 2  # preemptions for other clients; after that only its age counts, so that it comes to its end


def held_pages(jobs: Sequence[Job], pool: PagePool) -> Counter[str]:
    """How many pages of a pool the searches of each client hold; a shared page counts for each of them."""
    held = Counter(dict.fromkeys((job.client for job in jobs), 0))
    for job in jobs:
        held[job.client] += sum(tree.page_count for tree in job.trees if tree.pool is pool)
    return held


def check_share(job: Job, running: Sequence[Job], pool: PagePool, share: float) -> None:
    """Raise KVMemoryError if the client of a search holds more than its share of a pool."""
    if share < 1 and held_pages(running, pool)[job.client] > share * pool.pages:
        raise KVMemoryError(
            f"the KV cache holds {pool.pages} pages of {pool.page_size} tokens, of which one client may have "
            f"{int(share * pool.pages)}",
            remedy=f"give {pool.flag} more, or ask for fewer beams or new tokens",
        )


def who_gives_way(running: Sequence[Job], pool: PagePool) -> Job:
    """The search that gives its pages back: the latest one of the client that holds the most pages.

    Clients whose searches have given way to others `TIMES_TO_GIVE_WAY` times are left out unless all have.

    Args:
        running: searches, in the order of their starts.
    """
    patient = {job.client for job in running} - {job.client for job in running if job.gave_way >= TIMES_TO_GIVE_WAY}
    held = held_pages(running, pool)
    latest = {job.client: i for i, job in enumerate(running)}
    client = max(patient or held, key=lambda each: (held[each], latest[each]))
    return running[latest[client]]

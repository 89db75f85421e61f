"""The drafts of all requests of a pass: a drafter with a model guesses for all of its requests at once, and one with a
draft head receives the target's rows of all of them at once."""

import time
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from engine.drafts import Wanted
from engine.drafts.heads import HeadDrafter
from engine.step.jobs import Batch, Job, Share, Work
from engine.step.packing import Chunk
from engine.step.runner import Keep


class Guessing:
    """Adds drafts to the chunks of a pass.

    Args:
        parts: the requests of a pass and their chunks, which have slots.
        room: further tokens that the pass has room for.
        work: the work of all searches, to which passes of a draft model are added.

    Attributes:
        chunks: the chunks with their drafts.
        seconds: time of all guesses by drafters that guess for several requests at once.
    """

    def __init__(self, parts: Sequence[tuple[Job, Chunk]], room: int, work: Mapping[str, Work]):
        self.chunks, self.seconds, self._work = list[Chunk](), 0.0, work
        asked = [self._ask(job, chunk) for job, chunk in parts]
        self._guess([(job, wanted) for (job, _), wanted in zip(parts, asked, strict=True) if wanted])
        for (job, chunk), wanted in zip(parts, asked, strict=True):
            if wanted is not None and job.drafts is not None and wanted.drafts is not None:
                chunk = job.drafts.extend(chunk, wanted, room)
                room -= len(chunk.drafts)
            self.chunks.append(chunk)

    @staticmethod
    def _ask(job: Job, chunk: Chunk) -> Wanted | None:
        """Ask a request what to draft; None: nothing, or its chunk does not complete its `Evaluate`."""
        pending = job.pending
        if job.drafts is None or pending is None or pending.left or pending.by_rope:
            return None
        job.drafts.charge.load = job.batch_load
        return job.drafts.ask(chunk, pending)

    def _guess(self, asked: Sequence[tuple[Job, Wanted]]) -> None:
        """Fill in the drafts for each `Wanted`; none if its drafter fails."""
        together: dict[int, list[tuple[Job, Wanted]]] = {}
        for job, wanted in asked:
            assert job.drafts is not None
            if job.drafts.joint:
                together.setdefault(id(job.drafts.engine.drafter), []).append((job, wanted))
            else:
                job.drafts.guess(wanted)
        for group in together.values():
            self._guess_together(group)

    def _guess_together(self, group: Sequence[tuple[Job, Wanted]]) -> None:
        """Fill in the drafts of requests that share a drafter, which guesses for all of them at once."""
        began, every = time.perf_counter(), [wanted for _, wanted in group]
        try:
            drafts = group[0][0].drafts.engine.drafter.draft_together(every)  # type: ignore[union-attr]
            for wanted, each in [*zip(every, drafts, strict=True)]:
                wanted.drafts = each
        except Exception as error:
            for job, _ in group:
                assert job.drafts is not None
                job.drafts.fail(error)
        finally:
            self.seconds += time.perf_counter() - began
            passes: dict[int, tuple[int, float]] = {}
            for job, wanted in group:
                for number, tokens, seconds in wanted.passes:
                    job.work.setdefault("draft", Work()).add(tokens, seconds)
                    passes[number] = tokens + passes.get(number, (0, seconds))[0], seconds
            for tokens, seconds in passes.values():
                self._work["draft"].add(tokens, seconds)


def read_rows_for_heads(batch: Batch) -> None:
    """Give the rows of a batch's pass to the heads that draft for its requests."""
    groups: dict[int, tuple[HeadDrafter, list[tuple[Share, slice]]]] = {}
    end = 0
    for share in batch.shares:
        start, end = end, end + len(share.chunk)
        if (drafts := share.job.drafts) is not None and drafts.reads_rows(share.chunk.tree):
            drafter = drafts.engine.drafter
            assert isinstance(drafter, HeadDrafter)
            groups.setdefault(id(drafter), (drafter, []))[1].append((share, slice(start, end)))
    for drafter, shares in groups.values():
        batch.keeps.append(Keep(slice(0, end), partial(_give_rows, drafter, shares), drafter.head.taps))


def _give_rows(drafter: HeadDrafter, shares: Sequence[tuple[Share, slice]], rows: Tensor) -> None:
    """Give each request its part of the rows of a pass."""
    rows_TE = drafter.head.taken(rows)
    for share, tokens in shares:
        if share.job.drafts is not None:
            share.job.drafts.read_rows(share.chunk, rows_TE[tokens])

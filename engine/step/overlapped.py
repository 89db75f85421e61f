"""The driver for a GPU: it launches the next pass before the host has read the answer of the last one.

The CPU path does not use this file. `Evaluate.next` predicts the nodes that a search will ask for after its top sums.
The device itself determines their tokens and the branch slots that they see. Meanwhile the host reads the answer,
resumes the search, and compares its next request with the guess::

    device   | pass 1      | pass 2, guessed              | pass 3, guessed
    host     launch 1, 2   | read 1, search, compare with 2, launch 3   | read 2, search, compare with 3

A wrong guess, for example when a sequence ends, costs the device a pass but changes no answer: its slots return to the
tree. Searches that are already waiting join a guessed pass. Searches in the running pass without a prediction, such as
one that reads its prompt, miss a pass::

    pass         1: A B C   2: A B, guessed   3: A B, guessed, C   4: A B C, guessed     A, B, C: searches

If too many searches have no prediction, the searches alternate in two halves, if that is faster.

Shapes: n nodes of the guessed pass, C words of ancestry bits, k sums.
"""

import contextlib
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor

from engine.cache.tree import TokenTree
from engine.contract.top_sums import Next, TopSums
from engine.errors import KVMemoryError
from engine.step.driver import Driver
from engine.step.jobs import Batch, Job, Share
from engine.step.packing import Blank, Chunk, Pass
from engine.step.partial import PartialSums
from engine.step.phases import PhaseObserver
from engine.step.runner import Launched, Rows, Runner
from engine.step.turns import least_room
from kernels.layout import WORD
from kernels.rows import next_nodes
from kernels.rows.checks import NextNodes


def make_driver(runners: dict[str, Runner], parallel: int = 16, observer: PhaseObserver | None = None) -> Driver:
    """The driver for the device of the models; same arguments as `Driver`."""
    asynchronous = any(runner.asynchronous for runner in runners.values())
    return (Overlapped if asynchronous else Driver)(runners, parallel, observer)


@dataclass
class Guess:
    """The predicted next request of one search.

    Args:
        next: the search's hint.
        k: number of top sums.
        asked: the tokens of the running pass whose rows have the top sums.
        chunk: the nodes, with their slots.
    """

    next: Next
    k: int
    asked: Sequence[int]
    chunk: Blank

    def picked(self, numbers: Tensor, vocab_size: int) -> tuple[list[float], list[tuple[int, int]]]:
        """The choices of `choose`, on the host: sums, and (row, token) of each node."""
        k = len(numbers) // 2
        places = [divmod(int(place), vocab_size) for place in numbers[k : 2 * k].tolist()]
        chosen = [i for i, (_, token) in enumerate(places) if token not in self.next.ends][: self.next.width]
        return numbers[chosen].tolist(), [places[i] for i in chosen]


class GuessedNodes(NamedTuple):
    """The nodes of guesses, on the device: their sums, float32; their tokens; the ancestry words of their parents,
    without slots that no node has any more. A parent may have seen slots that the trunk has taken over since."""

    sums_n: Tensor
    token_n: Tensor
    inherited_nC: Tensor

    def fill(self, first: int, inputs: Pass) -> None:
        """Write tokens and ancestry into the inputs of a pass, where `first` is the first guessed node."""
        own, words_TC = slice(first, first + len(self.token_n)), inputs.layout.ancestry_TC
        C = min(words_TC.shape[1], self.inherited_nC.shape[1])
        inputs.tokens_T[own] = self.token_n
        words_TC[own, :C].bitwise_or_(self.inherited_nC[:, :C])


def choose(
    guesses: Sequence[Guess], numbers: Sequence[Tensor], ancestry_TC: Tensor, vocab_size: int, impl: str
) -> GuessedNodes:
    """Choose the nodes of guesses on the device; `Guess.picked` finds the same ones on the host.

    Args:
        numbers: for each guess the result of `top_sums`.
        ancestry_TC: the ancestry of the running pass. It is read here, because later the next inputs may overwrite it.
        impl: see `kernels.rows.next_nodes`.
    """
    words = ancestry_TC.shape[1]
    wanted = [NextNodes(g.next.width, g.next.ends, g.asked, _live(g.chunk.tree, words)) for g in guesses]
    return GuessedNodes(*next_nodes(numbers, wanted, ancestry_TC, vocab_size, impl=impl))


def _live(tree: TokenTree, words: int) -> array:
    """Words of the branch slots that nodes have."""
    bits = sum(1 << slot for slot, node in enumerate(tree.slots.owner[: words * WORD]) if node >= 0)
    return array("i", bits.to_bytes(words * 4, "little"))


@dataclass
class Flight(Batch):
    """A batch whose pass a GPU has started.

    Attributes:
        guesses: shares of the previous pass, the predicted nodes of their searches, and the rows of these in this pass.
    """

    launched: Launched | None = None
    guesses: list[tuple[Share, Guess, slice]] = field(default_factory=list)

    def guess(self, share: Share, guess: Guess) -> None:
        """Add the nodes that a search will probably ask for after a share; `Overlapped._confirm` compares."""
        count = len(guess.chunk)
        self.guesses.append((share, guess, slice(len(self.asked), len(self.asked) + count)))
        self.asked += range(self.tokens, self.tokens + count)
        self.tokens += count

    def read_sums(self, sums_n: Tensor) -> None:
        """Request top sums for the guessed nodes, whose own sums are these."""
        each_n = sums_n.split([len(guess.chunk) for _, guess, _ in self.guesses])
        self.reads += [
            (rows, TopSums(each, guess.k)) for (_, guess, rows), each in zip(self.guesses, each_n, strict=True)
        ]

    def drop_ended(self, running: Sequence[Job]) -> bool:
        """Remove the searches that have ended or restarted since the launch. Returns whether any is left."""
        self.shares = [s for s in self.shares if s.job in running and s.job.pending is s.pending]
        self.readers = [s if s in self.shares else None for s in self.readers]
        return bool(self.shares)


class Overlapped(Driver):
    """A driver whose host works while the GPU works."""

    batches = Flight

    def __init__(self, runners: dict[str, Runner], parallel: int = 16, observer: PhaseObserver | None = None):
        super().__init__(runners, parallel, observer)
        self.under_way: dict[str, Flight] = {}  # by model
        self.guesses = Counter[str]()  # requests that were guessed right, and wrong
        self._latest_answer = 0.0  # when the latest answer was read

    def turn(self, model: str) -> None:
        """Commit one pass of a model; launch the next one before reading this one's answer."""
        began, batch = time.perf_counter(), self.under_way.pop(model, None)
        if batch is None or not batch.drop_ended(self.running):
            batch = self._launch(model, self._taking_turns(model))
        if batch.launched is None:  # no search asks, or the model is on a CPU
            if batch.shares:
                self._commit(batch, *self._run(batch))
            return
        try:
            after = self._guess(batch) or self._beside(batch)
            if batch.drop_ended(self.running):
                self._commit(batch, *self._wait(batch, batch.launched))
                self._confirm(after)
        except BaseException:
            for job in self.running:
                for tree in job.trees:
                    tree.give_up()
            raise
        if after is not None and after.shares:
            self.under_way[model] = after
        if batch.shares and batch.launched.seconds and not batch.reads_prompt and not batch.runner.shared:
            host = time.perf_counter() - began - batch.launched.waited
            batch.runner.overlap.note(host, batch.launched.seconds, len(batch.shares))

    def close(self) -> None:
        self.under_way.clear()
        super().close()

    def _taking_turns(self, model: str) -> list[Job]:
        """The searches of the next pass: half of those that are waiting, if it is better to overlap them with the other
        half."""
        jobs, overlap = self._asking(model), self.runners[model].overlap
        silent = sum(next_of(job) is None for job in jobs)
        if overlap.helps(len(jobs)) and not overlap.helps_without(silent, len(jobs)):
            return jobs[: -(-len(jobs) // 2)]
        return jobs

    def _launch(self, model: str, jobs: Sequence[Job]) -> Flight:
        """Schedule a pass, and launch it on the GPU."""
        batch, runner = self._schedule(model, jobs), self.runners[model]
        assert isinstance(batch, Flight)
        if batch.shares and runner.asynchronous:
            with self._phase("run", batch), self._released_if_failed(batch):
                batch.launched = runner.launch(batch.work, keep_rows=batch.keeps_rows)
        return batch

    def _wait(self, batch: Flight, launched: Launched) -> Rows:
        """Wait for the answer of a pass."""
        with self._phase("wait"), self._released_if_failed(batch):
            rows = batch.take(*launched.wait())
        now, batch.began = time.perf_counter(), max(batch.began, self._latest_answer)
        self._latest_answer = now
        self._account(batch, batch.began, now)
        return rows

    def _guess(self, batch: Flight) -> Flight | None:
        """Launch the predicted requests of searches that have given a hint, and the requests of those that wait.

        Returns None if there are none, if it is faster to wait for the searches without a hint, or if the predictions
        leave too little room to requests that wait.
        """
        runner, launched, silent = batch.runner, batch.launched, 0
        assert launched is not None and launched.inputs is not None, "a CPU does not look ahead"
        room = runner.budget
        for share in batch.shares:
            if (next := next_of_share(share)) is None:
                silent += 1
            else:
                room -= next.width
        waiting = self._waiting(batch)
        able, count = len(batch.shares) - silent, len(batch.shares) + len(waiting)
        if not able or room < least_room(waiting, runner.budget) or not runner.overlap.helps_without(silent, count):
            return None
        after, numbers = self._riders(batch, waiting, room), []
        guessed_from = after.tokens
        for share, found in zip(batch.readers, launched.numbers, strict=True):
            if share is None or share.job not in self.running or share.job.pending is not share.pending:
                continue  # it was preempted for one that waits
            with contextlib.suppress(KVMemoryError):
                if (guess := guess_of(share, found, batch.asked[share.rows])) is not None:
                    after.guess(share, guess)
                    numbers.append(found)
        if not after.tokens:
            return None
        with self._phase("run", after), self._released_if_failed(after):
            work, fill = after.work, None
            if numbers:
                guesses = [guess for _, guess, _ in after.guesses]
                vocab_size = after.guesses[0][0].pending.partial.width
                nodes = choose(guesses, numbers, launched.inputs.ancestry_TC, vocab_size, runner.impl)
                after.read_sums(nodes.sums_n)
                work = after.work._replace(chunks=[*work.chunks, *(guess.chunk for guess in guesses)])
                fill = partial(nodes.fill, guessed_from)
            after.launched = runner.launch(work, fill, keep_rows=after.keeps_rows)
        return after

    def _waiting(self, batch: Flight) -> list[Job]:
        """The searches that have a request and are in no pass."""
        theirs = {id(share.job) for share in batch.shares}
        return [job for job in self._asking(batch.model) if id(job) not in theirs]

    def _riders(self, batch: Flight, jobs: Sequence[Job], room: int) -> Flight:
        """A pass of searches with at most this many tokens, not launched yet."""
        if not jobs:
            return Flight(batch.model, batch.runner, time.perf_counter())
        after = self._schedule(batch.model, jobs, room)
        assert isinstance(after, Flight)
        return after

    def _confirm(self, after: Flight | None) -> None:
        """Keep the correctly guessed part of a pass, now that the searches have made their requests."""
        for before, guess, rows in after.guesses if after is not None else ():
            share = confirmed(before, guess, rows) if before.job in self.running else None
            assert after is not None
            after.readers.append(share)
            self.guesses["wrong" if share is None else "right"] += 1
            if share is None:
                guess.chunk.tree.give_up()
            else:
                after.shares.append(share)

    def _beside(self, batch: Flight) -> Flight | None:
        """Launch a pass of the searches that wait for no other pass, if that hides the host's work; see `Overlap`."""
        overlap, silent = batch.runner.overlap, sum(next_of(job) is None for job in self.running)
        if not overlap.helps(len(self.running)) or overlap.helps_without(silent, len(self.running)):
            return None  # searches with a hint look ahead from the next pass on
        other = self._launch(batch.model, self._waiting(batch))
        return other if other.shares else None


# --- what a search will ask for ---


def next_of(job: Job) -> Next | None:
    """A search's hint, if its next request depends only on the answer to the current one."""
    pending = job.pending
    if pending is None or pending.constrained is not None or job.traced or job.kept is not None:
        return None
    tree = pending.request.tree
    kept = tree.pool.ancestors or tree.pool.stores is not None  # a pass reads places that depend on a node's parent
    return pending.request.next if tree.switch_length is None and not kept else None


def next_of_share(share: Share) -> Next | None:
    """The hint from `next_of`, if this pass contains a whole request whose nodes have equal depth."""
    next, pending, tree = next_of(share.job), share.pending, share.chunk.tree
    if next is None or not isinstance(pending.partial, PartialSums) or pending.left or pending.by_rope:
        return None
    if share.nodes != list(pending.request.nodes) or len({tree.position(node) for node in share.nodes}) > 1:
        return None
    return None if next.width == 1 and tree.live_branches else next


def guess_of(share: Share, numbers: Tensor, asked: Sequence[int]) -> Guess | None:
    """The predicted request after a share, with slots taken; None if it cannot be predicted. Raises KVMemoryError.

    Args:
        numbers: the result of its top sums.
        asked: the tokens of the pass whose rows it requested.
    """
    next, wanted, tree = next_of_share(share), share.pending.request.top_sums, share.chunk.tree
    if next is None or wanted is None or len(numbers) // 2 < next.width:
        return None
    position = tree.position(share.nodes[0]) + 1
    slots, branches = tree.reserve(next.width, position)
    return Guess(next, wanted.k, asked, Blank(tree, int(not branches), branches, slots, position))


def confirmed(before: Share, guess: Guess, rows: slice) -> Share | None:
    """A search's next request as a share of a guessed pass, with its rows in that pass; None if the guess was wrong."""
    pending, tree = before.job.pending, guess.chunk.tree
    if pending is None or pending.request.tree is not tree or not isinstance(pending.partial, PartialSums):
        return None
    if before.numbers is None:
        return None
    wanted, nodes = pending.partial.wanted, list(pending.request.nodes)
    sums, chosen = guess.picked(before.numbers, pending.partial.width)
    if wanted.k != guess.k or list(wanted.sums) != sums:
        return None
    parents = [(before.nodes[row], token) for row, token in chosen]
    if [(tree.parent(node), tree.token(node)) for node in nodes] != parents:
        return None
    branches = nodes if guess.chunk.nodes else []
    if (pending.trunk_left, pending.nodes_left) != (guess.chunk.trunk_tokens, branches):
        return None
    tree.adopt(pending.nodes_left)
    chunk = Chunk(tree, pending.trunk_left, pending.nodes_left, guess.chunk.slots)
    pending.allocated(chunk.trunk_tokens, chunk.nodes)
    return Share(before.job, pending, chunk, nodes, rows)

"""What the driver works on: the jobs of searches, their shares of forward passes, and the batches of shares."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from engine.cache.tree import TokenTree
from engine.contract import Answer, Evaluate, Read, Report, Search, SearchGenerator, SearchResult
from engine.contract.best import Best, Found, Next, merged, of_entries, of_rows
from engine.contract.checks import guarded_edit, is_ours
from engine.contract.trace import Trace
from engine.rules.constraint import ConstraintError
from engine.rules.few import Few
from engine.rules.logprobs import Kept
from engine.rules.state import Constrained, Edit, Plan
from engine.step.ahead import Choice, Guess
from engine.step.packing import Blank, Chunk
from engine.step.runner import Keep, Launched, Part, Runner
from kernels.rows.checks import Wanted


@dataclass
class Work:
    """The work of a model for a search; `seconds` include the whole of passes that other searches shared."""

    passes: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count a pass."""
        self.passes += 1
        self.tokens += tokens
        self.seconds += seconds


@dataclass
class Job:
    """A request while the driver works on it."""

    start: Callable[["Job"], SearchGenerator]
    settled: list[int] = field(default_factory=list)  # new tokens that are certain
    report: Report = field(default_factory=Report)  # the latest
    retire: Callable[[TokenTree], None] | None = None  # gets the target tree at the end, which is not freed then
    trees: list[TokenTree] = field(default_factory=list)
    generator: SearchGenerator | None = None
    pending: "Pending | None" = None
    batch_load: tuple[int, int] = (0, 0)  # other searches in its latest pass: their tokens, their number
    result: SearchResult | None = None
    error: BaseException | None = None
    work: dict[str, "Work"] = field(default_factory=dict)  # by model
    trace: Trace | None = None
    started: float = 0.0
    prefilled: float = 0.0
    constrained: Constrained | None = None
    salt: str | None = None  # of cached prefixes, see `TokenTree`
    kept: Kept | None = None  # of a request that wants log-probabilities of tokens
    search: Search | None = None  # a search that is not this project's is checked more closely; None is trusted
    fault: Exception | None = None  # raised by a function of a Report or an Evaluate; it ends the job at its next step

    def __post_init__(self):
        self.foreign = self.search is not None and not is_ours(type(self.search))

    @property
    def done(self) -> bool:
        return self.result is not None or self.error is not None

    @property
    def next(self) -> Next | None:
        """What will most likely be asked for after the present request, if nothing but its answer decides that."""
        pending, others = self.pending, (self.trace, self.kept)
        if pending is None or pending.constrained is not None or any(other is not None for other in others):
            return None
        tree = pending.request.tree
        return pending.request.next if tree.switch_length is None and not tree.pool.ancestors else None


@dataclass
class Pending:
    """An Evaluate under way: the tokens that are left of it, and the rows computed so far."""

    request: Evaluate
    by_rope: list[tuple[bool, list[int]]]  # see `TokenTree.by_rope`: one group, except for models that switch
    constrained: Constrained | None = None  # of a tree that has constraints
    known: Sequence[int] = ()  # nodes whose rows need no evaluation
    known_KV: Tensor | None = None  # their rows
    answered: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    numbers: Tensor | None = None  # the result of the request's `read`
    parts: list[Found] | None = None  # of `Evaluate.best`, found pass by pass; None: in the rows, at the end
    width: int = 0  # of rows
    trunk_left: int = 0
    nodes_left: list[int] = field(default_factory=list)

    def __post_init__(self):
        nodes = list(self.request.nodes)
        if self.request.best is not None and nodes == sorted({*nodes}):
            self.parts = []
            self._place = {node: i for i, node in enumerate(nodes)}

    def best_of(self, nodes: Sequence[int]) -> Best:
        """What is wanted of the rows of some nodes: of those not asked for, nothing."""
        assert self.request.best is not None
        if list(nodes) == list(self.request.nodes):
            return self.request.best
        sums, k = self.request.best
        return Best([sums[self._place[node]] if node in self._place else -math.inf for node in nodes], k)

    def found(self, part: Found, nodes: Sequence[int]) -> None:
        """Add what was found in the rows of some nodes, at places in these rows."""
        assert self.parts is not None
        first_N = torch.tensor([self._place.get(node, 0) for node in nodes]) * self.width
        row = part.places // self.width
        self.parts.append(Found(part.values, part.places - row * self.width + first_N[row]))

    def know(self, plan: Plan, device: torch.device, trace: Trace | None) -> None:
        """Add rows that need no evaluation."""
        self.known = [*plan.known]
        if self.parts is None or trace is not None:
            self.known_KV = Constrained.known_rows(plan, self.width, device)
            if trace is not None:
                trace.answered(self.request.tree, self.known, self.known_KV)
        if self.parts is not None:
            tokens, numbers = zip(*plan.known.values(), strict=True)
            values_K, token_K = torch.tensor(numbers, dtype=torch.float32), torch.tensor(tokens)
            best = self.best_of(self.known)
            self.found(of_entries(values_K, torch.arange(len(tokens)), token_K, best, self.width), self.known)

    def begin(self) -> None:
        """Start with the next group of nodes."""
        long, nodes = self.by_rope.pop(0)
        self.request.tree.use_rope(long)
        self.trunk_left, self.nodes_left = self.request.tree.pending(nodes)
        self.asked = set(nodes)
        self.trunk_allocated = 0  # by earlier passes of this request
        self.nodes_allocated: list[int] = []

    def allocated(self, trunk_tokens: int, nodes: Sequence[int]) -> None:
        """The next tokens have slots now."""
        self.trunk_left -= trunk_tokens
        self.trunk_allocated += trunk_tokens
        self.nodes_allocated += nodes
        self.nodes_left = self.nodes_left[len(nodes) :]

    @property
    def left(self) -> int:
        return self.trunk_left + len(self.nodes_left)

    def answer(self) -> Answer:
        """The answer: one row per node, in the order of the request; or the best sums."""
        if self.parts is not None:
            assert self.request.best is not None
            return Answer(torch.empty(0, self.width), merged(self.parts, self.request.best.k).numbers())
        if self.known_KV is not None:
            self.rows.append(self.known_KV)
            self.answered += self.known
        rows_NV = self.rows[0] if len(self.rows) == 1 else torch.cat(self.rows)
        nodes = list(self.request.nodes)
        if nodes == self.answered:
            return self.request.answer(rows_NV) if self.numbers is None else Answer(rows_NV, self.numbers)
        row = {node: i for i, node in enumerate(self.answered)}
        return self.request.answer(rows_NV[torch.tensor([row[n] for n in nodes], device=rows_NV.device)])


@dataclass
class Share:
    """One request's part of a pass: its tokens, and its nodes with their rows of the answer."""

    job: Job
    pending: Pending
    chunk: Chunk
    nodes: list[int]
    rows: slice
    numbers: Tensor | None = None  # of its best sums, as they came from the device

    @property
    def next(self) -> Next | None:
        """As `Job.next`, if this pass is the whole of a request whose nodes are equally deep."""
        next, pending, tree = self.job.next, self.pending, self.chunk.tree
        if next is None or pending.parts is None or pending.left or pending.by_rope:
            return None
        if self.nodes != list(pending.request.nodes) or len({tree.position(node) for node in self.nodes}) > 1:
            return None
        return None if next.width == 1 and tree.live_branches else next

    def guess(self, numbers: Tensor, asked: Sequence[int]) -> Guess | None:
        """What its search will most likely ask for next, with slots; None if it cannot. Raises KVMemoryError.

        Args:
            numbers: of its best sums.
            asked: the tokens of the pass that have its rows.
        """
        next, best, tree = self.next, self.pending.request.best, self.chunk.tree
        if next is None or best is None or len(numbers) // 2 < next.width:
            return None
        position = tree.position(self.nodes[0]) + 1
        slots, branches = tree.reserve(next.width, position)
        return Guess(next, best.k, asked, Blank(tree, int(not branches), branches, slots, position))

    def follows(self, guess: Guess, rows: slice) -> "Share | None":
        """The search's next request as a share of a guessed pass, with its rows there; None if the guess was wrong."""
        pending, tree = self.job.pending, guess.chunk.tree
        if pending is None or pending.request.tree is not tree or pending.parts is None or self.numbers is None:
            return None
        best, nodes = pending.request.best, list(pending.request.nodes)
        sums, chosen = guess.picked(self.numbers, self.pending.width)
        if best is None or best.k != guess.k or list(best.sums) != sums:
            return None
        parents = [(self.nodes[row], token) for row, token in chosen]
        if [(tree.parent(node), tree.token(node)) for node in nodes] != parents:
            return None
        branches = nodes if guess.chunk.nodes else []
        if (pending.trunk_left, pending.nodes_left) != (guess.chunk.trunk_tokens, branches):
            return None
        tree.adopt(pending.nodes_left)
        chunk = Chunk(tree, pending.trunk_left, pending.nodes_left, guess.chunk.slots)
        pending.allocated(chunk.trunk_tokens, chunk.nodes)
        return Share(self.job, pending, chunk, nodes, rows)

    @property
    def few(self) -> Few | None:
        """The allowed tokens of its rows, if the request needs no others."""
        pending = self.pending
        if self.job.trace is not None or pending.constrained is None or pending.parts is None:
            return None
        return pending.constrained.few(self.chunk.tree, self.nodes)

    @property
    def best(self) -> Best | None:
        """What is wanted of its rows, if that is all that they are for."""
        pending = self.pending
        if self.job.trace is not None or pending.constrained is not None or pending.parts is None:
            return None
        return pending.best_of(self.nodes)

    def take(self, numbers: Tensor, logp_NV: Tensor) -> None:
        """Take what a read of its rows returned."""
        if self.pending.parts is None:
            self.pending.numbers = numbers
        else:
            self.numbers = numbers
            found = of_rows(numbers, logp_NV[self.rows], self.pending.best_of(self.nodes))
            self.pending.found(found, self.nodes)

    def take_few(self, few: Few, logp_M: Tensor) -> None:
        """Take the log-probabilities of the allowed tokens of its rows."""
        pending = self.pending
        assert pending.constrained is not None
        try:
            pending.constrained.note(self.chunk.tree, self.nodes, few, logp_M)
        except ConstraintError as error:
            self.job.fault = error
        best = pending.best_of(self.nodes)
        pending.found(of_entries(logp_M, few.row_M, few.token_M, best, pending.width), self.nodes)


@dataclass
class Batch:
    """The requests that one forward pass of a model evaluates together."""

    model: str
    runner: Runner
    began: float
    shares: list[Share] = field(default_factory=list)
    tokens: int = 0
    asked: list[int] = field(default_factory=list)  # tokens whose rows are wanted
    reads: list[Part] = field(default_factory=list)
    readers: list[Share | None] = field(default_factory=list)  # the owner of each read; None: its search has left
    edits: list[Edit] = field(default_factory=list)
    keeps: list[Keep] = field(default_factory=list)
    launched: Launched | None = None
    guesses: list[tuple[Share, Guess, slice]] = field(default_factory=list)  # shares of the pass before, rows of this

    def add(self, job: Job, chunk: Chunk) -> None:
        """Add a request's tokens."""
        pending = job.pending
        assert pending is not None
        last = [pending.request.tree.root] if chunk.trunk_tokens and not pending.trunk_left else []
        first = self.tokens + chunk.trunk_tokens - len(last)
        wanted = [(first + i, n) for i, n in enumerate([*last, *chunk.nodes]) if n in pending.asked]
        rows, nodes = slice(len(self.asked), len(self.asked) + len(wanted)), [n for _, n in wanted]
        self.asked += [i for i, _ in wanted]
        share = Share(job, pending, chunk, nodes, rows)
        read: Read | Wanted | None = pending.request.read
        if pending.parts is not None and nodes:
            read = Wanted(rows, *pending.best_of(nodes))
        elif nodes != list(pending.request.nodes):  # not all of it in this pass
            read = None
        if read is not None:
            self.reads.append((rows, read))
            self.readers.append(share)
        if pending.constrained is not None and nodes:
            edit = pending.constrained.edit(chunk.tree, nodes, rows)
            self.edits.append(edit._replace(apply=guarded_edit(edit.apply, partial(setattr, job, "fault"))))
        self.tokens += len(chunk)
        if job.kept is not None and chunk.tree is job.trees[0]:
            count, keep = job.kept.wanted(chunk.tree, chunk.trunk_tokens, chunk.nodes)
            if count:
                self.keeps.append((slice(self.tokens - count, self.tokens), keep))
        self.shares.append(share)

    def guess(self, share: Share, guess: Guess, choice: Choice) -> None:
        """Add what a search will most likely ask for after a share; `Driver._adopt` compares."""
        rows = slice(self.tokens, self.tokens + len(guess.chunk))
        self.guesses.append((share, guess, rows))
        self.asked += range(rows.start, rows.stop)
        self.reads.append((rows, Wanted(rows, choice.sums_n, guess.k)))
        self.tokens += len(guess.chunk)

    def take(self, logp_NV: Tensor, finite: list[bool], numbers: Sequence[Tensor]) -> tuple[Tensor, list[bool]]:
        """Give the numbers of the answer to the requests that read them; the rows, and whether they are finite."""
        for share, read in zip(self.readers, numbers, strict=True):
            if share is not None:
                share.take(read, logp_NV)
        return logp_NV, finite

    def give_up(self) -> None:
        """Give the slots of all guesses back."""
        for _, guess, _ in self.guesses:
            guess.chunk.tree.give_up()

    def leave(self, running: Sequence[Job]) -> bool:
        """Take out the searches that have ended or begun anew since the pass was launched; whether any is left."""
        self.shares = [s for s in self.shares if s.job in running and s.job.pending is s.pending]
        self.readers = [s if s in self.shares else None for s in self.readers]
        return bool(self.shares)

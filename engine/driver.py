"""The driver (scheduler): many searches, one forward pass per model and step.

A search yields a request; its pending tokens join those of other searches; one pass answers all of them. Long prompts
are evaluated in chunks, beside the decoding of others. When the pool is full, the latest search is preempted and starts
again later; a search that is alone gets KVMemoryError.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from engine.ahead import Choice, Fill, Guess, choose
from engine.best import Best, Found, Next, merged, of_all, of_entries, of_rows, of_shards
from engine.constrained import Constrained, Edit, Plan
from engine.constraints import ConstraintError
from engine.contract import (
    ContractError,
    generator_fault,
    guarded_edit,
    guarded_read,
    guarded_report,
    is_ours,
    report_fault,
    request_fault,
    result_fault,
    tokens_fault,
)
from engine.errors import KVMemoryError, NumericsError
from engine.few import Few, Head
from engine.interrupts import uninterrupted
from engine.logprobs import Kept
from engine.packing import Blank, Chunk, Pass, pack
from engine.phases import PhaseObserver, observed_read, phase
from engine.pool import PagePool
from engine.requests import Answer, Evaluate, Read, Report, Search, SearchGenerator, SearchResult
from engine.slots import Trunk
from engine.threads import MACHINE
from engine.timing import Overlap, PassTime
from engine.trace import Trace
from engine.tree import TokenTree
from kernels.rows import best_sums_of, log_softmax
from kernels.rows.checks import Wanted
from kernels.stack import one_by_one
from models.sharding import Gathered

Part = tuple[slice, Read | Wanted]  # a range of the rows asked for, and what reads it, or what is wanted of it
Keep = tuple[slice, Callable[[Tensor], None]]  # a range of a pass's tokens, and what gets their hidden rows
Answers = tuple[Tensor, list[bool], list[Tensor]]
Ready = Callable[[Pass], None]  # gets a pass's inputs on the device


class Inputs:
    """The inputs of a pass on the device, what is written into them there, and when a GPU began with it."""

    def __init__(self, device: torch.device, fill: Ready | None):
        self.fill = fill
        self.ancestry_TC = torch.empty(0, 0)
        self.begun = _now() if device.type == "cuda" else None

    def __call__(self, inputs: Pass) -> None:
        self.ancestry_TC = inputs.layout.ancestry_TC
        if self.fill is not None:
            self.fill(inputs)


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Launched:
    """A pass that a GPU has begun with; on a CPU it is done.

    Args:
        logp_NV, finite_N, numbers: see `Runner.evaluate`, on the device.
        inputs: of the pass, on a GPU; to be read before the next pass of the runner is launched.

    Attributes:
        waited: seconds that the host waited.
    """

    def __init__(
        self,
        logp_NV: Tensor,
        finite_N: Tensor | None,
        numbers: list[Tensor],
        inputs: Inputs | None,
    ):
        self.logp_NV, self.finite_N, self.numbers, self.inputs = logp_NV, finite_N, numbers, inputs
        self.told: Tensor | None = None
        self.waited = 0.0
        self.done: torch.cuda.Event | None = None
        if numbers and finite_N is not None:
            told = torch.cat([finite_N.double(), *numbers])
            if told.is_cuda:
                self.told = torch.empty(told.shape, dtype=told.dtype, pin_memory=True).copy_(told, non_blocking=True)
                self.done = _now()
            else:
                self.told = told

    def land(self) -> Answers:
        """The answers of the pass; the only time in a step that the host waits for a GPU."""
        if self.finite_N is None:
            return self.logp_NV, [], []
        if self.told is None:
            return self.logp_NV, self.finite_N.tolist(), []
        began = time.perf_counter()
        if self.done is not None:
            self.done.synchronize()
        told = self.told.cpu()
        self.waited = time.perf_counter() - began
        finite_N, *numbers = told.split([len(self.finite_N), *(len(part) for part in self.numbers)])
        return self.logp_NV, [x == 1 for x in finite_N.tolist()], numbers

    @property
    def seconds(self) -> float:
        """Of the device, once it has landed; 0 on a CPU."""
        begun = None if self.inputs is None else self.inputs.begun
        return 0.0 if begun is None or self.done is None else begun.elapsed_time(self.done) / 1000


class Runner:
    """One model with its pool: evaluates chunks of trees.

    Args:
        model: `forward(tokens_T, positions_T, spans_T, cache, layout) -> hidden_TE`, `logits(hidden_NE)` and `shape`.
        pool: the model's KV cache.
        vocab_size: tokens that exist; later ids (a padded vocabulary) get log-probability -inf.
        budget: most tokens per pass; longer prompts go in chunks.
        impl, rows, token_buckets, word_buckets: see `pack`; buckets are for compiled models.
        dtype: of the model; None: the cache's.
    """

    def __init__(
        self,
        model,
        pool: PagePool,
        vocab_size: int,
        *,
        budget: int = 256,
        impl: str = "torch",
        token_buckets: Sequence[int] | None = None,
        word_buckets: Sequence[int] | None = None,
        rows: str | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.model, self.pool, self.vocab_size, self.budget = model, pool, vocab_size, budget
        self.impl, self.rows, self.token_buckets, self.word_buckets = impl, rows, token_buckets, word_buckets
        self.device, self.dtype = pool.cache.k_LGSD.device, dtype or pool.cache.k_LGSD.dtype
        self.asynchronous = self.device.type == "cuda"
        self.head = Head(model, vocab_size, impl)
        self.time, self.overlap = PassTime(), Overlap()
        self.observer: PhaseObserver | None = None

    def forward(self, chunks: Sequence[Chunk], ready: Ready | None = None) -> Tensor:
        """Pack and run the model: hidden rows of every token of the pass.

        Args:
            ready: is called with the inputs when they are on the device.
        """
        options = {"impl": self.impl, "rows": self.rows, "ancestors": self.pool.ancestors}
        options |= {"token_buckets": self.token_buckets, "word_buckets": self.word_buckets}
        with phase(self.observer, "pack"):
            p = pack(chunks, self.pool.page_size, self.device, **options)
        if ready is not None:
            ready(p)
        with phase(self.observer, "forward"):
            return self.model.forward(p.tokens_T, p.layout.positions_T, p.spans_T, self.pool.cache, p.layout)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits after every token of a sequence, evaluated afresh: float32 [len(ids), V]."""
        tree, rows = TokenTree(self.pool, ids), []
        try:
            with torch.inference_mode():
                for start in range(0, len(ids), self.budget):
                    n = min(self.budget, len(ids) - start)
                    hidden_TE = self.forward([Chunk(tree, n, [], tree.allocate(n, []))])
                    rows.append(self.model.logits(hidden_TE[:n]).float())
        finally:
            tree.release()
        return torch.cat(rows)  # outside of inference mode: callers may write to it

    def evaluate(
        self,
        chunks: Sequence[Chunk],
        asked: Sequence[int],
        reads: Sequence[Part] = (),
        edits: Sequence[Edit] = (),
        keeps: Sequence[Keep] = (),
    ) -> Answers:
        """One forward pass.

        Args:
            chunks: parts of trees whose slots are allocated.
            asked: rows of the pass whose next-token log-probabilities are wanted.
            reads: functions that read ranges of these rows, or best sums that are wanted of them, see `Evaluate`.
            edits: functions that edit ranges of these rows before they are read.
            keeps: functions that get the hidden rows of ranges of the pass's tokens, and must copy what they keep.

        Returns:
            float32 log-probabilities [len(asked), V] (scores [len(asked), 1] of a scalar-head model), for each row
            whether all of its logits were finite, and the numbers of each read, on the host.
        """
        return self.launch(chunks, asked, reads, edits, keeps).land()

    def launch(
        self,
        chunks: Sequence[Chunk],
        asked: Sequence[int],
        reads: Sequence[Part] = (),
        edits: Sequence[Edit] = (),
        keeps: Sequence[Keep] = (),
        fill: Ready | None = None,
    ) -> Launched:
        """As `evaluate`, but a GPU is not waited for.

        Args:
            fill: writes what only the device knows into the inputs, see `engine.ahead`.
        """
        inputs = Inputs(self.device, fill) if self.asynchronous else None
        rows_NE = self._rows(chunks, asked, keeps, inputs)
        if not asked:
            return Launched(torch.empty(0, 0), None, [], inputs)
        answers = self.answer(rows_NE, edits) if edits else self.answer(rows_NE)
        return self.read(*answers, reads, inputs)

    def read(
        self, logp_NV: Tensor, finite_N: Tensor, peaks_NB: Tensor | None, reads: Sequence[Part], inputs: "Inputs | None"
    ) -> Launched:
        """The reads of a pass that is launched."""
        with phase(self.observer, "fetch"):
            sums, made = iter(self._sums(logp_NV, peaks_NB, reads)), []
            for rows, read in reads:
                if isinstance(read, Wanted):
                    made.append(next(sums))
                else:
                    made.append(read(logp_NV[rows], None if peaks_NB is None else peaks_NB[rows]))
            return Launched(logp_NV, finite_N, made, inputs)

    def evaluate_few(
        self, chunks: Sequence[Chunk], asked: Sequence[int], parts: Sequence[Few], keeps: Sequence[Keep] = ()
    ) -> tuple[list[Tensor], list[bool]]:
        """One forward pass on a CPU, for log-probabilities of few tokens alone; see `Head.logps`.

        Args:
            chunks, asked, keeps: as of `evaluate`.
            parts: the tokens, of the rows asked for, in their order.
        """
        rows_NE = self._rows(chunks, asked, keeps)
        with phase(self.observer, "logits"):
            return self.head.logps(rows_NE, parts)

    @property
    def gathers(self) -> bool:
        """Whether rows have to be gathered from several processes; the best sums of rows do not."""
        return isinstance(getattr(self.model, "head", None), Gathered)

    def evaluate_best(
        self, chunks: Sequence[Chunk], asked: Sequence[int], bests: Sequence[Best], keeps: Sequence[Keep] = ()
    ) -> tuple[list[Found], list[bool]]:
        """One forward pass, for the best sums of rows that nobody gathers; and for each row whether it is finite.

        Args:
            chunks, asked, keeps: as of `evaluate`.
            bests: what is wanted, of the rows asked for, in their order.
        """
        rows_NE, head, V = self._rows(chunks, asked, keeps), self.model.head, self.model.shape.vocab_size
        with phase(self.observer, "logits"):
            logits_Nv = self.model.logits(rows_NE, head.own)
        with phase(self.observer, "log-softmax"):
            logp_Nv, finite_N = head.log_softmax(logits_Nv, self.vocab_size)
        with phase(self.observer, "fetch"):
            founds, v = [], len(head.tokens)
            for part_Nv, best in zip(logp_Nv.split([len(best.sums) for best in bests]), bests, strict=True):
                values, places = of_all(part_Nv, None, best)
                founds.append(Found(values, places // v * V + places % v + head.tokens.start))
            return of_shards(head.shard, founds, bests), finite_N.tolist()

    def _rows(
        self, chunks: Sequence[Chunk], asked: Sequence[int], keeps: Sequence[Keep], ready: Ready | None = None
    ) -> Tensor:
        """Hidden rows of the tokens asked for."""
        hidden_TE = self.forward(chunks) if ready is None else self.forward(chunks, ready)
        for rows, keep in keeps:
            keep(hidden_TE[rows])
        if len(asked) == len(hidden_TE):
            return hidden_TE
        return hidden_TE[torch.tensor(asked, dtype=torch.int64).to(self.device, non_blocking=True)]

    def _sums(self, logp_NV: Tensor, peaks_NB: Tensor | None, reads: Sequence[Part]) -> list[Tensor]:
        """The best sums that are wanted of a pass, all searches' by one launch on a GPU; on the device."""
        wanted = [read for _, read in reads if isinstance(read, Wanted)]
        if not wanted:
            return []
        with phase(self.observer, "search"):
            return best_sums_of(logp_NV, wanted, peaks_NB, impl="triton" if self.impl == "triton" else None)

    def answer(self, hidden_NE: Tensor, edits: Sequence[Edit] = ()) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities (or scores) of hidden rows, whether each row is finite, and peaks, on the device.

        Edited rows have no peaks, and the others of their pass have none either.
        """
        with phase(self.observer, "logits"):
            logits_NV = self.model.logits(hidden_NE)
        if logits_NV.shape[1] == 1:
            return logits_NV.float(), torch.isfinite(logits_NV).all(-1), None
        with phase(self.observer, "log-softmax"):
            answers = log_softmax(logits_NV, self.vocab_size, impl=self.impl)
        if not edits:
            return answers
        return self.edited(answers[0], answers[1], edits, logits_NV)

    def edited(
        self, logp_NV: Tensor, finite_N: Tensor, edits: Sequence[Edit], logits_NV: Tensor | None = None
    ) -> tuple[Tensor, Tensor, None]:
        """Rows after edits in place, and no peaks."""
        with phase(self.observer, "edit"):
            for edit in edits:
                excess_N1 = None
                if edit.logits and logits_NV is not None:
                    excess_N1 = logits_NV[edit.rows, :1].float() - logp_NV[edit.rows, :1]
                edit.apply(logp_NV[edit.rows], excess_N1)
        return logp_NV, finite_N, None

    def blame(self, chunk: Chunk) -> str:
        """The first place of NaN or Inf in a pass: the chunk is evaluated once more, layer by layer."""
        bad: list[str] = []

        def watch(name: str, x: Tensor | tuple[Tensor, ...]) -> None:
            x = x[0] if isinstance(x, tuple) else x  # the stream
            if not bad and not torch.isfinite(x).all():
                bad.append(name)

        layers = self.model.layers
        hooks = [layers[0].register_forward_pre_hook(lambda _, args: watch("in the embedding", args[0]))]
        for i, layer in enumerate(layers, 1):
            name = f"in layer {i} of {len(layers)}"
            hooks.append(layer.register_forward_hook(lambda _, args, out, name=name: watch(name, out)))
        try:
            with one_by_one(self.model):
                self.forward([chunk])
        finally:
            for hook in hooks:
                hook.remove()
        return bad[0] if bad else "after the last layer"


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


class Driver:
    """Runs searches to their end, step by step.

    Args:
        runners: by model name; "target" first.
        parallel: most searches at once.
        observer: is notified of the phases of each step.
    """

    def __init__(self, runners: dict[str, Runner], parallel: int = 16, observer: PhaseObserver | None = None):
        self.runners, self.parallel, self.observer = runners, parallel, observer
        for runner in runners.values():
            runner.observer = observer
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.work: dict[str, Work] = {name: Work() for name in runners}  # of all searches together
        self._crowded = False  # a search was preempted: none starts before another one ends
        self._landed = 0.0  # when the latest answer of a GPU was read
        self.under_way: dict[str, Batch] = {}  # by model: a pass that a GPU has begun with

    def submit(self, job: Job) -> Job:
        """Queue a search."""
        self.waiting.append(job)
        return job

    def open_tree(self, job: Job, model: str, prompt: Sequence[int], expected: int = 0, trunk: Trunk | None = None):
        """Make a tree that is freed with the job."""
        if model not in self.runners:
            raise ContractError(
                f"open_tree: expected one of {', '.join(self.runners)}, the models that are loaded, got {model!r}; "
                "a search names the models it needs in its attribute `models`"
            )
        runner = self.runners[model]
        switch = runner.model.shape.switch_length
        tree = TokenTree(runner.pool, prompt, expected=expected, trunk=trunk, switch_length=switch)
        job.trees.append(tree)
        tree.salt = job.salt
        if runner.pool.prefixes is not None:
            tree.use_rope(switch is not None and len(prompt) > switch)
            tree.reuse()
        if job.constrained is not None and (len(job.trees) == 1 or model == "draft"):
            job.constrained.watch(tree)
        if job.trace is not None:
            job.trace.watch(tree, model)
        return tree

    def spare(self, job: Job, pool: PagePool) -> int:
        """How many more pages of a pool a search could take if this driver ran no other."""
        others = [t for other in self.running if other is not job for t in other.trees if t.pool is pool]
        if pool.prefixes is None:
            return pool.free_pages + sum(tree.page_count for tree in others)
        held = {page for tree in others for page in tree.pages_held}  # each once, though several trees may hold it
        return pool.free_pages + len(held.difference(*(tree.pages_held for tree in job.trees if tree.pool is pool)))

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @torch.inference_mode()
    def step(self) -> None:
        """Start searches, evaluate once per model, resume every search whose answer is complete."""
        watch = partial(phase, self.observer)
        # What is compiled is so for one number of threads; processes that share a model have to round alike.
        steady = any(runner.token_buckets or runner.gathers for runner in self.runners.values())
        with uninterrupted(), contextlib.nullcontext() if steady else MACHINE.limited(), watch("step"):
            try:
                with watch("admit"):
                    self._admit()
                for name, runner in self.runners.items():
                    self._turn(name, runner)
            except KeyboardInterrupt:  # a tree may have slots that are allocated and were not written
                for job in self.running:
                    job.retire = None
                    for tree in job.trees:
                        tree.salt = None
                raise

    def _turn(self, model: str, runner: Runner) -> None:
        """Evaluate one pass of a model; on a GPU, begin with the next one before the answer of this one is read."""
        watch, batch, after = partial(phase, self.observer), self.under_way.pop(model, None), None
        began = time.perf_counter()
        if batch is None or not batch.leave(self.running):
            batch = self._begun(model, runner)
        try:
            if batch.launched is not None:
                after = self._look_ahead(batch) or self._beside(batch)
                batch.leave(self.running)
            if batch.shares:
                with watch("run", batch) if batch.launched is None else watch("wait"):
                    rows = self._run(batch)
                with watch("commit", batch):
                    self._commit(batch, *rows)
                    if after is not None:
                        self._adopt(after)
        except BaseException:
            for job in self.running:
                for tree in job.trees:
                    tree.give_up()
            raise
        if after is not None and after.shares:
            self.under_way[model] = after
        if batch.launched is not None and batch.shares and batch.launched.seconds:
            host = time.perf_counter() - began - batch.launched.waited
            runner.overlap.note(host, batch.launched.seconds, len(batch.shares))

    def stop(self, job: Job, result: SearchResult) -> None:
        """End a search early, with this result."""
        with uninterrupted():
            self._end(job, result=result)

    def cancel(self, job: Job) -> None:
        """Abandon a search, running or not; its pages return to their pools now."""
        if job in self.waiting:
            self.waiting.remove(job)
        elif job in self.running:
            with uninterrupted():
                self._end(job)

    def close(self) -> None:
        """Abandon all jobs and return all pages to their pools."""
        self.waiting.clear()
        self.under_way.clear()
        with uninterrupted(), contextlib.ExitStack() as stack:  # ends all jobs even if one of them raises
            for job in self.running:
                stack.callback(self._end, job)

    # --- one step ---

    def _admit(self) -> None:
        """Start the searches that there is room for."""
        while self.waiting and len(self.running) < self.parallel and not self._crowded:
            self._begin(self.waiting.pop(0))

    def _begun(self, model: str, runner: Runner, beside: Batch | None = None) -> Batch:
        """A model's next pass; a GPU has begun with it.

        Args:
            beside: a pass under way, whose searches wait for it.
        """
        with phase(self.observer, "schedule"):
            batch = self._schedule(model, runner, beside)
        if batch.shares and runner.asynchronous:
            with phase(self.observer, "run", batch), self._released_if_failed(batch):
                chunks = [share.chunk for share in batch.shares]
                batch.launched = runner.launch(chunks, batch.asked, batch.reads, batch.edits, batch.keeps)
        return batch

    def _look_ahead(self, batch: Batch) -> Batch | None:
        """Launch what the searches will most likely ask for after a pass; None unless all that run have told."""
        runner, launched, nexts = batch.runner, batch.launched, [share.next for share in batch.shares]
        after = Batch(batch.model, runner, time.perf_counter())
        assert launched is not None and launched.inputs is not None, "a CPU does not look ahead"
        if len(nexts) < len(self.running) or sum(next.width if next else math.inf for next in nexts) > runner.budget:
            return None
        choices = []
        try:
            for share, numbers in zip(batch.readers, launched.numbers, strict=True):
                if share is not None and (guess := share.guess(numbers, batch.asked[share.rows])) is not None:
                    choices.append(choose(numbers, guess, share.pending.width))
                    after.guess(share, guess, choices[-1])
        except KVMemoryError:
            choices.clear()
        if len(choices) < len(batch.shares):
            after.give_up()
            return None
        guesses = [guess for _, guess, _ in after.guesses]
        with phase(self.observer, "run", after):
            fill = Fill(guesses, choices, launched.inputs.ancestry_TC)
            after.launched = runner.launch([guess.chunk for guess in guesses], after.asked, after.reads, fill=fill)
        return after

    def _adopt(self, after: Batch) -> None:
        """Keep the part of a pass that was guessed right, now that the searches have asked."""
        for before, guess, rows in after.guesses:
            share = before.follows(guess, rows) if before.job in self.running else None
            after.readers.append(share)
            if share is None:
                guess.chunk.tree.give_up()
            else:
                after.shares.append(share)

    def _beside(self, batch: Batch) -> Batch | None:
        """Launch a pass of the searches that wait for none, if that hides the host's work; see `Overlap`."""
        if not batch.runner.overlap.helps(len(self.running)):
            return None
        other = self._begun(batch.model, batch.runner, batch)
        return other if other.shares else None

    def _schedule(self, model: str, runner: Runner, beside: Batch | None = None) -> Batch:
        """Choose the tokens of a model's next pass, and take slots for them.

        Short requests come first: others decode while a long prompt fills the rest of the budget.
        """
        batch = Batch(model, runner, time.perf_counter())
        jobs = [job for job in self.running if job.pending and job.pending.request.tree.pool is runner.pool]
        if beside is not None:
            theirs = {id(share.job) for share in beside.shares}
            jobs = [job for job in jobs if id(job) not in theirs]
        elif runner.overlap.helps(len(jobs)) and not all(job.next for job in jobs):
            jobs = jobs[: -(-len(jobs) // 2)]  # the others take turns with these
        room, chosen = runner.budget, []
        for job in sorted(jobs, key=lambda job: job.pending.left if job.pending else 0):
            if room and job in self.running and (chunk := self._allocate(job, room)) is not None:
                chosen.append((job, chunk))
                room -= len(chunk)
        for job, chunk in chosen:
            if job in self.running and job.pending:  # it was not preempted since
                batch.add(job, chunk)
        return batch

    def _run(self, batch: Batch) -> tuple[Tensor, list[bool]]:
        """Evaluate a batch: rows, and whether each is finite. If that fails, its slots are released."""
        shares, runner, began = batch.shares, batch.runner, time.perf_counter()
        with self._released_if_failed(batch):
            logp_NV, finite = self._evaluate(batch)
        now = time.perf_counter()
        if batch.launched is not None:
            began = batch.began = max(batch.began, self._landed)
            self._landed = now
        if all(share.chunk.trunk_tokens <= 1 for share in shares):  # `PassTime` excludes prompts
            runner.time.note(batch.tokens, now - batch.began)
        for share in shares:
            tokens = len(share.chunk)
            share.job.batch_load = batch.tokens - tokens, len(shares) - 1
            share.job.work.setdefault(batch.model, Work()).add(tokens, now - began)
        self.work[batch.model].add(batch.tokens, now - began)
        return logp_NV, finite

    @staticmethod
    @contextlib.contextmanager
    def _released_if_failed(batch: Batch) -> Iterator[None]:
        """Releases the slots of a pass that fails."""
        try:
            yield
        except BaseException:
            for chunk in (share.chunk for share in batch.shares):
                chunk.tree.release_slots(chunk.trunk_tokens, chunk.nodes)
            raise

    @staticmethod
    def _evaluate(batch: Batch) -> tuple[Tensor, list[bool]]:
        """As `_run`; no rows if only the few tokens that constraints allow were evaluated, or only the best sums of
        rows that would have to be gathered."""
        runner, asked = batch.runner, batch.asked
        if batch.launched is not None:
            return batch.take(*batch.launched.land())
        chunks, answered = [share.chunk for share in batch.shares], [share for share in batch.shares if share.nodes]
        few = [share.few for share in answered] if runner.device.type == "cpu" else []
        if parts := [part for part in few if part is not None] if None not in few else []:
            logps, finite = runner.evaluate_few(chunks, asked, parts, batch.keeps)
            with phase(runner.observer, "search"):
                for share, part, logp_M in zip(answered, parts, logps, strict=True):
                    share.take_few(part, logp_M)
            return torch.empty(0, 0), finite
        bests = [share.best for share in answered] if runner.gathers else []
        if wanted := [best for best in bests if best is not None] if None not in bests else []:
            founds, finite = runner.evaluate_best(chunks, asked, wanted, batch.keeps)
            for share, found in zip(answered, founds, strict=True):
                share.pending.found(found, share.nodes)
            return torch.empty(0, 0), finite
        return batch.take(*runner.evaluate(chunks, asked, batch.reads, batch.edits, batch.keeps))

    def _commit(self, batch: Batch, logp_NV: Tensor, finite: list[bool]) -> None:
        """Distribute the rows; resume each search whose request is complete."""
        for share in batch.shares:
            job, pending = share.job, share.pending
            if not all(finite[share.rows]):
                self._resume(job, error=self._not_finite(batch.runner, share))
                continue
            tree = share.chunk.tree
            if share.chunk.trunk_tokens > 1 and tree.trunk.cached <= tree.prompt_length:
                tree.save(whole=True)  # others that wait with the same prompt need not read it
            if share.nodes:
                pending.answered += share.nodes
                if pending.parts is None:
                    pending.rows.append(logp_NV[share.rows])
                if job.trace is not None:
                    job.trace.answered(share.chunk.tree, share.nodes, logp_NV[share.rows])
            if pending.left:
                continue
            if pending.by_rope:
                pending.begin()
            else:
                self._resume(job, answer=pending.answer())

    @staticmethod
    def _not_finite(runner: Runner, share: Share) -> NumericsError:
        request = share.pending.request
        if runner.pool.prefixes is not None:  # it may be the keys and values that are not finite
            runner.pool.prefixes.clear()
        position = request.tree.position(request.nodes[0]) + 1
        return NumericsError(
            "the model computed NaN or Inf",
            where=f"{runner.blame(share.chunk)}, at token {position} of the sequence",
            remedy="try --dtype float32, or check the weights",
        )

    def _allocate(self, job: Job, room: int) -> Chunk | None:
        """Take slots for as much of the job's request as there is room for; None if the pool is full."""
        pending = job.pending
        assert pending is not None
        tree = pending.request.tree
        if pending.trunk_left > 1 and tree.trunk.cached < tree.prompt_length - 1 and job.trace is None:
            pending.trunk_left -= tree.reuse()  # another request may have read the same since
        trunk = min(pending.trunk_left, room)
        nodes = pending.nodes_left[: room - trunk] if trunk == pending.trunk_left else []
        while True:
            try:
                slots = tree.allocate(trunk, nodes)
                break
            except KVMemoryError as error:
                youngest = self.running[-1]
                if youngest is self.running[0]:
                    error.where = f"with {tree.live_tokens} live tokens, and {trunk + len(nodes)} more to evaluate"
                    # The search may ask for any of them again.
                    tree.release_slots(pending.trunk_allocated, pending.nodes_allocated)
                    self._resume(job, error=error)
                    return None
                self._preempt(youngest)
                if youngest is job:
                    return None
        pending.allocated(trunk, nodes)
        return Chunk(tree, trunk, nodes, slots)

    # --- the life of a job ---

    def _begin(self, job: Job) -> None:
        self.running.append(job)
        job.started = time.perf_counter()
        try:
            generator = job.start(job)
            if wrong := generator_fault(generator):
                raise ContractError(wrong)
            job.generator = generator
        except Exception as error:
            self._end(job, error=error)
            return
        self._resume(job)

    def _resume(self, job: Job, answer: Any = None, error: Exception | None = None) -> None:
        """Run the search to its next Evaluate, or to its end."""
        generator = job.generator
        assert generator is not None
        job.pending = None
        if answer is not None and not job.prefilled and "target" in job.work:  # a draft may be asked first
            job.prefilled = time.perf_counter()
        try:
            while True:
                if job.trace is not None:
                    job.trace.resume()
                if job.fault is not None:
                    raise job.fault
                with phase(self.observer, "search"):
                    request = generator.throw(error) if error is not None else generator.send(answer)
                request = self._request(job, request)
                pending, plan = self._pending(job, request)
                job.pending = pending
                if pending.by_rope:
                    pending.begin()
                if job.trace is not None:
                    job.trace.asked(request)
                if plan is not None and plan.known:
                    pending.know(plan, self._runner(request).device, job.trace)
                if pending.left:
                    break
                error, answer, job.pending = None, pending.answer(), None
        except StopIteration as stop:
            wrong = result_fault(stop.value, self.runners["target"].vocab_size if job.foreign else None)
            if wrong:
                self._end(job, error=ContractError(wrong))
            else:
                self._end(job, result=stop.value)
        except Exception as failure:
            self._end(job, error=failure)
        finally:
            del error  # its traceback refers to this frame

    def _request(self, job: Job, request: Any) -> Evaluate:
        """The search's next Evaluate, after the reports before it are processed. Raises ContractError."""
        assert job.generator is not None
        fail = partial(setattr, job, "fault")
        while isinstance(request, Report):
            if wrong := report_fault(request):
                self._refuse(job, wrong)
            if job.foreign:
                request = guarded_report(request, fail)
            job.settled += request.settled
            job.report = request
            if job.trace is not None:
                job.trace.reported(request)
            with phase(self.observer, "search"):
                request = job.generator.send(None)
        knows = job.constrained.knows if job.constrained is not None else None
        if wrong := request_fault(request, job.trees, knows) or (job.foreign and self._wrong_tokens(request)):
            self._refuse(job, wrong)
        if self.observer is not None and request.read is not None:
            request = replace(request, read=observed_read(self.observer, request.read))
        return guarded_read(request, fail) if job.foreign else request

    def _pending(self, job: Job, request: Evaluate) -> tuple[Pending, Plan | None]:
        """The work of a request, and a constraint's plan of it. Raises ConstraintError."""
        tree, constrained = request.tree, job.constrained
        width = self._runner(request).model.shape.vocab_size
        if constrained is None or not constrained.watches(tree):
            return Pending(request, tree.by_rope(request.nodes), width=width), None
        plan = constrained.plan(tree, request.nodes)
        groups = tree.by_rope([*plan.asked, *plan.ahead]) if plan.asked else []
        return Pending(request, groups, constrained, width=width), plan

    def _runner(self, request: Evaluate) -> Runner:
        return next(r for r in self.runners.values() if r.pool is request.tree.pool)

    @staticmethod
    def _refuse(job: Job, wrong: str) -> NoReturn:
        """Raise a ContractError, first at the search's `yield`, so that the traceback has that line, and then here."""
        fault = ContractError(wrong)
        assert job.generator is not None
        with contextlib.suppress(Exception):  # the search may catch it; the job ends nonetheless
            job.generator.throw(fault)
        raise fault

    def _wrong_tokens(self, request: Evaluate) -> str:
        shape = self._runner(request).model.shape
        return tokens_fault(request, shape.vocab_size, shape.max_positions)

    def _end(self, job: Job, result: SearchResult | None = None, error: Exception | None = None) -> None:
        try:
            try:
                if job.generator is not None:
                    job.generator.close()
            except Exception as failure:  # of the search, while it was closed
                result, error = None, error or failure
            if result is not None:
                result.stats = self._stats(job) | result.stats
            if job.trace is not None:
                job.trace.finish(result, error)
            if job.trees and error is None:
                self._leave(job, job.settled if result is None else result.outputs[0].token_ids)
        finally:
            for tree in job.trees:
                tree.release()
                if tree.pool.prefixes is not None:
                    tree.pool.prefixes.trim()
            job.result, job.error, job.pending = result, error, None
            # The report's functions refer to the search, and it to its job: a cycle, which keeps the model in memory.
            job.generator, job.report = None, Report(info=job.report.info)
            if job in self.running:
                self.running.remove(job)
            self._crowded = False

    @staticmethod
    def _leave(job: Job, best: Sequence[int]) -> None:
        """Leave the trunks of a search that has ended to the caches of prefixes, and the target's to `Job.retire`."""
        tree, prefixes = job.trees[0], job.trees[0].pool.prefixes
        caches = prefixes is not None and tree.salt is not None
        if job.retire or caches:
            with contextlib.suppress(MemoryError, RuntimeError):  # no memory for the copy: the trunk as it was
                tree.keep([tree.descend(best)])  # the evaluated part of the answer joins the trunk
        if prefixes is not None and caches:
            prefixes.note(tree.prompt_length, tree.reused)
        for each in job.trees:
            each.save()
        if job.retire:
            job.retire(tree)

    def _preempt(self, job: Job) -> None:
        """Free the pages of a search for those before it; it starts again, to the same result, when one has ended."""
        assert job.generator is not None
        try:
            job.generator.close()
        except Exception as failure:
            self._end(job, error=failure)
            return
        for tree in job.trees:
            tree.release()
        self.running.remove(job)
        job.trees, job.generator, job.pending, job.settled, job.report = [], None, None, [], Report()
        job.work, job.fault = {}, None
        if job.constrained is not None:
            job.constrained.restart()
        if job.kept is not None:
            job.kept.restart()
        job.prefilled = 0.0
        if job.trace is not None:
            job.trace.restart()
        self.waiting.insert(0, job)
        self._crowded = True

    def _stats(self, job: Job) -> dict:
        target = job.trees[0]
        now = time.perf_counter()
        prefilled = job.prefilled or now  # it was interrupted before
        work = {name: job.work.get(name, Work()) for name in {"target": None, **job.work}}
        mine = work.pop("target")
        others: dict[str, Any] = {"target_seconds": mine.seconds} if work else {}
        for name, done in work.items():
            others[f"{name}_forward_passes"] = done.passes
            others[f"{name}_nodes_evaluated"] = done.tokens
            others[f"{name}_seconds"] = done.seconds
            pool = self.runners[name].pool
            others[f"{name}_live_nodes_peak"] = max(t.peak_live for t in job.trees if t.pool is pool)
        return {
            "prompt_tokens": target.prompt_length,
            "reused_tokens": target.reused,
            "forward_passes": mine.passes,
            "nodes_evaluated": max(0, mine.tokens - (target.prompt_length - target.reused - 1)),
            "prefill_seconds": prefilled - job.started,
            "decode_seconds": now - prefilled,
            "kv_bytes_peak": sum(t.peak_pages * t.pool.page_bytes for t in job.trees),
            "kv_bytes_per_token": target.pool.bytes_per_token,
            "live_nodes_peak": target.peak_live,
            "unshared_nodes_peak": target.peak_unshared,
            **others,
        }

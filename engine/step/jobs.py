"""The driver's work: the jobs of searches, their shares of forward passes, and the batches of shares."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from engine.cache.pool import PagePool
from engine.cache.slots import Trunk
from engine.cache.tree import TokenTree
from engine.contract import Report, Search, SearchGenerator, SearchResult, TakeHidden
from engine.contract.checks import guarded, is_ours
from engine.contract.top_sums import FoundSums, TopSums
from engine.contract.trace import UNTRACED, Trace, Untraced
from engine.rules.constrained import Constrained, Edit
from engine.rules.logprobs import HiddenRows
from engine.step.drafting import SPARE, BestOfRow, JobDrafts
from engine.step.packing import Chunk
from engine.step.partial import Pending
from engine.step.runner import Keep, Part, PassWork, Rows, Runner

Strategy = Callable[["Batch"], Rows]
NEVER = 1 << 30  # passes: more than any search has missed


@dataclass
class Work:
    """The work of a model for a search; `seconds` include the full time of passes shared with other searches."""

    passes: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count a pass."""
        self.passes += 1
        self.tokens += tokens
        self.seconds += seconds


@dataclass(eq=False)
class Job:
    """A request while the driver works on it."""

    start: Callable[["Job"], SearchGenerator]
    settled: list[int] = field(default_factory=list)  # new tokens that are certain
    report: Report = field(default_factory=Report)  # the latest
    retire: Callable[[Trunk], None] | None = None  # receives the target tree's trunk at the end, which is not freed
    trees: list[TokenTree] = field(default_factory=list)
    generator: SearchGenerator | None = None
    pending: Pending | None = None
    batch_load: tuple[int, int] = (0, 0)  # other searches in its latest pass: their tokens, their number
    result: SearchResult | None = None
    error: BaseException | None = None
    work: dict[str, "Work"] = field(default_factory=dict)  # by model
    held_peak: int = 0  # most bytes that its trees held together in a pass
    trace: Trace | Untraced = UNTRACED
    started: float = 0.0
    prefilled: float = 0.0
    constrained: Constrained | None = None
    salt: str | None = None  # the salt of cached prefixes, see `TokenTree`
    adapter: int = 0  # the number of the target's adapter; 0: none
    client: str = ""  # the client that made the request
    missed: int = NEVER  # passes since it had a part in one
    gave_way: int = 0  # times that it was preempted
    gave_way_to: list["Job"] = field(default_factory=list)  # it waits for one of them to end
    drafts: JobDrafts | None = None  # None: its passes evaluate no drafts
    kept: HiddenRows | None = None  # None unless the request wants log-probabilities of tokens
    search: Search | None = None  # a search that is not this project's is checked more closely; None is trusted
    fault: Exception | None = None  # raised by a function of a Report or an Evaluate; it ends the job at its next step

    def __post_init__(self):
        self.foreign = self.search is not None and not is_ours(type(self.search))

    @property
    def done(self) -> bool:
        return self.result is not None or self.error is not None

    def has_row(self, tree: TokenTree, node: int) -> bool:
        """Whether the row of a node is known, so that the search may ask for it although it is already evaluated."""
        return tree.has_row(node) or (self.constrained is not None and self.constrained.states.has_row(tree, node))

    @property
    def traced(self) -> bool:
        return self.trace is not UNTRACED

    def restart(self) -> None:
        """Forget the work of a search that starts again; its trees have been released."""
        self.trees, self.generator, self.pending, self.settled, self.report = [], None, None, [], Report()
        self.work, self.fault, self.prefilled, self.held_peak = {}, None, 0.0, 0
        for part in (self.constrained, self.kept, self.drafts, self.trace):
            if part is not None:
                part.restart()

    def note_held(self) -> None:
        """Record what its trees hold during a pass. They need not live at the same time, so their peaks do not add up;
        a single tree records its own."""
        if len(self.trees) > 1:
            self.held_peak = max(self.held_peak, sum(tree.held_bytes for tree in self.trees))

    def stats(self, pools: Mapping[str, PagePool]) -> dict[str, Any]:
        """The statistics of the work so far, see docs/stats.md.

        Args:
            pools: the pools by model.
        """
        target = self.trees[0]
        now = time.perf_counter()
        prefilled = self.prefilled or now  # it was interrupted before
        work = {name: self.work.get(name, Work()) for name in {"target": None, **self.work}}
        mine = work.pop("target")
        others: dict[str, Any] = {"target_seconds": mine.seconds} if work else {}
        for name, done in work.items():
            others[f"{name}_forward_passes"] = done.passes
            others[f"{name}_nodes_evaluated"] = done.tokens
            others[f"{name}_seconds"] = done.seconds
            peaks = [t.peak_live for t in self.trees if t.pool is pools[name]]
            others[f"{name}_live_nodes_peak"] = max(peaks, default=0)
        alone = [tree.peak_pages * tree.pool.page_bytes + tree.peak_state_bytes for tree in self.trees]
        return {
            "prompt_tokens": target.prompt_length,
            "reused_tokens": target.reused,
            "forward_passes": mine.passes,
            "nodes_evaluated": max(0, mine.tokens - (target.prompt_length - target.reused - 1)),
            "prefill_seconds": prefilled - self.started,
            "decode_seconds": now - prefilled,
            "kv_bytes_peak": max(self.held_peak, *alone),
            "kv_bytes_per_token": target.pool.bytes_per_token,
            "live_nodes_peak": target.peak_live,
            "unshared_nodes_peak": target.peak_unshared,
            **(self.drafts.stats() if self.drafts is not None else {}),
            **others,
        }


@dataclass
class Share:
    """One request's part of a pass: its tokens, its nodes with their rows in the answer, and the rows of its drafts."""

    job: Job
    pending: Pending
    chunk: Chunk
    nodes: list[int]
    rows: slice
    draft_rows: slice = field(default_factory=lambda: slice(0, 0))
    numbers: Tensor | None = None  # values that were read from its rows

    @cached_property
    def top_sums(self) -> TopSums | None:
        """The top sums requested from its rows, if the rows are needed for nothing else."""
        return None if self.job.traced else self.pending.partial.top_sums(self.nodes)

    @property
    def drafts_wanted(self) -> list[TopSums]:
        """The top sums requested from each row of its drafts, if nothing more is needed from the other rows."""
        if not self.chunk.drafts or (wanted := self.top_sums) is None:
            return []
        return [TopSums([0.0], wanted.k + SPARE)] * len(self.chunk.drafts)

    def take_drafts(self, founds: Sequence[FoundSums]) -> None:
        """Take the top sums of the rows of its drafts."""
        for draft, found, wanted in zip(self.chunk.drafts, founds, self.drafts_wanted, strict=True):
            draft.row = BestOfRow(found, found.shape[1] < wanted.k)

    def take(self, numbers: Tensor, logp_NV: Tensor) -> None:
        """Take the values that a read of its rows returned."""
        self.numbers = numbers
        self.pending.partial.take(self.nodes, logp_NV[self.rows], numbers)


@dataclass
class Batch:
    """The requests that one forward pass of a model evaluates together.

    Attributes:
        asked: tokens of the pass whose rows are requested.
        readers: the owner of each read; None: its search has left.
        strategy: evaluates the batch, and gives its shares what they need from the rows.
    """

    model: str
    runner: Runner
    began: float
    shares: list[Share] = field(default_factory=list)
    tokens: int = 0
    asked: list[int] = field(default_factory=list)
    reads: list[Part] = field(default_factory=list)
    readers: list[Share | None] = field(default_factory=list)
    edits: list[Edit] = field(default_factory=list)
    keeps: list[Keep] = field(default_factory=list)
    strategy: Strategy = field(init=False)

    @property
    def work(self) -> PassWork:
        chunks = [share.chunk for share in self.shares]
        return PassWork(chunks, self.asked, self.reads, self.edits, self.keeps)

    @property
    def reads_prompt(self) -> bool:
        """Whether more than the last token of a prompt is among its tokens."""
        return any(share.chunk.trunk_tokens > 1 for share in self.shares)

    @property
    def keeps_rows(self) -> bool:
        """Whether any row is needed after the reads of the pass."""
        return any(share.top_sums is None or share.chunk.drafts for share in self.shares)

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
        if (read := pending.partial.wants(nodes)) is not None:
            self.reads.append((rows, read))
            self.readers.append(share)
        if pending.constrained is not None and nodes:
            edit = pending.constrained.edit(chunk.tree, nodes, rows)
            self.edits.append(edit._replace(apply=guarded(edit.apply, partial(setattr, job, "fault"))))
        self.tokens += len(chunk)
        end = self.tokens - len(chunk.drafts)
        if job.kept is not None and chunk.tree is job.trees[0]:
            count, keep = job.kept.wanted(chunk.tree, chunk.trunk_tokens, chunk.nodes)
            if count:
                self.keeps.append(Keep(slice(end - count, end), keep))
            if chunk.drafts:
                keep = partial(job.kept.keep_drafted, chunk.tree, chunk.drafts)
                self.keeps.append(Keep(slice(end, self.tokens), keep))
        if chunk.drafts:
            share.draft_rows = slice(len(self.asked), len(self.asked) + len(chunk.drafts))
            self.asked += range(end, self.tokens)
            if pending.constrained is not None:
                self.edits.append(pending.constrained.draft_edit(share.draft_rows))
        if (hidden := pending.request.hidden) is not None:
            self.keeps.append(Keep(slice(self.tokens - len(chunk), self.tokens), partial(self._give, hidden)))
        self.shares.append(share)

    def _give(self, hidden: TakeHidden, rows_TE: Tensor) -> None:
        """Pass the requested hidden rows to a search."""
        hidden(self.runner.model.outputs(rows_TE))

    def take(self, logp_NV: Tensor, finite: list[bool], numbers: Sequence[Tensor]) -> tuple[Tensor, list[bool]]:
        """Pass the values of the answer to the requests that read them; returns the rows, and whether they are
        finite."""
        for share, read in zip(self.readers, numbers, strict=True):
            if share is not None:
                share.take(read, logp_NV)
        return logp_NV, finite

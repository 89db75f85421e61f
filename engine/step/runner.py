"""The runner: evaluates a forward pass with one model and its pool, without waiting for a GPU's answer."""

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.contract import Read
from engine.contract.top_sums import FoundSums, TopSums, find_top_sums, found_in_shards
from engine.rules.constrained import EITHER, LOGITS, Edit
from engine.rules.few import Few, Head
from engine.step.packing import Chunk, Packer, Pass
from engine.step.phases import PhaseObserver, phase
from engine.step.timing import Overlap, PassTime
from kernels.rows import log_softmax, top_sums_of, top_sums_of_logits
from kernels.rows.checks import LogSoftmax
from kernels.stack import one_by_one
from models.shard import Shard
from models.sharding import Gathered

Part = tuple[slice, Read | TopSums]  # a range of the requested rows, and its reader or the top sums wanted
Answers = tuple[Tensor, list[bool], list[Tensor]]
Ready = Callable[[Pass], None]  # gets a pass's inputs on the device
PAGES = tuple(1 << i for i in range(31))  # widths of a page table, which grows with a text: so passes have few sizes
FRAMES = 64  # sizes of passes that are kept prepared
Rows = tuple[Tensor, list[bool]]  # float32 [N, V], or empty if no search needs them; whether each row is finite


class Keep(NamedTuple):
    """A range of a pass's tokens, and a function that receives their rows: hidden ones, or tapped ones [T, N, E]."""

    rows: slice
    take: Callable[[Tensor], None]
    tapped: bool = False


class PassWork(NamedTuple):
    """One forward pass: its tokens, and the functions that use its rows.

    Attributes:
        chunks: parts of trees whose slots are allocated.
        asked: rows of the pass whose next-token log-probabilities are requested.
        reads: functions that read ranges of these rows, or top sums requested from them, see `Evaluate`.
        edits: functions that edit ranges of these rows before they are read.
        keeps: functions that receive the rows of ranges of the pass's tokens, and must copy what they keep.
    """

    chunks: Sequence[Chunk]
    asked: Sequence[int]
    reads: Sequence[Part] = ()
    edits: Sequence[Edit] = ()
    keeps: Sequence[Keep] = ()


class Inputs:
    """The inputs of a pass on the device, what is written into them there, and when a GPU started it."""

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
    """A pass that a GPU has started; on a CPU it is already done.

    Args:
        logp_NV, finite_N, numbers: see `Runner.evaluate`, on the device.
        inputs: the inputs of the pass, on a GPU; to be read before the next pass of the runner is launched.

    Attributes:
        waited: seconds that the host waited.
    """

    def __init__(self, logp_NV: Tensor, finite_N: Tensor | None, numbers: list[Tensor], inputs: Inputs | None):
        self.logp_NV, self.finite_N, self.numbers, self.inputs = logp_NV, finite_N, numbers, inputs
        self.on_host: Tensor | None = None
        self.waited = 0.0
        self.done: torch.cuda.Event | None = None
        if numbers and finite_N is not None and inputs is not None:  # to the host by one copy
            self.on_host = together = torch.cat([finite_N.double(), *numbers])
            if together.is_cuda:
                self.on_host = torch.empty(together.shape, dtype=together.dtype, pin_memory=True)
                self.on_host.copy_(together, non_blocking=True)
                self.done = _now()

    def wait(self) -> Answers:
        """The answers of the pass; the only point in a step at which the host waits for a GPU."""
        if self.finite_N is None:
            return self.logp_NV, [], []
        if self.on_host is None:
            return self.logp_NV, self.finite_N.tolist(), self.numbers
        began = time.perf_counter()
        if self.done is not None:
            self.done.synchronize()
        together = self.on_host.cpu()
        self.waited = time.perf_counter() - began
        finite_N, *numbers = together.split([len(self.finite_N), *(len(part) for part in self.numbers)])
        return self.logp_NV, [x == 1 for x in finite_N.tolist()], numbers

    @property
    def seconds(self) -> float:
        """The device time of the pass in seconds, once it has ended; 0 on a CPU."""
        begun = None if self.inputs is None else self.inputs.begun
        return 0.0 if begun is None or self.done is None else begun.elapsed_time(self.done) / 1000


class Runner:
    """One model with its pool: evaluates chunks of trees.

    Args:
        model: `forward(tokens_T, positions_T, spans_T, cache, layout, *tapped) -> hidden_TE`, `logits(hidden_NE)` and
            `shape`.
        pool: the model's KV cache.
        vocab_size: the number of tokens that exist; later ids (a padded vocabulary) get log-probability -inf.
        budget: most tokens per pass; longer prompts are split into chunks.
        impl, rows, token_buckets, word_buckets: see `Packer`; buckets are for compiled models.
        dtype: the model's; None: the cache's.

    Attributes:
        most_rows: most rows of log-probabilities that searches request in a pass; None: no limit.
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
        self._packer: Packer | None = None
        self._packed_by: dict[str, Any] = {}  # the options of the packer
        self.head = Head(model, vocab_size, impl)
        self.time, self.overlap = PassTime(), Overlap()
        self.most_rows: int | None = None
        self.observer: PhaseObserver | None = None

    def pack(self, chunks: Sequence[Chunk]) -> Pass:
        """The inputs of a pass, from a packer that is reused while the options are the same."""
        options = {"impl": self.impl, "rows": self.rows}
        options |= {"token_buckets": self.token_buckets, "word_buckets": self.word_buckets}
        if self._packer is None or self._packed_by != options:
            more = {"page_buckets": PAGES, "frames": FRAMES} if self.impl == "cpp" else {}
            more |= {"ancestors": self.pool.ancestors, "delta": self.pool.delta}
            self._packer, self._packed_by = Packer(self.pool.page_size, self.device, **options, **more), options
        return self._packer.pack(chunks)

    def forward(self, chunks: Sequence[Chunk], ready: Ready | None = None, *tapped: Tensor) -> Tensor:
        """Pack and run the model: hidden rows of every token of the pass.

        Args:
            ready: called with the inputs when they are on the device.
            tapped: is filled with rows, see `Decoder.forward`.
        """
        with phase(self.observer, "pack"):
            p = self.pack(chunks)
        if ready is not None:
            ready(p)
        with phase(self.observer, "forward"):
            return self.model.forward(*p.arguments(self.pool.cache), *tapped)

    def logits(self, ids: Sequence[int], adapter: int = 0) -> Tensor:
        """Logits after every token of a sequence, evaluated afresh: float32 [len(ids), V].

        Args:
            adapter: the number of the adapter; 0: none.
        """
        tree, rows = TokenTree(self.pool, ids), []
        tree.trunk.adapter = adapter
        try:
            with torch.inference_mode():
                for start in range(0, len(ids), self.budget):
                    n = min(self.budget, len(ids) - start)
                    hidden_TE = self.forward([Chunk(tree, n, [], tree.allocate(n, []))])
                    rows.append(self.logits_of(hidden_TE[:n], self.heads([adapter] * n)).float())
        finally:
            tree.release()
        return torch.cat(rows)  # outside of inference mode: callers may write to it

    def evaluate(self, work: PassWork) -> Answers:
        """One forward pass.

        Returns:
            float32 log-probabilities [len(asked), V] (scores [len(asked), 1] of a scalar-head model), for each row
            whether all of its logits were finite, and the values of each read, on the host.
        """
        return self.launch(work).wait()

    def launch(self, work: PassWork, fill: Ready | None = None, *, keep_rows: bool = True) -> Launched:
        """Launch the pass that `evaluate` describes, without waiting for a GPU.

        Args:
            fill: writes what only the device knows into the inputs, see `engine.step.overlapped`.
            keep_rows: False: only the values of reads are needed after the next launch, and rows may be overwritten.
        """
        inputs = Inputs(self.device, fill) if self.asynchronous else None
        rows_NE = self._rows(work, inputs)
        if not work.asked:
            return Launched(torch.empty(0, 0), None, [], inputs)
        answers = self.answer(rows_NE, work.edits, self.adapters(work))
        return self.read(*answers, work.reads, inputs)

    def read(
        self, logp_NV: Tensor, finite_N: Tensor, peaks_NB: Tensor | None, reads: Sequence[Part], inputs: "Inputs | None"
    ) -> Launched:
        """The reads of a launched pass."""
        with phase(self.observer, "fetch"):
            sums, made = iter(self._top_sums(logp_NV, peaks_NB, reads)), []
            for rows, read in reads:
                if isinstance(read, TopSums):
                    made.append(next(sums))
                else:
                    made.append(read(logp_NV[rows], None if peaks_NB is None else peaks_NB[rows]))
            return Launched(logp_NV, finite_N, made, inputs)

    def evaluate_few(self, work: PassWork, parts: Sequence[Few]) -> tuple[list[Tensor], list[bool]]:
        """One forward pass on a CPU that computes log-probabilities of only a few tokens; see `Head.logps`.

        Args:
            work: its reads and edits are ignored.
            parts: the tokens for each requested row, in order.
        """
        rows_NE = self._rows(work)
        with phase(self.observer, "logits"):
            return self.head.logps(rows_NE, parts)

    @cached_property
    def shared(self) -> bool:
        """Whether several processes evaluate the model together: they must make the same choices, so these cannot
        depend on a clock."""
        return getattr(self.model, "shard", Shard()).size > 1

    @cached_property
    def gathers(self) -> bool:
        """Whether rows must be gathered from several processes; top sums need not be."""
        return isinstance(getattr(self.model, "head", None), Gathered)

    @property
    def only_sums(self) -> bool:
        """Whether top sums can be found without computing full rows."""
        return self.gathers or (self.impl == "cpp" and not self.model.shape.scores)

    def evaluate_top_sums(self, work: PassWork, wanted: Sequence[TopSums]) -> tuple[list[FoundSums], list[bool]]:
        """One forward pass for top sums of rows that are needed for nothing else; and for each row whether it is
        finite.

        Args:
            work: its reads and edits are ignored.
            wanted: the top sums requested from each of these rows, in order.
        """
        adapters = self.adapters(work)
        if self.impl == "cpp" and self.observer is None and getattr(self.model, "joins", False) and not adapters:
            return self._joined_sums(work, wanted)
        rows_NE = self._rows(work)
        if self.gathers:
            return self._gathered_sums(rows_NE, wanted)
        with phase(self.observer, "logits"):
            logits_NV = self.logits_of(rows_NE, adapters)
        with phase(self.observer, "log-softmax"):
            return top_sums_of_logits(logits_NV, self.vocab_size, wanted, impl=self.impl)

    def _joined_sums(self, work: PassWork, wanted: Sequence[TopSums]) -> tuple[list[FoundSums], list[bool]]:
        """The top sums of rows, computed in the same call as the layers."""
        inputs, tapped = self.pack(work.chunks).arguments(self.pool.cache), self._tapped(work)
        hidden_TE, found, finite = self.model.top_sums(*inputs, work.asked, self.vocab_size, wanted, *tapped)
        self._give(work.keeps, hidden_TE, *tapped)
        return found, finite

    def _tapped(self, work: PassWork) -> Sequence[Tensor]:
        """Memory for the tapped rows, [T, N, E], if any function wants them."""
        if not any(keep.tapped for keep in work.keeps):
            return ()
        model, tokens = self.model, sum(map(len, work.chunks))
        return (torch.empty(tokens, len(model.tapped), model.config.width, dtype=self.dtype, device=self.device),)

    @staticmethod
    def _give(keeps: Sequence[Keep], hidden_TE: Tensor, *tapped: Tensor) -> None:
        """Pass rows to the functions that keep them."""
        for keep in keeps:
            keep.take((tapped[0] if keep.tapped else hidden_TE)[keep.rows])

    def _gathered_sums(self, rows_NE: Tensor, wanted: Sequence[TopSums]) -> tuple[list[FoundSums], list[bool]]:
        """The top sums of rows that are divided among processes and never gathered."""
        head, V = self.model.head, self.model.shape.vocab_size
        with phase(self.observer, "logits"):
            logits_Nv = self.model.logits(rows_NE, head.own)
        with phase(self.observer, "log-softmax"):
            logp_Nv, finite_N = head.log_softmax(logits_Nv, self.vocab_size)
        with phase(self.observer, "fetch"):
            founds, v = [], len(head.tokens)
            for part_Nv, each in zip(logp_Nv.split([len(each.sums) for each in wanted]), wanted, strict=True):
                sums, places = find_top_sums(part_Nv, None, each)
                founds.append(torch.stack([sums, places // v * V + places % v + head.tokens.start]))
            return found_in_shards(head.shard, founds, wanted), finite_N.tolist()

    def _rows(self, work: PassWork, ready: Ready | None = None) -> Tensor:
        """Hidden rows of the requested tokens."""
        tapped = self._tapped(work)
        hidden_TE = self.forward(work.chunks, ready, *tapped)
        self._give(work.keeps, hidden_TE, *tapped)
        if len(work.asked) == len(hidden_TE):
            return hidden_TE
        return hidden_TE[torch.tensor(work.asked, dtype=torch.int64).to(self.device, non_blocking=True)]

    def _top_sums(self, logp_NV: Tensor, peaks_NB: Tensor | None, reads: Sequence[Part]) -> list[Tensor]:
        """The top sums requested from a pass, for all searches with one launch on a GPU; on the device."""
        wanted = [(rows, read) for rows, read in reads if isinstance(read, TopSums)]
        if not wanted:
            return []
        with phase(self.observer, "search"):
            return top_sums_of(logp_NV, wanted, peaks_NB, impl="triton" if self.impl == "triton" else None)

    def adapters(self, work: PassWork) -> list[int]:
        """The numbers of the adapters of some rows of a pass; empty if none of them changes logits."""
        if not getattr(self.model, "adapted_heads", None):
            return []
        numbers = [chunk.tree.trunk.adapter for chunk in work.chunks for _ in range(len(chunk))]
        return self.heads([numbers[row] for row in work.asked])

    def heads(self, numbers: list[int]) -> list[int]:
        """The numbers of rows' adapters; empty if none of them changes logits."""
        heads = getattr(self.model, "adapted_heads", ())
        return numbers if heads and not heads.isdisjoint(numbers) else []

    def logits_of(self, hidden_NE: Tensor, adapters: Sequence[int]) -> Tensor:
        """Logits of hidden rows, in the model's dtype; for `adapters` see there."""
        return self.model.logits(hidden_NE, adapters=adapters) if adapters else self.model.logits(hidden_NE)

    def answer(
        self,
        hidden_NE: Tensor,
        edits: Sequence[Edit] = (),
        adapters: Sequence[int] = (),
        out: LogSoftmax | None = None,
    ) -> LogSoftmax:
        """Log-probabilities (or scores) of hidden rows, whether each row is finite, and peaks, on the device.

        Edited rows have no peaks, and then no row of the pass has any.

        Args:
            adapters: see `adapters`.
            out: memory for log-probabilities and the other results, if they are not scores.
        """
        with phase(self.observer, "logits"):
            logits_NV = self.logits_of(hidden_NE, adapters)
        if logits_NV.shape[1] == 1:
            return logits_NV.float(), torch.isfinite(logits_NV).all(-1), None
        with phase(self.observer, "log-softmax"):
            answers = log_softmax(logits_NV, self.vocab_size, impl=self.impl, out=out)
        if not edits:
            return answers
        return self.edited(answers[0], answers[1], edits, logits_NV)

    def edited(
        self, logp_NV: Tensor, finite_N: Tensor, edits: Sequence[Edit], logits_NV: Tensor | None = None
    ) -> tuple[Tensor, Tensor, None]:
        """Rows after in-place edits, without peaks."""
        with phase(self.observer, "edit"):
            for edit in edits:
                rows_NV = logp_NV[edit.rows]
                if logits_NV is not None and (edit.of == LOGITS or (edit.of == EITHER and not self.asynchronous)):
                    rows_NV.copy_(logits_NV[edit.rows])
                edit.apply(rows_NV)
        return logp_NV, finite_N, None

    def blame(self, chunk: Chunk) -> str:
        """The first place where NaN or Inf arises in a pass: evaluates the chunk again, layer by layer."""
        bad: list[str] = []

        def watch(name: str, x: Tensor) -> None:
            if not bad and not torch.isfinite(x).all():
                bad.append(name)

        layers = self.model.layers
        hooks = [layers[0].register_forward_pre_hook(lambda _, args: watch("in the embedding", args[0]["stream"]))]
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

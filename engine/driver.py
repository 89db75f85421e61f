"""The driver: many searches, one forward pass per model and step. This is the whole machine.

A search asks; its pending tokens join those of the other searches; one pass answers all of them. Long prompts go
through in chunks beside the decoding of others. When the pool runs full, the search that came last starts again
later; a search that is alone is told.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from engine.contract import (
    ContractError,
    generator_fault,
    guarded_read,
    guarded_report,
    is_ours,
    report_fault,
    request_fault,
    result_fault,
    tokens_fault,
)
from engine.errors import KVMemoryError, NumericsError
from engine.interrupts import uninterrupted
from engine.packing import Chunk, pack
from engine.pool import PagePool
from engine.requests import Answer, Evaluate, Read, Report, Search, SearchGenerator, SearchResult
from engine.timing import PassTime
from engine.trace import RecordedTree, Trace
from engine.tree import TokenTree, Trunk
from kernels.rows import log_softmax
from kernels.stack import one_by_one

Part = tuple[slice, Read]  # rows among those asked for, and what to make of them
Answers = tuple[Tensor, list[bool], list[Tensor]]


class Runner:
    """One model with its pool: evaluates chunks of trees.

    Args:
        model: `forward(tokens_T, positions_T, spans_T, cache, layout) -> hidden_TE`, `logits(hidden_NE)` and `shape`.
        pool: the model's KV cache.
        vocab_size: tokens that exist; later ids (a padded vocabulary) get log-probability -inf.
        budget: most tokens per pass; longer prompts go in chunks.
        impl, token_buckets, word_buckets: see `pack`; buckets are for compiled models.
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
    ):
        self.model, self.pool, self.vocab_size, self.budget = model, pool, vocab_size, budget
        self.impl, self.token_buckets, self.word_buckets = impl, token_buckets, word_buckets
        self.device = pool.cache.k_LGSD.device
        self.time = PassTime()

    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Pack and run the model: hidden rows of every token of the pass."""
        p = pack(
            chunks,
            self.pool.page_size,
            self.device,
            token_buckets=self.token_buckets,
            word_buckets=self.word_buckets,
            impl=self.impl,
        )
        return self.model.forward(p.tokens_T, p.positions_T, p.spans_T, self.pool.cache, p.layout)

    def evaluate(self, chunks: Sequence[Chunk], asked: Sequence[int], reads: Sequence[Part] = ()) -> Answers:
        """One forward pass.

        Args:
            chunks: placed shares of trees.
            asked: rows of the pass whose next-token log-probabilities are wanted.
            reads: what to make of which of these rows, see `Evaluate`.

        Returns:
            float32 log-probabilities [len(asked), V] (scores [len(asked), 1] of a scalar-head model), for each row
            whether all of its logits were finite, and the numbers of each read, on the host.
        """
        hidden_TE = self.forward(chunks)
        if not asked:
            return torch.empty(0, 0), [], []
        rows_NE = hidden_TE if len(asked) == len(hidden_TE) else hidden_TE[torch.tensor(asked, device=self.device)]
        return self.fetch(*self.answer(rows_NE), reads)

    @staticmethod
    def fetch(logp_NV: Tensor, finite_N: Tensor, peaks_NB: Tensor | None, reads: Sequence[Part]) -> Answers:
        """Bring what the host wants to know to it: the one time in a step that it waits for a GPU."""
        if not reads:
            return logp_NV, finite_N.tolist(), []
        made = (read(logp_NV[rows], peaks_NB[rows] if peaks_NB is not None else None) for rows, read in reads)
        parts = [finite_N.double(), *made]
        finite_N, *numbers = torch.cat(parts).cpu().split([len(part) for part in parts])
        return logp_NV, [x == 1 for x in finite_N.tolist()], numbers

    def answer(self, hidden_NE: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities (or scores) of hidden rows, whether each row is finite, and peaks, on the device."""
        logits_NV = self.model.logits(hidden_NE)
        if logits_NV.shape[1] == 1:
            return logits_NV.float(), torch.isfinite(logits_NV).all(-1), None
        return log_softmax(logits_NV, self.vocab_size, impl=self.impl)

    def blame(self, chunk: Chunk) -> str:
        """Where NaN or Inf arises first in a pass that has any: the chunk is evaluated once more, layer by layer."""
        bad: list[str] = []

        def watch(name: str, x: Tensor) -> None:
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
    """What a model did for a search; `seconds` of passes that other searches shared count in full."""

    passes: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass
class Run:
    """A search under way."""

    start: Callable[["Run"], SearchGenerator]
    settled: list[int] = field(default_factory=list)  # new tokens that are certain
    report: Report = field(default_factory=Report)  # the latest
    trunk: Trunk | None = None  # an earlier tree's, to take over
    retire: Callable[[TokenTree], None] | None = None  # gets the target tree at the end instead of freeing it
    trees: list[TokenTree] = field(default_factory=list)
    generator: SearchGenerator | None = None
    ticket: "Ticket | None" = None
    company: tuple[int, int] = (0, 0)  # in its latest pass: tokens of other searches, and how many these were
    result: SearchResult | None = None
    error: BaseException | None = None
    work: dict[str, "Work"] = field(default_factory=dict)  # by model
    trace: Trace | None = None  # records what is done
    started: float = 0.0
    prefilled: float = 0.0
    search: Search | None = None  # what is checked more closely if it is not this project's; None is trusted
    fault: Exception | None = None  # raised by a function that the search gave away; it ends the run at its next step

    def __post_init__(self):
        self.foreign = self.search is not None and not is_ours(type(self.search))

    @property
    def done(self) -> bool:
        return self.result is not None or self.error is not None


@dataclass
class Ticket:
    """An Evaluate on its way: what is left to do and the rows known so far."""

    request: Evaluate
    regimes: list[tuple[bool, list[int]]]  # see `TokenTree.regimes`; all but one model have one
    answered: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    numbers: Tensor | None = None  # what the request's `read` makes of them

    def begin(self) -> None:
        """Turn to the next regime's nodes."""
        stretched, nodes = self.regimes.pop(0)
        self.request.tree.enter(stretched)
        self.trunk_left, self.nodes_left = self.request.tree.pending(nodes)
        self.asked = set(nodes)
        self.trunk_placed = 0  # by earlier passes of this request
        self.nodes_placed: list[int] = []

    @property
    def left(self) -> int:
        return self.trunk_left + len(self.nodes_left)

    def answer(self) -> Answer:
        """One row per node asked for, in the order asked."""
        rows_NV = self.rows[0] if len(self.rows) == 1 else torch.cat(self.rows)
        nodes = list(self.request.nodes)
        if nodes == self.answered:
            return self.request.answer(rows_NV) if self.numbers is None else Answer(rows_NV, self.numbers)
        row = {node: i for i, node in enumerate(self.answered)}
        return self.request.answer(rows_NV[torch.tensor([row[n] for n in nodes], device=rows_NV.device)])


class Driver:
    """Runs searches to their end, step by step.

    Args:
        runners: by model name; "target" first.
        parallel: most searches at once.
    """

    def __init__(self, runners: dict[str, Runner], parallel: int = 16):
        self.runners, self.parallel = runners, parallel
        self.waiting: list[Run] = []
        self.running: list[Run] = []
        self._crowded = False  # a search was sent back for want of pages: nobody enters before somebody leaves

    def submit(self, run: Run) -> Run:
        """Queue a search."""
        self.waiting.append(run)
        return run

    def open_tree(self, run: Run, model: str, prompt: Sequence[int], expected: int = 0, trunk: Trunk | None = None):
        """A tree that is freed with the run."""
        if model not in self.runners:
            raise ContractError(
                f"open_tree: expected one of {', '.join(self.runners)}, the models that are loaded, got {model!r}; "
                "a search names the models it needs in its attribute `models`"
            )
        runner = self.runners[model]
        switch = runner.model.shape.switch_length
        make = TokenTree if run.trace is None else partial(RecordedTree, run.trace, model)
        tree = make(runner.pool, prompt, expected=expected, trunk=trunk, switch_length=switch)
        run.trees.append(tree)
        return tree

    def spare(self, run: Run, pool: PagePool) -> int:
        """How many more pages of a pool a search could take if this driver ran no other."""
        others = [tree for other in self.running if other is not run for tree in other.trees]
        return pool.free_pages + sum(tree.page_count for tree in others if tree.pool is pool)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @torch.inference_mode()
    def step(self) -> None:
        """Admit, evaluate once per model, resume every search that got its answer."""
        with uninterrupted():
            try:
                while self.waiting and len(self.running) < self.parallel and not self._crowded:
                    self._begin(self.waiting.pop(0))
                for name, runner in self.runners.items():
                    self._pass(name, runner)
            except KeyboardInterrupt:  # anywhere: a tree may call slots evaluated that were only taken
                for run in self.running:
                    run.retire = None
                raise

    def stop(self, run: Run, result: SearchResult) -> None:
        """End a search early with what it has."""
        with uninterrupted():
            self._end(run, result=result)

    def close(self) -> None:
        """Abandon everything; all pages go back."""
        self.waiting.clear()
        with uninterrupted(), contextlib.ExitStack() as stack:  # all of them, also when one fails
            for run in self.running:
                stack.callback(self._end, run)

    # --- one pass ---

    def _pass(self, name: str, runner: Runner) -> None:
        entered = time.perf_counter()
        runs = [r for r in self.running if r.ticket and r.ticket.request.tree.pool is runner.pool]
        # Short requests first: decoding goes on while a long prompt fills what is left of the budget.
        room, chunks, owners = runner.budget, [], []
        for run in sorted(runs, key=lambda r: r.ticket.left if r.ticket else 0):
            if room and run in self.running and (chunk := self._place(run, room)):
                chunks.append(chunk)
                owners.append(run)
                room -= chunk.trunk_tokens + len(chunk.nodes)
        shares = [(c, r, r.ticket) for c, r in zip(chunks, owners, strict=True) if r in self.running and r.ticket]
        if not shares:
            return
        asked: list[int] = []
        answers: list[list[int]] = []
        reads: list[Part] = []
        readers: list[Ticket] = []
        row = 0
        for chunk, _, ticket in shares:
            nodes = [ticket.request.tree.root] if chunk.trunk_tokens and not ticket.trunk_left else []
            first = row + chunk.trunk_tokens - len(nodes)
            wanted = [(first + i, n) for i, n in enumerate([*nodes, *chunk.nodes]) if n in ticket.asked]
            asked += [i for i, _ in wanted]
            answers.append([n for _, n in wanted])
            if ticket.request.read is not None and answers[-1] == list(ticket.request.nodes):  # all of it in this pass
                reads.append((slice(len(asked) - len(wanted), len(asked)), ticket.request.read))
                readers.append(ticket)
            row += chunk.trunk_tokens + len(chunk.nodes)
        began = time.perf_counter()
        try:
            logp_NV, finite, numbers = runner.evaluate([c for c, _, _ in shares], asked, reads)
        except BaseException:
            for chunk, _, _ in shares:
                chunk.tree.unplace(chunk.trunk_tokens, chunk.nodes)
            raise
        seconds = time.perf_counter() - began
        for ticket, told in zip(readers, numbers, strict=True):
            ticket.numbers = told
        if all(chunk.trunk_tokens <= 1 for chunk, _, _ in shares):  # prompts follow another curve
            runner.time.note(row, time.perf_counter() - entered)
        for chunk, run, _ in shares:
            run.company = row - chunk.trunk_tokens - len(chunk.nodes), len(shares) - 1
        row = 0
        for (chunk, run, ticket), nodes in zip(shares, answers, strict=True):
            work = run.work.setdefault(name, Work())
            work.passes += 1
            work.tokens += chunk.trunk_tokens + len(chunk.nodes)
            work.seconds += seconds
            mine = slice(row, row + len(nodes))
            row = mine.stop
            if not all(finite[mine]):
                self._resume(
                    run,
                    error=NumericsError(
                        "the model computed NaN or Inf",
                        where=f"{runner.blame(chunk)}, "
                        f"at token {ticket.request.tree.position(ticket.request.nodes[0]) + 1} of the sequence",
                        remedy="try --dtype float32, or check the weights",
                    ),
                )
                continue
            if nodes:
                ticket.answered += nodes
                ticket.rows.append(logp_NV[mine])
                if run.trace is not None:
                    run.trace.told(chunk.tree, nodes, logp_NV[mine])
            if not ticket.left and ticket.regimes:
                ticket.begin()
            elif not ticket.left:
                self._resume(run, answer=ticket.answer())

    def _place(self, run: Run, room: int) -> Chunk | None:
        """Take slots for as much of the run's request as there is room for; None if the pool is full."""
        ticket = run.ticket
        assert ticket is not None
        tree = ticket.request.tree
        trunk = min(ticket.trunk_left, room)
        nodes = ticket.nodes_left[: room - trunk] if trunk == ticket.trunk_left else []
        while True:
            try:
                slots = tree.place(trunk, nodes)
                break
            except KVMemoryError as error:
                youngest = self.running[-1]
                if youngest is self.running[0]:
                    error.where = f"with {tree.live_tokens} live tokens, and {trunk + len(nodes)} more to evaluate"
                    tree.unplace(ticket.trunk_placed, ticket.nodes_placed)  # the search may ask for any of them again
                    self._resume(run, error=error)
                    return None
                self._send_back(youngest)
                if youngest is run:
                    return None
        ticket.trunk_left -= trunk
        ticket.trunk_placed += trunk
        ticket.nodes_placed += nodes
        del ticket.nodes_left[: len(nodes)]
        return Chunk(tree, trunk, nodes, slots)

    # --- the life of a run ---

    def _begin(self, run: Run) -> None:
        self.running.append(run)
        run.started = time.perf_counter()
        try:
            generator = run.start(run)
            if wrong := generator_fault(generator):
                raise ContractError(wrong)
            run.generator = generator
        except Exception as error:
            self._end(run, error=error)
            return
        self._resume(run)

    def _resume(self, run: Run, answer: Any = None, error: Exception | None = None) -> None:
        """Let the search go on to its next Evaluate, or to its end."""
        generator = run.generator
        assert generator is not None
        run.ticket = None
        if answer is not None and not run.prefilled and "target" in run.work:  # a draft may be asked first
            run.prefilled = time.perf_counter()
        if run.trace is not None:
            run.trace.resume()
        try:
            if run.fault is not None:
                raise run.fault
            request = generator.throw(error) if error is not None else generator.send(answer)
            while isinstance(request, Report):
                if wrong := report_fault(request):
                    self._refuse(run, wrong)
                if run.foreign:
                    request = guarded_report(request, partial(setattr, run, "fault"))
                run.settled += request.settled
                run.report = request
                if run.trace is not None:
                    run.trace.reported(request)
                request = generator.send(None)
            if wrong := request_fault(request, run.trees) or (run.foreign and self._wrong_tokens(request)):
                self._refuse(run, wrong)
            if run.foreign:
                request = guarded_read(request, partial(setattr, run, "fault"))
            ticket = Ticket(request, request.tree.regimes(request.nodes))
            ticket.begin()
            run.ticket = ticket
            if run.trace is not None:
                run.trace.asked(request)
        except StopIteration as stop:
            wrong = result_fault(stop.value, self.runners["target"].vocab_size if run.foreign else None)
            if wrong:
                self._end(run, error=ContractError(wrong))
            else:
                self._end(run, result=stop.value)
        except Exception as failure:
            self._end(run, error=failure)
        finally:
            del error  # its traceback knows this frame

    @staticmethod
    def _refuse(run: Run, wrong: str) -> NoReturn:
        """Raise a ContractError at the search's `yield`, so that the traceback has its line, and here."""
        fault = ContractError(wrong)
        assert run.generator is not None
        with contextlib.suppress(Exception):  # the search may catch it; the run ends nonetheless
            run.generator.throw(fault)
        raise fault

    def _wrong_tokens(self, request: Evaluate) -> str:
        runner = next(r for r in self.runners.values() if r.pool is request.tree.pool)
        shape = runner.model.shape
        return tokens_fault(request, shape.vocab_size, shape.max_positions)

    def _end(self, run: Run, result: SearchResult | None = None, error: Exception | None = None) -> None:
        try:
            try:
                if run.generator is not None:
                    run.generator.close()
            except Exception as failure:  # of the search, while it was told to end
                result, error = None, error or failure
            if result is not None:
                result.stats = self._stats(run) | result.stats
            if run.trace is not None:
                run.trace.finish(result, error)
            if run.retire and run.trees and error is None:
                tree = run.trees[0]
                best = result.outputs[0].token_ids if result is not None else run.settled
                with contextlib.suppress(MemoryError, RuntimeError):  # no memory for the copy: the trunk as it was
                    tree.keep([tree.descend(best)])  # what is evaluated of the answer joins the trunk
                run.retire(tree)
        finally:
            for tree in run.trees:
                tree.release()
            run.result, run.error, run.ticket = result, error, None
            # The report's functions know the search, and that its run: a cycle, which would keep the model in memory.
            run.generator, run.report = None, Report(info=run.report.info)
            if run in self.running:
                self.running.remove(run)
            self._crowded = False

    def _send_back(self, run: Run) -> None:
        """Give the pages of a search to those before it; it starts afresh, to the same result, when one has ended."""
        assert run.generator is not None
        try:
            run.generator.close()
        except Exception as failure:
            self._end(run, error=failure)
            return
        for tree in run.trees:
            tree.release()
        self.running.remove(run)
        run.trees, run.generator, run.ticket, run.settled, run.report = [], None, None, [], Report()
        run.work, run.fault = {}, None
        run.prefilled = 0.0
        if run.trace is not None:
            run.trace.restart()
        self.waiting.insert(0, run)
        self._crowded = True

    def _stats(self, run: Run) -> dict:
        target = run.trees[0]
        now = time.perf_counter()
        prefilled = run.prefilled or now  # interrupted before
        work = {name: run.work.get(name, Work()) for name in {"target": None, **run.work}}
        mine = work.pop("target")
        others: dict[str, Any] = {"target_seconds": mine.seconds} if work else {}
        for name, done in work.items():
            others[f"{name}_forward_passes"] = done.passes
            others[f"{name}_nodes_evaluated"] = done.tokens
            others[f"{name}_seconds"] = done.seconds
            pool = self.runners[name].pool
            others[f"{name}_live_nodes_peak"] = max(t.peak_live for t in run.trees if t.pool is pool)
        return {
            "prompt_tokens": target.prompt_length,
            "reused_tokens": target.reused,
            "forward_passes": mine.passes,
            "nodes_evaluated": max(0, mine.tokens - (target.prompt_length - target.reused - 1)),
            "prefill_seconds": prefilled - run.started,
            "decode_seconds": now - prefilled,
            "kv_bytes_peak": sum(t.peak_pages * t.pool.page_bytes for t in run.trees),
            "kv_bytes_per_token": target.pool.bytes_per_token,
            "live_nodes_peak": target.peak_live,
            "unshared_nodes_peak": target.peak_unshared,
            **others,
        }

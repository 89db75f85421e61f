"""The driver (scheduler): many searches, one forward pass per model and step.

A search yields an `Evaluate`; its pending tokens join those of other searches; one pass answers all of them. Long
prompts are evaluated in chunks, alongside the decoding of other requests. When the pool is full, a search is preempted
(`engine.step.crowding`) and starts again later; a search that is alone gets KVMemoryError.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from engine.cache.pool import PagePool
from engine.cache.slots import Trunk
from engine.cache.tree import TokenTree
from engine.contract import Evaluate, Pause, Report, SearchResult, checks
from engine.errors import KVMemoryError, NumericsError
from engine.rules.constrained import RowPlan
from engine.step.crowding import check_share, who_gives_way
from engine.step.drafting import JobDrafts
from engine.step.guessing import Guessing, read_rows_for_heads
from engine.step.interrupts import uninterrupted
from engine.step.jobs import Batch, Job, Share, Work
from engine.step.packing import Chunk
from engine.step.partial import Pending, known_rows, partial_answer
from engine.step.phases import PhaseObserver, observed_read, phase
from engine.step.runner import Rows, Runner
from engine.step.strategies import strategy_of
from engine.step.turns import first_turn, in_order, note_turn, rows_asked, within
from models.threads import MACHINE


class Driver:
    """Runs searches to their end, step by step; on a GPU it is an `engine.step.overlapped.Overlapped`.

    Args:
        runners: the runners by model name; "target" first.
        parallel: most searches at once.
        observer: is notified of the phases of each step.
    """

    batches: ClassVar[type[Batch]] = Batch

    def __init__(self, runners: dict[str, Runner], parallel: int = 16, observer: PhaseObserver | None = None):
        self.runners, self.parallel, self.observer = runners, parallel, observer
        for runner in runners.values():
            runner.observer = observer
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.paused: list[Job] = []  # running jobs that paused, in the order in which they continue, one per step
        self.work: dict[str, Work] = {name: Work() for name in runners}  # of all searches together
        self.share = 1.0  # the part of a pool that the searches of one client may hold

    def submit(self, job: Job) -> Job:
        """Queue a search."""
        self.waiting.append(job)
        return job

    def open_tree(self, job: Job, model: str, prompt: Sequence[int], expected: int = 0, trunk: Trunk | None = None):
        """Create a tree that is freed with the job."""
        if model not in self.runners:
            raise checks.ContractError(
                f"open_tree: expected one of {', '.join(self.runners)}, the models that are loaded, got {model!r}; "
                "a search names the models it needs in its attribute `models`"
            )
        runner = self.runners[model]
        shape, adapter = runner.model.shape, job.adapter if model == "target" else 0
        if trunk is not None:
            salts = {trunk.salt, job.salt} - {None}  # a page is cached under one salt only
            steady = shape.steady_length is None or max(len(prompt), trunk.cached) <= shape.steady_length
            if trunk.adapter != adapter or len(salts) > 1 or not steady:
                trunk.release(runner.pool)
        tree = TokenTree(runner.pool, prompt, expected=expected, trunk=trunk, switch_length=shape.switch_length)
        job.trees.append(tree)
        tree.salt, tree.trunk.adapter = job.salt, adapter
        if job.salt is not None:
            tree.trunk.salt = job.salt
        tree.reuse()
        if job.drafts is not None and model == "target" and len(job.trees) == 1:
            job.drafts.begin(tree)
        if job.constrained is not None and (len(job.trees) == 1 or model == "draft"):
            job.constrained.states.watch(tree)
        job.trace.watch(tree, model)
        if job.drafts is not None and job.drafts.tree is tree:
            job.trees += job.drafts.beside
        return tree

    def spare(self, job: Job, pool: PagePool) -> int:
        """How many more pages of a pool a search could take if this driver ran no other search."""
        others = [t for other in self.running if other is not job for t in other.trees if t.pool is pool]
        held = {page for tree in others for page in tree.pages_held}  # each once, though several trees may hold it
        return pool.free_pages + len(held.difference(*(tree.pages_held for tree in job.trees if tree.pool is pool)))

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @torch.inference_mode()
    def step(self) -> None:
        """Start searches, evaluate one pass of each model, resume every search whose answer is complete."""
        with self._undisturbed(), self._phase("step"):
            self._admit()
            for model in self.runners:
                self.turn(model)

    def turn(self, model: str) -> None:
        """Evaluate one pass of a model."""
        if (batch := self._schedule(model, self._asking(model))).shares:
            self._commit(batch, *self._run(batch))

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
        with uninterrupted(), contextlib.ExitStack() as stack:  # ends all jobs even if one of them raises
            for job in self.running:
                stack.callback(self._end, job)

    # --- one step ---

    def _phase(self, name: str, batch: Batch | None = None) -> AbstractContextManager[None]:
        return phase(self.observer, name, batch)

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Context of a step: Ctrl-C waits for its end, and it uses no cores that other programs occupy."""
        # Compiled code is for one number of threads, and processes that share a model must round alike.
        steady = any(runner.token_buckets or runner.gathers for runner in self.runners.values())
        with uninterrupted(), contextlib.nullcontext() if steady else MACHINE.limited():
            try:
                yield
            except KeyboardInterrupt:  # a tree may have slots that are allocated and were not written
                for job in self.running:
                    job.retire = None
                    for tree in job.trees:
                        tree.salt = None
                raise

    def _admit(self) -> None:
        """Start the searches for which there is room, and resume one that paused."""
        with self._phase("admit"):
            blocked: set[str] = set()  # clients with a preempted search, which their others do not overtake
            for job in [*self.waiting]:
                if job.client in blocked or (job.gave_way_to and all(each in self.running for each in job.gave_way_to)):
                    blocked.add(job.client)
                elif len(self.running) < self.parallel:
                    self.waiting.remove(job)
                    self._begin(job)
            if self.paused:
                self._resume(self.paused.pop(0))

    def _asking(self, model: str) -> list[Job]:
        """The searches that wait for rows of a model."""
        pool = self.runners[model].pool
        return [job for job in self.running if job.pending and job.pending.request.tree.pool is pool]

    def _schedule(self, model: str, jobs: Sequence[Job], room: int | None = None) -> Batch:
        """Choose the tokens of a model's next pass, at most `room` or the runner's budget, and take slots for them."""
        with self._phase("schedule"):
            batch = self.batches(model, self.runners[model], time.perf_counter())
            room, chosen = batch.runner.budget if room is None else room, []
            first, theirs = first_turn(jobs, room)
            for job in within(in_order(jobs), first, most := batch.runner.most_rows):
                theirs = 0 if job is first else theirs
                if room > theirs and job in self.running and (chunk := self._allocate(job, room - theirs)) is not None:
                    chosen.append((job, chunk))
                    room -= len(chunk)
            # Without those that were preempted meanwhile.
            kept = [(job, chunk) for job, chunk in chosen if job in self.running and job.pending]
            note_turn(jobs, [job for job, _ in kept])
            spare = room if most is None else min(room, most - rows_asked([job for job, _ in kept]))
            drafted = Guessing(kept, spare, self.work)
            for (job, _), chunk in zip(kept, drafted.chunks, strict=True):
                batch.add(job, chunk)
            batch.began += drafted.seconds
            read_rows_for_heads(batch)
            batch.strategy = strategy_of(batch)
        return batch

    def _run(self, batch: Batch) -> Rows:
        """Evaluate a batch: rows, and whether each is finite. If that fails, its slots are released."""
        with self._phase("run", batch), self._released_if_failed(batch):
            began = time.perf_counter()
            rows = batch.strategy(batch)
            self._account(batch, began, time.perf_counter())
        return rows

    def _account(self, batch: Batch, began: float, ended: float) -> None:
        """Record the time and the tokens of a finished pass."""
        shares = batch.shares
        if not batch.reads_prompt:  # `PassTime` excludes prompts
            batch.runner.time.note(batch.tokens, ended - batch.began)
        for share in shares:
            tokens = len(share.chunk)
            share.job.batch_load = batch.tokens - tokens, len(shares) - 1
            share.job.note_held()
            share.job.work.setdefault(batch.model, Work()).add(tokens, ended - began)
        self.work[batch.model].add(batch.tokens, ended - began)

    @staticmethod
    @contextlib.contextmanager
    def _released_if_failed(batch: Batch) -> Iterator[None]:
        """Releases the slots of a pass that fails."""
        try:
            yield
        except BaseException:
            for chunk in (share.chunk for share in batch.shares):
                chunk.tree.drop_drafts()
                chunk.tree.release_slots(chunk.trunk_tokens, chunk.nodes)
            raise

    def _commit(self, batch: Batch, logp_NV: Tensor, finite: list[bool]) -> None:
        """Distribute the rows; resume each search whose request is complete."""
        with self._phase("commit", batch):
            for share in batch.shares:
                if not all(finite[share.rows]):
                    self._resume(share.job, error=self._not_finite(batch.runner, share))
                    continue
                tree = share.chunk.tree
                if drafts := share.chunk.drafts:
                    rows = share.draft_rows
                    JobDrafts.take_rows(tree, drafts, logp_NV[rows], finite[rows])
                if share.chunk.trunk_tokens > 1 and tree.trunk.cached <= tree.prompt_length:
                    tree.save(going_on=True)  # others that wait with the same prompt need not read it
                if share.nodes:
                    rows_NV = logp_NV[share.rows]
                    share.pending.partial.add(share.nodes, rows_NV)
                    share.job.trace.answered(tree, share.nodes, rows_NV)
                self._advance(share.job, share.pending)

    def _advance(self, job: Job, pending: Pending) -> None:
        """Resume a search if its request is complete, otherwise start the next group of its nodes."""
        if pending.left:
            return
        if pending.by_rope:
            pending.begin()
        else:
            self._resume(job, answer=pending.partial.answer())

    @staticmethod
    def _not_finite(runner: Runner, share: Share) -> NumericsError:
        request = share.pending.request
        if runner.pool.prefixes is not None:  # cached keys and values may be the cause
            runner.pool.prefixes.clear()
        position = request.tree.position(request.nodes[0]) + 1
        return NumericsError(
            "the model computed NaN or Inf",
            where=f"{runner.blame(share.chunk)}, at token {position} of the sequence",
            remedy="try --dtype float32, or check the weights",
        )

    def _allocate(self, job: Job, room: int) -> Chunk | None:
        """Take slots for as much of the job's request as fits; None if the pool is full."""
        pending = job.pending
        assert pending is not None
        tree = pending.request.tree
        if pending.trunk_left > 1 and tree.trunk.cached < tree.prompt_length - 1 and not job.traced:
            pending.trunk_left -= tree.reuse()  # another request may have read the same since
        trunk = tree.until_stop(min(pending.trunk_left, room))
        nodes = pending.nodes_left[: room - trunk] if trunk == pending.trunk_left else []
        while True:
            among = self.running
            try:
                slots = tree.allocate(trunk, nodes)
                try:
                    check_share(job, among, tree.pool, self.share)
                except KVMemoryError:
                    tree.release_slots(trunk, nodes)
                    among = [each for each in among if each.client == job.client]
                    raise
                break
            except KVMemoryError as error:
                if self._drop_drafts(tree.pool):
                    continue
                if len(among) == 1 and job.drafts is not None and job.drafts.nodes:
                    self._preempt(job)  # drafts may have left its nodes in more pages than they need
                    job.drafts = None
                    return None
                if len(among) == 1:
                    error.where = f"with {tree.live_tokens} live tokens, and {trunk + len(nodes)} more to evaluate"
                    # The search may ask for any of them again.
                    tree.drafts.rows |= pending.known
                    tree.release_slots(pending.trunk_allocated, pending.nodes_allocated)
                    self._resume(job, error=error)
                    return None
                self._preempt(other := who_gives_way(among, tree.pool))
                if other is job:
                    return None
        pending.allocated(trunk, nodes)
        return Chunk(tree, trunk, nodes, slots)

    def _drop_drafts(self, pool: PagePool) -> bool:
        """Free the pages of a pool that drafts hold. Returns whether there were any."""
        dropped = sum([tree.drop_drafts() for job in self.running for tree in job.trees if tree.pool is pool])
        gone = [job.drafts.give_way(pool) for job in self.running if job.drafts is not None]
        return dropped > 0 or any(gone)

    # --- the life of a job ---

    def _begin(self, job: Job) -> None:
        job.gave_way_to = []
        self.running.append(job)
        job.started = time.perf_counter()
        try:
            generator = job.start(job)
            if wrong := checks.generator_fault(generator):
                raise checks.ContractError(wrong)
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
                job.trace.resume()
                if job.fault is not None:
                    raise job.fault
                with self._phase("search"):
                    request = generator.throw(error) if error is not None else generator.send(answer)
                request = self._request(job, request)
                if isinstance(request, Pause):
                    self.paused.append(job)
                    break
                pending = self._ask(job, request)
                if pending.left:
                    break
                if pending.known and job.drafts is not None:
                    job.drafts.answered(len(pending.known))
                error, answer, job.pending = None, pending.partial.answer(), None
        except StopIteration as stop:
            vocab = self.runners["target"].vocab_size if job.foreign else None
            wrong = checks.result_fault(stop.value, vocab, job.settled)
            if wrong:
                self._end(job, error=checks.ContractError(wrong))
            else:
                self._end(job, result=stop.value)
        except Exception as failure:
            self._end(job, error=failure)
        finally:
            del error  # its traceback refers to this frame

    def _request(self, job: Job, request: Any) -> Evaluate | Pause:
        """The search's next Evaluate or Pause, after processing the reports before it. Raises ContractError."""
        assert job.generator is not None
        fail = partial(setattr, job, "fault")
        while isinstance(request, Report):
            if isinstance(request, Pause):
                return request
            if wrong := checks.report_fault(request):
                self._refuse(job, wrong)
            if job.foreign:
                request = checks.guarded_report(request, fail)
            job.settled += request.settled
            job.report = request if job.constrained is None else job.constrained.endings.shown(request)
            job.trace.reported(job.report)
            with self._phase("search"):
                request = job.generator.send(None)
        if wrong := checks.request_fault(request, job.trees, job.has_row) or (
            job.foreign and self._wrong_tokens(request)
        ):
            self._refuse(job, wrong)
        if self.observer is not None and request.read is not None:
            request = replace(request, read=observed_read(self.observer, request.read))
        return checks.guarded_request(request, fail) if job.foreign else request

    def _ask(self, job: Job, request: Evaluate) -> Pending:
        """Start a request: rows that drafts or its constraint already provide need no evaluation. Raises
        ConstraintError."""
        tree, constrained, runner = request.tree, job.constrained, self._runner(request)
        answer = partial_answer(request, runner.model.shape.vocab_size)
        plan = RowPlan(list(request.nodes), {}, [])
        if constrained is None or request.hidden is not None or not constrained.states.watches(tree):
            constrained = None
        else:
            plan = constrained.plan(tree, request.nodes)
        drafted = job.drafts.known(request, plan.asked, answer) if job.drafts is not None else {}
        asked, known = [node for node in plan.asked if node not in drafted], plan.known
        groups = tree.by_rope([*asked, *plan.ahead]) if asked else []
        job.pending = pending = Pending(request, groups, answer, constrained, drafted)
        if pending.by_rope:
            pending.begin()
        job.trace.asked(request)
        if drafted and job.drafts is not None:
            whole, rows_NV = job.drafts.answer(pending, partial(setattr, job, "fault"))
            if whole:
                job.trace.answered(tree, whole, rows_NV)
        if known:
            answer.add_known(known, runner.device)
            if job.traced:
                job.trace.answered(tree, [*known], known_rows(known, answer.width, runner.device))
        return pending

    def _runner(self, request: Evaluate) -> Runner:
        return next(r for r in self.runners.values() if r.pool is request.tree.pool)

    @staticmethod
    def _refuse(job: Job, wrong: str) -> NoReturn:
        """Raise a ContractError, first at the search's `yield`, so that the traceback includes that line, and then
        here."""
        fault = checks.ContractError(wrong)
        assert job.generator is not None
        with contextlib.suppress(Exception):  # the search may catch it; the job ends nonetheless
            job.generator.throw(fault)
        raise fault

    def _wrong_tokens(self, request: Evaluate) -> str:
        shape = self._runner(request).model.shape
        return checks.tokens_fault(request, shape.vocab_size, shape.max_positions)

    def _end(self, job: Job, result: SearchResult | None = None, error: Exception | None = None) -> None:
        try:
            try:
                if job.generator is not None:
                    job.generator.close()
            except Exception as failure:  # raised by the search while it was closed
                result, error = None, error or failure
            if result is not None:
                result.stats = job.stats({name: each.pool for name, each in self.runners.items()}) | result.stats
            job.trace.finish(result, error)
            tokens = job.settled if result is None else result.outputs[0].token_ids
            if job.drafts is not None:
                job.drafts.close(tokens if job.constrained is None else job.constrained.endings.real(tokens))
            if job.trees and error is None:
                self._keep_trunks(job, tokens)
        finally:
            for tree in job.trees:
                tree.release()
                if tree.pool.prefixes is not None:
                    tree.pool.prefixes.trim()
            job.result, job.error, job.pending = result, error, None
            # The report's functions refer to the search, and it to its job: a cycle, which keeps the model in memory.
            job.generator, job.report = None, Report(info=job.report.info)
            self._drop(job)

    def _drop(self, job: Job) -> None:
        """Take a job off the lists of running and paused ones."""
        for jobs in (self.running, self.paused):
            if job in jobs:
                jobs.remove(job)

    @staticmethod
    def _keep_trunks(job: Job, best: Sequence[int]) -> None:
        """Hand the trunks of a finished search to the prefix caches, and the target's to `Job.retire`."""
        tree = job.trees[0]
        prefixes = None if tree.salt is None else tree.pool.prefixes
        if job.retire or prefixes is not None:
            with contextlib.suppress(MemoryError, RuntimeError):  # without memory for the copy the trunk stays
                tree.keep([tree.descend(best)])  # the evaluated part of the answer joins the trunk
        if prefixes is not None:
            prefixes.note(tree.prompt_length, tree.reused)
        for each in job.trees:
            each.save()
        if job.retire:
            job.retire(tree.retire())

    def _preempt(self, job: Job) -> None:
        """Free the pages of a search for others; it starts again, with the same result, when another has ended."""
        assert job.generator is not None
        try:
            job.generator.close()
        except Exception as failure:
            self._end(job, error=failure)
            return
        for tree in job.trees:
            tree.release()
        self._drop(job)
        job.restart()
        job.gave_way, job.gave_way_to = job.gave_way + 1, [*self.running]
        self.waiting.insert(0, job)

"""The driver (scheduler): many searches, one forward pass per model and step.

A search yields a request; its pending tokens join those of other searches; one pass answers all of them. Long prompts
are evaluated in chunks, beside the decoding of others. When the pool is full, the latest search is preempted and starts
again later; a search that is alone gets KVMemoryError.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from engine.cache.pool import PagePool
from engine.cache.slots import Trunk
from engine.cache.tree import TokenTree
from engine.contract import Evaluate, Pause, Report, SearchResult
from engine.contract.checks import (
    ContractError,
    generator_fault,
    guarded_read,
    guarded_report,
    report_fault,
    request_fault,
    result_fault,
    tokens_fault,
)
from engine.errors import KVMemoryError, NumericsError
from engine.rules.state import Plan
from engine.step.ahead import Fill, choose
from engine.step.interrupts import uninterrupted
from engine.step.jobs import Batch, Job, Pending, Share, Work
from engine.step.packing import Chunk
from engine.step.phases import PhaseObserver, observed_read, phase
from engine.step.runner import Runner
from engine.step.threads import MACHINE


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
        self.paused: list[Job] = []  # of those that run; in the order in which they go on, one in a step
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
                if self.paused:
                    self._resume(self.paused.pop(0))
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
                if isinstance(request, Pause):
                    self.paused.append(job)
                    break
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

    def _request(self, job: Job, request: Any) -> Evaluate | Pause:
        """The search's next Evaluate or Pause, after the reports before it are processed. Raises ContractError."""
        assert job.generator is not None
        fail = partial(setattr, job, "fault")
        while isinstance(request, Report):
            if isinstance(request, Pause):
                return request
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
            self._leaves(job)
            self._crowded = False

    def _leaves(self, job: Job) -> None:
        for jobs in (self.running, self.paused):
            if job in jobs:
                jobs.remove(job)

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
        self._leaves(job)
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

"""The one loop: starts and ends requests, taking turns among clients, while one driver steps them all."""

import contextlib
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.cache.slots import Trunk
from engine.cache.tree import TokenTree
from engine.contract import Judge, Output, SearchGenerator, SearchResult, Task
from engine.contract.checks import search_error
from engine.contract.distinct import distinct
from engine.contract.trace import UNTRACED
from engine.errors import CoppiceError
from engine.load.pools import is_out_of_memory, out_of_memory
from engine.request import Checked, Models, Prefill, Progress, Request, check_request, event_of
from engine.rewards import Responses, make_judge
from engine.rules.logprobs import HiddenRows
from engine.step.drafting import JobDrafts
from engine.step.driver import Driver
from engine.step.jobs import Job
from engine.step.overlapped import make_driver
from engine.step.phases import PhaseObserver
from engine.text.stopping import TextStream
from engine.words import TEXT_SUM

Outcome = SearchResult | CoppiceError
CLIENTS = 4096  # clients whose last turns are known
CLIENT_SHARE = 7 / 8  # the part of the KV cache that one of several clients may have


@dataclass(frozen=True)
class News:
    """The results of a step for one request.

    Attributes:
        began: when the search started, by `time.perf_counter`.
        text: further text of the best output, which is final.
        outcome: the result or the error; None while the search runs.
        event: the state of the search, if `Entry.wants` is set; its report's functions have already been computed.
    """

    began: float
    text: str = ""
    outcome: Outcome | None = None
    event: Prefill | Progress | None = None


@dataclass(eq=False)
class Entry:
    """A request that waits or runs.

    Attributes:
        tell: called with every `News`, in the thread that steps; it must not raise.
        client: the client that made the request.
        stream: whether its text is delivered as soon as it is final.
        wants: set by the caller while it waits for the next event; None if it wants none.
        trunk: the cached trunk that its tree takes over.
        retire: called with the tree's trunk at the end.
        job: the driver's job; None while the request waits.
        announced: whether `tell` has been called, which first happens when the search starts.
        seen: the latest event.
        text: converts settled tokens to text, for `stream`, once the request is queued.
        finish: computes the outcome of a search that has ended, a piece at a time.
        interrupted: whether it is to end as soon as it has found again what its caller was told.
    """

    checked: Checked
    tell: Callable[[News], None]
    client: str = ""
    stream: bool = False
    wants: threading.Event | None = None
    trunk: Trunk | None = None
    retire: Callable[[Trunk], None] | None = None
    job: Job | None = None
    announced: bool = False
    seen: Prefill | Progress | None = None
    text: TextStream | None = None
    finish: Generator[None, None, Outcome] | None = None
    interrupted: bool = False

    @property
    def began(self) -> float:
        """When the search started; 0.0 before."""
        return 0.0 if self.job is None else self.job.started


class Service:
    """The requests of all clients: callers call `step` in a loop, and one driver serves them all.

    All methods except `check` belong to one thread; any threads may check concurrently.

    A free place goes to the waiting client with the fewest running requests; among equals, to the one whose last turn
    is longest ago. The last place, and a part of the KV cache, are reserved for clients that have none.

    An error of a request ends that request.

    Args:
        models: the models that answer the requests.
        parallel: most searches at once.
        observer: is notified of the phases of each step.

    Attributes:
        alone: whether all requests come from a single client.
        keeps_files: whether searches may store data about the model in the user's cache folder.
        entries: the requests that the driver is working on.
        waiting: the other requests, by client.
    """

    def __init__(self, models: Models, parallel: int = 16, observer: PhaseObserver | None = None):
        self.models, self.parallel, self.observer = models, parallel, observer
        self.alone = self.keeps_files = True
        self.entries: list[Entry] = []
        self.waiting: dict[str, deque[Entry]] = {}
        self._turns: dict[str, int] = {}  # clients -> when they had their last turns, the latest last
        self._turn = 0
        self.driver = self._new_driver()

    def _new_driver(self) -> Driver:
        runners = {role: model.runner for role, model in self.models.by_role.items()}
        return make_driver(runners, self.parallel, self.observer)

    def check(self, request: Request) -> Checked:
        """Check a request against the models and their memory; compiles its grammar. Raises UsageError,
        KVMemoryError."""
        return check_request(self.models, request, self.share)

    @property
    def share(self) -> float:
        """How much of the KV cache one client may have."""
        return 1.0 if self.alone else CLIENT_SHARE

    def submit(self, entry: Entry) -> None:
        """Queue a request. Raises ValueError if its trace has recorded another request."""
        checked, request, target = entry.checked, entry.checked.request, self.models.target
        if request.trace is not None:
            models = self.models.by_role
            names = {role: model.name for role, model in models.items()}
            tokenizers = {role: model.tokenizer for role, model in models.items()}
            request.trace.begin(request.search, checked.ids, names, tokenizers)
        if entry.stream:
            entry.text = TextStream(target.tokenizer, request.stop, checked.healed, checked.ids)
        self.waiting.setdefault(entry.client, deque()).append(entry)

    def cancel(self, entry: Entry) -> None:
        """Abandon a request: its pages return to the pool now. No effect if it has ended."""
        if entry in self.entries:
            self.entries.remove(entry)
            if entry.job is not None:
                self.driver.cancel(entry.job)
                entry.job.error = None  # its traceback refers to the job
        elif entry in (queue := self.waiting.get(entry.client, deque())):
            queue.remove(entry)
            if not queue:
                del self.waiting[entry.client]

    @property
    def busy(self) -> bool:
        return self.driver.busy or bool(self.waiting or self.entries)

    def interrupt(self, entry: Entry) -> None:
        """End a search with its best candidate so far; the next step reports the outcome.

        A search that was preempted and starts again first finds again what its caller was told.
        """
        if (job := entry.job) is not None and not job.done:
            told = 0 if entry.text is None else entry.text.tokens
            entry.interrupted = not job.trees or len(job.settled) < told
            if entry.interrupted:
                return
            best = list(job.report.best()) if job.report.best else list(job.settled)
            self.driver.stop(job, SearchResult([Output(best, None, None, "interrupted")]))

    def take(self, entry: Entry) -> None:
        """End a search with the result that its latest report declares ready; the next step reports the outcome."""
        if (job := entry.job) is not None and not job.done and job.report.ready is not None:
            self.driver.stop(job, job.report.ready())

    def step(self) -> None:
        """Admit requests, evaluate at most one pass of each model, and report the results.

        Raises:
            KVMemoryError: the machine is out of memory. After this or any other error, call `abandon` or `close`.
        """
        self._admit()
        if self.driver.busy:
            try:
                self.driver.step()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise out_of_memory() from error
        for entry in [entry for entry in self.entries if entry.interrupted]:
            self.interrupt(entry)
        self.report()

    def report(self) -> None:
        """Report the results of requests since the last call."""
        for entry in [*self.entries]:
            with self._failing(entry):
                self._report(entry)
        self._finish()

    @contextlib.contextmanager
    def _failing(self, entry: Entry) -> Iterator[None]:
        """Turn any error into the outcome of one request."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # libraries in other languages panic with one
            self.cancel(entry)
            entry.tell(News(entry.began, outcome=as_ours(error, "the answer failed")))

    def close(self) -> None:
        """Abandon all requests and return their pages."""
        self.waiting = {}
        entries, self.entries = self.entries, []
        self.driver.close()
        for entry in entries:
            if entry.job is not None:
                entry.job.error = None

    def end(self, error: CoppiceError) -> None:
        """End all requests with an error, and start afresh."""
        waiting, self.waiting = self.waiting, {}
        self.abandon(error)
        for entry in itertools.chain(*waiting.values()):
            entry.tell(News(0.0, outcome=error))

    def abandon(self, error: CoppiceError) -> None:
        """End the driver's requests with an error; waiting requests get a new driver."""
        entries, work, waiting = self.entries, self.driver.work, self.waiting
        try:
            self.close()
        finally:
            self.driver = self._new_driver()
            self.driver.work, self.waiting = work, waiting
            for entry in entries:
                entry.tell(News(entry.began, outcome=error))

    def _admit(self) -> None:
        """Hand over as many requests as the driver starts at once, but none of a client one of whose requests is
        preempted."""
        self.driver.share = self.share
        if not self.waiting:
            return
        preempted = {job.client for job in self.driver.waiting}
        room = self.driver.parallel - len(self.driver.running) - len(self.driver.waiting)
        running = Counter(entry.client for entry in self.entries)
        for _ in range(room):
            if not (clients := [client for client in self.waiting if client not in preempted]):
                return
            client = min(clients, key=lambda each: (running[each], self._turns.get(each, 0)))
            if running[client] and running.total() == self.driver.parallel - 1 and not self.alone:
                return
            entry = self.waiting[client].popleft()
            if not self.waiting[client]:
                del self.waiting[client]
            running[client] += 1
            self._note_turn(client)
            try:
                self._start(entry)
                self.entries.append(entry)
            except Exception as error:
                entry.tell(News(0.0, outcome=as_ours(error, "the start failed")))

    def _start(self, entry: Entry) -> None:
        """Hand a request to the driver."""
        checked, request, target = entry.checked, entry.checked.request, self.models.target
        model_key = target.key_with(request.adapter) if self.keeps_files else ""
        job = Job(
            starter(self.models, self.driver, checked, entry.trunk, model_key),
            retire=entry.retire,
            trace=request.trace or UNTRACED,
            search=request.search,
            constrained=checked.constrained,
            salt=request.cache_salt,
            adapter=target.adapter(request.adapter),
            client=entry.client,
        )
        if request.logprobs is not None:
            job.kept = HiddenRows(target.runner, request.logprobs, checked.constrained)
        if checked.drafts is not None:
            runner = target.runner
            job.drafts = JobDrafts(
                checked.drafts, request.cache_salt, checked.limit, checked.eos, runner.vocab_size, runner.time
            )
        entry.job, entry.trunk, entry.retire = self.driver.submit(job), None, None

    def _note_turn(self, client: str) -> None:
        self._turn += 1
        self._turns.pop(client, None)
        self._turns[client] = self._turn
        if len(self._turns) > CLIENTS:
            del self._turns[next(iter(self._turns))]

    def _report(self, entry: Entry) -> None:
        """Report the result of a step for a running request."""
        job, text, event = entry.job, "", None
        if job is None or not job.started or entry.finish is not None:
            return
        if entry.text is not None and job.settled and entry.checked.request.distinct != TEXT_SUM:  # its best may change
            constrained = entry.checked.constrained
            text = entry.text.push(job.settled if constrained is None else constrained.endings.real(job.settled))
        if job.done:
            entry.finish = finishing(self.models, entry.checked, job)
        elif entry.wants is not None and entry.wants.is_set():
            event = self._event(entry)
        if text or event or not entry.announced:
            entry.announced = True
            entry.tell(News(job.started, text, event=event))

    def _finish(self) -> None:
        """Advance the outcomes of searches that have ended, until one of them has done a piece of work."""
        for entry in [entry for entry in self.entries if entry.finish is not None]:
            with self._failing(entry):
                try:
                    next(entry.finish)  # type: ignore[arg-type]
                except StopIteration as stop:
                    outcome, text = stop.value, ""
                    if entry.text is not None and isinstance(outcome, SearchResult):
                        text = entry.text.finish(outcome.outputs[0].text)
                    self.entries.remove(entry)
                    entry.tell(News(entry.began, text, outcome))
                    continue
                self.entries.remove(entry)
                self.entries.append(entry)  # so that other requests have their turn first
                return

    @staticmethod
    def _event(entry: Entry) -> Prefill | Progress | None:
        """The state of a search, if it is new."""
        assert entry.job is not None and entry.wants is not None
        event = event_of(entry.job, entry.seen)
        if event is None:
            return None
        entry.wants.clear()
        entry.seen = event
        if not isinstance(event, Progress):
            return event
        report, tree = event.report, event.tree
        best, beams = report.best and [*report.best()], report.beams and [*report.beams()]
        known = {} if best is None else {"best": lambda: best}
        known |= {} if beams is None else {"beams": lambda: beams}
        return Progress(replace(report, **known, ready=None), tree)


def starter(
    models: Models, driver: Driver, checked: Checked, trunk: Trunk | None, model_key: str
) -> Callable[[Job], SearchGenerator]:
    """The function that starts a request's search. It holds no reference to a job: that would be a cycle, which would
    keep the models in memory until the garbage collector runs."""
    target, search, constrained = models.target, checked.request.search, checked.constrained
    if checked.request.distinct is not None:
        search = search.with_all_outputs()
    time = target.runner.time

    def start(job: Job) -> SearchGenerator:
        tree = driver.open_tree(job, "target", checked.ids, len(checked.ids) + checked.limit, trunk)
        return search.run(
            Task(
                tree,
                checked.limit,
                checked.eos,
                target.runner.vocab_size,
                ends_of(tree, checked),
                lambda model, prompt: driver.open_tree(job, model, prompt),
                target.tokenizer,
                # With measured times, processes that share the model would diverge.
                None if target.runner.shared else lambda tokens: time.charge(tokens, *job.batch_load),
                model_key=model_key,
                start_token=target.start_token,
                judge=judge_of(models, driver, job, checked) if "reward" in search.models else None,
                spare=lambda pool: driver.spare(job, pool),
                normalised=constrained is None,
                rising=constrained is not None and constrained.raises,
                rows=target.runner.most_rows,
            )
        )

    return start


def ends_of(
    tree: TokenTree, checked: Checked
) -> Callable[[Sequence[int], Sequence[Sequence[int]]], list[str | None]] | None:
    """`Task.ends` of a request."""
    stops, constrained = checked.stops, checked.constrained
    # With end-of-sequence tokens, one of them ends an output after which no token is allowed.
    endings = constrained.endings if constrained is not None and constrained.bans else None
    endings = None if endings is None or endings.eos else endings
    if stops is None and endings is None:
        return None

    def ends(nodes: Sequence[int], rests: Sequence[Sequence[int]]) -> list[str | None]:
        reasons: list[str | None] = [None] * len(nodes)
        if endings is not None:
            for i in endings.reached(tree, nodes, rests):
                reasons[i] = "constraint"
        if stops is not None:
            for i, (node, rest) in enumerate(zip(nodes, rests, strict=True)):
                path = [*tree.path(node), *rest]
                reasons[i] = "stop" if stops(path if endings is None else endings.real(path)) else reasons[i]
        return reasons

    return ends


def judge_of(models: Models, driver: Driver, job: Job, checked: Checked) -> Judge:
    """The object that computes rewards for a request whose search ranks by them."""
    request, target, given = checked.request, models.target, checked.request.prompt
    if not isinstance(given, str):
        given = target.tokenizer.decode(checked.ids) + checked.healed if target.tokenizer else ""
    endings = None if checked.constrained is None else checked.constrained.endings
    answer = Responses(
        target.tokenizer, checked.ids, request.messages, checked.eos, checked.stops, given, checked.healed, endings
    )
    reward = request.reward or models.reward or models.others["reward"]
    return make_judge(reward, target, answer, lambda prompt: driver.open_tree(job, "reward", prompt))


def finishing(models: Models, checked: Checked, job: Job) -> Generator[None, None, Outcome]:
    """The outcome of a request that has ended; yields between pieces of work that take about as long as a pass of few
    rows."""
    cause, job.error = job.error, None  # its traceback refers to the job
    if cause is not None:
        return _reported(checked, cause)
    assert job.result is not None
    result, tokenizer = job.result, models.target.tokenizer
    if checked.constrained is not None:
        checked.constrained.endings.settle(result, "reward" in checked.request.search.models)
    try:
        texts = [checked.text(tokenizer, output.token_ids) for output in result.outputs]
    except CoppiceError as error:  # the tokenizer cannot decode these tokens
        return error
    worded = zip(result.outputs, texts, strict=True)
    result.outputs = [replace(output, text=text) if text else output for output, text in worded]
    if (how := checked.request.distinct) is not None:
        among = len(result.outputs)
        merged = distinct(result.outputs, how)
        result.outputs = merged[: getattr(checked.request.search, "num_return_sequences", 1)]
        result.stats |= {"outputs_found": among, "distinct_texts": len(merged)}
    try:
        if job.kept is not None:
            result.outputs = yield from job.kept.filling(result.outputs)
    except Exception as failure:
        return _reported(checked, failure)
    result.stats["new_tokens"] = len(result.outputs[0].token_ids)
    if checked.request.trace is not None:
        checked.request.trace.answer(result.outputs)
    return result


def _reported(checked: Checked, cause: BaseException) -> CoppiceError:
    """The error to report for the exception that ended a request."""
    if isinstance(cause, CoppiceError):
        return cause
    if not is_out_of_memory(cause):
        return search_error(type(checked.request.search), cause)
    error = out_of_memory()
    error.__cause__ = cause
    return error


def as_ours(error: BaseException, what: str) -> CoppiceError:
    """An error for waiting callers; an exception that is not a CoppiceError becomes its cause."""
    if isinstance(error, CoppiceError):
        return error
    ours = CoppiceError(f"{what}: {type(error).__name__}: {error}"[:500])
    ours.__cause__ = error
    return ours

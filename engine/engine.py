"""Engine: a checkpoint made ready to answer. `generate` for many prompts, `stream` for one, `Session` for a chat."""

import itertools
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.capabilities import Capabilities, Precision
from engine.compiling import LEAST, compile_model, warm_up
from engine.contract import attributed, check_search, search_error
from engine.driver import Driver, Run, Runner
from engine.errors import CheckpointError, CoppiceError, UsageError
from engine.graphs import make_runner
from engine.loading import (
    check_arguments,
    check_parallel,
    check_quant,
    load_template,
    model_key,
    pick_device,
    pick_dtype,
)
from engine.memory import check_memory, is_out_of_memory, make_pools, out_of_memory, trim_memory
from engine.packing import Chunk
from engine.pool import PagePool
from engine.requests import Evaluate, Output, Report, Search, SearchGenerator, SearchResult, Task
from engine.rewards import Messages, Responses, RewardFunction, check_messages, make_judge
from engine.text.stopping import StopStrings, TextStream
from engine.text.template import ChatTemplate
from engine.text.tokenizer import FILES, Tokenizer
from engine.trace import Trace
from engine.tree import TokenTree, Trunk
from models import load_model
from models.checkpoint import Checkpoint
from models.config import ModelShape


@dataclass(frozen=True)
class Request:
    """One prompt and what to do with it.

    Args:
        prompt: token ids, or text (encoded with the special tokens that the tokenizer adds by itself).
        search: a search's configuration.
        max_new_tokens: limit of each output; the model's context may end it earlier.
        eos_token_ids: tokens that end an output; None takes the checkpoint's.
        ignore_eos: no token ends an output.
        stop: strings that end an output; they are cut off its text.
        messages: what the prompt was rendered from, for a reward model with a chat template; it reads a plain prompt
            as a user's only message.
        reward: (prompt, texts) -> scores, to rank by instead of a reward model. The prompt is `messages`, if there are
            any, else its text.
        trace: records what the search does, to be looked at; one for each request.
    """

    prompt: Sequence[int] | str
    search: Search
    max_new_tokens: int = 256
    eos_token_ids: Iterable[int] | None = None
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    messages: Messages | None = None
    reward: RewardFunction | None = None
    trace: Trace | None = None


@dataclass(frozen=True)
class Prefill:
    """The prompt is being read: `done` of `total` tokens."""

    done: int
    total: int


@dataclass(frozen=True)
class Text:
    """Text that the best output is certain to go on with."""

    text: str


@dataclass(frozen=True)
class Progress:
    """A step of the search was made; `report` has its figures and its best candidate so far, `tree` the live tree."""

    report: Report
    tree: TokenTree


@dataclass(frozen=True)
class Done:
    """The end; every `Text` before it adds up to the text of the best output."""

    result: SearchResult


Event = Prefill | Text | Progress | Done


@dataclass
class _Job:
    """A request made ready: ids, limits and its run."""

    request: Request
    ids: list[int]
    limit: int
    eos: frozenset[int]
    stops: StopStrings | None
    run: Run = field(init=False)


@dataclass
class _Loaded:
    """A checkpoint in memory, without a pool yet: pools share what memory the weights of all models leave."""

    folder: Path
    checkpoint: Checkpoint
    model: Any
    precision: Precision
    quant: str
    compiled: bool
    tokenizer: Tokenizer | None
    template: ChatTemplate | None

    @staticmethod
    def open(
        folder: str | Path, dtype: str, device: torch.device, chat_template: str | Path | None, quant: str, compile: str
    ) -> "_Loaded":
        checkpoint = Checkpoint.open(folder)
        precision = pick_dtype(dtype, checkpoint, device)
        tokenizer = Tokenizer.load(folder) if any((Path(folder) / name).exists() for name in FILES) else None
        template = load_template(folder, chat_template, tokenizer)
        model = load_model(checkpoint, precision.dtype, device, quant)
        compiled = compile == "on" and compile_model(model)
        return _Loaded(Path(folder), checkpoint, model, precision, quant, compiled, tokenizer, template)

    def engine(self, pool: PagePool, parallel: int) -> "Engine":
        shape, tokenizer = self.model.shape, self.tokenizer
        vocab_size = min(shape.vocab_size, tokenizer.size) if tokenizer else shape.vocab_size
        eos = self.checkpoint.eos_token_ids
        if not eos and "eos_token_id" not in self.checkpoint.config and not self.checkpoint.generation_config:
            eos = self.model.default_eos_token_ids
        if not eos and tokenizer and tokenizer.eos_token_id is not None:
            eos = frozenset([tokenizer.eos_token_id])
        engine = Engine(
            make_runner(self.model, pool, vocab_size),
            shape,
            tokenizer=tokenizer,
            template=self.template,
            eos_token_ids=eos,
            name=self.folder.resolve().name,
            parallel=parallel,
        )
        runner = engine.runner
        engine.capabilities = Capabilities.of(self.model, self.precision, self.quant, runner.device, runner.impl)
        engine.model_key = model_key(self.checkpoint, self.precision.dtype, self.quant)
        engine.start_token = min([t for t in [self.checkpoint.bos_token_id] if t is not None] or eos or [0])
        if self.compiled and engine.runner.device.type == "cpu":
            engine.runner.token_buckets = engine.runner.word_buckets = LEAST
            warm_up(self.model, lambda: engine.logits([engine.start_token] * 5))
        return engine


class Engine:
    """A model, its pool of KV pages, its tokenizer; the models beside it by role. Made by `Engine.load`."""

    def __init__(
        self,
        runner: Runner,
        shape: ModelShape,
        *,
        tokenizer: Tokenizer | None = None,
        template: ChatTemplate | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        name: str = "model",
        parallel: int = 16,
        companions: "dict[str, Engine] | None" = None,
    ):
        check_parallel(parallel)
        self.runner, self.shape, self.name, self.parallel = runner, shape, name, parallel
        self.template, self.eos_token_ids = template, eos_token_ids
        self.companions = companions or {}
        self.reward: RewardFunction | None = None  # instead of a model
        self.model_key, self.start_token = "", 0  # see `Task`
        self._tokenizer = tokenizer
        self.load_seconds = 0.0
        self.capabilities = Capabilities()  # what the model computes in, and which fast paths this machine has

    @staticmethod
    def load(
        folder: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        kv_memory: int | str | None = None,
        compile: str = "off",
        quant: str = "none",
        chat_template: str | Path | None = None,
        parallel: int = 16,
        draft: str | Path | None = None,
        reward: str | Path | RewardFunction | None = None,
    ) -> "Engine":
        """Load a Hugging Face checkpoint folder.

        Args:
            folder: holds config.json, safetensors weights and tokenizer files.
            dtype: "float32", "bfloat16", "float16"; "auto" is the checkpoint's own, but float32 on a processor without
                products of that dtype, where it is several times as fast; `capabilities` says which and why.
            device: "cpu", "cuda" or "auto".
            threads: CPU threads; None leaves torch's choice.
            kv_memory: bytes of the KV pools together, which all hold as many tokens, or a size such as "512M"; None
                takes up to half of the free memory.
            compile: "on" runs the layers through torch.compile: loading takes seconds more, steps a little less.
            quant: "int8" keeps matrices as int8: a quarter of their float32 size, on a CPU with int8 products.
            chat_template: a template file, "none" for plain completion, None for the checkpoint's own.
            parallel: most searches at once.
            draft: folder of a smaller model of the same tokenizer, for searches that draft.
            reward: folder of a model with a scalar head, for searches that rank; or a function, see `Request`.

        Raises:
            CheckpointError: the folder is not a checkpoint that can be run.
            KVMemoryError: kv_memory holds not even one page.
            UsageError: an argument out of range.
        """
        began = time.perf_counter()
        budget = check_arguments(folder, threads, kv_memory, compile, chat_template, parallel, draft, reward)
        if threads is not None:
            torch.set_num_threads(threads)
        place = pick_device(device)
        check_quant(quant, place)
        loaded = [_Loaded.open(folder, dtype, place, chat_template, quant, compile)]
        names = {"draft": draft, "reward": None if callable(reward) else reward}
        roles = [role for role in names if names[role] is not None]
        loaded += [_Loaded.open(names[role] or "", dtype, place, None, quant, compile) for role in roles]
        pools = make_pools([(part.model.shape, part.precision.dtype) for part in loaded], place, budget)
        target, *others = [part.engine(pool, parallel) for part, pool in zip(loaded, pools, strict=True)]
        for role, engine in zip(roles, others, strict=True):
            target.add(role, engine)
        if callable(reward):
            target.add("reward", reward)
        trim_memory()
        target.load_seconds = time.perf_counter() - began
        return target

    def __del__(self, is_finalizing=sys.is_finalizing, trim=trim_memory) -> None:
        if not is_finalizing():
            vars(self).clear()  # weights first: the C library would keep most of their memory
            trim()

    @property
    def pool(self) -> PagePool:
        """The target model's KV pages."""
        return self.runner.pool

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises CheckpointError if it has none."""
        if self._tokenizer is None:
            raise CheckpointError(
                "the checkpoint has no tokenizer",
                where=self.name,
                remedy="add its tokenizer files, or give prompts as token ids",
            )
        return self._tokenizer

    def add(self, role: str, engine: "Engine | RewardFunction") -> None:
        """Let searches ask another model too.

        Args:
            role: "draft" or "reward".
            engine: holds the model; it may be used by itself as well. A function takes a reward model's place.

        Raises:
            UsageError: it cannot play that role: a reward model without a scalar head, a draft with one, or with
                another tokenizer.
        """
        if role not in ("draft", "reward"):
            raise UsageError(f"role: expected draft or reward, got {role!r}")
        if not isinstance(engine, Engine):
            if role != "reward" or not callable(engine):
                raise UsageError(f"{role}: expected an Engine{' or a function' * (role == 'reward')}, got {engine!r}")
            self.reward = engine
            return
        if role == "reward" and not engine.shape.scores:
            raise UsageError(
                "the reward model has no scalar head",
                where=engine.name,
                remedy="give a checkpoint whose architecture ends in ForSequenceClassification",
            )
        if role == "draft":
            mine, its = self._tokenizer, engine._tokenizer
            differ = mine.difference(its) if mine and its else ""
            if not (mine and its) and self.shape.vocab_size != engine.shape.vocab_size:
                differ = f"{self.shape.vocab_size} tokens in one, {engine.shape.vocab_size} in the other"
            if engine.shape.scores:
                raise UsageError("the draft is a reward model: it generates none", where=engine.name)
            if differ:
                raise UsageError(
                    "the draft has another tokenizer than the model",
                    where=f"{engine.name}: {differ}",
                    remedy="drafts must be made of the same tokens",
                )
        self.companions[role] = engine
        if role == "reward":
            self.reward = None

    # --- asking ---

    def generate(self, prompts: Iterable[Sequence[int] | str], search: Search, **options: Any) -> list[SearchResult]:
        """Answer prompts, all by one search; options as in `Request`.

        Raises:
            CoppiceError: the first error of any of them.
        """
        if isinstance(prompts, str):
            raise UsageError("prompts: expected a list of prompts, got one string", remedy="write [prompt]")
        if not isinstance(prompts, Iterable):
            raise UsageError(f"prompts: expected a list of prompts, got {prompts!r}", remedy="write [prompt]")
        results: dict[int, SearchResult] = {}
        for i, outcome in self.serve(Request(prompt, search, **options) for prompt in prompts):
            if isinstance(outcome, CoppiceError):
                try:
                    raise outcome
                finally:
                    del outcome  # its traceback knows this frame
            results[i] = outcome
        return [results[i] for i in sorted(results)]

    def serve(
        self, requests: Iterable[Request | CoppiceError | None], *, on_step: Callable[[Driver], None] | None = None
    ) -> Generator[tuple[int, SearchResult | CoppiceError], None, None]:
        """Answer requests as they come, many in one pass; one that fails does not disturb the others.

        Args:
            requests: read as there is room for them; an error in a request's place is passed on, None (which takes no
                place) means that there is none at the moment.
            on_step: called after every step, to show progress or to stop by raising.

        Yields:
            (place among the requests, result or error), as they are finished.
        """
        if not isinstance(requests, Iterable):
            raise UsageError(f"requests: expected an iterable of Request, got {requests!r}")
        _check_callable("on_step", on_step)
        driver = self._driver()
        source, jobs, places = iter(requests), {}, itertools.count()
        more = True
        try:
            while more or driver.busy:
                while more and len(jobs) < self.parallel:
                    try:
                        request = next(source)
                    except StopIteration:
                        more = False
                        break
                    if request is None:
                        break
                    i = next(places)
                    try:
                        if isinstance(request, CoppiceError):
                            raise request
                        if not isinstance(request, Request):
                            raise UsageError(f"requests: expected a Request, got {request!r}")
                        jobs[i] = self._submit(driver, request)
                    except CoppiceError as error:
                        yield i, error
                if driver.busy:
                    self._step(driver)
                    if on_step:
                        on_step(driver)
                for i in [i for i, job in jobs.items() if job.run.done]:
                    yield i, self._outcome(jobs.pop(i))
        finally:
            driver.close()
            for job in jobs.values():
                job.run.error = None  # see `_submit`

    def stream(
        self,
        prompt: Sequence[int] | str,
        search: Search,
        *,
        interrupted: Callable[[], bool] = lambda: False,
        trunk: Trunk | None = None,
        retire: Callable[[TokenTree], None] | None = None,
        **options: Any,
    ) -> Iterator[Event]:
        """Answer one prompt, telling text as soon as it is certain: while beams still compete, what they agree on.

        Args:
            interrupted: asked after every step; True ends the search with the best candidate so far.
            trunk, retire: cache to take over and to hand on, see `Session`.

        Raises:
            CoppiceError: as `generate`.
        """
        _check_callable("interrupted", interrupted)
        driver = self._driver()
        job = self._submit(driver, Request(prompt, search, **options), trunk=trunk, retire=retire)
        run, text = job.run, TextStream(self._tokenizer, job.request.stop)
        seen: Report | None = None
        try:
            while not run.done:
                self._step(driver)
                if new := text.push(run.settled):
                    yield Text(new)
                if run.trees and not run.prefilled and not run.done:
                    tree = run.trees[0]
                    yield Prefill(tree.trunk.cached, tree.prompt_length)
                elif run.report is not seen and not run.done:
                    seen = run.report
                    yield Progress(run.report, run.trees[0])
                if interrupted() and not run.done:
                    driver.stop(run, self._interrupted(run))
            outcome = self._outcome(job)
            if isinstance(outcome, CoppiceError):
                try:
                    raise outcome
                finally:
                    del outcome
            if rest := text.finish(outcome.outputs[0].text):
                yield Text(rest)
            yield Done(outcome)
        finally:
            driver.close()

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits after every token of a sequence, evaluated afresh: float32 [len(ids), V]. For checks."""
        self._check_ids(ids)
        tree = TokenTree(self.pool, ids)
        rows = []
        try:
            with torch.inference_mode():
                for start in range(0, len(ids), self.runner.budget):
                    n = min(self.runner.budget, len(ids) - start)
                    hidden_TE = self.runner.forward([Chunk(tree, n, [], tree.place(n, []))])
                    rows.append(self.runner.model.logits(hidden_TE[:n]).float())
        finally:
            tree.release()
        return torch.cat(rows)

    def scores(self, texts: Iterable[Sequence[int]]) -> list[float]:
        """What a scalar-head model (a reward model) says of token sequences, evaluated together.

        Raises:
            CoppiceError: the first error of any of them.
        """
        if not self.shape.scores:
            raise UsageError("this checkpoint has no scalar head", where=self.name, remedy="it generates text")
        if not isinstance(texts, Iterable) or isinstance(texts, str):
            raise UsageError(f"texts: expected a list of lists of token ids, got {texts!r}")
        texts = list(texts)
        for ids in texts:
            self._check_ids(ids)

        def ask(run: Run, ids: Sequence[int]) -> SearchGenerator:
            tree = driver.open_tree(run, "target", ids)
            rows_N1, _ = yield Evaluate(tree, [tree.root])
            return SearchResult([Output(list(ids), None, float(rows_N1[0, 0]), "length")])

        driver = self._driver()
        try:
            runs = [driver.submit(Run(lambda run, ids=ids: ask(run, ids))) for ids in texts]
            while driver.busy:
                self._step(driver)
        finally:
            driver.close()
        for run in runs:
            if run.error is not None:
                raise run.error
        return [run.result.outputs[0].score for run in runs]  # type: ignore[union-attr,misc]

    # --- inside ---

    def _driver(self) -> Driver:
        runners = {"target": self.runner, **{role: engine.runner for role, engine in self.companions.items()}}
        return Driver(runners, self.parallel)

    def _submit(
        self,
        driver: Driver,
        request: Request,
        trunk: Trunk | None = None,
        retire: Callable[[TokenTree], None] | None = None,
    ) -> _Job:
        job = self._prepare(request)
        # What starts the search knows the job's parts, not the job: a run that held its job would be a cycle, which
        # keeps the model in memory until the garbage collector runs. Errors are let go of for the same reason.
        ids, limit, eos, stops = job.ids, job.limit, job.eos, job.stops
        steady = self.shape.steady_length
        if trunk is not None and steady is not None and max(len(ids), trunk.cached) > steady:
            trunk.release(self.pool)

        def start(run: Run) -> SearchGenerator:
            tree = driver.open_tree(run, "target", ids, len(ids) + limit, trunk)
            judge = None
            if "reward" in request.search.models:
                given = request.prompt
                if not isinstance(given, str):
                    given = self._tokenizer.decode(ids) if self._tokenizer else ""
                answer = Responses(self._tokenizer, ids, request.messages, eos, stops, given)
                reward = request.reward or self.reward or self.companions["reward"]
                judge = make_judge(reward, self, answer, lambda prompt: driver.open_tree(run, "reward", prompt))
            return request.search.run(
                Task(
                    tree,
                    limit,
                    eos,
                    self.runner.vocab_size,
                    stops,
                    lambda model, prompt: driver.open_tree(run, model, prompt),
                    self._tokenizer,
                    lambda tokens: self.runner.time.charge(tokens, *run.company),
                    model_key=self.model_key,
                    start_token=self.start_token,
                    judge=judge,
                    spare=lambda pool: driver.spare(run, pool),
                )
            )

        if request.trace is not None:
            models = {"target": self, **self.companions}
            names = {role: engine.name for role, engine in models.items()}
            request.trace.begin(request.search, ids, names, {role: e._tokenizer for role, e in models.items()})
        job.run = driver.submit(Run(start, retire=retire, trace=request.trace, search=request.search))
        return job

    def _prepare(self, request: Request) -> _Job:
        """Check a request against the model and its memory. Raises UsageError or KVMemoryError."""
        if self.shape.scores:
            raise UsageError(
                "this checkpoint is a reward model: it scores texts and generates none",
                where=self.name,
                remedy="give a checkpoint whose architecture ends in ForCausalLM",
            )
        if isinstance(request.search, type) or not hasattr(request.search, "run"):
            raise UsageError(f"search: expected a configuration such as search.Trie(), got {request.search!r}")
        if not isinstance(request.prompt, Sequence) or isinstance(request.prompt, bytes | bytearray):  # text is one too
            raise UsageError(f"prompt: expected token ids or text, got {request.prompt!r}")
        ids = self.tokenizer.encode(request.prompt) if isinstance(request.prompt, str) else list(request.prompt)
        self._check_ids(ids)
        new = request.max_new_tokens
        if type(new) is not int or new < 1:
            raise UsageError(f"max_new_tokens: expected an integer >= 1, got {new!r}")
        reach = self.shape.max_positions
        if reach is not None:
            new = min(new, reach - len(ids) + 1)  # the last token is never evaluated: it needs no position
        if not isinstance(request.eos_token_ids, Iterable | None):
            raise UsageError(f"eos_token_ids: expected a list of token ids, got {request.eos_token_ids!r}")
        ends = self.eos_token_ids if request.eos_token_ids is None else list(request.eos_token_ids)
        if any(type(token) is not int or token < 0 for token in ends):
            raise UsageError(f"eos_token_ids: expected token ids, got {sorted(map(repr, ends))}")
        if not isinstance(request.ignore_eos, bool):
            raise UsageError(f"ignore_eos: expected True or False, got {request.ignore_eos!r}")
        eos = frozenset() if request.ignore_eos else frozenset(ends)
        if not isinstance(request.stop, Sequence) or isinstance(request.stop, str | bytes):
            raise UsageError(f"stop: expected a list of non-empty strings, got {request.stop!r}")
        check_messages(request.messages)
        if not isinstance(request.trace, Trace | None):
            raise UsageError(f"trace: expected a Trace, got {request.trace!r}")
        stops = StopStrings(self.tokenizer, request.stop) if request.stop else None
        _check_callable("reward", request.reward, " of (prompt, texts)")
        check_search(request.search)
        for role in request.search.models:
            if role == "reward" and (request.reward or self.reward):
                continue
            if role not in self.companions:
                kind = {"draft": "a smaller one of the same tokenizer", "reward": "one with a scalar head"}[role]
                raise UsageError(f"this search needs a {role} model", remedy=f"give --{role} DIR, {kind}")
            beside = self.companions[role].shape.max_positions
            if role == "draft" and beside is not None:  # it reads the same tokens
                new = min(new, max(1, beside - len(ids) + 1))
        with attributed(type(request.search)):
            request.search.check(self.runner.vocab_size, eos)
        check_memory(self.pool, request.search, len(ids), new)
        return _Job(request, ids, new, eos, stops)

    def _check_ids(self, ids: Sequence[int]) -> None:
        """Raises UsageError for a prompt that is empty, has ids that the model lacks, or is longer than its context."""
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
            raise UsageError(f"prompt: expected token ids, got {ids!r}")
        if not ids:
            bare = self._tokenizer is not None and not self._tokenizer.encode("")
            why = ", and this tokenizer adds no token of its own to begin with" if bare else ""
            raise UsageError("the prompt is empty" + why, remedy="give at least one token to go on from")
        vocab = self.shape.vocab_size
        for i, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < vocab:
                raise UsageError(f"prompt: expected token ids from 0 to {vocab - 1}, got {token!r}", where=f"token {i}")
        reach = self.shape.max_positions
        if reach is not None and len(ids) > reach:
            raise UsageError(
                f"the prompt has {len(ids)} tokens, the model's context holds {reach}", remedy="shorten the prompt"
            )

    def _step(self, driver: Driver) -> None:
        try:
            driver.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory() from error

    def _interrupted(self, run: Run) -> SearchResult:
        best = list(run.report.best()) if run.report.best else list(run.settled)
        return SearchResult([Output(best, None, None, "interrupted")])

    def _outcome(self, job: _Job) -> SearchResult | CoppiceError:
        run = job.run
        cause, run.error = run.error, None  # whose traceback knows the run
        if isinstance(cause, CoppiceError):
            return cause
        if cause is not None:
            if not is_out_of_memory(cause):
                return search_error(type(job.request.search), cause)
            error = out_of_memory()
            error.__cause__ = cause
            return error
        assert run.result is not None
        result = run.result
        try:
            result.outputs = [replace(o, text=self._text(o, job.stops)) for o in result.outputs]
        except CoppiceError as error:  # the tokenizer cannot decode these tokens
            return error
        result.stats["new_tokens"] = len(result.outputs[0].token_ids)
        return result

    def _text(self, output: Output, stops: StopStrings | None) -> str:
        if self._tokenizer is None:
            return ""
        text = self._tokenizer.decode(output.token_ids)
        return stops.cut(text) if stops else text


def _check_callable(name: str, value: object, arguments: str = "") -> None:
    if value is not None and not callable(value):
        raise UsageError(f"{name}: expected a function{arguments}, got {value!r}")


class Session:
    """A conversation's memory: what one prompt shares with the one before it is not evaluated again.

    Between turns it holds the pages of the last turn's trunk; `close` gives them back.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.trunk: Trunk | None = None

    def stream(self, prompt: Sequence[int] | str, search: Search, **options: Any) -> Iterator[Event]:
        """As `Engine.stream`."""

        def retire(tree: TokenTree) -> None:
            self.trunk = tree.retire()

        trunk, self.trunk = self.trunk, None
        try:
            yield from self.engine.stream(prompt, search, trunk=trunk, retire=retire, **options)
        finally:
            if trunk is not None and trunk.pages:  # the prompt was refused: keep what there was
                self.trunk = trunk

    def close(self) -> None:
        """Give the pages back."""
        if self.trunk is not None:
            self.trunk.release(self.engine.pool)
            self.trunk = None


__all__ = ["Done", "Engine", "Evaluate", "Event", "Prefill", "Progress", "Request", "Session", "Text"]

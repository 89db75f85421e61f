"""Engine: a loaded checkpoint that answers requests. `generate` takes many prompts, `stream` one, `Session` a chat."""

import itertools
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor

from engine.cache.pool import PagePool
from engine.cache.slots import Trunk
from engine.cache.tree import TokenTree
from engine.contract import Evaluate, Judge, Output, Report, Search, SearchGenerator, SearchResult, Task
from engine.contract.checks import attributed, check_search, search_error
from engine.contract.trace import UNTRACED, Trace
from engine.errors import CoppiceError, UsageError, check_flag, check_integer, shortened
from engine.load.budget import Loading, Workload, allow
from engine.load.loading import LoadedModel, check_arguments, check_companion, load_models
from engine.load.pools import check_memory, is_out_of_memory, out_of_memory
from engine.options import RequestOptions, StreamOptions, check_options
from engine.rewards import Messages, Responses, RewardFunction, check_messages, make_judge
from engine.rules import Rules
from engine.rules.logprobs import Kept, check_logprobs, whole
from engine.rules.state import Constrained
from engine.step.driver import Driver
from engine.step.jobs import Job
from engine.step.overlapped import make_driver
from engine.step.phases import PhaseObserver
from engine.step.prefix_files import load_prefix, save_prefix
from engine.text.stopping import StopStrings, TextStream, check_stop
from engine.text.tokenizer import Tokenizer
from models.sharding import Shard
from models.trim import release_libraries, trim_memory


@dataclass(frozen=True)
class Request(Rules):
    """One prompt, the search that answers it, its limits, and `Rules`, whose fields are given by name.

    Args:
        prompt: token ids, or text (encoded with the special tokens that the tokenizer adds by itself).
        search: a search's configuration.
        max_new_tokens: limit of each output; the model's context may end it earlier.
        eos_token_ids: tokens that end an output; None takes the checkpoint's.
        ignore_eos: no token ends an output.
        stop: strings that end an output; they are cut off its text.
        messages: the messages that were rendered to the prompt, for a reward model with a chat template; it reads a
            plain prompt as a user's only message.
        reward: (prompt, texts) -> scores, instead of a reward model. The prompt is `messages`, if there are any, else
            its text.
        trace: records the steps of the search; each request needs its own.
        logprobs: how many alternatives are wanted beside the log-probability of each token, 0 for none, see `Output`;
            None: no log-probabilities of tokens.
        parse_special: in a prompt that is text the spellings of control tokens are these tokens. Leave it off where
            others write into the prompt.
        cache_salt: only requests of the same salt share cached prefixes: with one for each user nobody finds out by the
            time of an answer what another one asked. None: the request neither uses nor leaves any. See `Engine.load`.
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
    logprobs: int | None = None
    cache_salt: str | None = ""
    parse_special: bool = False


@dataclass(frozen=True)
class Prefill:
    """Progress of the prefill: `done` of `total` prompt tokens are evaluated."""

    done: int
    total: int


@dataclass(frozen=True)
class Text:
    """The next part of the best output's text, as soon as it is certain."""

    text: str


@dataclass(frozen=True)
class Progress:
    """A step of the search; `report` has its figures and its best candidate so far, `tree` is the live tree."""

    report: Report
    tree: TokenTree


@dataclass(frozen=True)
class Done:
    """The end; the texts of all `Text` events, joined, are the text of the best output."""

    result: SearchResult


Event = Prefill | Text | Progress | Done


@dataclass
class _Prepared:
    """A checked request, with its token ids and limits, and its job."""

    request: Request
    ids: list[int]
    limit: int
    eos: frozenset[int]
    stops: StopStrings | None
    constrained: Constrained | None
    job: Job = field(init=False)


class Engine:
    """A model, its pool of KV pages, its tokenizer, and companions by role. Made by `Engine.load`."""

    def __init__(self, model: LoadedModel, parallel: int = 16):
        check_integer("parallel", parallel, 1)
        self.model, self.parallel = model, parallel
        self.runner, self.shape, self.name = model.runner, model.shape, model.name
        self.template, self.eos_token_ids = model.template, model.eos_token_ids
        self.model_key, self.start_token = model.key, model.start_token  # see `Task`
        self.capabilities = model.capabilities
        self.shard = getattr(model.runner.model, "shard", Shard())  # the place of this process
        self.companions: dict[str, Engine] = {}
        self.reward: RewardFunction | None = None  # instead of a model
        self.observer: PhaseObserver | None = None  # is notified of the phases of each step
        self.load_seconds = 0.0
        self._warned = False  # of a control token that is read as text
        self.keeps_files = True  # whether searches may keep data about the model in the user's cache folder

    @staticmethod
    def load(
        folder: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        kv_memory: int | str | None = None,
        memory: int | str | None = None,
        workload: Workload | None = None,
        compile: str = "off",
        graphs: str = "on",
        prefix_cache: str = "off",
        quant: str = "none",
        kv_dtype: str = "auto",
        chat_template: str | Path | None = None,
        parallel: int = 16,
        draft: str | Path | None = None,
        reward: str | Path | RewardFunction | None = None,
        shard: Shard | None = None,
    ) -> "Engine":
        """Load a Hugging Face checkpoint folder.

        Args:
            folder: holds config.json, safetensors weights and tokenizer files.
            dtype: "float32", "bfloat16", "float16"; "auto" is the checkpoint's own, but float32 on a processor without
                products of that dtype, or where float32 is measured to be faster; `capabilities` reports the choice.
            device: "cpu", "cuda" or "auto".
            threads: CPU threads; None leaves torch's choice.
            kv_memory: bytes of the KV pools together, or a size such as "512M"; None takes up to half of the free
                memory.
            memory: bytes that the whole process may hold, or a size, or "auto" for the least of the limits that it
                runs under: what weights and the rest leave goes to the KV pools. On a CPU.
            workload: what `memory` has to hold at least; None: one token.
            compile: "on" runs the layers through torch.compile, on a GPU their norms, rotations and activations:
                loading takes seconds more, steps a little less.
            graphs: "off" runs every pass kernel by kernel on a GPU, without CUDA graphs.
            prefix_cache: "on" keeps what was evaluated in pages of the KV pools that no request needs, so that prompts
                which begin alike are read once; without `kv_memory` or `memory` up to 1 GiB on a CPU.
            kv_dtype: of keys and values: "auto" is the model's; "int8" and "fp8" (e4m3, on a GPU only), with
                a scale for each token and head, take about half the memory of bfloat16.
            quant: "int8" keeps matrices as int8: a quarter of their float32 size, on a CPU with int8 products or on a
                GPU; "auto" does so where int8 is measured to be faster, on a CPU.
            chat_template: a template file, "none" for plain completion, None for the checkpoint's own.
            parallel: most searches at once.
            draft: folder of a smaller model of the same tokenizer, for searches that draft.
            reward: folder of a model with a scalar head, for searches that rank; or a function, see `Request`.
            shard: the place of this process among several that share the models, companions too, see
                `engine.load.distributed.together`; all load alike and get the same requests. Memory is that of each.

        Raises:
            CheckpointError: the folder has no supported checkpoint, or heads that cannot be divided.
            KVMemoryError: kv_memory is less than one page.
            UsageError: an argument out of range, or a `memory` that cannot hold the model: with the sum.
        """
        began = time.perf_counter()
        budget = check_arguments(folder, threads, kv_memory, compile, chat_template, parallel, draft, reward)
        if prefix_cache not in ("on", "off"):
            raise UsageError(f"prefix_cache: expected on or off, got {prefix_cache!r}")
        if threads is not None:
            torch.set_num_threads(threads)
        roles = {"target": folder, "draft": draft, "reward": reward}
        folders = {role: path for role, path in roles.items() if isinstance(path, str | Path)}
        options = {"dtype": dtype, "device": device, "compile": compile, "quant": quant, "kv_dtype": kv_dtype}
        release_libraries()
        if memory is not None:
            loading = Loading.of(folders, options | {"shard": shard or Shard()})
            budget = allow(loading, memory, budget, workload or Workload(parallel=parallel))
        models = load_models(
            folders, kv_memory=budget, graphs=graphs, chat_template=chat_template, shard=shard, **options
        )
        if prefix_cache == "on":
            for model in models.values():
                model.cache_prefixes(bounded=budget is None)
        target, *others = [Engine(model, parallel) for model in models.values()]
        target.companions = dict(zip([*models][1:], others, strict=True))
        if callable(reward):
            target.reward = reward
        trim_memory()
        release_libraries()  # of what only loading uses
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
        return self.model.need_tokenizer()

    def add(self, role: str, engine: "Engine | RewardFunction") -> None:
        """Add a companion.

        Args:
            role: "draft" or "reward".
            engine: holds the model, and remains usable by itself. A function takes the place of a reward model.

        Raises:
            UsageError: the model does not suit the role: a reward model without a scalar head, a draft with one, or a
                draft with another tokenizer.
        """
        if role not in ("draft", "reward"):
            raise UsageError(f"role: expected draft or reward, got {role!r}")
        if not isinstance(engine, Engine):
            if role != "reward" or not callable(engine):
                raise UsageError(f"{role}: expected an Engine{' or a function' * (role == 'reward')}, got {engine!r}")
            self.reward = engine
            return
        check_companion(role, self.model, engine.model)
        self.companions[role] = engine
        if role == "reward":
            self.reward = None

    def encode(self, prompt: str, parse_special: bool = False) -> list[int]:
        """The token ids of a prompt that is text. Warns once if it spells a control token and is not to be parsed.

        Raises:
            UsageError: as `Tokenizer.encode`.
        """
        check_flag("parse_special", parse_special)
        if not parse_special and not self._warned and (token := self.tokenizer.spelled(prompt)):
            self._warned = True
            warnings.warn(
                f"{token!r} in a prompt is read as text, not as the control token: parse_special (--parse-special) "
                "reads such spellings as tokens; this is said once",
                stacklevel=2,
            )
        return self.tokenizer.encode(prompt, parse_special=parse_special)

    # --- requests ---

    def generate(
        self, prompts: Iterable[Sequence[int] | str], search: Search, **options: Unpack[RequestOptions]
    ) -> list[SearchResult]:
        """Answer prompts by one search; options as in `Request`.

        Raises:
            CoppiceError: the first error of any of them.
        """
        results: dict[int, SearchResult] = {}
        for i, outcome in self.serve(requests_of(prompts, search, options)):
            if isinstance(outcome, CoppiceError):
                try:
                    raise outcome
                finally:
                    del outcome  # its traceback refers to this frame
            results[i] = outcome
        return [results[i] for i in sorted(results)]

    def serve(
        self, requests: Iterable[Request | CoppiceError | None], *, on_step: Callable[[Driver], None] | None = None
    ) -> Generator[tuple[int, SearchResult | CoppiceError], None, None]:
        """Answer requests in continuous batches; a request that fails does not affect the others.

        Args:
            requests: read when there is room for another one. An item may also be an error, which is passed on in the
                place of a result, or None (not counted), if no request is available at the moment.
            on_step: called after every step, to show progress or to stop by raising.

        Yields:
            (index of the request, result or error), in the order in which requests finish.
        """
        if not isinstance(requests, Iterable):
            raise UsageError(f"requests: expected an iterable of Request, got {requests!r}")
        _check_callable("on_step", on_step)
        driver = self._driver()
        source, under_way, places = iter(requests), {}, itertools.count()
        more = True
        try:
            while more or driver.busy:
                while more and len(under_way) < self.parallel:
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
                        under_way[i] = self._submit(driver, request)
                    except CoppiceError as error:
                        yield i, error
                if driver.busy:
                    self._step(driver)
                    if on_step:
                        on_step(driver)
                for i in [i for i, prepared in under_way.items() if prepared.job.done]:
                    yield i, self._outcome(under_way.pop(i))
        finally:
            driver.close()
            for prepared in under_way.values():
                prepared.job.error = None  # see `_submit`

    def stream(
        self,
        prompt: Sequence[int] | str,
        search: Search,
        *,
        interrupted: Callable[[], bool] = lambda: False,
        trunk: Trunk | None = None,
        retire: Callable[[TokenTree], None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Event]:
        """Answer one prompt, and yield text as soon as it is certain: while beams compete, the text that they share.

        Args:
            interrupted: called after every step; True ends the search with the best candidate so far.
            trunk, retire: the cache to take over, and a function that gets the tree at the end, see `Session`.

        Raises:
            CoppiceError: as `generate`.
        """
        _check_callable("interrupted", interrupted)
        check_options(options, search)
        driver = self._driver()
        prepared = self._submit(driver, Request(prompt, search, **options), trunk=trunk, retire=retire)
        job, text = prepared.job, TextStream(self.model.tokenizer, prepared.request.stop)
        seen: Prefill | Progress | None = None
        try:
            while not job.done:
                self._step(driver)
                if new := text.push(job.settled):
                    yield Text(new)
                if event := _event_of(job, seen):
                    seen = event
                    yield event
                if interrupted() and not job.done:
                    best = list(job.report.best()) if job.report.best else list(job.settled)
                    driver.stop(job, SearchResult([Output(best, None, None, "interrupted")]))
            outcome = self._outcome(prepared)
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

    def save_prefix(self, path: str | Path, prefix: Sequence[int] | str) -> None:
        """Evaluate the beginning of prompts and write its keys and values to a file, see `prefix_files.save_prefix`."""
        self._check_whole("save_prefix")
        ids = self.tokenizer.encode(prefix) if isinstance(prefix, str) else list(prefix)
        self._check_ids(ids)
        save_prefix(self, path, ids)

    def load_prefix(self, path: str | Path, cache_salt: str = "") -> list[int]:
        """Keep what `save_prefix` wrote as a cached prefix; returns its tokens. See `prefix_files.load_prefix`."""
        self._check_whole("load_prefix")
        return load_prefix(self, path, cache_salt)

    def _check_whole(self, name: str) -> None:
        """Refuse files of keys and values where each process has some heads of them. Raises UsageError."""
        if self.shard.size > 1:
            raise UsageError(f"{name}: processes that share a model have a part of it each", remedy="use one process")

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits after every token of a sequence, evaluated afresh: float32 [len(ids), V]. For checks."""
        self._check_ids(ids)
        return self.runner.logits(ids)

    def scores(self, texts: Iterable[Sequence[int]]) -> list[float]:
        """The scores of token sequences by a scalar-head model (a reward model), evaluated together.

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

        def ask(job: Job, ids: Sequence[int]) -> SearchGenerator:
            tree = driver.open_tree(job, "target", ids)
            rows_N1, _ = yield Evaluate(tree, [tree.root])
            return SearchResult([Output(list(ids), None, float(rows_N1[0, 0]), "length")])

        driver = self._driver()
        try:
            jobs = [driver.submit(Job(lambda job, ids=ids: ask(job, ids))) for ids in texts]
            while driver.busy:
                self._step(driver)
        finally:
            driver.close()
        for job in jobs:
            if job.error is not None:
                raise job.error
        return [job.result.outputs[0].score for job in jobs]  # type: ignore[union-attr,misc]

    # --- preparing and finishing ---

    def _driver(self) -> Driver:
        runners = {"target": self.runner, **{role: engine.runner for role, engine in self.companions.items()}}
        return make_driver(runners, self.parallel, self.observer)

    def _submit(
        self,
        driver: Driver,
        request: Request,
        trunk: Trunk | None = None,
        retire: Callable[[TokenTree], None] | None = None,
    ) -> _Prepared:
        return self._start(driver, self._prepare(request), trunk, retire)

    def _start(
        self,
        driver: Driver,
        prepared: _Prepared,
        trunk: Trunk | None = None,
        retire: Callable[[TokenTree], None] | None = None,
    ) -> _Prepared:
        """Queue a checked request."""
        request = prepared.request
        # `start` refers to parts of `prepared`, not to the whole: a cycle through the job would keep the model in
        # memory until the garbage collector runs. Errors are dropped for the same reason.
        ids, limit, eos, stops = prepared.ids, prepared.limit, prepared.eos, prepared.stops
        constrained = prepared.constrained
        steady = self.shape.steady_length
        if trunk is not None and steady is not None and max(len(ids), trunk.cached) > steady:
            trunk.release(self.pool)

        def start(job: Job) -> SearchGenerator:
            tree = driver.open_tree(job, "target", ids, len(ids) + limit, trunk)
            hits_stop = stops
            if constrained is not None and not constrained.eos:  # no token can end an output that is stuck
                hits_stop = constrained.with_ends(tree, stops)
            return request.search.run(
                Task(
                    tree,
                    limit,
                    eos,
                    self.runner.vocab_size,
                    hits_stop,
                    lambda model, prompt: driver.open_tree(job, model, prompt),
                    self.model.tokenizer,
                    # Measured times would part processes that share the model.
                    None if self.shard.size > 1 else lambda tokens: self.runner.time.charge(tokens, *job.batch_load),
                    model_key=self.model_key if self.keeps_files else "",
                    start_token=self.start_token,
                    judge=self._judge(driver, job, request, ids, eos, stops),
                    spare=lambda pool: driver.spare(job, pool),
                    normalised=constrained is None,
                    rising=constrained is not None and constrained.raises,
                )
            )

        if request.trace is not None:
            models = {"target": self, **self.companions}
            names = {role: engine.name for role, engine in models.items()}
            request.trace.begin(request.search, ids, names, {role: e.model.tokenizer for role, e in models.items()})
        prepared.job = driver.submit(
            Job(start, retire=retire, trace=request.trace or UNTRACED, search=request.search, constrained=constrained)
        )
        if request.logprobs is not None:
            prepared.job.kept = Kept(self.runner, request.logprobs, constrained)
        prepared.job.salt = request.cache_salt
        return prepared

    def _judge(
        self,
        driver: Driver,
        job: Job,
        request: Request,
        ids: list[int],
        eos: frozenset[int],
        stops: StopStrings | None,
    ) -> Judge | None:
        """What computes rewards for a request whose search ranks by them."""
        if "reward" not in request.search.models:
            return None
        given = request.prompt
        if not isinstance(given, str):
            given = self.model.tokenizer.decode(ids) if self.model.tokenizer else ""
        answer = Responses(self.model.tokenizer, ids, request.messages, eos, stops, given)
        reward = request.reward or self.reward or self.companions["reward"].model
        return make_judge(reward, self.model, answer, lambda prompt: driver.open_tree(job, "reward", prompt))

    def _prepare(self, request: Request) -> _Prepared:
        """Check a request against the model and its memory. Raises UsageError or KVMemoryError."""
        if self.shape.scores:
            raise UsageError(
                "this checkpoint is a reward model: it scores texts and generates none",
                where=self.name,
                remedy="give a checkpoint whose architecture ends in ForCausalLM",
            )
        if isinstance(request.search, type) or not hasattr(request.search, "run"):
            raise UsageError(f"search: expected a configuration such as search.Trie(), got {request.search!r}")
        ids = self._ids(request.prompt, request.parse_special)
        new = request.max_new_tokens
        check_integer("max_new_tokens", new, 1)
        reach = self.shape.max_positions
        if reach is not None:
            new = min(new, reach - len(ids) + 1)  # the last token is never evaluated: it needs no position
        if not isinstance(request.eos_token_ids, Iterable | None):
            raise UsageError(f"eos_token_ids: expected a list of token ids, got {request.eos_token_ids!r}")
        ends = self.eos_token_ids if request.eos_token_ids is None else list(request.eos_token_ids)
        if any(type(token) is not int or token < 0 for token in ends):
            raise UsageError(f"eos_token_ids: expected token ids, got {sorted(map(repr, ends))}")
        check_flag("ignore_eos", request.ignore_eos)
        eos = frozenset() if request.ignore_eos else frozenset(ends)
        check_stop(request.stop)
        check_logprobs(request.logprobs)
        if not isinstance(request.cache_salt, str | None):
            raise UsageError(f"cache_salt: expected a text or None, got {request.cache_salt!r}")
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
        if self.shard.size > 1 and getattr(request.search, "save", None) is not None:
            raise UsageError("save: processes that share a model save nothing", remedy="leave out --aded-save")
        with attributed(type(request.search)):
            request.search.check(self.runner.vocab_size, eos)
        constrained = request.at_work(ids, new, self.runner.vocab_size, eos, self.model.tokenizer)
        check_memory(self.pool, request.search, len(ids), new)
        return _Prepared(request, ids, new, eos, stops, constrained)

    def _ids(self, prompt: Sequence[int] | str, parse_special: bool) -> list[int]:
        """The token ids of a request's prompt. Raises UsageError."""
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):  # text is one too
            raise UsageError(f"prompt: expected token ids or text, got {prompt!r}")
        check_flag("parse_special", parse_special)
        ids = self.encode(prompt, parse_special) if isinstance(prompt, str) else list(prompt)
        self._check_ids(ids)
        return ids

    def _check_ids(self, ids: Sequence[int]) -> None:
        """Check that a prompt is not empty, fits the context and has valid ids only. Raises UsageError."""
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
            raise UsageError(f"prompt: expected token ids, got {ids!r}")
        if not ids:
            bare = self.model.tokenizer is not None and not self.model.tokenizer.encode("")
            why = ", and this tokenizer adds no token of its own to begin with" if bare else ""
            raise UsageError("the prompt is empty" + why, remedy="give at least one token to go on from")
        reach = self.shape.max_positions
        if reach is not None and len(ids) > reach:
            raise UsageError(
                f"the prompt has {len(ids)} tokens, the model's context holds {reach}", remedy="shorten the prompt"
            )
        vocab = self.shape.vocab_size
        for i, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < vocab:
                got = shortened(repr(token))
                raise UsageError(f"prompt: expected token ids from 0 to {vocab - 1}, got {got}", where=f"token {i}")

    def _step(self, driver: Driver) -> None:
        try:
            driver.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory() from error

    def _outcome(self, prepared: _Prepared) -> SearchResult | CoppiceError:
        return whole(self._finish(prepared))

    def _finish(self, prepared: _Prepared) -> Generator[None, None, SearchResult | CoppiceError]:
        """The outcome of a request that is done; yields between pieces of work as long as a pass of few rows."""
        job = prepared.job
        cause, job.error = job.error, None  # its traceback refers to the job
        if cause is not None:
            return self._reported(prepared, cause)
        assert job.result is not None
        result = job.result
        if prepared.constrained is not None:
            prepared.constrained.settle(result, "reward" in prepared.request.search.models)
        try:
            if job.kept is not None:
                result.outputs = yield from job.kept.filling(result.outputs)
        except Exception as failure:
            return self._reported(prepared, failure)
        try:
            result.outputs = [replace(o, text=self._text(o, prepared.stops)) for o in result.outputs]
        except CoppiceError as error:  # the tokenizer cannot decode these tokens
            return error
        result.stats["new_tokens"] = len(result.outputs[0].token_ids)
        return result

    @staticmethod
    def _reported(prepared: _Prepared, cause: BaseException) -> CoppiceError:
        """The error to report for what ended a request."""
        if isinstance(cause, CoppiceError):
            return cause
        if not is_out_of_memory(cause):
            return search_error(type(prepared.request.search), cause)
        error = out_of_memory()
        error.__cause__ = cause
        return error

    def _text(self, output: Output, stops: StopStrings | None) -> str:
        if self.model.tokenizer is None:
            return ""
        text = self.model.tokenizer.decode(output.token_ids)
        return stops.cut(text) if stops else text


def requests_of(prompts: Iterable[Sequence[int] | str], search: Search, options: RequestOptions) -> Iterator[Request]:
    """The requests of `Engine.generate`, made one by one. Raises UsageError at once."""
    if isinstance(prompts, str):
        raise UsageError("prompts: expected a list of prompts, got one string", remedy="write [prompt]")
    if not isinstance(prompts, Iterable):
        raise UsageError(f"prompts: expected a list of prompts, got {prompts!r}", remedy="write [prompt]")
    check_options(options, search)
    return (Request(prompt, search, **options) for prompt in prompts)


def _event_of(job: Job, seen: Prefill | Progress | None) -> Prefill | Progress | None:
    """The state of a search; None if it is as in the event before, or has ended."""
    if job.done or not job.trees:
        return None
    tree = job.trees[0]
    if not job.prefilled:
        event = Prefill(tree.trunk.cached, tree.prompt_length)
        return None if event == seen else event
    shown = isinstance(seen, Progress) and seen.report is job.report
    return None if shown or job.report == Report() else Progress(job.report, tree)  # it may pause before it reports


def _check_callable(name: str, value: object, arguments: str = "") -> None:
    if value is not None and not callable(value):
        raise UsageError(f"{name}: expected a function{arguments}, got {value!r}")


class Session:
    """The KV cache of a conversation: the prefix that a prompt shares with the one before is not evaluated again.

    Between turns it holds the pages of the last turn's trunk; `close` returns them to the pool.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.trunk: Trunk | None = None

    def stream(self, prompt: Sequence[int] | str, search: Search, **options: Unpack[StreamOptions]) -> Iterator[Event]:
        """As `Engine.stream`."""

        def retire(tree: TokenTree) -> None:
            self.trunk = tree.retire()

        trunk, self.trunk = self.trunk, None
        try:
            yield from self.engine.stream(prompt, search, trunk=trunk, retire=retire, **options)
        finally:
            if trunk is not None and trunk.pages:  # the prompt was refused: keep the cache
                self.trunk = trunk

    def close(self) -> None:
        """Return the pages to the pool."""
        if self.trunk is not None:
            self.trunk.release(self.engine.pool)
            self.trunk = None


__all__ = ["Done", "Engine", "Evaluate", "Event", "Prefill", "Progress", "Request", "Session", "Text"]

"""Engine: a loaded checkpoint that answers requests. `generate` takes many prompts, `stream` one, `Session` a chat."""

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor

from engine.cache.pool import PagePool
from engine.cache.slots import Trunk
from engine.contract import ContinuationScore, Search, SearchResult
from engine.drafts.choice import chosen_drafter
from engine.drafts.requested import RequestedDrafters
from engine.embeddings import embedding_of, embedding_requests, stacked
from engine.errors import CoppiceError, UsageError, check_integer, shortened
from engine.load.budget import MemoryLimits, allow
from engine.load.flags import takes
from engine.load.hub import located
from engine.load.loading import LoadedModel, check_companion, load_models
from engine.load.options import LoadOptions, RewardFunction
from engine.ranking import Ranked, check_documents, check_texts, head_of, pairs, ranked, score_requests, scores_of
from engine.request import (
    Checked,
    Done,
    Event,
    Models,
    Prefill,
    Progress,
    Request,
    RequestOptions,
    StreamOptions,
    Text,
    check_callable,
    check_ids,
    check_options,
    check_prompt,
    event_of,
    requests_of,
    score_request,
)
from engine.service import Entry, News, Service
from engine.step.drafting import EngineDrafts
from engine.step.driver import Driver
from engine.step.phases import PhaseObserver
from engine.step.prefix_files import load_prefix, save_prefix
from engine.text.tokenizer import Tokenizer
from models.shard import Shard
from models.trim import release_libraries, return_large_blocks, trim_memory


class Engine:
    """A model, its pool of KV pages, its tokenizer, and companions by role. Create it with `Engine.load`."""

    def __init__(self, model: LoadedModel, parallel: int = 16):
        check_integer("parallel", parallel, 1)
        self.model, self.parallel = model, parallel
        self.runner, self.shape, self.name = model.runner, model.shape, model.name
        self.template, self.eos_token_ids = model.template, model.eos_token_ids
        self.model_key, self.start_token = model.key, model.start_token  # see `Task`
        self.capabilities, self.generation = model.capabilities, model.generation
        self.shard = getattr(model.runner.model, "shard", Shard())  # the place of this process
        self.companions: dict[str, Engine] = {}
        self.reward: RewardFunction | None = None  # instead of a model
        self.drafts: EngineDrafts | None = None  # the drafter, see `LoadOptions`
        self.drafters = RequestedDrafters()  # other drafters, which requests choose
        self.observer: PhaseObserver | None = None  # is notified of the phases of each step
        self.load_seconds = 0.0

    @staticmethod
    @takes(LoadOptions)
    def load(options: LoadOptions) -> "Engine":
        """Load a checkpoint: `Engine.load(folder, dtype="auto", ...)`. The arguments are the fields of
        `engine.LoadOptions`, which explains them. A model named on the hub is downloaded if necessary.

        Raises:
            CheckpointError: the folder has no supported checkpoint, its heads cannot be divided, or the hub does not
                provide it.
            KVMemoryError: the machine cannot give the KV cache its memory, or `kv_memory` is less than one page, or
                than the states of recurrent layers for one sequence.
            UsageError: an argument is out of range, or `memory` cannot hold the model; the error has an itemised sum.
        """
        return Engine.of(options)

    @staticmethod
    def of(options: LoadOptions) -> "Engine":
        """Load a checkpoint with these options; raises the same errors as `load`."""
        options = located(options)
        began = time.perf_counter()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        release_libraries()
        if options.memory is not None:
            return_large_blocks()
        allowed = MemoryLimits(options.kv_bytes) if options.memory is None else allow(options)
        models = load_models(options, allowed.cache, allowed.experts)
        for role, model in models.items():
            model.runner.pool.bound(allowed.limit, allowed.beside)
            model.runner.most_rows = None if role == "reward" else allowed.rows
        if options.prefix_cache == "on":
            for model in models.values():
                model.cache_prefixes(bounded=allowed.cache is None)
        target, *others = [Engine(model, options.parallel) for model in models.values()]
        target.companions = dict(zip([*models][1:], others, strict=True))
        if callable(options.reward):
            target.reward = options.reward
        draft = models["draft"].runner if "draft" in models else None
        if drafter := chosen_drafter(options.drafts, target.runner, target.model.tokenizer, draft):
            target.drafts = EngineDrafts(drafter)
        target.drafters.planned = options.memory is None or drafter is not None
        trim_memory()
        release_libraries()  # those that only loading uses
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
            engine: holds the model, and remains usable by itself; or a function in place of a reward model.

        Raises:
            UsageError: an unknown role, or the model does not suit it: a reward model without a scalar head, a draft
                with one, or a draft with another tokenizer.
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
        """The token ids of a text prompt. Warns once if it spells a control token that is not parsed.

        Raises:
            UsageError: see `Tokenizer.encode`.
        """
        return self.model.encode(prompt, parse_special)

    # --- requests ---

    def generate(
        self, prompts: Iterable[Sequence[int] | str], search: Search, **options: Unpack[RequestOptions]
    ) -> list[SearchResult]:
        """Answer prompts with one search; options as in `Request`.

        Raises:
            CoppiceError: the first error of any of them.
        """
        return self._all(requests_of(prompts, search, options))

    def _all(self, requests: Iterable[Request | Checked]) -> list[SearchResult]:
        """The results of requests, in their order. Raises CoppiceError: the first error of any of them."""
        results: dict[int, SearchResult] = {}
        for i, outcome in self.serve(requests):
            if isinstance(outcome, CoppiceError):
                try:
                    raise outcome
                finally:
                    del outcome  # its traceback refers to this frame
            results[i] = outcome
        return [results[i] for i in sorted(results)]

    def serve(
        self,
        requests: Iterable[Request | Checked | CoppiceError | None],
        *,
        on_step: Callable[[Driver], None] | None = None,
    ) -> Generator[tuple[int, SearchResult | CoppiceError], None, None]:
        """Answer requests in continuous batches; a request that fails does not affect the others.

        Args:
            requests: read when there is room for another one. An item may also be a request that was checked already,
                an error, which is passed on in place of a result, or None (not counted) if no request is available at
                the moment.
            on_step: called after every step, to show progress or to stop by raising.

        Yields:
            (index of the request, result or error), in the order in which requests finish.

        Raises:
            UsageError: `requests` is no iterable, or `on_step` no function.
        """
        if not isinstance(requests, Iterable):
            raise UsageError(f"requests: expected an iterable of Request, got {requests!r}")
        check_callable("on_step", on_step)
        service, source, places = self.service(), iter(requests), itertools.count()
        more, under_way = True, 0
        ended: list[tuple[int, SearchResult | CoppiceError]] = []

        def note(i: int, news: News) -> None:
            if news.outcome is not None:
                ended.append((i, news.outcome))

        try:
            while more or service.busy:
                while more and under_way < self.parallel:
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
                        if not isinstance(request, Request | Checked):
                            raise UsageError(f"requests: expected a Request, got {request!r}")
                        checked = request if isinstance(request, Checked) else service.check(request)
                        service.submit(Entry(checked, partial(note, i)))
                        under_way += 1
                    except CoppiceError as error:
                        yield i, error
                if service.busy:
                    service.step()
                    if on_step:
                        on_step(service.driver)
                under_way -= len(ended)
                while ended:
                    yield ended.pop(0)
        finally:
            service.close()
            ended.clear()  # the tracebacks of errors refer to this frame

    def stream(
        self,
        prompt: Sequence[int] | str,
        search: Search,
        *,
        interrupted: Callable[[], bool] = lambda: False,
        taken: Callable[[], bool] = lambda: False,
        trunk: Trunk | None = None,
        retire: Callable[[Trunk], None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Event]:
        """Answer one prompt, and yield text as soon as it is final: while beams compete, the text that they share.

        Args:
            interrupted: called after every step; if it returns True, the search ends with the best candidate so far.
            taken: called after steps whose report has something `ready`; if it returns True, the search ends with that.
            trunk, retire: the cache to take over, and a function that gets it at the end, see `Session`.

        Raises:
            CoppiceError: see `generate`.
        """
        check_callable("interrupted", interrupted)
        check_callable("taken", taken)
        check_options(options, search)
        service, heard = self.service(), deque[News]()
        outcome: SearchResult | CoppiceError | None = None
        seen: Prefill | Progress | None = None
        try:
            checked = service.check(Request(prompt, search, **options))
            entry = Entry(checked, heard.append, stream=True, trunk=trunk, retire=retire)
            service.submit(entry)
            while outcome is None:
                service.step()
                while heard:
                    news = heard.popleft()
                    outcome = news.outcome
                    if news.text:
                        yield Text(news.text)
                if outcome is None and entry.job is not None and not entry.job.done:
                    if event := event_of(entry.job, seen):
                        seen = event
                        yield event
                    if interrupted():
                        service.interrupt(entry)
                    elif entry.job is not None and entry.job.report.ready and taken():
                        service.take(entry)
            if isinstance(outcome, CoppiceError):
                try:
                    raise outcome
                finally:
                    del outcome, news  # its traceback refers to this frame
            yield Done(outcome)
        finally:
            service.close()

    def save_prefix(self, path: str | Path, prefix: Sequence[int] | str) -> None:
        """Evaluate a prefix of prompts and write its keys and values to a file; the engine must keep prefixes
        (`prefix_cache="on"`). See `prefix_files.save_prefix`, also for errors."""
        check_prompt(prefix, "prefix")
        ids = self.tokenizer.encode(prefix) if isinstance(prefix, str) else list(prefix)
        check_ids(self.model, ids)
        save_prefix(self.runner, self.model_key, path, ids)

    def load_prefix(self, path: str | Path, cache_salt: str = "") -> list[int]:
        """Load a file of `save_prefix` as a cached prefix; returns its tokens. The engine must keep prefixes. See
        `prefix_files.load_prefix`, also for errors."""
        return load_prefix(self.runner, self.model_key, path, cache_salt)

    def logits(self, ids: Sequence[int], adapter: str | None = None) -> Tensor:
        """Logits after every token of a sequence, evaluated afresh: float32 [len(ids), V]; the scores of a model with
        a scalar head, [len(ids), 1]. For checks.

        Args:
            adapter: see `Request`.

        Raises:
            UsageError: no token ids, ids outside the vocabulary, more than the context, or an unknown adapter.
        """
        check_ids(self.model, ids)
        return self.runner.logits(ids, self.model.adapter(adapter))

    def score(
        self,
        prompt: Sequence[int] | str,
        continuations: Sequence[Sequence[int] | str],
        *,
        top_logprobs: int = 0,
        parse_special: bool = False,
        cache_salt: str | None = "",
        adapter: str | None = None,
    ) -> list[ContinuationScore]:
        """The log-probabilities of continuations of a prompt, in order. They share one tree: prefixes that several
        begin with are evaluated once. Any number fits the cache; see docs/scoring.md.

        Args:
            prompt: text or token ids.
            continuations: texts, tokenised jointly with the prompt (a token that spans the boundary belongs to the
                continuation), or token ids.
            top_logprobs: how many alternatives to return at each position.
            parse_special, cache_salt, adapter: see `Request`.

        Raises:
            CoppiceError: see `generate`.
        """
        request = score_request(self.model, prompt, continuations, top_logprobs, parse_special)
        [result] = self._all([replace(request, cache_salt=cache_salt, adapter=adapter)])
        return result.scores or []

    def embed(
        self,
        texts: Iterable[Sequence[int] | str],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        cache_salt: str | None = "",
        adapter: str | None = None,
    ) -> Tensor:
        """Embeddings of texts, float32 [N, E], in order, on the CPU; see docs/vectors.md.

        Texts share passes, and only what a pass still needs of a long text is kept, so any number of texts fits.

        Args:
            texts: texts, encoded with the special tokens that the tokenizer adds, or token ids.
            pooling: "mean" of the hidden rows of all tokens, or the row of the "last" one, after the model's final
                norm. None: as the checkpoint's sentence-transformers files say; without them the mean.
            normalize: divide each vector by its length. None: as those files say; without them True.
            dimensions: keep this many leading elements, before normalisation; None: all.
            cache_salt, adapter: see `Request`. A mean evaluates all tokens of its text, whatever is cached.

        Raises:
            CoppiceError: the first error of any of them.
        """
        search = embedding_of(self.model, pooling, normalize, dimensions)
        results = self._all(embedding_requests(self.model, texts, search, cache_salt, adapter))
        return stacked(self.model, search, results)

    def scores(self, texts: Iterable[Sequence[int]], *, adapter: str | None = None) -> list[float]:
        """The scores of token sequences by a scalar-head model (a reward model), evaluated together.

        Args:
            adapter: see `Request`.

        Raises:
            CoppiceError: the first error of any of them.
        """
        return scores_of(self._all(score_requests(self._models(), texts, adapter)))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        template: str | None = None,
        cache_salt: str | None = "",
        adapter: str | None = None,
    ) -> list[Ranked]:
        """Documents ordered by their relevance to a query, best first, with the scores of the model's scalar head, or
        of its reward model's; see docs/vectors.md. The pairs' common beginning is read once with a prefix cache.

        Args:
            template: a text with placeholders {query} and {document}, into which a pair is inserted; control tokens
                that it spells are parsed. None: the chat template of the model with the head, with the document as the
                reply to the query; without a chat template, the query, a line break and the document.
            cache_salt, adapter: see `Request`; a reward model has no adapter.

        Raises:
            CoppiceError: no model has a scalar head, a pair does not fit its context, or another error of a pair.
        """
        check_documents(query, documents)
        models = self._models()
        texts = pairs(head_of(models), query, documents, template)
        return ranked(scores_of(self._all(check_texts(models, texts, cache_salt, "documents", adapter))))

    def service(self) -> Service:
        """A new loop that answers requests with this engine's models; `generate` and the other methods use one each."""
        return Service(self._models(), self.parallel, self.observer)

    def _models(self) -> Models:
        others = {role: engine.model for role, engine in self.companions.items()}
        return Models(self.model, others, self.reward, self.drafts, self.drafters)


class Session:
    """The KV cache of a conversation: the prefix that a prompt shares with the previous one is not evaluated again.

    Between turns it holds the pages of the last turn's trunk; `close`, or the end of the last reference to the session,
    returns them to the pool.

    Raises:
        UsageError: `engine` is none.
    """

    trunk: Trunk | None = None

    def __init__(self, engine: Engine):
        if not isinstance(engine, Engine):
            raise UsageError(f"engine: expected an Engine, got {shortened(repr(engine))}")
        self.engine = engine

    def __del__(self, is_finalizing=sys.is_finalizing) -> None:
        if self.trunk is not None and vars(self.engine) and not is_finalizing():  # an engine that ended has no fields
            self.close()

    def stream(self, prompt: Sequence[int] | str, search: Search, **options: Unpack[StreamOptions]) -> Iterator[Event]:
        """Stream a reply like `Engine.stream`, and keep its trunk for the next prompt."""
        trunk, self.trunk = self.trunk, None
        try:
            yield from self.engine.stream(prompt, search, trunk=trunk, retire=self._keep, **options)
        finally:
            if trunk is not None and trunk.pages:  # the prompt was refused: keep the cache
                self._keep(trunk)

    def _keep(self, trunk: Trunk) -> None:
        """Keep a trunk, and release that of another stream that has ended meanwhile."""
        self.close()
        self.trunk = trunk

    def close(self) -> None:
        """Return the pages to the pool."""
        if self.trunk is not None:
            self.trunk.release(self.engine.pool)
            self.trunk = None

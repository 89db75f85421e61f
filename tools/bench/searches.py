"""Searches for tools: with changed answers, timed by the processor, or driven without an engine."""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from engine import Engine, Request
from engine.contract import Answer, Evaluate, Report, Search, SearchGenerator, SearchResult, Task
from engine.errors import CoppiceError
from engine.step.driver import Driver
from kernels.rows.reference import peaks
from search import Trie
from search.base import Output
from search.finished import Finished
from search.ults.prior import Vectors, gather


@dataclass(frozen=True)
class Altered(Search):
    """A wrapper of a search that changes the model's log-probabilities before the search receives them."""

    search: Search

    def run(self, task: Task) -> SearchGenerator:
        generator, answer = self.search.run(self.task(task)), None
        while True:
            try:
                request = generator.send(answer)
            except StopIteration as end:
                return end.value
            answer = yield replace(request, read=None, top_sums=None) if isinstance(request, Evaluate) else request
            if isinstance(request, Evaluate):
                answer = self.alter(task, request, answer.rows_NV)

    def task(self, task: Task) -> Task:
        """The task that the wrapped search gets."""
        return task

    @abstractmethod
    def alter(self, task: Task, request: Evaluate, rows_NV: Tensor) -> Answer:
        """Return the answer that replaces the model's."""

    def slots(self, prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
        return self.search.slots(prompt_tokens, new_tokens)

    def check(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.search.check(vocab_size, self.task_eos(eos_token_ids))

    def task_eos(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The end-of-sequence tokens that the wrapped search gets."""
        return eos_token_ids


@dataclass(frozen=True)
class Recite(Altered):
    """A search on a model that is made to write a given text."""

    text: Sequence[int]
    writer: Engine  # its tokenizer made the text's tokens

    def task(self, task: Task) -> Task:
        return replace(task, tokenizer=self.writer.tokenizer)

    def alter(self, task: Task, request: Evaluate, rows_NV: Tensor) -> Answer:
        tree, on_path = task.tree, {task.tree.root}
        rows_NV.fill_(-math.log(rows_NV.shape[1]))
        for i, node in enumerate(request.nodes):
            at = tree.position(node) - tree.prompt_length
            if node == tree.root or (tree.parent(node) in on_path and tree.token(node) == self.text[at]):
                on_path.add(node)
                rows_NV[i, self.text[at + 1]] = 0.0
        return request.answer(rows_NV, peaks(rows_NV))


@dataclass(frozen=True)
class Recorded(Trie):
    """Beam search to the last token, with the score of the best live beam after each step."""

    scores: list[float] = field(default_factory=list)

    def _report(self, task: Task, done: Finished, live: list[int], scores: list[float]) -> Report:
        self.scores.append(scores[0])
        return super()._report(task, done, live, scores)


@dataclass(frozen=True)
class Collect(Search):
    """A search without a result of its own: it collects the softmax vectors of its nodes.

    Args:
        found: they are appended to it.
        completions: per prompt.
        seed: of their draws.
    """

    found: list[Vectors]
    completions: int
    seed: int

    def run(self, task: Task) -> SearchGenerator:
        tree, depth = task.tree, task.max_new_tokens
        vectors, _ = yield from gather(tree, depth, task.eos_token_ids, self.completions, self.seed)
        self.found.append(vectors)
        return SearchResult([Output([], None, None, "length")])

    def slots(self, prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
        return prompt_tokens + new_tokens - 1, prompt_tokens + self.completions * (new_tokens - 1)


def after_prompt(engine: Engine, prompt: Sequence[int], search: Search, **options: Any) -> tuple[float, SearchResult]:
    """Run a search; returns the seconds of the processor, in all threads, after the pass that ends the prompt, and its
    result. `options` are of `Request`."""
    began: float | None = None

    def watch(driver: Driver) -> None:
        nonlocal began
        if began is None and any(job.prefilled for job in driver.running):
            began = time.process_time()

    [(_, outcome)] = engine.serve([Request(prompt, search, **options)], on_step=watch)
    if isinstance(outcome, CoppiceError):
        raise outcome
    return 0.0 if began is None else time.process_time() - began, outcome


def run_alone(
    search: Search, task: Task, rows_of: Callable[[Evaluate], tuple[Tensor, Tensor | None]]
) -> tuple[float, SearchResult]:
    """Drive a search without an engine.

    Args:
        rows_of: the rows of log-probabilities [N, V] for a request, and their peaks (see `Evaluate.read`) or None.

    Returns:
        the seconds inside the search, `Evaluate.read` included, and its result.
    """
    generator, answer, seconds = search.run(task), None, 0.0
    while True:
        began = time.perf_counter()
        try:
            request = generator.send(answer)
        except StopIteration as end:
            return seconds + time.perf_counter() - began, end.value
        seconds += time.perf_counter() - began
        answer = None
        if isinstance(request, Evaluate):
            request.tree.allocate(*request.tree.pending(request.nodes))
            rows_NV, peaks_NB = rows_of(request)
            began = time.perf_counter()
            answer = request.answer(rows_NV, peaks_NB)
            seconds += time.perf_counter() - began

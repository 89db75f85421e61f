"""Searches for tools: with changed answers, with CPU times, or driven without an engine."""

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from engine import Engine, Request
from engine.contract import Answer, Evaluate, Search, SearchGenerator, SearchResult, Task
from engine.errors import CoppiceError
from engine.step.driver import Driver
from search.base import Output
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
class Collect(Search):
    """A search that collects the softmax vectors of its nodes and returns an empty result.

    Args:
        found: the list to which the vectors of each prompt are appended.
        completions: completions per prompt.
        seed: the seed of their draws.
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
    """Run a search; returns the CPU seconds of all threads after the pass that ends the prompt, and the result.
    `options` are fields of `Request`."""
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

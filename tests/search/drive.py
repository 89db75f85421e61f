"""A search without a model, and the contract between searches and the engine on one page.

`drive` is the engine's driver reduced to one request. In place of each model it has a function from a path (the tokens
after the prompt) to the log-probabilities of the next token, a tensor [V]. At every step it checks that the search
keeps to the contract and that the trees and their pages are consistent.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.contract import Answer, Evaluate, Report, Search, SearchGenerator, SearchResult, Task
from engine.contract.checks import report_fault, request_fault, result_fault, tokens_fault
from engine.errors import KVMemoryError
from kernels.rows.reference import peaks
from models.shape import ModelShape
from tests.invariants import check_pool, check_tree

SHAPE = ModelShape(layers=1, kv_heads=1, head_dim=1, vocab_size=1, max_positions=None)
Path = tuple[int, ...]
Rows = Callable[[Path], Tensor]


class Pass(NamedTuple):
    """An `Evaluate` that was answered: the model, the paths of the nodes, the slots that their tree holds with it."""

    model: str
    paths: list[Path]
    live: int

    @property
    def needed(self) -> int:
        """The distinct tokens of the paths: the fewest slots beside the prompt's."""
        return len({path[:end] for path in self.paths for end in range(1, len(path) + 1)})


class Told(NamedTuple):
    """A `Report`, and what its functions returned while they could be called."""

    report: Report
    best: list[int] | None
    beams: list[tuple[float | None, list[int]]]


@dataclass
class Run:
    """The steps of a search, and its result; None if it was closed before it ended."""

    trees: dict[str, TokenTree] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    settled: list[int] = field(default_factory=list)
    full: int = 0  # how often an `Evaluate` did not fit
    result: SearchResult | None = None

    @property
    def outputs(self) -> list[list[int]]:
        """The tokens of the outputs, best first."""
        return [output.token_ids for output in self.result.outputs] if self.result else []

    @property
    def paths(self) -> list[list[Path]]:
        """The paths of each pass."""
        return [one.paths for one in self.passes]

    @property
    def evaluated(self) -> int:
        """How many nodes were asked for."""
        return sum(map(len, self.paths))


def drive(
    search: Search,
    rows: Rows | Mapping[str, Rows],
    max_new: int = 20,
    eos: Sequence[int] = (),
    *,
    prompt: Sequence[int] = (0, 1, 0),
    vocab: int | None = None,
    pages: int = 400,
    page_size: int = 1,
    switch: int | None = None,
    close_after: int | None = None,
    stops: Callable[[Sequence[int]], bool] | None = None,
    **task: Any,
) -> Run:
    """Run a search to its end, or until it is closed, and check all that it does.

    Args:
        rows: for the target model, or for each model by its name.
        vocab: tokens that can be generated; by default as many as the target's rows have.
        pages, page_size: the pool of each model.
        switch: the length at which the rotary embeddings change.
        close_after: so many reports.
        stops: whether new tokens contain a stop string.
        task: other fields of the `Task`.

    Raises:
        AssertionError: the search broke the contract.
    """
    models = rows if isinstance(rows, Mapping) else {"target": rows}
    run, vocab = Run(), vocab or len(models["target"](()))

    def open_tree(name: str, tokens: Sequence[int]) -> TokenTree:
        run.trees[name] = TokenTree(PagePool(SHAPE, pages, page_size), list(tokens), switch_length=switch)
        return run.trees[name]

    tree = open_tree("target", prompt)
    if stops is not None:
        texts = lambda nodes, rests: ([*tree.path(n), *rest] for n, rest in zip(nodes, rests, strict=True))  # noqa: E731
        task["ends"] = lambda nodes, rests: ["stop" if stops(tokens) else None for tokens in texts(nodes, rests)]
    generator = search.run(Task(tree, max_new, frozenset(eos), vocab, open_tree=open_tree, **task))
    try:
        run.result = _follow(run, generator, models, close_after)
    finally:
        for tree in run.trees.values():
            tree.release()
            check_pool(tree.pool, [])
    if run.result is not None:
        assert not (fault := result_fault(run.result, vocab)), fault
        assert run.settled == run.outputs[0][: len(run.settled)], "what was settled is not of the best output"
    return run


def _follow(
    run: Run, generator: SearchGenerator, models: Mapping[str, Rows], close_after: int | None
) -> SearchResult | None:
    """Answer what a search yields until it returns its result."""
    answer: Answer | None = None
    error: KVMemoryError | None = None
    while True:
        try:
            request = generator.send(answer) if error is None else generator.throw(error)
        except StopIteration as end:
            return end.value
        answer = error = None
        if isinstance(request, Report):
            _hear(run, request)
            if len(run.told) == close_after:
                generator.close()
                return None
        else:
            try:
                answer = _evaluate(run, request, models)
            except KVMemoryError as full:  # the search may drop nodes and ask again
                run.full += 1
                error = full
        for tree in run.trees.values():
            check_tree(tree)
            check_pool(tree.pool, tree.pages_held)


def _hear(run: Run, report: Report) -> None:
    """A report says what has become certain, and what is the best so far; it is answered by None."""
    assert not (fault := report_fault(report)), fault
    run.settled += report.settled
    best = list(report.best()) if report.best else None
    beams = [(score, list(tokens)) for score, tokens in report.beams()] if report.beams else []
    assert best is None or best[: len(run.settled)] == run.settled, "the best so far is not what was settled"
    run.told.append(Told(report, best, beams))


def _evaluate(run: Run, request: Any, models: Mapping[str, Rows]) -> Answer:
    """Nodes that are live and not evaluated get slots, with their ancestors; the answer is a row for each of them."""
    assert not (fault := request_fault(request, [*run.trees.values()])), fault
    assert isinstance(request, Evaluate)
    [(name, tree)] = [(name, tree) for name, tree in run.trees.items() if tree is request.tree]
    nodes = list(request.nodes)
    widest = max(len(rows(())) for rows in models.values())  # a token that a draft never proposes may be accepted
    assert not (fault := tokens_fault(request, widest, None)), fault
    assert len(set(nodes)) == len(nodes), "a node is asked for twice"
    tree.allocate(*tree.pending(nodes))
    paths = [tuple(tree.path(node)) for node in nodes]
    run.passes.append(Pass(name, paths, tree.live_tokens))
    rows_NV = torch.stack([models[name](path) for path in paths])
    # An engine knows the largest number of each block of a row, or it does not: a search must do with both.
    return request.answer(rows_NV, peaks(rows_NV) if len(run.passes) % 2 else None)

"""Checks of the contract of searches: the values that a search yields and returns, and the origin of exceptions.

An exception in an external search becomes a `SearchError`, which names the search and the line of its code. If a
built-in search breaks the contract, that is a bug of this project, and the error says so.
"""

import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.cache.tree import TokenTree
from engine.contract import FINISH_REASONS, Evaluate, Output, Report, Search, SearchResult
from engine.contract.top_sums import Next, TopSums
from engine.errors import CoppiceError, SearchError, UsageError, shortened

OURS = ("engine", "search", "tools")  # packages whose searches are part of this project
ROLES = ("draft", "reward")


class ContractError(Exception):
    """A search broke the contract; the message gives the expected value and the one that came."""


# --- the origin of an exception ---


def is_ours(kind: type) -> bool:
    """Whether a search's class is part of this project."""
    return kind.__module__.partition(".")[0] in OURS


def search_error(kind: type, error: BaseException) -> CoppiceError:
    """The error to report for an exception in a search; the exception is its `__cause__`.

    Args:
        kind: the search's class.
        error: what its code raised, or a ContractError.
    """
    what = str(error) if isinstance(error, ContractError) else f"{type(error).__name__}: {error}".rstrip(": ")
    verb = "breaks the contract of searches" if isinstance(error, ContractError) else "failed"
    if is_ours(kind):
        message = f"the search {kind.__name__} failed: {what}"
        remedy = "this is a bug of coppice: please report it; -v shows the traceback"
        reported = CoppiceError(message, where=_line_of(kind, error), remedy=remedy)
    else:
        message = f"the search {kind.__name__} of the module {kind.__module__} {verb}: {what}"
        remedy = "this is a fault of the search, not of coppice; -v shows the traceback"
        reported = SearchError(message, where=_line_of(kind, error), remedy=remedy)
    reported.__cause__ = error
    return reported


@contextmanager
def attributed(kind: type) -> Iterator[None]:
    """Report exceptions of a search's own methods as `search_error` does; errors meant for the user pass.

    Raises:
        CoppiceError: a search of this class raised.
    """
    try:
        yield
    except CoppiceError:
        raise
    except Exception as error:
        raise search_error(kind, error) from error


def _line_of(kind: type, error: BaseException) -> str:
    """file:line of the deepest frame in the search's package; without one, where its `run` begins."""
    package = kind.__module__.partition(".")[0]
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        if frame.f_globals.get("__name__", "").partition(".")[0] == package:
            return f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
    code = getattr(getattr(kind, "run", None), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}" if code else ""


# --- before it starts ---


def check_search(search: Any) -> None:
    """Check that an object is a search.

    Raises:
        UsageError: it does not derive from `Search`.
        SearchError: its `models` are no roles of models.
    """
    if not isinstance(search, Search):
        missing = [name for name in ("run", "slots", "check", "models") if not hasattr(search, name)]
        raise UsageError(
            f"search: expected an instance of a class that derives from search.Search, got {brief(search)}"
            + (f", which lacks {', '.join(missing)}" if missing else ""),
            remedy=f"write class {type(search).__name__}(Search): it provides slots, check and models",
        )
    with attributed(type(search)):
        models = search.models
        if isinstance(models, str) or not isinstance(models, Sequence) or not all(role in ROLES for role in models):
            raise ContractError(f"models: expected a tuple of {' or '.join(ROLES)}, got {brief(models)}")


def slots_of(search: Search, prompt: int, new: int) -> tuple[int, int]:
    """The KV slots that a search needs, at least and at most, by its method `slots`. Raises SearchError."""
    with attributed(type(search)):
        needed = search.slots(prompt, new)
        if not isinstance(needed, tuple | list) or len(needed) != 2 or not all(isinstance(n, int) for n in needed):
            raise ContractError(f"slots: expected two integers, the least and the most, got {brief(needed)}")
        return needed[0], needed[1]


def rows_of(search: Search) -> int:
    """The rows that a search requests at once at most, by its method `most_rows`. Raises SearchError."""
    with attributed(type(search)):
        rows = search.most_rows()
        if type(rows) is not int or rows < 1:
            raise ContractError(f"most_rows: expected an integer >= 1, got {brief(rows)}")
        return rows


# --- while it runs ---


def generator_fault(generator: Any) -> str:
    """The fault of a value that `run` returned; "" if there is none."""
    if all(hasattr(generator, name) for name in ("send", "throw", "close")):
        return ""
    return f"run: expected a generator, which a function with `yield` returns, got {brief(generator)}"


def report_fault(report: Report) -> str:
    """The fault of a Report; "" if there is none."""
    settled, best, beams = report.settled, report.best, report.beams
    if not isinstance(settled, list | tuple) or not all([type(token) is int for token in settled]):
        return f"Report.settled: expected a list of token ids, got {brief(settled)}"
    if not isinstance(report.info, dict):
        return f"Report.info: expected a dict, got {brief(report.info)}"
    if not callable(best or len) or not callable(beams or len):
        name, got = ("beams", beams) if callable(best or len) else ("best", best)
        return f"Report.{name}: expected a function without arguments, got {brief(got)}"
    return ""


def request_fault(
    request: Any, trees: Sequence[TokenTree], has_row: Callable[[TokenTree, int], bool] | None = None
) -> str:
    """The fault of a value that a search yielded, and that is no Report; "" if there is none.

    Args:
        request: the value.
        trees: the trees of the run.
        has_row: whether the row of a node is known, so that the node may have been evaluated ahead.
    """
    if not isinstance(request, Evaluate):
        return f"expected it to yield Evaluate or Report, got {brief(request)}"
    tree, nodes = request.tree, request.nodes
    if not callable(request.read or len):
        return f"Evaluate.read: expected a function or None, got {brief(request.read)}"
    wanted = request.top_sums
    if wanted is not None and (request.read is not None or not _is_top_sums(wanted, nodes)):
        return f"Evaluate.top_sums: expected TopSums, of a number for each node, and no read, got {brief(wanted)}"
    hidden = request.hidden
    if hidden is not None and (not callable(hidden) or request.read is not None or wanted is not None):
        return f"Evaluate.hidden: expected a function, with neither read nor top_sums, got {brief(hidden)}"
    if request.next is not None and not _is_next(request.next):
        return f"Evaluate.next: expected Next, of a positive width and a set of tokens, got {brief(request.next)}"
    if tree not in trees:
        got = "a tree of another run" if isinstance(tree, TokenTree) else brief(tree)
        return f"Evaluate.tree: expected task.tree or a tree that task.open_tree returned, got {got}"
    if type(nodes) is not list and (not isinstance(nodes, Sequence) or isinstance(nodes, str | bytes)):
        return f"Evaluate.nodes: expected a list of nodes, got {brief(nodes)}"
    if not nodes:
        return "Evaluate.nodes: expected at least one node, got none"
    if tree.can_evaluate(nodes):
        return ""
    grown = tree.grown
    for node in nodes:
        if type(node) is not int or not 0 <= node < grown:
            return f"Evaluate.nodes: expected nodes of this tree, which has grown {grown}, got {brief(node)}"
        if not tree.is_live(node):
            return f"Evaluate.nodes: expected live nodes, got {node}, which keep() has freed or moved into the trunk"
        if tree.is_evaluated(node) and not (has_row is not None and has_row(tree, node)):
            return f"Evaluate.nodes: expected nodes not evaluated yet, got {node}; a search stores the rows it is sent"
    assert has_row is not None, "a tree refused valid nodes"
    return ""


def _is_top_sums(wanted: Any, nodes: Any) -> bool:
    return isinstance(wanted, TopSums) and len(wanted.sums) == len(nodes) and type(wanted.k) is int and wanted.k > 0


def _is_next(next: Any) -> bool:
    return isinstance(next, Next) and type(next.width) is int and next.width > 0 and isinstance(next.ends, frozenset)


def tokens_fault(request: Evaluate, vocab_size: int, max_positions: int | None) -> str:
    """The fault of the tokens that a request would evaluate; "" if there is none.

    Args:
        request: free of other faults.
        vocab_size: size of the vocabulary of the tree's model.
        max_positions: tokens that the model's context holds; None: any number.
    """
    tree = request.tree
    trunk, nodes = tree.pending(request.nodes)
    for token in [*tree.trunk.tokens[len(tree.trunk.tokens) - trunk :], *map(tree.token, nodes)]:
        if type(token) is not int or not 0 <= token < vocab_size:
            return f"tokens: expected integers from 0 to {vocab_size - 1}, got {brief(token)}"
    last = max(map(tree.position, request.nodes))
    if max_positions is not None and last >= max_positions:
        return f"Evaluate.nodes: expected at most {max_positions} tokens, the model's context, got a node after {last}"
    return ""


def result_fault(result: Any, vocab_size: int | None, settled: Sequence[int] = ()) -> str:
    """The fault of a value that a search returned; "" if there is none.

    Args:
        result: the value.
        vocab_size: tokens that can be generated; None leaves the values in the outputs and the statistics unchecked.
        settled: the tokens that its reports have settled, which may have been shown.
    """
    if not isinstance(result, SearchResult):
        return f"expected it to return a SearchResult, got {brief(result)}"
    outputs = result.outputs
    if not isinstance(outputs, list | tuple) or not all(isinstance(output, Output) for output in outputs):
        return f"SearchResult.outputs: expected a list of Output, got {brief(outputs)}"
    if not outputs:
        return "SearchResult.outputs: expected at least one Output, got an empty list"
    if not isinstance(result.stats, dict):
        return f"SearchResult.stats: expected a dict, got {brief(result.stats)}"
    if vocab_size is None:
        return ""
    for output in outputs:
        if not isinstance(output.token_ids, list | tuple):
            return f"Output.token_ids: expected a list of token ids, got {brief(output.token_ids)}"
        for token in output.token_ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                return f"Output.token_ids: expected integers from 0 to {vocab_size - 1}, got {brief(token)}"
        reason = output.finish_reason
        if not isinstance(reason, str) or reason not in FINISH_REASONS:
            return f"Output.finish_reason: expected one of {', '.join(FINISH_REASONS)}, got {brief(reason)}"
    if list(outputs[0].token_ids[: len(settled)]) != list(settled):
        return f"Report.settled: expected the first tokens of the best output, got {brief(list(settled))}"
    try:
        json.dumps(result.record(0), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return f"SearchResult: expected outputs and stats that JSON can hold: {error}"
    return ""


def guarded(
    function: Callable[..., Any], failed: Callable[[Exception], None], instead: Callable[..., Any] = lambda *_: None
) -> Callable[..., Any]:
    """A function that never raises: it passes the exception to `failed`, and returns `instead` of its arguments."""

    def safe(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            failed(error)
            return instead(*args)

    return safe


def guarded_report(report: Report, failed: Callable[[Exception], None]) -> Report:
    """A Report whose functions never raise: they pass the exception to `failed` and return nothing."""
    best, beams = report.best, report.beams

    def plain_best() -> list[int]:
        return [int(token) for token in best()] if best else []

    def plain_beams() -> list[tuple[float | None, list[int]]]:
        found = beams() if beams else []
        return [(None if score is None else float(score), [int(t) for t in tokens]) for score, tokens in found]

    safe_best, safe_beams = (guarded(function, failed, list) for function in (plain_best, plain_beams))
    return replace(report, best=best and safe_best, beams=beams and safe_beams, ready=None)


def guarded_request(request: Evaluate, failed: Callable[[Exception], None]) -> Evaluate:
    """A request whose functions never raise: they pass the exception to `failed`; `read` returns an empty tensor."""
    read, hidden = request.read, request.hidden
    if read is None and hidden is None:
        return request

    def checked(rows_NV: Tensor, peaks_NB: Tensor | None) -> Tensor:
        assert read is not None
        numbers = read(rows_NV, peaks_NB)
        if not isinstance(numbers, Tensor) or numbers.dim() != 1:
            raise ContractError(f"Evaluate.read: expected it to return a tensor [n], got {brief(numbers)}")
        return numbers.to(rows_NV.device, torch.float64)

    def nothing(rows_NV: Tensor, _: Tensor | None) -> Tensor:
        return torch.empty(0, dtype=torch.float64, device=rows_NV.device)

    safe = read and guarded(checked, failed, nothing)
    return replace(request, read=safe, hidden=hidden and guarded(hidden, failed))


def brief(value: Any) -> str:
    """A value for a message, on one short line."""
    if isinstance(value, Tensor):
        return f"a tensor {[*value.shape]} of {str(value.dtype).removeprefix('torch.')}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a __repr__ of foreign code
        text = f"an instance of {type(value).__name__}"
    return shortened(text)

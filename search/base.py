"""The parts that searches share: the contract with the engine, the registry, exact top-k over a whole frontier."""

import dataclasses
import difflib
import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from engine.cache.tree import TokenTree
from engine.contract import (  # noqa: F401
    Answer,
    Evaluate,
    Output,
    Pause,
    Report,
    Search,
    SearchGenerator,
    SearchResult,
    Task,
)
from engine.contract.checks import attributed, is_ours
from engine.contract.top_sums import Next, TopSums
from engine.errors import UsageError
from engine.rules.endings import STUCK, is_stuck
from engine.values import default_of, kinds
from kernels.rows import at_least, top_k, top_sums  # noqa: F401  # searches import from here
from search.options import without_draws

REGISTRY: dict[str, type[Search]] = {}
MOST_NAMES = 8  # the most names that a message lists
ALIASES = {"beam": "trie"}  # other names -> names of the registry
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
S = TypeVar("S", bound=Search)
SHARED_PARAMS = (
    "beams",
    "length_penalty",
    "early_stopping",
    "num_return_sequences",
    "patience",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "seed",
)


def register(name: str) -> Callable[[type[S]], type[S]]:
    """Class decorator: register a search under a name; the first line of its docstring describes it.

    Args:
        name: lower-case letters and digits, in parts with a hyphen between them.

    Raises:
        UsageError: the name has another form or belongs to another class, or the class is no search.
    """

    def decorate(cls: type[S]) -> type[S]:
        if not isinstance(name, str) or not NAME.fullmatch(name) or name == "list":
            raise UsageError(
                f"the name of a search: expected lower-case letters and digits with single hyphens, got {name!r}"
            )
        check_class(cls, cls.__qualname__ if isinstance(cls, type) else repr(cls))
        known = REGISTRY.get(ALIASES.get(name, name))
        if known is not None and not _same(known, cls):
            raise UsageError(
                f"the name {name!r} belongs to another search, {known.__module__}:{known.__qualname__}",
                where=f"it was asked for by {cls.__module__}:{cls.__qualname__}",
                remedy="choose another name",
            )
        REGISTRY[name] = cls
        return cls

    return decorate


def check_class(cls: Any, name: str) -> None:
    """Check that a class is a search that can be registered. Raises UsageError."""
    if not isinstance(cls, type) or not issubclass(cls, Search):
        got = "a class that does not derive from it" if isinstance(cls, type) else f"a {type(cls).__name__}"
        raise UsageError(f"{name}: expected a class that derives from search.Search, got {got}")
    if inspect.isabstract(cls):
        raise UsageError(f"{name}: the class has no method run", remedy="write def run(self, task)")
    if "__dataclass_fields__" not in vars(cls):
        raise UsageError(
            f"{name}: the class is no dataclass, so its fields are no parameters",
            remedy="write @dataclass(frozen=True) above the class, below @register if that is there",
        )


def name_of(cls: type) -> str | None:
    """Return the name that a class is registered under; None if it has none."""
    return next((name for name, known in REGISTRY.items() if known is cls), None)


def _same(a: type, b: type) -> bool:
    """Whether two classes are one class, loaded twice: as a program and as a module, or again after a change."""
    files = {str(getattr(sys.modules.get(cls.__module__), "__file__", cls.__module__)) for cls in (a, b)}
    return a is b or (a.__qualname__ == b.__qualname__ and len(files) == 1)


def parameters(name: str) -> dict[str, str]:
    """Map the parameters of a search to fields of its configuration; parameters of this search alone begin with its
    name."""
    prefix = name.replace("-", "_")
    return {
        f.name if f.name in SHARED_PARAMS else f"{prefix}_{f.name}": f.name
        for f in dataclasses.fields(REGISTRY[name])  # type: ignore[arg-type]
        if f.init
    }


def paths() -> dict[str, tuple[str, ...]]:
    """Map the parameters of all searches that are paths of files to the values of each that are no paths.

    The author of a batch line is not always the one who starts the run, and must not choose the files that are read or
    written. A field is a path if its type mentions `Path`, or if `path_field` made it.
    """
    found = {}
    for name, cls in REGISTRY.items():
        fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for key, field in parameters(name).items():
            if "path" in fields[field].metadata or re.search(r"\bPath\b", str(fields[field].type)):
                found[key] = fields[field].metadata.get("path", ())
    return found


def path_field(default: Any = None, words: tuple[str, ...] = ()) -> Any:
    """Return a field of a configuration: the path of a file, or one of `words`."""
    return dataclasses.field(default=default, metadata={"path": words})


def chosen(params: Mapping[str, Any], default: str) -> Any:
    """Return the search that a request chooses: the one that it names, or beam search for `beams` without a name.

    Args:
        params: the request's parameters; "search" is the name or an alias, if the request names a search.
        default: the search of a request that names none; it also takes `beams` if it has this parameter.

    Returns:
        a name of the registry; an unknown name is returned unchanged.
    """
    if "search" in params:
        return _unaliased(params["search"])
    return "trie" if "beams" in params and "beams" not in parameters(default) else default


def _unaliased(name: Any) -> Any:
    return ALIASES.get(name, name) if isinstance(name, str) else name


def make_search(name: str, params: dict[str, Any]) -> Search:
    """Return a search's configuration from user parameters (snake_case, as in batch lines).

    Raises:
        UsageError: unknown search, a parameter that this search does not have, a value out of range. A search that
            does not draw accepts the temperature 0, and with it the other parameters of draws, which are ignored.
        SearchError: a search from outside this project raised another exception.
    """
    name = _unaliased(name)
    if not isinstance(name, str) or name not in REGISTRY:
        raise UsageError(f"search: expected one of {', '.join(REGISTRY)}, got {name!r}")
    known = parameters(name)
    params = without_draws(params, known)
    for key in params:
        if key not in known:
            raise UsageError(f"{key}: the search {name!r} has no such parameter", remedy=_remedy(key, params, known))
    cls, values = REGISTRY[name], {known[key]: value for key, value in params.items()}
    try:
        if is_ours(cls):  # their constructors check the values
            return cls(**values)
        _convert(name, cls, values, known)
        with attributed(cls):
            return cls(**values)
    except UsageError as error:  # a constructor's begins with the name of a field
        field, colon, rest = error.what.partition(":")
        key = next((key for key in known if known[key] == field), field)
        raise UsageError(f"{key}{colon}{rest}", where=error.where, remedy=error.remedy) from None


def _convert(name: str, cls: type, values: dict[str, Any], known: Mapping[str, str]) -> None:
    """Convert values to the types of the fields of an outside search. Raises UsageError."""
    accepted = kinds(cls)
    for key, field in known.items():
        if field in values:
            try:
                values[field] = accepted[field].convert(values[field])
            except ValueError as error:
                raise UsageError(f"{key}: {error}") from None
        elif default_of(cls, field) is dataclasses.MISSING:
            raise UsageError(
                f"{key}: the search {name!r} has no default for it", remedy=f"give --{key.replace('_', '-')}"
            )


def _remedy(key: str, params: Collection[str], known: Collection[str]) -> str:
    """Return the remedy for a parameter that a search does not have: the searches that have it, starting with those
    that have all given parameters."""
    has = {name: parameters(name) for name in REGISTRY}
    takers = [name for name, theirs in has.items() if key in theirs]
    if not takers:
        near = difflib.get_close_matches(key, known, 1)
        rest = f"it has: {', '.join(known) or 'none'}" if len(known) <= MOST_NAMES else "--help all describes them"
        return f"did you mean {near[0]}?" if near else rest
    able = [name for name in takers if all(other in has[name] for other in params)]
    what = "have all of the parameters" if able and able != takers else "have it"
    names = able or takers
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"searches that {what}: {', '.join(names[:3])}{rest}"


def evaluate_top_sums(
    tree: TokenTree, nodes: Sequence[int], scores: list[float], k: int, next: Next | None = None
) -> Generator[Evaluate, Any, tuple[list[float], list[int], list[int]]]:
    """Evaluate nodes and find the k greatest sums of score and log-probability, exactly; call it with `yield from`.

    Args:
        tree: holds the nodes.
        nodes: the N nodes of the frontier.
        scores: one for each node, added to the log-probabilities in float32.
        k: the number of sums; fewer are returned if fewer are finite.
        next: see `Evaluate`.

    Returns:
        sums, rows, tokens: the greatest sum first; equal sums are ordered by row, then by token.
    """
    rows_0V, numbers = yield Evaluate(tree, nodes, top_sums=TopSums(scores, k), next=next)
    (sums, places), V = numbers.view(2, -1), rows_0V.shape[1]
    places = places.long()
    found, rows = sums.tolist(), (places // V).tolist()
    if found and is_stuck(found[-1]):  # STUCK in a float32 sum has swallowed the score
        found = [scores[row] + STUCK if is_stuck(sum) else sum for sum, row in zip(found, rows, strict=True)]
    return found, rows, (places % V).tolist()


def likely(logp_NV: Tensor, least: float, peaks_NB: Tensor | None = None) -> Tensor:
    """Return for each row the log-probabilities of tokens with a probability of at least `least`, lower tokens first,
    packed for `likely_tokens`: float64 [n], on the rows' device."""
    least = max(least, 1e-38)
    most = min(logp_NV.shape[1], int(1 / least))  # without biases no more tokens can have `least`: a row adds up to 1
    return at_least(logp_NV, math.log(least), most, peaks_NB).view(-1)


def likely_tokens(numbers: Tensor, rows: int) -> list[dict[int, float]]:
    """Return for each row the tokens that `likely` found, mapped to their log-probabilities.

    Args:
        numbers: returned by `likely`, on the host: for each row log-probabilities, then tokens, both padded with NaN.
        rows: the number of rows.
    """
    found = numbers.view(rows, 2, -1).tolist() if len(numbers) else [([], [])] * rows
    return [
        {int(token): logp for logp, token in zip(logps, tokens, strict=True) if token == token}
        for logps, tokens in found
    ]

"""The options of `Engine.generate` and the like, as type checkers see them: the fields of `Request` by name."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor

from engine.contract.trace import Trace
from engine.errors import UsageError
from engine.rewards import Messages, RewardFunction
from engine.rules import Words
from engine.rules.catalogue import Catalogue
from engine.rules.constraint import Constraint


class RequestOptions(TypedDict, total=False):
    """The fields of `engine.Request` but for its prompt and its search; see there."""

    max_new_tokens: int
    eos_token_ids: Iterable[int] | None
    ignore_eos: bool
    stop: Sequence[str]
    messages: Messages | None
    reward: RewardFunction | None
    trace: Trace | None
    logprobs: int | None
    cache_salt: str | None
    parse_special: bool
    constraint: Constraint | None
    constraint_scores: str
    choices: Words
    json_schema: Mapping[str, Any] | bool | str | None
    regex: str | None
    grammar: str | None
    catalogue: Catalogue | str | Path | None
    logit_bias: Mapping[int | str, float] | None
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[Any] | None
    repetition_penalty: float
    no_repeat_ngram_size: int
    bad_words: Words
    min_length: int
    min_new_tokens: int
    prefix_allowed_tokens_fn: Callable[[int, Tensor], Any] | None
    suppress_tokens: Sequence[int]
    begin_suppress_tokens: Sequence[int]
    logits_processor: Callable[[Tensor, Tensor], Tensor] | Sequence[Callable[[Tensor, Tensor], Tensor]] | None


class StreamOptions(RequestOptions, total=False):
    """The same, and what `Engine.stream` takes besides."""

    interrupted: Callable[[], bool]


def check_options(options: Mapping[str, Any], search: Any) -> None:
    """Check the names of options. Raises UsageError."""
    known = RequestOptions.__annotations__
    for name in options:
        if name in known:
            continue
        if hasattr(search, name):
            remedy = f"it is a parameter of the search: {type(search).__name__}({name}=...)"
        else:
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]}?" if near else "help(engine.RequestOptions) lists all"
        raise UsageError(f"{name[:100]}: no such option", remedy=remedy)

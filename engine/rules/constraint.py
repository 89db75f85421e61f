"""Constraints: which tokens may come next, as states of the nodes of a tree.

A constraint has a start state, a function from a state and a token to the next state, and for each state the tokens
that are allowed after it. The engine keeps a state for each node of a search's tree (`engine.rules.state`) and
gives the search rows in which forbidden tokens have log-probability -inf, so every search obeys. Other edits of
rows (penalties, biases) have the same form: `engine.rules.processors`.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count, groupby, pairwise
from operator import eq
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor

from engine.contract.checks import brief
from engine.errors import CoppiceError, UsageError
from engine.text.channels import start_at_end

MASK_WORD = 32  # bits of a word of a mask

State = Any
Tokens = Sequence[int] | Tensor | None


class ConstraintError(CoppiceError):
    """A constraint or a hook of a request failed, or returned an invalid value; `__cause__` is its exception."""

    exit_code = 2
    code = "constraint"


class Constraint(ABC):
    """Base class of constraints. One object may serve many requests, so everything that changes belongs in states.

    A state is any object and is never changed: `advance` returns a new one (or the same). Each method may raise; the
    request then ends with a `ConstraintError`, and others continue.
    """

    @abstractmethod
    def start(self, prompt: Sequence[int]) -> State:
        """The state after the prompt, before the first new token."""

    @abstractmethod
    def advance(self, state: State, token: int) -> State:
        """The state after a token that the state allows; called once for each token of a path."""

    @abstractmethod
    def allowed(self, states: Sequence[State]) -> "Sequence[Tokens] | Allowed":
        """The tokens that each state allows.

        Returns:
            for each state one of: ids in ascending order, as a list or as an int64 tensor, which needs no conversion;
            a bit mask, an int32 tensor [ceil(V / 32)], whose bit i of word w stands for the token 32 w + i; None: all
            tokens. If no token is allowed, the output ends there, with the finish reason "constraint". An `Allowed` of
            all states is used unchecked.
        """

    def advance_all(self, states: Sequence[State], tokens: Sequence[int]) -> list[State]:
        """The state after each of many states and a token; by default from `advance`, one by one."""
        return [self.advance(state, token) for state, token in zip(states, tokens, strict=True)]

    def item(self, tokens: Sequence[int]) -> str | int | None:
        """The id for `Output.item` of an output of these tokens, given without an end-of-sequence token."""
        return None

    def items(self, outputs: Sequence[Sequence[int]]) -> list[str | int | None]:
        """The ids of many outputs; by default from `item`, one by one."""
        return [self.item(list(tokens)) for tokens in outputs]


@dataclass(frozen=True, eq=False)
class Allowed:
    """The tokens that each of N states allows, checked.

    Attributes:
        token_M: int64, those of states that list them: ascending within a state, state after state.
        count_N: int64, how many each state lists.
        masks: the other states, by their places: a mask, int32 words, or None if all tokens are allowed.
    """

    token_M: Tensor
    count_N: Tensor
    masks: Mapping[int, Tensor | None] = field(default_factory=dict)

    @classmethod
    def of(cls, found: "Sequence[Tokens] | Allowed", vocab: int) -> "Allowed":
        """Check what `Constraint.allowed` returned. Raises ConstraintError."""
        if isinstance(found, Allowed):
            low, high = (int(x) for x in found.token_M.aminmax()) if len(found.token_M) else (0, 0)
            if not 0 <= low <= high < vocab:
                raise wrong(f"expected token ids from 0 to {vocab - 1}, got {low} to {high}")
            return found
        entries = [_checked(tokens, vocab) for tokens in found]
        masks = {i: entry for i, entry in enumerate(entries) if entry is None or _is_mask(entry)}
        lists = [() if i in masks else entry for i, entry in enumerate(entries)]
        return cls(*listed(lists), masks)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.count_N)

    @property
    def row_M(self) -> Tensor:
        """The place of the state of each listed token."""
        return torch.arange(len(self.count_N)).repeat_interleave(self.count_N)

    @cached_property
    def counts(self) -> list[int]:
        """How many tokens each state lists."""
        return self.count_N.tolist()

    @cached_property
    def nothing(self) -> frozenset[int]:
        """The states that allow no token."""
        empty = (i for i, count in enumerate(self.counts) if not count)
        return frozenset(
            i for i in empty if i not in self.masks or ((mask := self.masks[i]) is not None and not bool(mask.any()))
        )

    @cached_property
    def forced(self) -> dict[int, int]:
        """The states that list a single token -> this token."""
        if not (single := [i for i, count in enumerate(self.counts) if count == 1]):
            return {}
        tokens = self.token_M[(self.count_N.cumsum(0) - 1)[longs(single)]]
        return dict(zip(single, tokens.tolist(), strict=True))

    def has(self, steps: Sequence[int]) -> list[bool]:
        """Whether the state at a place allows a token, for each place << 32 | token."""
        found = [False] * len(steps)
        if len(self.token_M):
            wanted_n = longs(steps)
            key_M = self.token_M.add(self.row_M, alpha=1 << 32)  # ascending
            found = (key_M[torch.searchsorted(key_M, wanted_n).clamp_(max=len(key_M) - 1)] == wanted_n).tolist()
        for i, step in enumerate(steps if self.masks else ()):
            place, token = divmod(step, 1 << 32)
            if place in self.masks:
                mask = self.masks[place]
                found[i] = mask is None or bool(int(mask[token // MASK_WORD]) >> token % MASK_WORD & 1)
        return found

    def some(self, places: Sequence[int]) -> "Allowed":
        """The tokens of the states at these places."""
        if len(places) == len(self) and all(map(eq, places, count())):
            return self
        place_n = longs(places)
        count_n, start_n = self.count_N[place_n], (self.count_N.cumsum(0) - self.count_N)[place_n]
        masks = {i: self.masks[place] for i, place in enumerate(places) if place in self.masks} if self.masks else {}
        return Allowed(self.token_M[pieces(start_n, count_n)], count_n, masks)

    def or_end(self, token: int) -> "Allowed":
        """The same, with a token where no token is listed."""
        count_N = self.count_N.clamp(min=1)
        token_M = torch.full((int(count_N.sum()),), token)
        token_M[pieces(count_N.cumsum(0) - count_N, self.count_N)] = self.token_M
        return Allowed(token_M, count_N, self.masks)


def joined(parts: Sequence[Allowed]) -> Allowed:
    """The tokens of several groups of states, one group after the other."""
    masks, at = {}, 0
    for part in parts:
        masks |= {at + i: mask for i, mask in part.masks.items()}
        at += len(part)
    return Allowed(torch.cat([part.token_M for part in parts]), torch.cat([part.count_N for part in parts]), masks)


def longs(numbers: Sequence[int]) -> Tensor:
    """Numbers as int64; for thousands this is eight times as fast as `torch.tensor`."""
    memory = array("q", numbers)
    return torch.frombuffer(memory, dtype=torch.int64) if memory else torch.empty(0, dtype=torch.int64)


def pieces(start_N: Tensor, length_N: Tensor) -> Tensor:
    """The places in an array of pieces of it, given by their starts and lengths, one piece after the other."""
    shift_N = start_N - (length_N.cumsum(0) - length_N)
    return torch.arange(int(length_N.sum())) + shift_N.repeat_interleave(length_N)


def listed(lists: Iterable[Sequence[int] | Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens, one list after the other, int64 [M], and how many each list has."""
    lists, parts = [*lists], [torch.empty(0, dtype=torch.int64)]
    for tensors, some in groupby(lists, lambda one: isinstance(one, Tensor)):
        flat: Any = some if tensors else [longs([*chain.from_iterable(some)])]  # type: ignore[list-item]  # noqa: B031
        parts += [torch.as_tensor(each, dtype=torch.int64) for each in flat]
    return torch.cat(parts), longs([*map(len, lists)])


def _is_mask(tokens: Any) -> bool:
    return isinstance(tokens, Tensor) and tokens.dtype == torch.int32 and tokens.dim() == 1


def _checked(tokens: Tokens, vocab: int) -> Tokens:
    """Check what `Constraint.allowed` returned for a state; tensors move to the host. Raises ConstraintError."""
    if tokens is None:
        return None
    if isinstance(tokens, Tensor) and _is_mask(tokens):
        if len(tokens) < -(-vocab // MASK_WORD):
            got = f"a mask of {len(tokens)} words"
            raise wrong(f"expected a mask of {-(-vocab // MASK_WORD)} words of 32 bits, a bit per token, got {got}")
        return tokens.cpu()
    if isinstance(tokens, Tensor):
        plain = tokens.dtype == torch.int64 and tokens.dim() == 1
        rising = plain and bool((tokens[1:] > tokens[:-1]).all())
    else:
        plain = isinstance(tokens, list | tuple) and {*map(type, tokens)} <= {int}
        rising = plain and all(a < b for a, b in pairwise(tokens))
    if not plain:
        raise wrong(f"expected a list of token ids, an int64 tensor, an int32 bit mask or None, got {brief(tokens)}")
    for token in (tokens[0], tokens[-1]) if len(tokens) else ():
        if not 0 <= int(token) < vocab:
            raise wrong(f"expected token ids from 0 to {vocab - 1}, got {int(token)}")
    if not rising:
        raise wrong(f"expected token ids in ascending order, each once, got {brief(tokens)}")
    return tokens.cpu() if isinstance(tokens, Tensor) else tokens


def wrong(what: str) -> ConstraintError:
    """The error for an invalid result of `Constraint.allowed`."""
    return ConstraintError(f"allowed: {what}", remedy="this is a fault of the constraint, not of coppice")


@contextmanager
def attributed(culprit: Any, doing: str) -> Iterator[None]:
    """Report exceptions of a constraint's or a hook's code as ConstraintError; errors meant for the user pass.

    Args:
        culprit: the constraint or the function.
        doing: the method, or what the function was called for.
    """
    try:
        yield
    except CoppiceError as error:
        error.where = error.where or f"{name_of(culprit)}.{doing}"
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        *_, (frame, line) = walk_tb(error.__traceback__)  # the deepest one, where it was raised
        where = f"{frame.f_code.co_filename}:{line}, in {name_of(culprit)}.{doing}"
        remedy = "this is a fault of the constraint, not of coppice; -v shows the traceback"
        raise ConstraintError(
            f"the constraint {name_of(culprit)} failed: {what}", where=where, remedy=remedy
        ) from error


def name_of(culprit: Any) -> str:
    """The name of a constraint's class or of a function."""
    return getattr(culprit, "__qualname__", None) or type(culprit).__qualname__


class PrefixAllowed(Constraint):
    """Hugging Face's `prefix_allowed_tokens_fn`: (batch id, token ids of prompt and path, int64 [L]) -> allowed ids.

    The batch id is always 0. A state is the tuple of all tokens, so that long outputs cost more than with a constraint
    that has states of its own.
    """

    def __init__(self, function: Callable[[int, Tensor], Any]):
        self.function = function
        self.__qualname__ = name_of(function)

    def start(self, prompt: Sequence[int]) -> State:
        return tuple(prompt)

    def advance(self, state: State, token: int) -> State:
        return (*state, token)

    def allowed(self, states: Sequence[State]) -> Sequence[Tokens]:
        found = []
        for state in states:
            ids = self.function(0, torch.tensor(state, dtype=torch.int64))
            found.append(sorted({int(token) for token in ids}))
        return found


class Choices(Constraint):
    """An output that is one of some token sequences, followed by an end-of-sequence token.

    A sequence that is the beginning of another may end or continue. States are nodes of a trie of the sequences. If no
    token ends an output, it ends after a sequence that no other continues, with the finish reason "constraint".

    Args:
        sequences: at least one, each of at least one token id (`Request.choices` takes texts too).
        eos: tokens that end an output.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], eos: Sequence[int] = ()):
        self._next: list[dict[int, int]] = [{}]  # for each node: token -> node
        whole: set[int] = set()
        for sequence in sequences:
            node = 0
            for token in sequence:
                if token not in self._next[node]:
                    self._next[node][token] = len(self._next)
                    self._next.append({})
                node = self._next[node][token]
            whole.add(node)
        self._ids = [
            torch.tensor(sorted({*after, *(eos if node in whole else ())}), dtype=torch.int64)
            for node, after in enumerate(self._next)
        ]
        self._next.append({})  # the state after the end of a sequence
        self._ids.append(torch.empty(0, dtype=torch.int64))

    def start(self, prompt: Sequence[int]) -> State:
        return 0

    def advance(self, state: State, token: int) -> State:
        return self._next[state].get(token, len(self._next) - 1)

    def allowed(self, states: Sequence[State]) -> Sequence[Tokens]:
        return [self._ids[state] for state in states]


class AfterThought(Constraint):
    """Another constraint, applied after the thought that the prompt has opened; until then no token ends the output.

    Args:
        constraint: the other constraint.
        closing: tokens that end the thought; the first of them occurs nowhere else.
        free_W: mask of the tokens that the thought may have.
    """

    def __init__(self, constraint: Constraint, closing: Sequence[int], free_W: Tensor):
        self.constraint, self.closing, self.free_W = constraint, closing, free_W

    def start(self, prompt: Sequence[int]) -> State:
        return 0, self.constraint.start(prompt)

    def advance(self, state: State, token: int) -> State:
        seen, inner = state  # how much of `closing` was read
        if seen == len(self.closing):
            return seen, self.constraint.advance(inner, token)
        return self._read(seen, token), inner

    def _read(self, seen: int, token: int) -> int:
        return seen + 1 if token == self.closing[seen] else int(token == self.closing[0])

    def allowed(self, states: Sequence[State]) -> Sequence[Tokens]:
        ended = [inner for seen, inner in states if seen == len(self.closing)]
        found = iter(self.constraint.allowed(ended) if ended else ())  # type: ignore[arg-type]
        return [next(found) if seen == len(self.closing) else self._free(seen) for seen, _ in states]

    def _free(self, seen: int) -> Tensor:
        return self.free_W


class AfterSpelledThought(AfterThought):
    """The same for a closing tag that is text, in any tokens; no token may extend beyond the tag.

    Args:
        constraint: the other constraint.
        closing: the tag, in ASCII.
        data: the bytes of each token; the thought has no tokens beyond these.
        longer: the tokens with the tag's last byte before the end of their own bytes.
        free_V: flags of the tokens that the thought may have, int64 [V].
    """

    def __init__(
        self, constraint: Constraint, closing: str, data: Sequence[bytes], longer: Sequence[int], free_V: Tensor
    ):
        free_V[len(data) :] = 0
        super().__init__(constraint, (), packed(free_V))
        self.closing, self._data, self._longer, self._free_V = closing, data, longer, free_V
        self._masks: dict[int, Tensor] = {}

    def _read(self, seen: int, token: int) -> int:
        text = self.closing[:seen] + self._data[token].decode("latin-1")
        return len(self.closing) if self.closing in text else len(start_at_end(text, self.closing))

    def _free(self, seen: int) -> Tensor:
        if seen not in self._masks:
            tag, free_V = self.closing.encode(), self._free_V.clone()
            free_V[[token for token in self._longer if (tag[:seen] + self._data[token]).partition(tag)[2]]] = 0
            self._masks[seen] = packed(free_V)
        return self._masks[seen]


def packed(flags_V: Tensor) -> Tensor:
    """Flags of tokens, int64 [V], as a mask, int32 [ceil(V / 32)]."""
    flags_V = torch.nn.functional.pad(flags_V, (0, -len(flags_V) % MASK_WORD))
    return (flags_V.view(-1, MASK_WORD) << torch.arange(MASK_WORD)).sum(1).to(torch.int32)


def check_constraint(value: Any) -> None:
    """Check that a value is a constraint. Raises UsageError."""
    if value is not None and not isinstance(value, Constraint):
        missing = [name for name in ("start", "advance", "allowed") if not callable(getattr(value, name, None))]
        lacks = f", which lacks {', '.join(missing)}" if missing else ", which does not derive from it"
        raise UsageError(f"constraint: expected an engine.Constraint, got {brief(value)}{lacks}")

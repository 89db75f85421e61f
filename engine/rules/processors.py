"""Processors: edits of rows of log-probabilities or logits, with Hugging Face's meaning and order.

A processor has states like a constraint: a start state, and a function from a state and a token to the next one. It
edits rows in place, given their states. `Masked` turns a constraint into a processor.
"""

import functools
import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.contract.checks import brief
from engine.rules.constraint import MASK_WORD, Allowed, Constraint, ConstraintError, State, attributed

MOST_ROWS = 64  # rows masked at a time: a mask's limits take as much memory as its row
Entry = tuple[int, int, float]  # row, token, number
ID = array("i").itemsize


class Processor:
    """Base class of processors; this one changes nothing.

    Attributes:
        bans: whether it may set log-probabilities to -inf.
        raises: whether it may make log-probabilities positive.
        of_logits: whether a constant added to the logits would change the result.
    """

    bans = raises = of_logits = False

    def start(self, prompt: Sequence[int]) -> State:
        """The state after the prompt."""
        return None

    def advance(self, state: State, token: int) -> State:
        """The state after a token."""
        return state

    def advance_all(self, states: Sequence[State], tokens: Sequence[int]) -> list[State]:
        """The state after each state and token."""
        return [self.advance(state, token) for state, token in zip(states, tokens, strict=True)]

    def apply(self, rows_NV: Tensor, states: Sequence[State]) -> None:
        """Edit rows in place.

        Args:
            rows_NV: float32, log-probabilities or logits; ids past the tokenizer's are -inf.
            states: one per row.
        """


class Masked(Processor):
    """A constraint as a processor. Its state is the constraint's."""

    bans = True

    def __init__(self, constraint: Constraint, vocab: int):
        self.constraint, self.vocab = constraint, vocab

    def start(self, prompt: Sequence[int]) -> State:
        with attributed(self.constraint, "start"):
            return self.constraint.start(list(prompt))

    def advance_all(self, states: Sequence[State], tokens: Sequence[int]) -> list[State]:
        with attributed(self.constraint, "advance"):
            return self._as_many(self.constraint.advance_all(states, tokens), states, "advance_all")

    def allowed(self, states: Sequence[State]) -> Allowed:
        """The allowed tokens of states. Raises ConstraintError."""
        with attributed(self.constraint, "allowed"):
            found = self.constraint.allowed(states)
            found = found if isinstance(found, Allowed) else [*found]
            return Allowed.of(self._as_many(found, states, "allowed"), self.vocab)

    def items(self, outputs: Sequence[Sequence[int]]) -> list[str | int | None]:
        """See `Constraint.item`. Raises ConstraintError."""
        with attributed(self.constraint, "item"):
            return self._as_many(self.constraint.items(outputs), outputs, "items")

    @staticmethod
    def _as_many(found: Any, asked: Sequence[Any], doing: str) -> Any:
        """The entries that a method found. Raises ConstraintError unless there is one for each that was asked for."""
        if len(found) != len(asked):
            raise ConstraintError(f"{doing}: expected an entry for each of {len(asked)} states, got {len(found)}")
        return found


def mask(rows_NV: Tensor, allowed: Allowed) -> None:
    """Set the tokens that are not allowed to -inf, in place."""
    V, device, masks = rows_NV.shape[1], rows_NV.device, allowed.masks
    with_ids = [i for i in range(len(allowed)) if i not in masks]
    if with_ids:
        kept = (allowed.row_M * V + allowed.token_M).to(device, non_blocking=True)
        flat = rows_NV.view(-1)
        values = flat[kept]
        _select(rows_NV, with_ids, lambda some_NV: some_NV.fill_(-math.inf))
        flat[kept] = values
    every = [(i, mask_W[: -(-V // MASK_WORD)]) for i, mask_W in masks.items() if mask_W is not None]
    for some in (every[i : i + MOST_ROWS] for i in range(0, len(every), MOST_ROWS)):
        masked, words_NW = [i for i, _ in some], torch.stack([mask_W for _, mask_W in some]).to(device)
        limits_NV = _limits(device).index_select(0, words_NW.view(torch.uint8).int().view(-1)).view(len(masked), -1)
        if short := V - limits_NV.shape[1]:
            limits_NV = torch.nn.functional.pad(limits_NV, (0, short), value=-math.inf)
        _select(rows_NV, masked, lambda some_NV: torch.minimum(some_NV, limits_NV[:, :V], out=some_NV))  # noqa: B023


@functools.cache
def _limits(device: torch.device) -> Tensor:
    """Upper limits of eight tokens for each byte of a mask, float32 [256, 8]; a minimum is faster than a fill."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return torch.where(bits == 1, math.inf, -math.inf).to(torch.float32).to(device)


def _select(rows_NV: Tensor, which: Sequence[int], edit: Callable[[Tensor], Tensor]) -> None:
    """Edit some of the rows in place."""
    if len(which) == len(rows_NV):
        edit(rows_NV)
    else:
        place_n = torch.tensor(which).to(rows_NV.device)
        rows_NV.index_copy_(0, place_n, edit(rows_NV[place_n]))


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens as a state that is copied and compared at once, `ID` bytes for each."""
    return array("i", tokens).tobytes()


def unpack(states: Sequence[bytes], blank: int) -> Tensor:
    """Packed tokens, int64 [N, L], with `blank` after those of shorter states."""
    longest = max(map(len, states), default=0)
    fill = pack([blank])
    flat = bytearray().join(state + fill * ((longest - len(state)) // ID) for state in states)
    found = torch.frombuffer(flat, dtype=torch.int32) if flat else torch.empty(0, dtype=torch.int32)
    return found.long().view(len(states), longest // ID)


def _add(rows_NV: Tensor, entries: Sequence[Entry]) -> None:
    """Add numbers to elements."""
    if entries:
        row_n, token_n, number_n = (torch.tensor(x).to(rows_NV.device) for x in zip(*entries, strict=True))
        rows_NV.index_put_((row_n, token_n), number_n.to(rows_NV.dtype), accumulate=True)


class Bias(Processor):
    """Adds a number to the last token of a sequence if the tokens before are the rest of the sequence
    (`SequenceBiasLogitsProcessor`). -inf bans (`NoBadWordsLogitsProcessor`). A state is the last tokens.

    Args:
        biases: sequences of at least one token -> numbers.
    """

    def __init__(self, biases: dict[tuple[int, ...], float]):
        self.reach = max(map(len, biases), default=1) - 1
        self.bans = -math.inf in biases.values()
        self.raises = any(number > 0 for number in biases.values())
        self._always = [(sequence[0], number) for sequence, number in biases.items() if len(sequence) == 1]
        self._after: dict[int, dict[tuple[int, ...], list[tuple[int, float]]]] = {}  # by length and by prefix
        for sequence, number in biases.items():
            if len(sequence) > 1:
                of_length = self._after.setdefault(len(sequence) - 1, {})
                of_length.setdefault(sequence[:-1], []).append((sequence[-1], number))
        self._row: Tensor | None = None

    def start(self, prompt: Sequence[int]) -> State:
        return tuple(prompt[max(0, len(prompt) - self.reach) :])

    def advance(self, state: State, token: int) -> State:
        return (*state, token)[-self.reach :] if self.reach else ()

    def apply(self, rows_NV: Tensor, states: Sequence[State]) -> None:
        if self._always:
            if self._row is None:
                self._row = torch.zeros(1, rows_NV.shape[1], device=rows_NV.device)
                _add(self._row, [(0, token, number) for token, number in self._always])
            rows_NV += self._row
        entries = []
        for i, state in enumerate(states):
            for length, prefixes in self._after.items():
                if length <= len(state):
                    entries += [(i, *found) for found in prefixes.get(state[len(state) - length :], ())]
        _add(rows_NV, entries)


class PackedTokens(Processor):
    """A processor whose state is the new tokens, packed, perhaps after some of the prompt."""

    def start(self, prompt: Sequence[int]) -> State:
        return b""

    def advance(self, state: State, token: int) -> State:
        return state + pack([token])


class RepetitionPenalty(PackedTokens):
    """Multiplies negative numbers of tokens that occurred, in the prompt or since, by a penalty, and divides positive
    ones by it (`RepetitionPenaltyLogitsProcessor`). A state is the new tokens, packed."""

    of_logits = True

    def __init__(self, penalty: float):
        self.penalty = penalty
        self._prompt: Tensor = torch.empty(0, dtype=torch.int64)

    def start(self, prompt: Sequence[int]) -> State:
        self._prompt = torch.tensor(prompt, dtype=torch.int64).unique()
        return b""

    def apply(self, rows_NV: Tensor, states: Sequence[State]) -> None:
        V, row_N1 = rows_NV.shape[1], torch.arange(len(rows_NV)).unsqueeze(1)
        since_NL = unpack(states, -1)
        before_NP, since_n = row_N1 * V + self._prompt[self._prompt < V], (row_N1 * V + since_NL)[since_NL >= 0]
        place = torch.cat([before_NP.view(-1), since_n]).to(rows_NV.device)
        numbers = rows_NV.view(-1)[place]  # both entries of a token that occurs twice get the same
        rows_NV.view(-1)[place] = torch.where(numbers < 0, numbers * self.penalty, numbers / self.penalty)


class OccurrencePenalty(PackedTokens):
    """Subtracts from the numbers of tokens that were generated: OpenAI's penalties. A state is the new tokens, packed.

    Args:
        frequency: subtracted for each time that a token occurred.
        presence: subtracted once for a token that occurred.
    """

    def __init__(self, frequency: float, presence: float):
        self.frequency, self.presence = frequency, presence
        self.raises = frequency < 0 or frequency + presence < 0

    def apply(self, rows_NV: Tensor, states: Sequence[State]) -> None:
        since_NL = unpack(states, -1)
        row_N1 = torch.arange(len(rows_NV)).unsqueeze(1)
        place, count = (row_N1 * rows_NV.shape[1] + since_NL)[since_NL >= 0].unique(return_counts=True)
        numbers = (self.frequency * count + self.presence).to(rows_NV)
        rows_NV.view(-1)[place.to(rows_NV.device)] -= numbers


class NoRepeatNGram(PackedTokens):
    """Bans tokens that would complete an n-gram that occurred before, in the prompt or since
    (`NoRepeatNGramLogitsProcessor`). A state is the last n - 1 tokens of the prompt and the new tokens, packed."""

    bans = True

    def __init__(self, size: int):
        self.size = size
        self._prompt: dict[bytes, array] = {}  # n - 1 tokens, packed -> the tokens that follow them

    def start(self, prompt: Sequence[int]) -> State:
        n, packed = self.size - 1, pack(prompt)
        self._prompt = {}
        for i in range(len(prompt) - n):
            self._prompt.setdefault(packed[i * ID : (i + n) * ID], array("i")).append(prompt[i + n])
        return packed[max(0, len(prompt) - n) * ID :]

    def apply(self, rows_NV: Tensor, states: Sequence[State]) -> None:
        n, V = self.size - 1, rows_NV.shape[1]
        every_NL = unpack(states, -1)
        last_Nn = unpack([state[max(0, len(state) - n * ID) :] for state in states], -2) if n else every_NL[:, :0]
        follows_NW = every_NL[:, n:] >= 0  # whether the n tokens before are the last ones
        for i in range(last_Nn.shape[1]):
            follows_NW &= every_NL[:, i : i + follows_NW.shape[1]] == last_Nn[:, i : i + 1]
        rows, tokens = [(found := follows_NW.nonzero().T)[0]], [every_NL[found[0], found[1] + n]]
        for i, state in enumerate(states):
            if len(state) >= n * ID and (after := self._prompt.get(state[len(state) - n * ID :])):
                tokens.append(torch.frombuffer(after, dtype=torch.int32).long())
                rows.append(torch.full((len(after),), i))
        row_M, token_M = torch.cat(rows), torch.cat(tokens)
        place_M = (row_M * V + token_M)[token_M < V].to(rows_NV.device)
        rows_NV.view(-1).index_fill_(0, place_M, -math.inf)


class Suppress(Processor):
    """Bans tokens while there are fewer new tokens than `until` (`SuppressTokens`, `SuppressTokensAtBegin`,
    `MinLength`, `MinNewTokensLength`). A state is the number of new tokens.

    Args:
        tokens: banned ids.
        until: math.inf bans them always.
    """

    bans = True

    def __init__(self, tokens: Sequence[int], until: float = math.inf):
        self.tokens, self.until = torch.tensor(sorted(set(tokens))), until

    def start(self, prompt: Sequence[int]) -> State:
        return 0

    def advance(self, state: State, token: int) -> State:
        return state + 1 if state < self.until < math.inf else state

    def apply(self, rows_NV: Tensor, states: Sequence[State]) -> None:
        which = [i for i, state in enumerate(states) if state < self.until]
        if which:
            place = self.tokens.to(rows_NV.device)
            _select(rows_NV, which, lambda some_NV: some_NV.index_fill_(1, place, -math.inf))


class Hook(Processor):
    """A function in the form of Hugging Face's logits processors: (int64 [1, L], float32 [1, V]) -> float32 [1, V].

    It is called for each row with the tokens of the prompt and the path. A state is these tokens.
    """

    bans = raises = of_logits = True

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]):
        self.function = function

    def start(self, prompt: Sequence[int]) -> State:
        return tuple(prompt)

    def advance(self, state: State, token: int) -> State:
        return (*state, token)

    def apply(self, rows_NV: Tensor, states: Sequence[State]) -> None:
        for i, state in enumerate(states):
            row_1V = rows_NV[i : i + 1]
            with attributed(self.function, "(input_ids, scores)"):
                ids_1L = torch.tensor([state], dtype=torch.int64, device=rows_NV.device)
                made: Any = self.function(ids_1L, row_1V.clone())
                if not isinstance(made, Tensor) or made.shape != row_1V.shape:
                    raise ConstraintError(f"expected it to return a tensor {[*row_1V.shape]}, got {brief(made)}")
                if bool((made.isnan() | (made == math.inf)).any()):
                    raise ConstraintError("expected it to return no NaN and no inf")
            row_1V.copy_(made)

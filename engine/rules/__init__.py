"""The fields of a request that determine which tokens may come next, and with which scores; their checks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.contract.checks import brief
from engine.errors import UsageError, check_integer, check_number, check_utf8
from engine.rules.begin import Begin, spellings
from engine.rules.catalogue import Catalogue, Items, open_catalogue
from engine.rules.constrained import Constrained
from engine.rules.constraint import (
    AfterSpelledThought,
    AfterThought,
    Choices,
    Constraint,
    PrefixAllowed,
    check_constraint,
    packed,
)
from engine.rules.dry import BREAKERS, DryPenalty
from engine.rules.grammars import JSON_SCHEMA, KINDS, compile_grammar, source_of
from engine.rules.processors import (
    Bias,
    Hook,
    Masked,
    NoRepeatNGram,
    OccurrencePenalty,
    Processor,
    RepetitionPenalty,
    Suppress,
)
from engine.text.thinking import Thoughts
from engine.text.tokenizer import Tokenizer
from engine.words import MODEL, RENORMALISED, SCORES

ONE_OF = ("constraint", "begin", "choices", "catalogue", *KINDS, "prefix_allowed_tokens_fn")  # at most one is given
OPENED = 32  # most tokens of a tag that opens a thought, as text, and of the space after it
MOST_BIAS = 1e6  # largest magnitude of a penalty or a bias
Words = Sequence[str | Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules that determine which tokens may come next, and how likely they become; the last part of a `Request`.

    Fields with names of Hugging Face's generation mean the same as there. All apply in its order, see
    docs/constraints.md; a constraint takes the place of `prefix_allowed_tokens_fn`.

    Args:
        constraint: see `engine.Constraint`.
        constraint_scores: "model": the model's log-probabilities are edited and not normalised again, as in Hugging
            Face's beam search; "renormalised": logits are edited before the softmax, as elsewhere in Hugging Face.
        begin: a text, or its bytes, with which the output begins, in any tokenisation; the last token may extend beyond
            it.
        choices: texts or token sequences, at least one, of which the output must be one.
        json_schema: a JSON schema, as an object or as JSON: the output is JSON that conforms to it. This and the next
            two need the extra `grammar`; see `engine.rules.grammars`.
        regex: a regular expression that the whole output matches.
        grammar: a grammar of the output, in llguidance's variant of Lark, or in llama.cpp's GBNF.
        catalogue: like `choices`, for many items: an `engine.Catalogue` or its file, see `tools.catalogue`. An output
            then has the id of its item.
        logit_bias: token ids -> numbers added to their log-probabilities.
        sequence_bias: sequences of token ids -> numbers added to the last token if the others precede it; a mapping, or
            a list of pairs.
        repetition_penalty: log-probabilities (logits) of tokens that occurred are multiplied by it if they are
            negative, and divided by it otherwise; 1 changes nothing.
        frequency_penalty, presence_penalty: subtracted from scores of tokens that occurred in the output, per
            occurrence and once, as in OpenAI's API; from -2 to 2.
        dry_multiplier, dry_base, dry_allowed_length: DRY, see `engine.rules.dry`: a token that would continue a
            repetition of n tokens (at least the allowed length, prompt included) loses multiplier * base ** (n -
            allowed length); a multiplier of 0 changes nothing.
        dry_penalty_last_n: only this many tokens at the end of prompt and output are considered; -1: all, 0: none.
        dry_sequence_breakers: texts across which no repetition extends.
        no_repeat_ngram_size: no sequence of this many tokens occurs twice, prompt included; 0: no limit.
        bad_words: texts, or token sequences, that must not be generated. A text is banned both as tokenised alone and
            as tokenised after a space.
        min_length: no end-of-sequence token before there are this many tokens, the prompt included.
        min_new_tokens: no end-of-sequence token before there are this many new tokens; even 0 replaces `min_length`.
        prefix_allowed_tokens_fn: (0, int64 tensor of the prompt's and the path's tokens) -> allowed token ids.
        suppress_tokens: token ids that must not be generated.
        begin_suppress_tokens: token ids that must not be generated first.
        logits_processor: function, or several, of (int64 [1, L], float32 [1, V]) -> float32 [1, V], called for each row
            after all other processors.
    """

    constraint: Constraint | None = None
    constraint_scores: str = MODEL
    begin: str | bytes | None = None
    choices: Words | None = None
    json_schema: Mapping[str, Any] | bool | str | None = None
    regex: str | None = None
    grammar: str | None = None
    catalogue: Catalogue | str | Path | None = None
    logit_bias: Mapping[int | str, float] | None = None
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[Any] | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] = BREAKERS
    no_repeat_ngram_size: int = 0
    bad_words: Words = ()
    min_length: int = 0
    min_new_tokens: int | None = None
    prefix_allowed_tokens_fn: Callable[[int, Tensor], Any] | None = None
    suppress_tokens: Sequence[int] = ()
    begin_suppress_tokens: Sequence[int] = ()
    logits_processor: Callable[[Tensor, Tensor], Tensor] | Sequence[Callable[[Tensor, Tensor], Tensor]] | None = None

    def check(self) -> None:
        """Check everything that needs no model. Raises UsageError."""
        if self.constraint_scores not in SCORES:
            raise UsageError(f"constraint_scores: expected {' or '.join(SCORES)}, got {self.constraint_scores!r}")
        check_constraint(self.constraint)
        check_number("repetition_penalty", self.repetition_penalty, 1 / MOST_BIAS, MOST_BIAS)
        for name in ("frequency_penalty", "presence_penalty"):
            check_number(name, getattr(self, name), -2, 2)
        check_number("dry_multiplier", self.dry_multiplier, 0, MOST_BIAS)
        check_number("dry_base", self.dry_base, 1, MOST_BIAS)
        least = {"no_repeat_ngram_size": 0, "min_length": 0, "dry_allowed_length": 1, "dry_penalty_last_n": -1}
        for name, number in (least | {"min_new_tokens": 0} if self.min_new_tokens is not None else least).items():
            check_integer(name, getattr(self, name), number)
        breakers = self.dry_sequence_breakers
        if not isinstance(breakers, list | tuple) or not all(isinstance(text, str) and text for text in breakers):
            raise UsageError(f"dry_sequence_breakers: expected a list of texts, got {brief(breakers)}")
        if self.prefix_allowed_tokens_fn is not None and not callable(self.prefix_allowed_tokens_fn):
            raise UsageError(
                f"prefix_allowed_tokens_fn: expected a function, got {brief(self.prefix_allowed_tokens_fn)}"
            )
        if not all(map(callable, self._hooks())):
            raise UsageError(f"logits_processor: expected a function, or some, got {brief(self.logits_processor)}")
        if not isinstance(self.catalogue, Catalogue | str | Path | None):
            raise UsageError(f"catalogue: expected a path or an engine.Catalogue, got {brief(self.catalogue)}")
        if len(given := [name for name in ONE_OF if getattr(self, name) is not None]) > 1:
            raise UsageError(f"{' and '.join(given)}: expected at most one of {', '.join(ONE_OF)}")
        if isinstance(self.choices, Sequence) and not self.choices:  # other values are refused with their types
            raise UsageError("choices: expected at least one text or list of token ids, got none")
        if not isinstance(self.begin, str | bytes | None):
            raise UsageError(f"begin: expected a text, got {brief(self.begin)}")
        for kind in KINDS:
            if (value := getattr(self, kind)) is not None:
                source_of(kind, value)
        self.items()

    def items(self) -> Catalogue | None:
        """The catalogue; None without one. Raises UsageError: its file cannot be read."""
        given = self.catalogue
        return given if isinstance(given, Catalogue | None) else open_catalogue(given)

    def at_work(
        self,
        prompt: Sequence[int],
        limit: int,
        vocab: int,
        eos: frozenset[int],
        tokenizer: Tokenizer | None,
        thoughts: Thoughts | None = None,
    ) -> Constrained | None:
        """The constraint and the processors of a request; None if nothing edits its rows.

        Args:
            prompt: token ids.
            limit: most new tokens.
            vocab: tokens that can be generated.
            eos: tokens that end an output.
            tokenizer: the model's.
            thoughts: those of its chat template, if it has one.

        Raises:
            UsageError: a value that does not suit the model, such as an id outside of its vocabulary.
        """
        self.check()
        ends = sorted(token for token in eos if token < vocab)
        processors = self._processors(prompt, vocab, ends, tokenizer, thoughts or Thoughts())
        renormalise = self.constraint_scores == RENORMALISED
        return Constrained(processors, renormalise, vocab, prompt, ends, limit) if processors else None

    def _processors(
        self, prompt: Sequence[int], vocab: int, ends: list[int], tokenizer: Tokenizer | None, thoughts: Thoughts
    ) -> list[Processor]:
        """The processors, in Hugging Face's order."""
        made: list[Processor] = []
        if biases := self._biases(vocab):
            made.append(Bias(biases))
        if self.repetition_penalty != 1:
            made.append(RepetitionPenalty(float(self.repetition_penalty)))
        if self.frequency_penalty or self.presence_penalty:
            made.append(OccurrencePenalty(float(self.frequency_penalty), float(self.presence_penalty)))
        if self.dry_multiplier and self.dry_penalty_last_n:
            made.append(self._dry(vocab, tokenizer))
        if self.no_repeat_ngram_size:
            made.append(NoRepeatNGram(self.no_repeat_ngram_size))
        words = _sequences("bad_words", self.bad_words, vocab, tokenizer, spaced=True)
        if bans := {tuple(word): -math.inf for word in words if word not in [[end] for end in ends]}:
            made.append(Bias(bans))
        shortest = self.min_length - len(prompt) if self.min_new_tokens is None else self.min_new_tokens
        if shortest > 0 and ends:
            made.append(Suppress(ends, shortest))
        if (constraint := self._constraint(vocab, ends, tokenizer)) is not None:
            of_text = constraint is not self.constraint and self.catalogue is None
            if of_text and tokenizer is not None:
                constraint = _after_thought(constraint, prompt, vocab, ends, tokenizer, thoughts)
            made.append(Masked(constraint, vocab))
        for name, until in (("suppress_tokens", math.inf), ("begin_suppress_tokens", 1)):
            if tokens := _ids(name, getattr(self, name), vocab):
                made.append(Suppress(tokens, until))
        return made + [Hook(function) for function in self._hooks()]

    def _dry(self, vocab: int, tokenizer: Tokenizer | None) -> DryPenalty:
        given, data = self.dry_sequence_breakers, list[bytes]()
        breakers = [check_utf8(text, "dry_sequence_breakers").encode() for text in given]
        if tokenizer is None and self.dry_sequence_breakers is not BREAKERS and breakers:
            raise UsageError("dry_sequence_breakers: this checkpoint has no tokenizer", remedy="give an empty list")
        if tokenizer is not None and breakers:
            try:
                data = spellings(tokenizer, vocab).data
            except UsageError as error:
                what = f"dry_sequence_breakers: {error.what}"
                raise UsageError(what, where=error.where, remedy="give an empty list") from None
        reach = self.dry_penalty_last_n if self.dry_penalty_last_n > 0 else None
        numbers = float(self.dry_multiplier), float(self.dry_base), self.dry_allowed_length
        return DryPenalty(*numbers, reach, breakers if data else [], data)

    def _constraint(self, vocab: int, ends: list[int], tokenizer: Tokenizer | None) -> Constraint | None:
        for kind in KINDS:
            if (value := getattr(self, kind)) is not None:
                return compile_grammar(kind, value, tokenizer, vocab, ends)
        if self.begin is not None:
            if tokenizer is None:
                raise UsageError("begin: this checkpoint has no tokenizer")
            data = check_utf8(self.begin, "begin").encode() if isinstance(self.begin, str) else self.begin
            return Begin(data, spellings(tokenizer, vocab), ends)
        if self.choices is not None:
            sequences = _sequences("choices", self.choices, vocab, tokenizer)
            if cut := next((ids for ids in sequences if not {*ends}.isdisjoint(ids[:-1])), None):
                raise UsageError(f"choices: an end-of-sequence token is inside the choice {brief(cut)}")
            return Choices(sequences, ends)
        if (catalogue := self.items()) is not None:
            catalogue.check(tokenizer, vocab)
            return Items(catalogue, ends)
        function = self.prefix_allowed_tokens_fn
        return PrefixAllowed(function) if function is not None else self.constraint

    def _hooks(self) -> list[Any]:
        hooks = self.logits_processor
        return [] if hooks is None else list(hooks) if isinstance(hooks, list | tuple) else [hooks]

    def _biases(self, vocab: int) -> dict[tuple[int, ...], float]:
        """`sequence_bias` and `logit_bias`, checked."""
        given: Any = {} if self.sequence_bias is None else self.sequence_bias
        pairs: Any = given.items() if isinstance(given, Mapping) else given
        if not isinstance(given, Mapping | list | tuple) or not all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
        ):
            raise UsageError(f"sequence_bias: expected a list of [[token id, ...], number], got {brief(given)}")
        biases = {}
        for sequence, number in pairs:
            if not (ids := tuple(_ids("sequence_bias", sequence, vocab))):
                raise UsageError("sequence_bias: expected sequences of at least one token id, got none")
            biases[ids] = _number("sequence_bias", number)
        if not isinstance(self.logit_bias, Mapping | None):
            raise UsageError(f"logit_bias: expected an object of token id: number, got {brief(self.logit_bias)}")
        for token, number in (self.logit_bias or {}).items():
            if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 18:
                token = int(token)  # a key of JSON
            [token] = _ids("logit_bias", [token], vocab)
            biases[token,] = biases.get((token,), 0.0) + _number("logit_bias", number)
        return biases


RULES = tuple(field.name for field in fields(Rules))
PLAIN_RULES = tuple(
    name for name in RULES if name not in ("constraint", "catalogue", "prefix_allowed_tokens_fn", "logits_processor")
)  # fields that a batch line may have: values of JSON, no files


def _after_thought(
    constraint: Constraint,
    prompt: Sequence[int],
    vocab: int,
    ends: Sequence[int],
    tokenizer: Tokenizer,
    thoughts: Thoughts,
) -> Constraint:
    """A constraint after the thought that the prompt opens, if it opens one."""
    free_V = torch.ones(vocab, dtype=torch.int64)
    free_V[ends] = 0
    if _thinks(prompt, tokenizer):
        return AfterThought(constraint, tokenizer.thought_ids[1], packed(free_V))
    if not tokenizer.thought_ids and thoughts.after(tokenizer.decode(prompt[-OPENED:])).opened:
        known, closing = spellings(tokenizer, vocab), thoughts.closing
        return AfterSpelledThought(constraint, closing, known.data, known.beyond(closing[-1:].encode()), free_V)
    return constraint


def _thinks(prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether a prompt ends with the opening tag of a thought, as some chat templates write it."""
    if not tokenizer.thought_ids or tokenizer.thought_ids[0][0] not in prompt:
        return False
    opening, size = tokenizer.thought_ids[0], len(tokenizer.thought_ids[0])
    last = next((i for i in range(len(prompt), size - 1, -1) if [*prompt[i - size : i]] == opening), None)
    return last is not None and not tokenizer.decode(prompt[last:]).strip()


def with_changes(given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Rules` after changes: a new field replaces those that it excludes."""
    excluded = ONE_OF if any(name in changes for name in ONE_OF) else ()
    return {name: value for name, value in given.items() if name not in excluded} | dict(changes)


def response_format(value: Any) -> dict[str, Any]:
    """The fields of `Rules` for OpenAI's `response_format`. Raises UsageError."""
    match value:
        case {"type": "text", **rest} if not rest:
            return {JSON_SCHEMA: None}
        case {"type": "json_object", **rest} if not rest:
            return {JSON_SCHEMA: {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": dict() | bool() as schema}}:
            return {JSON_SCHEMA: schema}
    what = "expected type text, json_object or json_schema, the last with a json_schema that has a schema"
    raise UsageError(f"response_format: {what}, got {brief(value)}")


def _number(name: str, value: Any) -> float:
    """Check a bias and return it."""
    if value != -math.inf:
        check_number(name, value, -MOST_BIAS, MOST_BIAS)
    return float(value)


def _ids(name: str, values: Any, vocab: int) -> list[int]:
    """Token ids. Raises UsageError."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise UsageError(f"{name}: expected a list of token ids, got {brief(values)}")
    for token in values:
        if type(token) is not int or not 0 <= token < vocab:
            raise UsageError(f"{name}: expected token ids from 0 to {vocab - 1}, got {brief(token)}")
    return list(values)


def _sequences(
    name: str, values: Any, vocab: int, tokenizer: Tokenizer | None, spaced: bool = False
) -> list[list[int]]:
    """Token sequences, given as ids or as texts. Raises UsageError.

    Args:
        spaced: whether a text also stands for the tokens that it has after a space.
    """
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise UsageError(f"{name}: expected a list of texts or of lists of token ids, got {brief(values)}")
    found = []
    for value in values:
        if not isinstance(value, str):
            sequences = [_ids(name, value, vocab)]
        elif tokenizer is None:
            raise UsageError(f"{name}: this checkpoint has no tokenizer", remedy="give lists of token ids")
        else:
            check_utf8(value, name)
            texts = [value, f" {value}"] if spaced and value[:1] != " " else [value]
            sequences = [_ids(name, tokenizer.encode(text, add_special=False), vocab) for text in texts]
        if not all(sequences):
            raise UsageError(f"{name}: expected texts and sequences of at least one token, got {brief(value)}")
        found += sequences
    return found

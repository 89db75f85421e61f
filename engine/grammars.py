"""Constraints of grammars: JSON schemas, regular expressions, Lark and GBNF, by llguidance (the extra `grammar`).

A state is one of llguidance's matchers, copied before it takes a token; the masks of several states are computed in one
parallel call. llguidance excludes tokens that no encoding of a text would have where it has only one way to go on: such
tokens are forced, and a chain of them costs no pass of its own.
"""

import functools
import importlib
import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.constraints import WORD, Constraint, ConstraintError, State, Tokens, packed
from engine.contract import brief
from engine.errors import UsageError
from engine.text.tokenizer import Tokenizer

KINDS = JSON_SCHEMA, REGEX, GRAMMAR = ("json_schema", "regex", "grammar")
ENDED = ("NoExtension", "NoExtensionBias")  # why a matcher stops where its grammar allows no further token
NOTHING = "it allows no text"
SPACES = r"\x20|\n[\x20\t]{0,16}"  # between parts of JSON: without a limit a model may write spaces for ever
KEPT = 32  # compiled grammars per tokenizer
LEAD = 'start: " "? @value'  # of decoders that strip a text's first space: the value may come after one


def library() -> Any:
    """llguidance. Raises UsageError."""
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        what = "json_schema, regex and grammar need the package llguidance"
        raise UsageError(what, remedy="pip install 'coppice[grammar]'") from None


def source_of(kind: str, value: Any) -> str:
    """A grammar in llguidance's form, checked as far as that needs no tokenizer.

    Args:
        kind: one of KINDS.
        value: a schema as an object or as JSON; a regular expression; a grammar in Lark's form or in llama.cpp's GBNF.

    Raises:
        UsageError: it is malformed, unsupported, or allows nothing.
    """
    guidance = library()
    if kind == JSON_SCHEMA and not isinstance(value, str):
        if not isinstance(value, Mapping | bool):
            raise UsageError(f"{kind}: expected a JSON schema, got {brief(value)}")
        try:
            value = json.dumps({} if value is True else value)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"{kind}: expected a JSON schema: {error}") from None
    if not isinstance(value, str):
        raise UsageError(f"{kind}: expected a text, got {brief(value)}")
    try:
        if kind == JSON_SCHEMA:
            if value.strip() == "false":
                raise ValueError(NOTHING)
            schema = guidance.LLMatcher.grammar_from_json_schema(value, defaults={"whitespace_pattern": SPACES})
            source = json.dumps(json.loads(schema))
        elif kind == REGEX:
            source = guidance.grammar_from("regex", value)
        else:
            source = json.dumps({"grammars": [{"lark_grammar": guidance.gbnf_to_lark.any_to_lark(value)}]})
        fault = guidance.LLMatcher.validate_grammar(source)
    except (ValueError, RecursionError, guidance.gbnf_to_lark.GbnfToLarkError) as error:
        fault = str(error) or type(error).__name__
    if fault:
        raise UsageError(f"{kind}: {NOTHING if _first_lines(fault) in ENDED else _first_lines(fault)}")
    return source


class Vocabulary:
    """A tokenizer as llguidance needs it, and the grammars that were compiled for it.

    An id of its own, after all others, stands for the end of the text: which tokens end an output is up to a request.
    Ids after it stand for bytes that no token has, so that llguidance can spell every text; they are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._guidance = library()
        self._tokenizer = weakref.ref(tokenizer)
        self._matchers: dict[str, Any] = {}
        self._ours: Any = None
        self.size = tokenizer.size
        try:
            self.tokens = [*tokenizer.data(), b"<end>"]
        except UsageError as error:
            raise UsageError(f"{error.what}, which a grammar needs", remedy="use a constraint of token ids") from None
        self.bos_token_id, self.eos_token_id = None, self.size
        spaced = next((i for i, data in enumerate(self.tokens) if data[:1] == b" " and len(data) > 1), None)
        self._strips = spaced is not None and tokenizer.decode([spaced])[:1] != " "
        if self._strips:  # of a text's first space, but not if a byte piece spells it
            self.tokens = [
                b"" if data == b" " and tokenizer.decode([i]) == " " else data for i, data in enumerate(self.tokens)
            ]
        self.tokens += sorted({bytes([byte]) for byte in range(256)} - {*self.tokens})
        self.special_token_ids = [i for i, data in enumerate(self.tokens) if not data] + [self.size]
        self._ours = self._guidance.LLTokenizer(self._guidance.TokenizerWrapper(self))

    def __call__(self, data: bytes) -> list[int]:
        """The tokens of a text that goes on in the middle of another."""
        tokenizer = self._tokenizer()
        if tokenizer is None or self._ours is None:
            return []
        for lead in ("", "\n"):
            ids = tokenizer.encode(lead + data.decode(), add_special=False)
            for i in range(min(len(ids), 4)):  # the lead, and a space that the encoder adds
                if b"".join(self.tokens[token] for token in ids[i:]) == data:
                    return ids[i:]
        return self._ours.greedy_tokenize(data.decode())

    def matcher(self, kind: str, value: Any) -> Any:
        """A matcher at the start of a grammar, which must not change. Raises UsageError."""
        source = source_of(kind, value)
        if source not in self._matchers:
            while len(self._matchers) >= KEPT:
                del self._matchers[next(iter(self._matchers))]
            self._matchers[source] = self._compiled(kind, source)
        return self._matchers[source]

    def _compiled(self, kind: str, source: str) -> Any:
        if self._strips:
            whole = json.loads(source)
            whole["grammars"][0]["name"] = "value"
            source = json.dumps(whole | {"grammars": [{"lark_grammar": LEAD}, *whole["grammars"]]})
        matcher = self._guidance.LLMatcher(self._ours, source, log_level=0)
        mask = int.from_bytes(matcher.compute_bitmask(), "little") if not matcher.is_error() else 0
        fault = _first_lines(matcher.get_error())
        if fault in ENDED or not (fault or matcher.is_accepting() or mask & ((1 << self.size) - 1)):
            fault = f"{NOTHING} that the model's tokens can spell"
        if fault:
            raise UsageError(f"{kind}: {fault}")
        return matcher


_VOCABULARIES: "weakref.WeakKeyDictionary[Tokenizer, Vocabulary]" = weakref.WeakKeyDictionary()


def compile_grammar(kind: str, value: Any, tokenizer: Tokenizer | None, vocab: int, eos: Sequence[int]) -> "Grammar":
    """A grammar as a constraint.

    Args:
        kind, value: see `source_of`.
        tokenizer: of the model.
        vocab: tokens that can be generated.
        eos: tokens that end an output.

    Raises:
        UsageError: the grammar is malformed, unsupported or allows nothing, or the tokenizer cannot have one.
    """
    if tokenizer is None:
        raise UsageError(f"{kind}: this checkpoint has no tokenizer", remedy="use a constraint of token ids")
    if tokenizer not in _VOCABULARIES:
        _VOCABULARIES[tokenizer] = Vocabulary(tokenizer)
    known = _VOCABULARIES[tokenizer]
    return Grammar(known.matcher(kind, value), len(known.tokens), vocab, eos)


class Grammar(Constraint):
    """An output that is a text of a grammar, followed by an end-of-sequence token.

    Args:
        matcher: at the grammar's start.
        size: ids that matchers know.
        vocab: tokens that can be generated.
        eos: tokens that end an output.
    """

    def __init__(self, matcher: Any, size: int, vocab: int, eos: Sequence[int]):
        self._first, self._words = matcher, -(-size // WORD)
        ends_V, kept_V = torch.zeros(2, self._words * WORD, dtype=torch.int64)
        ends_V[list(eos)], kept_V[:vocab] = 1, 1
        self._ends_W, self._kept_W = packed(ends_V), packed(kept_V & ~ends_V)

    def start(self, prompt: Sequence[int]) -> State:
        return self._first.deep_copy()

    def advance(self, state: State, token: int) -> State:
        state = state.deep_copy()
        if not state.consume_token(token):
            raise ConstraintError(f"the grammar does not go on with token {token}: {_first_lines(state.get_error())}")
        return state

    def allowed(self, states: Sequence[State]) -> Sequence[Tokens]:
        masks_NW = torch.zeros(len(states), self._words, dtype=torch.int32)
        jobs, row = [(state, i) for i, state in enumerate(states)], self._words * masks_NW.element_size()
        if len(states) == 1:  # as in a chain of forced tokens
            states[0].unsafe_compute_mask_ptr(masks_NW.data_ptr(), row)
        else:
            _executor(torch.get_num_threads()).unsafe_compute_mask_ptr(jobs, masks_NW.data_ptr(), row, len(states))
        masks_NW &= self._kept_W
        for matcher, i in jobs:
            if matcher.is_error():
                if (fault := _first_lines(matcher.get_error())) not in ENDED:
                    raise ConstraintError(f"the grammar cannot go on: {fault}")
                masks_NW[i] = 0
            elif matcher.is_accepting():
                masks_NW[i] |= self._ends_W
        return [_few(mask_W, count) for mask_W, count in zip(masks_NW, (masks_NW != 0).sum(1).tolist(), strict=True)]


def _few(mask_W: Tensor, words: int) -> Tokens:
    """A mask, or the list of its tokens if it has at most one."""
    if words > 1:
        return mask_W
    if not words:
        return []
    word = int(mask_W.argmax() if int(mask_W.amax()) > 0 else mask_W.argmin())
    bits = int(mask_W[word]) & 0xFFFFFFFF
    return [word * WORD + bits.bit_length() - 1] if not bits & (bits - 1) else mask_W


@functools.cache
def _executor(threads: int) -> Any:
    """llguidance's threads."""
    return library().LLExecutor(threads)


def _first_lines(fault: str) -> str:
    """The part of llguidance's message that is meant for people."""
    return " ".join(fault.partition("<state>")[0].split())[:300]

"""Constraints of grammars: JSON schemas, regular expressions, Lark and GBNF, by llguidance (the extra `grammar`).

A state is one of llguidance's matchers, copied before it takes a token; the masks of several states are computed in one
parallel call. Where only one continuation is possible, the tokens that the tokenizer would produce for it are forced,
and a chain of them needs no pass of its own. llguidance can find them too, but it reads a whole forced text at once,
and a grammar of a few lines can force gigabytes.

A grammar is first compiled in a process with limits (`engine.text.sandbox`). If it passes, it is compiled here, on
a larger stack. Every step has llguidance's own limits.
"""

import functools
import importlib
import itertools
import json
import threading
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.contract.checks import brief
from engine.errors import UsageError
from engine.rules.constraint import MASK_WORD, Constraint, ConstraintError, State, Tokens, packed
from engine.text.sandbox import GRAMMAR_LIMITS, GRAMMAR_SECONDS, alone
from engine.text.sandbox_process import GRAMMARS, WALL_SECONDS
from engine.text.tokenizer import Tokenizer

KINDS = JSON_SCHEMA, REGEX, GRAMMAR = ("json_schema", "regex", "grammar")
ENDED = ("NoExtension", "NoExtensionBias")  # why a matcher stops where its grammar allows no further token
NOTHING = "it allows no text"
LONGEST = 1 << 19  # characters of a grammar: every state holds a copy of its text
KEPT_BYTES = 16 << 20  # compiled grammars of all models, those of running requests included
LIBRARY_BYTES, TOKEN_BYTES = 4 << 20, 290  # what llguidance takes, and for each token of a `Vocabulary`
SOURCE_BYTES = 2 << 20  # texts of grammars that have passed the sandbox
ADVANCE = 512  # bytes by which a grammar grows with a token: states of its lexer, which its matchers share
FORCED = 64  # bytes of a forced text that are read at once
WAYS = 16  # most tokens with which a forced text may begin
EXPLORED = 32  # most states that are searched for a text that the model's tokens can spell
CHARACTER = r'[^"\\\x00-\x1F\x7F]'  # within a JSON string, without escapes
SLICES = [CHARACTER + "{1,10}", CHARACTER + "{1,30}"]  # tokens whose masks are computed once, where all are allowed
LEAD = '" "?'  # for decoders that strip a text's first space: one may precede the value


def library() -> Any:
    """llguidance. Raises UsageError."""
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        what = "json_schema, regex and grammar need the package llguidance"
        raise UsageError(what, remedy="pip install llguidance") from None


class GrammarSource(NamedTuple):
    """A grammar that has passed the sandbox.

    Attributes:
        text: in llguidance's form.
        size: bytes that it takes when it is compiled.
    """

    text: str
    size: int


_SOURCES: dict[tuple[str, str], GrammarSource] = {}
_LOCK = threading.Lock()  # guards the kept grammars and texts


def source_of(kind: str, value: Any) -> GrammarSource:
    """A grammar in llguidance's form, checked as far as possible without a tokenizer.

    Args:
        kind: one of KINDS.
        value: a schema as an object or as JSON; a regular expression; a grammar in Lark's form or in llama.cpp's GBNF.

    Raises:
        UsageError: it is malformed, unsupported, too large or too slow, or allows nothing.
    """
    library()
    key = kind, _text_of(kind, value)
    with _LOCK:
        if key in _SOURCES:
            _SOURCES[key] = _SOURCES.pop(key)  # the latest last
            return _SOURCES[key]
    reply = GRAMMARS.ask({"grammar": kind, "value": key[1]}, WALL_SECONDS + 10 * GRAMMAR_SECONDS)
    if reply is None:
        fault = f"it takes more than {GRAMMAR_SECONDS:g} s or too much memory to compile, or is nested too deep"
    else:
        fault = _first_lines(reply.get("refused", NOTHING if "nothing" in reply else ""))
    if fault or reply is None:
        raise UsageError(f"{kind}: {NOTHING if fault in ENDED else fault}")
    found = GrammarSource(reply["source"], reply["size"])
    with _LOCK:
        _SOURCES[key] = found
        while sum(len(value) + len(source.text) for (_, value), source in _SOURCES.items()) > SOURCE_BYTES:
            del _SOURCES[next(iter(_SOURCES))]
    return found


def _text_of(kind: str, value: Any) -> str:
    """The text of a grammar. Raises UsageError."""
    if kind == JSON_SCHEMA and not isinstance(value, str):
        if not isinstance(value, Mapping | bool):
            raise UsageError(f"{kind}: expected a JSON schema, got {brief(value)}")
        try:
            value = json.dumps({} if value is True else value)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"{kind}: expected a JSON schema: {error}") from None
    if not isinstance(value, str):
        raise UsageError(f"{kind}: expected a text, got {brief(value)}")
    if len(value) > LONGEST:
        raise UsageError(f"{kind}: expected at most {LONGEST} characters, got {len(value)}")
    return value


def most_bytes(vocab_size: int) -> int:
    """Return the bytes that the grammars of a model take at most, with their form of its vocabulary."""
    return KEPT_BYTES + LIBRARY_BYTES + TOKEN_BYTES * vocab_size


class Vocabulary:
    """A tokenizer in the form that llguidance needs, and the grammars that were compiled for it.

    An extra id, after all others, stands for the end of the text, because requests decide which tokens end an output.
    Ids after it stand for bytes that no token has, so that llguidance can spell every text; they are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._guidance = library()
        self._tokenizer = weakref.ref(tokenizer)
        self.size = tokenizer.size
        try:
            self.tokens = [*tokenizer.data(), b"<end>"]
        except UsageError as error:
            raise UsageError(f"{error.what}, which a grammar needs", remedy="use a constraint of token ids") from None
        self.bos_token_id, self.eos_token_id = None, self.size
        spaced = next((i for i, data in enumerate(self.tokens) if data[:1] == b" " and len(data) > 1), None)
        self._strips = spaced is not None and tokenizer.decode([spaced])[:1] != " "
        if self._strips:  # the decoder strips a text's first space, unless a byte piece spells it
            self.tokens = [
                b"" if data == b" " and tokenizer.decode([i]) == " " else data for i, data in enumerate(self.tokens)
            ]
        self.tokens += sorted({bytes([byte]) for byte in range(256)} - {*self.tokens})
        self.special_token_ids = [i for i, data in enumerate(self.tokens) if not data] + [self.size]
        self._sorted = sorted({data for data in self.tokens[: self.size] if data})
        # Each slice is another trie of the tokens; llguidance's own three hold twice as much.
        self._ours = self._guidance.LLTokenizer(self._guidance.TokenizerWrapper(self), slices=SLICES)

    def __call__(self, data: bytes) -> list[int]:
        """Part of llguidance's interface, for the tokens of forced texts; not called."""
        return []

    def forced(self, last: int | None, data: bytes, whole: bool) -> list[int]:
        """The first tokens of a text, as far as they are certain.

        Args:
            last: the token before the text.
            data: the text, or its beginning.
            whole: whether `data` is the whole text.
        """
        sure = len(data)
        if not whole:  # up to the first place where a token may begin that extends beyond the known text
            starts = range(max(0, len(data) - FORCED), len(data))
            sure = next((i for i in starts if self._continues(data[i:])), len(data))
        found, end = [], 0
        for token in self._encoded(last, data):
            end += len(self.tokens[token])
            if end > sure:
                break
            found.append(token)
        return found

    def _continues(self, data: bytes) -> bool:
        """Whether a token begins with these bytes and is longer."""
        at = bisect_right(self._sorted, data)
        return at < len(self._sorted) and self._sorted[at].startswith(data)

    def _encoded(self, last: int | None, data: bytes) -> list[int]:
        """The tokens of a text that continues another; none if it ends within a character."""
        tokenizer = self._tokenizer()
        before = b"" if last is None else self.tokens[last]
        for lead, skipped in ((before, [last]), (b"", []), (b"\n", [])):
            try:
                text = (lead + data).decode()
            except UnicodeDecodeError:
                continue
            ids = tokenizer.encode(text, add_special=False) if tokenizer is not None else []
            if lead and skipped and ids[:1] != skipped:
                continue
            for i in range(min(len(ids), 4)):  # the lead, and a space that the encoder adds
                if b"".join(self.tokens[token] for token in ids[i:]) == data:
                    return ids[i:]
        return []

    def compiled(self, kind: str, value: Any) -> "Compiled":
        """A grammar for these tokens, kept for the next request. Raises UsageError."""
        source = source_of(kind, value)
        with _LOCK:  # it may have been compiled before
            same = (one for one in _ALIVE if one.source == source.text and one.vocabulary() is self and not one.failed)
            found = next(same, None)
        if found is None:
            found = Compiled(self, source.text, source.size, self._matcher(kind, source.text))
        _keep(found)
        return found

    def _matcher(self, kind: str, source: str) -> Any:
        source = alone(source, LEAD if self._strips else "")
        limits = self._guidance.LLParserLimits(**GRAMMAR_LIMITS)
        matcher = self._guidance.LLMatcher(self._ours, source, log_level=0, limits=limits)
        matcher.compute_bitmask()
        fault = _first_lines(matcher.get_error())
        if fault in ENDED or not (fault or self._spells(matcher)):
            fault = f"{NOTHING} that the model's tokens can spell"
        if fault:
            raise UsageError(f"{kind}: {fault}")
        return matcher

    def _spells(self, matcher: Any) -> bool:
        """Whether the model's tokens can spell a text of the grammar; True if `EXPLORED` states do not decide it."""
        left, seen = [matcher], 1
        while left:
            state = left.pop()
            mask = int.from_bytes(state.compute_bitmask(), "little") & ((1 << self.size) - 1)
            if state.is_error():
                if _first_lines(state.get_error()) not in ENDED:
                    return True
                continue
            if state.is_accepting() or (seen := seen + mask.bit_count()) > EXPLORED:
                return True
            while mask:
                left.append(after := state.deep_copy())
                after.consume_token(token := mask.bit_length() - 1)
                mask ^= 1 << token
        return False


class Compiled:
    """A grammar for a vocabulary, shared by the requests that have it.

    Args:
        vocabulary: the model's.
        source: the grammar in llguidance's form.
        size: bytes that it takes; grows with use.
        matcher: a matcher at the grammar's start; it must not change.
    """

    def __init__(self, vocabulary: Vocabulary, source: str, size: int, matcher: Any):
        self.vocabulary, self.source, self.size, self.matcher = weakref.ref(vocabulary), source, size, matcher
        self.failed = False

    def fail(self) -> None:
        """Drop a grammar that failed, because its matchers share the failed state."""
        with _LOCK:
            self.failed = True
            _KEPT[:] = [one for one in _KEPT if one is not self]


_KEPT: list[Compiled] = []  # the latest last
_ALIVE: "weakref.WeakSet[Compiled]" = weakref.WeakSet()  # also those that only running requests hold


def _keep(compiled: Compiled) -> None:
    """Keep a grammar as the latest; drop the oldest until all, those of running requests included, fit the budget."""
    with _LOCK:
        _ALIVE.add(compiled)
        _KEPT[:] = [*(one for one in _KEPT if one is not compiled), compiled]
        while _KEPT and sum(one.size for one in _ALIVE) > KEPT_BYTES:
            del _KEPT[0]


_VOCABULARIES: "weakref.WeakKeyDictionary[Tokenizer, Vocabulary]" = weakref.WeakKeyDictionary()


def compile_grammar(kind: str, value: Any, tokenizer: Tokenizer | None, vocab: int, eos: Sequence[int]) -> "Grammar":
    """A grammar as a constraint.

    Args:
        kind, value: see `source_of`.
        tokenizer: the model's.
        vocab: tokens that can be generated.
        eos: tokens that end an output.

    Raises:
        UsageError: the grammar is malformed, unsupported or allows nothing, or the tokenizer does not support grammars.
    """
    if tokenizer is None:
        raise UsageError(f"{kind}: this checkpoint has no tokenizer", remedy="use a constraint of token ids")
    if tokenizer not in _VOCABULARIES:
        _VOCABULARIES[tokenizer] = Vocabulary(tokenizer)
    known = _VOCABULARIES[tokenizer]
    return Grammar(known.compiled(kind, value), known, vocab, eos)


class Grammar(Constraint):
    """An output that is a text of a grammar, followed by an end-of-sequence token.

    Args:
        compiled: the grammar for the vocabulary.
        vocabulary: the model's.
        vocab: tokens that can be generated.
        eos: tokens that end an output.
    """

    def __init__(self, compiled: Compiled, vocabulary: Vocabulary, vocab: int, eos: Sequence[int]):
        self._compiled, self._vocabulary = compiled, vocabulary
        self._words = -(-len(vocabulary.tokens) // MASK_WORD)
        ends_V, kept_V = torch.zeros(2, self._words * MASK_WORD, dtype=torch.int64)
        self._ends = frozenset(eos)
        ends_V[list(eos)], kept_V[:vocab] = 1, 1
        kept_V[vocabulary.special_token_ids] = 0
        self._ends_W, self._kept_W = packed(ends_V), packed(kept_V & ~ends_V)

    def start(self, prompt: Sequence[int]) -> State:
        return GrammarState(self._compiled.matcher.deep_copy())

    def advance(self, state: State, token: int) -> State:
        matcher = state.matcher.deep_copy()
        self._compiled.size += ADVANCE
        if not matcher.consume_token(token):
            fault = _first_lines(matcher.get_error())
            raise ConstraintError(f"the grammar does not allow token {token}: {fault}")
        data, after = self._vocabulary.tokens[token], GrammarState(matcher, token)
        if state.forced[:1] == [token]:
            after.forced, after.unsure = state.forced[1:], state.unsure
        elif state.unsure.startswith(data):
            after.unsure = state.unsure[len(data) :]
        return after

    def allowed(self, states: Sequence[State]) -> Sequence[Tokens]:
        asked = [place for place in states if not place.forced]
        found = iter(self._masks([place.matcher for place in asked]) if asked else ())
        return [place.forced[:1] if place.forced else self._tokens(place, *next(found)) for place in states]

    def _masks(self, matchers: Sequence[Any]) -> list[tuple[Tensor, int]]:
        """The masks of matchers, each with the number of its words that have tokens. Raises ConstraintError."""
        masks_NW = torch.zeros(len(matchers), self._words, dtype=torch.int32)
        row = self._words * masks_NW.element_size()
        if len(matchers) == 1:  # as in a chain of forced tokens
            matchers[0].unsafe_compute_mask_ptr(masks_NW.data_ptr(), row)
        else:
            jobs = [(matcher, i) for i, matcher in enumerate(matchers)]
            _executor(torch.get_num_threads()).unsafe_compute_mask_ptr(jobs, masks_NW.data_ptr(), row, len(jobs))
        masks_NW &= self._kept_W
        for i, matcher in enumerate(matchers):
            if matcher.is_error():
                if (fault := _first_lines(matcher.get_error())) not in ENDED:
                    self._compiled.fail()
                    raise ConstraintError(f"the grammar failed: {fault}")
                masks_NW[i] = 0
            elif matcher.is_accepting():
                masks_NW[i] |= self._ends_W
        return [*zip(masks_NW, (masks_NW != 0).sum(1).tolist(), strict=True)]

    def _tokens(self, place: "GrammarState", mask_W: Tensor, words: int) -> Tokens:
        """The mask, or a list if it has at most one token, or if one of its tokens is forced."""
        if words > WAYS:
            return mask_W
        ids = _ids(mask_W)
        if not place.unsure and self._longest(ids) is not None:
            self._force(place, ids)
        return place.forced[:1] or (mask_W if len(ids) > 1 else ids)

    def _longest(self, ids: Sequence[int]) -> int | None:
        """The longest of some tokens if it begins with each of the others; None if it does not, or the text may end."""
        tokens = self._vocabulary.tokens
        longest = max(ids, key=lambda token: len(tokens[token]), default=None)
        if longest is None or len(ids) > WAYS or not self._ends.isdisjoint(ids):
            return None
        return longest if all(tokens[token] and tokens[longest].startswith(tokens[token]) for token in ids) else None

    def _force(self, place: "GrammarState", first: list[int]) -> None:
        """Find the tokens that must follow, given that the next one is in `first`."""
        data, matcher, ids, whole = b"", place.matcher, first, False
        while len(data) < FORCED and (token := self._longest(ids)) is not None:
            data += self._vocabulary.tokens[token]
            matcher = matcher.deep_copy()
            matcher.consume_token(token)
            [(mask_W, words)] = self._masks([matcher])
            ids = _ids(mask_W) if words <= WAYS else []
            if whole := words <= WAYS and self._ends.issuperset(ids):
                break
        forced = self._vocabulary.forced(place.last, data, whole)
        if forced and forced[0] in first:  # a token that ends outputs is no part of the text, whatever its spelling
            place.forced = [*itertools.takewhile(lambda token: token not in self._ends, forced)]
        if len(data) < FORCED:
            place.unsure = data[sum(len(self._vocabulary.tokens[token]) for token in place.forced) :]


class GrammarState:
    """A state: a matcher and the known part of the text after it.

    Attributes:
        last: the token before the state.
        forced: the tokens that must follow.
        unsure: the text that must follow these tokens; its own tokens depend on the text after it.
    """

    __slots__ = ("forced", "last", "matcher", "unsure")

    def __init__(self, matcher: Any, last: int | None = None):
        self.matcher, self.last = matcher, last
        self.forced: list[int] = []
        self.unsure = b""


def _ids(mask_W: Tensor) -> list[int]:
    """The tokens of a mask of few words."""
    places_W = mask_W.nonzero().view(-1)
    found = []
    for word, bits in zip(places_W.tolist(), mask_W[places_W].tolist(), strict=True):
        bits &= 0xFFFFFFFF
        while bits:
            low = bits & -bits
            found.append(word * MASK_WORD + low.bit_length() - 1)
            bits ^= low
    return found


@functools.cache
def _executor(threads: int) -> Any:
    """llguidance's threads."""
    return library().LLExecutor(threads)


def _first_lines(fault: str) -> str:
    """The part of llguidance's message that is meant for people."""
    for mark in ("<state>", "<non-verbose/>", "<backtrace>"):
        fault = fault.partition(mark)[0]
    return " ".join(fault.split())[:300]

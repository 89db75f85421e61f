"""Limits of a tokenizer.json: how much it may lengthen a text, and how much time its patterns may take.

In the tokenizers library a normalizer may turn every character into a thousand, a regular expression may take
exponential time, and a match of too many steps ends in a panic. Two measures bound this:

- Decoders, post-processors and models are checked once, when the file is loaded: their kinds and parameters bound the
  text of a token.
- Normalizers and pre-tokenizers are `plain` if they are known to take linear time and to lengthen a text little, as
  those of common models do. For others every text is first tried in the sandbox (see `engine.text.sandbox`), whose time
  and memory are limited.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers import AddedToken, Tokenizer

from engine.errors import CheckpointError, CoppiceError, UsageError
from engine.text import sandbox, sandbox_process

GROWTH = 100  # most times longer that normalizers, and plain pre-tokenizers, may make a text
TOKEN_TEXT = 4096  # most characters that decoders may make of a token; the longest tokens in use have some hundred
ADDED_IDS = 1024  # most ids that a post-processor may add to a text
LONGEST_WORD = 256  # most characters of a word in WordPiece, which takes cubic time; the library's default is 100
AFFIX = 64  # most characters of the marks of continued and final pieces
PARTS = 64  # most parts of a sequence
PUMP = 48  # repetitions of a character in a text that reveals patterns of exponential time
SECONDS_PER_BYTE = 5e-6  # limit for a text in the sandbox, ten times the time of the usual patterns
REMEDY = "get the tokenizer from a source that you trust"

# Patterns that take linear time. An alternative is a few characters or classes of them without repetition, or ends with
# a repeated one: everything after the first repetition may be empty, so that there is no backtracking. Alternatives
# that are linear only together are written out: a later one takes the whole text that an earlier one gives up.
_ATOM = r"(?:\\[pP]\{\^?\w+\}|\\[sSdDwWrnt.]|\[(?:[^\[\]\\&]|&(?!&)|\\[pP]\{\^?\w+\}|\\[^pPxQc0-9])+\]|[\w ,;!~<>=/-])"
_TIMES = r"(?:\+\+?|\{\d{1,2}(?:,\d{0,2})?\})"
_SMALL = rf"(?:{_ATOM}(?:\?\+?)?)?{_ATOM}{_TIMES}?(?:{_ATOM}[*?])?|'?[\w ]+|(?:{_ATOM}){{1,4}}|\(\?i:'\w+(?:\|'\w+)*\)"
_SUFFIXES = r"'(?:[sdmt]|ll|ve|re)", r"'(?i:[sdmt]|ll|ve|re)"
_SPACES = *(rf"\s*[\r\n]{times}|\s+(?!\S)|\s+" for times in ("+", "")), r"\s+(?!\S)|\s+"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_CASED = tuple(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{end}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{end}"
    for end in ("", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?")
)
_GROUP = "|".join([*map(re.escape, (*_SUFFIXES, *_SPACES, *_CASED)), _SMALL])
PLAIN = re.compile(rf"(?:{_GROUP})(?:\|(?:{_GROUP}))*")
LONGEST_PATTERN = 1000

FORMS = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 1.5, "BertNormalizer": 10, "ByteLevel": 2}
FORMS |= dict.fromkeys(("Strip", "StripAccents", "Nmt"), 1)  # the others: Unicode's largest factors in UTF-8
SPLITS = {"ByteLevel": 2, "Metaspace": 3}
SPLITS |= dict.fromkeys(("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Punctuation", "Digits"), 1)
SPLITS |= dict.fromkeys(("CharDelimiterSplit", "UnicodeScripts", "FixedLength"), 1)


# --- normalizers and pre-tokenizers ---


def plain(normalizer: Any, pre_tokenizer: Any) -> bool:
    """Whether these parts of a tokenizer.json take linear time and make no text more than GROWTH times longer."""
    return _normalizer(normalizer) * _pre_tokenizer(pre_tokenizer) <= GROWTH


def _normalizer(spec: Any) -> float:
    """How many times longer a normalizer may make a text; infinity if it is not plain."""
    match spec:
        case None:
            return 1
        case {"type": "Sequence", "normalizers": [*parts]} if len(parts) <= PARTS:
            return math.prod(map(_normalizer, parts))
        case {"type": "Prepend", "prepend": str(text)}:
            return 1 if len(text) <= 8 else math.inf
        case {"type": "Replace", "pattern": {"String": str(old), **more}, "content": str(new)} if old and not more:
            return max(1, _bytes(new) / _bytes(old))
        case {"type": "Replace", "pattern": {"Regex": str(pattern), **more}, "content": str(new)} if not more:
            return 1 + _bytes(new) if _linear(pattern) else math.inf
        case {"type": str(name)}:
            return FORMS.get(name, math.inf)
    return math.inf


def _pre_tokenizer(spec: Any) -> float:
    match spec:
        case None:
            return 1
        case {"type": "Sequence", "pretokenizers": [*parts]} if len(parts) <= PARTS:
            return math.prod(map(_pre_tokenizer, parts))
        case {"type": "Split", "pattern": {"String": str(text), **more}} if text and not more:
            return 1
        case {"type": "Split", "pattern": {"Regex": str(pattern), **more}} if not more:
            return 1 if _linear(pattern) else math.inf
        case {"type": str(name)}:
            return SPLITS.get(name, math.inf)
    return math.inf


def _linear(pattern: str) -> bool:
    return len(pattern) <= LONGEST_PATTERN and PLAIN.fullmatch(pattern) is not None


def _bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


class EncodingGuard:
    """Tries normalizers and pre-tokenizers that are not plain in the sandbox.

    Args:
        normalizer: part of a tokenizer.json.
        pre_tokenizer: part of a tokenizer.json.
        where: the file, for errors.
    """

    def __init__(self, normalizer: Any, pre_tokenizer: Any, where: str = ""):
        self.where = where
        self._parts = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
        self._tokens: list[list[Any]] = []
        self._probed: frozenset[str] | None = None

    def probe(self, contents: Iterable[str]) -> None:
        """Try the spellings of tokens that are normalized when they are added, and texts for which bad patterns often
        take long, unless these were tried with the same spellings or more. Raises CheckpointError."""
        spellings = frozenset(contents)
        if self._probed is not None and spellings <= self._probed:
            return
        self._probed = spellings
        self._tokens = [[content, False, False, False, True, False] for content in sorted(spellings)]
        chars = {*" aA0.\n", *"".join(_strings(self._parts))}
        self._ask([char * PUMP + "\x01" for char in sorted(chars)[:256]])

    def add(self, tokens: Iterable[AddedToken]) -> None:
        """Set the added tokens, at which the library splits a text."""
        self._tokens = [[t.content, t.lstrip, t.rstrip, t.single_word, t.normalized, t.special] for t in tokens]

    def check(self, text: str) -> None:
        """Raises CheckpointError if the parts fail on `text`, or take too much time or memory for it."""
        self._ask([text])

    def _ask(self, texts: list[str]) -> None:
        size = sum(map(_bytes, texts))
        seconds = sandbox.CPU_SECONDS + SECONDS_PER_BYTE * size
        parts = json.dumps([self._parts, self._tokens])
        request = {"parts": parts, "texts": texts, "seconds": seconds, "growth": GROWTH}
        try:
            reply = sandbox_process.TEMPLATES.ask(request, sandbox_process.WALL_SECONDS + 10 * seconds)
        except UsageError as error:
            what = f"the patterns of this tokenizer are tried in a process of its own: {error.what}"
            raise UsageError(what, where=error.where, remedy=f"set {sandbox_process.VARIABLE} to a Python 3") from None
        if reply is None:
            memory = sandbox.MEMORY_BYTES >> 20
            why = f"it takes more than {seconds:.1f} s or too much memory (of {memory} MB) for {size} bytes of text"
        elif (why := reply.get("refused")) is None:
            return
        raise CheckpointError(f"the tokenizer is refused: {why}", where=self.where, remedy=REMEDY)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(item)


# --- decoders, post-processors, models ---


def parse(data: bytes) -> dict[str, Any]:
    """A tokenizer.json as Python reads it.

    Raises:
        CheckpointError: it is no JSON object.
    """
    try:
        value = json.loads(data.decode())  # of two equal keys it takes the last one, and so does the library
    except (ValueError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"the tokenizer is malformed: {why}"[:300]) from None
    if not isinstance(value, dict):
        raise CheckpointError("the tokenizer is malformed: expected a JSON object")
    return value


def guard(spec: dict[str, Any], where: str = "") -> EncodingGuard | None:
    """Check the model of a tokenizer.json and, before the library reads it, its normalizer and pre-tokenizer.

    Returns:
        the guard that checks every text; None if normalizer and pre-tokenizer are plain.

    Raises:
        CheckpointError: a limit is broken.
    """
    model = spec["model"] if isinstance(spec.get("model"), dict) else {}
    if isinstance(value := model.get("max_input_chars_per_word"), int) and value > LONGEST_WORD:
        what = f"model: max_input_chars_per_word: expected at most {LONGEST_WORD}, got {value}"
        raise CheckpointError(what, remedy=REMEDY)
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if isinstance(value := model.get(key), str) and len(value) > AFFIX:
            raise CheckpointError(f"model: {key}: expected at most {AFFIX} characters, got {len(value)}", remedy=REMEDY)
    _check_merges(model)
    if plain(spec.get("normalizer"), spec.get("pre_tokenizer")):
        return None
    found = EncodingGuard(spec.get("normalizer"), spec.get("pre_tokenizer"), where)
    added = spec.get("added_tokens")
    entries = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    contents = [token.get("content") for token in entries if token.get("normalized") is not False]
    found.probe(content for content in contents if isinstance(content, str))
    return found


def _check_merges(model: dict[str, Any]) -> None:
    """Check that the library can cut the prefix from the second parts of merges: it cuts bytes, and ends the process if
    a character is left without its first one. Raises CheckpointError."""
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not isinstance(prefix, str) or not prefix or not isinstance(merges, list):
        return
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        second = parts[1] if isinstance(parts, list) and len(parts) > 1 else None
        if isinstance(second, str) and not second.isascii() and not second.startswith(prefix):
            what = f"model: merges: {second[:80]!r} does not begin with continuing_subword_prefix {prefix!r}"
            raise CheckpointError(what, remedy=REMEDY)


def check_output(library: Tokenizer, pieces: Iterable[str | None]) -> None:
    """Check how long the decoder may make a piece, and how many ids the post-processor may add to a text.

    Raises:
        CheckpointError: a limit is broken.
    """
    longest = max((len(piece) for piece in pieces if piece is not None), default=0)
    grown = longest * _decoder(state_of(library.decoder))
    if grown > TOKEN_TEXT:
        what = f"the decoder may make {grown:.0f} characters of a token, at most {TOKEN_TEXT} are allowed"
        raise CheckpointError(what, remedy=REMEDY)
    _check_processor(state_of(library.post_processor))


def _decoder(spec: Any) -> float:
    """How many times longer a decoder may make a piece."""
    match spec:
        case None:
            return 1
        case {"type": "Sequence", "decoders": [*parts]}:
            if len(parts) > PARTS:
                raise CheckpointError(f"decoder: expected at most {PARTS} parts, got {len(parts)}", remedy=REMEDY)
            return math.prod(map(_decoder, parts))
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return max(1, len(new) / len(old)) if old else 1 + len(new)
        case {"type": "Replace"}:
            raise CheckpointError("decoder: replacing by a regular expression is not supported", remedy=REMEDY)
        case {"type": "BPEDecoder" | "CTC"}:
            return 2  # a space for each mark, which may be empty
    return 1


def _check_processor(spec: Any) -> int:
    """The number of ids that a post-processor adds. Raises CheckpointError."""
    added = 2
    match spec:
        case {"type": "Sequence", "processors": [*parts]}:
            added = sum(map(_check_processor, parts))
        case {"type": "TemplateProcessing", "single": [*items], "special_tokens": dict(tokens)}:
            if sum("Sequence" in item for item in items) > 1:
                raise CheckpointError("post_processor: the text occurs more than once in the template", remedy=REMEDY)
            names = [item["SpecialToken"]["id"] for item in items if "SpecialToken" in item]
            added = sum(len(tokens.get(name, {}).get("ids", ())) for name in names)
    if added > ADDED_IDS:
        what = f"post_processor: it adds {added} ids to every text, at most {ADDED_IDS} are allowed"
        raise CheckpointError(what, remedy=REMEDY)
    return added


def state_of(part: Any) -> Any:
    """A part of a tokenizer of the library as its tokenizer.json has it; None without one."""
    return None if part is None else json.loads(part.__getstate__())


@contextlib.contextmanager
def library_errors(what: str, where: str = "") -> Iterator[None]:
    """Turn exceptions of the tokenizers library, also its panics, into a CheckpointError that begins with `what`."""
    try:
        yield
    except (CoppiceError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # it derives from neither
            raise
        raise CheckpointError(f"{what}: {error}"[:500], where=where, remedy=REMEDY) from None

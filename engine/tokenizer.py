"""Tokenizers: text to ids and back, exactly as the checkpoint's tokenizer.json says, and text that streams.

Three texts go in: a plain prompt and a message's content, where a special token is spelled like any other text, and
the text around contents that a chat template writes, where it is the control token (`Tokenizer.encode_rendered`).
Two come out: `decode(ids)` is the text of these ids alone, and what `text` means in every output (transformers'
batch_decode of the new tokens); `decode_continuation(prefix_ids, ids)` is what they add to the text before them, which
differs where a decoder strips the space that starts a text.
"""

import codecs
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.errors import CheckpointError, UsageError

MAX_TOKENIZER_BYTES = 512 << 20
MAX_CONFIG_BYTES = 16 << 20
MAX_IDS = 1 << 24
SUPPORTED = "a folder with a tokenizer.json is needed"


class Tokenizer:
    """A checkpoint's tokenizer; immutable.

    Special tokens. The tokenizers library matches every added token in every text, unless told to leave all special
    ones alone; it cannot match one place and spare another in one go, and encoding pieces apart changes their ids
    (prefix spaces, merges). So it is told to leave them all alone, and each gets an alias: a second spelling that no
    text can hold, as it has a random number in it. Where a token is meant, its alias is written. The whole text is then
    encoded once.

    Attributes:
        size: ids it knows (largest id + 1); a model's padded vocabulary goes further, and means nothing.
        bos_token_id, eos_token_id: from tokenizer_config.json and special_tokens_map.json.
        special_ids: ids that `decode` skips.
        special_tokens: `{"bos_token": "<s>", ...}`, for chat templates.
        special_spellings, added_spellings: what special and other added tokens look like.
        config: tokenizer_config.json, {} if there is none.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any], names: dict[str, str]):
        """`names` are the named special tokens; use `Tokenizer.load` for a folder."""
        backend.no_padding()
        backend.no_truncation()
        vocab = backend.get_vocab(with_added_tokens=True)
        self.config = config
        self.size = max(vocab.values(), default=-1) + 1
        if not 0 < self.size <= MAX_IDS:
            raise CheckpointError(f"vocabulary mismatch: ids up to {self.size - 1}, expected 1 to {MAX_IDS} tokens")
        self._piece_of: list[str | None] = [None] * self.size
        for piece, i in vocab.items():
            self._piece_of[i] = piece

        added = _added_tokens(backend, config, names)
        for content, token in added.items():
            self._piece_of[vocab[content]] = content
            # An option of the library hides special tokens from it; it is to match only aliases among those that it
            # looks for in raw text. The others it finds after normalisation, and they are nobody's control tokens.
            hidden = token.special or not token.normalized
            flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
            add = backend.add_special_tokens if hidden else backend.add_tokens
            add([AddedToken(content, special=hidden, normalized=not hidden, **flags)])
        backend.encode_special_tokens = True
        raw = {content: token for content, token in added.items() if token.special or not token.normalized}

        self.special_tokens = {name: token for name, token in names.items() if token in vocab}
        self.special_spellings = frozenset(content for content, token in raw.items() if token.special)
        self.added_spellings = frozenset(raw) - self.special_spellings
        self.special_ids = frozenset(vocab[content] for content in self.special_spellings)
        self.bos_token_id = vocab.get(names.get("bos_token", ""))
        self.eos_token_id = vocab.get(names.get("eos_token", ""))
        unknown = backend.encode("\ufdd0", add_special_tokens=False).ids  # <unk> is special, and ordinary text needs it
        self._control_ids = self.special_ids - {*unknown, vocab.get(names.get("unk_token", ""))}

        nonce = secrets.token_hex(8)
        self._alias = {content: f"\ufdd0{nonce}:{k}\ufdd1" for k, content in enumerate(raw)}
        self._break = f"\ufdd0{nonce}\ufdd1"  # a token that stands for nothing, and parts the text around it
        # The library numbers new tokens from its count of tokens: in a vocabulary with holes that is an id in use.
        holes = self.size - backend.get_vocab_size(with_added_tokens=True)
        backend.add_tokens([AddedToken(f"\ufdd0{nonce}-{k}\ufdd1", normalized=False) for k in range(holes)])
        backend.add_tokens([AddedToken(self._break, normalized=False)])
        for content, alias in self._alias.items():
            token = raw[content]
            flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
            backend.add_tokens([AddedToken(alias, special=False, normalized=False, **flags)])
        numbers = backend.get_vocab(with_added_tokens=True)
        self._meaning = {numbers[alias]: vocab[content] for content, alias in self._alias.items()}
        self._meaning[numbers[self._break]] = -1
        if min(self._meaning) < self.size:
            raise CheckpointError("vocabulary mismatch: two tokens share an id")

        def pattern(contents: Iterable[str]) -> re.Pattern[str]:
            longest_first = sorted(contents, key=lambda c: (-len(c), c))
            word = {c: r"(?<!\w){}(?!\w)" if raw[c].single_word else "{}" for c in raw}
            return re.compile("|".join(word[c].format(re.escape(c)) for c in longest_first) or "(?!)")

        self._raw = pattern(raw)
        self._special = pattern(self.special_spellings)
        self._backend = backend
        self._decoder = backend.decoder
        self._stages = _stages(self._decoder)
        if any(not 0 <= i < self.size for i in self.encode("")):
            raise CheckpointError("vocabulary mismatch: the post-processor adds an id that the vocabulary lacks")

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Read a checkpoint's tokenizer.

        tokenizer.json alone says how text becomes ids, its post-processor included: `tokenizer_class` and, as in
        transformers 5, `add_bos_token` and `add_eos_token` of tokenizer_config.json change nothing.

        Raises:
            CheckpointError: no supported file, or one is malformed.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError("the checkpoint has no tokenizer.json", where=str(folder), remedy=SUPPORTED)
        data = _read(path, MAX_TOKENIZER_BYTES)
        config = read_json(folder / "tokenizer_config.json")
        names = _names(config, read_json(folder / "special_tokens_map.json"))
        try:
            return cls(tokenizers.Tokenizer.from_buffer(data), config, names)
        except CheckpointError as error:
            raise CheckpointError(error.what, where=str(path), remedy=error.remedy) from None
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # the library panics with a BaseException
            raise CheckpointError(f"the tokenizer is malformed: {error}"[:500], where=str(path)) from None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Encode plain text; special tokens spelled in it are text.

        Args:
            text: valid UTF-8.
            add_special: add what the checkpoint's post-processor adds (BOS, as a rule).

        Raises:
            UsageError: lone surrogates, or a special token that this vocabulary cannot spell.
        """
        if self.added_spellings:
            aliases = {content: self._alias[content] for content in self.added_spellings}
            text = self._raw.sub(lambda found: aliases.get(found[0], found[0]), text)
        return self._encode(text, add_special)

    def encode_rendered(self, spans: Iterable[tuple[str, bool]]) -> list[int]:
        """Encode what `ChatTemplate.render` returns, adding nothing: BOS is the template's business.

        Args:
            spans: (text, is_control); added tokens spelled in text count as tokens where is_control.

        Raises:
            UsageError: as `encode`.
        """
        parts = (self._raw.sub(lambda found: self._alias[found[0]], t) if control else t for t, control in spans)
        return self._encode("".join(parts), False)

    def _encode(self, text: str, add_special: bool) -> list[int]:
        check_utf8(text)
        encoding = self._backend.encode(text, add_special_tokens=False)
        if not self._control_ids.isdisjoint(encoding.ids):
            # The model itself has the special token as a piece (Unigram models do): cut its spellings in two.
            text = self._special.sub(lambda found: found[0][0] + self._break + found[0][1:], text)
            encoding = self._backend.encode(text, add_special_tokens=False)
            if bad := self._control_ids.intersection(encoding.ids):
                piece = self._piece_of[min(bad)]
                raise UsageError(f"the text has {piece!r} in it, which this tokenizer cannot spell as plain text")
        if add_special:
            encoding = self._backend.post_process(encoding, add_special_tokens=True)
        return [i for i in (self._meaning.get(i, i) for i in encoding.ids) if i >= 0]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids` alone. Ids past `size` have no text; incomplete UTF-8 becomes U+FFFD.

        Equals the tokenizers library's decode; no `clean_up_tokenization_spaces` (transformers ignores it for BPE).
        """
        pieces = list(self._pieces(ids, skip_special))
        return " ".join(pieces) if self._decoder is None else self._decoder.decode(pieces)

    def _pieces(self, ids: Iterable[int], skip_special: bool) -> Iterator[str]:
        for i in ids:
            piece = self._piece_of[i] if 0 <= i < self.size else None
            if piece is not None and not (skip_special and i in self.special_ids):
                yield piece

    def stream(self, prefix_ids: Sequence[int] = ()) -> "Detokenizer":
        """A detokenizer for the tokens that follow `prefix_ids`; see `decode_continuation`."""
        return Detokenizer(self, prefix_ids)

    def decode_continuation(self, prefix_ids: Sequence[int], ids: Sequence[int]) -> str:
        """What `ids` add to the text of `prefix_ids`: transformers' decode(all)[len(decode(prefix)):].

        Where the prefix ends inside a character, that slice would lose text; here the character that gets complete is
        part of the continuation.
        """
        before, text = self.decode(prefix_ids), self.decode([*prefix_ids, *ids])
        if text.startswith(before):
            return text[len(before) :]
        return text[len(_stable(self, prefix_ids)) :]


class Detokenizer:
    """Turns ids into text that never changes, as they come.

    For any ids, the pushed texts and the finish, joined, are `decode_continuation(prefix_ids, ids)` (without a prefix:
    `decode(ids)`), special tokens skipped. Bytes of an incomplete character are held back. So is a run of byte pieces
    (`<0xE2>`) up to its end, as one bad byte makes replacement characters of the whole run. The work per token is
    constant. Decoders that look ahead without bound (WordPiece, CTC) are held back to the end.
    """

    def __init__(self, tokenizer: Tokenizer, prefix_ids: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._stages = [stage() for stage in tokenizer._stages]
        self._drop = self._dropped = ""  # held-back text of the prefix: not ours if the text goes on with it
        if prefix_ids:
            stable = self.push(prefix_ids)
            self._drop = tokenizer.decode(prefix_ids)[len(stable) :]

    def push(self, ids: Iterable[int]) -> str:
        """Take ids, return the text that is certain now."""
        out = []
        for piece in self._tokenizer._pieces(ids, True):
            pieces = [piece]
            for stage in self._stages:
                pieces = [new for old in pieces for new in stage.take(old)]
            out += pieces
        return self._new("".join(out))

    def finish(self) -> str:
        """Return what was held back; the detokenizer is used up."""
        pieces: list[str] = []
        for stage in self._stages:
            pieces = [new for old in pieces for new in stage.take(old)] + list(stage.finish())
        return self._new("".join(pieces)) + self._dropped

    def _new(self, text: str) -> str:
        if not self._drop:
            return text
        self._dropped += text
        if self._drop.startswith(self._dropped) and self._drop != self._dropped:
            return ""
        text, self._dropped = self._dropped.removeprefix(self._drop), ""
        self._drop = ""
        return text


def _stable(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return Detokenizer(tokenizer).push(ids)


# The library's decoders, one piece at a time: `take` a piece, return the pieces that follow from it; `finish`.


class _Stage:
    def take(self, piece: str) -> Sequence[str]:
        raise NotImplementedError

    def finish(self) -> Sequence[str]:
        return ()


class _Replace(_Stage):
    def __init__(self, old: str, new: str):
        self.old, self.new = old, new

    def take(self, piece: str) -> Sequence[str]:
        return (piece.replace(self.old, self.new),)


class _Strip(_Stage):
    """Strips up to `start` leading and `stop` trailing `content` of each piece."""

    def __init__(self, content: str, start: int, stop: int):
        self.content, self.start, self.stop = content, start, stop

    def take(self, piece: str) -> Sequence[str]:
        end = len(piece)
        start = _run(piece, self.content, self.start)
        while len(piece) - end < self.stop and end > start and piece[end - 1] == self.content:
            end -= 1
        return (piece[start:end],)


class _StripFused(_Stage):
    """Strips up to `start` leading `content` of the whole text."""

    def __init__(self, content: str, start: int):
        self.content, self.left = content, start

    def take(self, piece: str) -> Sequence[str]:
        if self.left and piece:
            cut = _run(piece, self.content, self.left)
            self.left = self.left - cut if cut == len(piece) else 0
            piece = piece[cut:]
        return (piece,)


class _Metaspace(_Stage):
    """Spaces for the replacement, none in the first piece if encoding prepended one."""

    def __init__(self, replacement: str, prepends: bool):
        self.replacement, self.first = replacement, prepends

    def take(self, piece: str) -> Sequence[str]:
        piece, self.first = piece.replace(self.replacement, "" if self.first else " "), False
        return (piece,)


class _Joined(_Stage):
    """No decoder at all: pieces with spaces between."""

    first = True

    def take(self, piece: str) -> Sequence[str]:
        piece, self.first = piece if self.first else " " + piece, False
        return (piece,)


class _ByteFallback(_Stage):
    """Runs of byte pieces to text; a run that is not UTF-8 becomes one U+FFFD per byte."""

    byte = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")

    def __init__(self):
        self.run = bytearray()

    def take(self, piece: str) -> Sequence[str]:
        if found := self.byte.fullmatch(piece):
            self.run.append(int(found[1], 16))
            return ()
        return (*self.finish(), piece)

    def finish(self) -> Sequence[str]:
        run, self.run = self.run, bytearray()
        try:
            return (run.decode(),) if run else ()
        except UnicodeDecodeError:
            return ("\ufffd",) * len(run)


def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + k): b for k, b in enumerate(rest)}


_BYTE_OF_CHAR = _byte_of_char()


class _ByteLevel(_Stage):
    """Bytes spelled as characters to text; a piece with any other character stands for itself."""

    def __init__(self):
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, piece: str) -> Sequence[str]:
        try:
            data = bytes([_BYTE_OF_CHAR[c] for c in piece])
        except KeyError:
            data = piece.encode()
        return (self.utf8.decode(data),)

    def finish(self) -> Sequence[str]:
        return (self.utf8.decode(b"", final=True),)


class _Hold(_Stage):
    """Everything at the end, for decoders that are not known here."""

    def __init__(self, decoder: Any):
        self.decoder, self.pieces = decoder, []

    def take(self, piece: str) -> Sequence[str]:
        self.pieces.append(piece)
        return ()

    def finish(self) -> Sequence[str]:
        return (self.decoder.decode(self.pieces),)


def _run(text: str, char: str, most: int) -> int:
    """How many `char` start `text`, at most `most`."""
    n = 0
    while n < min(most, len(text)) and text[n] == char:
        n += 1
    return n


def _stages(decoder: Any) -> list[Callable[[], _Stage]]:
    """The decoder as makers of stages."""
    if decoder is None:
        return [_Joined]
    hold: list[Callable[[], _Stage]] = [lambda: _Hold(decoder)]
    stages: list[Callable[[], _Stage]] = []
    fused = False  # from here on pieces are parts of one text
    for spec in _flat(json.loads(decoder.__getstate__())):
        match spec:
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": str(c), "start": int(n), "stop": 0} if fused:
                stages.append(lambda c=c, n=n: _StripFused(c, n))
            case _ if fused:
                return hold
            case {"type": "Strip", "content": str(c), "start": int(n), "stop": int(m)}:
                stages.append(lambda c=c, n=n, m=m: _Strip(c, n, m))
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
                stages.append(lambda old=old, new=new: _Replace(old, new))
            case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": str(scheme)}:
                stages.append(lambda mark=mark, scheme=scheme: _Metaspace(mark, scheme != "never"))
            case {"type": "ByteFallback"}:
                stages.append(_ByteFallback)
            case {"type": "ByteLevel"}:
                stages.append(_ByteLevel)
                fused = True
            case _:
                return hold
    return stages


def _flat(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if spec.get("type") != "Sequence":
        yield spec
        return
    for part in spec["decoders"]:
        yield from _flat(part)


def check_utf8(text: str) -> str:
    """Return `text` if it can be written as UTF-8.

    Raises:
        UsageError: it has lone surrogates (from bytes that were no UTF-8, or from an escape in JSON).
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the text is not valid UTF-8: lone surrogate U+{ord(text[error.start]):04X} at character {error.start}",
            remedy="give the input as UTF-8",
        ) from None
    return text


def _added_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], names: dict[str, str]
) -> dict[str, AddedToken]:
    """Added tokens of tokenizer.json by spelling; as in transformers, tokenizer_config.json may change their flags,
    and what it names as special is special."""
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for entry in _dict(config.get("added_tokens_decoder")).values():
        if isinstance(entry, dict) and entry.get("content") in added:
            flags = {k: entry[k] for k in ("lstrip", "rstrip", "single_word", "normalized", "special") if k in entry}
            added[entry["content"]] = AddedToken(entry["content"], **flags)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    contents = {_content(token) for token in (extra.values() if isinstance(extra, dict) else extra)}
    for content in [*names.values(), *sorted(c for c in contents if c)]:
        if content in added:
            added[content].special = True
        elif backend.token_to_id(content) is not None:
            added[content] = AddedToken(content, special=True, normalized=False)
    return added


def _names(config: dict[str, Any], special_map: dict[str, Any]) -> dict[str, str]:
    """Named special tokens; transformers 5 reads the map only where the configuration lists no added tokens."""
    merged = dict(config) if "added_tokens_decoder" in config else {**config, **special_map}
    named = {name: _content(value) for name, value in merged.items() if name.endswith("_token")}
    return {name: content for name, content in named.items() if content}


def _content(value: Any) -> str | None:
    """A token's spelling, written as a string or as an object."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} if the file does not exist.

    Raises:
        CheckpointError: unreadable, too long, not JSON, not an object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the file is not valid JSON: {error}", where=str(path)) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"expected a JSON object, got {type(value).__name__}", where=str(path))
    return value


def _read(path: Path, limit: int) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read the file: {error.strerror}", where=str(path)) from None
    if len(data) > limit:
        raise CheckpointError(f"the file is larger than {limit} bytes", where=str(path))
    if data.startswith(b"version https://git-lfs"):
        raise CheckpointError("the file is a git-LFS pointer", where=str(path), remedy="fetch it with git lfs pull")
    return data

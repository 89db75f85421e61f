"""Incremental decoding: the decoders of the tokenizer libraries, one piece of the vocabulary at a time."""

import codecs
import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from engine.text.channels import start_at_end
from engine.text.tokenizer_limits import library_errors


class Detokenizer:
    """Turns pieces, one at a time, into text that never changes.

    The texts of `push` and `finish`, joined, are the result of `run` for all pieces. Bytes of an incomplete character
    are held back, and so is a run of byte pieces (`<0xE2>`) where one bad byte makes the library replace the whole run.
    The work per token is constant. Decoders that look ahead without bound (WordPiece, CTC) hold all text back.
    """

    def __init__(
        self,
        makers: Iterable[Callable[[], "Stage"]],
        pieces: Callable[[Iterable[int]], Iterable[str]],
        prefix_ids: Sequence[int] = (),
    ):
        """`pieces` maps ids to pieces; the text of `prefix_ids` is context only and is not returned."""
        self._pieces = pieces
        self._stages = [make() for make in makers]
        self._drop = self._dropped = ""  # the prefix's text that was held back, and the part of it that came since
        if prefix_ids:
            self.push(prefix_ids)
            self._drop = _rest(copy.deepcopy(self._stages))

    def push(self, ids: Iterable[int]) -> str:
        """Add ids; returns the text that has become certain."""
        out = []
        for piece in self._pieces(ids):
            pieces = [piece]
            for stage in self._stages:
                pieces = [new for old in pieces for new in stage.take(old)]
            out += pieces
        return self._new("".join(out))

    def finish(self) -> str:
        """Return the text that was held back; the detokenizer cannot be used again."""
        return self._new(_rest(self._stages)) + self._dropped

    def _new(self, text: str) -> str:
        if not self._drop:
            return text
        self._dropped += text
        if self._drop.startswith(self._dropped) and self._drop != self._dropped:
            return ""
        text, self._dropped = self._dropped.removeprefix(self._drop), ""
        self._drop = ""
        return text


def _rest(stages: Iterable["Stage"]) -> str:
    """The text that stages hold back; they cannot be used again."""
    pieces: list[str] = []
    for stage in stages:
        pieces = [new for old in pieces for new in stage.take(old)] + list(stage.finish())
    return "".join(pieces)


def run(makers: Iterable[Callable[[], "Stage"]], pieces: Iterable[str]) -> str:
    """The text of all pieces of a sequence."""
    whole = Detokenizer(makers, lambda _: pieces)
    return whole.push(()) + whole.finish()


class Stage:
    """A step of decoding: `take` adds a piece and returns those that are certain now; `finish` returns the rest."""

    def take(self, piece: str) -> Sequence[str]:
        raise NotImplementedError

    def finish(self) -> Sequence[str]:
        return ()

    def data(self, piece: str) -> str | bytes | None:
        """The text of a piece inside a text, or its bytes, which are final; None if other pieces decide."""
        return piece


def data_of(stages: Iterable[Stage], piece: str) -> bytes | None:
    """The bytes of a piece in the middle of a text; None if they depend on other pieces."""
    data: str | bytes | None = piece
    for stage in stages:
        if isinstance(data, str):
            data = stage.data(data)
    return data.encode() if isinstance(data, str) else data


# What `clean_up_tokenization_spaces` replaces in transformers, in this order.
CLEANED = {" .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'", " n't": "n't", " 'm": "'m", " 's": "'s"}
CLEANED |= {" 've": "'ve", " 're": "'re"}


class _Replace(Stage):
    def __init__(self, old: str, new: str):
        self.old, self.new = old, new

    def take(self, piece: str) -> Sequence[str]:
        return (self.data(piece),)

    def data(self, piece: str) -> str:
        return piece.replace(self.old, self.new)


class CleanUp(Stage):
    """Replaces one text by another, also where pieces meet.

    Args:
        old, new: the texts.
    """

    def __init__(self, old: str, new: str):
        self.old, self.new, self.held = old, new, ""

    def take(self, piece: str) -> Sequence[str]:
        *parts, rest = (self.held + piece).split(self.old)
        self.held = start_at_end(rest, self.old)
        return (self.new.join([*parts, rest.removesuffix(self.held)]),)

    def finish(self) -> Sequence[str]:
        return (self.held,)

    def data(self, piece: str) -> None:
        """None: the next piece may continue `old`."""


class _Strip(Stage):
    """Strips up to `start` leading and `stop` trailing `content` of each piece."""

    def __init__(self, content: str, start: int, stop: int):
        self.content, self.start, self.stop = content, start, stop

    def take(self, piece: str) -> Sequence[str]:
        piece = piece[_run(piece, self.content, self.start) :]
        return (piece[: len(piece) - _run(piece[::-1], self.content, self.stop)],)

    def data(self, piece: str) -> str:
        return self.take(piece)[0]


class _StripFused(Stage):
    """Strips up to `start` leading `content` of the whole text."""

    def __init__(self, content: str, start: int):
        self.content, self.left = content, start

    def take(self, piece: str) -> Sequence[str]:
        if self.left and piece:
            cut = _run(piece, self.content, self.left)
            self.left = self.left - cut if cut == len(piece) else 0
            piece = piece[cut:]
        return (piece,)


class _Metaspace(Stage):
    """Turns the replacement into spaces, but drops it from the first piece if encoding prepended one."""

    def __init__(self, replacement: str, prepends: bool):
        self.replacement, self.first = replacement, prepends

    def take(self, piece: str) -> Sequence[str]:
        piece, self.first = piece.replace(self.replacement, "" if self.first else " "), False
        return (piece,)

    def data(self, piece: str) -> str:
        return piece.replace(self.replacement, " ")


class _Joined(Stage):
    """Joins pieces by spaces, if there is no decoder."""

    first = True

    def take(self, piece: str) -> Sequence[str]:
        piece, self.first = piece if self.first else " " + piece, False
        return (piece,)

    def data(self, piece: str) -> None:
        return None


class _ByteFallback(Stage):
    """Turns runs of byte pieces into text; a run that is not UTF-8 becomes one U+FFFD per byte."""

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

    def data(self, piece: str) -> str | bytes:
        found = self.byte.fullmatch(piece)
        return bytes([int(found[1], 16)]) if found else piece


def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + k): b for k, b in enumerate(rest)}


BYTE_OF_CHAR = _byte_of_char()


class _ByteLevel(Stage):
    """Turns bytes spelled as characters into text; a piece with any other character is its own text."""

    def __init__(self):
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, piece: str) -> Sequence[str]:
        return (self.utf8.decode(self.data(piece)),)

    def finish(self) -> Sequence[str]:
        return (self.utf8.decode(b"", final=True),)

    def data(self, piece: str) -> bytes:
        try:
            return bytes([BYTE_OF_CHAR[c] for c in piece])
        except KeyError:
            return piece.encode()


class SentencePieces(Stage):
    """Decodes like the sentencepiece library: spaces for "▁", runs of byte pieces to text, no space at the start.

    Each byte that is part of no character becomes U+FFFD.

    Args:
        strips: strip the first space, which the encoder has added.
        all_leading: strip one space of every piece until there is text.
    """

    byte = re.compile("<0x([0-9A-F]{2})>")

    def __init__(self, strips: bool, all_leading: bool):
        self.strips, self.all_leading = strips, all_leading
        self.utf8 = codecs.getincrementaldecoder("utf-8")("coppice.each_byte")

    def take(self, piece: str) -> Sequence[str]:
        if found := self.byte.fullmatch(piece):
            self.strips = False
            return (self.utf8.decode(bytes([int(found[1], 16)])),)
        cut = self.strips and piece.startswith("▁")
        if piece[cut:] or (cut and not self.all_leading):
            self.strips = False
        return (*self.finish(), piece[cut:].replace("▁", " "))

    def finish(self) -> Sequence[str]:
        return (self.utf8.decode(b"", final=True),)

    def data(self, piece: str) -> str | bytes:
        found = self.byte.fullmatch(piece)
        return bytes([int(found[1], 16)]) if found else piece.replace("▁", " ")


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("coppice.each_byte", _each_byte)


class _Hold(Stage):
    """Decodes all pieces at the end, for unsupported decoders."""

    def __init__(self, decoder: Any):
        self.decoder, self.pieces = decoder, []

    def take(self, piece: str) -> Sequence[str]:
        self.pieces.append(piece)
        return ()

    def finish(self) -> Sequence[str]:
        with library_errors("the tokenizer cannot decode these tokens"):
            return (self.decoder.decode(self.pieces),)

    def data(self, piece: str) -> None:
        return None


def _run(text: str, char: str, most: int) -> int:
    """The number of `char` at the start of `text`, at most `most`."""
    return min(most, len(text) - len(text.lstrip(char)))


def stages_of(decoder: Any) -> list[Callable[[], Stage]]:
    """The stages of a decoder of the tokenizers library."""
    if decoder is None:
        return [_Joined]
    hold: list[Callable[[], Stage]] = [lambda: _Hold(decoder)]
    stages: list[Callable[[], Stage]] = []
    fused = False  # whether the pieces are parts of one text from here on
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

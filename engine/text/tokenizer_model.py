"""Encoding by the sentencepiece library: tokenizer.model."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor

from engine.errors import CheckpointError
from engine.text.detokenizer import SentencePieces, run
from engine.text.tokenizer_files import MAX_IDS, add_tokens, any_of, flag, named_tokens
from engine.text.tokenizer_json import unspeakable
from engine.text.tokenizer_limits import GROWTH
from models.gguf.vocabulary import ModelPieces

# A protobuf message may be followed by fields that override its own: normalizer_spec { add_dummy_prefix: false }.
NO_PREFIX = b"\x1a\x02\x18\x00"
REMEDY = "is it a sentencepiece model? other kinds need their tokenizer.json"
TEXTLESS = 2, 3  # types of pieces: unknown, control
NORMALIZERS, CHARSMAP = (3, 5), 2  # the model's fields for encoding and decoding, and their field of replacements


class SentencePieceEncoder:
    """A sentencepiece model with the tokens that its checkpoint adds, as transformers' LlamaTokenizer treats them.

    Plain text gets the ids that the library gives it, including the space before the text. Added tokens split the text;
    the text after one is encoded without a space before it, or, with `legacy` in tokenizer_config.json, like a separate
    text. `add_prefix_space: false` also omits the space before the whole text. `add_bos_token` (true by default) and
    `add_eos_token` (false by default) add BOS and EOS.
    """

    def __init__(self, model: bytes, folder: Path, config: dict[str, Any], pieces: ModelPieces | None = None):
        """
        Args:
            model: tokenizer.model.
            folder: the checkpoint's folder, which may add tokens.
            config: tokenizer_config.json.
            pieces: the model's pieces and their types, for a model without replacements; None: ask the library.
        """
        if not model:
            raise CheckpointError("vocabulary mismatch: the file is empty, 0 pieces", remedy="download the file again")
        if pieces is None:
            _check_replacements(model)
        prefixed = flag(config, "add_prefix_space", True)
        try:
            first = _loaded(model if prefixed else model + NO_PREFIX)
            size = first.get_piece_size()
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"the tokenizer is malformed: {error}"[:500], remedy=REMEDY) from None
        if not 0 < size <= MAX_IDS:
            raise CheckpointError(f"vocabulary mismatch: {size} pieces, expected 1 to {MAX_IDS}")
        if pieces is None:
            own: list[str] = [first.id_to_piece(i) for i in range(size)]
            control = [own[i] for i in range(size) if first.is_control(i) or first.is_unknown(i)]
        else:
            own = pieces.names
            control = [own[i] for i, kind in enumerate(pieces.kinds) if kind in TEXTLESS]
        ends = {"bos_token": first.bos_id(), "eos_token": first.eos_id(), "unk_token": first.unk_id()}
        self.names = names = named_tokens(config, **{name: own[i] for name, i in ends.items() if i >= 0})
        self.vocab = vocab = dict(zip(own, range(len(own)), strict=True))
        self.raw = add_tokens(folder, vocab, config, {**names, **{piece: piece for piece in control if piece in vocab}})
        self.added = frozenset(self.raw)
        self._token = {vocab[content]: token for content, token in self.raw.items()}
        self.pieces: list[str | None] = [None] * (max(vocab.values()) + 1)
        for piece, i in vocab.items():
            self.pieces[i] = piece

        special = {content: vocab[content] for content, token in self.raw.items() if token.special}
        self._control_ids = {*special.values()} - {first.unk_id()}
        self._special = any_of(special)
        self._bos = [vocab[names["bos_token"]]] if _adds(config, "bos_token", names, vocab, True) else []
        self._eos = [vocab[names["eos_token"]]] if _adds(config, "eos_token", names, vocab, False) else []

        shape = first.normalize("a  b")
        if "▁" not in shape or shape.endswith("▁"):
            what = "a sentencepiece model that writes spaces otherwise than as ▁ before words is unsupported"
            raise CheckpointError(what)
        prefix, self._collapses = prefixed and shape.startswith("▁"), "▁▁" not in shape
        self._first, self._prefixed, self._legacy = first, prefixed, flag(config, "legacy", False)
        self.stages = [lambda: SentencePieces(prefix or self._collapses, self._collapses)]

    @functools.cached_property
    def _bare(self) -> SentencePieceProcessor:
        """The model without a space before the text."""
        return _loaded(self._first.serialized_model_proto() + NO_PREFIX) if self._prefixed else self._first

    def encode(self, parts: Iterable[str | int], add_special: bool) -> list[int]:
        """Ids of plain text and, between, ids of `raw` tokens; see `Tokenizer.encode`."""
        runs = _joined(parts)
        ids: list[int] = []
        for k, part in enumerate(runs):
            if isinstance(part, int):
                ids.append(part)
                continue
            if k and self._token[runs[k - 1]].rstrip:  # type: ignore[index]
                part = part.lstrip()
            if k + 1 < len(runs) and self._token[runs[k + 1]].lstrip:  # type: ignore[index]
                part = part.rstrip()
            ids += self._text(part, first=not k)
        return [*self._bos, *ids, *self._eos] if add_special else ids

    def _text(self, text: str, first: bool) -> list[int]:
        # A model that collapses spaces would strip leading spaces, except the one that it adds itself.
        spaced = self._collapses and text.startswith(" ")
        processor = self._first if first or spaced or self._legacy else self._bare
        try:
            ids: list[int] = processor.encode(text)
        except RuntimeError as error:
            raise CheckpointError(f"the tokenizer cannot encode this text: {error}"[:500], remedy=REMEDY) from None
        if self._control_ids.isdisjoint(ids):
            return ids
        # The model has the special token as a piece, or as a symbol of its own: split its spellings in two.
        ends = [found.start() + 1 for found in self._special.finditer(text)]
        pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
        ids = processor.encode(pieces[0]) + [i for piece in pieces[1:] for i in self._bare.encode(piece)]
        if bad := self._control_ids.intersection(ids):
            raise unspeakable(self.pieces[min(bad)])
        return ids

    def decode(self, pieces: Sequence[str]) -> str:
        """The text of pieces, as the library decodes them; `<unk>` and added tokens become their spelling."""
        return run(self.stages, pieces)


def _loaded(model: bytes) -> SentencePieceProcessor:
    processor = SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return processor


def _joined(parts: Iterable[str | int]) -> list[str | int]:
    """Parts with neighbouring texts joined, and no empty ones."""
    runs: list[str | int] = []
    for part in parts:
        if isinstance(part, str) and runs and isinstance(runs[-1], str):
            runs[-1] += part
        elif part != "":
            runs.append(part)
    return runs


def _adds(config: dict[str, Any], name: str, names: dict[str, str], vocab: dict[str, int], default: bool) -> bool:
    return flag(config, f"add_{name}", default) and names.get(name) in vocab


def _check_replacements(model: bytes) -> None:
    """Check that a model makes a text at most GROWTH times as long.

    Its replacements are stored as the size of a trie, the trie, and the texts that it refers to, which end with a zero
    byte.

    Raises:
        CheckpointError: a replacement is longer; or the model is not a protobuf message.
    """
    try:
        for number, spec in _messages(model):
            for field, charsmap in _messages(spec) if number in NORMALIZERS else ():
                texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0") if field == CHARSMAP else ()
                if (longest := max(map(len, texts), default=0)) > GROWTH:
                    what = f"a character may become {longest} bytes of text, at most {GROWTH} are allowed"
                    raise CheckpointError(what, remedy="get the tokenizer from a source that you trust")
    except IndexError:
        raise CheckpointError("the tokenizer is malformed: it is cut short", remedy=REMEDY) from None


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of the fields of a message that are strings or messages. Raises IndexError."""
    i = 0

    def varint() -> int:
        nonlocal i
        value = shift = 0
        while True:
            value |= (data[i] & 127) << shift
            shift, i = shift + 7, i + 1
            if data[i - 1] < 128 or shift > 63:
                return value

    while i < len(data):
        tag = varint() & 0xFFFFFFFF
        match tag & 7:
            case 0:
                varint()
            case 1:
                i += 8
            case 2:
                length = varint()
                if i + length > len(data):
                    raise IndexError
                yield tag >> 3, data[i : i + length]
                i += length
            case 5:
                i += 4
            case 3 | 4:  # the fields of a group may be read as those of the message
                pass
            case _:
                raise IndexError

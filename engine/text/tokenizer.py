"""Tokenizers: text to ids and back, as the checkpoint's files define it, and streamed text.

`Tokenizer.encode` takes a plain prompt, in which the spelling of a special token is ordinary text unless you ask for
the token by `parse_special`.
`Tokenizer.encode_rendered` takes messages as a chat template renders them: in contents such a spelling is ordinary text
as well, in the template's own text it is the control token.

`decode(ids)` is the text of these ids alone: the `text` of every output (transformers' batch_decode of the new tokens).
`decode_continuation(prefix_ids, ids)` is the text that the ids add to the text before them, which differs if a
decoder strips the space that starts a text.
"""

import contextlib
import functools
import hashlib
import json
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from engine.errors import CheckpointError, UsageError, check_utf8
from engine.text import tokenizer_limits, tokenizer_ranks
from engine.text.channels import CHANNEL_MARKS, TURN
from engine.text.detokenizer import Detokenizer, data_of
from engine.text.thinking import Thoughts
from engine.text.tokenizer_files import (
    any_of,
    byte_level,
    class_defaults,
    complete,
    named_tokens,
    read_config,
    read_file,
)
from engine.text.tokenizer_json import LibraryEncoder
from engine.text.tokenizer_model import SentencePieceEncoder
from engine.text.tool_calls import CALL_MARKS
from models.checkpoint.headers import Checkpoint
from models.gguf.vocabulary import FileVocabulary

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", *tokenizer_ranks.FILES)  # the first that exists is used
Encoder = LibraryEncoder | SentencePieceEncoder
SUPPORTED = "a folder with one of them is needed, with merges.txt if it is vocab.json"


class Tokenizer:
    """A checkpoint's tokenizer; immutable.

    Attributes:
        size: largest id + 1; ids of a model's padded vocabulary from there on have no meaning.
        bos_token_id, eos_token_id: of the tokens that its files name or, if none does, its class.
        special_ids: ids without text: of special tokens, but not of the tags around a thought.
        skipped_ids: special ids that `decode` skips: all except the marks of tool calls and of channels.
        special_tokens: `{"bos_token": "<s>", ...}`, for chat templates.
        special_spellings, added_spellings: spellings of special and of other added tokens.
        config: tokenizer_config.json, {} if there is none.
    """

    def __init__(self, encoder: Encoder, config: dict[str, Any], names: dict[str, str]):
        """`names` are the named special tokens; use `Tokenizer.load` for a folder."""
        vocab, raw = encoder.vocab, encoder.raw
        self.config = config
        self.size = len(encoder.pieces)
        self.special_tokens = {name: token for name, token in names.items() if token in vocab}
        self.special_spellings = frozenset(content for content, token in raw.items() if token.special)
        self.added_spellings = frozenset(raw) - self.special_spellings
        thoughts = Thoughts.find(encoder.added, "")
        marks = CALL_MARKS if thoughts.begun is None else CALL_MARKS | CHANNEL_MARKS
        skipped = self.special_spellings - thoughts.tokens
        self.special_ids = frozenset(vocab[content] for content in skipped)
        self.skipped_ids = frozenset(vocab[content] for content in skipped - marks)
        answer = thoughts.closing.rpartition(TURN)[2]
        tags = (thoughts.opening, thoughts.closing_tokens) if thoughts.begun is None else (TURN, answer)
        self._tags = tags if thoughts.begun is not None or all(token in vocab for token in thoughts.tokens) else ()
        self.bos_token_id = vocab.get(names.get("bos_token", ""))
        self.eos_token_id = vocab.get(names.get("eos_token", ""))
        self._encoder, self._added = encoder, {content: vocab[content] for content in raw}
        encoder.vocab = self._added  # the whole vocabulary takes megabytes, and the list of spellings as many
        encoder.pieces = Pieces(encoder.pieces)  # type: ignore[assignment]
        self._raw = any_of(raw, [content for content, token in raw.items() if token.single_word])

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Read a checkpoint's tokenizer: its tokenizer.json, else tokenizer.model, else vocab.json with merges.txt,
        else tekken.json or tiktoken.model.

        tokenizer.json defines how text becomes ids, including the post-processor: `tokenizer_class` and, as in
        transformers 5, `add_bos_token` and `add_eos_token` of tokenizer_config.json have no effect; but tokens that
        tokenizer_config.json or added_tokens.json lists and it lacks are added, and the class gives the named tokens
        that no file gives. The older files define less; tokenizer_config.json and added_tokens.json complete them.

        Raises:
            CheckpointError: no supported file, or one is malformed.
        """
        folder = Path(folder)
        path = next((folder / name for name in FILES if (folder / name).exists()), None)
        if path is None:
            what = f"the checkpoint has no {', '.join(FILES[:-1])} or {FILES[-1]}"
            raise CheckpointError(what, where=str(folder), remedy=SUPPORTED)
        config, guard, vocab = read_config(folder), None, None
        with _malformed(str(path)):
            if path.name == "tokenizer.model":
                encoder = SentencePieceEncoder(read_file(path), folder, config)
                return cls(encoder, config, encoder.names)
            if path.name == "tokenizer.json":
                data = read_file(path)
                guard = tokenizer_limits.guard(tokenizer_limits.parse(data), str(path))
                library = tokenizers.Tokenizer.from_buffer(data)
                names = named_tokens(config, **class_defaults(folder, config, library))
                complete(library, folder, config, names, guard.probe if guard else list)
            elif path.name in tokenizer_ranks.FILES:
                library, names, guard, vocab = tokenizer_ranks.ranked(path, config)
            else:
                library, names = byte_level(folder, config)
            return cls(LibraryEncoder(library, config, names, guard, str(path), vocab), config, names)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Tokenizer | None":
        """The tokenizer of a checkpoint; None if it has none. Raises CheckpointError like `load`."""
        if checkpoint.vocabulary:
            where = str(checkpoint.folder)
            with _malformed(where):
                return cls(*encoder_of(checkpoint.vocabulary))
        return cls.load(checkpoint.folder) if any((checkpoint.folder / name).exists() for name in FILES) else None

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Encode plain text; spellings of special tokens are ordinary text.

        Args:
            text: valid UTF-8.
            add_special: add the checkpoint's special tokens, usually BOS.
            parse_special: parse spellings of special tokens as these tokens, like transformers; for texts of your own.

        Raises:
            UsageError: lone surrogates, or a special token that this vocabulary cannot spell.
        """
        if not parse_special:
            return self._encoder.encode(self._split(text, self.added_spellings), add_special)
        if isinstance(self._encoder, LibraryEncoder):
            return self._encoder.parse(check_utf8(text), add_special)
        return self._encoder.encode(self._split(text, self._added), add_special)

    def spelled(self, text: str) -> str:
        """The first spelling of a special token in a text; "" if there is none."""
        found = (match[0] for match in self._raw.finditer(text))
        return next((spelling for spelling in found if spelling in self.special_spellings), "")

    def encode_rendered(self, spans: Iterable[tuple[str, bool]]) -> list[int]:
        """Encode the result of `ChatTemplate.render` without adding tokens: the template writes BOS.

        Args:
            spans: (text, is_control); with is_control, spellings of added tokens are these tokens.

        Raises:
            UsageError: as `encode`.
        """
        parts = (part for text, control in spans for part in self._split(text, self._added if control else ()))
        return self._encoder.encode(parts, False)

    def _split(self, text: str, tokens: Collection[str]) -> Iterator[str | int]:
        """Text between added tokens, and the ids of those in `tokens`."""
        check_utf8(text)
        start = 0
        for found in self._raw.finditer(text) if tokens else ():
            if found[0] in tokens:
                yield text[start : found.start()]
                yield self._added[found[0]]
                start = found.end()
        yield text[start:]

    @functools.cached_property
    def thought_ids(self) -> tuple[list[int], ...]:
        """The tokens that end a prompt which opens a thought, and those before an answer; () without thoughts."""
        return tuple(self.encode_rendered([(tag, True)]) for tag in self._tags)

    @functools.cached_property
    def longest(self) -> int:
        """The most characters that one token stands for; a token for text that the vocabulary cannot spell may stand
        for more."""
        return max(len(piece) for piece in self._encoder.pieces if piece is not None)

    @functools.cached_property
    def fingerprint(self) -> str:
        """64 hexadecimal digits, equal for tokenizers whose ids all mean the same."""
        return hashlib.sha256(json.dumps([*self._encoder.pieces]).encode()).hexdigest()

    def difference(self, other: "Tokenizer") -> str:
        """Where two tokenizers disagree on what an id means; empty if they do not."""
        mine, its = self._encoder.pieces, other._encoder.pieces
        for i in range(max(len(mine), len(its))):
            a, b = (pieces[i] if i < len(pieces) else None for pieces in (mine, its))
            if a != b:
                return f"token {i} is {a!r} in one, {b!r} in the other"
        return ""

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids` alone. Ids past `size` have no text; incomplete UTF-8 becomes U+FFFD.

        Equals the library's decode, but keeps the tags around a thought and the marks of tool calls if they are
        special tokens. `clean_up_tokenization_spaces` has no effect on BPE, as in transformers 5.
        """
        return self._encoder.decode(list(self._pieces(ids, skip_special)))

    def _pieces(self, ids: Iterable[int], skip_special: bool = True) -> Iterator[str]:
        for i in ids:
            piece = self._encoder.pieces[i] if 0 <= i < self.size else None
            if piece is not None and not (skip_special and i in self.skipped_ids):
                yield piece

    def data(self) -> list[bytes]:
        """The bytes that each id stands for in the middle of a text; none for special tokens and ids without a piece.

        Raises:
            UsageError: they depend on the other ids, as in a vocabulary of words.
        """
        stages, found = [make() for make in self._encoder.stages], []
        for i, piece in enumerate(self._encoder.pieces):
            data = b"" if piece is None or i in self.special_ids else data_of(stages, piece)
            if data is None:
                raise UsageError("this tokenizer has no bytes for each token")
            found.append(data)
        return found

    def stream(self, prefix_ids: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for the tokens that follow `prefix_ids`: its texts are `decode_continuation`, special tokens
        skipped (without a prefix: `decode(ids)`)."""
        return Detokenizer(self._encoder.stages, self._pieces, prefix_ids)

    def decode_continuation(self, prefix_ids: Sequence[int], ids: Sequence[int]) -> str:
        """The text that `ids` add to the text of `prefix_ids`: transformers' decode(all)[len(decode(prefix)):].

        Where the prefix ends inside a character, that slice would lose text; here the completed character is part of
        the continuation.
        """
        before, text = self.decode(prefix_ids), self.decode([*prefix_ids, *ids])
        if text.startswith(before):
            return text[len(before) :]
        return text[len(self.stream().push(prefix_ids)) :]


@contextlib.contextmanager
def _malformed(where: str) -> Iterator[None]:
    """Context that turns any error caused by a malformed file into a CheckpointError."""
    try:
        yield
    except (CheckpointError, UsageError) as error:
        raise type(error)(error.what, where=error.where or where, remedy=error.remedy) from None
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the tokenizers library panics with a BaseException
        raise CheckpointError(f"the tokenizer is malformed: {error}"[:500], where=where) from None


class Pieces(Sequence[str | None]):
    """The spelling of each id, None for ids without a spelling: an eighth of the memory of a list of strings.

    Args:
        pieces: the spellings by id.
    """

    def __init__(self, pieces: Iterable[str | None]):
        given = [*pieces]
        self._holes = frozenset(i for i, piece in enumerate(given) if piece is None)
        joined = "\0".join("" if piece is None else piece for piece in given)
        if joined.count("\0") == len(given) - 1:  # hundreds of thousands in a few calls
            spelled = joined.encode("utf-8", "surrogatepass").split(b"\0")
        else:
            spelled = [b"" if piece is None else piece.encode("utf-8", "surrogatepass") for piece in given]
        self._text = b"".join(spelled)
        self._ends = array("Q", accumulate(map(len, spelled), initial=0))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, i: int) -> str | None:  # type: ignore[override]  # no slices
        i = range(len(self))[i]
        text = self._text[self._ends[i] : self._ends[i + 1]]
        return None if i in self._holes else text.decode("utf-8", "surrogatepass")


def encoder_of(
    vocabulary: FileVocabulary,
) -> tuple[LibraryEncoder | SentencePieceEncoder, dict[str, Any], dict[str, str]]:
    """The arguments of a `Tokenizer`. Raises CheckpointError if its kind is not supported."""
    config, path = vocabulary.config(), vocabulary.file.path
    if vocabulary.has_scores:
        encoder = SentencePieceEncoder(vocabulary.model(), path, config, vocabulary.pieces)
        return encoder, config, encoder.names
    spec = vocabulary.tokenizer()
    guard = tokenizer_limits.guard(spec, str(path))
    model, added = spec["model"], spec["added_tokens"]
    bare = spec | {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
    library = tokenizers.Tokenizer.from_str(json.dumps(bare))
    options = {name: value for name, value in model.items() if name not in ("type", "vocab", "merges") and value}
    try:
        library.model = models.BPE(model["vocab"], model["merges"], **options)  # JSON would take twice as long
    except Exception:  # a merge does not fit
        if not vocabulary.has_merges:
            raise
        library.model = models.BPE(model["vocab"], vocabulary.checked_merges(), **options)
    flags = {token["id"]: {k: v for k, v in token.items() if k not in ("id", "content")} for token in added}
    in_order = sorted(added, key=lambda token: token["id"])
    library.add_tokens([AddedToken(token["content"], **flags[token["id"]]) for token in in_order])
    names = named_tokens(config)
    return LibraryEncoder(library, config, names, guard, str(path), model["vocab"]), config, names

"""Encoding by the tokenizers library: tokenizer.json, vocab.json with merges.txt, tokens by rank."""

import functools
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers

from engine.errors import CheckpointError, UsageError
from engine.text.detokenizer import CLEANED, CleanUp, run, stages_of
from engine.text.tokenizer_files import MAX_IDS, add_flags, any_of, flag
from engine.text.tokenizer_limits import EncodingGuard, check_output, library_errors, state_of

LONG = 1 << 13  # characters; longer texts are encoded by a function that lets other threads of Python run meanwhile
# The normalizers that spell spaces as SentencePiece does: one before the text, then all spaces.
SPACES = [
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
]


class LibraryEncoder:
    """A tokenizer of the tokenizers library that distinguishes a control token from its spelling in a text.

    The library matches every added token in every text, or is set to ignore all special ones; it cannot match one place
    and ignore another in one call, and encoding parts separately changes their ids (prefix spaces, merges). So it is
    set to ignore special tokens, and each token gets an alias: a second spelling that no text can contain, because it
    has a random number in it. A control token is written as its alias. The whole text is then encoded once.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        config: dict[str, Any],
        names: dict[str, str],
        guard: EncodingGuard | None = None,
        where: str = "",
        vocab: dict[str, int] | None = None,
    ):
        """
        Args:
            library: the tokenizer; it is changed.
            config: tokenizer_config.json.
            names: the named special tokens.
            guard: tries every text, if the library's patterns are not known to be harmless.
            where: the file, for errors.
            vocab: the library's tokens and their ids, if they are known; None: ask the library.

        Raises:
            CheckpointError: the vocabulary is malformed, or the tokenizer breaks a limit.
        """
        library.no_padding()
        library.no_truncation()
        self.vocab = vocab = dict(vocab) if vocab is not None else library.get_vocab(with_added_tokens=True)
        size = max(vocab.values(), default=-1) + 1
        if not 0 < size <= MAX_IDS:
            raise CheckpointError(f"vocabulary mismatch: ids up to {size - 1}, expected 1 to {MAX_IDS} tokens")
        self.pieces: list[str | None] = [None] * size
        for piece, i in vocab.items():
            self.pieces[i] = piece
        check_output(library, self.pieces)
        self._normalizer = library.normalizer
        self._add_tokens(library, config, names, guard)
        special = [content for content, token in self.raw.items() if token.special]
        self._bare = ""
        normalizer = state_of(library.normalizer) or {}
        if normalizer.get("normalizers") == SPACES and any(self.raw[content].normalized for content in special):
            # Such tokens match text that has its prefix already, so no prefix follows them. Aliases match before that:
            # the library puts a prefix after each, and this mark removes it again.
            self._bare = f"\ufdd0{secrets.token_hex(8)}-\ufdd1"
            whole = [library.normalizer, normalizers.Replace("▁" + self._bare, "")]
            library.normalizer = normalizers.Sequence(whole)  # type: ignore[assignment]
        self._special = any_of(special)
        self._add_aliases(library, size)

        self._library, self._guard = library, guard
        self._where = where
        if guard:
            guard.add(library.get_added_tokens_decoder().values())
        unknown = self._encode("\ufdd0").ids  # <unk> is special, and ordinary text needs it
        self._control_ids = {vocab[c] for c in special} - {*unknown, vocab.get(names.get("unk_token", ""))}
        self._decoder = library.decoder
        # Not for BPE, as in transformers 5.
        cleans = not isinstance(library.model, models.BPE) and flag(config, "clean_up_tokenization_spaces", False)
        self._cleaned = [functools.partial(CleanUp, old, new) for old, new in CLEANED.items()] if cleans else []
        self.stages = [*stages_of(self._decoder), *self._cleaned]
        if any(not 0 <= i < size for i in self.encode([""], True)):
            raise CheckpointError("vocabulary mismatch: the post-processor adds an id that the vocabulary lacks")

    def _add_tokens(
        self, library: tokenizers.Tokenizer, config: dict[str, Any], names: dict[str, str], guard: EncodingGuard | None
    ) -> None:
        """Add the tokens of the configuration; `raw` are those that the library matches before normalisation."""
        vocab = self.vocab
        own = {token.content: token for token in library.get_added_tokens_decoder().values()}
        added = add_flags(own, vocab, config, names)
        if guard:
            guard.probe(content for content, token in added.items() if token.normalized)
        for content, token in added.items():
            # From tokenizers 0.23 on, the library decodes a token that it matches in normalised text as that spelling.
            self.pieces[vocab[content]] = library.id_to_token(vocab[content]) if token.normalized else content
        self._tokens = {vocab[content]: token for content, token in added.items()}
        # An option of the library ignores special tokens. Before normalisation the library must match aliases
        # alone, so all tokens that match there are made special. The others are no control tokens.
        for hidden, add in ((True, library.add_special_tokens), (False, library.add_tokens)):
            # In one call, because each call builds the search for all tokens again, and some models have thousands.
            kept = [token for token in added.values() if (token.special or not token.normalized) is hidden]
            add([AddedToken(t.content, special=hidden, normalized=not hidden, **_flags(t)) for t in kept])
        library.encode_special_tokens = True
        self.raw = {content: token for content, token in added.items() if token.special or not token.normalized}
        self.added = frozenset(added)

    def _add_aliases(self, library: tokenizers.Tokenizer, size: int) -> None:
        """Give every raw token an alias. Raises CheckpointError: an alias has the id of another token."""
        vocab, nonce = self.vocab, secrets.token_hex(8)
        self._alias = {vocab[content]: f"\ufdd0{nonce}:{k}\ufdd1" for k, content in enumerate(self.raw)}
        self._break = f"\ufdd0{nonce}\ufdd1"  # a token without meaning, which splits the text around it
        # The library numbers new tokens from its count of tokens: in a vocabulary with holes that is an id in use.
        holes = size - library.get_vocab_size(with_added_tokens=True)
        library.add_tokens([AddedToken(f"\ufdd0{nonce}-{k}\ufdd1", normalized=False) for k in range(holes)])
        library.add_tokens([AddedToken(self._break, normalized=False)])
        aliases = ((self._alias[vocab[content]], _flags(token)) for content, token in self.raw.items())
        library.add_tokens([AddedToken(alias, special=False, normalized=False, **flags) for alias, flags in aliases])
        number = library.token_to_id  # for a few tokens: reading the whole vocabulary takes a second
        meaning = {number(alias): i for i, alias in self._alias.items()} | {number(self._break): -1}
        self._meaning = {i: token for i, token in meaning.items() if i is not None and i >= size}
        if len(self._meaning) < len(self._alias) + 1:
            raise CheckpointError("vocabulary mismatch: two tokens share an id")

    def encode(self, parts: Iterable[str | int], add_special: bool) -> list[int]:
        """Ids of plain text and, between, ids of `raw` tokens; see `Tokenizer.encode`."""
        text = self._joined(parts)
        encoding = self._encode(text)
        if not self._control_ids.isdisjoint(encoding.ids):
            # The model has the special token as a piece, as Unigram models do: split its spellings in two.
            text = self._special.sub(lambda found: found[0][0] + self._break + found[0][1:], text)
            encoding = self._encode(text)
            if bad := self._control_ids.intersection(encoding.ids):
                raise unspeakable(self.pieces[min(bad)])
        if add_special:
            with library_errors("the tokenizer cannot encode this text", self._where):
                encoding = self._library.post_process(encoding, add_special_tokens=True)
        return [i for i in (self._meaning.get(i, i) for i in encoding.ids) if i >= 0]

    def _joined(self, parts: Iterable[str | int]) -> str:
        """The parts as a text with aliases for tokens."""
        text, bare = "", ""
        for part in parts:
            if isinstance(part, int):
                text, bare = text + self._alias[part], self._bare if self._tokens[part].normalized else ""
            elif part:
                text, bare = text + bare + part, ""
        return text

    def parse(self, text: str, add_special: bool) -> list[int]:
        """Ids of a text in which the spelling of every added token is the token, as the library finds them."""
        library, meaning = self._parser
        if self._guard:
            self._guard.check(text)
        with library_errors("the tokenizer cannot encode this text", self._where):
            ids = _encoded(library, text, add_special).ids
        return [meaning.get(i, i) for i in ids]

    @functools.cached_property
    def _parser(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A tokenizer that shares the model, with the added tokens as the checkpoint has them; and, for these tokens,
        its ids -> the checkpoint's."""
        parser = tokenizers.Tokenizer(self._library.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if (value := self._normalizer if part == "normalizer" else getattr(self._library, part)) is not None:
                setattr(parser, part, value)
        holes = len(self.pieces) - parser.get_vocab_size()  # see `_add_aliases`
        parser.add_tokens([AddedToken(f"\ufdd0{secrets.token_hex(8)}\ufdd1", normalized=False) for _ in range(holes)])
        parser.add_tokens([*self._tokens.values()])
        numbers = {parser.token_to_id(token.content): i for i, token in self._tokens.items()}
        return parser, {number: i for number, i in numbers.items() if number is not None}

    def decode(self, pieces: Sequence[str]) -> str:
        """The text of pieces."""
        with library_errors("the tokenizer cannot decode these tokens", self._where):
            text = " ".join(pieces) if self._decoder is None else self._decoder.decode(pieces)
        return run(self._cleaned, [text])

    def _encode(self, text: str) -> tokenizers.Encoding:
        if self._guard:
            self._guard.check(text)
        with library_errors("the tokenizer cannot encode this text", self._where):
            return _encoded(self._library, text)


def _encoded(library: tokenizers.Tokenizer, text: str, add_special: bool = False) -> tokenizers.Encoding:
    if len(text) > LONG:
        return library.encode_batch_fast([text], add_special_tokens=add_special)[0]
    return library.encode(text, add_special_tokens=add_special)


def unspeakable(piece: str | None) -> UsageError:
    """The error for a control token's spelling that the vocabulary cannot encode as other pieces."""
    return UsageError(f"the text has {piece!r} in it, which this tokenizer cannot spell as plain text")


def _flags(token: AddedToken) -> dict[str, bool]:
    return {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}

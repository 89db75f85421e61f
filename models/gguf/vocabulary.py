"""The tokenizer of a GGUF file as the files of a checkpoint, and the tokens that end a text.

GGUF names the pattern that splits a text before its bytes are merged ("pre"); the patterns here are those of the
corresponding tokenizer.json files. A SentencePiece model has all pieces and scores in the file, so it becomes a
tokenizer.model again, because deriving merges would take seconds. Some converters wrote the order of pieces instead of
scores, or merges: such files become a tokenizer.json.
"""

import functools
import itertools
import operator
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from models.errors import nearest
from models.gguf.reader import GGUF

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = [rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{times}" for times in (rf"*{_LOWER}+", rf"+{_LOWER}*")]
_SLASH = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
LLAMA3 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_REST}"
BAILING = QWEN2.replace(r"\s*[\r\n]+", r"\s*[\r\n]")
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
TEKKEN = "|".join([*_CASES, r"\p{N}", _SLASH])
GPT4O = "|".join([*(f"{case}{_ENDINGS}?" for case in _CASES), r"\p{N}{1,3}", _SLASH])
DEEPSEEK3 = (  # applied one after the other
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DEEPSEEK_CODER = r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"
_DEEPSEEK_LETTERS = (  # letters of the alphabets that the pattern covers
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    "ὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-"
    "ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}",
)
SEED = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
MINICPM5 = r"\p{N}{1,3}", rf"{_ENDINGS}|{_LETTERS}|\p{{N}}+|{_REST}"
BLOOM = " ?[^(\\s|[.,!?…。，、।۔،])]+"
AFMOE = (  # digits in threes, counted from the end
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    "[一-鿿㐀-䶿豈-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-\u2fdf\u0e40-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+",
    DEEPSEEK3[2],
)
TINY_AYA = r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O
SUPERBPE = r"\p{N}+", r"(?=(\d{3})+(?!\d))"
YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    "|".join([*(f"{case}{_ENDINGS}?" for case in _CASES), r"\p{N}", _SLASH]),
)
_TO_512 = "|".join(rf"\s{{{2**k}}}(?!\S)" for k in range(9, 1, -1))
JAIS2 = LLAMA3.replace(r"\s+(?!\S)|\s+", rf"{_TO_512}|\s{{1,2}}(?!\S)|\s{{1}}")
EXAONE_MOE = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_NOT_HAN = [case.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]") for case in _CASES]
KIMI_K2 = "|".join([r"[\p{Han}]+", *(f"{case}{_ENDINGS}?" for case in _NOT_HAN), r"\p{N}{1,3}", _REST])
# Built into the library: the second makes every digit a word, the third cuts punctuation, and digits in threes.
GPT2, DIGITS, FALCON = "gpt-2", "digits", "falcon"
# By tokenizer.ggml.pre. The first name of each family is the one that convert_hf_to_gguf writes for that tokenizer.
SPLITS: dict[str, str | tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion", "granite-docling"), GPT2),
    **dict.fromkeys(("a.x-4.0", "mellum", "gigachat"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), DIGITS),
    "mellum2": DIGITS,
    "laguna": (r"[^\n]+|[\n]+", QWEN2),
    "falcon": FALCON,
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), BLOOM),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), LLAMA3),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "hunyuan"), QWEN2),
    **dict.fromkeys(("solar-open", "grok-2"), QWEN2),
    **dict.fromkeys(("hunyuan-dense", "deepseek-v3", "joyai-llm", "hy_v4"), DEEPSEEK3),
    **dict.fromkeys(("bailingmoe2", "bailingmoe", "llada-moe"), BAILING),
    "qwen35": QWEN35,
    "deepseek-coder": DEEPSEEK_CODER,
    "deepseek-llm": DEEPSEEK_LLM,
    "seed-coder": SEED,
    "minicpm5": MINICPM5,
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"), GPT4O),
    "afmoe": AFMOE,
    **dict.fromkeys(("tiny_aya", "cohere2moe"), TINY_AYA),
    "superbpe": SUPERBPE,
    "youtu": YOUTU,
    "jais-2": JAIS2,
    "exaone-moe": EXAONE_MOE,
    "kimi-k2": KIMI_K2,
    "viking": (BLOOM, r"\p{N}"),
    "ufakzeka": QWEN2.removeprefix(f"{_ENDINGS}|"),
}
# By architecture, if a file does not say it; for others GPT-2's, as in transformers 5.
UNNAMED = {name: name for name in ("qwen2", "falcon", "bloom", "starcoder", "command-r")}
UNNAMED |= {"qwen2moe": "qwen2", "starcoder2": "starcoder"}
WHOLE_WORDS = {name for name, split in SPLITS.items() if split is LLAMA3} - {"dbrx", "smaug-bpe", "chatglm-bpe"}
WHOLE_WORDS |= {"tekken", "minicpm5", "youtu"}  # a word that is a token is not merged from its bytes
BEGIN = WHOLE_WORDS - {"glm4", "minicpm5", "youtu"}  # a text begins with BOS, unless the file says otherwise
COMPOSED = {"qwen2", "qwen35"}  # their tokenizer.json composes characters (NFC)
# Tokens that end a turn even if the file names others or none: llama.cpp finds them by their spelling as well.
ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",  # of Gemma 4, an ordinary token in files
    "<|role_end|>",  # of Ling 2
)
CHANNELS = "<|channel|>"  # gpt-oss: a text has several messages, which <|end|> ends, and other tokens end the text
CHANNEL_ENDS = "<|return|>", "<|call|>", "<|endoftext|>"
PART_ENDS = "<|flush|>", "<|calls|>"  # of Solar Open, where <|end|> ends the parts of a text
SPACE = "▁"
NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # transformers' words and GGUF's


class ModelPieces(NamedTuple):
    """The pieces of a SentencePiece model by id, and the type of each."""

    names: list[str]
    kinds: list[int]


class FileVocabulary:
    """The tokens of a file.

    Args:
        file: it has a tokenizer.
        kind: "llama" (SentencePiece), "gemma4" (the same with merges) or "gpt2" (byte-level BPE).

    Raises:
        CheckpointError: the vocabulary is malformed, or its kind is not supported.
    """

    def __init__(self, file: GGUF, kind: str):
        self.file, self.keys, self.kind = file, file.fields("tokenizer.ggml."), kind
        self.tokens: list[str] = self._list("tokens", str, each=False)
        if not self.tokens:
            raise self.keys.error("tokens", "a list")
        self.types: list[int] = self._list("token_type", int) or [NORMAL] * len(self.tokens)
        defaults = {"bos": 1, "eos": 2, "unk": 0} if kind == "llama" else {}
        self.ids = {name: self._id(f"{key}_token_id", defaults.get(name)) for name, key in NAMED.items()}
        for name in ("unk", "pad"):  # another tokenizer's leftover id would remove an ordinary token from texts
            i = self.ids[name]
            if "token_type" in self.keys.config and i is not None and self.types[i] == NORMAL:
                self.ids[name] = None

    @functools.cached_property
    def vocab(self) -> dict[str, int]:
        """The first id of each token; padding, embedding rows without a token, is left out."""
        first = min(self._padding, default=len(self.tokens))
        if first + len(self._padding) == len(self.tokens):  # usual: padding comes last, and no token occurs twice
            vocab = dict(zip(self.tokens[:first], range(first), strict=True))
            if len(vocab) == first:
                return vocab
        vocab = dict(zip(reversed(self.tokens), range(len(self.tokens) - 1, -1, -1), strict=True))
        for i in self._padding:
            if vocab.get(self.tokens[i]) == i:
                del vocab[self.tokens[i]]
        return dict(sorted(vocab.items(), key=lambda item: item[1])) if len(vocab) < len(self.tokens) else vocab

    @functools.cached_property
    def _padding(self) -> set[int]:
        if UNUSED not in self.types:
            return set()
        return {i for i, kind in enumerate(self.types) if kind == UNUSED and self.tokens[i].startswith("[PAD")}

    def ends(self) -> list[int]:
        """Return the tokens that end a text."""
        named = [self.ids["eos"], self._id("eot_token_id"), self._id("eom_token_id")]
        ends = CHANNEL_ENDS if CHANNELS in self.vocab else ENDS
        spelled = [self.vocab.get(token) for token in (PART_ENDS if {*PART_ENDS} <= self.vocab.keys() else ends)]
        found = [i for i in named if i is not None]
        return list(dict.fromkeys(found + [i for i in spelled if i is not None and self.types[i] in (CONTROL, USER)]))

    @functools.cached_property
    def has_scores(self) -> bool:
        """Whether it is a complete SentencePiece model."""
        if self.kind != "llama" or self.has_merges:
            return False
        scores = [score for score, kind in zip(self.scores, self.types, strict=False) if kind == NORMAL]
        return len({*scores}) == len(scores) > 0

    @property
    def has_merges(self) -> bool:
        """Whether the file has merges; llama.cpp saves an empty list where there are none."""
        return self.keys.config.get("merges", []) != []

    @functools.cached_property
    def scores(self) -> list[float]:
        """The scores of the tokens; empty if there are none."""
        return self._list("scores", float)

    def config(self) -> dict[str, Any]:
        """Return the content of tokenizer_config.json."""
        keys = self.file.fields("tokenizer.")
        context = self.file.fields(f"{self.file.fields().str('general.architecture')}.").int("context_length", 2**20)
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
        config |= {f"{name}_token": self.tokens[i] for name, i in self.ids.items() if i is not None}
        if self.has_scores:
            config["tokenizer_class"] = "LlamaTokenizer"
            config |= {f"add_{name}_token": self._adds(name, name == "bos") is not None for name in ("bos", "eos")}
            # As in tokenizer.json files of these models, each part of a text begins with a space.
            config |= {"add_prefix_space": self.keys.bool("add_space_prefix", default=True), "legacy": True}
            config["added_tokens_decoder"] = {
                str(token.pop("id")): token for token in self.added() if token["special"] or token["rstrip"]
            }
        template, named = keys.str("chat_template", None), keys.config.get("chat_templates") or []
        if named and template:
            more = [{"name": name, "template": keys.str(f"chat_template.{name}")} for name in named]
            config["chat_template"] = [{"name": "default", "template": template}, *more]
        elif template:
            config["chat_template"] = template
        return config

    def model(self) -> bytes:
        """Return tokenizer.model for a vocabulary that `has_scores`: a message of protocol buffers.

        Raises:
            CheckpointError: the vocabulary has something that sentencepiece cannot express.
        """
        if self.keys.bool("remove_extra_whitespaces", default=False):
            raise self.keys.error("remove_extra_whitespaces", "false")
        texts = [piece.encode() for piece in self.pieces.names]
        # A piece is a message: its text, a float, its type. Hundreds of thousands are joined without a loop.
        count, heads = len(texts), {size: _piece_head(size) for size in {*map(len, texts)}}
        scores = struct.iter_unpack("4s", struct.pack(f"<{count}f", *self.scores[:count]))
        kinds = {kind: b"\x18" + _varint(kind) for kind in {*self.pieces.kinds}}
        parts = zip(
            (heads[len(text)] for text in texts),
            texts,
            itertools.repeat(b"\x15"),
            map(operator.itemgetter(0), scores),
            map(kinds.__getitem__, self.pieces.kinds),
            strict=False,
        )
        pieces = b"".join(itertools.chain.from_iterable(parts))
        named = [(name, self.ids[name]) for name in ("unk", "bos", "eos", "pad")]
        trainer = b"\x18\x02" + _varint(35 << 3) + bytes([BYTE in self.types])  # the kind is BPE; byte fallback
        for number, (_, i) in enumerate(named):
            trainer += _varint(40 + number << 3) + _varint(-1 if i is None else i)
            trainer += b"" if i is None else _field(45 + number, self.tokens[i].encode())
        spaced = self.keys.bool("add_space_prefix", default=True)
        normalizer = bytes((0x18, spaced, 0x20, 0, 0x28, 1))  # a space before the text; none removed; written as marks
        return b"".join([pieces, _field(2, trainer), _field(3, normalizer)])

    @functools.cached_property
    def pieces(self) -> ModelPieces:
        """Pieces of that model by id, and their types; pieces are unique and not empty."""
        count = next((i + 1 for i in reversed(range(len(self.tokens))) if i not in self._padding), 0)
        names, kinds = self.tokens[:count], self.types[:count]
        for i in itertools.compress(range(count), map(USER.__eq__, kinds)):
            names[i] = names[i].replace(" ", SPACE)
        if len(seen := {*names}) < count or "" in seen or not all(NORMAL <= kind <= BYTE for kind in {*kinds}):
            seen = set()
            for i, (piece, kind) in enumerate(zip(names, kinds, strict=True)):
                if not piece or piece in seen or not NORMAL <= kind <= BYTE:
                    names[i], kinds[i] = f"[UNUSED {i}]", UNUSED
                seen.add(names[i])
        return ModelPieces(names, kinds)

    def tokenizer(self) -> dict[str, Any]:
        """Return the content of tokenizer.json. Raises CheckpointError if the vocabulary is not supported."""
        parts = self._bytes() if self.kind == "gpt2" else self._sentencepiece()
        ends = [self._adds("bos", parts.pop("begins")), self._adds("eos", False)]
        first, last = ([] if i is None else [{"SpecialToken": {"id": self.tokens[i], "type_id": 0}}] for i in ends)
        special = {t: {"id": t, "ids": [i], "tokens": [t]} for i in ends if i is not None for t in [self.tokens[i]]}
        one, two = ({"Sequence": {"id": text, "type_id": 0}} for text in "AB")
        single = [*first, one, *last]
        template = {"type": "TemplateProcessing", "single": single, "pair": [*single, two], "special_tokens": special}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": list(self.added()),
            **parts,
            "post_processor": template if special else None,
        }

    def added(self) -> Iterator[dict[str, Any]]:
        """Yield the tokens that are found in a text before it is split."""
        phi3 = self.kind == "llama" and self.file.fields().str("general.architecture") == "phi3"
        named = {i for i in self.ids.values() if i is not None}
        for token, i in self.vocab.items():
            kind = self.types[i]
            if kind in (CONTROL, UNKNOWN, USER) or i in named:
                # Phi-3's own tokenizer.json removes the spaces after these tokens.
                strip = phi3 and token not in ("<unk>", "<s>", "<|endoftext|>") and (kind == CONTROL or token == "</s>")
                flags = {"single_word": False, "lstrip": False, "rstrip": strip, "normalized": False}
                yield {"id": i, "content": token, **flags, "special": kind != USER or i in named}

    def _sentencepiece(self) -> dict[str, Any]:
        """Return a SentencePiece BPE model as transformers writes it: a space before the text, and byte fallback."""
        if self.keys.bool("remove_extra_whitespaces", default=False):
            raise self.keys.error("remove_extra_whitespaces", "false")
        spaced = self.keys.bool("add_space_prefix", default=True)
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        prepend = [{"type": "Prepend", "prepend": "▁"}] if spaced else []
        decoders = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]
        decoders += [{"type": "Fuse"}, *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if spaced else [])]
        unknown = self.ids["unk"]
        return {
            "begins": True,
            "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self._bpe(
                self._merges() if self.has_merges else self._derived(),
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=BYTE in self.types,
            ),
        }

    def _bytes(self) -> dict[str, Any]:
        pre = self.keys.str("pre", None)
        if pre in (None, "default"):  # written by converters before the key existed
            usual = UNNAMED.get(self.file.fields().str("general.architecture"), GPT2)
            pre = "llama-bpe" if "<|begin_of_text|>" in self.vocab else usual
        if pre not in SPLITS:
            what = f"tokenizer.ggml.pre: {str(pre)[:80]!r} is a pre-tokenizer that is not supported"
            raise self.file.error(what, nearest(str(pre), SPLITS, "models/gguf/vocabulary.py lists them"))
        split, levels = SPLITS[pre], {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        if split == GPT2:
            splitter = {**levels, "use_regex": True}
        else:
            isolated = {"type": "Split", "behavior": "Isolated", "invert": False}
            patterns = [split] if isinstance(split, str) else split
            first = [isolated | {"pattern": {"Regex": pattern}} for pattern in patterns]
            if split == DIGITS:
                first = [{"type": "Digits", "individual_digits": True}]
            words = [*first, {**levels, "use_regex": split == DIGITS}]
            if split == FALCON:
                digits = {"type": "Digits", "individual_digits": False}
                threes = isolated | {"pattern": {"Regex": "[0-9][0-9][0-9]"}}
                signs = {"type": "Punctuation", "behavior": "Contiguous"}
                words = [signs, {**levels, "use_regex": True}, digits, threes]
            splitter = {"type": "Sequence", "pretokenizers": words}
        return {
            "begins": pre in BEGIN,
            "normalizer": {"type": "NFC"} if pre in COMPOSED else None,
            "pre_tokenizer": splitter,
            "decoder": {**levels, "add_prefix_space": True, "use_regex": True},
            "model": self._bpe(self._merges(), ignore_merges=pre in WHOLE_WORDS),
        }

    def _bpe(self, merges: Sequence[Sequence[str]], **options: Any) -> dict[str, Any]:
        usual = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
        usual |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
        return {"type": "BPE", **usual, **options, "vocab": self.vocab, "merges": merges}

    def _merges(self) -> list[tuple[str, str]]:
        """Return the file's merges."""
        merges = self._list("merges", str, each=False)
        # The tokenizers library checks them again: `checked_merges` is for merges that it refuses.
        return [(left, right) for left, _, right in [merge.partition(" ") for merge in merges]]

    def checked_merges(self) -> list[tuple[str, str]]:
        """Return the file's merges, split carefully. Raises CheckpointError for the first that does not fit the
        vocabulary."""
        merges, vocab = self._list("merges", str, each=False), self.vocab
        cuts = [merge.find(" ", 1) for merge in merges]
        pairs = [(merge[:at], merge[at + 1 :]) for merge, at in zip(merges, cuts, strict=True)]
        parts = {part for pair in pairs for part in pair}
        if min(cuts, default=0) < 0 or parts - vocab.keys() or not all(map(vocab.__contains__, map("".join, pairs))):
            fits = (at >= 0 and {*pair, "".join(pair)} <= vocab.keys() for at, pair in zip(cuts, pairs, strict=True))
            wrong = next(merge for merge, fit in zip(merges, fits, strict=True) if not fit)
            raise self.file.error(f"tokenizer.ggml.merges: {wrong[:80]!r} does not fit the vocabulary")
        return pairs

    def _derived(self) -> list[tuple[str, str]]:
        """Derive merges equivalent to a SentencePiece model: neighbours whose union has the highest score are first."""
        if not self.scores:
            raise self.keys.error("scores", "a number for each token")
        pieces = {token: i for token, i in self.vocab.items() if self.types[i] == NORMAL}
        ranked = sorted(pieces, key=lambda piece: (-self.scores[pieces[piece]], pieces[piece]))
        return [(ranked[left], ranked[right]) for left, right in cuts(ranked)]

    def _adds(self, name: str, default: bool) -> int | None:
        """Return the token that every text begins or ends with; None if there is none."""
        return self.ids[name] if self.keys.bool(f"add_{name}_token", default=default) else None

    def _id(self, key: str, default: int | None = None) -> int | None:
        """Read a special token. As in llama.cpp, an id past the vocabulary is ignored."""
        found = self.keys.int(key, default, low=0, high=2**32)
        return found if found is not None and found < len(self.tokens) else None

    def _list(self, key: str, kind: type, *, each: bool = True) -> list[Any]:
        """Read a list; `each`: it is empty, or has an entry for each token."""
        value = self.keys.config.get(key, [])
        if not isinstance(value, list) or {*map(type, value)} - {kind}:
            raise self.file.error(f"tokenizer.ggml.{key}: expected a list of {kind.__name__}")
        if each and len(value) not in (0, len(self.tokens)):
            raise self.file.error(f"tokenizer.ggml.{key}: expected {len(self.tokens)} entries, got {len(value)}")
        return value


def cuts(ranked: Sequence[str] | Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Yield merges that equal ranks: of all neighbours, those are merged first whose union comes first in `ranked`.

    These are all pairs of pieces into which a piece can be cut, in any order: when its turn comes, its characters have
    always become the same two pieces, because nothing outside has had a part in their merges.

    Args:
        ranked: different pieces by rank.

    Returns:
        the two parts of each merge, as indices.
    """
    known = {piece: i for i, piece in enumerate(ranked)}.get
    for piece in ranked:
        for cut in range(1, len(piece)):
            if (left := known(piece[:cut])) is not None and (right := known(piece[cut:])) is not None:
                yield left, right


def _piece_head(size: int) -> bytes:
    """Return the beginning of a piece's message, before a text of `size` bytes; see `FileVocabulary.model`."""
    text = b"\n" + _varint(size)
    return b"\n" + _varint(len(text) + size + 7) + text


def _varint(number: int) -> bytes:
    """Encode a number of a message; a negative one as 64 bits."""
    number, found = number % (1 << 64), bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes((*found, number))


def _field(number: int, content: bytes) -> bytes:
    """Encode a string or message within a message."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def kind_of(file: GGUF) -> str | None:
    """Return the kind of a file's vocabulary; None if it has none. Raises CheckpointError if it is not supported."""
    kind = file.fields("tokenizer.ggml.").str("model", "none")
    if kind in ("none", "no_vocab"):
        return None
    if kind not in ("llama", "gpt2", "gemma4"):
        what = f"tokenizer.ggml.model: tokenizers of the kind {kind[:80]!r} are not supported"
        raise file.error(what, "supported: llama and gemma4 (SentencePiece of BPE) and gpt2 (byte-level BPE)")
    return kind


def read(file: GGUF) -> FileVocabulary | None:
    """Read the vocabulary of a file; None if it has none. Raises CheckpointError if its kind is not supported."""
    kind = kind_of(file)
    return None if kind is None else FileVocabulary(file, kind)

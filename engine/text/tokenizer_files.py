"""The small files around a tokenizer: JSON, named and added tokens, GPT-2's vocab.json and merges.txt."""

import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import CheckpointError
from engine.text.detokenizer import BYTE_OF_CHAR
from models.checkpoint.files import read_regular
from models.gguf.vocabulary import QWEN2, QWEN35

MAX_TOKENIZER_BYTES = 512 << 20
MAX_CONFIG_BYTES = 16 << 20
MAX_IDS = 1 << 24
# What splits texts before merges, by `tokenizer_class` without "Fast"; None: the library's pattern, which is GPT-2's.
SPLITS = {
    "GPT2Tokenizer": None,
    "CodeGenTokenizer": None,
    "GPTNeoXTokenizer": None,
    "Qwen2Tokenizer": QWEN2,
    "Qwen3_5Tokenizer": QWEN35,
}
COMPOSED = {"GPTNeoXTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer"}  # these compose characters first (NFC)
GENERAL = {"PreTrainedTokenizer", "TokenizersBackend"}  # classes that do not say it
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_GPT2 = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_QWEN = dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")
_GEMMA = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad", "mask")}
_COHERE = {f"{name}_token": f"<{name.upper()}>" for name in ("unk", "pad", "cls", "sep")}
_COHERE |= {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "mask_token": "<MASK_TOKEN>"}
# The named tokens of transformers' classes, for names that no file has.
DEFAULTS = {
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": _LLAMA,
    "GPT2Tokenizer": _GPT2,
    "CodeGenTokenizer": _GPT2,
    "GPTNeoXTokenizer": _GPT2 | {"pad_token": "<|padding|>"},
    "Qwen2Tokenizer": _QWEN,
    "Qwen3_5Tokenizer": _QWEN,
    "GemmaTokenizer": _GEMMA,
    "CohereTokenizer": _COHERE,
}
# The class that transformers takes for a `model_type`, a pattern here, if no file names one ...
USUAL = {
    r"qwen3_5.*": "Qwen3_5Tokenizer",
    r"qwen.*": "Qwen2Tokenizer",
    r"codegen|dbrx|gpt2|gpt_neo|gptj|jais2|opt|phi|starcoder2": "GPT2Tokenizer",
    r"falcon_mamba|gpt_neox|mamba2?|mpt|olmo|olmoe": "GPTNeoXTokenizer",
    r"gemma[23]?|gemma3_text|gemma3n(_text)?": "GemmaTokenizer",
    r"aya_vision|cohere2?": "CohereTokenizer",
}
# ... and those for which it takes the general class, whatever a file names.
UNCLASSED = (
    r"ernie4_5(_moe)?|flex_olmo|glm4?|glm4_moe(_lite)?|gpt_bigcode|granite|granitemoe(hybrid|shared)?|hyperclovax|"
    r"internlm[23]|iquestcoder|jamba|kimi_linear|llava(_next)?|minicpm3|minimax_m2|ministral3?|mistral3?|mixtral|"
    r"modernbert-decoder|nemotron|olmo[23]|olmo_hybrid|persimmon|phi3|phimoe|pixtral|stablelm"
)


def read_json(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object from a file; {} if the file does not exist.

    Raises:
        CheckpointError: unreadable, too long, not JSON, not an object.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(read_file(path, limit))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the file is not valid JSON: {error}", where=str(path)) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"expected a JSON object, got {type(value).__name__}", where=str(path))
    return value


def read_file(path: Path, limit: int = MAX_TOKENIZER_BYTES) -> bytes:
    """A file's bytes. Raises CheckpointError: unreadable, longer than `limit`, a git-LFS pointer."""
    try:
        data = read_regular(path, limit)
    except OSError as error:
        raise CheckpointError(f"cannot read the file: {error.strerror}", where=str(path)) from None
    if len(data) > limit:
        raise CheckpointError(f"the file is larger than {limit} bytes", where=str(path))
    if data.startswith(b"version https://git-lfs"):
        raise CheckpointError("the file is a git-LFS pointer", where=str(path), remedy="fetch it with git lfs pull")
    return data


def read_config(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json; if it lists no added tokens, special_tokens_map.json too, as in transformers 5."""
    config = read_json(folder / "tokenizer_config.json")
    return config if "added_tokens_decoder" in config else {**config, **read_json(folder / "special_tokens_map.json")}


def named_tokens(config: dict[str, Any], **defaults: str) -> dict[str, str]:
    """Named special tokens, `{"bos_token": "<s>", ...}`, also those of an object `extra_special_tokens`; `defaults` are
    for names that the configuration leaves out, not for those that it sets to null."""
    named = {name: _content(value) for name, value in {**defaults, **config}.items() if name.endswith("_token")}
    named |= {name: _content(value) for name, value in _dict(_extra(config)).items()}
    return {name: content for name, content in named.items() if content}


def class_defaults(folder: Path, config: dict[str, Any], library: tokenizers.Tokenizer) -> dict[str, str]:
    """The named tokens of a tokenizer.json for names that no other file has: of its padding, and of the class that
    transformers takes for it."""
    kind, model = _class(folder, config)
    padding = {"pad_token": library.padding["pad_token"]} if library.padding else {}
    levels = library.pre_tokenizer, library.decoder
    if re.fullmatch(UNCLASSED, str(model.get("model_type"))) or (
        kind == "LlamaTokenizer" and "ByteLevel(" in repr(levels)
    ):
        return padding
    return padding | DEFAULTS.get(kind, {})


def flag(config: dict[str, Any], name: str, default: bool) -> bool:
    """A switch of tokenizer_config.json; null counts as absent. Raises CheckpointError."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{name}: expected true or false, got {value!r}"[:200], where="tokenizer_config.json")
    return default if value is None else value


def add_flags(
    added: dict[str, AddedToken], vocab: Iterable[str], config: dict[str, Any], names: dict[str, str]
) -> dict[str, AddedToken]:
    """Added tokens by spelling, with the flags of tokenizer_config.json. As in transformers 5, the tokens that it names
    are special, and so are those that it lists as extra ones, unless they are added already with flags of their own."""
    for entry in _dict(config.get("added_tokens_decoder")).values():
        if isinstance(entry, dict) and entry.get("content") in added:
            special = added[entry["content"]].special  # the library keeps special tokens special
            added[entry["content"]] = token = AddedToken(entry["content"], **_flags(entry))
            token.special = token.special or special
    named = [value for value in config.values() if isinstance(value, dict) and value.get("content") in names.values()]
    flags = {value["content"]: {"normalized": False, **_flags(value)} for value in named}
    for content in names.values():
        if content in added:
            added[content].special = True
    for content in [*names.values(), *sorted(_listed_extra(config))]:
        if content in vocab and content not in added:
            added[content] = AddedToken(content, **{"normalized": False, **flags.get(content, {}), "special": True})
    return added


def add_tokens(
    folder: Path, vocab: dict[str, int], config: dict[str, Any], names: dict[str, str]
) -> dict[str, AddedToken]:
    """Put the tokens of added_tokens.json and of added_tokens_decoder into `vocab`, and return them with their flags.

    An added token takes the place of a piece with the same id, as in transformers.

    Raises:
        CheckpointError: an entry is malformed, or gives a second id to a token.
    """
    added: dict[str, AddedToken] = {}
    pieces = {i: piece for piece, i in vocab.items()}
    flags, ids = _dict(config.get("added_tokens_decoder")), read_json(folder / "added_tokens.json")
    extra = _listed_extra(config)
    for content, i, file in _listed(folder, ids, flags):
        if vocab.setdefault(content, i) != i:
            what = f"vocabulary mismatch: the added token {content!r} has the ids {i} and {vocab[content]}"
            raise CheckpointError(what, where=str(file))
        if (old := pieces.get(i, content)) != content:
            vocab.pop(old, None)
            added.pop(old, None)
        pieces[i] = content
        added[content] = AddedToken(content, normalized=False, special=content in ids and content in extra)
    return add_flags(added, vocab, config, names)


def complete(
    library: tokenizers.Tokenizer,
    folder: Path,
    config: dict[str, Any],
    names: dict[str, str],
    probe: Callable[[Iterable[str]], object],
) -> None:
    """Add the tokens that other files list to the tokenizer of a tokenizer.json that lacks them, as transformers does:
    those of added_tokens_decoder or, if tokenizer_config.json has none, of added_tokens.json. `probe` tries spellings
    before the library normalizes them.

    Raises:
        CheckpointError: an entry is malformed, or the library would give a new token another id than the file.
    """
    flags = _dict(config.get("added_tokens_decoder"))
    ids = {} if "added_tokens_decoder" in config else read_json(folder / "added_tokens.json")
    extra = _listed_extra(config)
    own = {token.content for token in library.get_added_tokens_decoder().values()}
    special = {*names.values(), *(extra & ids.keys())}
    probe(ids.keys() - own - special)
    for content, i, file in sorted(_listed(folder, ids, flags), key=lambda entry: entry[1]):
        if content in own:
            continue
        known = library.token_to_id(content)
        normalized = content in ids and content not in special  # the flags of added_tokens_decoder follow
        library.add_tokens([AddedToken(content, normalized=normalized, special=content in special)])
        if known is None and (got := library.token_to_id(content)) != i:
            what = f"vocabulary mismatch: tokenizer.json lacks the token {content!r}, whose id would be {got}, not {i}"
            raise CheckpointError(what, where=str(file), remedy="get the tokenizer.json that was saved with this file")


def _listed(folder: Path, ids: dict[str, Any], flags: dict[str, Any]) -> list[tuple[str, int, Path]]:
    """Spelling, id and file of the tokens of added_tokens.json (`ids`) and added_tokens_decoder (`flags`). Raises
    CheckpointError: an entry is malformed."""
    listed: list[tuple[Any, Any, Path]] = [(content, i, folder / "added_tokens.json") for content, i in ids.items()]
    for i, entry in flags.items():
        listed.append((_content(entry), int(i) if i.isdecimal() else i, folder / "tokenizer_config.json"))
    for content, i, file in listed:
        if not content or type(i) is not int or not 0 <= i < MAX_IDS:
            what = f"added token: expected a text and an id below {MAX_IDS}, got {content!r} and {i!r}"
            raise CheckpointError(what[:300], where=str(file))
    return listed


def byte_level(folder: Path, config: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer of vocab.json and merges.txt, as transformers' class for it makes it, and its named tokens.

    tokenizer_config.json defines whether BOS and EOS are added: OPT adds BOS (`</s>`, id 2), GPT-2 does not.

    Raises:
        CheckpointError: a file is absent or malformed; the message names the line. The class is not supported.
    """
    kind = _split_class(folder, config)
    names = named_tokens(config, **DEFAULTS[kind])
    vocab = _read_vocab(folder / "vocab.json")
    merges = _read_merges(folder / "merges.txt", vocab)
    added = add_tokens(folder, vocab, config, names)
    ends = [names.get(name) if flag(config, f"add_{name}", False) else None for name in ("bos_token", "eos_token")]
    composed, prefixed = kind in COMPOSED, flag(config, "add_prefix_space", False)
    return assembled(vocab, merges, SPLITS[kind], added, ends, composed=composed, prefixed=prefixed), names


def assembled(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    pattern: str | None,
    added: Mapping[str, AddedToken],
    ends: Sequence[str | None],
    *,
    composed: bool = False,
    prefixed: bool = False,
    whole_words: bool = False,
) -> tokenizers.Tokenizer:
    """Make a tokenizer of byte-level BPE.

    Args:
        vocab: all tokens and their ids.
        merges: the merges, the first ones first.
        pattern: what splits texts before merges; None: the library's pattern, which is GPT-2's.
        added: the tokens that are found in a text before it is split.
        ends: the tokens before and after every text; None, or a token that the vocabulary lacks: no token.
        composed: characters are composed first (NFC).
        prefixed: a space is put before a text.
        whole_words: a word that is a token is not merged from its bytes.
    """
    affixes = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    library = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=whole_words, **affixes))
    if composed:
        library.normalizer = normalizers.NFC()  # type: ignore[assignment]
    levels = pre_tokenizers.ByteLevel(add_prefix_space=prefixed, use_regex=pattern is None)
    splitter = levels
    if pattern is not None:
        splitter = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), levels])
    library.pre_tokenizer = splitter  # type: ignore[assignment]
    library.decoder = decoders.ByteLevel()
    for special, add in ((True, library.add_special_tokens), (False, library.add_tokens)):
        add([token for token in added.values() if token.special is special])
    if {*ends} & vocab.keys():
        first, last = (end if end in vocab else None for end in ends)
        library.post_processor = processors.TemplateProcessing(
            single=[part for part in (first, "$A", last) if part],
            special_tokens=[(end, vocab[end]) for end in {first, last} if end],
        )
    return library


def _class(folder: Path, config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the class of the tokenizer in transformers, without "Fast", and config.json: by `model_type` for Qwen 2
    and 3.5, whose `tokenizer_class` it does not read; if no file names a class, also by `model_type`, "" if unknown."""
    model = read_json(folder / "config.json")
    kind = str(model.get("model_type"))
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    if kind == "qwen2" or kind.startswith("qwen3_5") or not named or not isinstance(named, str):
        return _usual(kind), model
    return named.removesuffix("Fast"), model


def _usual(kind: str) -> str:
    """The class that transformers takes for a `model_type`; "" if it has none for it."""
    return next((name for types, name in USUAL.items() if re.fullmatch(types, kind)), "")


def _split_class(folder: Path, config: dict[str, Any]) -> str:
    """The class of `SPLITS` that transformers takes for vocab.json and merges.txt.

    Raises:
        CheckpointError: another class, which may split texts in another way.
    """
    name, model = _class(folder, config)
    name = (_usual(str(model.get("model_type"))) or "GPT2Tokenizer") if not name or name in GENERAL else name
    if name not in SPLITS:
        what = f"tokenizer_class: vocab.json and merges.txt do not say how {name[:80]!r} splits texts"
        raise CheckpointError(what, where=str(folder), remedy="get the checkpoint's tokenizer.json")
    return name


def _read_vocab(path: Path) -> dict[str, int]:
    vocab = read_json(path, MAX_TOKENIZER_BYTES)
    seen: dict[int, str] = {}
    for piece, i in vocab.items():
        if type(i) is not int or not 0 <= i < MAX_IDS:
            raise CheckpointError(f"piece {piece!r}: expected an id below {MAX_IDS}, got {i!r}"[:300], where=str(path))
        if seen.setdefault(i, piece) != piece:
            what = f"vocabulary mismatch: {seen[i]!r} and {piece!r} share the id {i}"
            raise CheckpointError(what[:300], where=str(path))
    if absent := [char for char in BYTE_OF_CHAR if char not in vocab]:
        what = f"vocabulary mismatch: {len(absent)} of the 256 byte pieces are missing, {absent[0]!r} for one"
        remedy = "Tokenizers of words, such as those of GPT, CTRL and BioGPT, need a tokenizer.json."
        raise CheckpointError(what, where=str(path), remedy=remedy)
    return vocab


def _read_merges(path: Path, vocab: dict[str, int]) -> list[tuple[str, str]]:
    try:
        lines = read_file(path).decode().split("\n")  # and not at U+0085 and the like
    except UnicodeDecodeError as error:
        raise CheckpointError(f"the file is not UTF-8: byte {error.start}", where=str(path)) from None
    merges = []
    for n, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if line.startswith("#version") or (not line and n == len(lines)):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise CheckpointError(f"expected two pieces, got {line[:80]!r}", where=f"{path}, line {n}")
        for piece in (*parts, "".join(parts)):
            if piece not in vocab:
                what = f"vocabulary mismatch: {piece[:80]!r} is not in vocab.json"
                raise CheckpointError(what, where=f"{path}, line {n}")
        merges.append((parts[0], parts[1]))
    return merges


def any_of(spellings: Iterable[str], words: Collection[str] = ()) -> re.Pattern[str]:
    """A pattern that matches each of the spellings, the longest first; nothing if there are none.

    It is a trie of the spellings, in which characters with the same continuation are one class: Python takes long to
    compile thousands of alternatives, and some models add thousands of tokens that differ by a number.

    Args:
        words: spellings that match only if not adjacent to a letter, mark, digit or underscore.
    """
    ends = {spelling: "" for spelling in spellings}
    ends |= {word: f"(?!{_word()})(?<!{_word()}{re.escape(word)})" for word in words}
    try:
        return re.compile(_trie(ends) if ends else "(?!)")
    except RecursionError:  # hundreds of spellings, each the beginning of the next
        longest = sorted(ends, key=len, reverse=True)
        return re.compile("|".join(re.escape(spelling) + ends[spelling] for spelling in longest))


@functools.cache
def _word() -> str:
    """A pattern of the characters of words in the tokenizers library, whose definition and Unicode are not Python's."""
    split = pre_tokenizers.Whitespace().pre_tokenize_str  # into runs of such characters, and of others
    assigned = map(chr, (*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE1000)))
    runs = [run for run, _ in split("".join(assigned))]
    words = [run for run in runs if len(split(f"a{run[0]}")) == 1]
    return f"[{''.join(f'{run[0]}-{run[-1]}' for run in words)}]"


def _trie(ends: Mapping[str, str]) -> str:
    """A pattern that matches each text, the longest first, if the pattern that the text has here matches after it."""
    outer = zip(min(ends), max(ends), strict=False)  # what these share, all share
    lead = "".join(a for a, _ in takewhile(lambda both: both[0] == both[1], outer))
    below: dict[str, dict[str, str]] = {}
    for text, end in ends.items():
        if rest := text[len(lead) :]:
            below.setdefault(rest[0], {})[rest[1:]] = end
    firsts: dict[str, list[str]] = {}  # what follows -> the characters that it follows
    for first, after in below.items():
        firsts.setdefault(_trie(after), []).append(first)
    found = [f"[{''.join(map(re.escape, some))}]{after}" for after, some in firsts.items()]
    if lead in ends:
        found.append(ends[lead])
    return re.escape(lead) + (found[0] if len(found) == 1 else f"(?:{'|'.join(found)})")


def _content(value: Any) -> str | None:
    """A token's spelling, written as a string or as an object."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _extra(config: dict[str, Any]) -> Any:
    return config.get("extra_special_tokens") or config.get("additional_special_tokens") or []


def _listed_extra(config: dict[str, Any]) -> set[str]:
    """The spellings of a list of further special tokens."""
    extra = _extra(config)
    return set() if isinstance(extra, dict) else {content for content in map(_content, extra) if content}


def _flags(entry: dict[str, Any]) -> dict[str, bool]:
    return {flag: entry[flag] for flag in ("lstrip", "rstrip", "single_word", "normalized", "special") if flag in entry}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}

"""Tokenizers given by the ranks of their tokens: tekken.json of Mistral, tiktoken.model of Moonlight and Kimi.

Such a file lists the bytes of tokens in the order of their ranks: of all neighbours in a word, those are merged first
whose union has the lowest rank. A word that is a token stays whole.
"""

from binascii import a2b_base64
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.errors import CheckpointError
from engine.text.detokenizer import BYTE_OF_CHAR
from engine.text.tokenizer_files import add_tokens, assembled, flag, named_tokens, read_file, read_json
from engine.text.tokenizer_limits import EncodingGuard, guard
from models.checkpoint.fields import Fields
from models.gguf.vocabulary import KIMI_K2, cuts

FILES = "tekken.json", "tiktoken.model"
MAX_BYTES = 64 << 20  # of a file; published ones have at most 20 MB
MAX_SPECIAL = 1 << 16  # special tokens of a tekken.json; published ones have 1000
MAX_WORK = 1 << 28  # sum of squares of the tokens' lengths, which bounds the time of `cuts`; published files: 2**24
MAX_MERGES = 1 << 21  # each takes 200 bytes meanwhile; published vocabularies have two for each token
SPECIAL_OF_V7 = [  # the special tokens of a tekken.json that does not list them, as mistral-common has them
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
]
UNLISTED = "v1", "v2", "v3", "v7"  # versions of tekken.json that may lack the list
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
KIMI = "tokenization_kimi.TikTokenTokenizer", "tokenization_moonshot.TikTokenTokenizer"  # one pattern in both
KIMI_SPECIAL = 256  # special tokens after the others
_CHARS = {byte: char for char, byte in BYTE_OF_CHAR.items()}
Ranks = tuple[list[bytes], int, dict[str, int], str]  # tokens by rank, the id of the first, special tokens, pattern


def ranked(
    path: Path, config: dict[str, Any]
) -> tuple[tokenizers.Tokenizer, dict[str, str], EncodingGuard | None, dict[str, int]]:
    """Read a tekken.json, whose texts begin with BOS, or a tiktoken.model; `config` is tokenizer_config.json.

    Returns:
        the arguments of a `LibraryEncoder`: the tokenizer, its named tokens, its guard, its tokens and their ids.

    Raises:
        CheckpointError: the file is malformed, or tokenizer_config.json does not name a known class for its ranks.
    """
    mistral = path.name == FILES[0]
    tokens, first, special, pattern = _tekken(path) if mistral else _tiktoken(path, config)
    splitter = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    checked = guard({"pre_tokenizer": splitter}, str(path))
    if sum(len(token) ** 2 for token in tokens) > MAX_WORK:
        raise CheckpointError(f"the tokens are too long: the squares of their lengths exceed {MAX_WORK} together")
    ids = {token: first + i for i, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        i = next(i for i, token in enumerate(tokens) if ids[token] != first + i)
        raise CheckpointError(f"vocabulary mismatch: the tokens of the ranks {i} and {ids[tokens[i]] - first} agree")
    for text in special:  # as in transformers, a special token takes the place of another one of its spelling
        ids.pop(text.encode(), None)
    if absent := {bytes([i]) for i in range(256)} - ids.keys():
        raise CheckpointError(f"vocabulary mismatch: {len(absent)} of the 256 bytes are missing, {min(absent)} for one")
    pieces = [token.decode("latin-1").translate(_CHARS) for token in ids]
    vocab = dict(zip(pieces, ids.values(), strict=True))
    merges = [(pieces[left], pieces[right]) for left, right in islice(cuts([*ids]), MAX_MERGES + 1)]
    if len(merges) > MAX_MERGES:
        raise CheckpointError(f"the tokens are cut into other tokens in more than {MAX_MERGES} ways")
    if both := special.keys() & vocab.keys():
        raise CheckpointError(f"vocabulary mismatch: {min(both)!r} is a special token, and bytes in another spelling")
    vocab |= special
    names = named_tokens(config, **(NAMED if mistral else {}))
    added = add_tokens(path.parent, vocab, config, names)
    added |= {token: AddedToken(token, normalized=False, special=True) for token in special if token not in added}
    added = {token: flags for token, flags in added.items() if token in vocab}  # others have taken their ids
    begins, ends = flag(config, "add_bos_token", mistral), flag(config, "add_eos_token", False)
    library = assembled(
        vocab,
        merges,
        pattern,
        added,
        [names.get("bos_token") if begins else None, names.get("eos_token") if ends else None],
        whole_words=True,
    )
    return library, names, checked, vocab


def _tekken(path: Path) -> Ranks:
    """Read a tekken.json. Special tokens come first; of tokens that exceed the size of the vocabulary, the last are
    left out."""
    data = read_json(path, MAX_BYTES)
    fields, entries, listed = Fields(data, str(path)).sub("config"), data.get("vocab"), data.get("special_tokens")
    if fields is None or not isinstance(entries, list):
        raise CheckpointError("the tokenizer is malformed: expected an object config and a list vocab")
    if listed is None and fields.str("version", "v3") in UNLISTED:
        listed = [{"rank": i, "token_str": token} for i, token in enumerate(SPECIAL_OF_V7)]
    try:
        names = {entry["rank"]: entry["token_str"] for entry in listed}  # type: ignore[union-attr]
        count = fields.int("default_num_special_tokens", len(names), low=0, high=MAX_SPECIAL)
        special = {names.get(i, f"<SPECIAL_{i}>"): i for i in range(count)}
        known = len(special) == count and len(listed) == len(names.keys() & {*range(count)})  # type: ignore[arg-type]
    except (TypeError, KeyError):
        raise CheckpointError("special_tokens: expected a list of objects with rank and token_str") from None
    if not known or not all(isinstance(text, str) and text for text in special):
        raise CheckpointError(f"special_tokens: expected different texts, and different ranks below {count}")
    size = fields.int("default_vocab_size", len(entries) + count) - count
    if not 0 < size <= len(entries):
        raise CheckpointError(f"vocab: expected {size} entries by the sizes of config, got {len(entries)}")
    tokens = []
    for i, entry in enumerate(entries[:size]):
        try:
            tokens.append(a2b_base64(entry["token_bytes"], strict_mode=True))
            known = entry.get("rank", i) == i
        except (TypeError, KeyError, ValueError, AttributeError):
            raise CheckpointError(f"vocab: entry {i}: expected token_bytes, in base64") from None
        if not known:
            raise CheckpointError(f"vocab: entry {i}: expected the rank {i}")
    return tokens, count, special, fields.str("pattern")


def _tiktoken(path: Path, config: dict[str, Any]) -> Ranks:
    """Read a tiktoken.model. It does not say how texts are split: the code that tokenizer_config.json names does."""
    code = config.get("auto_map")
    code = code.get("AutoTokenizer") if isinstance(code, dict) else None
    code = code[0] if isinstance(code, list) and code else code
    if not isinstance(code, str) or code.rpartition("--")[2] not in KIMI:
        what = (
            "tiktoken.model does not say how texts are split, and auto_map in tokenizer_config.json is no known class"
        )
        raise CheckpointError(what, remedy=f"get the checkpoint's tokenizer.json; known: {' and '.join(KIMI)}")
    tokens = []
    for i, line in enumerate(read_file(path, MAX_BYTES).splitlines()):
        token, _, rank = line.partition(b" ")
        try:
            tokens.append(a2b_base64(token, strict_mode=True))
            known = int(rank) == i
        except ValueError:
            known = False
        if not known:
            raise CheckpointError(f"line {i + 1}: expected a token in base64, and its rank {i}")
    first = len(tokens)
    return tokens, 0, {f"<|reserved_token_{i}|>": i for i in range(first, first + KIMI_SPECIAL)}, KIMI_K2

"""tekken.json and tiktoken.model: the merges of ranks, special tokens, sizes, malformed files.

Their golden tokens are in test_text_golden.py (`tekken_ranks`, `kimi`).
"""

import base64
import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models

from engine.errors import CheckpointError
from engine.text import tokenizer_ranks
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_ranks import SPECIAL_OF_V7
from models.gguf.vocabulary import cuts

TEXT = Path(__file__).parents[2] / "golden" / "text"
TEKKEN = json.loads((TEXT / "tekken_ranks" / "tekken.json").read_text())
KIMI = json.loads((TEXT / "kimi" / "tokenizer_config.json").read_text())
LINES = (TEXT / "kimi" / "tiktoken.model").read_text()


def merged(word: str, ranks: dict[str, int]) -> list[str]:
    """A word's tokens by the definition: of all neighbours, merge those whose union has the lowest rank."""
    parts = [*word]
    while len(parts) > 1:
        unions = [ranks.get(left + right, len(ranks)) for left, right in itertools.pairwise(parts)]
        if (best := min(unions)) == len(ranks):
            break
        i = unions.index(best)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("abc", min_size=2, max_size=6), unique=True, max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=30), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_merges_equal_ranks(tokens: list[str], words: list[str], draw: random.Random):
    """Also for tokens that cannot be merged, or that are parts of tokens of lower rank, and in any order."""
    ranked = ["a", "b", "c", *tokens]
    draw.shuffle(ranked)
    ranks, merges = {token: i for i, token in enumerate(ranked)}, [*cuts(ranked)]
    by_rank = sorted(merges, key=lambda pair: ranks[ranked[pair[0]] + ranked[pair[1]]])
    assert merges == by_rank
    library = Library(models.BPE(ranks, [(ranked[left], ranked[right]) for left, right in merges]))
    for word in words:
        assert library.encode(word).tokens == merged(word, ranks)


def tekken(folder: Path, **changes) -> Tokenizer:
    """The golden tekken.json with other values; `config` is merged into the file's own."""
    data = {**TEKKEN, **changes, "config": {**TEKKEN["config"], **changes.get("config", {})}}
    (folder / "tekken.json").write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))
    return Tokenizer.load(folder)


def test_special_tokens_come_first(tmp_path):
    tokenizer = tekken(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_tokens == dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")
    assert tokenizer.special_ids == {*range(9)} and tokenizer.decode([8], skip_special=False) == "<SPECIAL_8>"
    assert tokenizer.encode("") == [1] and tokenizer.encode("\x00\xff", add_special=False) == [9, 9 + 0xC3, 9 + 0xBF]
    assert tokenizer.encode("<s>[INST]", add_special=False) == [9 + byte for byte in b"<s>[INST]"]
    assert tokenizer.encode("<s>[INST]", add_special=False, parse_special=True) == [1, 3]
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false, "add_eos_token": true}')
    assert Tokenizer.load(tmp_path).encode("") == [2]


def test_a_file_without_a_list_of_special_tokens(tmp_path):
    """They get those of mistral-common up to version 7; the ranks of newer ones are not known."""
    old = {"version": "v3", "default_num_special_tokens": 1000, "default_vocab_size": None}
    tokenizer = tekken(tmp_path, special_tokens=..., config=old)
    ids = {"<unk>": 0, "[INST]": 3, "[TOOL_CALLS]": 9, "<pad>": 11, "[SUFFIX]": 16, "[TOOL_CONTENT]": 19}
    ids |= {"<SPECIAL_20>": 20, "<SPECIAL_999>": 999}
    assert all(tokenizer.encode_rendered([(token, True)]) == [i] for token, i in ids.items())
    assert len(SPECIAL_OF_V7) == 20 and tokenizer.encode("\x00") == [1, 1000]
    with pytest.raises(CheckpointError, match="special_tokens: expected a list"):
        tekken(tmp_path, special_tokens=..., config={"version": "v11"})


def test_sizes(tmp_path):
    """Ranks beyond the size are padding; without sizes every entry counts."""
    assert tekken(tmp_path).size == TEKKEN["config"]["default_vocab_size"] == len(TEKKEN["vocab"]) + 9 - 2
    nulls = {"default_vocab_size": None, "default_num_special_tokens": None}
    whole = tekken(tmp_path, config=nulls)
    assert whole.size == len(TEKKEN["vocab"]) + len(TEKKEN["special_tokens"])
    assert whole.encode("nothing", add_special=False) == [whole.size - 1]
    gaps = [{"rank": 4, "token_str": "[X]"}, {"rank": 1, "token_str": "<s>"}]
    assert tekken(tmp_path, special_tokens=gaps).encode_rendered([("[X]<s><SPECIAL_0>", True)]) == [4, 1, 0]


def test_a_special_token_takes_the_place_of_another_token(tmp_path):
    """The special token wins, as in transformers; the other one is no token any more, also for merges."""
    extra = [{"rank": len(TEKKEN["vocab"]) + i, "token_bytes": text} for i, text in enumerate(["WFg=", "WFhY"])]  # XX
    special = [*TEKKEN["special_tokens"], {"rank": 6, "token_str": "XX"}]
    changes = {"vocab": TEKKEN["vocab"] + extra, "config": {"default_vocab_size": None}}
    assert tekken(tmp_path, **changes).encode("XXX", add_special=False) == [9 + len(TEKKEN["vocab"]) + 1]
    tokenizer = tekken(tmp_path, **changes, special_tokens=special)
    assert tokenizer.encode("aXX", add_special=False) == [9 + ord("a"), 9 + ord("X"), 9 + ord("X")]
    assert tokenizer.encode_rendered([("XX", True)]) == [6]
    assert tokenizer.decode([9 + len(TEKKEN["vocab"])], skip_special=False) == ""


def test_special_tokens_of_kimi():
    tokenizer = Tokenizer.load(TEXT / "kimi")
    first = len(LINES.splitlines())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.size) == (first, first + 1, first + 256)
    assert tokenizer.encode("") == [] and tokenizer.added_spellings == {"<x>"}
    ids = [first + 2, first + 11, first + 12, first + 255]
    assert tokenizer.encode_rendered([(f"<|reserved_token_{first + 2}|><x><y><s>", True)]) == ids
    assert tokenizer.decode(ids) == "<x>"


def entry(i: int, **changes) -> list[dict]:
    return [*TEKKEN["vocab"][:i], TEKKEN["vocab"][i] | changes, *TEKKEN["vocab"][i + 1 :]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab": {}}, "expected an object config and a list vocab"),
        ({"vocab": []}, "got 0"),
        ({"vocab": TEKKEN["vocab"][:-3]}, "by the sizes of config, got 331"),
        ({"vocab": entry(300, token_bytes="a")}, "vocab: entry 300: expected token_bytes, in base64"),
        ({"vocab": entry(300, token_bytes=7)}, "entry 300: expected token_bytes"),
        ({"vocab": [*TEKKEN["vocab"][:9], "x", *TEKKEN["vocab"][10:]]}, "entry 9: expected token_bytes"),
        ({"vocab": entry(300, rank=299)}, "entry 300: expected the rank 300"),
        ({"vocab": entry(300, token_bytes=TEKKEN["vocab"][299]["token_bytes"])}, "the ranks 299 and 300 agree"),
        ({"vocab": entry(65, token_bytes="QUFBQQ==")}, "1 of the 256 bytes are missing, b'A' for one"),
        ({"vocab": entry(300, token_bytes=base64.b64encode(b"x" * 20000).decode())}, "the tokens are too long"),
        ({"special_tokens": 5}, "special_tokens: expected a list"),
        ({"special_tokens": [{"rank": [], "token_str": "<s>"}]}, "special_tokens: expected a list"),
        ({"special_tokens": [{"rank": 0, "token_str": 7}]}, "special_tokens: expected different texts"),
        ({"special_tokens": [{"rank": 9, "token_str": "<s>"}]}, "different ranks below 9"),
        ({"special_tokens": [{"rank": i, "token_str": "<s>"} for i in (0, 1)]}, "expected different texts"),
        ({"special_tokens": [{"rank": 0, "token_str": t} for t in "xy"]}, "different ranks"),
        ({"special_tokens": [{"rank": 0, "token_str": "a"}]}, "b'a' for one"),
        ({"special_tokens": [{"rank": 0, "token_str": "\xe9"}]}, "'é' is a special token, and bytes"),
        ({"special_tokens": [{"rank": 0, "token_str": "\ud800"}]}, "malformed"),
        ({"config": {"pattern": None}}, "config.pattern: expected a value"),
        ({"config": {"pattern": "("}}, "the tokenizer is refused"),
        ({"config": {"pattern": "(a+)+$"}}, "the tokenizer is refused"),
        ({"config": {"default_vocab_size": "x"}}, "default_vocab_size: expected a whole number"),
        ({"config": {"default_vocab_size": 9}}, "vocab: expected 0 entries"),
        ({"config": {"default_num_special_tokens": 1 << 20}}, "default_num_special_tokens: expected"),
    ],
)
def test_malformed_tekken(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        tekken(tmp_path, **changes)
    assert str(tmp_path / "tekken.json") in str(caught.value)


def test_tokens_that_can_be_cut_in_too_many_ways(tmp_path, monkeypatch):
    """All texts of a few letters: each cut of each is a merge, which takes more memory than a line of the file."""
    texts = ["".join(text) for size in (2, 3) for text in itertools.product("abcdef", repeat=size)]
    merges = 36 + 2 * 6**3  # of two letters one each, of three letters two each
    tokens = [bytes([i]) for i in range(256)] + [text.encode() for text in texts]
    vocab = [{"rank": i, "token_bytes": base64.b64encode(token).decode()} for i, token in enumerate(tokens)]
    monkeypatch.setattr(tokenizer_ranks, "MAX_MERGES", merges)
    assert tekken(tmp_path, vocab=vocab, config={"default_vocab_size": None}).size == 9 + len(vocab)
    monkeypatch.setattr(tokenizer_ranks, "MAX_MERGES", merges - 1)
    with pytest.raises(CheckpointError, match="in more than 467 ways"):
        tekken(tmp_path, vocab=vocab, config={"default_vocab_size": None})


@pytest.mark.parametrize(
    ("lines", "config", "message"),
    [
        (LINES.replace(" 300\n", " 301\n"), KIMI, "line 301: expected a token in base64, and its rank 300"),
        (LINES.replace(" 300\n", "\n"), KIMI, "line 301"),
        (LINES.replace("AA==", "A"), KIMI, "line 1: "),
        ("", KIMI, "256 of the 256 bytes are missing"),
        (LINES, KIMI | {"auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer"]}}, "how texts are split"),
        (LINES, {}, "get the checkpoint's tokenizer.json"),
        (LINES, KIMI | {"auto_map": [1]}, "how texts are split"),
        (LINES, KIMI | {"added_tokens_decoder": {"300": {"content": "<s>"}}}, "malformed"),  # a part of other tokens
    ],
)
def test_malformed_tiktoken(tmp_path, lines, config, message):
    (tmp_path / "tiktoken.model").write_text(lines)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path / "tiktoken.model") in str(caught.value)


def test_the_class_of_another_repository(tmp_path):
    (tmp_path / "tiktoken.model").write_text(LINES)
    code = {"AutoTokenizer": "moonshotai/Moonlight-16B-A3B--tokenization_moonshot.TikTokenTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(KIMI | {"auto_map": code}))
    assert Tokenizer.load(tmp_path).encode("Once upon") == Tokenizer.load(TEXT / "kimi").encode("Once upon")

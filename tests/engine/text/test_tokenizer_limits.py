"""A hostile tokenizer.json is refused, in time; usual ones encode as before."""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError, UsageError
from engine.text import sandbox_process, tokenizer_limits
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_limits import plain

CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
USUAL = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
    r"\s*[\r\n]|\s+(?!\S)|\s+",
    "llama3": rf"{ENDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}",
    "qwen2": rf"{ENDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{CASED}{ENDS}?|[^\r\n\p{{L}}\p{{N}}]?{LOWER}{ENDS}?|\p{{N}}{{1,3}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}",
    "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?{CASED}|[^\r\n\p{{L}}\p{{N}}]?{LOWER}|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}",
    "deepseek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{REST}",
    "digits": r"\p{N}{1,3}",
    "han": "[一-龥぀-ゟ゠-ヿ]+",
    "spaces": " {2,}",
}
UNUSUAL = {
    "exponential": r"(a+)+$",
    "cubic": r"a*a*$",
    "quadratic": r"a+b",
    "pairs": r"(x+x+)+y",
    "alone": r"\s*[\r\n]+",
    "without the rest": rf"x|{REST.replace('|', '|y|', 1)}",
    "not at the end": rf"{REST}x",
    "nested": r"a{1,99}{1,99}b",
    "lookahead": r"(?=(\d{3})+(?!\d))",
    "intersection": r"[a-z&&[^x]]+",
    "reference": r"(.*)\1",
    "two words": r"'a b+c",
    "long": "a|" * 600 + "a",
}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def normalizers(*parts: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(parts)}


def decoders(*parts: Any) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(parts)}


def splits(*parts: Any) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def test_patterns_of_usual_tokenizers_are_plain():
    assert [name for name, pattern in USUAL.items() if not plain(None, split(pattern))] == []
    assert [name for name, pattern in UNUSUAL.items() if plain(None, split(pattern))] == []
    assert plain(None, splits(*map(split, USUAL.values()), BYTES))
    assert not plain(None, splits(split(USUAL["llama3"]), split("a+b")))


@pytest.mark.parametrize("pattern", USUAL.values(), ids=USUAL)
@pytest.mark.parametrize(
    "unit", ["a", " ", "\n", "A", "1", "'s", "é", "中", " \n", "aA", "\u0301", "!", "&[", "'", "\r ", "a1 "]
)
def test_plain_patterns_take_linear_time(pattern: str, unit: str):
    import tokenizers

    library = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    text = unit * (30_000 // len(unit))  # quadratic: 450 million steps for a start, seconds
    began = time.process_time()
    for whole in (text, text + "\x01", "x" + text + " x"):
        library.pre_tokenize_str(whole)
    assert time.process_time() - began < 3


@pytest.mark.parametrize(
    "normalizer, expected",
    [
        (None, True),
        (normalizers(replace(" ", "▁")), True),
        (normalizers({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")), True),
        ({"type": "NFC"}, True),
        (normalizers({"type": "NFKC"}, replace(" {2,}", " ", "Regex")), True),
        (normalizers(*[{"type": "NFKD"}] * 2), False),
        (normalizers(*[replace(" ", "▁")] * 4), True),
        (normalizers(*[replace(" ", "▁")] * 5), False),
        (replace("", "a"), False),
        (replace("a+b", "c", "Regex"), False),
        ({"type": "Replace", "pattern": {"String": "a", "Regex": "(a+)+"}, "content": ""}, False),
        ({"pattern": {"String": "a"}, "content": "b"}, False),  # without its type, as old files have it
        ({"type": "Prepend", "prepend": "a" * 100}, False),
        ({"type": "Precompiled", "precompiled_charsmap": "AAAA"}, False),
        ({"type": "Unheard"}, False),
        ([], False),
        (normalizers(*[{"type": "Strip"}] * 100), False),
    ],
)
def test_plain_normalizers(normalizer: Any, expected: bool):
    assert plain(normalizer, None) is expected


def test_bytes_spelled_as_characters_grow():
    assert plain(None, splits(*[BYTES] * 6)) and not plain(None, splits(*[BYTES] * 7))


# --- whole tokenizers ---


def folder(path: Path, **changes: Any) -> Path:
    model = {"type": "BPE", "unk_token": "<unk>", "vocab": {chr(97 + i): i for i in range(26)} | {"<unk>": 26}}
    spec = {"version": "1.0", "added_tokens": [], "model": model | {"merges": []}} | changes
    (path / "tokenizer.json").write_text(json.dumps(spec))
    return path


ADDED = {"id": 27, "single_word": False, "lstrip": False, "rstrip": False, "special": False}
TEMPLATE = {"type": "TemplateProcessing", "pair": [{"Sequence": {"id": i, "type_id": 0}} for i in "AB"]}
A, B = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "b", "type_id": 0}}
TEN = "a" * 10
MANY = {"b": {"id": "b", "ids": [0] * 100, "tokens": ["a"] * 100}}
WORD_PIECE = {
    "type": "WordPiece",
    "vocab": {"a": 0, "[UNK]": 1},
    "unk_token": "[UNK]",
    "continuing_subword_prefix": "##",
}
AT_LOAD: dict[str, tuple[dict[str, Any], str]] = {
    "exponential pattern": ({"pre_tokenizer": split("(a+)+$")}, "retry-limit"),
    "exponential normalizer": ({"normalizer": replace("(b+)+$", "c", "Regex")}, "retry-limit"),
    "chain": ({"normalizer": normalizers(*[replace("a", TEN)] * 9)}, "too much memory"),
    "chain that spares probes": (
        {
            "normalizer": normalizers(*[replace("zz", "zz" * 10)] * 9),
            "added_tokens": [ADDED | {"content": "zz", "normalized": True}],
        },
        "too much memory",
    ),
    "empty pattern": ({"normalizer": normalizers(*[replace("", "aa", "Regex")] * 20)}, "too much memory"),
    "prefix": ({"normalizer": {"type": "Prepend", "prepend": "a" * 100_000}}, "characters of a text of"),
    "bytes of bytes": ({"pre_tokenizer": splits(*[BYTES] * 40)}, "too much memory"),
    "charsmap": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAQAAAAAAAA="}}, "charsmap"),
    "decoder": ({"decoder": decoders(*[replace("a", TEN)] * 8)}, "characters of a token"),
    "decoder of nothing": ({"decoder": decoders(*[replace("", "abc")] * 8)}, "characters of a token"),
    "decoder's pattern": ({"decoder": replace("(x+x+)+y", "", "Regex")}, "regular expression"),
    "long token": ({"added_tokens": [ADDED | {"content": "z" * 5000, "normalized": False}]}, "characters of a token"),
    "text twice": ({"post_processor": TEMPLATE | {"single": [A, A], "special_tokens": {}}}, "more than once"),
    "many ids": (
        {"post_processor": TEMPLATE | {"single": [B] * 100 + [A], "special_tokens": MANY}},
        "10000 ids",
    ),
    "long words": ({"model": WORD_PIECE | {"max_input_chars_per_word": 10**9}}, "max_input_chars"),
    "long affix": (
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "continuing_subword_prefix": "#" * 100}},
        "continuing_subword_prefix",
    ),
    "merges without the affix": (
        {
            "model": {
                "type": "BPE",
                "vocab": {"a": 0, "é": 1, "aé": 2},
                "merges": [["a", "é"]],
                "continuing_subword_prefix": "#",
            }
        },
        "does not begin with continuing_subword_prefix",
    ),
    "no unknown token": ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}}, "Missing [UNK]"),
}


@pytest.mark.parametrize("changes, words", AT_LOAD.values(), ids=AT_LOAD)
def test_refused_at_load(tmp_path: Path, changes: dict[str, Any], words: str, capfd: pytest.CaptureFixture[str]):
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(CheckpointError) as raised:
        Tokenizer.load(folder(tmp_path, **changes))
    assert words in raised.value.what and raised.value.where == str(tmp_path / "tokenizer.json") and raised.value.remedy
    assert time.process_time() - began < 5  # of this process
    if sys.platform.startswith("linux"):
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    assert capfd.readouterr() == ("", "")  # no panic is seen


@pytest.mark.parametrize(
    "changes, bad",
    [
        ({"pre_tokenizer": split("((ab)+)+$")}, "ab" * 50 + "c"),
        ({"pre_tokenizer": split("a*a*$")}, "a" * 2500 + "b"),
        ({"normalizer": replace("((ab)+)+$", "x", "Regex")}, "ab" * 50 + "c"),
        ({"normalizer": normalizers(*[replace("xy", "xy" * 10)] * 3)}, "xy" * 50),
        ({"normalizer": normalizers(*[replace("xy", "xy" * 10)] * 9)}, "xy" * 50),
    ],
)
def test_refused_for_one_text(tmp_path: Path, changes: dict[str, Any], bad: str, capfd: pytest.CaptureFixture[str]):
    tokenizer = Tokenizer.load(folder(tmp_path, **changes))
    good = tokenizer.encode("hello")
    with pytest.raises(CheckpointError, match="the tokenizer is refused: ") as raised:
        tokenizer.encode(bad)
    assert raised.value.where == str(tmp_path / "tokenizer.json")
    assert tokenizer.encode("hello") == good and len(good) == 5
    assert capfd.readouterr() == ("", "")


def test_an_unusual_tokenizer_gives_the_ids_of_the_library(tmp_path: Path):
    """Digits in threes from the right, special tokens and others between."""
    from tokenizers import Tokenizer as Library

    vocab = {c: i for i, c in enumerate("0123456789 abc")} | {"123": 14, "12": 15, "<unk>": 16}
    model = {"type": "BPE", "unk_token": "<unk>", "vocab": vocab, "merges": [["1", "2"], ["12", "3"]]}
    added = [
        ADDED | {"content": "<x>", "normalized": True},
        ADDED | {"id": 28, "content": "<y>", "normalized": False, "special": True},
    ]
    for token, i in zip(added, (17, 18), strict=True):
        token["id"] = i
    changes = {"pre_tokenizer": split(UNUSUAL["lookahead"]), "model": model, "added_tokens": added}
    tokenizer = Tokenizer.load(folder(tmp_path, **changes))
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("1234", "12 123123", "a<x>1231 b", "", "123" * 200):
        assert tokenizer.encode(text) == library.encode(text).ids, text
    assert tokenizer.encode_rendered([("a<y>12", True)]) == library.encode("a<y>12").ids


def test_tokens_that_are_not_normalized_are_tried_as_they_are(tmp_path: Path):
    """Line ends, which T5's normalizer strips: beside a token of nothing, the library would search for ever."""
    strip = {"type": "Strip", "strip_left": False, "strip_right": True}
    normalizer = normalizers(replace("\x01", ""), strip, replace("(?= {2})", "", "Regex"))
    added = [ADDED | {"id": 27 + i, "content": c, "normalized": i > 0} for i, c in enumerate(("\n\n", "ab"))]
    tokenizer = Tokenizer.load(folder(tmp_path, normalizer=normalizer, added_tokens=added))
    assert tokenizer.encode("ab\n\nc") == [28, 27, 2]


@pytest.mark.parametrize("file", ["added_tokens_decoder", "flags", "added_tokens.json"])
def test_tokens_of_other_files_are_tried_before_they_are_normalized(tmp_path: Path, file: str):
    """The library normalizes such a spelling as soon as it is added: cubic time for this pattern."""
    spelling = "a" * 1500 + "c"
    added = [ADDED | {"id": 27, "content": spelling, "normalized": False}] if file == "flags" else []
    folder(tmp_path, normalizer=replace("a*a*$", "", "Regex"), added_tokens=added)
    entry = {"27": {"content": spelling, "normalized": True, "special": False}}
    config = {} if file == "added_tokens.json" else {"added_tokens_decoder": entry}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "added_tokens.json").write_text(json.dumps({} if config else {spelling: 27}))
    before = time.process_time()
    with pytest.raises(CheckpointError, match="takes more than"):
        Tokenizer.load(tmp_path)
    assert time.process_time() - before < 0.5


def test_a_section_that_is_bad_by_itself(tmp_path: Path):
    """The library parts a text at added tokens before its patterns see it: so does the trial."""
    harmless = r"[\s\S]*MARK[\s\S]*|((ab)+)+$"
    changes = {"pre_tokenizer": split(harmless), "added_tokens": [ADDED | {"content": "MARK", "normalized": False}]}
    tokenizer = Tokenizer.load(folder(tmp_path, **changes))
    with pytest.raises(CheckpointError, match="retry-limit"):
        tokenizer.encode("ab" * 50 + "cMARK")


def test_without_an_interpreter_for_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sandbox_process.TEMPLATES.end()
    monkeypatch.setenv(sandbox_process.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(UsageError, match="tried in a process of its own") as raised:
        Tokenizer.load(folder(tmp_path, pre_tokenizer=split("a+b")))
    assert sandbox_process.VARIABLE in raised.value.remedy
    Tokenizer.load(folder(tmp_path, pre_tokenizer=split("a+")))  # plain: there is no trial


@pytest.mark.parametrize("text", ["[]", "{", "\ufeff{}", '{"a":' * 10_000])
def test_malformed(tmp_path: Path, text: str):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="the tokenizer is malformed"):
        Tokenizer.load(tmp_path)


def test_of_two_equal_keys_the_last_one_counts(tmp_path: Path):
    whole = (folder(tmp_path) / "tokenizer.json").read_text()
    bad = json.dumps(normalizers(*[replace("a", TEN)] * 9))
    twice = whole[:-1] + f', "normalizer": null, "normalizer": {bad}}}'
    (tmp_path / "tokenizer.json").write_text(twice)
    with pytest.raises(CheckpointError, match="the tokenizer is refused"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(twice[:-1] + ', "normalizer": null}')
    assert len(Tokenizer.load(tmp_path).encode("a" * 50)) == 50


def test_panics_are_errors():
    class PanicException(BaseException):
        pass

    expected: type[BaseException]
    for raised, expected in (
        (PanicException("at the disco"), CheckpointError),
        (ValueError("x"), CheckpointError),
        (MemoryError(), MemoryError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (UsageError("x"), UsageError),
    ):
        with pytest.raises(expected), tokenizer_limits.library_errors("it fails"):
            raise raised


def test_replacements_of_sentencepiece(tmp_path: Path):
    import sentencepiece

    (tmp_path / "text").write_text("hello world a b c\n" * 50)
    for count, name in ((20, "short"), (200, "long")):
        (tmp_path / "rules").write_text("61\t" + " ".join(["62"] * count) + "\n")
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "text"), model_prefix=str(tmp_path / name), vocab_size=30, hard_vocab_limit=False,
            normalization_rule_tsv=str(tmp_path / "rules"), minloglevel=2,
        )  # fmt: skip
    (tmp_path / "short.model").rename(tmp_path / "tokenizer.model")
    assert Tokenizer.load(tmp_path).encode("a")
    (tmp_path / "long.model").rename(tmp_path / "tokenizer.model")
    with pytest.raises(CheckpointError, match="a character may become 200 bytes of text"):
        Tokenizer.load(tmp_path)
    whole = (tmp_path / "tokenizer.model").read_bytes()
    for cut in (1, 10, len(whole) // 2, len(whole) - 1):
        (tmp_path / "tokenizer.model").write_bytes(whole[:cut])
        with pytest.raises(CheckpointError):
            Tokenizer.load(tmp_path)

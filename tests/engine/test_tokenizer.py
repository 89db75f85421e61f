import json
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import CheckpointError, UsageError
from engine.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent.parent / "golden" / "text"
BYTES = {f"<0x{b:02X}>": b for b in range(256)}
NASTY = [
    "🙂👍🏽👩‍👩‍👧‍👦🇨🇭",
    "e\u0301 a\u0308\u0323 \u0e01\u0e33",
    "a\r\nb\rc\n\n d\t ",
    "  two  three   ",
    "\x00\x7f\u200b\ufeff\u2028",
    "".join(map(chr, range(0x80, 0x250))),
    "<s></s><|begin|><0x41> <|eot_id|>",
    "你好，世界。\U0010ffff\ufffd\ufdd0",
]


def _unigram():
    backend = tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁▁", -3.0), *((c, -4.0) for c in "abc</s>")], 0)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    return backend


def _word_level():
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "##c": 3, ".": 4}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def _word_piece():
    backend = _word_level()
    backend.decoder = decoders.WordPiece()
    return backend


def _holes():
    """Ids 0-255 and 1000-1003: the next token the library adds would get id 260."""
    vocab = BYTES | {"▁": 1000, "  ": 1001, "é": 1002, "<unk>": 1003}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    strip = decoders.Strip(" ", 1, 1)
    backend.decoder = decoders.Sequence([strip, decoders.Replace("▁", " "), decoders.ByteFallback()])
    backend.add_special_tokens(["<unk>"])
    return backend


def _spaces():
    """Strip after Fuse with pieces that are all, or half, spaces."""
    backend = tokenizers.Tokenizer(models.BPE(BYTES | {"▁": 256, "▁▁": 257, "▁a": 258, "<s>": 259}, []))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 3, 0)]
    )
    backend.add_special_tokens(["<s>"])
    return backend


BUILT = {f.__name__[1:]: f for f in (_unigram, _word_level, _word_piece, _holes, _spaces)}
NAMES = ["bytelevel", "prepend", "metaspace", *BUILT]


@cache
def library(name) -> tokenizers.Tokenizer:
    return BUILT[name]() if name in BUILT else tokenizers.Tokenizer.from_file(str(GOLDEN / name / "tokenizer.json"))


@cache
def ours(name) -> Tokenizer:
    return Tokenizer(BUILT[name](), {}, {}) if name in BUILT else Tokenizer.load(GOLDEN / name)


def streamed(stream, ids, cuts=1) -> str:
    return "".join(stream.push(ids[k : k + cuts]) for k in range(0, len(ids), cuts)) + stream.finish()


@st.composite
def ids_of_a_tokenizer(draw):
    """Some tokenizer's ids, byte pieces and specials (the low and the last ids) often, unknown ids at times."""
    name = draw(st.sampled_from(NAMES))
    size = ours(name).size
    ids = st.integers(0, size - 1) | st.integers(max(0, size - 8), size + 3) | st.integers(0, min(size, 260) - 1)
    run = st.sampled_from(NASTY).map(ours(name).encode)
    return name, [i for part in draw(st.lists(st.lists(ids, max_size=8) | run, max_size=4)) for i in part]


@settings(max_examples=400, deadline=None)
@given(ids_of_a_tokenizer(), st.integers(1, 5), st.integers(0, 30))
@example(("prepend", [3 + 0xE2, 3 + 0x82, 3 + 0xAC, 3 + 0xFF]), 1, 2)
@example(("spaces", [257, 259, 257, 258]), 1, 1)
def test_streaming_equals_decoding(case, cuts, split):
    name, ids = case
    tokenizer = ours(name)
    text = library(name).decode([i for i in ids if i < tokenizer.size], skip_special_tokens=True)
    assert tokenizer.decode(ids) == text
    assert streamed(tokenizer.stream(), ids, cuts) == text

    prefix, rest = ids[:split], ids[split:]
    whole = tokenizer.decode_continuation(prefix, rest)
    assert streamed(tokenizer.stream(prefix), rest, cuts) == whole
    before = tokenizer.decode(prefix)
    if text.startswith(before):
        assert before + whole == text
    else:
        assert text.endswith(whole)


@pytest.mark.parametrize("name", ["bytelevel", "prepend", "metaspace"])
@pytest.mark.parametrize("text", NASTY)
def test_round_trip_without_a_half_character(name, text):
    tokenizer = ours(name)
    ids = tokenizer.encode(text, add_special=False)
    back = tokenizer.decode(ids)
    assert back == (" " + text if name == "metaspace" and text[0] != " " else text)
    stream, shown = tokenizer.stream(), ""
    for i in ids:
        shown += stream.push([i])
        assert back.startswith(shown)
    assert shown + stream.finish() == back


def test_every_byte():
    for name in ("bytelevel", "prepend", "metaspace"):
        for b in range(1, 0x110000, 997):
            if not 0xD800 <= b < 0xE000:
                ids = ours(name).encode(chr(b), add_special=False)
                assert ours(name).decode(ids).lstrip(" ") == chr(b).lstrip(" ")


def test_a_cut_character_is_flushed_as_replacement():
    tokenizer = ours("bytelevel")
    ids = tokenizer.encode("🙂", add_special=False)
    stream = tokenizer.stream()
    assert [stream.push([i]) for i in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.finish() == "\ufffd"


def test_continuation_keeps_the_space_and_completes_the_prefix():
    tokenizer, a = ours("spaces"), 258  # "▁a"
    assert tokenizer.decode([a]) == "a"
    assert tokenizer.decode_continuation([a], [a]) == streamed(tokenizer.stream([a]), [a]) == " a"
    tokenizer = ours("prepend")
    a, *euro = tokenizer.encode("€", add_special=False)
    assert tokenizer.decode_continuation([a, *euro[:1]], euro[1:]) == "€"
    assert tokenizer.decode_continuation([a, *euro], [a]) == " "


@pytest.mark.parametrize("name", ["bytelevel", "prepend", "metaspace"])
def test_special_tokens_in_plain_text_are_text(name):
    tokenizer = ours(name)
    for token in tokenizer.special_spellings:
        ids = tokenizer.encode(f"a{token} {token}b", add_special=False)
        assert not tokenizer.special_ids & {*ids}
        assert tokenizer.decode(ids).lstrip() == f"a{token} {token}b"
        assert tokenizer.encode_rendered([(token, True)])[0] in tokenizer.special_ids


def test_other_added_tokens_in_plain_text_are_tokens():
    ids = ours("metaspace").encode("a <think>b")
    assert ids == library("metaspace").encode("a <think>b").ids
    assert library("metaspace").token_to_id("<think>") in ids


def test_a_model_that_has_the_special_piece_itself():
    tokenizer = ours("unigram")
    ids = tokenizer.encode("a</s>b")
    assert 1 not in ids
    assert tokenizer.decode(ids).replace(" ", "") == "a</s>b"
    assert tokenizer.encode_rendered([("a", True), ("</s>", False), ("</s>", True)]).count(1) == 1


@pytest.mark.parametrize("name", ["bytelevel", "prepend", "metaspace"])
def test_rendered_spans_are_encoded_in_one_go(name):
    tokenizer = ours(name)
    control = min(tokenizer.special_spellings - {"<unk>"})
    text = f"{control}Once upon{control} a time {control}\n"
    expected = library(name).encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_rendered([(text, True)]) == expected
    for k in range(len(text)):
        if control not in text[:k][-len(control) + 1 :] + text[k:][: len(control) - 1]:  # not cutting a token in two
            assert tokenizer.encode_rendered([(text[:k], True), (text[k:], True)]) == expected
    plain = tokenizer.encode_rendered([("Once ", True), ("upon", False), (" a time", True)])
    assert plain == tokenizer.encode("Once upon a time", add_special=False)
    mixed = tokenizer.encode_rendered([(control, True), ("x ", True), (control, False), (" y", True)])
    assert mixed.count(mixed[0]) == 1
    assert tokenizer.decode(mixed).strip() == f"x {control} y"


def test_flags_of_added_tokens_are_kept():
    backend = tokenizers.Tokenizer(models.BPE(BYTES, [], byte_fallback=True))
    flags = [("<l>", {"lstrip": True}), ("<r>", {"rstrip": True}), ("W", {"single_word": True}), ("<n>", {})]
    backend.add_special_tokens([AddedToken(t, normalized=False, **f) for t, f in flags])
    backend.add_tokens([AddedToken("<n>!", normalized=False), AddedToken("AB", normalized=True)])
    backend.normalizer = normalizers.Lowercase()
    plain = tokenizers.Tokenizer.from_str(backend.to_str())
    tokenizer = Tokenizer(backend, {}, {})
    for text in ("a <l> b <r> c", "aWb W Wc", "<n>!<n>", "ab AB", "<N>", "<l><r>\n<l>"):
        assert tokenizer.encode_rendered([(text, True)]) == plain.encode(text).ids


def test_a_normalized_special_token_is_still_a_control_token(tmp_path):
    """The library looks for "▁</s>" then, and would not find it inside a text."""
    data = json.loads((GOLDEN / "prepend" / "tokenizer.json").read_text(encoding="utf-8"))
    for token in data["added_tokens"]:
        token["normalized"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert Tokenizer.load(tmp_path).encode_rendered([("a</s>", True)])[-1] == 2


def test_vocabulary_with_holes():
    tokenizer = ours("holes")
    assert tokenizer.size == 1004
    assert tokenizer.encode_rendered([("<unk>é", True)]) == [1003, 1002]
    assert tokenizer.encode("<unk>") == [0x3C, 0x75, 0x6E, 0x6B, 0x3E]


def test_truncation_and_padding_are_ignored():
    backend = _word_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert Tokenizer(backend, {}, {}).encode("a b a b") == [1, 2, 1, 2]


def test_named_tokens(tmp_path):
    def load(config, special_map):
        (tmp_path / "tokenizer.json").write_bytes((GOLDEN / "prepend" / "tokenizer.json").read_bytes())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(special_map))
        return Tokenizer.load(tmp_path)

    tokenizer = load({"bos_token": "<s>", "pad_token": None}, {"eos_token": {"content": "</s>"}, "pad_token": "<gone>"})
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = load({"bos_token": "<s>", "added_tokens_decoder": {}}, {"bos_token": "</s>", "eos_token": "</s>"})
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, None)
    tokenizer = load({"extra_special_tokens": ["▁th"]}, {})
    assert library("prepend").token_to_id("▁th") in tokenizer.special_ids


def test_text_that_is_not_utf8():
    for encode in (ours("prepend").encode, lambda text: ours("prepend").encode_rendered([(text, True)])):
        with pytest.raises(UsageError, match=r"U\+D800 at character 1"):
            encode("a\ud800")


def test_empty_text_and_post_processors():
    assert ours("prepend").encode("") == [1]
    assert ours("metaspace").encode("") == []
    backend = _word_level()
    backend.add_special_tokens(["<a>", "<z>"])
    backend.post_processor = processors.TemplateProcessing(single="<a> $A <z>", special_tokens=[("<a>", 5), ("<z>", 6)])
    assert Tokenizer(backend, {}, {}).encode("a b") == [5, 1, 2, 6]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no tokenizer.json"),
        ({"tokenizer.json": "{"}, "malformed"),
        ({"tokenizer.json": "version https://git-lfs.github.com/spec/v1\n"}, "git-LFS pointer"),
        ({"tokenizer.json": tokenizers.Tokenizer(models.BPE()).to_str()}, "vocabulary mismatch"),
        ({"tokenizer.json": _word_level().to_str().replace('"b":2', '"b":2147483648')}, "vocabulary mismatch"),
        ({"tokenizer.json": _word_level().to_str(), "tokenizer_config.json": "[" * 99999}, "not valid JSON"),
        ({"tokenizer.json": _word_level().to_str(), "tokenizer_config.json": "[1]"}, "expected a JSON object"),
    ],
)
def test_faults(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_post_processor_with_an_id_outside(tmp_path):
    backend = _word_level()
    backend.post_processor = processors.TemplateProcessing(single="<a> $A", special_tokens=[("<a>", 99)])
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    with pytest.raises(CheckpointError, match="post-processor"):
        Tokenizer.load(tmp_path)

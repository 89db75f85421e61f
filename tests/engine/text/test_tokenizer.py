import json
import random
import re
import time
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from engine import Engine
from engine.app import batch
from engine.errors import CheckpointError, UsageError
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_json import LibraryEncoder
from search import Sample
from tools import random_checkpoint

GOLDEN = Path(__file__).parents[2] / "golden" / "text"
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
CHATTING = ["bytelevel", "prepend", "metaspace"]
MERGES = ["gpt2", "opt"]
MODELS = ["sp_bpe", "sp_legacy", "sp_unigram"]
NAMES = [*CHATTING, *BUILT, *MERGES, *MODELS]


@cache
def library(name) -> tokenizers.Tokenizer:
    return BUILT[name]() if name in BUILT else tokenizers.Tokenizer.from_file(str(GOLDEN / name / "tokenizer.json"))


@cache
def sentencepiece(name) -> SentencePieceProcessor:
    return SentencePieceProcessor(model_proto=(GOLDEN / name / "tokenizer.model").read_bytes())


def library_decode(name, ids) -> str:
    """The library's text of ids it knows, without special tokens."""
    if name in MODELS:
        return sentencepiece(name).decode([i for i in ids if i not in ours(name).special_ids])  # as transformers does
    if name in MERGES:
        pieces = [piece_of(name)[i] for i in ids if i not in ours(name).special_ids]
        return decoders.ByteLevel().decode(pieces)
    return library(name).decode(ids, skip_special_tokens=True)


@cache
def piece_of(name) -> dict[int, str]:
    vocab = json.loads((GOLDEN / name / "vocab.json").read_text(encoding="utf-8"))
    return {i: piece for piece, i in vocab.items()} | {401: "<x>", 402: "<y>"}


@cache
def ours(name) -> Tokenizer:
    return built(BUILT[name]()) if name in BUILT else Tokenizer.load(GOLDEN / name)


def built(backend) -> Tokenizer:
    return Tokenizer(LibraryEncoder(backend, {}, {}), {}, {})


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
@example(("sp_bpe", [3 + 0xE2, 3 + 0x82, 3 + 0xAC, 3 + 0xFF, 3 + 0xF0, 3 + 0x9F]), 1, 2)
@example(("sp_bpe", [3 + 0xE2, 3 + 0x82, 400, 3 + 0xAC, 401]), 1, 2)
@example(("spaces", [257, 259, 257, 258]), 1, 1)
def test_streaming_equals_decoding(case, cuts, split):
    name, ids = case
    tokenizer = ours(name)
    text = tokenizer.decode(ids)
    if not (name in MODELS and max(ids, default=0) >= sentencepiece(name).get_piece_size()):
        assert text == library_decode(name, [i for i in ids if i < tokenizer.size])
    assert streamed(tokenizer.stream(), ids, cuts) == text

    prefix, rest = ids[:split], ids[split:]
    whole = tokenizer.decode_continuation(prefix, rest)
    assert streamed(tokenizer.stream(prefix), rest, cuts) == whole
    before = tokenizer.decode(prefix)
    if text.startswith(before):
        assert before + whole == text
    else:
        assert text.endswith(whole)


def test_a_stream_after_a_prefix_copies_no_tokenizer():
    backend = _spaces()
    backend.normalizer = normalizers.Replace(" ", "▁")  # as Gemma's: the library cannot copy it
    assert streamed(built(backend).stream([258]), [258]) == " a"
    backend = _word_level()
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "z")])
    assert streamed(built(backend).stream([2]), [1, 2]) == "z"


@pytest.mark.parametrize("name", [*CHATTING, *MERGES, "sp_bpe", "sp_legacy"])
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
    for name in [*CHATTING, *MERGES, "sp_bpe", "sp_legacy"]:
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


@pytest.mark.parametrize("name", [*CHATTING, *MERGES, "sp_bpe", "sp_legacy"])
def test_special_tokens_in_plain_text_are_text(name):
    tokenizer = ours(name)
    for token in tokenizer.special_spellings:
        ids = tokenizer.encode(f"a{token} {token}b", add_special=False)
        assert not tokenizer.special_ids & {*ids}
        assert tokenizer.decode(ids).lstrip() == f"a{token} {token}b"
        assert tokenizer.encode_rendered([(token, True)])[0] in tokenizer.special_ids
        cut = tokenizer.encode_rendered([(token[:1], True), (token[1:], False), (token, False), (token, True)])
        assert len(tokenizer.special_ids & {*cut}) == 1


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
    beside = ["e\u0301", "\u200d", "‿", "½", "Ⅷ", "Ⓐ", "-", "_", "\u093f"]  # a word or not
    backend.add_special_tokens([AddedToken(t, normalized=False, **f) for t, f in flags])
    backend.add_tokens([AddedToken("<n>!", normalized=False), AddedToken("AB", normalized=True)])
    backend.normalizer = normalizers.Lowercase()
    plain = tokenizers.Tokenizer.from_str(backend.to_str())
    tokenizer = built(backend)
    words = (*(f"{other}W" for other in beside), *(f"W{other}" for other in beside))
    for text in ("a <l> b <r> c", "aWb W Wc", "<n>!<n>", "ab AB", "<N>", "<l><r>\n<l>", *words):
        assert tokenizer.encode_rendered([(text, True)]) == plain.encode(text).ids


@st.composite
def texts_with_tokens(draw, names):
    """Some tokenizer's name, and a text of its tokens' spellings, words and spaces."""
    name = draw(st.sampled_from(names))
    tokenizer = ours(name)
    spellings = st.sampled_from(sorted(tokenizer.special_spellings | tokenizer.added_spellings or {"a"}))
    words = st.sampled_from(["a", "Ab", " the", " ", "  ", "\n", "é", "<s", "x>"]) | st.sampled_from(NASTY)
    return name, "".join(draw(st.lists(spellings | words, max_size=8)))


@settings(max_examples=400, deadline=None)
@given(texts_with_tokens([*CHATTING, "gemma", "qwen", "tekken", *BUILT]), st.booleans())
def test_parsed_text_has_the_ids_of_the_library(case, add_special):
    name, text = case
    plain = BUILT[name]() if name in BUILT else tokenizers.Tokenizer.from_file(str(GOLDEN / name / "tokenizer.json"))
    plain.no_truncation()
    plain.no_padding()
    parsed = ours(name).encode(text, add_special=add_special, parse_special=True)
    assert parsed == plain.encode(text, add_special_tokens=add_special).ids


NORMALIZERS = {
    "none": None,
    "lower": normalizers.Lowercase(),
    "nfkc": normalizers.NFKC(),
    "strip": normalizers.Strip(),
    "spaces": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
}


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("seed", range(8))
def test_parsed_text_keeps_all_flags_of_tokens(normalizer, seed):
    """Flags in any combination, beside overlapping spellings; no two of which are normalized alike: the library tells
    such apart by chance."""
    rng = random.Random(seed)
    names = ["<A>", "<A>!", "W", "Wo", "ﬁ", "[b ", "▁x"]
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    backend = tokenizers.Tokenizer(models.BPE(BYTES | {"▁": 300, "a": 301}, [], byte_fallback=True))
    if NORMALIZERS[normalizer] is not None:
        backend.normalizer = NORMALIZERS[normalizer]
    backend.add_tokens([AddedToken(name, **{flag: rng.random() < 0.5 for flag in flags}) for name in names])
    plain = tokenizers.Tokenizer.from_str(backend.to_str())
    tokenizer = built(backend)
    for _ in range(300):
        text = "".join(
            rng.choice([*names, " ", "  ", "\n", "a", "<a>", "wo", "fi", "x"]) for _ in range(rng.randint(0, 7))
        )
        assert tokenizer.encode(text, parse_special=True) == plain.encode(text).ids, text


def test_parsed_text_of_merges_and_flags_in_the_configuration(tmp_path):
    tokenizer = ours("gpt2")
    token = min(tokenizer.special_spellings)
    assert tokenizer.encode(f"a{token}b", parse_special=True) == [
        *tokenizer.encode("a"),
        *tokenizer.encode_rendered([(token, True)]),
        *tokenizer.encode("b"),
    ]
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((GOLDEN / "metaspace" / file).read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    entry = {"content": "<think>", "lstrip": True, "rstrip": True, "normalized": False, "special": False}
    config["added_tokens_decoder"] = {"9": entry}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    changed = Tokenizer.load(tmp_path)
    parsed = [changed.encode(text, add_special=False, parse_special=True) for text in ("a <think> \n b", "a<think>b")]
    assert parsed[0] == parsed[1]


def test_parsed_text_beside_a_model():
    """Split at added tokens, which take the spaces that their flags say; the parts as sentencepiece has them."""
    tokenizer, library = ours("sp_bpe"), sentencepiece("sp_bpe")
    bare = SentencePieceProcessor(model_proto=library.serialized_model_proto() + b"\x1a\x02\x18\x00")
    assert tokenizer.encode("the</s>the", parse_special=True) == [1, *library.encode("the"), 2, *bare.encode("the")]
    right, left = (tokenizer.encode(text, parse_special=True) for text in ("the<x> \n the", "the \n<y> the"))
    assert right == [1, *library.encode("the"), 400, *bare.encode("the")]
    assert left == [1, *library.encode("the"), 401, *bare.encode(" the")]
    assert 2 not in tokenizer.encode("the</s>the")


def test_what_a_text_spells():
    tokenizer = ours("bytelevel")
    token = min(tokenizer.special_spellings)
    assert tokenizer.spelled(f"a {token} b") == token and tokenizer.spelled("a") == ""
    assert ours("metaspace").spelled("a <think>") == ""  # a token in every text


def test_flags_of_tokens_that_the_configuration_names(tmp_path):
    """Flags of named tokens count only for tokens that the tokenizer.json does not add, a list of extra tokens makes
    special only those, and what is special in one file is special; all as in transformers 5."""
    backend = tokenizers.Tokenizer(models.BPE(BYTES | {"<s>": 256, "<p>": 257}, [], byte_fallback=True))
    backend.add_tokens([AddedToken("<x>", normalized=False)])
    backend.add_special_tokens(["<y>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    entry = {"content": "<y>", "lstrip": True, "normalized": False, "special": False}
    config = {"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": True}, "extra_special_tokens": ["<x>"]}
    config |= {"pad_token": "<p>", "added_tokens_decoder": {"259": entry}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special_spellings == {"<s>", "<p>", "<y>"}
    (tmp_path / "added_tokens.json").write_text('{"<z>": 260, "<w>": 261}')
    (tmp_path / "tokenizer_config.json").write_text('{"additional_special_tokens": ["<x>", "<z>"]}')
    assert Tokenizer.load(tmp_path).special_spellings == {"<y>", "<z>"}
    assert tokenizer.encode(" <s> <p> <y>", parse_special=True) == [256, BYTES["<0x20>"], 257, 259]


@pytest.mark.parametrize("decoder", [decoders.ByteFallback(), decoders.WordPiece("##", False), None])
def test_spaces_are_cleaned_up_except_by_merges(tmp_path, decoder):
    """`clean_up_tokenization_spaces`, whole and streamed."""
    pieces = ["Do", " n't", " ", "'", "s", " ' ", ".", " .", "ve", "n", "##re", "?"]
    backend = tokenizers.Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, "Do"))
    backend.decoder = decoder  # type: ignore[assignment]
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"clean_up_tokenization_spaces": true}')
    tokenizer, cleaned = Tokenizer.load(tmp_path), [(" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'")]
    cleaned += [(f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")]
    for seed in range(200):
        ids = random.Random(seed).choices(range(len(pieces)), k=9)
        expected = backend.decode(ids)
        for old, new in cleaned:
            expected = expected.replace(old, new)
        stream = tokenizer.stream()
        assert tokenizer.decode(ids) == expected == "".join(stream.push([i]) for i in ids) + stream.finish()
    with pytest.raises(UsageError, match="no bytes for each token"):  # a constraint would see the spaces
        tokenizer.data()


def test_a_normalized_special_token_is_still_a_control_token(tmp_path):
    """The library looks for "▁</s>" then, and would not find it inside a text."""
    data = json.loads((GOLDEN / "prepend" / "tokenizer.json").read_text(encoding="utf-8"))
    for token in data["added_tokens"]:
        token["normalized"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert Tokenizer.load(tmp_path).encode_rendered([("a</s>", True)])[-1] == 2


def test_a_normalized_token_decodes_as_the_library_decodes_it():
    """From tokenizers 0.23 on that is the normalised spelling, here with a space; alone, streamed and as bytes."""
    backend = tokenizers.Tokenizer.from_file(str(GOLDEN / "prepend" / "tokenizer.json"))
    backend.add_tokens(["<tool>", "foo bar", AddedToken("<raw>", normalized=False)])
    library, tokenizer = tokenizers.Tokenizer.from_str(backend.to_str()), built(backend)
    ids = library.encode("a<tool>a <tool> foo bar<raw> a", add_special_tokens=False).ids
    new = [library.token_to_id(token) for token in ("foo bar", "<raw>", "<tool>")]
    for tokens in (ids, new, [*ids, *new, *ids]):
        assert tokenizer.decode(tokens) == library.decode(tokens)
        stream = tokenizer.stream()
        assert "".join(stream.push([i]) for i in tokens) + stream.finish() == library.decode(tokens)
    data = tokenizer.data()
    inside = [library.decode([ids[0], i]).removeprefix(library.decode(ids[:1])) for i in new]
    assert [data[i].decode() for i in new] == inside


def test_vocabulary_with_holes():
    tokenizer = ours("holes")
    assert tokenizer.size == 1004
    assert tokenizer.encode_rendered([("<unk>é", True)]) == [1003, 1002]
    assert tokenizer.encode("<unk>") == [0x3C, 0x75, 0x6E, 0x6B, 0x3E]


def test_thousands_of_added_tokens_are_added_at_once(tmp_path):
    """Gemma 3 has as many. One by one they would take minutes: each call builds the search of all of them again."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((GOLDEN / "gemma" / file).read_bytes())
    data = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, names = data["model"]["vocab"], [f"<unused{i}>" for i in range(1, 6500)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    start = max(token["id"] for token in data["added_tokens"]) + 1
    data["added_tokens"] += [{"id": start + i, "content": name, **flags} for i, name in enumerate(names)]
    vocab |= {name: start + i for i, name in enumerate(names)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    began = time.process_time()
    tokenizer = Tokenizer.load(tmp_path)
    assert time.process_time() - began < 10
    assert tokenizer.encode("<unused77>")[1:] == [start + 76]
    assert tokenizer.encode("<unused7")[1:] == ours("gemma").encode("<unused7")[1:]


def test_truncation_and_padding_are_ignored():
    backend = _word_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert built(backend).encode("a b a b") == [1, 2, 1, 2]


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
    tokenizer = load(
        {"eos_token": "</s>", "extra_special_tokens": {"image_token": {"content": "<s>"}, "eos": "▁th"}}, {}
    )
    assert tokenizer.special_tokens == {"eos_token": "</s>", "image_token": "<s>", "eos": "▁th"}
    assert tokenizer.decode(tokenizer.encode_rendered([("▁th", True)])) == ""
    tokenizer = load({"extra_special_tokens": ["▁th"]}, {})
    assert library("prepend").token_to_id("▁th") in tokenizer.special_ids


LLAMA_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize(
    ("kind", "model", "config", "expected"),
    [
        ("LlamaTokenizer", "llama", {}, LLAMA_NAMES),
        (
            "LlamaTokenizerFast",
            None,
            {"eos_token": None, "bos_token": "</s>"},
            {"bos_token": "</s>", "unk_token": "<unk>"},
        ),
        ("LlamaTokenizer", "mistral", {}, {}),
        ("PreTrainedTokenizerFast", "gpt2", {}, {}),
        ("GPT2Tokenizer", "llama", {"unk_token": "<unk>"}, {"unk_token": "<unk>"}),
        (None, "gemma2", {}, {"unk_token": "<unk>"}),
        (None, "llama", {}, {}),
    ],
)
def test_names_that_no_file_has(tmp_path, kind, model, config, expected):
    """Equal to the special_tokens_map of transformers 5.24, without tokens that the vocabulary lacks."""
    (tmp_path / "tokenizer.json").write_bytes((GOLDEN / "prepend" / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": kind}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    assert Tokenizer.load(tmp_path).special_tokens == expected


def test_a_byte_level_tokenizer_is_not_the_class_of_llama(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((GOLDEN / "qwen" / "tokenizer.json").read_bytes())
    for kind, expected in (("LlamaTokenizer", set()), ("Qwen2Tokenizer", {"eos_token", "unk_token", "pad_token"})):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, "bos_token": None}))
        assert {*Tokenizer.load(tmp_path).special_tokens} == expected


def test_the_token_of_padding_is_named_and_special(tmp_path):
    spec = json.loads((GOLDEN / "qwen" / "tokenizer.json").read_text())
    token = spec["added_tokens"][0]
    token["special"] = False
    spec["padding"] = {
        "strategy": "BatchLongest",
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": token["id"],
    }
    spec["padding"] |= {"pad_type_id": 0, "pad_token": token["content"]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special_tokens == {"pad_token": token["content"]} and tokenizer.decode([token["id"]]) == ""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": None}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special_tokens == {} and tokenizer.decode([token["id"]]) == token["content"]


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
    assert built(backend).encode("a b") == [5, 1, 2, 6]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no tokenizer.json, tokenizer.model, vocab.json, tekken.json or tiktoken.model"),
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


# --- sentencepiece ---


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(MODELS), st.text(max_size=20) | st.text("a ▁<user>ﬁ\tdhe\u0301", max_size=20))
def test_plain_text_has_the_ids_of_sentencepiece(name, text):
    tokenizer = ours(name)
    spelled = [s for s in tokenizer.special_spellings | tokenizer.added_spellings if s in text]
    ids = tokenizer.encode(text, add_special=False)
    if not spelled:
        assert ids == sentencepiece(name).encode(text)
    assert tokenizer.decode(ids) == library_decode(name, ids) == streamed(tokenizer.stream(), ids)


def with_config(tmp_path, name, **config) -> Tokenizer:
    for file in (GOLDEN / name).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    old = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**old, **config}))
    return Tokenizer.load(tmp_path)


def test_what_follows_an_added_token(tmp_path):
    """A text of its own in legacy mode; else a continuation, whose space is its own."""
    library, spans = sentencepiece("sp_bpe"), [("the </s> the</s>", True), ("the", False), ("</s>the", False)]
    bare = SentencePieceProcessor(model_proto=library.serialized_model_proto() + b"\x1a\x02\x18\x00")
    start = [*library.encode("the "), 2]
    legacy, modern, never = [
        with_config(tmp_path, "sp_bpe", **config) for config in ({"legacy": True}, {}, {"add_prefix_space": False})
    ]
    assert legacy.encode_rendered(spans) == [*start, *library.encode(" the"), 2, *library.encode("the</s>the")]
    assert modern.encode_rendered(spans) == [*start, *bare.encode(" the"), 2, *bare.encode("the</s>the")]
    assert never.encode("the", add_special=False) == bare.encode("the") != library.encode("the")
    assert never.decode(library.encode("the")) == " the"
    assert modern.encode_rendered([("</s>the", True)]) == [2, *bare.encode("the")]
    collapsing = ours("sp_unigram")
    assert collapsing.encode_rendered([("</s> the", True)]) == [2, *sentencepiece("sp_unigram").encode("the")]


def test_flags_of_tokens_beside_a_model():
    tokenizer = ours("sp_bpe")
    assert tokenizer.encode_rendered([("a<x> \n b", True)]) == tokenizer.encode_rendered([("a<x>b", True)])
    assert tokenizer.encode_rendered([("a \n<y> b", True)]) == tokenizer.encode_rendered([("a<y> b", True)])
    assert 400 in tokenizer.encode("<x>") and not {401} & {*tokenizer.encode("<y>")}  # special ones are not for users


@pytest.mark.parametrize(
    ("config", "ends"),
    [
        ({}, [1]),
        ({"add_bos_token": None, "add_eos_token": True}, [1, 2]),
        ({"add_bos_token": False}, []),
        ({"bos_token": None}, []),
    ],
)
def test_ends_of_a_text(tmp_path, config, ends):
    tokenizer = with_config(tmp_path, "sp_unigram", **config)
    assert tokenizer.encode("") == ends
    assert tokenizer.encode_rendered([("", True)]) == []
    assert tokenizer.bos_token_id == (None if "bos_token" in config else 1)


def test_a_symbol_of_the_model_that_the_configuration_calls_special(tmp_path):
    user = sentencepiece("sp_bpe").piece_to_id("<user>")
    tokenizer = with_config(tmp_path, "sp_bpe", additional_special_tokens=["<user>"])
    assert user in ours("sp_bpe").encode("a<user>b")
    ids = tokenizer.encode("a<user>b<user>")
    assert user not in ids and tokenizer.decode(ids) == "a<user>b<user>"
    assert tokenizer.encode_rendered([("a<user>b", True)]).count(user) == 1
    lone = with_config(tmp_path, "sp_bpe", additional_special_tokens=["ß"])
    with pytest.raises(UsageError, match="cannot spell"):
        lone.encode("aß")


def test_an_added_token_in_the_place_of_a_piece(tmp_path):
    tokens = {"7": {"content": "<new>", "special": True}, "405": {"content": "<far>", "special": False}}
    tokenizer = with_config(tmp_path, "sp_bpe", added_tokens_decoder=tokens)
    assert tokenizer.size == 406
    assert tokenizer.encode_rendered([("<new><far>", True)]) == [7, 405]
    assert tokenizer.decode([7, 403, 405], skip_special=False) == "<new><far>"
    assert tokenizer.decode([7, 403, 405]) == "<far>"


def test_tokenizer_json_comes_first(tmp_path):
    tokenizer = with_config(tmp_path, "sp_bpe")
    (tmp_path / "vocab.json").write_text("{")
    assert Tokenizer.load(tmp_path).size == tokenizer.size
    (tmp_path / "tokenizer.json").write_bytes((GOLDEN / "prepend" / "tokenizer.json").read_bytes())
    assert Tokenizer.load(tmp_path).encode("Once") == ours("prepend").encode("Once")


# --- vocab.json and merges.txt ---


def test_beginnings_of_opt_and_gpt2(tmp_path):
    assert ours("opt").encode("")[:1] == [2] and ours("opt").bos_token_id == ours("opt").eos_token_id == 2
    assert ours("gpt2").encode("") == [] and ours("gpt2").eos_token_id == 400
    both = with_config(tmp_path, "opt", add_eos_token=True, bos_token="<s>")
    assert both.encode("") == [0, 2]
    spaced = with_config(tmp_path, "gpt2", add_prefix_space=True)
    assert spaced.encode("Once") == ours("gpt2").encode(" Once")


FAULTY = [
    ("sp_bpe", "tokenizer.model", lambda data: b"", "vocabulary mismatch: the file is empty, 0 pieces"),
    ("sp_bpe", "tokenizer.model", lambda data: data[:1000], "malformed"),
    ("sp_bpe", "tokenizer.model", lambda data: b"AA== 0\n", "malformed"),
    ("sp_bpe", "tokenizer.model", lambda data: b"version https://git-lfs.github.com/spec/v1\n", "git-LFS pointer"),
    ("sp_legacy", "added_tokens.json", lambda data: b'{"<s>": 7}', "'<s>' has the ids 7 and 1"),
    ("sp_legacy", "added_tokens.json", lambda data: b'{"<x>": -1}', "expected a text and an id"),
    ("sp_legacy", "tokenizer_config.json", lambda data: b'{"legacy": "yes"}', "legacy: expected true or false"),
    ("sp_legacy", "tokenizer_config.json", lambda data: b'{"added_tokens_decoder": {"x": 1}}', "expected a text and"),
    ("gpt2", "vocab.json", lambda data: data[:-9], "vocab.json|not valid JSON.*line 1"),
    ("gpt2", "vocab.json", lambda data: data.replace(b'"!":0', b'"!":"0"'), "'!': expected an id"),
    ("gpt2", "vocab.json", lambda data: data.replace(b'"!":0', b'"!":1'), "share the id 1"),
    ("gpt2", "vocab.json", lambda data: data.replace(b'"!":0', b'"!!":0'), "1 of the 256 byte pieces"),
    ("gpt2", "merges.txt", lambda data: data.replace(b"\n", b"\nh e l\n", 1), "merges.txt, line 2"),
    ("gpt2", "merges.txt", lambda data: data.replace(b"\n", b"\n! ~\n", 1), "'!~' is not in vocab.json(.|\n)*, line 2"),
    ("gpt2", "merges.txt", lambda data: data + b"\xff", "not UTF-8: byte"),
    ("gpt2", "merges.txt", None, "cannot read the file"),
]


@pytest.mark.parametrize(("name", "file", "damage", "message"), FAULTY)
def test_damaged_files(tmp_path, name, file, damage, message):
    with_config(tmp_path, name)
    path = tmp_path / file
    damaged = damage(path.read_bytes()) if damage else None
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert file in str(caught.value) and str(caught.value).count("\n") <= 2


def test_line_ends_and_absent_last_line_in_merges(tmp_path):
    with_config(tmp_path, "gpt2")
    path = tmp_path / "merges.txt"
    path.write_bytes(path.read_bytes().rstrip().replace(b"\n", b"\r\n"))
    assert Tokenizer.load(tmp_path).encode(NASTY[0] + "Once upon") == ours("gpt2").encode(NASTY[0] + "Once upon")


# --- in an engine ---


def checkpoint(tmp_path, name, vocab) -> Path:
    """A random model with the tokenizer files of a fixture."""
    random_checkpoint.make(tmp_path, layers=1, width=16, mlp=16, heads=2, vocab=vocab)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).unlink()
    if name:
        with_config(tmp_path, name)
    return tmp_path


@pytest.mark.parametrize("name", ["sp_bpe", "gpt2", "opt", None])
def test_engines_find_the_tokenizer(tmp_path, name):
    engine = Engine.load(checkpoint(tmp_path, name, 480), device="cpu", threads=1)
    if name is None:
        with pytest.raises(CheckpointError, match="no tokenizer"):
            _ = engine.tokenizer
        return
    assert engine.runner.vocab_size == engine.tokenizer.size == ours(name).size  # 480 are padding
    result = engine.generate(["Once upon"], Sample(seed=3), max_new_tokens=12, ignore_eos=True)[0]
    output = result.outputs[0]
    assert max(output.token_ids) < ours(name).size
    assert output.text == ours(name).decode(output.token_ids)


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path):
    """It works, as in transformers, until one of them is asked for."""
    engine = Engine.load(checkpoint(tmp_path, "sp_bpe", 400), device="cpu", threads=1)
    assert engine.tokenizer.size == 402
    assert engine.generate(["Once"], Sample(), max_new_tokens=2)[0].outputs
    with pytest.raises(UsageError, match="from 0 to 399, got 400"):
        engine.generate(["Once <x>"], Sample(), max_new_tokens=2)


def test_an_empty_model_ends_a_command_line(tmp_path, capsys):
    folder = checkpoint(tmp_path, "sp_bpe", 480)
    (folder / "tokenizer.model").write_bytes(b"")
    (tmp_path / "lines").write_text("{}\n")
    assert batch.main(["--model", str(folder), "--input", str(tmp_path / "lines"), "--device", "cpu"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "vocabulary mismatch" in captured.err and "tokenizer.model" in captured.err


def test_no_prefix_follows_a_token_that_is_found_in_text_with_its_prefix():
    """Llama 1 as many have converted it: the tokens are `normalized`; transformers puts no space after them either."""
    vocab = BYTES | {"<s>": 256, "▁": 257, "a": 258, "▁a": 259}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_special_tokens([AddedToken("<s>", normalized=True)])
    whole = tokenizers.Tokenizer.from_str(backend.to_str())
    encoder = LibraryEncoder(backend, {}, {})
    for text in ("a", " a", "  a a", "\na", "▁a", " ", ""):
        assert encoder.encode([text], False) == whole.encode(text).ids
    assert encoder.encode([256, "a"], False) == whole.encode("<s>a").ids == [256, 258]
    assert encoder.encode([256, " a"], False) == whole.encode("<s> a").ids == [256, 259]
    assert encoder.encode(["a", 256, "a"], False) == [259, 256, 258]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("strips", [{}, {"rstrip": True}, {"lstrip": True}])
def test_a_prefix_follows_tokens_that_are_found_before_normalization(special, strips):
    """A fine-tuned Llama 1: its own tokens are `normalized`, the one that was added to it is not."""
    vocab = BYTES | {"<s>": 256, "▁": 257, "a": 258, "▁a": 259, "▁▁": 260, "▁▁a": 261}
    merges = [("▁", "a"), ("▁", "▁"), ("▁▁", "a")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_special_tokens([AddedToken("<s>", normalized=True)])
    backend.add_tokens([AddedToken("<t>", normalized=False, special=special, **strips)])
    whole = tokenizers.Tokenizer.from_str(backend.to_str())
    encoder = LibraryEncoder(backend, {}, {})
    for text in ("<t>a", "a<t> a <t><t>a", "<t>", " <t> ", "<t>  a", "<t>a a", "a"):
        parts = [262 if part == "<t>" else part for part in re.split("(<t>)", text)]
        assert encoder.encode(parts, False) == whole.encode(text).ids
    assert encoder.encode([256, "a", 262, "a", 256, "a"], False) == [256, 258, 262, 259, 256, 258]


def test_an_ordinary_token_is_found_in_text_with_its_prefix():
    """A Llama 1 to which `add_tokens` added one: the library finds it after a space, which belongs to it."""
    vocab = BYTES | {"<s>": 256, "▁": 257, "a": 258, "▁a": 259}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_special_tokens([AddedToken("<s>", normalized=True)])
    backend.add_tokens(["<t>"])
    whole = tokenizers.Tokenizer.from_str(backend.to_str())
    encoder = LibraryEncoder(backend, {}, {})
    for text in ("<t>", " <t>", "<t>a", "<t> a", "a <t> a", "a<t>a", "a <t><t>"):
        assert encoder.encode([text], False) == whole.encode(text).ids
    assert encoder.encode([256, "a <t>"], False) == [256, 258, 260]

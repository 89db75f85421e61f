"""Tokenizers of GGUF files: the ids of the tokenizers that they were made of."""

import io
import json

import pytest
import tokenizers
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from models.checkpoint.headers import Checkpoint
from tests.models.gguf.files import GOLDEN, File


def texts(name):
    """Texts of a golden file, and words of them put together in many ways."""
    golden = json.loads((GOLDEN / f"text/{name}.json").read_text(encoding="utf-8"))
    found = [text["text"] for text in golden["texts"]]
    words = [word for text in found for word in text.split(" ")]
    step = [" ".join(words[i % 7 :: i]) for i in range(3, 150)]
    return [*found, *step, *("  ".join(words[i : i + 9]) + "\n" * (i % 3) for i in range(0, len(words), 5))]


def tokenizer_of(file, path):
    """The vocabulary and the tokenizer of a file."""
    checkpoint = Checkpoint.open(file.write(path.with_suffix(".gguf")))
    return checkpoint.vocabulary, Tokenizer.of(checkpoint)


@pytest.mark.parametrize("name, pre", [("bytelevel", "llama-bpe"), ("prepend", None)])
def test_tokenizers_give_the_ids_of_their_own_files(name, pre, tmp_path):
    file = File(GOLDEN / "llama/plain")
    file.folder = GOLDEN / "text" / name
    # The key of the first vocabulary for unknown tokens stays, and is an ordinary token of the second.
    file.keys |= file.vocabulary() | ({"tokenizer.ggml.pre": pre} if pre else {})
    (_, ours), theirs = tokenizer_of(file, tmp_path / "file"), Tokenizer.load(file.folder)
    for text in texts(name):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.special_tokens.items() >= theirs.special_tokens.items() - {("pad_token", "<unk>")}
    chats = json.loads((GOLDEN / f"text/{name}.json").read_text(encoding="utf-8"))["chats"]
    template = ChatTemplate.load(tmp_path / "file.gguf", ours)
    for chat in chats:
        spans = template.render(chat["messages"], add_generation_prompt=chat["add_generation_prompt"])
        assert spans == [(chat["text"], True)]


def test_scores_of_a_sentencepiece_model(tmp_path):
    folder = GOLDEN / "text/sp_bpe"
    model = SentencePieceProcessor(str(folder / "tokenizer.model"))
    ids = range(model.get_piece_size())
    kinds = {1: None, 2: model.is_unknown, 3: model.is_control, 5: model.is_unused, 6: model.is_byte}
    file = File(GOLDEN / "llama/plain")
    file.keys |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [next((k for k, test in kinds.items() if test and test(i)), 1) for i in ids],
        **{f"tokenizer.ggml.{name}_token_id": i for name, i in (("bos", model.bos_id()), ("eos", model.eos_id()))},
    }
    _, ours = tokenizer_of(file, tmp_path / "file")
    for text in texts("sp_bpe"):
        assert ours.encode(text, add_special=False) == model.encode(text)
        assert ours.encode(text)[0] == model.bos_id()
        assert ours.decode(model.encode(text)) == model.decode(model.encode(text))


def test_what_ends_a_text(tmp_path):
    file = File(GOLDEN / "llama/plain")
    tokens = ["<unk>", "<s>", "</s>", "<|eot_id|>", "<|im_end|>", "<|role_end|>", "[PAD6]"]
    file.keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [2, 3, 3, 3, 1, 3, 5]}
    file.keys |= {
        "tokenizer.ggml.eom_token_id": 0,
        "tokenizer.chat_template.tools": "T",
        "tokenizer.chat_template": "D",
    }
    file.keys["tokenizer.chat_templates"] = ["tools"]
    read, ours = tokenizer_of(file, tmp_path / "file")
    assert read.ends() == [2, 0, 3, 5]  # <|im_end|> is an ordinary token here
    file.keys["tokenizer.ggml.token_type"] = [2, 3, 3, 3, 4, 3, 5]  # and here one of the user's, as in llama.cpp
    assert tokenizer_of(file, tmp_path / "other")[0].ends() == [2, 0, 3, 4, 5]
    assert ours.size == 6  # padding is no token
    templates = ours.config["chat_template"]
    assert templates == [{"name": "default", "template": "D"}, {"name": "tools", "template": "T"}]


def test_the_end_of_a_part_ends_no_text(tmp_path):
    """Solar Open ends what it thinks by <|end|>, and goes on."""
    file = File(GOLDEN / "llama/plain")
    tokens = ["<unk>", "<s>", "<|flush|>", "<|end|>", "<|calls|>", "<|endoftext|>"]
    file.keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [2, *[3] * 5]}
    read, _ = tokenizer_of(file, tmp_path / "file")
    assert read.ends() == [2, 4]


def test_the_end_of_a_message_of_a_channel_ends_no_text(tmp_path):
    """gpt-oss ends what it thinks by <|end|>, and goes on."""
    file = File(GOLDEN / "llama/plain")
    tokens = ["<unk>", "<s>", "<|return|>", "<|end|>", "<|call|>", "<|channel|>", "<|endoftext|>"]
    file.keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [2, *[3] * 6]}
    read, _ = tokenizer_of(file, tmp_path / "file")
    assert read.ends() == [2, 4, 6]


# --- tokenizers that are trained here, in the words of the tokenizer.json files of the families ---

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
HUNYUAN = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)


BAILING = (  # as in tokenizer.json
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
DEEPSEEK_LLM = (  # its letters are all of the alphabets with upper and lower case
    r"[\r\n]",
    r"\s?(?:[\p{Lu}\p{Ll}\p{Lt}&&[^ªº]])+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}",
)
AFMOE = (  # of each number the first one or two digits, if they are not three, and then threes
    r"(?<!\p{N})\p{N}(?=(?:\p{N}{3})*(?!\p{N}))|(?<!\p{N})\p{N}{2}(?=(?:\p{N}{3})*(?!\p{N}))|\p{N}{3}",
    "[一-鿿㐀-䶿豈-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-\u2fdf\u0e40-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+",
    HUNYUAN[2],
)
JAIS2 = LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + (
    r"\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|"
    r"\s{1,2}(?!\S)|\s{1}"
)
EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
KIMI_K2 = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    GPT4O.replace("{1,3}", ""),
)


def split(*patterns, digits=False):
    """The pre-tokenizer of these patterns, then bytes."""
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    steps += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)])


FALCON = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ]
)

FAMILIES = {  # by tokenizer.ggml.pre: the pre-tokenizer, whether whole words are looked up first, whether NFC
    "llama-bpe": (split(LLAMA3), True, False),
    "qwen2": (split(LLAMA3.replace("{1,3}", "")), False, True),
    "qwen35": (split(QWEN35), False, True),
    "bailingmoe2": (split(BAILING), False, False),
    "smollm": (split(digits=True), False, False),
    "refact": (split(digits=True), False, False),
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), False, False),
    "phi-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), False, False),
    "stablelm2": (split(LLAMA3.replace("{1,3}", "")), False, False),
    "dbrx": (split(LLAMA3), False, False),
    "tekken": (split(TEKKEN), True, False),
    "gpt-4o": (split(GPT4O), False, False),
    "hunyuan-dense": (split(*HUNYUAN), False, False),
    "deepseek-coder": (split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"), False, False),
    "deepseek-llm": (split(*DEEPSEEK_LLM), False, False),
    "lfm2": (split(LLAMA3), True, False),
    "falcon": (FALCON, False, False),
    "bloom": (split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), False, False),
    "viking": (split(r" ?[^(\s|[.,!?…。，、।۔،])]+", r"\p{N}"), False, False),
    "afmoe": (split(*AFMOE), False, False),
    "laguna": (split(r"[^\n]+|[\n]+", LLAMA3.replace("{1,3}", "")), False, False),
    "tiny_aya": (split(r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O), False, False),
    "superbpe": (split(r"\p{N}+", r"(?=(\d{3})+(?!\d))"), False, False),
    "jais-2": (split(JAIS2), False, False),
    "exaone-moe": (split(EXAONE_MOE), False, False),
    "kimi-k2": (split(KIMI_K2), False, False),
    "ufakzeka": (split("[^" + LLAMA3.partition("|[^")[2].replace("{1,3}", "")), False, False),
    "youtu": (split(*YOUTU), True, False),
    None: (pre_tokenizers.ByteLevel(add_prefix_space=False), False, False),
}
CORPUS = [
    *("The quick brown fox's 12345 jumps, don't it? I'LL see 3.14159!" for _ in range(9)),
    *("def f(x):\n    return x ** 2  # 平方 を 返す\n\n\tif (a != b) && c[0]->d:\r\n" for _ in range(9)),
    *("Größe e\u0301te\u0301 Ελλάδα Привет мир مرحبا 안녕하세요 😀😃👍🏽 ---=== //<br/>\n\n" for _ in range(9)),
]
TEXTS = [
    *CORPUS[::9], " ".join(CORPUS[::4]), "www.a-b_c.com/?q=1&r=%20#z", "", "\n", " ",
    "  two   three    four\n \n\t\t x", "A1B22C333D4444E55555 666666 7777777 88888888 ½ ² ٣",
    "été ﬁ Å", "\u3000", "'S 'Ll we'd",
    "<|im_start|>user\nHi!<|im_end|>\n", "x" * 70, "a\u200db\u00a0c",
]  # fmt: skip
SPECIAL = ["<|begin|>", "<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize("pre", FAMILIES)
def test_pre_tokenizers_of_families(pre, tmp_path):
    splitter, whole_words, composed = FAMILIES[pre]
    library = tokenizers.Tokenizer(models.BPE(ignore_merges=whole_words))
    library.pre_tokenizer, library.decoder = splitter, decoders.ByteLevel()
    library.normalizer = normalizers.NFC() if composed else None
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"initial_alphabet": alphabet, "special_tokens": SPECIAL, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=700, **options)
    library.train_from_iterator(CORPUS, trainer)
    trained, file = json.loads(library.to_str())["model"], File(GOLDEN / "llama/plain")
    vocab = trained["vocab"]
    if whole_words:  # a token that its merges do not lead to
        vocab["Ġzebrafish"] = len(vocab)
    tokens = sorted(vocab, key=vocab.get)
    file.keys = {key: value for key, value in file.keys.items() if not key.startswith("tokenizer.ggml")} | {
        "tokenizer.ggml.model": "gpt2",
        **({} if pre is None else {"tokenizer.ggml.pre": pre}),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in trained["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }
    whole = models.BPE(vocab, [tuple(pair) for pair in trained["merges"]], ignore_merges=whole_words)
    library.model = whole
    library.add_special_tokens(SPECIAL)
    _, ours = tokenizer_of(file, tmp_path / "file")
    begins = [0] if whole_words and pre != "youtu" else []
    for text in [*TEXTS, " zebrafish zebrafish"]:
        expected = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False, parse_special=True) == expected, text
        assert ours.encode(text, parse_special=True) == begins + expected
        assert ours.decode(expected, skip_special=False) == library.decode(expected, skip_special_tokens=False)


@pytest.mark.parametrize("spaced", [True, False])
def test_sentencepiece_models_with_tokens_of_their_own(spaced, tmp_path):
    """Tokens that a person defines are found in any text; control tokens in none; and a space comes before, or not."""
    found = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3), model_writer=found, model_type="bpe", vocab_size=900, byte_fallback=True,
        user_defined_symbols=["\n\n", "▁▁", "<b>"], control_symbols=["<start>"], add_dummy_prefix=spaced,
        normalization_rule_name="identity", remove_extra_whitespaces=False, num_threads=1, minloglevel=2,
        allow_whitespace_only_pieces=True, hard_vocab_limit=False,
    )  # fmt: skip
    model = SentencePieceProcessor(model_proto=found.getvalue())
    ids = range(model.get_piece_size())
    kinds = [6 if model.is_byte(i) else 3 if model.is_control(i) else 2 if model.is_unknown(i) else 1 for i in ids]
    tokens = [model.id_to_piece(i) for i in ids]
    for i, piece in enumerate(tokens):
        if piece in ("\n\n", "▁▁", "<b>"):  # as convert_hf_to_gguf writes them
            kinds[i], tokens[i] = 4, piece.replace("▁", " ")
    file = File(GOLDEN / "llama/plain")
    file.keys = {key: value for key, value in file.keys.items() if not key.startswith("tokenizer.ggml")} | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.add_space_prefix": spaced,
    }
    read, ours = tokenizer_of(file, tmp_path / "file")
    assert read.has_scores
    read.keys.config = {**read.keys.config, "merges": []}  # saved by llama.cpp; the package writes no empty list
    assert not read.has_merges
    for text in [*TEXTS, "a<b>c  d\n\n\ne"]:
        assert ours.encode(text, add_special=False) == model.encode(text), text
        assert ours.encode(text)[0] == model.bos_id()
        assert ours.decode(model.encode(text)) == model.decode(model.encode(text))
    start = tokens.index("<start>")
    assert start not in ours.encode("<start>a")
    assert ours.encode("<start>", parse_special=True, add_special=False) == [start]

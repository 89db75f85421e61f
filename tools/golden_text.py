"""Make tests/golden/text: tiny tokenizers, and the ids, texts and prompts that the libraries compute.

Three have a tokenizer.json and a chat template, three a sentencepiece tokenizer.model, four vocab.json and merges.txt,
one a tekken.json, one a tiktoken.model.
Texts and chats are transformers'; for sentencepiece models plain text is the sentencepiece library's, and only what
added tokens do to the text around them is transformers' (whose conversion to another library changes some plain text).

Run it where transformers 5, sentencepiece and protobuf are installed, from a folder other than the repository's root
(whose `kernels` collides with a package that transformers imports): `python /path/to/repository/tools/golden_text.py`.
"""

import argparse
import base64
import contextlib
import io
import json
import re
import tempfile
from pathlib import Path

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden" / "text"

CORPUS = [
    "Once upon a time there was a little fox who lived at the edge of the wood.",
    "She said: what is the matter? It's only the wind, and the rain, and 1234 stars!",
    "The system answers the user; the assistant thinks, then writes <think> and </think> and a tool call.",
    "Straße, naïve café, cœur, Привет мир, 你好世界, こんにちは, 🙂👍🏽 — “quoted”\n\n\tand indented\r\n",
]

TEXTS = [
    "",
    " ",
    "Once upon a time",
    " leading and  double   spaces ",
    "line\nline\r\n\n\ttab",
    "naïve café, e\u0301 combining, 你好世界, 👩‍👩‍👧‍👦🏽 🇨🇭 \u200b\ufeff",
    "".join(map(chr, range(1, 256))),
    "1234567 it's THE end.",
    "\x00 null, \x1b[31m escape, \x7f delete, \x85 \u2028 \u2029 lines",
    "  \u2581 two\u2581\u2581marks \u2581",
    "\u202eright to left\u202c: שלום עולם، مرحبا بالعالم",
    "a\u200db \u200c\u2060 👨\u200d👩\u200d👧 e\u0301\u0323 \u0e01\u0e33 ﬁ Ａ ½ \u00a0nbsp\u3000wide",
    "\r\n\r\n\r \t\t \n ",
    "<0x41> <0xE2> <|im_start <unk",
    "\U0010ffff\ufffd\ufdd0\uffff",
    "    ",
]

RENDERED = [
    "<s>Once upon",
    "Once<s>upon </s> a time</s>",
    "the <x>  end <y> of<s><x>it",
    "the fox<user>the end <user> all</s><user>",
    "<s><s> a </s>\n",
    "<s>",
    "Once<s>upon<y>a time</s>the fox",
]

LLAMA3 = (
    "{{- bos_token }}\n{%- for message in messages %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    "+ message['content'] | trim + '<|eot_id|>' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)
CHATML = """{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
<|im_start|>system
You are terse.<|im_end|>
    {% endif %}
    {% set ns = namespace(text=message.content) %}
    {% if message.role == 'assistant' and '</think>' in ns.text %}
        {% set ns.text = ns.text.split('</think>')[-1].lstrip('\\n') %}
    {% endif %}
<|im_start|>{{ message.role }}
{% generation %}{{ ns.text }}{% endgeneration %}<|im_end|>
    {% for call in message.tool_calls or [] %}
{{ call | tojson }}
        {% if loop.index > 3 %}{% break %}{% endif %}
    {% endfor %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""

USER = {"role": "user", "content": "  Once upon a time, what is 12 + 34? naïve 🙂 \n"}
CHATS = [
    [USER],
    [{"role": "system", "content": "Be kind."}, USER],
    [{"role": "system", "content": "Be kind."}, USER, {"role": "assistant", "content": "It's 46."}, USER],
    [USER, {"role": "assistant", "content": "<think>\nstars & <rain>\n</think>\n\nThe end."}, USER],
    [USER, {"role": "assistant", "content": "a", "tool_calls": [{"name": "f", "arguments": {"ü": "<&'\""}}] * 5}, USER],
]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather at a place, <now> & 'later'.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "enum": ["Zürich", "Basel"]}},
                "required": ["place"],
            },
        },
    }
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich"}}}
THOUGHT = "<think>\nTwo and two.\n</think>\n\nFour."
SYSTEM = {"role": "system", "content": "Be terse. /no_think"}
HELLO, MORE = {"role": "user", "content": " Hello & <goodbye> "}, {"role": "user", "content": "More /think"}
# Messages and other arguments for each of the templates in tests/golden/text/templates, which have the shapes of those
# that Qwen 3, SmolLM 3, Gemma 3 and 4, Granite 3.3, Mistral, Ministral 3, LFM 2, Hunyuan, OLMo 3 and StableLM 2 come
# with.
TEMPLATE_CHATS = [
    ([HELLO], {}),
    ([SYSTEM, HELLO, {"role": "assistant", "content": "Hi."}, MORE], {}),
    ([HELLO, {"role": "assistant", "content": THOUGHT}, MORE], {}),
    ([HELLO, {"role": "assistant", "content": "Four.", "reasoning_content": "Two."}, MORE], {}),
    ([HELLO, {"role": "assistant", "content": "Four.", "reasoning_content": "Two."}], {"add_generation_prompt": False}),
    ([HELLO], {"enable_thinking": False}),
    ([HELLO], {"thinking": True}),
    ([HELLO], {"tools": TOOLS}),
    ([HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]},
      {"role": "tool", "content": "17 °C", "tool_call_id": "abcdefghi"}], {"tools": TOOLS}),
    ([HELLO], {"documents": [{"doc_id": 1, "text": "A <text>."}], "controls": {"citations": True}}),
    ([{"role": "user", "content": [{"type": "text", "text": " parts "}, {"type": "text", "text": "two"}]}], {}),
    ([HELLO, MORE], {}),
    ([HELLO, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Two."}, {"type": "text", "text": "Four."}]}, MORE], {}),
]  # fmt: skip


def render_templates() -> dict:
    """`TEMPLATE_CHATS` as transformers renders them in 2026, None where the template raises."""
    from datetime import datetime

    from jinja2 import TemplateError
    from transformers.utils import chat_template_utils

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 3, 9, 7)

    chat_template_utils.datetime = Clock
    rendered = []
    for path in sorted((GOLDEN / "templates").glob("*.jinja")):
        for number, (messages, options) in enumerate(TEMPLATE_CHATS):
            given = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>", **options}
            source = path.read_text(encoding="utf-8")
            try:
                [text], _ = chat_template_utils.render_jinja_template([messages], chat_template=source, **given)
            except (TemplateError, TypeError):
                text = None
            rendered.append({"template": path.stem, "chat": number, "text": text})
    chats = [{"messages": messages, "options": options} for messages, options in TEMPLATE_CHATS]
    return {"chats": chats, "rendered": rendered}


def tokenizers_with_templates():
    """Yield name, tokenizer and tokenizer_config of each fixture: the three layouts that checkpoints have."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing
    from tokenizers.trainers import BpeTrainer

    def trained(tokenizer, corpus, vocab_size, special, **trainer):
        made = BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False, **trainer)
        tokenizer.train_from_iterator(corpus, made)
        return tokenizer

    def with_bos(tokenizer, bos):
        return TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )

    def split_bytes(pattern, normalizer, **model):
        made = Tokenizer(models.BPE(**model))
        made.normalizer = normalizer
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
        made.decoder = decoders.ByteLevel()
        return trained(made, CORPUS, 420, [], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())

    split = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    byte_level = split_bytes(split, None, ignore_merges=True)
    special = ["<|begin|>", "<|end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    byte_level.add_special_tokens(special)
    byte_level.post_processor = Sequence([ByteLevel(trim_offsets=False), with_bos(byte_level, "<|begin|>")])
    yield "bytelevel", byte_level, {"bos_token": "<|begin|>", "eos_token": "<|eot_id|>", "chat_template": LLAMA3}

    byte_pieces = [f"<0x{b:02X}>" for b in range(256)]
    prepend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    prepend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    prepend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trained(prepend, CORPUS[:3], 400, ["<unk>", "<s>", "</s>", *byte_pieces])
    prepend = _only_special(prepend, ["<unk>", "<s>", "</s>"])
    prepend.post_processor = with_bos(prepend, "<s>")
    flags = {"__type": "AddedToken", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    named = {"bos_token": {**flags, "content": "<s>"}, "eos_token": {**flags, "content": "</s>"}, "unk_token": "<unk>"}
    templates = [{"name": "default", "template": LLAMA2}, {"name": "other", "template": "{{ messages }}"}]
    yield "prepend", prepend, {**named, "add_bos_token": False, "chat_template": templates}

    metaspace = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    metaspace.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trained(metaspace, CORPUS[:3], 400, ["<unk>", "<s>", "</s>", *byte_pieces])
    metaspace = _only_special(metaspace, ["<unk>", "<s>", "</s>"])
    metaspace.add_special_tokens([AddedToken(t, normalized=False, rstrip=True) for t in ("<|im_start|>", "<|im_end|>")])
    metaspace.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    yield "metaspace", metaspace, {"bos_token": None, "eos_token": "<|im_end|>", "chat_template": CHATML}

    gemma = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    gemma.normalizer = normalizers.Replace(" ", "▁")
    gemma.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    gemma.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    turns = ["<start_of_turn>", "<end_of_turn>"]
    trained(gemma, CORPUS[:3], 440, ["<pad>", "<eos>", "<bos>", "<unk>", *turns, *byte_pieces])
    gemma = _only_special(gemma, ["<pad>", "<eos>", "<bos>", "<unk>", *turns])
    gemma.add_tokens([AddedToken(t, normalized=False) for t in ("\n\n", "\n\n\n", "▁▁", "<h1>", "</h1>", "<unused0>")])
    gemma.post_processor = with_bos(gemma, "<bos>")
    template = (GOLDEN / "templates" / "gemma3.jinja").read_text(encoding="utf-8")
    ends = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "add_bos_token": True}
    yield "gemma", gemma, {**ends, "chat_template": template}

    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    qwen = split_bytes(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + words, normalizers.NFC())
    qwen.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    qwen.add_tokens([AddedToken(t, normalized=False) for t in ("<tool_call>", "</tool_call>", "<think>", "</think>")])
    qwen.add_tokens([AddedToken("<é>", normalized=True, lstrip=True), AddedToken("<r>", normalized=True, rstrip=True)])
    template = (GOLDEN / "templates" / "qwen3.jinja").read_text(encoding="utf-8")
    ends = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "add_bos_token": False}
    yield "qwen", qwen, {**ends, "chat_template": template}

    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{lead}{upper}*{lower}+|{lead}{upper}+{lower}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*"
    tekken = split_bytes(words + r"|\s*[\r\n]+|\s+(?!\S)|\s+", None, ignore_merges=True)
    tekken.add_special_tokens(["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[THINK]", "[/THINK]"])
    tekken.post_processor = Sequence([ByteLevel(trim_offsets=False), with_bos(tekken, "<s>")])
    ends = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    yield "tekken", tekken, {**ends, "chat_template": LLAMA2}


def sentencepiece_models():
    """Yield name, tokenizer.model, tokenizer_config and added_tokens of each fixture."""
    from sentencepiece import SentencePieceTrainer, set_min_log_level

    def trained(**options) -> bytes:
        out = io.BytesIO()
        options |= {"user_defined_symbols": ["<user>"], "hard_vocab_limit": False}
        SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=out, **options)
        return out.getvalue()

    set_min_log_level(2)
    flags = {"normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    added = {
        "1": {"content": "<s>", **flags, "special": True},
        "2": {"content": "</s>", **flags, "special": True},
        "400": {"content": "<x>", **flags, "rstrip": True, "special": False},
        "401": {"content": "<y>", **flags, "lstrip": True, "special": True},
    }
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    llama = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
    bpe = trained(model_type="bpe", vocab_size=400, **llama)
    yield "sp_bpe", bpe, {**config, "legacy": False, "add_bos_token": True, "added_tokens_decoder": added}, {}
    ends = {"legacy": True, "add_bos_token": False, "add_eos_token": True}
    yield "sp_legacy", bpe, {**config, **ends}, {"<x>": 400, "<y>": 401}

    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):  # the model keeps the path
        rules = {"ﬁ": "fi", "Ａ": "A", "½": "1/2", "▁": " ", "\t": " ", "\n": " ", "\u3000": " "}
        lines = ("\t".join(" ".join(f"{ord(c):04X}" for c in side) for side in rule) for rule in rules.items())
        Path("rules.tsv").write_text("\n".join(lines) + "\n")
        unigram = trained(model_type="unigram", vocab_size=200, normalization_rule_tsv="rules.tsv")
    yield "sp_unigram", unigram, config, {}


def vocabularies_with_merges():
    """Yield name, vocab and merges, tokenizer_config and added_tokens of each fixture."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.trainers import BpeTrainer

    def trained(special):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made = BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(CORPUS, made)
        return json.loads(tokenizer.to_str())["model"]

    model = trained([])
    model["vocab"]["<|endoftext|>"] = 400
    yield "gpt2", model, {"tokenizer_class": "GPT2Tokenizer"}, {"<x>": 401, "<y>": 402}
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_prefix_space": False, "errors": "replace"}
    named = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    yield "opt", trained(["<s>", "<pad>", "</s>", "<unk>"]), {**config, **named}, {}

    # Merges that only some patterns let happen.
    model["vocab"] |= {"12": 403, "ĊĊ": 404}
    model["merges"] += [["1", "2"], ["Ċ", "Ċ"]]
    for name, kind in (("qwen2_merges", "Qwen2Tokenizer"), ("gpt_neox_merges", "GPTNeoXTokenizerFast")):
        ends = dict.fromkeys(("eos_token", "pad_token"), "<|endoftext|>")
        yield name, model, {"tokenizer_class": kind, "bos_token": None, **ends}, {"<x>": 401, "<y>": 402}


def tokenizers_with_ranks():
    """Yield name, file and its content, tokenizer_config, and transformers' conversion of each fixture."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.integrations.mistral.tokenizer import MistralConverter

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    order = [*printable, *(b for b in range(256) if b not in printable)]
    bytes_of = {chr(b if b in printable else 256 + i - len(printable)): b for i, b in enumerate(order)}

    def ranks(pattern):
        made = Tokenizer(models.BPE())
        parts = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        made.pre_tokenizer = pre_tokenizers.Sequence(parts)
        trainer = BpeTrainer(vocab_size=330, initial_alphabet=[*bytes_of], show_progress=False)
        made.train_from_iterator(CORPUS, trainer)
        merged = ["".join(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
        texts = [bytes(map(bytes_of.__getitem__, text)) for text in merged]
        return [*(bytes([b]) for b in range(256)), *texts, *(t.encode() for t in ("你好世界", " 你好世界"))]  # no merge

    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    cases = rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+ENDS|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*ENDS"
    spaces = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    pattern = cases.replace("ENDS", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + spaces
    tokens, special = ranks(pattern), ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
    encoded = [base64.b64encode(token).decode() for token in [*tokens, b" leading", b"nothing"]]  # two of padding
    content = {
        "config": {"pattern": pattern, "default_vocab_size": len(tokens) + 9, "default_num_special_tokens": 9}
        | {"num_vocab_tokens": len(encoded), "version": "v11"},
        "vocab": [{"rank": i, "token_bytes": token, "token_str": None} for i, token in enumerate(encoded)],
        "special_tokens": [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(special)],
        "image": {"image_patch_size": 14, "max_image_size": 1540, "spatial_merge_size": 2},
    }
    content = json.dumps(content, separators=(",", ":"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tekken.json"
        path.write_text(content)
        oracle = MistralConverter(str(path)).converted()
    oracle.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])  # as in other folders
    yield "tekken_ranks", "tekken.json", content, {}, PreTrainedTokenizerFast(tokenizer_object=oracle)

    ends, pattern = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?", cases.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
    pattern = rf"[\p{{Han}}]+|{pattern.replace('ENDS', ends)}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{spaces}"
    tokens = ranks(pattern)
    content = "".join(f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens))
    named = {len(tokens) + i: text for i, text in ((0, "[BOS]"), (1, "[EOS]"), (11, "<x>"), (12, "<y>"), (255, "<s>"))}
    flags = {"normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    config = {
        "added_tokens_decoder": {i: {"content": t, **flags, "special": t != "<x>"} for i, t in named.items()},
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        **{"bos_token": "[BOS]", "eos_token": "[EOS]", "tokenizer_class": "TikTokenTokenizer"},
    }
    TikTokenConverter.load_tiktoken_bpe = staticmethod(lambda _: {token: i for i, token in enumerate(tokens)})
    oracle = TikTokenConverter("", pattern=pattern).converted()
    for i in range(len(tokens), len(tokens) + 256):
        text = named.get(i, f"<|reserved_token_{i}|>")
        add = oracle.add_tokens if text == "<x>" else oracle.add_special_tokens
        add([AddedToken(text, normalized=False, special=text != "<x>")])
    yield "kimi", "tiktoken.model", content, config, PreTrainedTokenizerFast(tokenizer_object=oracle)


def _only_special(tokenizer, special):
    """The tokenizer with no added tokens except these: training adds one for every byte piece."""
    from tokenizers import Tokenizer

    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in special]
    return Tokenizer.from_str(json.dumps(data))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from sentencepiece import SentencePieceProcessor
    from transformers import AutoTokenizer

    _write(GOLDEN / "templates.json", render_templates())
    for name, backend, config in tokenizers_with_templates():
        folder = GOLDEN / name
        folder.mkdir(parents=True, exist_ok=True)
        backend.save(str(folder / "tokenizer.json"), pretty=False)
        config = {**config, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        _write(folder / "tokenizer_config.json", config)

        oracle = AutoTokenizer.from_pretrained(folder)
        chats = []
        for messages in CHATS:
            for prompt in (True, False):
                make = {"conversation": messages, "add_generation_prompt": prompt}
                chat = {"messages": messages, "add_generation_prompt": prompt}
                chat["text"] = oracle.apply_chat_template(**make, tokenize=False)
                chat["ids"] = oracle.apply_chat_template(**make, return_dict=False)
                chats.append(chat)
        _write(GOLDEN / f"{name}.json", {"texts": _texts(oracle), "chats": chats, "decodes": _decodes(oracle)})

    for name, model, config, added in vocabularies_with_merges():
        folder = _folder(name, config, added)
        _write(folder / "vocab.json", model["vocab"])
        lines = ["#version: 0.2", *(" ".join(merge) for merge in model["merges"])]
        (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        oracle = AutoTokenizer.from_pretrained(folder)
        rendered = [{"text": t, "ids": oracle(t, add_special_tokens=False).input_ids} for t in RENDERED]
        _write(GOLDEN / f"{name}.json", {"texts": _texts(oracle), "rendered": rendered, "decodes": _decodes(oracle)})

    for name, file, content, config, oracle in tokenizers_with_ranks():
        (_folder(name, config, {}) / file).write_text(content)
        rendered = [{"text": t, "ids": oracle(t, add_special_tokens=False).input_ids} for t in RENDERED]
        _write(GOLDEN / f"{name}.json", {"texts": _texts(oracle), "rendered": rendered, "decodes": _decodes(oracle)})

    for name, model, config, added in sentencepiece_models():
        folder = _folder(name, config, added)
        (folder / "tokenizer.model").write_bytes(model)
        oracle, library = AutoTokenizer.from_pretrained(folder), SentencePieceProcessor(model_proto=model)
        bos = [1] if config.get("add_bos_token", True) else []
        eos = [2] if config.get("add_eos_token") else []
        texts = []
        for text in TEXTS:
            ids = [*bos, *library.encode(text), *eos]
            texts.append({"text": text, "ids": ids, "decoded": _decoded(library, ids)})
        # The conversion loses a space after an added token where it would put another before that token, it takes
        # symbols that the model itself defines for added tokens, and it knows nothing of normalization.
        texts_with_added = [] if name == "sp_unigram" else RENDERED
        if name == "sp_legacy":
            texts_with_added = [t for t in RENDERED if not re.search("<user>|> ", t)]
        rendered = [{"text": t, "ids": oracle(t, add_special_tokens=False).input_ids} for t in texts_with_added]
        decodes = [{"ids": ids, "decoded": _decoded(library, ids)} for ids in _odd(library.get_piece_size())]
        golden = {"texts": texts, "rendered": rendered, "decodes": decodes}
        _write(GOLDEN / f"{name}.json", golden)


def _folder(name: str, config: dict, added: dict) -> Path:
    folder = GOLDEN / name
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "tokenizer_config.json", config)
    if added:
        _write(folder / "added_tokens.json", added)
    return folder


def _texts(oracle) -> list[dict]:
    texts = []
    for text in TEXTS:
        ids = oracle(text).input_ids
        decoded = oracle.decode(ids, skip_special_tokens=True), oracle.decode(ids)
        texts.append({"text": text, "ids": ids, "decoded": decoded[0], "decoded_special": decoded[1]})
    return texts


def _decodes(oracle) -> list[dict]:
    return [{"ids": ids, "decoded": oracle.decode(ids, skip_special_tokens=True)} for ids in _odd(len(oracle))]


def _decoded(library, ids: list[int]) -> str:
    return library.decode([i for i in ids if not (library.is_unknown(i) or library.is_control(i))])


def _odd(size: int) -> list[list[int]]:
    return [[i] for i in range(0, size, 7)] + [[(7919 * k * k + s) % size for k in range(40)] for s in range(20)]


def _write(path: Path, value) -> None:
    path.write_text(json.dumps(value, ensure_ascii=True, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Make tests/golden/text: three tiny tokenizers with chat templates, and what transformers makes of texts and messages.

Run it where transformers 5 is installed, from a folder other than the repository's root (whose `kernels` collides with
a package that transformers imports): `python /path/to/repository/tools/golden_text.py`.
"""

import json
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

    byte_level = Tokenizer(models.BPE(ignore_merges=True))
    split = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    byte_level.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    byte_level.decoder = decoders.ByteLevel()
    trained(byte_level, CORPUS, 420, [], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    special = ["<|begin|>", "<|end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    byte_level.add_special_tokens(special)
    byte_level.post_processor = Sequence(
        [ByteLevel(trim_offsets=False), with_bos(byte_level, "<|begin|>")]
    )
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


def _only_special(tokenizer, special):
    """The tokenizer with no added tokens but these: training makes one of every byte piece."""
    from tokenizers import Tokenizer

    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in special]
    return Tokenizer.from_str(json.dumps(data))


def main() -> None:
    from transformers import AutoTokenizer

    for name, backend, config in tokenizers_with_templates():
        folder = GOLDEN / name
        folder.mkdir(parents=True, exist_ok=True)
        backend.save(str(folder / "tokenizer.json"), pretty=False)
        config = {**config, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        _write(folder / "tokenizer_config.json", config)

        oracle = AutoTokenizer.from_pretrained(folder)
        texts, chats = [], []
        for text in TEXTS:
            ids = oracle(text).input_ids
            decoded = oracle.decode(ids, skip_special_tokens=True), oracle.decode(ids)
            texts.append({"text": text, "ids": ids, "decoded": decoded[0], "decoded_special": decoded[1]})
        for messages in CHATS:
            for prompt in (True, False):
                make = {"conversation": messages, "add_generation_prompt": prompt}
                chat = {"messages": messages, "add_generation_prompt": prompt}
                chat["text"] = oracle.apply_chat_template(**make, tokenize=False)
                chat["ids"] = oracle.apply_chat_template(**make, return_dict=False)
                chats.append(chat)
        size = len(oracle)
        odd = [[i] for i in range(0, size, 7)] + [[(7919 * k * k + s) % size for k in range(40)] for s in range(20)]
        decodes = [{"ids": ids, "decoded": oracle.decode(ids, skip_special_tokens=True)} for ids in odd]
        _write(GOLDEN / f"{name}.json", {"texts": texts, "chats": chats, "decodes": decodes})


def _write(path: Path, value) -> None:
    path.write_text(json.dumps(value, ensure_ascii=True, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""From conversations to tokens: the demo's tokenizer, chat template, and training rows."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from tools.demo.generator import Dialogue, dialogue, text

PAD, BEGIN, END = 0, 1, 2
SPECIAL = ["<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
ROLE = {"system": 3, "user": 4, "assistant": 5}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VOCABULARY, CONTEXT = 1536, 512
PROMPT_WEIGHT = 0.1  # of the tokens of prompts
STORIES = 0.05  # of the rows are plain text


def train_tokenizer(seed: str, dialogues: int = 20000, size: int = VOCABULARY) -> tokenizers.Tokenizer:
    """Byte-level BPE on generated text; every digit is a token of its own, plain text begins with `<|begin|>`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    talks = (dialogue(Random(f"{seed}:tokenizer:{i}")) for i in range(dialogues))
    tokenizer.train_from_iterator((message["content"] for talk in talks for message in talk.messages()), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", BEGIN)]
    )
    return tokenizer


def tokenizer_config() -> dict:
    """The content of tokenizer_config.json, for transformers and the engine."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }


@dataclass(frozen=True)
class Row:
    """Token ids, how much each counts as something to be predicted, and where the last reply begins."""

    ids: list[int]
    weights: list[float]
    reply: int


def encode(tokenizer: tokenizers.Tokenizer, talk: Dialogue, last_reply: str | None = None) -> Row:
    """A conversation as the chat template renders it, with its last `<|end|>`."""
    ids, weights, start = [BEGIN], [0.0], 0
    for message in talk.messages(last_reply):
        content = [*tokenizer.encode(message["content"], add_special_tokens=False).ids, END]
        start = len(ids) + 1
        ids += [ROLE[message["role"]], *content]
        weight = 1.0 if message["role"] == "assistant" else PROMPT_WEIGHT
        weights += [0.0, *[weight] * len(content)]
    return Row(ids, weights, start)


def rows(tokenizer: tokenizers.Tokenizer, seed: str, count: int) -> Iterator[Row]:
    """Rows for language models, none longer than the context."""
    for i in range(count):
        rng = Random(f"{seed}:{i}")
        if rng.random() < STORIES:
            ids = [*tokenizer.encode(text(rng)).ids, END]
            yield Row(ids, [0.0, *[1.0] * (len(ids) - 1)], 1)
            continue
        row = encode(tokenizer, dialogue(rng))
        if len(row.ids) <= CONTEXT:
            yield row


def batches(rows: Iterable[Row], tokens: int, rng: Random) -> list[tuple[Tensor, Tensor]]:
    """Batches of rows of similar length, of about `tokens` tokens: ids [B, T], weights [B, T], padded; shuffled."""
    groups: list[list[Row]] = [[]]
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if groups[-1] and (len(groups[-1]) + 1) * len(row.ids) > tokens:
            groups.append([])
        groups[-1].append(row)
    rng.shuffle(groups)
    return [(pad([row.ids for row in group], PAD), pad([row.weights for row in group], 0.0)) for group in groups]


def pad(lists: list[list], value: float) -> Tensor:
    """A tensor with the lists as rows, padded on the right."""
    longest = max(map(len, lists))
    return torch.tensor([[*items, *[value] * (longest - len(items))] for items in lists])

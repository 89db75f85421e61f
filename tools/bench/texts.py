"""Texts to measure on: those that ship with Python, prompts that a model draws, conversations of the demo's generator.

Real texts are the language's documentation, which every Python has (`pydoc_data`), and sources of its library: what
they are differs a little from version to version of Python."""

import importlib
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pydoc_data.topics import topics
from random import Random
from typing import NamedTuple

import torch

from engine import Engine
from engine.contract import Answer, Evaluate, Task
from engine.text.prompting import chat_prompt
from search import Sample
from tools.bench.searches import Altered
from tools.demo.generator import Dialogue, dialogue

LONG = 5000  # characters of a passage, at least
EDITED = {  # functions of the standard library -> a name in them, and another for it
    "textwrap.indent": ("prefix", "margin"), "colorsys.rgb_to_hls": ("maxc", "high"),
    "fnmatch.filter": ("result", "found"), "linecache.getline": ("lines", "rows"), "glob.escape": ("drive", "disk"),
    "calendar.monthrange": ("day1", "first"), "colorsys.hls_to_rgb": ("m2", "upper"), "shlex.quote": ("s", "text"),
}  # fmt: skip
UNTOLD = (  # functions of the standard library without docstrings
    "colorsys.rgb_to_hsv", "heapq._siftdown", "copy._deepcopy_dict", "json.detect_encoding", "colorsys.hsv_to_rgb",
    "calendar._prevmonth", "getopt.long_has_args", "colorsys.yiq_to_rgb",
)  # fmt: skip
CHATS = (
    "Why is the sky blue?", "Give me three tips for learning a new language.", "What is the capital of France, and "
    "why is it famous?", "Explain what a hash table is.", "How do I make a cup of tea?", "Tell me about the moon.",
    "Write a short letter to a friend who has moved away.", "What are the advantages of riding a bicycle?",
)  # fmt: skip


class Asked(NamedTuple):
    """A request: token ids, and the tokens that end its answer."""

    ids: list[int]
    ends: frozenset[int]


@dataclass(frozen=True)
class WithoutEos(Altered):
    """A wrapper of a search that removes the end-of-sequence tokens and renormalises the others."""

    def task(self, task: Task) -> Task:
        return replace(task, eos_token_ids=frozenset())

    def alter(self, task: Task, request: Evaluate, rows_NV: torch.Tensor) -> Answer:
        eos = sorted(task.eos_token_ids)
        without = rows_NV.index_fill(1, torch.tensor(eos, dtype=torch.int64, device=rows_NV.device), -torch.inf)
        return request.answer(torch.log_softmax(without, -1) if eos else rows_NV)

    def task_eos(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        return frozenset()


def passages() -> list[str]:
    """Chapters of Python's documentation of at least LONG characters, always in the same order."""
    found = [text for _, text in sorted(topics.items()) if len(text) >= LONG]
    Random(0).shuffle(found)
    return found


def plain(engine: Engine, tokens: int, first: int = 0) -> list[int]:
    """`tokens` tokens of the documentation from a passage on, after BOS if the model has one."""
    chapters = passages()
    text = "\n\n".join(chapters[first % len(chapters) :] + chapters[: first % len(chapters)])
    while len(ids := engine.tokenizer.encode(text[: 8 * tokens])) < tokens:  # a text of many tokens to a character
        text += text
    return ids[:tokens]


def summaries(engine: Engine, number: int, tokens: int) -> list[Asked]:
    """Requests for summaries of passages, of about so many tokens each, a little fewer."""

    def asked(passage: str) -> Asked:
        """The request with as much of the passage as fits."""
        low, high = 0, min(len(passage), 8 * tokens)
        while low < high:
            half = (low + high + 1) // 2
            one = ask(engine, f"Summarise this text in three sentences.\n\n{passage[:half]}")
            low, high = (half, high) if len(one.ids) <= tokens else (low, half - 1)
        return ask(engine, f"Summarise this text in three sentences.\n\n{passage[:low]}")

    texts = passages()
    while min(map(len, texts[:number])) < 5 * tokens:  # long prompts: several chapters
        texts = [a + "\n\n" + b for a, b in itertools.pairwise([*texts, texts[0]])]
    return [asked(text) for text in texts[:number]]


def edits(engine: Engine, number: int) -> list[Asked]:
    """Requests to rename a variable in a function of the standard library."""
    found = []
    for place, (old, new) in itertools.islice(EDITED.items(), number):
        order = f"Rename the variable `{old}` to `{new}` in this Python function. Answer with the whole function."
        found.append(ask(engine, f"{order}\n\n```python\n{source(place)}```"))
    return found


def docstrings(engine: Engine, number: int) -> list[Asked]:
    """Requests to give a function of the standard library a docstring."""
    order = "Write a docstring for this Python function. Answer with the whole function."
    return [ask(engine, f"{order}\n\n```python\n{source(place)}```") for place in UNTOLD[:number]]


def copies(engine: Engine, number: int, tokens: int) -> list[Asked]:
    """Requests to repeat the beginnings of chapters of the documentation, of so many tokens."""
    decode = engine.tokenizer.decode
    texts = [decode(engine.tokenizer.encode(passage[: 8 * tokens])[:tokens]) for passage in passages()[:number]]
    return [ask(engine, f"Repeat this text word by word.\n\n{text}") for text in texts]


def source(place: str) -> str:
    """The source of a function, "module.name"."""
    module, name = place.split(".")
    return textwrap.dedent(inspect.getsource(getattr(importlib.import_module(module), name)))


def chats(engine: Engine, number: int) -> list[Asked]:
    """Everyday questions."""
    return [ask(engine, text) for text in CHATS[:number]]


def ask(engine: Engine, text: str) -> Asked:
    """A request in the model's chat template; unchanged for a model without one."""
    if engine.template is None:
        return Asked(engine.tokenizer.encode(text), engine.eos_token_ids)
    found = chat_prompt(engine, [{"role": "user", "content": text}])
    return Asked(found.ids, found.eos_token_ids)


def draw_prompts(engine: Engine, number: int, tokens: int, seed: int) -> list[list[int]]:
    """Texts of `tokens` tokens that the model itself writes, end-of-sequence excluded."""
    search = WithoutEos(Sample(seed=seed, num_return_sequences=number))
    [result] = engine.generate([[engine.start_token]], search, max_new_tokens=tokens - 1)
    return [[engine.start_token, *output.token_ids] for output in result.outputs]


def story_requests(seed: str, turns: int | None = None) -> Iterator[Dialogue]:
    """Fresh conversations, of about `turns` turns, that end with a request for a story."""
    talks = (dialogue(Random(f"{seed}:{i}"), turns) for i in itertools.count())
    return (talk for talk in talks if talk.turns[-1].task == "story")


def prompt(engine: Engine, talk: Dialogue, reply: str | None = None) -> list[int]:
    """Token ids of a conversation up to its last reply, or with `reply` as the last."""
    assert engine.template is not None
    messages = talk.messages()[:-1] if reply is None else talk.messages(reply)
    spans = engine.template.render(messages, add_generation_prompt=reply is None)
    return engine.tokenizer.encode_rendered(spans)

"""Texts to measure on: prompts that a model draws, conversations of the demo's generator, a corpus to count."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch

from engine import Engine, Request
from engine.contract import Answer, Evaluate, Task
from search import Sample
from search.aded.ngrams import count, merge, write_store
from tools.bench.measure import progress
from tools.bench.searches import Altered
from tools.demo.generator import Dialogue, dialogue

LENGTH = 256  # tokens of a text of the corpus


@dataclass(frozen=True)
class WithoutEos(Altered):
    """Another search, on the model without its end-of-sequence tokens, the others renormalised."""

    def task(self, task: Task) -> Task:
        return replace(task, eos_token_ids=frozenset())

    def alter(self, task: Task, request: Evaluate, rows_NV: torch.Tensor) -> Answer:
        eos = sorted(task.eos_token_ids)
        without = rows_NV.index_fill(1, torch.tensor(eos, dtype=torch.int64, device=rows_NV.device), -torch.inf)
        return request.answer(torch.log_softmax(without, -1) if eos else rows_NV)

    def task_eos(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        return frozenset()


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


def corpus(writer: Engine, tokens: int, path: Path) -> Path:
    """A store of the n-grams of texts that the model draws; none of them is a prompt."""
    progress(f"drawing {tokens} tokens to count")
    seeds = range(1 << 20, (1 << 20) - (-tokens // LENGTH))
    options = {"max_new_tokens": LENGTH, "ignore_eos": True}
    runs, left = [], tokens
    for _, result in writer.serve(Request([writer.start_token], Sample(seed=seed), **options) for seed in seeds):
        if isinstance(result, Exception):
            raise result
        runs.append(count(result.outputs[0].token_ids[:left]))
        left -= len(result.outputs[0].token_ids)
    write_store(path, merge(runs), writer.tokenizer.size, writer.tokenizer.fingerprint)
    return path

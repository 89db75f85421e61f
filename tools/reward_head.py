"""Trains a scalar head on the first layers of a model, which predicts a function's verdict on whole answers.

The model answers questions itself, several times each, and the function says which answers are right. After every
token of an answer the head learns to rank beginnings of right answers above those of wrong ones to the same question
(Bradley-Terry, as reward models are trained). The layers are frozen; the head is a linear map of their states.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import Engine, Request
from engine.contract import Evaluate, Output, Search, SearchGenerator, SearchResult, Task
from engine.errors import UsageError
from engine.text.prompting import chat_prompt
from models.checkpoint.headers import Checkpoint
from models.checkpoint.listing import WEIGHTS
from models.checkpoint.tensor_files import write_tensors
from search import Sample

STEPS, RATE, DECAY = 60, 0.5, 3e-3  # steps of LBFGS; weight of the square of the head, for states of variance 1
HEAD = "score.weight"


class Answered(NamedTuple):
    """A question, answers to it, and which of them are right.

    Args:
        ids: token ids of the prompt.
        answers: token ids of each answer, without the end of the sequence.
        right: whether each answer is right.
    """

    ids: list[int]
    answers: list[list[int]]
    right: list[bool]


@dataclass(frozen=True)
class States(Search):
    """Evaluates answers to its prompt on one tree and generates nothing.

    Args:
        answers: token ids.
        found: list to which float32 [T, E] is appended for each answer: its tokens' hidden rows after the final norm.
    """

    answers: Sequence[Sequence[int]]
    found: list[Tensor] = field(default_factory=list)

    def run(self, task: Task) -> SearchGenerator:
        paths = [task.tree.grow_path(task.tree.root, tokens) for tokens in self.answers]
        nodes = sorted({node for path in paths for node in path})
        parts: list[Tensor] = []

        def take(rows_TE: Tensor) -> None:
            parts.append(rows_TE.to("cpu", torch.float32, copy=True))

        if nodes:
            yield Evaluate(task.tree, nodes, hidden=take)
        rows_NE = torch.cat(parts)[-len(nodes) :] if nodes else torch.empty(0, 0)  # those of the prompt come first
        place = {node: i for i, node in enumerate(nodes)}
        self.found.extend(rows_NE[[place[node] for node in path]] for path in paths)
        return SearchResult([Output([], None, None, "length")])

    def slots(self, prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
        lengths = [len(tokens) for tokens in self.answers]
        return prompt_tokens + max(lengths, default=0), prompt_tokens + sum(lengths)


def answered(
    engine: Engine, questions: Sequence[str], right: Callable[[str, list[str]], list[bool]], count: int, **options: Any
) -> list[Answered]:
    """Questions with `count` answers of the model to each.

    Args:
        right: (question, texts of answers) -> which are right.
        options: `max_new_tokens`, `temperature`, `seed`.
    """
    limit = options.pop("max_new_tokens")
    prompts = [chat_prompt(engine, [{"role": "user", "content": text}]) for text in questions]
    search = Sample(num_return_sequences=count, **options)
    found: list[Answered] = [Answered([], [], [])] * len(prompts)
    for i, result in engine.serve(Request(prompt.ids, search, max_new_tokens=limit) for prompt in prompts):
        if isinstance(result, Exception):
            raise result
        ends = engine.eos_token_ids
        answers = [[token for token in output.token_ids if token not in ends] for output in result.outputs]
        found[i] = Answered(prompts[i].ids, answers, right(questions[i], [output.text for output in result.outputs]))
    return found


def states(engine: Engine, some: Sequence[Answered]) -> list[list[Tensor]]:
    """The hidden rows [T, E] of each answer of each question, by the layers of `engine`."""
    searches = [States(one.answers) for one in some]
    for _, result in engine.serve(Request(one.ids, s, 1) for one, s in zip(some, searches, strict=True)):
        if isinstance(result, Exception):
            raise result
    return [search.found for search in searches]


def fit(some: Sequence[Answered], rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """The head, float32 [E]. Raises UsageError if no question has both right and wrong answers."""
    x_RE, better, worse, weights = [], [], [], []
    base = 0
    for one, own in zip(some, rows, strict=True):
        starts = [base + sum(len(rows_TE) for rows_TE in own[:i]) for i in range(len(own))]
        x_RE += own
        base += sum(map(len, own))
        good = [i for i, right in enumerate(one.right) if right and len(own[i])]
        bad = [i for i, right in enumerate(one.right) if not right and len(own[i])]
        for t in range(max(map(len, own)) if good and bad else 0):
            row = {i: starts[i] + min(t, len(own[i]) - 1) for i in [*good, *bad]}  # an answer that ended stays
            better += [row[i] for i in good for _ in bad]
            worse += [row[j] for _ in good for j in bad]
            weights += [1 / (len(good) * len(bad))] * (len(good) * len(bad))
    if not better:
        raise UsageError("no question has both right and wrong answers", remedy="ask easier or harder ones")
    x = torch.cat(x_RE)
    scale_E = x.std(0) + 1e-6
    x = x / scale_E
    better_P, worse_P, weight_P = torch.tensor(better), torch.tensor(worse), torch.tensor(weights)
    head_E = torch.zeros(x.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([head_E], lr=RATE, max_iter=STEPS, history_size=20)

    def loss() -> Tensor:
        optimizer.zero_grad()
        score_R = x @ head_E
        lost_P = F.softplus(score_R[worse_P] - score_R[better_P])
        value = (lost_P * weight_P).sum() / weight_P.sum() + DECAY * head_E.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return (head_E / scale_E).detach()


def agreement(some: Sequence[Answered], scores: Sequence[Sequence[Sequence[float]]], tokens: int) -> float | None:
    """How often the beginning of a right answer scores higher than an equally long one of a wrong answer to the
    same question; ties count half. The mean over questions, 0.5 by chance; None if no question has both.

    Args:
        scores: for each question and answer, the score after each of its tokens.
    """
    shares = []
    for one, own in zip(some, scores, strict=True):
        now = [of[min(tokens, len(of)) - 1] for of in own]
        pairs = [(now[i], now[j]) for i, a in enumerate(one.right) if a for j, b in enumerate(one.right) if not b]
        if pairs:
            shares.append(sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs))
    return sum(shares) / len(shares) if shares else None


def reward_folder(folder: Path, head_E: Tensor) -> None:
    """Turn a folder of a language model, in place, into one that scores: its head becomes the scalar one. The chat
    template is removed, so that the model reads the tokens that were drawn and nothing after them."""
    checkpoint = Checkpoint.open(folder)
    kept = {name: x for name, x in checkpoint.read(checkpoint.tensors).items() if name != "lm_head.weight"}
    dtype = next(iter(kept.values())).dtype
    config = {**checkpoint.config, "architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for path in (folder / "tokenizer_config.json", folder / "chat_template.jinja"):
        if path.suffix == ".jinja":
            path.unlink(missing_ok=True)
        elif path.exists():
            fields = json.loads(path.read_text(encoding="utf-8"))
            fields.pop("chat_template", None)
            path.write_text(json.dumps(fields, indent=2), encoding="utf-8")
    partial = folder / f"{WEIGHTS}.new"
    with open(partial, "wb") as file:
        write_tensors(file, kept | {HEAD: head_E[None].to(dtype)}, {"format": "pt"})
    partial.replace(folder / WEIGHTS)

"""How good the demo models are: `python -m tools.demo.evaluate` asks fresh questions and prints the figures.

The questions are drawn with seeds that training never uses. `--write` puts the figures into figures.json and README.md
(the model card) in the models' folder.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch

from engine import Engine
from engine.demo import demo_folder
from search import Greedy
from tools.demo.card import card
from tools.demo.generator import Dialogue, Pair, dialogue, pair
from tools.demo.net import write_json
from tools.demo.text import CONTEXT
from tools.demo.train import FIGURES, SEED, read_figures

MAX_NEW_TOKENS = 160
GOALS = {"accuracy": 0.9, "agreement": 0.6, "preference": 0.85}


def questions(number: int, seed: str = f"{SEED}:test") -> Iterator[Dialogue]:
    """Fresh conversations that end with a question, not with facts about the user."""
    found = 0
    for i in count():
        talk = dialogue(Random(f"{seed}:{i}"))
        if talk.turns[-1].task != "tell" and found < number:
            found += 1
            yield talk
        elif found == number:
            return


def pairs(number: int, seed: str = f"{SEED}:test pairs") -> list[Pair]:
    """Fresh preference pairs."""
    return [pair(Random(f"{seed}:{i}")) for i in range(number)]


def prompt(engine: Engine, talk: Dialogue, reply: str | None = None) -> list[int]:
    """Token ids of a conversation up to its last reply, or with `reply` as the last."""
    assert engine.template is not None
    messages = talk.messages()[:-1] if reply is None else talk.messages(reply)
    spans = engine.template.render(messages, add_generation_prompt=reply is None)
    return engine.tokenizer.encode_rendered(spans)


def answers(engine: Engine, talks: list[Dialogue]) -> tuple[dict[str, Any], list[tuple[list[int], list[int]]]]:
    """Greedy answers: the share that is right, by task too, and (prompt, answer) ids.

    An answer that does not come to its end in time is wrong.
    """
    right, asked, texts = Counter(), Counter(), []
    prompts = [prompt(engine, talk) for talk in talks]
    results = engine.generate(prompts, Greedy(), max_new_tokens=MAX_NEW_TOKENS)
    for talk, result in zip(talks, results, strict=True):
        turn, output = talk.turns[-1], result.outputs[0]
        fine = output.finish_reason == "eos" and turn.check(output.text)
        asked[turn.task] += 1
        right[turn.task] += fine
        if not fine:
            texts.append({"task": turn.task, "question": turn.user, "answer": output.text, "expected": turn.reply})
    summary = {
        "questions": len(talks),
        "accuracy": right.total() / len(talks),
        "tasks": {task: {"right": right[task], "asked": asked[task]} for task in sorted(asked)},
        "mistakes": texts,
    }
    return summary, [(ids, result.outputs[0].token_ids) for ids, result in zip(prompts, results, strict=True)]


def agreement(draft: Engine, texts: list[tuple[list[int], list[int]]]) -> float:
    """How often a draft's most probable token is the one that the target wrote."""
    same = total = 0
    for asked, answer in texts:
        guessed = draft.logits([*asked, *answer])[len(asked) - 1 : -1].argmax(-1)
        same += int((guessed.cpu() == torch.tensor(answer)).sum())
        total += len(answer)
    return same / total


def preference(reward: Engine, judged: list[Pair]) -> dict[str, Any]:
    """How often the better answer has the higher reward, also by the other one's fault."""
    right, asked = Counter(), Counter()
    rows = [[prompt(reward, one.dialogue, reply) for reply in (one.better, one.worse)] for one in judged]
    fitting = [(one, ids) for one, ids in zip(judged, rows, strict=True) if max(map(len, ids)) <= CONTEXT]
    scores = iter(reward.scores(ids for _, both in fitting for ids in both))
    for one, _ in fitting:
        asked[one.fault] += 1
        right[one.fault] += next(scores) > next(scores)
    faults = {fault: {"right": right[fault], "asked": asked[fault]} for fault in sorted(asked)}
    return {"pairs": asked.total(), "accuracy": right.total() / asked.total(), "faults": faults}


def evaluate(folder: Path, number: int, **options: Any) -> dict[str, Any]:
    """All figures of the models in a folder, loaded with `options` of `Engine.load`."""
    talks = list(questions(number))
    figures, texts = answers(Engine.load(folder / "target", **options), talks)
    engine = Engine.load(folder / "draft", **options)
    draft, _ = answers(engine, talks)
    del draft["mistakes"]
    draft["agreement"] = agreement(engine, texts)
    reward = preference(Engine.load(folder / "reward", **options), pairs(number))
    return {"target": figures, "draft": draft, "reward": reward}


def main(argv: list[str] | None = None) -> int:
    """The command line; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo.evaluate", description=__doc__)
    parser.add_argument("--folder", type=Path, default=demo_folder().parent, help="holds target, draft and reward")
    parser.add_argument("--questions", type=int, default=500, metavar="N", help="and as many preference pairs (500)")
    parser.add_argument("--write", action="store_true", help="into figures.json and the model card")
    parser.add_argument("--dtype", default="bfloat16", help="to compute in (%(default)s)")
    parser.add_argument("--quant", default="none", help="format of the weights (%(default)s)")
    parser.add_argument("--kv-dtype", default="auto", help="of keys and values (%(default)s)")
    args = parser.parse_args(argv)
    options = {"dtype": args.dtype, "quant": args.quant, "kv_dtype": args.kv_dtype}
    if args.write and options != {name: parser.get_default(name) for name in options}:
        parser.error("--write: only figures of the models as they are bundled are written")
    figures = evaluate(args.folder, args.questions, **options)
    for mistake in figures["target"].pop("mistakes"):
        print(json.dumps(mistake, ensure_ascii=False), file=sys.stderr)
    print(json.dumps(figures, indent=2))
    if args.write:
        summary = read_figures(args.folder) | {"evaluation": figures}
        write_json(args.folder / FIGURES, summary)
        (args.folder / "README.md").write_text(card(summary), encoding="utf-8")
    reached = {
        "accuracy": figures["target"]["accuracy"],
        "agreement": figures["draft"]["agreement"],
        "preference": figures["reward"]["accuracy"],
    }
    for goal, least in GOALS.items():
        print(f"{goal}: {reached[goal]:.1%} (at least {least:.0%} wanted)", file=sys.stderr)
    return int(any(reached[goal] < least for goal, least in GOALS.items()))


if __name__ == "__main__":
    sys.exit(main())

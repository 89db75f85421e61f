"""`python -m tools.bench endings`: when beam search ends, how many passes follow its answer, and how good that is.

The live beams of a step depend neither on the length penalty nor on the rule that ends the search. So each prompt is
searched once, as far as it may go, and every rule is applied to what was recorded; `check` compares this with searches.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from models.later import later
from tools.bench.flags import add_numbers, add_run_flags
from tools.bench.measure import progress
from tools.bench.report import finish, rows_table, stamp

with later():
    from engine import Engine
    from engine.text.prompting import chat_prompt
    from search import Trie
    from search.finished import Finished
    from search.options import MAX_PATIENCE, hypotheses
    from tools.bench import texts
    from tools.bench.searches import Recorded

QUESTIONS = {  # -> what a right answer has
    "What is the capital of France, and why is it famous?": r"Paris",
    "What is the capital of Italy?": r"Rome",
    "What is the largest planet of the solar system?": r"Jupiter",
    "Who wrote Romeo and Juliet?": r"Shakespeare",
    "What is 2 + 2?": r"\b(4|four)\b",
    "What colour do you get if you mix blue and yellow?": r"[Gg]reen",
    "How many days are in a week?": r"\b(7|[Ss]even)\b",
    "What is the opposite of hot?": r"[Cc]old",
    "Which animal barks, a dog or a cat?": r"[Dd]og",
    "What is the chemical formula of water?": r"H2O|H₂O",
    "Name three fruits.": r"[Aa]pple|[Bb]anana|[Oo]range",
    "What is the past tense of the verb go?": r"[Ww]ent",
    "On which continent is Egypt?": r"Africa",
    "Why is the sky blue?": r"scatter",
    "What does a thermometer measure?": r"[Tt]emperature",
    "Translate into French: good morning.": r"[Bb]onjour",
    "What gas do plants take from the air?": r"[Cc]arbon dioxide|CO2",
    "Write one sentence about the sea.": r"[Ss]ea|[Oo]cean",
    "Who was the first person on the moon?": r"Armstrong",
    "What is the boiling point of water in degrees Celsius?": r"\b100\b",
}
PENALTIES = (0.0, 0.6, 1.0)
RULES: dict[str, dict[str, Any]] = {
    "early_stopping false": {},
    "early_stopping true, patience 1": {"patience": 1},
    "patience 2": {"patience": 2},
    "patience 0.5": {"patience": 0.5},
    "patience 0.2": {"patience": 0.2},
    "early_stopping best": {"early_stopping": "best"},
}


@dataclass(frozen=True)
class Record:
    """The hypotheses that a search saw, and its best live beams.

    Args:
        ended: (log-probability, length, text) of the hypotheses, in the order in which they ended.
        live: the log-probability of the best live beam after each step.
        limit: tokens of an output.
    """

    ended: Sequence[tuple[float, int, str]]
    live: Sequence[float]
    limit: int

    def under(
        self, beams: int, penalty: float, early_stopping: str = "false", patience: float | None = None
    ) -> dict[str, Any]:
        """The result of `Trie` with these arguments: passes, and the length, log-probability and text of its answer."""
        wanted, counts = hypotheses(beams, patience), patience is not None
        worst = 0 if early_stopping == "best" else wanted - 1
        done, step, seen = Finished(penalty, wanted), 0, list[tuple[float, int, str]]()
        while True:
            step += 1
            for logprob, length, text in (one for one in self.ended if one[1] == step):
                seen.append((logprob, length, text))
                done.add([len(seen) - 1] * length, logprob, "eos")
            if step > len(self.live) or (counts and len(done.outputs) == wanted):
                break
            score = self.live[step - 1]
            if not counts and not done.score(score, step) > done.score_at(worst):
                break
            if done.score_at(0) >= done.bound(score, step + 1, self.limit):
                break
        logprob, length, text = seen[done.outputs[0].token_ids[0]]
        return {"passes": step, "length": length, "logprob": logprob, "text": text}


def record(engine: Engine, prompts: Sequence[Sequence[int]], beams: int, limit: int, ends: Any) -> list[Record]:
    """Search each prompt as far as it may go."""
    records = []
    for number, prompt in enumerate(prompts, 1):
        most = hypotheses(beams, MAX_PATIENCE)
        search = Recorded(beams, 0.0, patience=MAX_PATIENCE, num_return_sequences=most)
        [result] = engine.generate([prompt], search, max_new_tokens=limit, eos_token_ids=ends)
        ended = [(output.logprob or 0.0, len(output.token_ids), output.text) for output in result.outputs]
        records.append(Record(sorted(ended, key=lambda one: one[1]), search.scores, limit))
        progress(f"{number} of {len(prompts)} prompts: {len(search.scores) + 1} passes, {len(ended)} hypotheses")
    return records


def check(engine: Engine, prompt: Sequence[int], one: Record, beams: int, ends: Any) -> None:
    """Compare a record with searches. Raises AssertionError."""
    for penalty in PENALTIES:
        for rule in RULES.values():
            search = Trie(beams, penalty, **rule)
            [result] = engine.generate([prompt], search, max_new_tokens=one.limit, eos_token_ids=ends)
            told = one.under(beams, penalty, **rule)
            assert (told["passes"], told["text"]) == (result.stats["steps"], result.outputs[0].text), search


def figures(records: Sequence[Record], wanted: Sequence[str | None], beams: int) -> list[dict[str, Any]]:
    """A row for each rule and penalty."""
    rows = []
    for rule, arguments in RULES.items():
        for penalty in PENALTIES:
            found = [one.under(beams, penalty, **arguments) for one in records]
            passes, tokens = (sum(one[key] for one in found) for key in ("passes", "length"))
            pairs = zip(found, wanted, strict=True)
            right = [bool(re.search(pattern, one["text"])) for one, pattern in pairs if pattern]
            count, each = len(found), [one["logprob"] / one["length"] for one in found]
            rows.append({
                "rule": rule, "penalty": penalty, "passes": passes / count, "tokens": tokens / count,
                "after": 1 - tokens / passes, "per_token": sum(each) / count,
                "logprob": sum(one["logprob"] for one in found) / count, "right": sum(right) if right else None,
            })  # fmt: skip
    return rows


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    made = stamp(argv)
    engine = Engine.load(args.model, dtype=args.dtype, threads=args.threads)
    talks = [talk for talk, _ in zip(texts.story_requests("endings"), range(args.stories), strict=False)]
    prompts, ends, wanted = [texts.prompt(engine, talk) for talk in talks], None, [None] * len(talks)
    if not talks:
        rendered = [chat_prompt(engine, [{"role": "user", "content": text}]) for text in [*QUESTIONS][: args.questions]]
        prompts, ends = [prompt.ids for prompt in rendered], rendered[0].eos_token_ids
        wanted = [*QUESTIONS.values()][: args.questions]
    records = record(engine, prompts, args.beams, args.tokens, ends)
    for prompt, one in [*zip(prompts, records, strict=True)][: args.check]:
        check(engine, prompt, one, args.beams, ends)
    rows = figures(records, wanted, args.beams)
    columns = {
        "ends by": "{rule}", "length penalty": "{penalty:.1f}", "passes": "{passes:.1f}", "tokens": "{tokens:.1f}",
        "after the answer": "{after:.0%}", "log-probability": "{logprob:.2f}", "per token": "{per_token:.3f}",
        "right": "{right}",
    }  # fmt: skip
    if talks:
        del columns["right"]
    body = f"{engine.name}, {args.beams} beams, {len(prompts)} {'stories' if talks else 'questions'}, at most " \
           f"{args.tokens} tokens.\n\n" + rows_table(rows, columns)  # fmt: skip
    finish("endings-stories" if talks else "endings", made, body, {"rows": rows}, args.save)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("endings", help="passes after the answer of beam search, by the rule that ends it")
    parser.add_argument("--model", required=True, metavar="DIR", help="of instructions; or the demo, with --stories")
    add_numbers(
        parser,
        beams=15,
        tokens=(128, "of an answer, at most"),
        questions=(len(QUESTIONS), "how many are asked"),
        stories=(0, "ask for so many stories of the bundled demo instead"),
        check=(0, "compare the records of so many prompts with searches"),
    )
    add_run_flags(parser, "endings", run=run)

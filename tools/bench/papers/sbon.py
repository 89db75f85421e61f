"""Speculative best-of-N against best-of-N (the paper's table 1), and with a reward that can be checked."""

import argparse
import re
import time
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from engine.contract import Search
from engine.load.options import RewardFunction
from search import BoN, SBoN
from tools.bench import sbon as bench
from tools.bench.checkpoints import CHAT
from tools.bench.measure import in_turn
from tools.bench.papers import programs
from tools.bench.papers.common import Findings, Models, bullets
from tools.bench.papers.programs import EXERCISES
from tools.bench.report import rows_table

TITLE = "Accelerating Best-of-N via Speculative Rejection"
SETTING = """AlpacaFarm-SFT10K, Llama3-8B and Llama3-8B-Instruct, each with the reward models Mistral-7B-RM, Eurus-7B-RM
and Llama3-8B-RM; 100 prompts of AlpacaFarm-Eval, N = 100, decision tokens from 256 to 1024 and rejection rates from 0.5
to 0.95 by pair (section 6.1, table 3)."""
MODEL = CHAT
# Table 1, the column of averages over the nine pairs: (speedup, score).
TABLE_1 = {"Bo100": (1.000, 100.0), "SBoN": (4.951, 99.1), "Bo25": (3.189, 88.9), "BoM": (4.481, 88.6)}
MEAN_M = 25.6  # of BoM, in table 1
# Table 1, SBoN: (speedup, score) of the pair that did worst and of the one that did best by speedup.
SLOWEST, FASTEST = ("Llama3-8B, Llama3-8B-RM", 1.987, 100.6), ("Llama3-8B-Instruct, Llama3-8B-RM", 8.865, 99.3)
DIFFERS = (
    """Every search here runs on the same keyed draws, so that no score exceeds 100; the paper compares independent
    draws (100.6 is in its table).""",
    """The paper generates utterances in batches, one after the other (section 6), where time goes with their number;
    here all N run side by side, and a step of few utterances costs less than one of many, but not in proportion.""",
    """*SBoN* keeps utterances that had finished although they rank below the cut: it costs nothing. *the paper's rule*
    gives them up. Both keep exactly N - floor(alpha N); the paper's quantile keeps one more, and ties.""",
)
ALPHA = 0.75
SOLVED = """*solved*: tasks whose best utterance is right; *reward*: of the best, the mean. At equal draws best-of-N
    solves whatever any of its N utterances solves; SBoN loses a task only if it rejects every utterance that would
    become right."""


class Kind(NamedTuple):
    """Tasks whose answers a function checks.

    Args:
        what: they are.
        tasks: the questions.
        reward: of answers and beginnings; 1 is right.
        tau: decision token.
        tokens: of an answer, at most.
        differs: about the reward.
    """

    what: str
    tasks: list[str]
    reward: RewardFunction
    tau: int
    tokens: int
    temperature: float
    differs: str


def kind_of(models: Models) -> Kind:
    """Programs for a model of code, sums for others."""
    if "coder" in models.name.lower():
        return Kind("functions to write", [one.text for one in EXERCISES][: models.pick(4, 2)], programs.reward,
                    models.pick(32, 3), models.pick(64, 6), 0.8,
                    """The reward is the share of its tests that the function passes, run in a process of its own; of an
                    unfinished answer it is that of the longest part which compiles, and 0 if that defines no such
                    function. A beginning that lacks its last lines mostly fails all tests, so that beginnings of good
                    and bad functions often rank alike.""")  # fmt: skip
    return Kind("sums", questions(models.pick(6, 2), models.seed), right, 12, models.pick(24, 6), 0.7,
                """The reward is a function that checks: 1 if the first number that is none of the question's is the
                sum, -1 if it is another, 0 while there is none. A beginning that has the number is judged as surely as
                the whole, which no reward model can; the paper's rewards of beginnings foresee, with errors, what is
                not there yet.""")  # fmt: skip


def run(models: Models) -> Findings:
    """Measure and report."""
    return by_reward_model(models) if models.demo else by_function(models)


def by_function(models: Models) -> Findings:
    """Best-of-N and SBoN on tasks whose answers a function checks."""
    engine, kind = models.engine(), kind_of(models)
    shared, wanted = {"temperature": kind.temperature, "seed": models.seed}, models.pick((16, 64), (4,))
    searches: dict[str, Search] = {f"Bo{n}": BoN(n=n, **shared) for n in (1, wanted[0] // 4, *wanted)}
    searches |= {f"SBoN, N = {n}": SBoN(n=n, tau=kind.tau, alpha=ALPHA, **shared) for n in wanted}
    asked = argparse.Namespace(max_new_tokens=kind.tokens)
    engine.reward = kind.reward

    def measured(search: Search, i: int) -> tuple[float, bench.Run]:
        used = time.process_time()
        found = bench.ask(engine, {"messages": [{"role": "user", "content": kind.tasks[i]}]}, search, asked)
        return time.process_time() - used, found

    runs = in_turn({name: lambda i, s=s: measured(s, i) for name, s in searches.items()}, len(kind.tasks), what="task")
    rows = []
    for name, own in runs.items():
        base = f"Bo{name.removeprefix('SBoN, N = ')}" if name.startswith("SBoN") else f"Bo{wanted[-1]}"
        mine, others = ([run for _, run in found] for found in (own, runs[base]))
        solved = [result.outputs[0].score == 1 for _, result in mine]
        used = [sum(seconds for seconds, _ in found) for found in (own, runs[base])]
        rows.append(bench.summary(name, mine, others) | {
            "beside": base, "solved": sum(solved), "of": len(solved), "cpu": used[0] / len(own),
            "cpu_ratio": used[1] / used[0],
            "drawn": sum(result.stats["tokens_drawn"] for _, result in mine) / len(mine)})  # fmt: skip
    body = "\n\n".join([
        f"{models.name}, {models.dtype}, {len(kind.tasks)} {kind.what} ({kind.tasks[0]!r}, {kind.tasks[-1]!r}), up to "
        f"{kind.tokens} tokens, temperature {kind.temperature}. SBoN: tau {kind.tau}, alpha {ALPHA}.",
        rows_table(rows, {
            "": "{search}", "solved": "{solved} of {of}", "reward": "{reward:.2f}", "tokens drawn": "{drawn:.0f}",
            "beside": "{beside}", "tokens": "{tokens:.2f}", "speedup": "{speedup:.2f}", "CPU s": "{cpu:.2f}",
            "by CPU time": "{cpu_ratio:.2f}", "peak MB": "{bytes:MB}"}),
        "*tokens*, *speedup*: tokens drawn over those of the search that it stands beside, and that one's seconds over "
        "its own, the median over the tasks, in turn; *CPU s*: a task's, in this process. In the paper SBoN is "
        f"{TABLE_1['SBoN'][0]:.1f} times as fast as best-of-100 at a score of {TABLE_1['SBoN'][1]}, and best-of-25 "
        f"{TABLE_1['Bo25'][0]:.1f} times at {TABLE_1['Bo25'][1]}.",
        bullets([*DIFFERS[1:2], kind.differs, SOLVED]),
    ])  # fmt: skip
    return Findings(body, {"rows": rows})


def questions(number: int, seed: int) -> list[str]:
    """Sums of two numbers of one digit, then of three: what a small model solves now and then."""
    draw = Random(f"papers:sums:{seed}")
    numbers = [[draw.randrange(3, 10) for _ in range(2 + (i >= number // 2))] for i in range(number)]
    return [f"What is {' + '.join(map(str, some))}?" for some in numbers]


def right(prompt: Any, texts: Sequence[str]) -> list[float]:
    """Rewards of answers, or of their beginnings: whether the first number of their own is the sum."""
    question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    summands = re.findall(r"\d+", question)
    total = str(sum(map(int, summands)))
    rewards = []
    for text in texts:
        own = [number for number in re.findall(r"\d+", text) if number not in summands]
        unfinished = own and text.endswith(own[0]) and len(own) == 1 and own[0] != total
        if unfinished and any(number.startswith(own[0]) for number in [*summands, total]):
            own = []  # it may become that number yet
        rewards.append(0.0 if not own else 1.0 if own[0] == total else -1.0)
    return rewards


def by_reward_model(models: Models) -> Findings:
    """The paper's table with the demo's reward model."""
    engine = models.engine("reward")
    shared = {"temperature": 1.5, "seed": models.seed}
    asked = argparse.Namespace(
        n=models.pick(100, 8), tau=models.pick(16, 3), alpha=0.6, schedule="", input=None, **shared,
        prompts=models.pick(16, 1), max_new_tokens=models.pick(96, 12),
    )  # fmt: skip
    records = bench.prompts(asked)
    faithful: Search = SBoN(n=asked.n, tau=asked.tau, alpha=asked.alpha, keep_finished=False, **shared)
    rows = bench.table_rows(engine, records, asked, {"SBoN, the paper's rule": faithful})
    body = "\n\n".join([
        f"{models.name}, {models.dtype}, {len(records)} prompts (requests for stories), up to {asked.max_new_tokens} "
        f"tokens, temperature {shared['temperature']}, tau {asked.tau}, alpha {asked.alpha}.",
        compared(rows),
        bench.TABLE,
        f"In the paper SBoN's speedup is from {SLOWEST[1]} ({SLOWEST[0]}, score {SLOWEST[2]}) to {FASTEST[1]} "
        f"({FASTEST[0]}, score {FASTEST[2]}); BoM's M is {MEAN_M} in the mean.",
        bullets(DIFFERS),
    ])  # fmt: skip
    return Findings(body, {"rows": rows})


def compared(rows: list[dict[str, Any]]) -> str:
    """Ours, the paper's averages in the last columns."""
    papers = [TABLE_1[name] for name in ("Bo100", "SBoN", "Bo25", "SBoN", "BoM")]
    return rows_table([row | {"paper": paper} for row, paper in zip(rows, papers, strict=True)], {
        "": "{search}", "speedup": "{speedup:.2f}", "score": "{score:.1f} ± {score_se:.1f}",
        "worst score": "{worst:.1f}", "best kept": "{kept:.0%}", "tokens": "{tokens:.2f}", "seconds": "{seconds:.2f}",
        "paper: speedup": "{paper[0]:.2f}", "paper: score": "{paper[1]:.1f}"})  # fmt: skip

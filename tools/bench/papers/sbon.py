"""Speculative best-of-N against best-of-N (the paper's table 1), and with a reward that can be checked."""

import itertools
import math
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

from engine import Engine, Request
from engine.contract import Search, SearchResult
from engine.errors import CoppiceError
from engine.load.options import RewardFunction
from engine.text.prompting import chat_prompt
from search import BoN, SBoN
from tools import reward_head
from tools.bench.checkpoints import CHAT
from tools.bench.measure import in_turn, ratio, standard_error
from tools.bench.papers import programs
from tools.bench.papers.common import Findings, Models, bullets
from tools.bench.papers.programs import EXERCISES
from tools.bench.report import rows_table
from tools.bench.texts import story_requests
from tools.bench.variants import first_layers

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
    """Here all searches use the same keyed draws, so no score exceeds 100; the paper compares independent draws (its
    table has a 100.6).""",
    """The paper generates utterances in consecutive batches (section 6), so time is proportional to their number. Here
    all N run side by side, and a step of few utterances costs less than a step of many, but not in proportion.""",
    """*SBoN* keeps finished utterances that rank below the cut, which costs nothing; *the paper's rule* rejects them.
    Both keep exactly N - floor(alpha N) utterances; the paper's quantile keeps one more, and ties.""",
)
ALPHA, SUMS = 0.75, "sums"
TRAINING, ANSWERS, LAYERS = 140, 12, 20  # sums that a head is trained and tested on, answers to each, its layers
TWO = 37 * 7  # sums of two numbers, of 3 to 39 and of 3 to 9
AFTER = (2, 4, 6, 8, 12, 16, 24)  # tokens of a beginning
TABLE = """All rows use the same keyed draws for a prompt. *speedup* divides the time of the first row by the row's own
(the median over prompts). *score* is 100 for the first row's reward and 0 for its worst utterance (mean and standard
error over prompts). *tokens* is the number of generated tokens relative to the first row, *seconds* the median time,
and *peak* the largest size of held pages, of generator and reward model together. BoM is best-of-M with M = N /
speedup, which takes about as long as SBoN."""
LEGEND = f"""*CPU s* is the CPU time per task, in this process. *tokens of BoN* divides the drawn tokens by those of
best-of-N with the same N, and *x BoN* its CPU time by the search's own. *as good* names the smallest best-of-N with at
least the same reward; *tokens of it* and *x it* compare with that one. In the paper SBoN is {TABLE_1["SBoN"][0]:.1f}
times as fast as best-of-100 with a score of {TABLE_1["SBoN"][1]}, and best-of-25 {TABLE_1["Bo25"][0]:.1f} times as fast
with a score of {TABLE_1["Bo25"][1]}."""
SOLVED = """*solved* counts the tasks whose best utterance is right; *reward* is the mean reward of the best utterances.
    With equal draws best-of-N solves every task that any of its N utterances solves; SBoN loses a task only if it
    rejects every utterance that would become right."""


Run = tuple[float, SearchResult]  # seconds and result


class Kind(NamedTuple):
    """Tasks whose answers a function checks.

    Args:
        what: the name of the tasks in the report.
        tasks: the questions.
        reward: rewards answers and their beginnings; 1 is right.
        tau: decision token.
        tokens: the most tokens of an answer.
        differs: a note on the reward for the report.
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
                    """The reward is the share of its tests that the function passes, in a separate process. For an
                    unfinished answer it is the reward of the longest part that compiles, and 0 if that part does not
                    define the function. A beginning without its last lines mostly fails all tests, so beginnings of
                    good and bad functions often rank alike.""")  # fmt: skip
    return Kind(SUMS, questions(models.pick(8, 2), models.seed), right, 12, models.pick(24, 6), 0.7,
                """The reward is a function that checks the answer: 1 if the first number that is not in the question is
                the sum, -1 if it is another number, 0 while there is none. It judges a beginning that has this number
                as reliably as the whole answer, which no reward model can; the paper's rewards of beginnings predict,
                with errors, what is not there yet.""")  # fmt: skip


def run(models: Models) -> Findings:
    """Measure and report."""
    return by_function(models) if models.reward is None else by_reward_model(models)


def by_function(models: Models) -> Findings:
    """Best-of-N and SBoN on tasks whose answers a function checks."""
    kind, wanted = kind_of(models), models.pick((16, 64, 128), (4,))
    shared, few = {"temperature": kind.temperature, "seed": models.seed}, wanted[-1] // 4
    searches: dict[str, Search] = {f"Bo{n}": BoN(n=n, **shared) for n in sorted({1, wanted[0] // 4, few, *wanted})}
    searches |= {f"SBoN, N = {n}": SBoN(n=n, tau=kind.tau, alpha=ALPHA, **shared) for n in wanted}
    engine = models.engine()
    engine.reward = kind.reward
    rows = solved_rows(engine, kind, searches)
    less = models.engine(kv_memory=few_whole(engine, kind, few))
    less.reward = kind.reward
    scarce = SBoN(n=wanted[-1], tau=kind.tau // 2, alpha=0.5, schedule="memory", **shared)
    rows += solved_rows(less, kind, {f"SBoN, N = {wanted[-1]}, memory": scarce})
    beside_best_of_n(rows)
    found: dict[str, Any] = {"rows": rows}
    body = [
        f"{models.name}, {models.dtype}, {len(kind.tasks)} {kind.what} ({kind.tasks[0]!r}, {kind.tasks[-1]!r}), up to "
        f"{kind.tokens} tokens, temperature {kind.temperature}. SBoN has tau {kind.tau} and alpha {ALPHA}; its row "
        f"*memory* uses the memory schedule with tau {kind.tau // 2} and alpha 0.5, in a cache of {few} whole answers, "
        f"as Bo{few} needs it.",
        solved_table(rows),
        LEGEND,
        bullets([*DIFFERS[1:2], kind.differs, SOLVED]),
    ]
    if kind.what == SUMS:
        foreseen = foresight(models, engine, kind, wanted)
        body += foreseen.pop("text")
        found |= foreseen
    return Findings("\n\n".join(body), found)


def solved_rows(engine: Engine, kind: Kind, searches: Mapping[str, Search]) -> list[dict[str, Any]]:
    """A row for each search: tasks solved, tokens drawn, CPU seconds; the searches are interleaved."""

    def measured(search: Search, i: int) -> tuple[float, SearchResult]:
        used = time.process_time()
        _, found = ask(engine, [{"role": "user", "content": kind.tasks[i]}], search, kind.tokens)
        return time.process_time() - used, found

    runs = in_turn({name: partial(measured, search) for name, search in searches.items()}, len(kind.tasks), what="task")
    rows = []
    for name, own in runs.items():
        texts = [result.outputs[0].text for _, result in own]
        rewards = [next(iter(kind.reward(task, [text]))) for task, text in zip(kind.tasks, texts, strict=True)]
        rows.append({
            "search": name, "n": int(re.findall(r"\d+", name)[0]), "solved": rewards.count(1), "of": len(own),
            "reward": fmean(rewards), "cpu": fmean(seconds for seconds, _ in own),
            "drawn": fmean(result.stats["tokens_drawn"] for _, result in own),
            "bytes": max(result.stats["kv_bytes_peak"] for _, result in own)})  # fmt: skip
    return rows


def few_whole(engine: Engine, kind: Kind, count: int) -> int:
    """Bytes of a cache that holds `count` whole answers to the longest question."""
    prompts = [chat_prompt(engine, [{"role": "user", "content": task}]).ids for task in kind.tasks]
    return engine.pool.bytes_per_token * (max(map(len, prompts)) + count * kind.tokens)


def beside_best_of_n(rows: Sequence[dict[str, Any]]) -> None:
    """Compare rows of SBoN with best-of-N of the same N, and with the smallest one of at least the same reward."""
    plain = sorted((row for row in rows if row["search"].startswith("Bo")), key=lambda row: row["n"])
    for row in (row for row in rows if row["search"].startswith("SBoN")):
        same = next(one for one in plain if one["n"] == row["n"])
        row |= {"tokens": row["drawn"] / same["drawn"], "times": same["cpu"] / row["cpu"]}
        if good := next((one for one in plain if one["reward"] >= row["reward"]), None):
            row |= {"equal": good["search"], "equal_tokens": row["drawn"] / good["drawn"],
                    "equal_times": good["cpu"] / row["cpu"]}  # fmt: skip


def solved_table(rows: Sequence[dict[str, Any]]) -> str:
    return rows_table(rows, {
        "": "{search}", "solved": "{solved} of {of}", "reward": "{reward:.2f}", "tokens drawn": "{drawn:.0f}",
        "CPU s": "{cpu:.2f}", "peak MB": "{bytes:MB}", "tokens of BoN": "{tokens:.2f}", "x BoN": "{times:.2f}",
        "as good": "{equal}", "tokens of it": "{equal_tokens:.2f}", "x it": "{equal_times:.2f}"})  # fmt: skip


def questions(number: int, seed: object) -> list[str]:
    """Different sums of two numbers, the last quarter of three: what a small model solves now and then. Raises
    ValueError if there are not so many."""
    draw = Random(f"papers:sums:{seed}")
    found: dict[str, None] = {}
    if number - number // 4 > TWO:
        raise ValueError(f"{number} questions: there are {TWO} of two numbers")
    while len(found) < number:
        three = len(found) >= number - number // 4
        numbers = [draw.randrange(3, 10 if three else 40), *(draw.randrange(3, 10) for _ in range(1 + three))]
        found[f"What is {' + '.join(map(str, numbers))}?"] = None
    return [*found]


def foresight(models: Models, engine: Engine, kind: Kind, wanted: Sequence[int]) -> dict[str, Any]:
    """The same searches with a head on the model's own states, trained to predict the function: how well it predicts,
    and how good the answers are. The engine keeps it as its reward model."""
    options = {"max_new_tokens": kind.tokens, "temperature": kind.temperature, "seed": models.seed + 1}
    texts = [text for text in questions(models.pick(TRAINING, 12), f"training:{models.seed}") if text not in kind.tasks]
    used = time.process_time()

    def right_ones(text: str, answers: list[str]) -> list[bool]:
        return [reward == 1 for reward in kind.reward(text, answers)]

    known = reward_head.answered(engine, texts, right_ones, models.pick(ANSWERS, 8), **options)
    folder = first_layers(models.floats(), models.pick(LAYERS, 2), models.scratch)
    loaded = {"dtype": models.dtype, "threads": models.threads}
    rows = reward_head.states(Engine.load(folder, **loaded), known)
    kept = len(known) * 3 // 4  # the others say how well the head foresees
    head_E = reward_head.fit(known[:kept], rows[:kept])
    seconds = time.process_time() - used
    scores = [[(rows_TE @ head_E).tolist() for rows_TE in own] for own in rows[kept:]]
    decode = engine.tokenizer.decode
    checked = [[[*kind.reward(text, [decode(answer[: t + 1]) for t in range(len(answer))])] for answer in one.answers]
               for text, one in zip(texts[kept:], known[kept:], strict=True)]  # fmt: skip
    ranks = [{"tokens": t, "head": reward_head.agreement(known[kept:], scores, t),
              "function": reward_head.agreement(known[kept:], checked, t)} for t in AFTER]  # fmt: skip
    reward_head.reward_folder(folder, head_E)
    engine.add("reward", Engine.load(folder, **loaded))
    tau, shared = kind.tau // 2, {"temperature": kind.temperature, "seed": models.seed}
    searches: dict[str, Search] = {f"Bo{n}": BoN(n=n, **shared) for n in wanted}
    searches |= {f"SBoN, N = {n}": SBoN(n=n, tau=tau, alpha=ALPHA, **shared) for n in wanted}
    judged = solved_rows(engine, kind, searches)
    beside_best_of_n(judged)
    return {"ranks": ranks, "judged": judged, "text": [
        f"The reward head is a linear map of the states after {models.pick(LAYERS, 2)} layers, trained to rank "
        f"beginnings of right answers above those of wrong ones, on {kept} other sums with {models.pick(ANSWERS, 8)} "
        f"answers of the model each ({seconds:.0f} s of CPU time in all). The table shows how often the head and the "
        f"function do so on {len(known) - kept} sums that the head was not trained on (0.5 is chance):",
        rows_table(ranks, {"after tokens": "{tokens}", "head": "{head:.2f}", "function": "{function:.2f}"}),
        f"The same sums as above with the head as the only reward, tau {tau} and alpha {ALPHA}; *solved* and *reward* "
        "are judged by the function:",
        solved_table(judged),
    ]}  # fmt: skip


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
    """The paper's table with a reward model; the prompts are requests for stories, other ones for each seed."""
    engine = models.engine("reward")
    n, tau, alpha, tokens = models.pick(100, 8), models.pick(16, 3), 0.6, models.pick(96, 12)
    talks = (talk for talk in story_requests(f"sbon:{models.seed}") if len(talk.turns) <= 3)
    prompts = [talk.messages()[:-1] for talk in itertools.islice(talks, models.pick(16, 1))]
    shared, ours = {"temperature": 1.5, "seed": models.seed}, {"n": n, "tau": tau, "alpha": alpha}
    searches: dict[str, Search] = {
        f"Bo{n}": BoN(n=n, **shared),
        "SBoN": SBoN(**ours, **shared),
        f"Bo{n // 4}": BoN(n=n // 4, **shared),
        "SBoN, the paper's rule": SBoN(**ours, keep_finished=False, **shared),
    }
    ask(engine, prompts[0], searches[f"Bo{n}"], tokens)  # warm
    works = {name: lambda i, search=search: ask(engine, prompts[i], search, tokens)
             for name, search in searches.items()}  # fmt: skip
    runs = in_turn(works, len(prompts), what="prompt")
    first = runs[f"Bo{n}"]
    m = max(1, round(n / summary("SBoN", runs["SBoN"], first)["speedup"]))
    runs[f"BoM, M = {m}"] = [ask(engine, prompt, BoN(n=m, **shared), tokens) for prompt in prompts]
    rows = [summary(name, own, first) for name, own in runs.items()]
    body = "\n\n".join([
        f"{models.name}, {models.dtype}, {len(prompts)} prompts (requests for stories), up to {tokens} tokens, "
        f"temperature {shared['temperature']}, tau {tau}, alpha {alpha}.",
        compared(rows),
        TABLE,
        f"In the paper SBoN's speedup is from {SLOWEST[1]} ({SLOWEST[0]}, score {SLOWEST[2]}) to {FASTEST[1]} "
        f"({FASTEST[0]}, score {FASTEST[2]}); the mean of BoM's M is {MEAN_M}.",
        bullets(DIFFERS),
    ])  # fmt: skip
    return Findings(body, {"rows": rows})


def ask(engine: Engine, messages: list[dict[str, str]], search: Search, new_tokens: int) -> Run:
    """Answer a request; returns the seconds and the result."""
    prompt = chat_prompt(engine, messages)
    options = {"messages": messages, "max_new_tokens": new_tokens, "eos_token_ids": prompt.eos_token_ids}
    request = Request(prompt.ids, search, **options)
    began = time.perf_counter()
    [(_, outcome)] = engine.serve([request])
    if isinstance(outcome, CoppiceError):
        raise outcome
    return time.perf_counter() - began, outcome


def summary(name: str, own: Sequence[Run], first: Sequence[Run]) -> dict[str, Any]:
    """Means of a search's runs and medians of its times, alone and relative to best-of-N's runs `first` on the same
    prompts and draws."""
    seconds, base_seconds = ([took for took, _ in runs] for runs in (own, first))
    results, base = ([result for _, result in runs] for runs in (own, first))
    rewards = [result.outputs[0].score or 0.0 for result in results]
    drawn, base_drawn = ([result.stats["tokens_drawn"] for result in x] for x in (results, base))
    finals = [[reward for _, reward in result.stats["rewards"]] for result in base]
    bests, spans = [max(x) for x in finals], [max(x) - min(x) for x in finals]
    scores = [100 * (1 - (best - reward) / span) if span else 100.0
              for reward, best, span in zip(rewards, bests, spans, strict=True)]  # fmt: skip
    return {
        "search": name,
        "seconds": median(seconds),
        "speedup": ratio(base_seconds, seconds),
        "score": fmean(scores),
        "score_se": standard_error(scores),
        "worst": min(scores),
        "kept": fmean(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(rewards, bests, strict=True)),
        "tokens": fmean(a / b for a, b in zip(drawn, base_drawn, strict=True)),
        "bytes": max(result.stats["kv_bytes_peak"] for result in results),
    }


def compared(rows: list[dict[str, Any]]) -> str:
    """Ours, the paper's averages in the last columns."""
    papers = [TABLE_1[name] for name in ("Bo100", "SBoN", "Bo25", "SBoN", "BoM")]
    return rows_table([row | {"paper": paper} for row, paper in zip(rows, papers, strict=True)], {
        "": "{search}", "speedup": "{speedup:.2f}", "score": "{score:.1f} ± {score_se:.1f}",
        "worst score": "{worst:.1f}", "best kept": "{kept:.0%}", "tokens": "{tokens:.2f}", "seconds": "{seconds:.2f}",
        "peak MB": "{bytes:MB}", "paper: speedup": "{paper[0]:.2f}", "paper: score": "{paper[1]:.1f}"})  # fmt: skip

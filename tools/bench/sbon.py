"""Speculative best-of-N against best-of-N: time and reward."""

import argparse
import itertools
import json
import math
import time
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from engine.demo import with_defaults
from engine.errors import CoppiceError, UsageError
from models.later import later
from tools.bench.flags import add_numbers, add_run_flags
from tools.bench.measure import in_turn, ratio, standard_error
from tools.bench.report import finish, rows_table, stamp

with later():
    from engine import Engine, Request
    from engine.contract import Search, SearchResult
    from search import BoN, SBoN
    from tools.bench.texts import story_requests

Run = tuple[float, SearchResult]  # seconds and result
TABLE = """Per prompt, all on the same keyed draws. *speedup*: seconds of the first row over its own, the median over
the prompts; *score*: 100 for the first row's reward, 0 for the worst of its utterances, the mean and its standard error
over the prompts; *tokens*: generated, against the first row's; *seconds*: the median; *peak*: bytes of the pages held
when most were, generator and reward model together. BoM is best-of-M with M = N / speedup, which takes about the time
that SBoN takes."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("sbon", help="speculative best-of-N against best-of-N", description=__doc__)
    parts = parser.add_subparsers(required=True, metavar="PART")
    one = parts.add_parser("table", help="speedup and score (the paper's table 1)")
    add_numbers(one, n=(100, "utterances"), tau=(11, "decision token"), alpha=(0.6, "rejection rate"))
    one.add_argument("--schedule", default="", help="instead of tau and alpha, as --sbon-schedule")
    one.add_argument("--model", metavar="DIR", help="(the bundled demo)")
    one.add_argument("--reward", metavar="DIR", help="(the demo's)")
    add_prompt_flags(one, 50)
    add_numbers(one, max_new_tokens=96, temperature=1.5, seed=0)
    add_run_flags(one, "sbon", "auto", run_table)


def run_table(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    made, engine = stamp(argv), load(args)
    records = prompts(args)
    faithful = SBoN(n=args.n, tau=args.tau, alpha=args.alpha, schedule=args.schedule, keep_finished=False,
                    temperature=args.temperature, seed=args.seed)  # fmt: skip
    rows = table_rows(engine, records, args, {"SBoN, the paper's rule": faithful})
    body = "\n\n".join([
        f"{engine.name}, {len(records)} prompts, up to {args.max_new_tokens} tokens, temperature {args.temperature}. "
        f"SBoN: {args.schedule or f'tau {args.tau}, alpha {args.alpha}'}, finished utterances kept.",
        rows_table(rows, {
            "": "{search}", "speedup": "{speedup:.2f}", "score": "{score:.1f} ± {score_se:.1f}",
            "worst score": "{worst:.1f}", "best kept": "{kept:.0%}", "tokens": "{tokens:.2f}",
            "seconds": "{seconds:.2f}", "reward passes": "{reward_passes:.0f}", "peak MB": "{bytes:MB}"}),
        TABLE,
    ])  # fmt: skip
    result = {"model": engine.name, "prompts": len(records), "rows": rows}
    finish("sbon-table", made, body, result, args.save)
    return result


def table_rows(
    engine: Engine, records: Sequence[dict[str, Any]], args: argparse.Namespace, more: dict[str, Search] | None = None
) -> list[dict[str, Any]]:
    """Best-of-N, speculative best-of-N, best-of-N/4, more searches, and best-of-M that takes SBoN's time: each search's
    means over the prompts."""
    options = {"temperature": args.temperature, "seed": args.seed}
    searches: dict[str, Search] = {
        f"Bo{args.n}": BoN(n=args.n, **options),
        "SBoN": SBoN(n=args.n, tau=args.tau, alpha=args.alpha, schedule=args.schedule, **options),
        f"Bo{args.n // 4}": BoN(n=args.n // 4, **options),
        **(more or {}),
    }
    ask(engine, records[0], BoN(n=args.n, **options), args)  # warm
    works = {name: lambda i, search=search: ask(engine, records[i], search, args) for name, search in searches.items()}
    runs = in_turn(works, len(records), what="prompt")
    first = runs[f"Bo{args.n}"]
    m = max(1, round(args.n / summary("SBoN", runs["SBoN"], first)["speedup"]))
    runs[f"BoM, M = {m}"] = [ask(engine, record, BoN(n=m, **options), args) for record in records]
    return [summary(name, own, first) for name, own in runs.items()]


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
        "reward": fmean(rewards),
        "score": fmean(scores),
        "score_se": standard_error(scores),
        "worst": min(scores),
        "kept": fmean(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(rewards, bests, strict=True)),
        "tokens": fmean(a / b for a, b in zip(drawn, base_drawn, strict=True)),
        "reward_passes": fmean(result.stats.get("reward_forward_passes", 0) for result in results),
        "bytes": max(result.stats["kv_bytes_peak"] for result in results),
    }


def prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The first prompts of the file, or requests for stories of the demo's generator; other ones for each seed."""
    if args.input:
        with open(args.input, encoding="utf-8") as source:
            return [json.loads(line) for line in source if line.strip()][: args.prompts]
    talks = (talk for talk in story_requests(f"sbon:{args.seed}") if len(talk.turns) <= 3)
    return [{"messages": talk.messages()[:-1]} for talk in itertools.islice(talks, args.prompts)]


def add_prompt_flags(parser: argparse.ArgumentParser, count: int) -> None:
    """The flags that `prompts` reads, except the seed."""
    text = "JSON Lines with messages or a prompt each (fresh ones for the demo)"
    parser.add_argument("--input", metavar="FILE", help=text)
    parser.add_argument("--prompts", type=int, default=count, help="how many (%(default)s)")


def as_request(record: dict[str, Any], engine: Engine, search: Any, **options: Any) -> Request:
    """The request of a line of `engine.batch` input: messages or a prompt."""
    messages = record.get("messages")
    if messages is None:
        return Request(record["prompt"], search, **options)
    if engine.template is None:
        raise UsageError("the input has messages, the model no chat template")
    prompt = engine.tokenizer.encode_rendered(engine.template.render(messages))
    return Request(prompt, search, messages=messages, **options)


def load(args: argparse.Namespace) -> Engine:
    """The two models. Raises UsageError without a reward model."""
    model, _, reward = with_defaults(args.model, None, args.reward)
    if reward is None:
        raise UsageError("no reward model", remedy="give --reward DIR")
    return Engine.load(model, reward=reward, dtype=args.dtype, threads=args.threads)


def ask(engine: Engine, record: dict[str, Any], search: Search, args: argparse.Namespace) -> Run:
    """Seconds and result."""
    request = as_request(record, engine, search, max_new_tokens=args.max_new_tokens)
    began = time.perf_counter()
    [(_, outcome)] = engine.serve([request])
    if isinstance(outcome, CoppiceError):
        raise outcome
    return time.perf_counter() - began, outcome

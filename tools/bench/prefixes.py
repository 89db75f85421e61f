"""The time that cached prefixes save: prompts of many questions on one document, with the cache and without."""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from engine.demo import demo_folder, is_demo
from engine.errors import UsageError
from models.later import later
from tools.bench.flags import add_numbers, add_run_flags
from tools.bench.measure import progress
from tools.bench.report import finish, rows_table, stamp

with later():
    from engine import Engine, SearchResult
    from search import Trie

LEGEND = """Documents and questions are random token ids. *prompt, cached* is the time to the first log-probabilities,
summed over all questions, including the first, which reads the document. *prompt, cold* is the same without the cache:
the mean over a few of the questions, spread over all, times the number of questions. *same* counts those of the few
whose tokens are the same with the cache."""

COLUMNS = {
    "model": "{model}", "document": "{document}", "questions": "{questions}", "prompt, cold": "{cold:.1f} s",
    "prompt, cached": "{warm:.2f} s", "ratio": "{ratio:.1f}", "one cold": "{cold_one:.3f} s",
    "one cached": "{warm_one:.3f} s", "same": "{same} of {compared}",
}  # fmt: skip


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("prefixes", help="what cached prefixes save", description=__doc__)
    parser.add_argument("--model", metavar="DIR", help="checkpoint folder (the demo)")
    add_numbers(
        parser,
        document=(460, "tokens of the document"),
        questions=(100, "questions on the document"),
        cold=(10, "questions that are also answered without the cache"),
        beams=4,
        new_tokens=(4, "tokens of an answer"),
        seed=0,
    )
    add_run_flags(parser, "benchmarks", "auto", run)


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report. Raises UsageError if there is nothing to compare."""
    if args.questions < 2 or args.cold < 1 or args.document < 1:
        what = f"--questions {args.questions} --cold {args.cold} --document {args.document}: nothing to compare"
        raise UsageError(what, remedy="give at least 2 questions, 1 of them cold, on a document of 1 token")
    folder, made, rng = Path(args.model or demo_folder()), stamp(argv), random.Random(args.seed)
    options = {"dtype": args.dtype, "threads": args.threads, "kv_memory": "1G"}
    warm, cold = (Engine.load(folder, prefix_cache=cache, **options) for cache in ("on", "off"))

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, warm.runner.vocab_size) for _ in range(count)]

    def ask(engine: Engine, question: Sequence[int]) -> SearchResult:
        prompt = [*document, *question]
        [result] = engine.generate([prompt], Trie(args.beams), max_new_tokens=args.new_tokens, ignore_eos=True)
        return result

    document, questions = tokens(args.document), [tokens(rng.randint(8, 20)) for _ in range(args.questions)]
    ask(cold, questions[0])  # kernels are loaded, memory is there
    cached, plain = [ask(warm, questions[0])], {}
    for i, question in enumerate(questions):  # in turns, so that both have the machine at its slow and fast times
        progress(f"question {i + 1} of {args.questions}")
        cached += [ask(warm, question)] if i else []
        if i % -(-args.questions // args.cold) == 0:
            plain[i] = ask(cold, question)
    times, cold_one = [result.stats["prefill_seconds"] for result in cached], mean(map(_prompt, plain.values()))
    row = {
        "model": "demo" if is_demo(folder) else folder.resolve().name, "document": args.document,
        "questions": args.questions, "cold": cold_one * args.questions, "warm": sum(times),
        "ratio": cold_one * args.questions / sum(times), "cold_one": cold_one, "warm_one": mean(times[1:]),
        "same": sum(_ids(cached[i]) == _ids(result) for i, result in plain.items()), "compared": len(plain),
    }  # fmt: skip
    finish("prefixes", made, f"{rows_table([row], COLUMNS)}\n\n{LEGEND}", result := {"results": [row]}, args.save)
    return result


def _prompt(result: SearchResult) -> float:
    return result.stats["prefill_seconds"]


def _ids(result: SearchResult) -> list[list[int]]:
    return [output.token_ids for output in result.outputs]

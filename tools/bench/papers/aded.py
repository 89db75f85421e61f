"""Latency and accept length of n-gram drafts (the ADED paper's table 1, figures 4 and 6)."""

import argparse
import difflib
import inspect
import pathlib
import random
import statistics
import string
import typing
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from engine import Engine
from engine.contract import Search
from engine.engine import Progress
from search import Greedy
from search.aded.ngrams import count, merge, open_store, write_store
from tools.bench import aded as bench
from tools.bench.checkpoints import CODE
from tools.bench.measure import progress
from tools.bench.papers.common import Findings, Models, bullets, ratio, stories
from tools.bench.report import rows_table, table
from tools.bench.texts import chats, edits, plain, prompt, summaries
from tools.demo.generator import dialogue

TITLE = "Adaptive Draft-Verification for Efficient Large Language Model Decoding (ADED)"
SETTING = """Vicuna and Llama-2-chat on an NVIDIA A6000 (33B: H100), greedy; MT-Bench, Alpaca, Human-Eval; tri-grams of
UltraChat (574 MB) in table 1, of ShareGPT in figure 4; 150 searches, 24 candidates of 4 tokens (Experimental Setup,
Appendix F)."""
MODEL = CODE
# Table 1: benchmark -> model -> (autoregressive, REST, ADED in ms per token, accept lengths of REST and ADED).
TABLE_1 = {
    "MT-Bench": {
        "Vicuna-7B": (24.77, 16.31, 12.95, 1.97, 2.42), "Vicuna-13B": (44.07, 25.43, 22.94, 1.98, 2.39),
        "Vicuna-33B": (52.97, 28.63, 24.96, 1.95, 2.29), "Llama2-7B": (25.58, 16.08, 13.85, 1.96, 2.30),
        "Llama2-13B": (44.76, 27.13, 25.13, 1.95, 2.32),
    },
    "Alpaca": {
        "Vicuna-7B": (24.49, 14.24, 12.81, 2.22, 2.33), "Vicuna-13B": (43.60, 22.94, 24.06, 2.21, 2.26),
        "Vicuna-33B": (52.52, 26.03, 24.62, 2.11, 2.21), "Llama2-7B": (25.38, 14.13, 12.90, 2.21, 2.37),
        "Llama2-13B": (44.04, 23.66, 23.57, 2.15, 2.32),
    },
    "Human-Eval": {
        "Vicuna-7B": (25.49, 14.90, 11.24, 2.21, 2.67), "Vicuna-13B": (45.13, 20.17, 19.96, 2.50, 2.81),
        "Vicuna-33B": (52.32, 24.91, 21.19, 2.29, 2.62), "Llama2-7B": (25.91, 14.37, 11.68, 2.19, 2.63),
        "Llama2-13B": (45.25, 25.46, 21.82, 2.01, 2.60),
    },
}  # fmt: skip
CHAIN = 1.493  # Ablation Study, "Effect of MCTS": accept length of greedy search instead (figure 6 has no numbers)
DIFFERS = (
    """*mcts* is the paper's drafter with its errata mended (one draw per node, the right pair backed up, nothing
    padded, a matrix of its own for every request); *backoff* is this engine's.""",
    """The passes of a small model on a processor take about as long as the search for a draft does, and their time
    grows with the number of nodes: there is less to win than where a pass is a matter of reading weights. Accept
    lengths at a fixed number of nodes do not depend on that. *auto* drafts only as much as pays.""",
    "A text here is up to {tokens} tokens long, so that there is less to adapt to than in answers of hundreds.",
    """The paper's figures 4 and 6 come without numbers. Its text has ADED better than REST in most cases; on Alpaca
    with Vicuna-13B, 24.06 ms stand against 22.94.""",
)
PAPERS_LENGTHS = [figures[4] for by_model in TABLE_1.values() for figures in by_model.values()]
LIBRARY = (argparse, difflib, inspect, pathlib, random, statistics, string, typing)  # sources for the store
REAL_DIFFERS = (
    """*mcts* is the paper's drafter with its errata mended; *backoff* is this engine's, and *auto* evaluates as much
    of a draft as the measured times make worth while. Without a store a drafter knows the prompt and the answer so far.
    The paper's store has 574 MB of chats; this one has sources and documentation of Python.""",
)
ITERATIONS = (30, 75, 150, 300)
REAL = (  # methods on real models; the store has n-grams of other texts of their kind
    "autoregressive", "greedy chain", "mcts, 150 iterations", "mcts, no store", "backoff, 24, no store",
    "backoff, auto, no store", "backoff, auto",
)  # fmt: skip
KEPT = ("autoregressive", "greedy chain", "mcts, not adapting", "mcts, no store", "backoff, auto", "backoff, 24")
WINDOW = 8  # tokens of a point of the curve


def run(models: Models) -> Findings:
    """Measure and report the table, then both curves."""
    return on_demo(models) if models.demo else on_texts(models)


def on_texts(models: Models) -> Findings:
    """The methods on code edits, summaries and chats of a real model, each kind by itself."""
    engine, store, rows, lengths = models.engine(), models.scratch / "texts.ngrams", list[dict[str, Any]](), []
    library = "\n\n".join(inspect.getsource(module) for module in LIBRARY)[: models.pick(200_000, 2000)]
    ids = engine.tokenizer.encode(library) + plain(engine, models.pick(40_000, 500), 9)
    write_store(store, merge([count(ids)]), engine.tokenizer.size, engine.tokenizer.fingerprint)
    known, n, limit = dict(bench.list_methods(store, (150,))), models.pick(3, 1), models.pick(96, 8)
    kinds = {"code edits": edits(engine, n), "summaries": summaries(engine, n, models.pick(300, 60)),
             "chat": chats(engine, n)}  # fmt: skip
    for kind, asked in kinds.items():
        texts = []
        for one in asked:
            [answer] = engine.generate([one.ids], Greedy(), max_new_tokens=limit, eos_token_ids=one.ends)
            texts.append(answer.outputs[0].token_ids)
        lengths.append(f"{kind} {', '.join(str(len(text)) for text in texts)}")
        methods = [(name, known[name]) for name in REAL]
        found = bench.compare(engine, methods, [one.ids for one in asked], texts, None, 1, warm_up=False)
        rows += [{"kind": kind, **row} for row in found]
    for row in rows:
        row["cpu_ratio"] = pick(rows, row["kind"], "autoregressive")["cpu_ms"] / row["cpu_ms"]
    body = "\n\n".join([
        f"{models.name}, {models.dtype}, one request at a time, greedy, answers of the model with their real ends, "
        f"at most {limit} tokens ({'; '.join(lengths)}); requests to rename a variable in a function of the standard "
        f"library, to summarise a chapter of Python's documentation, and questions. Store: {len(open_store(store)):,} "
        "n-grams of other sources of the library and other chapters.",
        rows_table(rows, {
            "text": "{kind}", "drafter": "{method}", "tokens a pass": "{accept_length:.2f}", "nodes": "{nodes:.1f}",
            "CPU ms/token": "{cpu_ms:.1f}", "x by CPU time": "{cpu_ratio:.2f}", "x by the clock": "{ratio:.2f}",
            "draft ms": "{draft_ms:.2f}", "verify ms": "{verify_ms:.2f}", "same": "{same:yes}"}),
        "*tokens a pass*: the paper's accept length. *nodes*: of drafts, evaluated per pass. *x*: autoregressive "
        "decoding's time over its own, prompts left out; by CPU time of all threads, and by the clock, in turn. "
        "*same*: the tokens are those of autoregressive decoding.",
        f"In the paper's table 1 the accept length is from {min(PAPERS_LENGTHS)} to {max(PAPERS_LENGTHS)} "
        f"({TABLE_1['MT-Bench']['Vicuna-7B'][4]} for MT-Bench with Vicuna-7B), of REST 1.95 to 2.50, of greedy chains "
        f"{CHAIN}; the speed 1.78 to 2.47 times autoregressive decoding's.",
        bullets(REAL_DIFFERS),
    ])  # fmt: skip
    return Findings(body, {"rows": rows})


def pick(rows: Sequence[dict[str, Any]], kind: str, method: str) -> dict[str, Any]:
    return next(row for row in rows if (row["kind"], row["method"]) == (kind, method))


def on_demo(models: Models) -> Findings:
    """The methods on the demo's texts."""
    engine = models.engine()
    prompts, texts, store = written(engine, models)
    iterations = models.pick(ITERATIONS, (20,))
    known = dict(bench.list_methods(store, iterations))
    methods = {name: known[name] for name in (*KEPT, *(f"mcts, {n} iterations" for n in iterations))}
    rows = bench.compare(engine, [*methods.items()], prompts, texts, None, models.pick(2, 1))
    adapting = f"mcts, {150 if 150 in iterations else iterations[-1]} iterations"
    pairs = {"adapting": methods[adapting], "not adapting": known["mcts, not adapting"]}
    curves = {name: curve(engine, search, prompts, texts) for name, search in pairs.items()}
    longest = max(map(len, texts))
    body = "\n\n".join([
        f"{models.name}, {models.dtype}; {len(texts)} answers of {fmean(map(len, texts)):.0f} tokens in the mean, one "
        "at a time, greedy; store of "
        f"{len(open_store(store)):,} tri-grams.",
        rows_table([row | {key: 1e3 / value for key, value in row["tokens_per_second"].items()} for row in rows], {
            "drafter": "{method}", "ms/token": "{median:.2f}", "least-most": "{max:.2f}-{min:.2f}", "x": "{ratio:.2f}",
            "accept length": "{accept_length:.2f}", "nodes": "{nodes:.1f}", "draft ms": "{draft_ms:.2f}",
            "verify ms": "{verify_ms:.2f}", "same": "{same:yes}"}),
        "*ms/token*: of decoding, the prompt left out. *x*: autoregressive decoding's ms over its own, in the same "
        "run. *nodes*, *draft ms*, *verify ms*: of a step. *same*: the tokens are the text's.",
        "Beside the paper's table 1, ms per token and accept length:",
        beside(rows, adapting),
        f"Greedy chains: accept length {accept_length(rows, 'greedy chain'):.2f} here, {CHAIN} in the paper. Accept "
        "length over generated tokens (figure 4a) and over the number of searches (figure 6):",
        curve_table(curves),
        table(["searches", *map(str, iterations)],
              [["accept length", *(f"{accept_length(rows, f'mcts, {n} iterations'):.2f}" for n in iterations)],
               ["ms/token", *(f"{latency(rows, f'mcts, {n} iterations'):.2f}" for n in iterations)]]),
        bullets([line.format(tokens=longest) for line in DIFFERS]),
    ])  # fmt: skip
    result = {"rows": rows, "curves": curves, "iterations": list(iterations)}
    return Findings(body, result, (10, 3.6), lambda figure: paint(figure, rows, curves, iterations))


def written(writer: Engine, models: Models) -> tuple[list[list[int]], list[list[int]], Path]:
    """Prompts, greedy answers to them, and a store of n-grams of similar texts, the demo's conversations."""
    store = models.scratch / "texts.ngrams"
    n, tokens, corpus = models.pick(8, 1), models.pick(128, 8), models.pick(200_000, 500)
    prompts = stories(writer, max(1, n // 2), 1, models.seed) + stories(writer, n // 2, 5, models.seed)
    answers = writer.generate(prompts, Greedy(), max_new_tokens=tokens)
    progress(f"aded: counting the tri-grams of {corpus} tokens of conversations")
    runs, i = [], 0
    while corpus > 0:
        talk = dialogue(Random(f"papers:corpus:{models.seed}:{i}"))
        ids = prompt(writer, talk, talk.turns[-1].reply)
        runs.append(count(ids))
        corpus, i = corpus - len(ids), i + 1
    write_store(store, merge(runs), writer.tokenizer.size, writer.tokenizer.fingerprint)
    return prompts, [answer.outputs[0].token_ids for answer in answers], store


def curve(
    engine: Engine, search: Search, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> dict[int, float]:
    """Accept length by the token at which a step began, in windows."""
    taken: dict[int, list[int]] = {}
    for prompt_ids, text in zip(prompts, texts, strict=True):
        done = 0
        for event in engine.stream(prompt_ids, search, max_new_tokens=len(text), ignore_eos=True):
            if isinstance(event, Progress) and "accepted" in event.report.info:
                taken.setdefault(done // WINDOW * WINDOW, []).append(event.report.info["accepted"] + 1)
                done += event.report.info["accepted"] + 1
    return {start: sum(steps) / len(steps) for start, steps in sorted(taken.items())}


def curve_table(curves: dict[str, dict[int, float]]) -> str:
    starts = sorted(set().union(*curves.values()))
    lines = [[name, *(f"{c[s]:.2f}" if s in c else "" for s in starts)] for name, c in curves.items()]
    return table(["from token", *map(str, starts)], lines)


def accept_length(rows: Sequence[dict[str, Any]], method: str) -> float:
    return next(row["accept_length"] for row in rows if row["method"] == method)


def latency(rows: Sequence[dict[str, Any]], method: str) -> float:
    """Milliseconds per token."""
    return 1e3 / next(row["tokens_per_second"]["median"] for row in rows if row["method"] == method)


def beside(rows: Sequence[dict[str, Any]], mcts: str) -> str:
    """Ours and the paper's, autoregressive and with drafts."""
    plain, lines = latency(rows, "autoregressive"), []
    for name in (mcts, "backoff, auto"):
        ours = latency(rows, name)
        lines.append([f"here: {name}", f"{plain:.2f}", "", f"{ours:.2f}", ratio(plain, ours), "",
                      f"{accept_length(rows, name):.2f}"])  # fmt: skip
    for benchmark, by_model in TABLE_1.items():
        for model, (auto, rest, ours, rest_length, length) in by_model.items():
            figures = [f"{auto:.2f}", f"{rest:.2f}", f"{ours:.2f}", ratio(auto, ours), f"{rest_length:.2f}"]
            lines.append([f"paper: {benchmark}, {model}", *figures, f"{length:.2f}"])
    return table(["", "autoregressive", "REST", "ADED", "x", "accept length, REST", "ADED"], lines)


def paint(
    figure: Any, rows: Sequence[dict[str, Any]], curves: dict[str, dict[int, float]], iterations: Sequence[int]
) -> None:
    """Draw figures 4a and 6."""
    left, right = figure.subplots(1, 2)
    for name, points in curves.items():
        left.plot([*points], [*points.values()], marker="o", ms=3, label=name)
    left.set(title="accept length as the text grows", xlabel="tokens generated", ylabel="accept length", ylim=(1, None))
    left.legend(fontsize=8)
    names = [f"mcts, {n} iterations" for n in iterations]
    right.plot(iterations, [accept_length(rows, name) for name in names], "o-", color="tab:blue")
    right.set(title="number of searches", xlabel="searches", ylim=(1, None))
    right.set_ylabel("accept length", color="tab:blue")
    other = right.twinx()
    other.plot(iterations, [latency(rows, name) for name in names], "s--", color="tab:orange")
    other.axhline(latency(rows, "autoregressive"), color="grey", ls=":", lw=1)
    other.set_ylabel("ms per token (dotted: autoregressive)", color="tab:orange")
    other.set_ylim(0, None)

"""Latency and accept length of n-gram drafts (the ADED paper's table 1)."""

import argparse
import difflib
import inspect
import pathlib
import random
import statistics
import string
import typing
from collections.abc import Sequence
from typing import Any

from search import Greedy
from search.aded.ngrams import count, merge, open_store, write_store
from tools.bench import aded as bench
from tools.bench.checkpoints import CODE
from tools.bench.papers.common import Findings, Models, bullets
from tools.bench.report import rows_table
from tools.bench.texts import chats, copies, docstrings, edits, plain, summaries

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
PAPERS_LENGTHS = [figures[4] for by_model in TABLE_1.values() for figures in by_model.values()]
LIBRARY = (argparse, difflib, inspect, pathlib, random, statistics, string, typing)  # sources for the store
DIFFERS = (
    """*mcts* is the paper's drafter with its errata mended; *backoff* is this engine's, and *auto* evaluates as much
    of a draft as the measured times make worth while. Without a store a drafter knows the prompt and the answer so far.
    The paper's store has 574 MB of chats; this one has sources and documentation of Python.""",
)
METHODS = (  # the store has n-grams of other texts of their kind
    "autoregressive", "greedy chain", "mcts, 150 iterations", "mcts, no store", "backoff, 24, no store",
    "backoff, auto, no store", "backoff, auto",
)  # fmt: skip


def run(models: Models) -> Findings:
    """Measure and report the methods, each kind of text by itself."""
    engine, store, rows, lengths = models.engine(), models.scratch / "texts.ngrams", list[dict[str, Any]](), []
    library = "\n\n".join(inspect.getsource(module) for module in LIBRARY)[: models.pick(200_000, 2000)]
    ids = engine.tokenizer.encode(library) + plain(engine, models.pick(40_000, 500), 9)
    write_store(store, merge([count(ids)]), engine.tokenizer.size, engine.tokenizer.fingerprint)
    known, n, limit = dict(bench.list_methods(store, (150,))), models.pick(4, 1), models.pick(80, 8)
    kinds = {"code edits": edits(engine, n), "docstrings": docstrings(engine, n),
             "copies": copies(engine, n, models.pick(80, 20)),
             "summaries": summaries(engine, n, models.pick(300, 60)), "chat": chats(engine, n)}  # fmt: skip
    for kind, asked in kinds.items():
        texts = []
        for one in asked:
            [answer] = engine.generate([one.ids], Greedy(), max_new_tokens=limit, eos_token_ids=one.ends)
            texts.append(answer.outputs[0].token_ids)
        lengths.append(f"{kind} {', '.join(str(len(text)) for text in texts)}")
        methods = [(name, known[name]) for name in METHODS]
        found = bench.compare(engine, methods, [one.ids for one in asked], texts, None, 1, warm_up=False)
        rows += [{"kind": kind, **row} for row in found]
    for row in rows:
        row["cpu_ratio"] = pick(rows, row["kind"], "autoregressive")["cpu_ms"] / row["cpu_ms"]
    body = "\n\n".join([
        f"{models.name}, {models.dtype}, one request at a time, greedy, answers of the model with their real ends, "
        f"at most {limit} tokens ({'; '.join(lengths)}); requests to rename a variable in a function of the standard "
        "library, to give one a docstring, to repeat the beginning of a chapter of Python's documentation, to "
        f"summarise one, and questions. Store: {len(open_store(store)):,} n-grams of other sources of the library and "
        "other chapters.",
        rows_table(rows, {
            "text": "{kind}", "drafter": "{method}", "tokens a pass": "{accept_length:.2f}",
            "s.e.": "{accept_error:.2f}", "nodes": "{nodes:.1f}", "CPU ms/token": "{cpu_ms:.1f}",
            "x by CPU time": "{cpu_ratio:.2f}", "x by the clock": "{ratio:.2f}", "draft ms": "{draft_ms:.2f}",
            "verify ms": "{verify_ms:.2f}", "same": "{same:yes}"}),
        "*tokens a pass*: the paper's accept length; *s.e.*: its standard error over answers. *nodes*: of drafts, "
        "evaluated per pass. *x*: autoregressive decoding's time over its own, prompts left out; by CPU time of all "
        "threads, and by the clock, in turn. *same*: the tokens are those of autoregressive decoding.",
        f"In the paper's table 1 the accept length is from {min(PAPERS_LENGTHS)} to {max(PAPERS_LENGTHS)} "
        f"({TABLE_1['MT-Bench']['Vicuna-7B'][4]} for MT-Bench with Vicuna-7B), of REST 1.95 to 2.50, of greedy chains "
        f"{CHAIN}; the speed 1.78 to 2.47 times autoregressive decoding's.",
        bullets(DIFFERS),
    ])  # fmt: skip
    return Findings(body, {"rows": rows})


def pick(rows: Sequence[dict[str, Any]], kind: str, method: str) -> dict[str, Any]:
    return next(row for row in rows if (row["kind"], row["method"]) == (kind, method))

"""Latency and accept length of n-gram drafts (the ADED paper's table 1)."""

import argparse
import difflib
import inspect
import pathlib
import random
import statistics
import string
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine import Engine
from engine.contract import Search
from engine.drafts import Draft
from search import ADED, Greedy
from search.aded.drafters import MCTS
from search.aded.ngrams import count, merge, open_store, write_store
from tools.bench.checkpoints import CODE
from tools.bench.measure import in_turn, standard_error
from tools.bench.papers.common import Findings, Models, bullets
from tools.bench.report import rows_table
from tools.bench.searches import after_prompt
from tools.bench.texts import Asked, chats, copies, docstrings, edits, plain, summaries

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
    """*mcts* is the paper's drafter with its errata mended; *backoff* is this engine's, and *auto* evaluates as much of
    a draft as the measured times justify. Without a store a drafter knows only the prompt and the answer so far. The
    paper's store has 574 MB of chats; this one has sources and documentation of Python.""",
)
HOST = ("draft_ms", "verify_ms")


@dataclass
class Chain:
    """The paper's baseline: no tree, only the likeliest successor of the likeliest successor."""

    matrix: MCTS
    curiosity: float = 1.0
    DEPTH = 4

    def learn(self, tokens: Sequence[int]) -> None:
        self.matrix.learn(tokens)

    def observe(self, nodes: Any, likely: Any) -> None:
        pass

    def distribution(self, ahead: Sequence[int] = ()) -> dict[int, float]:
        return self.matrix.distribution(ahead)

    def draft(self, nodes: int, depth: int) -> Draft:
        draft = Draft()
        while len(draft.tokens) < min(self.DEPTH, depth) and (known := self.distribution(draft.tokens)):
            draft.parents.append(len(draft.tokens) - 1)
            draft.tokens.append(next(iter(known)))
            draft.scores.append(0.5 ** len(draft.tokens))
        return draft


def run(models: Models) -> Findings:
    """Measure and report the methods, each kind of text by itself."""
    engine, store, rows, lengths = models.engine(), models.scratch / "texts.ngrams", list[dict[str, Any]](), []
    library = "\n\n".join(inspect.getsource(module) for module in LIBRARY)[: models.pick(200_000, 2000)]
    ids = engine.tokenizer.encode(library) + plain(engine, models.pick(40_000, 500), 9)
    write_store(store, merge([count(ids)]), engine.tokenizer.size, engine.tokenizer.fingerprint)
    counted, n, limit = open_store(store), models.pick(4, 1), models.pick(80, 8)
    methods: dict[str, Search] = {
        "autoregressive": Greedy(),
        "greedy chain": ADED(drafter=lambda: Chain(MCTS(counted)), nodes=Chain.DEPTH),
        "mcts, 150 iterations": ADED(drafter="mcts", store=store, nodes=64, iterations=150),
        "mcts, no store": ADED(drafter="mcts", nodes=64),
        "backoff, 24, no store": ADED(nodes=24),
        "backoff, auto, no store": ADED(),
        "backoff, auto": ADED(store=store),
    }
    kinds = {"code edits": edits(engine, n), "docstrings": docstrings(engine, n),
             "copies": copies(engine, n, models.pick(80, 20)),
             "summaries": summaries(engine, n, models.pick(300, 60)), "chat": chats(engine, n)}  # fmt: skip
    for kind, asked in kinds.items():
        texts = []
        for one in asked:
            [answer] = engine.generate([one.ids], Greedy(), max_new_tokens=limit, eos_token_ids=one.ends)
            texts.append(answer.outputs[0].token_ids)
        lengths.append(f"{kind} {', '.join(str(len(text)) for text in texts)}")
        rows += [{"kind": kind, **row} for row in compare(engine, methods, asked, texts)]
    body = "\n\n".join([
        f"{models.name}, {models.dtype}, one request at a time, greedy; answers end where the model ends them, at "
        f"the latest after {limit} tokens ({'; '.join(lengths)}); requests to rename a variable in a function of the "
        "standard library, to give one a docstring, to repeat the beginning of a chapter of Python's documentation, to "
        f"summarise one, and questions. The store holds {len(counted):,} n-grams of other sources of the library and "
        "other chapters.",
        rows_table(rows, {
            "text": "{kind}", "drafter": "{method}", "tokens a pass": "{accept_length:.2f}",
            "s.e.": "{accept_error:.2f}", "nodes": "{nodes:.1f}", "CPU ms/token": "{cpu_ms:.1f}",
            "x by CPU time": "{cpu_ratio:.2f}", "x by the clock": "{ratio:.2f}", "draft ms": "{draft_ms:.2f}",
            "verify ms": "{verify_ms:.2f}", "same": "{same:yes}"}),
        "*tokens a pass* is the paper's accept length, *s.e.* its standard error over answers. *nodes* is the number "
        "of draft nodes evaluated per pass. *x by CPU time* (all threads) and *x by the clock* divide the time of "
        "autoregressive decoding by that of the drafter, without prompts, in interleaved runs. *same* says whether the "
        "tokens equal those of autoregressive decoding.",
        f"In the paper's table 1 the accept length is from {min(PAPERS_LENGTHS)} to {max(PAPERS_LENGTHS)} "
        f"({TABLE_1['MT-Bench']['Vicuna-7B'][4]} for MT-Bench with Vicuna-7B), that of REST 1.95 to 2.50, and that of "
        f"greedy chains {CHAIN}; the speed is 1.78 to 2.47 times that of autoregressive decoding.",
        bullets(DIFFERS),
    ])  # fmt: skip
    return Findings(body, {"rows": rows})


def compare(
    engine: Engine, methods: Mapping[str, Search], asked: Sequence[Asked], texts: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Run all methods, interleaved, on each request and its greedy answer; a row for each, autoregressive first."""

    def run(search: Search, i: int) -> tuple[float, bool, dict[str, Any]]:
        options = {"max_new_tokens": len(texts[i]), "ignore_eos": True}
        used, result = after_prompt(engine, asked[i].ids, search, **options)
        return used, result.outputs[0].token_ids == list(texts[i]), result.stats

    found = in_turn({name: partial(run, search) for name, search in methods.items()}, len(texts), what="text")
    rows, tokens = list[dict[str, Any]](), sum(len(text) - 1 for text in texts)  # the first comes with the prompt
    for name, runs in found.items():
        used, same, stats = zip(*runs, strict=True)
        of_each = [s.get("steps", s["new_tokens"]) for s in stats]
        cpu_ms, seconds = sum(used) / tokens * 1e3, sum(s["decode_seconds"] for s in stats)
        rows.append({
            "method": name,
            "same": all(same),
            "accept_length": sum(map(len, texts)) / sum(of_each),
            "accept_error": standard_error([len(text) / n for text, n in zip(texts, of_each, strict=True)]),
            "nodes": sum(s.get("draft_nodes", 0) for s in stats) / sum(of_each),
            "cpu_ms": cpu_ms,
            "cpu_ratio": rows[0]["cpu_ms"] / cpu_ms if rows else 1.0,
            "seconds": seconds,
            "ratio": rows[0]["seconds"] / seconds if rows else 1.0,
            **{key: sum(s.get(key, 0.0) for s in stats) / len(stats) if rows else None for key in HOST},
        })  # fmt: skip
    return rows

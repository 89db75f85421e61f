"""Speculative best-of-N against best-of-N (the paper's table 1)."""

import argparse
from typing import Any

from engine.contract import Search
from search import SBoN
from tools.bench import sbon as bench
from tools.bench.measure import progress
from tools.bench.papers.common import Findings, Models, bullets
from tools.bench.report import rows_table

TITLE = "Accelerating Best-of-N via Speculative Rejection"
SETTING = """AlpacaFarm-SFT10K, Llama3-8B and Llama3-8B-Instruct, each with the reward models Mistral-7B-RM, Eurus-7B-RM
and Llama3-8B-RM; 100 prompts of AlpacaFarm-Eval, N = 100, decision tokens from 256 to 1024 and rejection rates from 0.5
to 0.95 by pair (section 6.1, table 3)."""
RANDOM = """There are no rewards to rank by: a random reward model's scores of a beginning and of the end are
unrelated. docs/sbon.md has the value of a correlation. Give trained models with --model and --reward."""
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


def run(models: Models) -> Findings:
    """Measure and report."""
    engine = models.engine("reward")
    if models.kind != "demo":
        progress("sbon: the prompts are the demo's requests for stories, which may mean little to another model")
    shared = {"temperature": 1.5 if models.kind == "demo" else 1.0, "seed": models.seed}
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

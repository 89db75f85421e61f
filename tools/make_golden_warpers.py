"""Golden file of warpers: which tokens transformers' own leave of random rows.

Run by path, from outside the repository and with an environment that has transformers:

    cd / && python -P REPO/tools/make_golden_warpers.py

Writes `tests/golden/warpers.json`: 200 random rows of logits, the options of their warp, and the tokens that stay. A
case is kept only if neither float64 nor noise of 1e-5 changes one.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

ROOT = Path(__file__).resolve().parent.parent
CASES, TRIALS, NOISE = 200, 3, 1e-5


def make_case(rng: random.Random) -> dict[str, Any]:
    """A row, and typical sampling alone or after other warpers."""
    spread = rng.choice((0.3, 1.0, 3.0))
    logits = [round(rng.gauss(0, spread), 2) for _ in range(rng.randint(3, 40))]
    made = {"temperature": rng.choice((0.5, 0.8, 1.7)), "top_k": rng.randint(1, 20), "top_p": rng.choice((0.5, 0.9)),
            "min_p": rng.choice((0.02, 0.1))}  # fmt: skip
    options = {name: made[name] for name in rng.sample(sorted(made), rng.choice((0, 0, 1, 2)))}
    return {"logits": logits, "options": options | {"typical_p": rng.choice((0.05, 0.2, 0.5, 0.8, 0.95))}}


def kept(logits_V: torch.Tensor, options: dict[str, Any]) -> list[int]:
    """The tokens that stay, by warpers in the order of `generate`."""
    kinds = {"temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper,
             "min_p": MinPLogitsWarper, "typical_p": TypicalLogitsWarper}  # fmt: skip
    warpers = LogitsProcessorList([kind(options[name]) for name, kind in kinds.items() if name in options])
    return (
        warpers(torch.zeros(1, 1, dtype=torch.int64), logits_V.unsqueeze(0))[0].isfinite().nonzero().view(-1).tolist()
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rng, generator, cases = random.Random(0), torch.Generator().manual_seed(0), list[dict[str, Any]]()
    while len(cases) < CASES:
        case = make_case(rng)
        row = torch.tensor(case["logits"])
        noises = [NOISE * torch.randn(row.shape, generator=generator) for _ in range(TRIALS)]
        first, *others = (kept(x, case["options"]) for x in (row, row.double(), *[row + noise for noise in noises]))
        if all(other == first for other in others):
            cases.append(case | {"kept": first})
    head = json.dumps({"versions": {"transformers": transformers.__version__}})
    lines = ",\n".join("  " + json.dumps(case, separators=(",", ":")) for case in cases)
    (ROOT / "tests" / "golden" / "warpers.json").write_text(head[:-1] + ', "cases": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main()

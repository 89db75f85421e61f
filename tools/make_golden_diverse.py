"""Golden file of diverse beam search: group beam search of transformers 4, on a golden checkpoint.

Run by path, from outside the repository and with an environment that has transformers 4.53, as later versions moved
group beam search out of the package:

    cd / && OMP_NUM_THREADS=1 python -P REPO/tools/make_golden_diverse.py

Writes `tests/golden/diverse.json`: 200 random cases, each with a prompt, the arguments of the search and its outputs. A
case is kept only if neither float64 nor noise of 1e-4 changes a token. transformers writes the first end token in place
of the one that was chosen. Its later groups avoid the padding of groups that ended as if it were a chosen token, so no
case may generate that token (`suppress_tokens`).
"""

import argparse
import copy
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList

ROOT = Path(__file__).resolve().parent.parent
MODEL = "llama/plain"
CASES, TRIALS, NOISE, PAD = 200, 3, 1e-4, 0
SHAPES = ((2, 2), (3, 3), (4, 2), (4, 4), (6, 2), (6, 3), (8, 4), (8, 8), (12, 3), (15, 5))  # beams, groups


class Noise(LogitsProcessor):
    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + (2 * torch.rand(scores.shape, generator=self.generator) - 1) * NOISE


def make_case(rng: random.Random, number: int, model: Any) -> dict[str, Any]:
    """Random arguments; the end tokens are likely ones, so that hypotheses end."""
    vocab, (beams, groups) = model.config.vocab_size, SHAPES[number % len(SHAPES)]
    prompt = [rng.randrange(3, vocab) for _ in range(rng.randint(1, 6))]
    path, likely = list(prompt), []
    for _ in range(4):
        best = model(torch.tensor([path])).logits[0, -1].topk(8).indices.tolist()
        likely += [token for token in best if token > PAD]
        path.append(best[0])
    ends = sorted({rng.choice(likely) for _ in range(rng.choice((1, 1, 2, 4)))})
    return {
        "prompt_ids": prompt, "eos_token_ids": ends, "beams": beams, "groups": groups,
        "penalty": rng.choice((0.1, 0.3, 0.5, 1.0, 2.0, 10.0)),
        "length_penalty": rng.choice((1.0, 0.0, 0.6, 2.0, -0.5)),
        "early_stopping": (False, True, "never")[number // len(SHAPES) % 3],
        "num_return_sequences": rng.randint(1, beams), "max_new_tokens": rng.randint(1, 10),
    }  # fmt: skip


def generate(model: Any, case: dict[str, Any], noise: int | None = None) -> list[dict[str, Any]]:
    """The outputs, best first."""
    prompt, ends = case["prompt_ids"], case["eos_token_ids"]
    config = GenerationConfig(
        num_beams=case["beams"], num_beam_groups=case["groups"], diversity_penalty=case["penalty"],
        num_return_sequences=case["num_return_sequences"], max_new_tokens=case["max_new_tokens"], eos_token_id=ends,
        length_penalty=case["length_penalty"], early_stopping=case["early_stopping"], do_sample=False,
        pad_token_id=PAD, suppress_tokens=[PAD], return_dict_in_generate=True, output_scores=True)  # fmt: skip
    ids = torch.tensor([prompt])
    extra = LogitsProcessorList([] if noise is None else [Noise(noise)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, logits_processor=extra)
    found = []
    for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        found.append({"token_ids": row[:length], "score": round(score, 6)})
    return found


def tokens(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    transformers.utils.logging.set_verbosity_error()
    folder, rng = ROOT / "tests" / "golden" / MODEL, random.Random(0)
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config = GenerationConfig()
    exact, dropped = copy.deepcopy(model).double(), 0
    exact.lm_head.register_forward_hook(lambda module, args, logits: logits.float())  # group beam search wants float32
    cases: list[dict[str, Any]] = []
    while len(cases) < CASES:
        case = make_case(rng, len(cases), model)
        outputs = generate(model, case)
        runs = [generate(exact, case), *[generate(model, case, noise=trial) for trial in range(TRIALS)]]
        if all(tokens(run) == tokens(outputs) for run in runs):
            cases.append(case | {"outputs": outputs})
        else:
            dropped += 1
    print(dropped, "cases were dropped", file=sys.stderr)
    head = {"model": MODEL, "suppress_tokens": [PAD], "versions": {"transformers": transformers.__version__}}
    lines = ",\n".join("  " + json.dumps(case, separators=(",", ":")) for case in cases)
    text = json.dumps(head)[:-1] + ', "cases": [\n' + lines + "\n]}\n"
    (ROOT / "tests" / "golden" / "diverse.json").write_text(text)


if __name__ == "__main__":
    main()

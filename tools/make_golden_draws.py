"""Golden file of draws: how probable transformers makes each continuation, with processors and warpers together.

Run by path, from outside the repository and with an environment that has transformers:

    cd / && OMP_NUM_THREADS=1 python -P REPO/tools/make_golden_draws.py

Writes `tests/golden/draws.json`: options of `generate`, and each continuation of a prompt by two tokens, or by an
end-of-sequence token, with its probability in float64: the product of what is left of each row of a golden checkpoint
after all processors and warpers, in transformers' order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

ROOT = Path(__file__).resolve().parent.parent
MODEL, NEW, LEAST = "llama/plain", 2, 1e-12
PROMPT = [1, 79, 61, 29, 36, 100, 56]  # the likeliest tokens after it: 56, 52, 82, 79, 100, 75
EOS = 52
CASES: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 6},
    {"temperature": 1.8, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 12, "typical_p": 0.8},
    {"temperature": 1.5, "top_p": 0.6, "typical_p": 0.9},
    {"repetition_penalty": 1.8, "temperature": 0.8, "top_k": 8},
    {"repetition_penalty": 0.6, "no_repeat_ngram_size": 2, "top_k": 7},
    {"sequence_bias": [[[82], 2.0], [[56, 79], -3.0], [[5], 4.0]], "suppress_tokens": [100], "top_k": 8, "min_p": 0.02},
    {"bad_words_ids": [[75], [56, 82]], "min_new_tokens": 2, "temperature": 1.3, "top_k": 8},
    {"begin_suppress_tokens": [79, 82], "repetition_penalty": 1.4, "temperature": 1.2, "top_k": 9, "top_p": 0.95,
     "min_p": 0.01, "typical_p": 0.97},
]  # fmt: skip


def law(model: Any, options: dict[str, Any]) -> list[tuple[list[int], float]]:
    """The continuations that are possible, and their probabilities."""
    config = GenerationConfig(do_sample=True, max_new_tokens=NEW, eos_token_id=[EOS], **{"top_k": 0} | options)
    config._eos_token_tensor = torch.tensor([EOS])
    edit = model._get_logits_processor(config, input_ids_seq_length=len(PROMPT), device="cpu")

    def below(path: list[int], p: float) -> list[tuple[list[int], float]]:
        if len(path) == NEW or path[-1:] == [EOS]:
            return [(path, p)]
        ids_1L = torch.tensor([PROMPT + path])
        row_V = edit(ids_1L, model(ids_1L).logits[:, -1])[0].double().softmax(-1)
        each = enumerate(row_V.tolist())
        return [found for token, q in each if q > LEAST for found in below([*path, token], p * q)]

    return below([], 1.0)


@torch.no_grad()
def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    folder = ROOT / "tests" / "golden" / MODEL
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config = GenerationConfig()
    head = {"model": MODEL, "prompt_ids": PROMPT, "max_new_tokens": NEW, "eos": EOS}
    head |= {"versions": {"transformers": transformers.__version__}}
    cases = [{"options": options, "law": [[path, float(f"{p:.8g}")] for path, p in law(model, options)]}
             for options in CASES]  # fmt: skip
    lines = ",\n".join("  " + json.dumps(case, separators=(",", ":")) for case in cases)
    (ROOT / "tests" / "golden" / "draws.json").write_text(json.dumps(head)[:-1] + ', "cases": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main()

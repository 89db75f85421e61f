"""Golden file of constrained beam search: transformers' with `prefix_allowed_tokens_fn`, on a golden checkpoint.

Run by path, from outside the repository and with an environment that has transformers:

    cd / && OMP_NUM_THREADS=1 python -P REPO/tools/make_golden_constraints.py [--parts constraints]

Writes `tests/golden/processors.json`, greedy and beam search with transformers' logits processors, and
`tests/golden/constraints.json`: 200 random constraints, each with a prompt, the arguments of the search and the
best outputs. An automaton is a list of states, each a list of [token, next state]; a catalogue is a list of sequences.
As in `make_golden.py`, a case is kept only if neither float64 nor noise of 1e-4 changes a token. Where there are fewer
legal sequences than beams, transformers fills up with illegal ones and with duplicates, whose scores are below -1e5:
they are left out, and so are cases in which they could end the search early.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList

ROOT = Path(__file__).resolve().parent.parent
MODEL = "llama/plain"
EOS, CASES, KEPT, TRIALS, NOISE, JUNK = 2, 200, 8, 3, 1e-4, -1e5
BEAMS = (1, 2, 3, 4, 8, 15, 32, 64)
STOPPING: tuple[bool | str, ...] = (False, True, "never")


class Noise(LogitsProcessor):
    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + (2 * torch.rand(scores.shape, generator=self.generator) - 1) * NOISE


def automaton(rng: random.Random, vocab: int) -> list[list[list[int]]]:
    """Random states without dead ends; about half of them may end."""
    count, width = rng.randint(2, 6), rng.choice((2, 4, 8, 24))
    states = []
    for i in range(count):
        tokens = rng.sample(range(3, vocab), rng.randint(1, width)) + [EOS] * (i > 0 and rng.random() < 0.6)
        states.append([[token, rng.randrange(count)] for token in sorted(tokens)])
    return states


def catalogue(rng: random.Random, vocab: int) -> list[list[int]]:
    """Random sequences, with shared beginnings, some of them prefixes of others."""
    tokens = rng.sample(range(3, vocab), rng.choice((4, 8, 16)))
    items = {tuple(rng.choice(tokens) for _ in range(rng.randint(1, 4))) for _ in range(rng.choice((5, 30, 200)))}
    return [list(item) for item in sorted(items)]


def allowed_of(case: dict[str, Any]) -> Callable[[list[int]], list[int]]:
    """New tokens -> the allowed ones; one token after illegal ones, as transformers wants some."""
    if "automaton" in case:
        states = [dict(state) for state in case["automaton"]]

        def after(path: list[int]) -> list[int]:
            at: int | None = 0
            for token in path:
                at = states[at].get(token) if at is not None else None
            return [0] if at is None else sorted(states[at])

        return after
    nexts: dict[tuple[int, ...], set[int]] = {}
    for item in case["catalogue"]:
        for i, token in enumerate([*item, EOS]):
            nexts.setdefault(tuple(item[:i]), set()).add(token)
    return lambda path: sorted(nexts.get(tuple(path), {0}))


def generate(model: Any, case: dict[str, Any], noise: int | None = None) -> list[dict[str, Any]]:
    """The legal outputs, best first."""
    after, prompt, beams = allowed_of(case), case["prompt_ids"], case["beams"]
    config = GenerationConfig(
        num_beams=beams, num_return_sequences=beams, max_new_tokens=case["max_new_tokens"], eos_token_id=[EOS],
        length_penalty=case["length_penalty"], early_stopping=case["early_stopping"], do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True, output_logits=True)  # fmt: skip
    ids = torch.tensor([prompt])
    processors = LogitsProcessorList([] if noise is None else [Noise(noise)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=config, logits_processor=processors,
        prefix_allowed_tokens_fn=lambda _, ids: after(ids[len(prompt):].tolist()))  # fmt: skip
    rows = out.sequences[:, len(prompt) :].tolist()
    if beams == 1:
        row = rows[0][: len(out.scores)]
        steps = zip(out.logits, row, strict=True) if out.logits else []
        return [{"token_ids": row, "score": float(sum(x[0].double().log_softmax(-1)[t] for x, t in steps))}]
    lengths = (out.beam_indices >= 0).sum(-1).tolist()
    found = zip(rows, lengths, out.sequences_scores.tolist(), strict=True)
    return [{"token_ids": row[:length], "score": score} for row, length, score in found if score > JUNK]


def tokens(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["token_ids"] for output in outputs[:KEPT]]


def robust(model: Any, exact: Any, case: dict[str, Any], outputs: list[dict[str, Any]]) -> bool:
    """Whether neither float64 nor noise changes a token of the best outputs."""
    if tokens(generate(exact, case)) != tokens(outputs):
        return False
    return all(tokens(generate(model, case, noise=trial)) == tokens(outputs) for trial in range(TRIALS))


def make_case(rng: random.Random, number: int, vocab: int) -> dict[str, Any]:
    kind: dict[str, Any] = (
        {"automaton": automaton(rng, vocab)} if number % 5 < 3 else {"catalogue": catalogue(rng, vocab)}
    )
    return {
        "prompt_ids": [rng.randrange(3, vocab) for _ in range(rng.randint(1, 6))],
        "beams": BEAMS[number % len(BEAMS)], "early_stopping": STOPPING[number // len(BEAMS) % 3],
        "length_penalty": rng.choice((1.0, 0.0, 0.6, 2.0, -0.5)), "max_new_tokens": rng.randint(3, 7), **kind,
    }  # fmt: skip


def processors_of(rng: random.Random, vocab: int, prompt: list[int]) -> dict[str, Any]:
    """Random options of `generate`, by its own names."""
    some = lambda n: rng.sample(range(3, vocab), n)  # noqa: E731
    made: dict[str, Any] = {
        "repetition_penalty": rng.choice((1.3, 2.0, 0.8)),
        "no_repeat_ngram_size": rng.choice((1, 2, 3)),
        "bad_words_ids": [some(1), some(1), *[some(2) for _ in range(40)]],
        "sequence_bias": [*[[some(1), rng.uniform(-4, 4)] for _ in range(8)],
                          *[[some(2), rng.uniform(-6, 6)] for _ in range(60)]],
        "min_length": len(prompt) + rng.randint(1, 4),
        "min_new_tokens": rng.randint(1, 5),
        "suppress_tokens": some(30),
        "begin_suppress_tokens": some(60),
    }  # fmt: skip
    kept = rng.sample(sorted(made), rng.randint(1, 4))
    return {name: made[name] for name in kept}


def processed(model: Any, case: dict[str, Any], noise: int | None = None) -> list[dict[str, Any]]:
    """The outputs of `generate` with processors, best first."""
    prompt, beams = case["prompt_ids"], case["beams"]
    config = GenerationConfig(
        num_beams=beams, num_return_sequences=beams, max_new_tokens=case["max_new_tokens"], eos_token_id=[case["eos"]],
        do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        **case["processors"])  # fmt: skip
    ids = torch.tensor([prompt])
    extra = LogitsProcessorList([] if noise is None else [Noise(noise)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, logits_processor=extra)
    rows = out.sequences[:, len(prompt) :].tolist()
    if beams == 1:  # the scores are logits, edited
        row = rows[0][: len(out.scores)]
        steps = zip(out.scores, row, strict=True)
        return [{"token_ids": row, "score": float(sum(x[0].double().log_softmax(-1)[t] for x, t in steps))}]
    lengths = (out.beam_indices >= 0).sum(-1).tolist()
    found = zip(rows, lengths, out.sequences_scores.tolist(), strict=True)
    return [{"token_ids": row[:length], "score": score} for row, length, score in found if score > JUNK]


def make_processors(model: Any, exact: Any, rng: random.Random, own: int) -> None:
    """Write `tests/golden/processors.json`: greedy and beam search with Hugging Face's own processors."""
    cases: list[dict[str, Any]] = []
    while len(cases) < 60:
        prompt = [rng.randrange(3, model.config.vocab_size) for _ in range(rng.randint(3, 9))]
        case = {"prompt_ids": prompt, "beams": (1, 1, 4)[len(cases) % 3], "max_new_tokens": 8, "eos": own,
                "processors": processors_of(rng, model.config.vocab_size, prompt)}  # fmt: skip
        outputs = processed(model, case)
        runs = [processed(exact, case), *[processed(model, case, noise=trial) for trial in range(TRIALS)]]
        if all(tokens(run) == tokens(outputs) for run in runs):
            cases.append(case | {"outputs": [o | {"score": round(o["score"], 6)} for o in outputs[:KEPT]]})
    write("processors.json", cases)


def write(name: str, cases: list[dict[str, Any]]) -> None:
    head = {"model": MODEL, "eos_token_ids": [EOS], "versions": {"transformers": transformers.__version__}}
    lines = ",\n".join("  " + json.dumps(case, separators=(",", ":")) for case in cases)
    text = json.dumps(head)[:-1] + ', "cases": [\n' + lines + "\n]}\n"
    (ROOT / "tests" / "golden" / name).write_text(text)


def make_constraints(model: Any, exact: Any, rng: random.Random, vocab: int) -> None:
    """Write `tests/golden/constraints.json`: beam search with `prefix_allowed_tokens_fn`."""
    cases: list[dict[str, Any]] = []
    dropped = 0
    while len(cases) < CASES:
        case = make_case(rng, len(cases), vocab)
        outputs = generate(model, case)
        junk = case["beams"] > 1 and case["early_stopping"] is True and len(outputs) < case["beams"]
        if not outputs or junk or not robust(model, exact, case, outputs):
            dropped += 1
            continue
        cases.append(case | {"outputs": [o | {"score": round(o["score"], 6)} for o in outputs[:KEPT]]})
        if len(cases) % 20 == 0:
            print(len(cases), "cases,", dropped, "dropped", file=sys.stderr, flush=True)
    write("constraints.json", cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["processors", "constraints"]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="(both)")
    parts = parser.parse_args().parts
    transformers.utils.logging.set_verbosity_error()
    folder, rng = ROOT / "tests" / "golden" / MODEL, random.Random(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config = GenerationConfig()
    exact, vocab = copy.deepcopy(model).double(), model.config.vocab_size
    if "processors" in parts:
        own = json.loads((folder / "golden.json").read_text())["own_eos_token_ids"][0]
        make_processors(model, exact, random.Random(1), own)
    if "constraints" in parts:
        make_constraints(model, exact, rng, vocab)


if __name__ == "__main__":
    main()

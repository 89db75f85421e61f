"""Golden files of constraints, logits processors and warpers, by transformers' own on a golden checkpoint.

Run by path, from outside the repository and with an environment that has transformers:

    cd / && OMP_NUM_THREADS=1 python -P REPO/tools/make_golden_processors.py [--parts constraints ...] [--out DIR]

Writes into `tests/golden`:

- `constraints.json`: 200 random constraints (`prefix_allowed_tokens_fn`), each with a prompt, the arguments of the
  search and the best outputs. An automaton is a list of states, each a list of [token, next state]; a catalogue is a
  list of sequences. Where there are fewer legal sequences than beams, transformers fills up with illegal ones and with
  duplicates, whose scores are below -1e5: they are left out, and so are cases in which they could end the search early.
- `processors.json`: greedy and beam search with logits processors.
- `warpers.json`: 200 random rows of logits, the options of their warp, and the tokens that stay.
- `draws.json`: options of `generate`, and each continuation of a prompt by two tokens, or by an end-of-sequence token,
  with its probability in float64: the product of its tokens' probabilities after all processors and warpers, in
  transformers' order.

As in `make_golden.py`, a case is kept only if neither float64 nor noise changes a token.
"""

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
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
MODEL = "llama/plain"
EOS, CASES, KEPT, TRIALS, NOISE, JUNK = 2, 200, 8, 3, 1e-4, -1e5
BEAMS = (1, 2, 3, 4, 8, 15, 32, 64)
STOPPING: tuple[bool | str, ...] = (False, True, "never")
ROW_NOISE = 1e-5  # of rows that are warped
NEW, LEAST = 2, 1e-12  # tokens of a continuation, and how probable one is
PROMPT = [1, 79, 61, 29, 36, 100, 56]  # the likeliest tokens after it: 56, 52, 82, 79, 100, 75
END = 52
DRAWS: list[dict[str, Any]] = [
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
    {"temperature": 1.3, "epsilon_cutoff": 0.04},
    {"temperature": 1.5, "eta_cutoff": 0.3},
    {"top_k": 12, "typical_p": 0.9, "epsilon_cutoff": 0.03, "eta_cutoff": 0.2},
]  # fmt: skip


class Noise(LogitsProcessor):
    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + (2 * torch.rand(scores.shape, generator=self.generator) - 1) * NOISE


def write(path: Path, head: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    """A file with a case on each line."""
    lines = ",\n".join("  " + json.dumps(case, separators=(",", ":")) for case in cases)
    head = head | {"versions": {"transformers": transformers.__version__}}
    path.write_text(json.dumps(head)[:-1] + ', "cases": [\n' + lines + "\n]}\n")


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
    """The legal outputs of a case, which has a constraint or processors, best first."""
    prompt, beams = case["prompt_ids"], case["beams"]
    if "processors" in case:
        options, allowed = case["processors"] | {"eos_token_id": [case["eos"]]}, None
    else:
        options, after = {key: case[key] for key in ("length_penalty", "early_stopping")}, allowed_of(case)
        options["eos_token_id"], allowed = [EOS], lambda _, ids: after(ids[len(prompt) :].tolist())
    config = GenerationConfig(
        num_beams=beams, num_return_sequences=beams, max_new_tokens=case["max_new_tokens"], do_sample=False,
        pad_token_id=0, return_dict_in_generate=True, output_scores=True, output_logits=True, **options)  # fmt: skip
    ids = torch.tensor([prompt])
    extra = LogitsProcessorList([] if noise is None else [Noise(noise)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=config, logits_processor=extra,
        prefix_allowed_tokens_fn=allowed)  # fmt: skip
    rows = out.sequences[:, len(prompt) :].tolist()
    if beams == 1:
        row, edited = rows[0][: len(out.scores)], "processors" in case
        steps = zip(out.scores if edited else out.logits, row, strict=True)
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


def make_constraints(model: Any, exact: Any, out: Path) -> None:
    """Beam search with `prefix_allowed_tokens_fn`."""
    cases: list[dict[str, Any]] = []
    rng, vocab, dropped = random.Random(0), model.config.vocab_size, 0
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
    write(out / "constraints.json", {"model": MODEL, "eos_token_ids": [EOS]}, cases)


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


def make_processors(model: Any, exact: Any, out: Path) -> None:
    """Greedy and beam search with Hugging Face's own processors."""
    own = json.loads((GOLDEN / MODEL / "golden.json").read_text())["own_eos_token_ids"][0]
    cases, rng = list[dict[str, Any]](), random.Random(1)
    while len(cases) < 60:
        prompt = [rng.randrange(3, model.config.vocab_size) for _ in range(rng.randint(3, 9))]
        case = {"prompt_ids": prompt, "beams": (1, 1, 4)[len(cases) % 3], "max_new_tokens": 8, "eos": own,
                "processors": processors_of(rng, model.config.vocab_size, prompt)}  # fmt: skip
        outputs = generate(model, case)
        if robust(model, exact, case, outputs):
            cases.append(case | {"outputs": [o | {"score": round(o["score"], 6)} for o in outputs[:KEPT]]})
    write(out / "processors.json", {"model": MODEL, "eos_token_ids": [EOS]}, cases)


def make_row(rng: random.Random) -> dict[str, Any]:
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


def make_warpers(model: Any, exact: Any, out: Path) -> None:
    """Rows of logits, and the tokens that warpers leave."""
    rng, generator, cases = random.Random(0), torch.Generator().manual_seed(0), list[dict[str, Any]]()
    while len(cases) < CASES:
        case = make_row(rng)
        row = torch.tensor(case["logits"])
        noises = [ROW_NOISE * torch.randn(row.shape, generator=generator) for _ in range(TRIALS)]
        first, *others = (kept(x, case["options"]) for x in (row, row.double(), *[row + noise for noise in noises]))
        if all(other == first for other in others):
            cases.append(case | {"kept": first})
    write(out / "warpers.json", {}, cases)


def law(model: Any, options: dict[str, Any]) -> list[tuple[list[int], float]]:
    """The possible continuations and their probabilities."""
    config = GenerationConfig(do_sample=True, max_new_tokens=NEW, eos_token_id=[END], **{"top_k": 0} | options)
    config._eos_token_tensor = torch.tensor([END])
    edit = model._get_logits_processor(config, input_ids_seq_length=len(PROMPT), device="cpu")

    def below(path: list[int], p: float) -> list[tuple[list[int], float]]:
        if len(path) == NEW or path[-1:] == [END]:
            return [(path, p)]
        ids_1L = torch.tensor([PROMPT + path])
        row_V = edit(ids_1L, model(ids_1L).logits[:, -1])[0].double().softmax(-1)
        each = enumerate(row_V.tolist())
        return [found for token, q in each if q > LEAST for found in below([*path, token], p * q)]

    return below([], 1.0)


@torch.no_grad()
def make_draws(model: Any, exact: Any, out: Path) -> None:
    """Continuations, and their probabilities."""
    cases = [{"options": options, "law": [[path, float(f"{p:.8g}")] for path, p in law(model, options)]}
             for options in DRAWS]  # fmt: skip
    head = {"model": MODEL, "prompt_ids": PROMPT, "max_new_tokens": NEW, "eos": END}
    write(out / "draws.json", head, cases)


PARTS = {"constraints": make_constraints, "processors": make_processors, "warpers": make_warpers, "draws": make_draws}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="(all)")
    parser.add_argument("--out", type=Path, default=GOLDEN, metavar="DIR")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / MODEL, **options).eval()
    model.generation_config = GenerationConfig()
    exact = copy.deepcopy(model).double()
    for part in args.parts:
        PARTS[part](model, exact, args.out)


if __name__ == "__main__":
    main()

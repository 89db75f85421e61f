"""Golden files: tiny random Llama checkpoints with what transformers 5 computes from them.

Run by path, from outside the repository and with an environment that has transformers (extra `oracle`); our folder
`kernels` would shadow a package that transformers looks for:

    cd / && OMP_NUM_THREADS=1 python -P REPO/tools/make_golden.py [VARIANT ...] [--out DIR]

Writes `tests/golden/llama/<variant>/`: the checkpoint (weights exactly representable in bfloat16, all arithmetic in
float32), `golden.json` and `golden.safetensors`, whose tensors `logits.<i>` [rows, V] are the last rows of a full
forward pass over `logits[i]` of golden.json. Each entry of `runs` has the prompt, the generation arguments in our
words and Hugging Face's (`hf`), and `outputs`, best first: new tokens (end-of-sequence included, padding not), `score`
(beams: Hugging Face's `sequences_scores`) and `logprob` (sum over the new tokens).

What makes the files trustworthy: missing or unexpected tensors are errors (transformers would fill in noise); every
call gets a fresh model (dynamic RoPE keeps state) and one prompt; `GenerationConfig`s are complete, the model's own is
emptied, lest defaults leak in; hypotheses are cut by `beam_indices`, since padding may equal a real token. And no
answer hangs on rounding: a run is kept if a float64 model (scores within 1e-4) and twelve float32 runs with noise of
+-1e-4 on every log-probability give the same tokens (four would let a tie through now and then); otherwise another
prompt is drawn.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("random_checkpoint", ROOT / "tools" / "random_checkpoint.py")
assert _spec and _spec.loader  # by path: the repository root must not be importable here
random_checkpoint = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(random_checkpoint)

LIMIT = 32  # the original length of the scaled RoPE variants; prompts and answers cross it
NOISE, TRIALS, ATTEMPTS = 1e-4, 12, 300
SMALL = {"layers": 2, "width": 32, "mlp": 48, "heads": 4, "vocab": 104, "dtype": "bfloat16", "max_positions": 128}
ROPE = SMALL | {"width": 48, "mlp": 64, "heads": 3}  # head size 16: frequencies on both sides of LIMIT
LINEAR = {"factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 4.0,
          "original_max_position_embeddings": LIMIT}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LIMIT}
YARN_EXACT = {"attention_factor": 1.3, "truncate": False, "beta_fast": 2.0, "beta_slow": 0.5}
ABSENT = object()

# variant -> (arguments of random_checkpoint.make, changes to config.json). A name ending in _v4 is its namesake's
# twin: the same weights, the older spelling, and (asserted) the same results.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (SMALL, {}),
    "gqa": (SMALL | {"kv_heads": 2, "config_style": "v4"}, {}),
    "mqa": (SMALL | {"kv_heads": 1}, {}),
    "head_dim": (SMALL | {"head_dim": 12, "kv_heads": 2}, {}),
    "attention_bias": (SMALL | {"attention_bias": True, "kv_heads": 2}, {}),
    "mlp_bias": (SMALL | {"mlp_bias": True, "config_style": "v4"}, {}),
    "both_biases": (SMALL | {"attention_bias": True, "mlp_bias": True}, {}),
    "tied": (SMALL | {"tied": True}, {}),
    "tied_head_stored": (SMALL | {"tied": True}, {}),
    "tie_flag_absent": (SMALL, {"tie_word_embeddings": ABSENT}),
    "defaults": (SMALL | {"config_style": "v4"}, dict.fromkeys(
        ("num_key_value_heads", "attention_bias", "mlp_bias", "tie_word_embeddings", "hidden_act"), ABSENT)
        | {"head_dim": None}),
    "rms_eps": (SMALL | {"rms_eps": 0.03}, {}),
    "sharded": (SMALL | {"shards": 3}, {}),
    "eos_list": (SMALL, {"eos_token_id": None}),
    "float16": (SMALL | {"dtype": "float16", "config_style": "v4"}, {}),
    "theta": (ROPE | {"rope_theta": 5e5}, {}),
    "theta_v4": (ROPE | {"rope_theta": 5e5, "config_style": "v4"}, {}),
    "linear": (ROPE | {"rope": {"rope_type": "linear", **LINEAR}}, {}),
    "linear_v4": (ROPE | {"rope": {"type": "linear", **LINEAR}, "config_style": "v4"}, {}),
    "dynamic": (ROPE | {"rope": {"rope_type": "dynamic", "factor": 4.0}, "max_positions": LIMIT}, {}),
    "llama3": (ROPE | {"rope": LLAMA3, "rope_theta": 5e5}, {}),
    "llama3_v4": (ROPE | {"rope": LLAMA3, "rope_theta": 5e5, "config_style": "v4"}, {}),
    "yarn": (ROPE | {"rope": YARN, "config_style": "v4"}, {}),
    "yarn_mscale": (ROPE | {"rope": YARN | {"mscale": 0.7, "mscale_all_dim": 2.0, "beta_fast": 1.5}}, {}),
    "yarn_factor": (ROPE | {"rope": YARN | YARN_EXACT}, {}),
}  # fmt: skip

Run = tuple[int, float, bool | str, int, str, int]  # beams, length_penalty, early_stopping, returned, EOS, new tokens
SHORT_GRID: list[Run] = [
    (1, 1.0, False, 1, "own", 24),
    (1, 1.0, False, 1, "none", 24),
    (4, 1.0, False, 4, "own", 24),
    (4, 0.6, "never", 4, "several", 24),
    (15, 2.0, True, 15, "several", 24),
    (15, 1.0, False, 15, "own", 24),
    (15, 1.0, "never", 5, "none", 12),
]
FULL_GRID: list[Run] = [
    *SHORT_GRID,
    (4, 0.6, True, 4, "own", 24),
    (4, 2.0, "never", 4, "one", 24),
    (4, 0.0, "never", 4, "own", 24),
    (4, -0.5, False, 2, "own", 24),
    (4, 1.0, True, 1, "several", 24),
    (4, 2.0, False, 4, "none", 12),
    (4, 1.0, False, 3, "own", 1),
    (15, 0.6, False, 15, "several", 24),
    (15, 2.0, "never", 15, "one", 24),
    (15, 0.6, True, 7, "own", 24),
    (15, 0.0, False, 15, "several", 12),
    (15, -0.5, "never", 15, "own", 24),
    (15, 1.0, True, 15, "several", 1),
]
FULL = ("plain", "gqa")


class Noise(LogitsProcessor):
    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + (2 * torch.rand(scores.shape, generator=self.generator) - 1) * NOISE


def load(folder: Path) -> Any:
    """The float32 model with eager attention; refuses checkpoints that transformers would complete with noise."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)  # fmt: skip
    wrong = {key: value for key, value in info.items() if value}
    assert not wrong, f"{folder.name}: {wrong}"
    model.generation_config = GenerationConfig()
    return model.eval()


def generate(model: Any, prompt: list[int], hf: dict[str, Any], noise: int | None = None) -> list[dict[str, Any]]:
    """The hypotheses of one fresh call, best first."""
    config = GenerationConfig(**hf, do_sample=False, pad_token_id=0, use_cache=True,
                              return_dict_in_generate=True, output_scores=True)  # fmt: skip
    ids = torch.tensor([prompt])
    out = copy.deepcopy(model).generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=config,
        logits_processor=LogitsProcessorList([] if noise is None else [Noise(noise)]))  # fmt: skip
    rows = out.sequences[:, len(prompt):].tolist()  # fmt: skip
    eos, budget = set(hf["eos_token_id"] or []), hf["max_new_tokens"]
    if hf["num_beams"] == 1:
        rows = [rows[0][: len(out.scores)]]
        steps = [scores[0].double().log_softmax(-1)[token] for scores, token in zip(out.scores, rows[0], strict=True)]
        logprobs = [float(sum(steps))]
        scores = logprobs
    else:
        lengths = (out.beam_indices >= 0).sum(-1).tolist()
        rows = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        scores = out.sequences_scores.tolist()
        logprobs = [score * len(row) ** hf["length_penalty"] for score, row in zip(scores, rows, strict=True)]
    for row in rows:
        assert row and not eos & set(row[:-1]) and (row[-1] in eos or len(row) == budget), (row, eos)
    return [
        {"token_ids": row, "score": score, "logprob": logprob, "finish_reason": "eos" if row[-1] in eos else "length"}
        for row, score, logprob in zip(rows, scores, logprobs, strict=True)
    ]


def tokens(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


def robust(model: Any, exact: Any, prompt: list[int], hf: dict[str, Any], outputs: list[dict[str, Any]]) -> bool:
    """Whether neither float64 nor noise changes a token of `outputs`."""
    doubled = generate(exact, prompt, hf)
    if tokens(doubled) != tokens(outputs):
        return False
    if any(abs(a["score"] - b["score"]) > 1e-4 for a, b in zip(doubled, outputs, strict=True)):
        return False
    return all(tokens(generate(model, prompt, hf, noise=trial)) == tokens(outputs) for trial in range(TRIALS))


def telling(outputs: list[dict[str, Any]], hf: dict[str, Any]) -> bool:
    """Whether the run shows something: an end of sequence strictly inside the budget where one may occur."""
    if hf["max_new_tokens"] == 1 or hf["eos_token_id"] is None:
        return True
    return any(1 < len(o["token_ids"]) < hf["max_new_tokens"] and o["finish_reason"] == "eos" for o in outputs)


def run(
    model: Any, exact: Any, prompts: Callable[[], list[int]], ours: dict[str, Any], hf: dict[str, Any]
) -> dict[str, Any]:
    """The first drawn prompt whose answer is telling and robust, with that answer."""
    for _ in range(ATTEMPTS):
        prompt = prompts()
        outputs = generate(model, prompt, hf)
        if telling(outputs, hf) and robust(model, exact, prompt, hf, outputs):
            return {**ours, "hf": hf, "prompt_ids": prompt, "outputs": outputs}
    raise SystemExit(f"no robust prompt in {ATTEMPTS} for {ours}: change the variant's seed")


def edit(path: Path, changes: dict[str, Any]) -> None:
    config = json.loads(path.read_text())
    config = {key: value for key, value in (config | changes).items() if value is not ABSENT}
    path.write_text(json.dumps(config, indent=2) + "\n")


def write(path: Path, stored: dict[str, torch.Tensor], dtype: str) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    random_checkpoint.write_safetensors(path, shapes, dtype, iter(stored.values()))


def make_variant(folder: Path, name: str) -> dict[str, Any]:
    """Write one variant's folder; returns the content of its golden.json."""
    shape, changes = VARIANTS[name]
    seed = list(VARIANTS).index(name.removesuffix("_v4"))
    shutil.rmtree(folder, ignore_errors=True)
    random_checkpoint.make(folder, **shape, seed=seed)
    edit(folder / "config.json", changes)
    if name == "tied_head_stored":
        mapped = load_file(folder / "model.safetensors")
        stored = {name: tensor.clone() for name, tensor in mapped.items()}  # writing under a mapping is a bus error
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
        write(folder / "model.safetensors", stored, shape["dtype"])
    model = load(folder)
    exact = copy.deepcopy(model).double()

    generator = torch.Generator().manual_seed(seed)
    vocab = shape["vocab"]

    def prompt(length: int) -> list[int]:
        return torch.randint(3, vocab, (length,), generator=generator).tolist()

    entries, kept, worst, peaks = [], {}, 0.0, []
    for i, (length, rows) in enumerate([(3, 3), (17, 17), (60, 8)]):
        ids = prompt(length)
        with torch.no_grad():
            logits = copy.deepcopy(model)(torch.tensor([ids])).logits[0]
            doubled = copy.deepcopy(exact)(torch.tensor([ids])).logits[0]
        spread = logits.max(-1).values - logits.min(-1).values
        worst = max(worst, ((logits - doubled).abs().max(-1).values / spread).max().item())
        peaks.append(logits.softmax(-1))
        kept[f"logits.{i}"] = logits[-rows:].contiguous()
        entries.append({"tensor": f"logits.{i}", "prompt_ids": ids, "rows": rows})
    assert worst < 2e-5, f"{name}: logits of float32 and float64 differ by {worst:.1e} of their spread"
    write(folder / "golden.safetensors", kept, "float32")

    # End-of-sequence ids: the likeliest tokens on average, so that beams meet them; several own ones in three variants.
    likely = torch.cat(peaks).mean(0)[3:].argsort(descending=True, stable=True).add(3).tolist()
    own = {"eos_list": likely[:3], "defaults": likely[1:3]}.get(name, likely[:1])
    declared = own if len(own) > 1 else own[0]
    if name == "defaults":  # everything in config.json
        edit(folder / "config.json", {"eos_token_id": declared})
        (folder / "generation_config.json").unlink()
    else:
        edit(folder / "config.json", {} if name == "eos_list" else {"eos_token_id": declared})
        edit(folder / "generation_config.json", {"eos_token_id": declared})

    lengths = iter(range(10**6))
    ids_of = {"own": own, "one": likely[1:2], "several": likely[:3], "none": None}
    runs = []
    for beams, penalty, stopping, returned, ends, budget in FULL_GRID if name in FULL else SHORT_GRID:
        ids, asked = ids_of[ends], None if ends == "own" else ids_of[ends]
        ours: dict[str, Any] = {"search": "greedy" if beams == 1 else "trie", "max_new_tokens": budget,
                                "eos_token_ids": asked, "ignore_eos": ends == "none"}  # fmt: skip
        hf: dict[str, Any] = {"num_beams": beams, "max_new_tokens": budget, "eos_token_id": ids}
        if beams > 1:
            ours |= {"beams": beams, "length_penalty": penalty, "early_stopping": str(stopping).lower(),
                     "num_return_sequences": returned}  # fmt: skip
            hf |= {"length_penalty": penalty, "early_stopping": stopping, "num_return_sequences": returned}
        runs.append(run(model, exact, lambda: prompt((17, 40, 5)[next(lengths) % 3]), ours, hf))
    return {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "variant": name, "own_eos_token_ids": own, "logits_error_to_float64": worst,
        "mean_top_probability": torch.cat(peaks).max(-1).values.mean().item(), "logits": entries, "runs": runs,
    }  # fmt: skip


def dump(golden: dict[str, Any]) -> str:
    """JSON with one line per entry of a list, so that differences read well."""
    lines = []
    for key, value in golden.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = "[\n" + ",\n".join("  " + json.dumps(entry) for entry in value) + "\n ]"
        else:
            value = json.dumps(value)
        lines.append(f" {json.dumps(key)}: {value}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the golden files of tests/golden/llama with transformers.")
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"default: all of {', '.join(VARIANTS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "golden" / "llama")
    arguments = parser.parse_args()
    if unknown := set(arguments.variants) - set(VARIANTS):
        parser.error(f"no such variant: {', '.join(sorted(unknown))}")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    made: dict[str, dict[str, Any]] = {}
    for name in arguments.variants or VARIANTS:
        folder = arguments.out / name
        made[name] = golden = make_variant(folder, name)
        (folder / "golden.json").write_text(dump(golden))
        if twin := made.get(name.removesuffix("_v4")):
            assert twin["runs"] == golden["runs"], f"{name} differs from its twin"
        size = sum(path.stat().st_size for path in folder.iterdir())
        early = sum(o["finish_reason"] == "eos" for r in golden["runs"] for o in r["outputs"])
        print(f"{name}: {size / 1e3:.0f} kB, {len(golden['runs'])} runs, {early} outputs end in EOS, "
              f"top probability {golden['mean_top_probability']:.2f}", file=sys.stderr)  # fmt: skip


if __name__ == "__main__":
    main()

"""Golden files: tiny random checkpoints of every family with what transformers 5 computes from them.

Run by path, from outside the repository and with an environment that has transformers (extra `oracle`); our folder
`kernels` would shadow a package that transformers looks for:

    cd / && OMP_NUM_THREADS=1 python -P REPO/tools/make_golden.py [FAMILY[/VARIANT] ...] [--out DIR]

The checkpoints are those of `tools/golden/<family>.py`. Writes `tests/golden/<family>/<variant>/`: the checkpoint
(weights exactly representable in bfloat16, all arithmetic in float32), `golden.json` and `golden.safetensors`, whose
tensors `logits.<i>` [rows, V] are the last rows of a full forward pass over `logits[i]` of golden.json. Each entry of
`runs` has the prompt, the generation arguments in our words and Hugging Face's (`hf`), and `outputs`, best first: new
tokens (end-of-sequence included, padding not), `score` (beams: Hugging Face's `sequences_scores`) and `logprob` (sum
over the new tokens). A model with a scalar head has `scores` instead: texts and their scores. A quantised checkpoint
is computed as the float32 model that its format's package restores from it.

Why the files can be trusted: missing or unexpected tensors are errors (transformers would fill in noise); every
call gets a fresh model (dynamic RoPE keeps state) and one prompt; `GenerationConfig`s are complete, the model's own is
emptied, so that no defaults leak in; hypotheses are cut by `beam_indices`, since padding may equal a real token. No
answer depends on rounding: a run is kept if a float64 model (scores within 1e-4) and twelve float32 runs with noise of
+-1e-4 on every log-probability give the same tokens (four would let a tie through now and then); otherwise another
prompt is drawn.
"""

import argparse
import copy
import importlib
import json
import re
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)

ROOT = Path(__file__).resolve().parent.parent
for name in ("tools", "models"):  # the repository's root must not be importable here
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(ROOT / name)]
from tools.golden.base import Variant, edit, write_tensors  # noqa: E402
from tools.make_golden_weights import KINDS  # noqa: E402

for kind in ("Mistral4", "MllamaText"):  # of which AutoModelForCausalLM knows nothing
    classes = (getattr(transformers, name) for name in (f"{kind}Config", f"{kind.removesuffix('Text')}ForCausalLM"))
    AutoModelForCausalLM.register(*classes, exist_ok=True)
NOISE, TRIALS, ATTEMPTS = 1e-4, 12, 300
OTHER_PARTS = r"vision|visual|audio|projector|connector|vqmodel"

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


class Noise(LogitsProcessor):
    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + (2 * torch.rand(scores.shape, generator=self.generator) - 1) * NOISE


def load(folder: Path) -> Any:
    """The float32 model with eager attention; refuses checkpoints that transformers would complete with noise."""
    config = json.loads((folder / "config.json").read_text())
    architecture = config["architectures"][0]
    # Its other implementations of experts round differently.
    fields = {**config, **config.get("text_config", {})}
    mixed = any(map(fields.get, ("num_experts_per_tok", "num_experts", "top_k_experts", "moe_k", "moe_topk")))
    eager = {"experts_implementation": "eager"} if mixed else {}
    kind = KINDS.get(architecture.rpartition("For")[2], AutoModelForCausalLM)
    wrapped = "text_config" in config or architecture.endswith("ForConditionalGeneration")
    attention = "sdpa" if config.get("alibi") else "eager"  # which in Falcon adds ALiBi twice
    model, info = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, output_loading_info=True,
        ignore_mismatched_sizes=wrapped, **eager)  # fmt: skip
    if wrapped:  # the files lack the parts that no text depends on
        info = {key: [name for name in value if not re.search(OTHER_PARTS, str(name))] for key, value in info.items()}
    wrong = {key: value for key, value in info.items() if value}
    assert not wrong, f"{folder.name}: {wrong}"
    model.generation_config = GenerationConfig()
    return torch.nn.Module.float(model.eval())  # BitNet makes bfloat16 of its numbers, and refuses the method


def generate(model: Any, prompt: list[int], hf: dict[str, Any], noise: int | None = None) -> list[dict[str, Any]]:
    """The hypotheses of one fresh call, best first."""
    # transformers keeps a convolution's state for each beam (its issue 46612): without a cache nothing can be lost.
    cached = model.config.model_type not in ("lfm2", "lfm2_moe", "lfm3")
    config = GenerationConfig(**hf, do_sample=False, pad_token_id=0, use_cache=cached,
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


@contextmanager
def wide(exact: Any) -> Iterator[None]:
    """A context for a float64 model; XGLM makes tensors of the default dtype that must hold its lowest number."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if exact.config.model_type == "xglm" else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def tokens(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


def robust(model: Any, exact: Any, prompt: list[int], hf: dict[str, Any], outputs: list[dict[str, Any]]) -> bool:
    """Whether neither float64 nor noise changes a token of `outputs`."""
    with wide(exact):
        doubled = generate(exact, prompt, hf)
    if tokens(doubled) != tokens(outputs):
        return False
    if any(abs(a["score"] - b["score"]) > 1e-4 for a, b in zip(doubled, outputs, strict=True)):
        return False
    return all(tokens(generate(model, prompt, hf, noise=trial)) == tokens(outputs) for trial in range(TRIALS))


def informative(outputs: list[dict[str, Any]], hf: dict[str, Any]) -> bool:
    """Whether the run is informative: an end of sequence strictly inside the budget where one may occur."""
    if hf["max_new_tokens"] == 1 or hf["eos_token_id"] is None:
        return True
    return any(1 < len(o["token_ids"]) < hf["max_new_tokens"] and o["finish_reason"] == "eos" for o in outputs)


def run(
    model: Any, exact: Any, prompts: Callable[[], list[int]], ours: dict[str, Any], hf: dict[str, Any]
) -> dict[str, Any]:
    """The first drawn prompt with an informative and robust answer, with that answer."""
    for _ in range(ATTEMPTS):
        prompt = prompts()
        outputs = generate(model, prompt, hf)
        if informative(outputs, hf) and robust(model, exact, prompt, hf, outputs):
            return {**ours, "hf": hf, "prompt_ids": prompt, "outputs": outputs}
    raise SystemExit(f"no robust prompt in {ATTEMPTS} for {ours}: change the variant's seed")


def ask(model: Any, exact: Any, ids: list[int]) -> tuple[torch.Tensor, float]:
    """Rows of logits (one score from a scalar head) of a fresh model, and their distance to float64's."""
    with torch.no_grad():
        rows = copy.deepcopy(model)(torch.tensor([ids])).logits[0]
        with wide(exact):
            doubled = copy.deepcopy(exact)(torch.tensor([ids])).logits[0]
    spread = rows.max(-1).values - rows.min(-1).values if rows.dim() > 1 else rows.new_ones(())
    return rows, ((rows - doubled).abs().amax(-1) / spread).max().item()


def make_variant(folder: Path, name: str, variant: Variant, seed: int) -> dict[str, Any]:
    """Write one variant's folder; returns the content of its golden.json."""
    shutil.rmtree(folder, ignore_errors=True)
    variant.write(folder, seed)
    with tempfile.TemporaryDirectory() as scratch:
        if variant.floats:
            variant.floats(folder, Path(scratch) / name)
        model = load(Path(scratch) / name if variant.floats else folder)
    exact: Any = torch.nn.Module.double(copy.deepcopy(model))
    for module in exact.modules():
        if hasattr(module, "reorder_and_upcast_attn"):
            module.reorder_and_upcast_attn = False  # float32 within float64: transformers refuses
    config = model.config.get_text_config()
    vocab = getattr(config, "output_vocab_size", None) or config.vocab_size
    generator = torch.Generator().manual_seed(seed)

    def prompt(length: int) -> list[int]:
        return torch.randint(3, vocab, (length,), generator=generator).tolist()

    golden: dict[str, Any] = {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__}, "variant": name,
    }  # fmt: skip
    if variant.twin:
        golden["twin"] = f"{folder.parent.name}/{variant.twin}"
    asked = [(prompt(length), rows) for length, rows in variant.logits]
    answers = [ask(model, exact, ids) for ids, _ in asked]
    worst = max((error for _, error in answers), default=0.0)
    assert worst < 2e-5, f"{name}: float32 and float64 differ by {worst:.1e} (of the spread of logits)"
    if hasattr(model, "score"):
        entries = [{"prompt_ids": ids, "score": s.item()} for (ids, _), (s, _) in zip(asked, answers, strict=True)]
        return golden | {"scores_error_to_float64": worst, "scores": entries}
    kept = {f"logits.{i}": logits[-asked[i][1] :].contiguous() for i, (logits, _) in enumerate(answers)}
    write_tensors(folder / "golden.safetensors", kept, "float32")
    peaks = torch.cat([logits.softmax(-1) for logits, _ in answers])
    # End-of-sequence ids: the likeliest tokens on average, so that beams meet them.
    likely = peaks.mean(0)[3:].argsort(descending=True, stable=True).add(3).tolist()
    own = write_eos(folder, variant, likely)
    return golden | {
        "own_eos_token_ids": own, "logits_error_to_float64": worst,
        "mean_top_probability": peaks.max(-1).values.mean().item(),
        "logits": [{"tensor": f"logits.{i}", "prompt_ids": ids, "rows": rows} for i, (ids, rows) in enumerate(asked)],
        "runs": make_runs(model, exact, prompt, variant, own, likely),
    }  # fmt: skip


def write_eos(folder: Path, variant: Variant, likely: list[int]) -> list[int]:
    """The checkpoint's own end-of-sequence ids, written into its files."""
    own = [likely[rank] for rank in variant.own_eos]
    for file in variant.eos_files:
        edit(folder / file, {"eos_token_id": own if len(own) > 1 else own[0]})
    if "generation_config.json" not in variant.eos_files:
        (folder / "generation_config.json").unlink()
    return own


def make_runs(
    model: Any, exact: Any, prompt: Callable[[int], list[int]], variant: Variant, own: list[int], likely: list[int]
) -> list[dict[str, Any]]:
    """The searches of the variant's grid."""
    lengths = iter(range(10**6))
    ids_of = {"own": own, "one": likely[1:2], "several": likely[:3], "none": None}
    runs = []
    for beams, penalty, stopping, returned, ends, budget in variant.grid or (FULL_GRID if variant.full else SHORT_GRID):
        ids, asked = ids_of[ends], None if ends == "own" else ids_of[ends]
        ours: dict[str, Any] = {"search": "greedy" if beams == 1 else "trie", "max_new_tokens": budget,
                                "eos_token_ids": asked, "ignore_eos": ends == "none"}  # fmt: skip
        hf: dict[str, Any] = {"num_beams": beams, "max_new_tokens": budget, "eos_token_id": ids}
        if beams > 1:
            ours |= {"beams": beams, "length_penalty": penalty, "early_stopping": str(stopping).lower(),
                     "num_return_sequences": returned}  # fmt: skip
            hf |= {"length_penalty": penalty, "early_stopping": stopping, "num_return_sequences": returned}
        draw = lambda: prompt(variant.prompts[next(lengths) % len(variant.prompts)])  # noqa: E731
        runs.append(run(model, exact, draw, ours, hf))
    return runs


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


def keep_what_differs(folder: Path, twin: Path, golden: dict[str, Any]) -> None:
    """Check a variant against its twin; if their weights are the same to the byte, keep only its config."""
    expected = json.loads((twin / "golden.json").read_text())
    same = [expected.get(key) == golden.get(key) for key in ("runs", "scores", "own_eos_token_ids")]
    assert all(same), f"{folder.name} differs from its twin {twin.name}"
    if (folder / "model.safetensors").read_bytes() == (twin / "model.safetensors").read_bytes():
        for path in {*folder.iterdir()} - {folder / "config.json"}:
            path.unlink()


def main() -> None:
    shared = {"base", "random_tensors", "storage"}
    names = {path.stem for path in (ROOT / "tools" / "golden").glob("[a-z]*.py")} - shared
    families: dict[str, dict[str, Variant]] = {
        name: importlib.import_module(f"tools.golden.{name}").VARIANTS for name in sorted(names)
    }
    everything = [f"{family}/{name}" for family, variants in families.items() for name in variants]
    parser = argparse.ArgumentParser(description="Make the golden files of tests/golden with transformers.")
    parser.add_argument("which", nargs="*", metavar="FAMILY[/VARIANT]", help=f"default: all of {', '.join(everything)}")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "golden")
    arguments = parser.parse_args()
    asked = arguments.which or everything
    if unknown := [one for one in asked if one not in {*everything, *families}]:
        parser.error(f"no such variant: {', '.join(unknown)}")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for family, name in (one.split("/") for one in everything if one in asked or one.split("/")[0] in asked):
        variant, variants = families[family][name], list(families[family])
        twin = variant.twin or name.removesuffix("_v4")
        folder = arguments.out / family / name
        golden = make_variant(folder, name, variant, variants.index(twin))
        (folder / "golden.json").write_text(dump(golden))
        if twin != name:
            keep_what_differs(folder, folder.parent / twin, golden)
        runs = golden.get("runs", [])
        size = sum(path.stat().st_size for path in folder.iterdir())
        early = sum(o["finish_reason"] == "eos" for r in runs for o in r["outputs"])
        print(f"{family}/{name}: {size / 1e3:.0f} kB, {len(runs)} runs, {early} outputs end in EOS, "
              f"top probability {golden.get('mean_top_probability', 0):.2f}", file=sys.stderr)  # fmt: skip


if __name__ == "__main__":
    main()

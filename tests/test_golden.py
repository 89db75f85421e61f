"""Every family against transformers: the golden files of `tools/make_golden.py`, every variant and config spelling.

Logits within 1e-5 of their spread (1e-3 where weights are stored quantised), greedy and beam search token for token,
scores within 1e-3; classifiers' scores within 1e-4. The files hold only runs whose tokens survive noise of 1e-4 on
every log-probability, so a difference is never rounding.
"""

import functools
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from engine import Engine
from models.checkpoint.fields import Fields
from models.families import FAMILIES
from tests.engine.shards import options_of, search_of

GOLDEN = Path(__file__).parent / "golden"
EVERYTHING = sorted(str(path.parent.relative_to(GOLDEN)) for path in GOLDEN.glob("*/*/golden.json"))
# Of a variant whose weights and answers are those of its twin there is the config only.
SPELLINGS = sorted(
    str(path.parent.relative_to(GOLDEN))
    for path in GOLDEN.glob("*/*/config.json")
    if not path.with_name("golden.json").exists()
)


@functools.cache
def golden(variant):
    return json.loads((GOLDEN / variant / "golden.json").read_text())


VARIANTS = [variant for variant in EVERYTHING if "runs" in golden(variant)]
CLASSIFIERS = [variant for variant in EVERYTHING if "scores" in golden(variant)]
# Whatever depends on the sequence as a whole, and a few that do not.
SHARED = (
    "llama/plain",
    "llama/gqa",
    "llama/dynamic",
    "llama/yarn",
    "opt/post_norm",
    "gpt2/plain",
    "phi3/longrope",
    "phi3/window",
    "experts/qwen2",
    "alibi/bloom",
    "alibi/falcon",
    "relatives/xglm",
)


def label(run):
    eos = "no-eos" if run["ignore_eos"] else f"{len(run['eos_token_ids'] or [])}eos"  # 0eos: the checkpoint's
    if run["search"] == "greedy":
        return f"greedy-{eos}"
    beams = f"beams{run['beams']}-lp{run['length_penalty']}-{run['early_stopping']}"
    return f"{beams}-ret{run['num_return_sequences']}-{eos}-new{run['max_new_tokens']}"


RUNS = {
    (variant, i): f"{variant}-{label(run)}" for variant in VARIANTS for i, run in enumerate(golden(variant)["runs"])
}
# The first beam search of each family.
FIRST = [*{v.split("/")[0]: (v, i) for v, i in reversed(RUNS) if golden(v)["runs"][i]["search"] == "trie"}.values()]


def named(runs):
    return pytest.mark.parametrize(("variant", "i"), [pytest.param(*run, id=RUNS[run]) for run in runs])


@pytest.fixture(scope="module")
def engine_of():
    """One engine per variant, loaded when first asked for; the tests come variant by variant, so one is enough."""
    return functools.lru_cache(maxsize=1)(lambda variant: Engine.load(GOLDEN / variant, dtype="float32"))


def check(result, run):
    expected = run["outputs"]
    assert [output.token_ids for output in result.outputs] == [output["token_ids"] for output in expected]
    assert [output.finish_reason for output in result.outputs] == [output["finish_reason"] for output in expected]
    assert [output.score for output in result.outputs] == pytest.approx([o["score"] for o in expected], abs=1e-3, rel=0)
    assert [output.logprob for output in result.outputs] == pytest.approx([o["logprob"] for o in expected], abs=1e-3)


def test_the_golden_files_are_there():
    assert {"llama/gqa", "llama/dynamic", "llama/yarn", "llama/llama3", "opt/post_norm", "gpt2/plain"} <= {*VARIANTS}
    assert len(VARIANTS) + len(CLASSIFIERS) == len(EVERYTHING) and {*SHARED} <= {*VARIANTS}
    assert {"phi3/longrope_su", "llama/llama3_v4"} <= {*SPELLINGS}
    families = ("opt", "gpt2", "phi", "phi3", "qwen2", "qwen3", "qwen3_5", "stablelm", "smollm3", "olmo", "hunyuan")
    assert {f"{family}/classifier" for family in families} <= {*CLASSIFIERS}


def check_logits(engine, variant):
    stored = load_file(GOLDEN / variant / "golden.safetensors")
    for entry in golden(variant)["logits"]:
        expected_TV = stored[entry["tensor"]]
        logits_TV = engine.logits(entry["prompt_ids"])
        assert logits_TV.shape == (len(entry["prompt_ids"]), expected_TV.shape[1])
        error_T = (logits_TV[-entry["rows"] :] - expected_TV).abs().amax(-1)
        spread_T = expected_TV.amax(-1) - expected_TV.amin(-1)
        assert (error_T / spread_T).max() < (1e-3 if variant.startswith("quantized/") else 1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(engine_of, variant):
    check_logits(engine_of(variant), variant)
    check_embeddings(engine_of(variant), variant)


def check_embeddings(engine, variant):
    """The head makes the last logits of the last row, and the mean of all logits of the mean of all rows."""
    stored = load_file(GOLDEN / variant / "golden.safetensors")
    model, entries = engine.runner.model, golden(variant)["logits"]
    for pooling in ("last", "mean"):
        vectors_NE = engine.embed([entry["prompt_ids"] for entry in entries], pooling=pooling, normalize=False)
        for entry, vector_E in zip(entries, vectors_NE, strict=True):
            if pooling == "mean" and (entry["rows"] < len(entry["prompt_ids"]) or model.dense is not None):
                continue
            rows_TV = stored[entry["tensor"]]
            spread = rows_TV.amax(-1) - rows_TV.amin(-1)
            if (cap := model.config.logit_cap) is not None:
                rows_TV = cap * (rows_TV / cap).atanh()
            expected_V = (rows_TV[-1] if pooling == "last" else rows_TV.mean(0)) * model.config.logit_divisor
            row_1E = vector_E.unsqueeze(0)
            error = (model.head(row_1E if model.dense is None else model.dense(row_1E))[0] - expected_V).abs().max()
            assert error / spread.max() < (1e-3 if variant.startswith("quantized/") else 5e-5), pooling


@named(FIRST)
def test_a_search_of_each_family(engine_of, variant, i):
    check_run(engine_of, variant, i)


@named([run for run in RUNS if run not in FIRST])
def test_run(engine_of, variant, i):
    check_run(engine_of, variant, i)


def check_run(engine_of, variant, i):
    run = golden(variant)["runs"][i]
    [result] = engine_of(variant).generate([run["prompt_ids"]], search=search_of(run), **options_of(run))
    check(result, run)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_definition_of_attention(engine_of, variant, monkeypatch):
    """The reference in the fast version's place: logits, and a beam search."""
    engine = engine_of(variant)
    monkeypatch.setattr(engine.runner, "impl", "reference")
    check_logits(engine, variant)
    run = next(run for run in golden(variant)["runs"] if run["search"] == "trie")
    [result] = engine.generate([run["prompt_ids"]], search=search_of(run), **options_of(run))
    check(result, run)


@pytest.mark.parametrize("variant", SHARED)
def test_prompts_together_give_what_each_gives_alone(engine_of, variant):
    """Runs that differ in nothing but the prompt share their forward passes; neighbours must not be felt."""
    runs = [run for run in golden(variant)["runs"] if run["search"] == "trie"][:5]
    for run in runs:
        prompts = [other["prompt_ids"] for other in runs]
        results = engine_of(variant).generate(prompts, search=search_of(run), **options_of(run))
        check(results[runs.index(run)], run)


@pytest.mark.parametrize("variant", [variant for variant in EVERYTHING if "twin" in golden(variant)])
def test_both_spellings_of_a_checkpoint_give_the_same_bits(engine_of, variant):
    ids = golden(variant)["logits"][-1]["prompt_ids"]
    assert engine_of(variant).logits(ids).equal(engine_of(golden(variant)["twin"]).logits(ids))


@pytest.mark.parametrize("variant", SPELLINGS)
def test_every_spelling_of_a_config_is_read_alike(variant):
    def read(name):
        config = json.loads((GOLDEN / name / "config.json").read_text())
        return FAMILIES[config["architectures"][0]].read(Fields(config, name))

    assert read(variant) == read(variant.rpartition("_")[0])


@pytest.mark.parametrize("variant", CLASSIFIERS)
def test_scores(engine_of, variant):
    entries = golden(variant)["scores"]
    texts = [entry["prompt_ids"] for entry in entries]
    expected = [entry["score"] for entry in entries]
    assert engine_of(variant).scores(texts) == pytest.approx(expected, abs=1e-4, rel=1e-4)
    assert [engine_of(variant).scores([text])[0] for text in texts] == pytest.approx(expected, abs=1e-4, rel=1e-4)

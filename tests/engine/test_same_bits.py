"""A request's log-probabilities are the same bits alone and in a batch, drafted, from a cached prefix, in chunks,
preempted, and with any number of threads; with the C++ kernels: every kind of layer, format, cache, search and rule."""

import itertools
import json
import operator
import random

import pytest

from engine import Choices, Engine, KVMemoryError, Request
from engine.drafts.backoff import NGramDrafter
from engine.step.driver import Driver
from engine.step.jobs import Job
from search import ADED, DSBD, ULTS, BeamSample, BoN, Diverse, Greedy, Sample, SBoN, Speculative, Trie
from tests.eager import EagerDrafts
from tests.engine.step.test_drafting import foresight, reward
from tests.marks import needs_cpp
from tests.test_golden import GOLDEN, VARIANTS, golden
from tools.random_checkpoint import make

pytestmark = needs_cpp

VOCAB = 260
SIZES = {"width": 64, "mlp": 96, "heads": 4, "kv_heads": 2, "vocab": VOCAB, "max_positions": 600, "scale": 0.7}
CACHE, PAGE = 1 << 22, 16  # bytes, tokens
FLOAT32, CACHE8 = {"dtype": "float32"}, {"dtype": "bfloat16", "kv_dtype": "int8"}
WEIGHTS = [{"dtype": "bfloat16", "quant": "int8"}, {"dtype": "float32", "quant": "int4"}]
OPTIONS = [FLOAT32, {"dtype": "bfloat16"}, {"dtype": "float16"}, CACHE8, *WEIGHTS]
KINDS = [  # of layers, of what a layer keeps, and of what depends on the length of a sequence
    *("llama/dynamic", "phi3/longrope", "phi3/longrope_window", "mistral/ministral3", "opt/plain", "gpt2/plain"),
    *("gemma/two", "gemma/three", "gpt_oss/plain", "experts/mixtral_window", "lfm2/plain", "experts/lfm2"),
    *("qwen3_5/recurrent", "experts/qwen3_next_recurrent", "granite/scans_groups", "granite/scans_experts"),
    *("kimi_linear/plain", "bailing_hybrid/plain", "zamba2/plain"),
]
SEARCHES = {
    "sample": Sample(seed=5, min_p=0.02, xtc_probability=0.5, xtc_threshold=0.05),
    "samples": Sample(seed=5, num_return_sequences=3, top_k=9),
    "bon": BoN(n=3, seed=2, num_return_sequences=3),
    "sbon": SBoN(n=6, tau=4, seed=2),
    "diverse": Diverse(beams=4, groups=2, num_return_sequences=4),
    "beam-sample": BeamSample(beams=3, seed=4, num_return_sequences=3),
    "ults": ULTS(num_return_sequences=2),
    "aded": ADED(nodes=6, temperature=1.0, seed=3),
    "dsbd": DSBD(seed=3, draft_beams=3),
    "dsbd-ngrams": DSBD(seed=3, width=2, draft_beams=3, drafter="ngram"),
    "speculative": Speculative(seed=2),
}
CHOICES = Choices([*itertools.product(range(3, 40), *[(n, n + 9, n + 30) for n in range(5)])])  # a few at each step
RULES = {
    "regex": {"regex": "[a-z]{4,40}"},
    "renormalised": {"regex": "[a-z]{4,40}", "constraint_scores": "renormalised"},
    "choices": {"constraint": CHOICES, "constraint_scores": "renormalised"},
    "schema": {"json_schema": {"type": "array", "items": {"type": "integer"}}},
    "processors": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "no_repeat_ngram_size": 2},
    "biases": {"logit_bias": {5: 3.0, 9: -2.0}, "suppress_tokens": [7, 8], "min_new_tokens": 5},
}


@pytest.fixture(autouse=True)
def preempted(monkeypatch):
    """The searches that gave their pages back."""
    jobs, preempt = list[Job](), Driver._preempt
    monkeypatch.setattr(Driver, "_preempt", lambda driver, job: (jobs.append(job), preempt(driver, job))[1])
    return jobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make(folder, layers=2, seed=1, **SIZES)
    return folder


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    make(folder, layers=1, seed=2, **SIZES)
    return folder


def prompts(*lengths):
    """Texts of these lengths; two begin alike, and text that repeats itself makes drafts that are right."""
    rng = random.Random(2)
    texts = [[1] + [rng.randrange(3, VOCAB) for _ in range(n - 1)] for n in lengths]
    return [*texts, [*texts[-1][:-20], 9, 8, 7], (texts[0] * 12)[:41], texts[1] + texts[1]]


LONG = prompts(5, 31, 34, 271, 71)  # around blocks of keys
SHORT = prompts(5, 34)


def answer(engine, requests):
    results = dict(engine.serve(requests))
    for result in results.values():
        if isinstance(result, Exception):
            raise result
    return [results[i] for i in range(len(requests))]


def bits(results):
    """Tokens, scores and log-probabilities of all outputs; floats compare bit by bit, as none is NaN."""
    fields = operator.attrgetter("token_ids", "score", "logprob", "token_logprobs", "top_logprobs")
    return [[*map(fields, result.outputs)] for result in results]


def run(engine, requests):
    return bits(answer(engine, requests))


def check(folder, asked, preempted, chunk=19, **options):
    """Requests have the answers that each has alone on one thread, in every other way."""
    load = lambda **more: Engine.load(folder, **{"kv_memory": CACHE, "threads": 1} | options | more)  # noqa: E731
    engine = load()
    results = [answer(engine, [request])[0] for request in asked]
    alone = bits(results)
    assert run(engine, asked) == alone
    whole, engine.runner.budget = engine.runner.budget, chunk
    assert run(engine, asked) == alone
    engine.runner.budget = whole
    texts = [[*r.prompt, *o.token_ids] for r, result in zip(asked, results, strict=True) for o in result.outputs]
    paths = {tuple(text[:n]) for text in texts for n in range(1, len(text) + 1)}
    engine.drafts = EagerDrafts(foresight(paths, noise=1))  # whatever it costs
    drafted = answer(engine, asked)
    assert bits(drafted) == alone
    assert isinstance(asked[0].search, OWN_DRAFTS) or sum(r.stats["drafted_accepted"] for r in drafted) > 0
    warm, steady = load(threads=2, prefix_cache="on"), engine.shape.steady_length or float("inf")
    assert run(warm, asked) == alone
    again = answer(warm, asked)
    assert bits(again) == alone
    assert all(r.stats["reused_tokens"] for r in again if PAGE + 1 < r.stats["prompt_tokens"] <= steady)
    assert in_need(load, asked, results, preempted) == alone


OWN_DRAFTS = (ADED, DSBD, Speculative)  # beside which no others ride along


def in_need(load, asked, results, preempted):
    """The bits of answers in a cache that holds the largest of the searches, but not all of them at once."""
    engine, peak = load(), max(result.stats["live_nodes_peak"] for result in results)
    for tokens in itertools.accumulate(itertools.repeat(1.3, 32), float.__mul__, initial=1.3 * (peak + 32)):
        preempted.clear()
        try:
            found = run(load(kv_memory=int(tokens) * engine.pool.bytes_per_token), asked)
        except KVMemoryError:
            continue
        assert preempted, tokens
        return found
    raise AssertionError("no size suits")


def requests(texts, *searches, new=16, **options):
    return [Request(text, search, new, ignore_eos=True, logprobs=2, **options) for search in searches for text in texts]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dtypes_and_weights(options, folder, preempted):
    check(folder, requests(LONG, Greedy(), Trie(beams=4, num_return_sequences=4)), preempted, **options)


def test_drafts_of_a_search_change_no_bits(folder):
    """ADED without a temperature is greedy search; n-grams of the text ride along under others."""
    engine = Engine.load(folder, kv_memory=CACHE, threads=1, **FLOAT32)
    alone = [run(engine, [request])[0] for request in requests(LONG, Greedy())]
    assert run(engine, requests(LONG, ADED(nodes=6))) == alone
    engine.drafts = EagerDrafts(NGramDrafter())
    drafted = answer(engine, requests(LONG, Greedy()))
    assert bits(drafted) == alone and sum(r.stats["drafted_accepted"] for r in drafted) > 0


def texts_of(variant):
    """A golden model's prompts, one of each length, and one that begins as the longest."""
    texts = {len(run["prompt_ids"]): run["prompt_ids"] for run in golden(variant)["runs"]}
    return [*texts.values(), [*max(texts.values(), key=len)[:-2], 7]]


MODELS = [v for v in VARIANTS if v in KINDS or v.endswith("/plain") or v.startswith(("experts/", "quantized/"))]


@pytest.mark.full(unless=lambda variant, options: variant in KINDS and options == FLOAT32)
@pytest.mark.parametrize(
    ("variant", "options"),
    [(variant, FLOAT32) for variant in MODELS] + [(v, options) for v in KINDS for options in (CACHE8, *WEIGHTS)],
    ids=str,
)
def test_golden_models(variant, options, preempted):
    asked = requests(texts_of(variant), Greedy(), Trie(beams=3))
    check(GOLDEN / variant, asked, preempted, chunk=7, **options)


@pytest.mark.full(unless=lambda name: name in ("samples", "dsbd-ngrams"))
@pytest.mark.parametrize("name", SEARCHES)
def test_searches(name, folder, draft, preempted):
    search = SEARCHES[name]
    options = {"reward": reward} if isinstance(search, BoN) else {}
    beside = {"draft": draft} if isinstance(search, OWN_DRAFTS) else {}
    check(folder, requests(SHORT, search, new=10, **options), preempted, **FLOAT32, **beside)


@pytest.mark.full(unless=lambda name: name == "biases")
@pytest.mark.parametrize("name", RULES)
def test_rules(name, folder, preempted):
    asked = requests(SHORT, Greedy(), Trie(beams=3), Sample(seed=4), new=10, **RULES[name])
    check(folder, asked, preempted, **FLOAT32)


ADAPTED = json.loads((GOLDEN / "adapters" / "golden.json").read_text())


@pytest.mark.full(unless=lambda model, options: model in ("llama/gqa", "lfm2/plain") and options == FLOAT32)
@pytest.mark.parametrize("options", [FLOAT32, *WEIGHTS], ids=str)
@pytest.mark.parametrize("model", dict.fromkeys(entry["model"] for entry in ADAPTED.values()))
def test_adapters_in_one_batch(model, options, preempted):
    names = [name for name in ADAPTED if ADAPTED[name]["model"] == model]
    searches = Greedy(), Trie(beams=3)
    asked = [r for name in (*names, "none") for r in requests(texts_of(model), *searches, new=8, adapter=name)]
    check(GOLDEN / model, asked, preempted, chunk=7, adapters=[GOLDEN / "adapters" / name for name in names], **options)


BLOCKS = [
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
    "MXFP4", "IQ2_XS", "IQ3_S", "TQ2_0",
]  # fmt: skip


@pytest.mark.full(unless=lambda format, variant: format in ("Q4_K", "Q6_K") and variant == "llama/gqa")
@pytest.mark.parametrize("variant", ["llama/gqa", "experts/qwen3"])
@pytest.mark.parametrize("format", BLOCKS)
def test_blocks_of_files(format, variant, tmp_path, preempted):
    pytest.importorskip("gguf", reason="needs the package gguf: pip install gguf")
    from tests.models.gguf import files

    source = files.random(tmp_path / "source", variant, **files.WIDE)
    path = files.File(source, files.gguf.GGMLQuantizationType[format]).write(tmp_path / "file.gguf")
    asked = requests(texts_of(variant), Greedy(), Trie(beams=4), new=12)
    check(path, asked, preempted, dtype="bfloat16")

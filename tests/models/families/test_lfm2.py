"""LFM2: searches over short convolutions against fresh evaluations, its cache, configs that are refused."""

import json
from itertools import chain
from pathlib import Path

import pytest
import torch

from engine import Engine
from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.engine import Session
from engine.load.budget import plan
from engine.load.options import LoadOptions
from engine.load.sizes import Workload
from engine.step.runner import Runner
from kernels import cpp
from models.checkpoint.fields import Fields
from models.checkpoint.headers import Checkpoint
from models.checkpoint.sizes import measure
from models.config import ShortConvs
from models.errors import CheckpointError
from models.families.lfm2 import LFM2
from models.shape import ModelShape
from search import ADED, DSBD, ULTS, BeamSample, Greedy, Sample, SBoN, Speculative, Trie
from tests.engine.step.test_driver import Bench, finish, raise_errors, walks_of
from tests.invariants import check_pool
from tests.marks import IMPLS
from tests.models.copies import changed

GOLDEN = Path(__file__).parents[2] / "golden/lfm2"
SEARCHES = [
    *(Greedy(), Trie(beams=15), Sample(seed=4, temperature=0.8), BeamSample(beams=15, seed=5), SBoN(n=4, seed=2)),
    *(ULTS(seed=3), ADED(), DSBD(width=4, seed=1), Speculative(seed=6)),
]
PROMPTS = [[7], [9, 4], [(7 * i * i + 3 * i) % 101 + 3 for i in range(40)]]


def reward(prompt, texts):
    return [len(text) % 7 for text in texts]


@pytest.fixture(scope="module")
def engine():
    """Convolutions in the target (5 taps, biases) and in the draft (3 taps)."""
    draft = GOLDEN / "plain"
    return Engine.load(GOLDEN / "bias", dtype="float32", kv_memory="4M", draft=draft, reward=reward)


def poison(pool):
    """NaN in every slot but the one that is zero for ever."""
    for cache in chain(*pool.cache.groups):
        if cache.dtype.is_floating_point:
            cache[:, :, 1:] = float("nan")


def note_answers(engine, monkeypatch):
    """The log-probabilities that a model gives from now on, by sequence."""
    found, evaluate = {}, engine.runner.evaluate

    def noted(work):
        answers, rows = evaluate(work), []
        for chunk in work.chunks:
            tree, end = chunk.tree, chunk.tree.trunk.cached
            rows += [tuple(tree.trunk.tokens[: i + 1]) for i in range(end - chunk.trunk_tokens, end)]
            rows += [(*tree.trunk.tokens[: tree.prompt_length], *tree.path(node)) for node in chunk.nodes]
        found.update((rows[i], row.clone()) for i, row in zip(work.asked, answers[0], strict=True))
        return answers

    monkeypatch.setattr(Runner, "only_sums", False)  # searches that want top sums get rows as well
    monkeypatch.setattr(engine.runner, "evaluate", noted)
    return found


@pytest.mark.parametrize("search", SEARCHES, ids=lambda search: type(search).__name__)
def test_every_answer_equals_that_of_a_fresh_evaluation(engine, search, monkeypatch):
    models = engine, engine.companions["draft"]
    found = []
    for model in models:
        poison(model.pool)
        found.append(note_answers(model, monkeypatch))
    results = engine.generate(PROMPTS, search, max_new_tokens=8, ignore_eos=True)
    assert all(len(result.outputs[0].token_ids) == 8 for result in results) and found[0]
    for model, answers in zip(models, found, strict=True):
        check_pool(model.pool, [])
        known = {}
        for sequence in sorted(answers, key=len, reverse=True):
            if sequence not in known:
                logp_TV = model.logits(list(sequence)).log_softmax(-1)
                known.update((sequence[: i + 1], row) for i, row in enumerate(logp_TV))
            torch.testing.assert_close(answers[sequence], known[sequence], rtol=0, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("bias", {"page_size": 4}),
        ("bias", {"page_size": 1, "budget": 1}),
        ("one_tap", {"page_size": 16, "budget": 7}),
        ("plain", {"page_size": 2, "token_buckets": (8, 24, 64, 256), "word_buckets": (1, 3, 9)}),
    ],
)
def test_trees_that_grow_and_shrink_in_a_pool_of_nan(variant, options, impl):
    """Random walks: pruning, promotion, reuse of slots, several trees in a pass, prompts of one token and of several
    passes."""
    bench = Bench(Engine.load(GOLDEN / variant, dtype="float32", kv_memory="1M"), "float32", 104)
    walks = walks_of(20, 4, steps=9)
    raise_errors(finish(bench.driver(impl=impl, **options), walks))
    for walk in walks:
        bench.check(walk.records)


def test_a_promoted_stem_keeps_its_inputs():
    shape = ModelShape.of(LFM2.read(Checkpoint.open(GOLDEN / "plain").fields))
    pool = PagePool(shape, 60, 4)
    _, [rows_LGSE] = pool.cache.groups
    assert rows_LGSE.shape == (2, 1, 62 * 4 - 4 + 4 * (pool.reserved - 1), 24) and len(pool.cache.k_LGSD) == 1
    rows_LGSE.copy_(torch.randn(rows_LGSE.shape))
    tree = TokenTree(pool, [1, 2, 3])
    stem, other = tree.grow([tree.root] * 2, [7, 8])
    leaves = tree.grow([stem] * 2, [9, 10])
    *_, kept, _, _, _ = tree.allocate(*tree.pending([stem, other, *leaves]))
    before = rows_LGSE[:, :, kept].clone()
    tree.keep(leaves)
    [*_, last] = [slot + i for slot, n in tree.trunk_runs() for i in range(n)]
    assert last != kept and rows_LGSE[:, :, last].equal(before)


def test_bytes():
    """Two convolutions keep a row of 24 each, the layer of attention 2 x 2 heads of 6; one slot for all of them."""
    checkpoint = Checkpoint.open(GOLDEN / "plain")
    shape = measure(checkpoint, torch.float32, torch.device("cpu")).shape
    for dtype, expected in ((torch.float32, 2 * 24 * 4 + 24 * 4), (torch.bfloat16, 2 * 24 * 2 + 24 * 2)):
        assert shape.kv_bytes_per_token(dtype) == expected
    assert shape.kv_bytes_per_token(torch.int8) == 2 * 24 * 2 + 4 * (6 + 2)  # inputs stay bfloat16
    for dtype in (torch.float32, torch.int8):
        pool = PagePool(shape, 50, 16, dtype)
        held = sum(cache.nbytes for cache in chain(*pool.cache.groups))
        assert held == (pool.pages + pool.reserved) * pool.page_bytes


def test_the_plan_counts_what_is_loaded():
    engine = Engine.load(GOLDEN / "bias", dtype="float32", kv_memory="1M")
    planned = plan(LoadOptions(GOLDEN / "bias", dtype="float32"), Workload())
    assert planned.token == engine.pool.bytes_per_token
    tensors = [x for x in engine.runner.model.layers.modules() for x in vars(x).values() if isinstance(x, torch.Tensor)]
    assert planned.lines["weights"] >= sum(x.nbytes for x in tensors)


def test_sequences_share_slots_as_those_of_attention_do(engine):
    """15 beams take a slot for each token of their tree, not a state for each beam."""
    [result] = engine.generate([PROMPTS[2]], Trie(beams=15), max_new_tokens=8, ignore_eos=True)
    stats = result.stats
    assert stats["kv_bytes_peak"] == stats["live_nodes_peak"] * stats["kv_bytes_per_token"]
    assert stats["live_nodes_peak"] < 40 + 15 * 8


@pytest.mark.parametrize("impl", IMPLS)
def test_an_int8_cache(impl, monkeypatch):
    options = {"dtype": "float32", "kv_memory": "2M"}
    plain, eight = (Engine.load(GOLDEN / "bias", kv_dtype=kv, **options) for kv in ("auto", "int8"))
    monkeypatch.setattr(eight.runner, "impl", "reference")
    defined = eight.logits(PROMPTS[2])
    monkeypatch.setattr(eight.runner, "impl", impl)
    theirs, found = plain.logits(PROMPTS[2]), eight.logits(PROMPTS[2])
    spread = theirs.max() - theirs.min()
    assert (found - defined).abs().max() <= 5e-3 * spread
    assert 0 < (found - theirs).abs().max() <= 0.1 * spread
    [result] = eight.generate(PROMPTS[:1], Trie(beams=15), max_new_tokens=6, ignore_eos=True)
    assert len(result.outputs[0].token_ids) == 6 and eight.pool.cache.groups[1][0].dtype == torch.bfloat16


@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.skipif(bool(cpp.why_not()), reason="no C++ kernels")
def test_quantised_weights(quant):
    engine = Engine.load(GOLDEN / "plain", dtype="float32", kv_memory="1M", quant=quant)
    [result] = engine.generate(PROMPTS[2:], Trie(beams=15), max_new_tokens=5, ignore_eos=True)
    for output in result.outputs:
        ids = [*PROMPTS[2], *output.token_ids]
        logp_TV = engine.logits(ids).log_softmax(-1)[len(PROMPTS[2]) - 1 : -1]
        fresh = logp_TV.gather(1, torch.tensor(output.token_ids).unsqueeze(1)).sum()
        assert output.logprob == pytest.approx(fresh.item(), abs=2e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes(dtype):
    engine = Engine.load(GOLDEN / "bias", dtype=dtype, kv_memory="1M")
    [result] = engine.generate(PROMPTS[2:], Trie(beams=3), max_new_tokens=5, ignore_eos=True)
    assert len(result.outputs[0].token_ids) == 5
    exact = Engine.load(GOLDEN / "bias", dtype="float64", kv_memory="1M").logits(PROMPTS[2])
    spread = exact.max() - exact.min()
    assert (engine.logits(PROMPTS[2]) - exact).abs().max() < 0.05 * spread


def test_a_conversation_takes_over_the_prefix():
    engine = Engine.load(GOLDEN / "bias", dtype="float32", kv_memory="1M")
    session, text = Session(engine), list(PROMPTS[2])
    for turn in range(3):
        options = {"max_new_tokens": 6, "ignore_eos": True}
        *_, done = session.stream(text, Trie(beams=15), **options)
        again, [fresh] = done.result, engine.generate([text], Trie(beams=15), **options)
        assert [o.token_ids for o in again.outputs] == [o.token_ids for o in fresh.outputs]
        assert [o.logprob for o in again.outputs] == pytest.approx([o.logprob for o in fresh.outputs], abs=1e-4)
        assert (again.stats["reused_tokens"] > 30) == (turn > 0)
        text += [*again.outputs[0].token_ids, 9, 8, 7]
        if turn == 1:
            text = [*text[:39], 77, 78]  # leaves the earlier turn within reach of the taps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Lfm4ForCausalLM"]}, "'Lfm4ForCausalLM' is not supported"),
        ({"layer_types": ["conv", "full_attention"]}, "layer_types: expected 3 of conv and full_attention"),
        ({"layer_types": ["conv", "full_attention", "linear_attention"]}, "layer_types: expected 3 of"),
        ({"layer_types": None, "full_attn_idxs": [3]}, "full_attn_idxs: expected numbers of layers below 3"),
        ({"layer_types": None, "full_attn_idxs": "1"}, "full_attn_idxs: expected numbers of layers below 3"),
        ({"layer_types": ["full_attention", "conv", "conv"]}, "missing model.layers.0.self_attn.q_proj.weight"),
        ({"conv_L_cache": 0}, "conv_L_cache: expected a whole number"),
        ({"conv_L_cache": 4}, r"conv.conv.weight in .*expected \[24, 1, 4\]"),
        ({"conv_bias": True}, "missing model.layers.0.conv.in_proj.bias"),
        ({"block_multiple_of": 0}, "block_multiple_of: expected a whole number"),
        ({"block_auto_adjust_ff_dim": False}, r"feed_forward.w1.weight in .*expected \[48, 24\]"),
        ({"block_ffn_dim_multiplier": "1"}, "block_ffn_dim_multiplier: expected a number"),
        ({"tie_embedding": False}, "missing lm_head.weight"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads 4"),
    ],
)
def test_refusals_name_what_is_wrong(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        Engine.load(changed(tmp_path, "lfm2/plain", changes), dtype="float32")


def test_defaults_are_those_of_transformers(tmp_path):
    absent = dict.fromkeys(("rope_parameters", "block_ffn_dim_multiplier", "norm_eps", "conv_L_cache", "conv_bias"))
    c = LFM2.read(Checkpoint.open(changed(tmp_path, "lfm2/plain", absent)).fields)
    assert (c.rope and c.rope.theta, c.norm_eps, c.convs, c.mlp_width) == (
        1e6,
        1e-5,
        ShortConvs((3, 0, 3), c.width),
        32,
    )
    assert c.tied
    c = LFM2.read(Fields(json.loads((GOLDEN / "plain/config.json").read_text()) | {"layer_types": None}, "config.json"))
    assert not c.convs and not ModelShape.of(c).kept  # attention in all layers


def test_a_batch_of_prompts():
    """Prompts shorter than the taps, and one longer than a pass, share passes."""
    engine = Engine.load(GOLDEN / "bias", dtype="float32", kv_memory="2M")
    prompts = [*PROMPTS, [3 + i % 90 for i in range(110)]]
    together = engine.generate(prompts, Trie(beams=15), max_new_tokens=6, ignore_eos=True)
    engine.runner.budget = 17
    for prompt, one in zip(prompts, together, strict=True):
        [alone] = engine.generate([prompt], Trie(beams=15), max_new_tokens=6, ignore_eos=True)
        assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in one.outputs]

"""Passes in buckets, from fixed memory, repeated instead of run: the same results, whatever else is in that memory.

Without a GPU the graph is a stand-in that runs the function again; that real ones do as much is checked by `make gpu`
(tests/test_gpu.py).
"""

import contextlib
import gc
import importlib.util
import itertools
import json
import logging
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from engine import Engine
from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.errors import UsageError
from engine.load.loading import LoadedModel
from engine.step.graphs import TOKENS, TREES, WORDS, GraphRunner, _Recorder, make_runner
from engine.step.packing import Chunk, pack
from engine.step.runner import Launched, PassWork, Runner
from kernels.kv_kinds import parts
from kernels.layout import NULL_SLOT
from search import ULTS, BoN, Greedy, Sample, SBoN, Trie
from tests.invariants import check_pool
from tests.marks import needs_interpreter

GOLDEN = Path(__file__).parents[2] / "golden" / "llama"


FAMILIES = [  # of each a variant with windows, layers without rotation, or whatever else is its own
    *("gemma/one", "gemma/two", "gemma/three", "granite/plain", "hunyuan/plain", "lfm2/plain", "mistral/ministral"),
    *(
        "mistral/ministral3",
        "olmo/plain",
        "olmo/olmo3",
        "qwen2/windows",
        "qwen3/windows",
        "qwen3_5/bias",
        "smollm3/windows",
    ),
    *("stablelm/parallel", "wrapped/gemma3", "relatives/nanochat", "relatives/granite_swa", "relatives/cohere_moe"),
    *(f"qwen3_5/recurrent{variant}" for variant in ("", "_interval", "_taps")),
    *("granite/hybrid", "granite/hybrid_rope", "granite/scans", "granite/scans_groups", "falcon_h1/plain"),
    *("llama4/plain", "llama4/steps", "relatives/dbrx", "relatives/olmoe_clipped", "relatives/flint"),
    *("alibi/bloom", "alibi/bloom_normed", "alibi/mpt_clipped", "alibi/falcon", "relatives/xglm", "relatives/gpt"),
    *("modernbert/plain", "cohere/compass", "laguna/plain", "relatives/mllama"),
    *("kimi_linear/plain", "bailing_hybrid/plain", "zamba2/plain"),
]
ONE_PER_OPTION = "gemma/two", "granite/plain", "lfm2/plain", "qwen3_5/bias", "smollm3/windows", "stablelm/parallel"
ONE_PER_OPTION += "qwen3_5/recurrent", "granite/scans", "alibi/falcon"


class Recorder:
    """Repeats by running again."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def __call__(self, run):
        self.recorded += 1

        def replay():
            self.replayed += 1
            run()

        return replay


def engines(variant, impl, kv_dtype="auto", **options):
    """A plain engine and one in graphs, of pages of 16 slots full of NaN."""
    plain = Engine.load(GOLDEN / variant, dtype="float32", kv_dtype=kv_dtype, device="cpu", kv_memory=1 << 22)
    pool = PagePool(plain.shape, 200, 16, plain.pool.cache.k_LGSD.dtype)
    for states in pool.cache.recurrent:
        states[:, 1:] = float("nan")
    for cache in itertools.chain(*pool.cache.groups):
        cache.fill_(-1 if cache.dtype == torch.int8 else float("nan"))  # a scale of such bytes is NaN
        for part in parts(cache):
            part[:, :, NULL_SLOT] = 0
    runner = GraphRunner(plain.runner.model, pool, plain.runner.vocab_size, impl=impl, record=Recorder(), **options)
    runner.host.fill_(2**31 - 1)
    runner.memory.fill_(2**31 - 1)
    return plain, Engine(LoadedModel(runner, plain.shape, plain.model.tokenizer, eos_token_ids=plain.eos_token_ids))


def check(plain, graphs, prompts, search, **options):
    wanted = plain.generate(prompts, search, **options)
    got = graphs.generate(prompts, search, **options)
    for w, g in zip(wanted, got, strict=True):
        assert [o.token_ids for o in g.outputs] == [o.token_ids for o in w.outputs]
        assert [o.logprob for o in g.outputs] == pytest.approx([o.logprob for o in w.outputs], abs=1e-3)
    check_pool(graphs.pool, [])


@pytest.mark.parametrize("variant", ["gqa", "dynamic", "../lfm2/bias"])
@pytest.mark.parametrize("search", [Greedy(), Trie(beams=5), Sample(seed=3, num_return_sequences=3)], ids=repr)
def test_graphs_give_what_plain_passes_give(variant, search):
    plain, graphs = engines(variant, "reference")
    prompts = [[7, 20, 33], list(range(5, 60)), [9], list(range(80, 97))]
    check(plain, graphs, prompts, search, max_new_tokens=12)
    check(plain, graphs, prompts[1:2], search, max_new_tokens=12)
    record = graphs.runner.record
    assert record.recorded == len([s for s in graphs.runner._steps.values() if s.replay])
    assert 0 < record.recorded < record.replayed


@pytest.mark.parametrize("scores", ["model", "renormalised"])
@pytest.mark.parametrize("rules", [{"choices": [[10, 11, 12, 13], [10, 14]]}, {"repetition_penalty": 2.0}], ids=str)
def test_rows_are_edited_after_graphs(rules, scores):
    """A pass whose logits are edited is none."""
    plain, graphs = engines("gqa", "reference")
    options = {"max_new_tokens": 6, "eos_token_ids": [2], "constraint_scores": scores, **rules}
    check(plain, graphs, [[7, 20, 33], list(range(5, 60))], Trie(beams=3), **options)


def test_few_graphs_are_enough():
    """Depth, prompt and position make no new ones."""
    _, graphs = engines("plain", "reference")
    graphs.generate([list(range(3, 30))], Trie(beams=4), max_new_tokens=30, ignore_eos=True)
    made = set(graphs.runner._steps)
    graphs.generate([list(range(30, 12, -1))], Trie(beams=4), max_new_tokens=60, ignore_eos=True)
    assert all(words == WORDS[0] and trees == 1 for _, words, trees in made)
    assert len(set(graphs.runner._steps) - made) <= 1


def test_larger_passes_run_as_they_are_and_say_so_once(caplog, monkeypatch):
    monkeypatch.setattr("engine.step.graphs.TOKENS", (1, 2, 4))
    plain, graphs = engines("plain", "reference")
    with caplog.at_level(logging.INFO, "engine.step.graphs"):
        check(plain, graphs, [list(range(5, 35)), list(range(8, 50))], Trie(beams=3), max_new_tokens=5)
    assert [r.message for r in caplog.records] == [
        "without a CUDA graph: a pass that reads a prompt",
        "without a CUDA graph: a pass of more than 4 tokens",
    ]


def test_what_is_no_graph(monkeypatch):
    _, graphs = engines("plain", "reference")
    runner, tree = graphs.runner, TokenTree(graphs.pool, [5])

    def unfit(chunks, asked):
        return runner._unfit(PassWork(chunks, asked))

    root = [Chunk(tree, 1, [], tree.allocate(1, []))]
    assert unfit(root, [0]) == "" and "prompt" in unfit(root, [])
    assert "prompt" in unfit([Chunk(tree, 2, [], [2, 3])], [0])
    tree.trunk.adapter = 1
    assert "with adapters" in unfit(root, [0])
    tree.trunk.adapter = 0
    assert f"more than {TREES[-1]} trees" in unfit(root * (TREES[-1] + 1), [0])
    nodes = tree.grow([tree.root] * 40, range(6, 46))
    leaves = [Chunk(tree, 0, nodes, tree.allocate(0, nodes))]
    assert unfit(leaves, [0]) == "" and "more than 512 tokens" in runner._unfit(PassWork(leaves * 13, [0]))
    monkeypatch.setattr("engine.step.graphs.TABLES", 64)
    assert unfit(leaves * 4, [0]) == "" and "2048 branch slots" in runner._unfit(PassWork(leaves * 5, [0]))
    monkeypatch.setattr("engine.step.graphs.WORDS", (1,))
    assert "more than 32 branch slots" in unfit(leaves, [0])
    runner.tokens = 1, 39
    assert "more than 39 tokens" in unfit(leaves, [0])
    tree.release()


def test_buckets():
    """Padding tokens belong to the last tree and see nothing; padding trees have no tokens."""
    _, graphs = engines("plain", "reference")
    trees = [TokenTree(graphs.pool, list(range(5, 5 + n))) for n in (3, 20, 4)]
    chunks = [Chunk(t, n, [], t.allocate(n, [])) for t, n in zip(trees, (3, 20, 4), strict=True)]
    x = pack(chunks, 16, token_buckets=TOKENS, word_buckets=WORDS, tree_buckets=TREES, impl="triton").layout
    assert x.token_starts.tolist() == [0, 3, 23, 32, 32] and x.trunk_len_R.tolist() == [3, 20, 4, 0]
    assert x.trunk_seen_T[27:].eq(0).all() and x.branch_slots_RW.eq(NULL_SLOT).all()
    assert x.trunk_pages_RP.shape == (4, 2) and x.ancestry_TC.shape == (32, WORDS[0]) and x.impl == "triton"
    for tree in trees:
        tree.release()


@pytest.mark.parametrize(
    ("search", "prompts"),
    [
        (Trie(beams=15), 16),
        (Trie(beams=4), 16),
        (Sample(num_return_sequences=16, seed=1), 1),
        (BoN(n=16, seed=1), 1),
        (SBoN(n=16, tau=8, seed=1), 1),
        (ULTS(prior="dirichlet"), 1),
    ],
    ids=["16 x trie 15", "16 x trie 4", "sample 16", "best of 16", "speculative best of 16", "ults"],
)
def test_which_passes_are_graphs(search, prompts):
    """All but those that read a prompt, and few buckets."""
    _, graphs = engines("../../../models/demo/target" if isinstance(search, BoN) else "plain", "reference")
    graphs.add("reward", lambda prompt, texts: [float(len(text)) for text in texts])
    reasons = Counter()
    unfit = graphs.runner._unfit
    graphs.runner._unfit = lambda *pass_: reasons.update([reason := unfit(*pass_)]) or reason
    graphs.generate([[5 + i, 7, 9] for i in range(prompts)], search, max_new_tokens=12, ignore_eos=True)
    assert reasons.keys() <= {"", "a pass that reads a prompt"} and reasons["a pass that reads a prompt"] <= 2
    assert reasons[""] >= 8 and len(graphs.runner._steps) <= 8, (reasons, graphs.runner._steps.keys())


def test_words_of_other_passes_are_not_seen():
    """Graphs share memory; a tree with few branch slots after one with many, and the other way round."""
    plain, graphs = engines("plain", "reference")
    for prompts, beams, new in (([[5, 6]], 12, 30), ([[7, 8, 9]], 2, 8), ([[5, 6], [8]], 5, 20), ([[5, 6]], 12, 8)):
        check(plain, graphs, prompts, Trie(beams=beams), max_new_tokens=new, ignore_eos=True)


def test_a_graph_that_cannot_be_recorded_is_done_without(caplog):
    plain, graphs = engines("plain", "reference")
    recorder, failed = graphs.runner.record, []

    def record(run):
        if not failed:
            failed.append(run)
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        return recorder(run)

    graphs.runner.record = record
    with caplog.at_level(logging.WARNING, "engine.step.graphs"):
        check(plain, graphs, [[7, 20, 33]], Trie(beams=4), max_new_tokens=12, ignore_eos=True)
    check(plain, graphs, [[7, 20, 33]], Trie(beams=9), max_new_tokens=12, ignore_eos=True)
    assert recorder.recorded >= 1 and len(failed) == 1
    [told] = [r.message for r in caplog.records]
    assert "the bucket of tokens 4, words 16, trees 1" in told and told.endswith(
        "cannot be recorded: operation not permitted when stream is capturing"
    )


def test_graphs_are_bounded(caplog, monkeypatch):
    """In number, the least recently used goes; in memory, no more are recorded; log-probabilities by rows."""
    monkeypatch.setattr("engine.step.graphs.MOST_GRAPHS", 2)
    plain, graphs = engines("plain", "reference")
    runner = graphs.runner
    for beams in (1, 3, 7, 3):
        check(plain, graphs, [[7, 20, 33]], Trie(beams=beams), max_new_tokens=6, ignore_eos=True)
        assert len(runner._steps) <= 2
    assert [*runner._steps][-1][0] == 4
    runner.record.used = runner.allowed
    recorded = runner.record.recorded
    with caplog.at_level(logging.WARNING, "engine.step.graphs"):
        check(plain, graphs, [[7, 20, 33]], Trie(beams=12), max_new_tokens=12, ignore_eos=True)
    assert runner.record.recorded == recorded and "512 MiB already" in caplog.text
    monkeypatch.setattr("engine.step.graphs.MEMORY", 64 * 4 * plain.shape.vocab_size * 50)
    assert engines("plain", "reference")[1].runner.tokens[-1] == 48


def test_graphs_can_be_switched_off():
    plain, _ = engines("plain", "reference")
    pool = PagePool(plain.shape, 4, 16, torch.float32, "meta")
    if importlib.util.find_spec("triton"):
        off = make_runner(None, pool, 9, graphs=False)
        assert type(off) is Runner and off.impl == "triton" and off.budget == 2048
    with pytest.raises(UsageError, match="graphs: expected on or off, got 'maybe'"):
        Engine.load(GOLDEN / "plain", graphs="maybe")


class Cuda:
    """Stands in for what a recorder uses of torch.cuda: a device of 100 bytes of which 30 lie in torch's cache."""

    def __init__(self):
        self.stream_now, self.taken, self.cached, self.pools = "main", 10, 30, 0
        self.failing, self.streams, self.captured = False, 0, []

    def memory_reserved(self):
        return self.taken + self.cached

    def empty_cache(self):
        self.cached = 0

    def graph_pool_handle(self):
        self.pools += 1
        return self.pools

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.stream_now = self.stream_now, stream
        try:
            yield
        finally:
            self.stream_now = before

    def Stream(self):
        self.streams += 1
        return f"capture {self.streams}"

    @contextlib.contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        self.empty_cache()
        before, self.stream_now = self.stream_now, stream
        self.captured.append(stream)
        yield
        if self.failing:
            raise RuntimeError("operation not permitted")  # torch leaves the stream as it is then
        self.taken += 5
        self.stream_now = before


def test_what_recording_takes_and_leaves(monkeypatch):
    cuda = Cuda()
    for name in ("memory_reserved", "empty_cache", "graph_pool_handle", "stream", "Stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: cuda.stream_now)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: "replayed"))
    recorder = _Recorder()
    assert recorder(lambda: None)() == "replayed" and recorder.used == 5 and recorder.pool == 1
    _Recorder()(lambda: None)
    recorder(lambda: None)
    assert cuda.captured == ["capture 1", "capture 2", "capture 1"]  # no recorder shares a stream with another
    cuda.failing, recorder.pool = True, 0
    with pytest.raises(RuntimeError, match="not permitted"):
        recorder(lambda: None)
    assert cuda.stream_now == "main" and recorder.pool == 3


def test_an_engine_that_is_dropped_gives_its_memory_back_at_once():
    """The runner has the graphs; they do not have it, so that no collection of cycles has to come first."""
    _, graphs = engines("gqa", "reference")
    graphs.generate([[5, 6, 7]], Trie(beams=3), max_new_tokens=6, ignore_eos=True)
    assert graphs.runner.record.replayed > 0
    pool, runner = weakref.ref(graphs.pool), weakref.ref(graphs.runner)
    gc.collect()
    gc.disable()
    try:
        del graphs, _
        assert pool() is None and runner() is None
    finally:
        gc.enable()


@needs_interpreter
@pytest.mark.parametrize(
    ("variant", "search"),
    [
        ("gqa", "trie"),
        ("../lfm2/bias", "greedy"),
        pytest.param("gqa", "greedy", marks=pytest.mark.full),
        pytest.param("../lfm2/bias", "trie", marks=pytest.mark.full),
        *(
            pytest.param(variant, search, marks=pytest.mark.full)
            for variant in ("../qwen3_5/recurrent", "../granite/hybrid", "../granite/scans")
            for search in ("greedy", "trie")
        ),
    ],
)
def test_triton_kernels_find_the_golden_tokens(variant, search):
    golden = json.loads((GOLDEN / variant / "golden.json").read_text())
    run = min((r for r in golden["runs"] if r["search"] == search), key=lambda r: r["max_new_tokens"])
    plain, graphs = engines(variant, "triton")
    names = ("beams", "length_penalty", "early_stopping", "num_return_sequences") if search == "trie" else ()
    beams = {name: run[name] for name in names}
    options = {n: run[n] for n in ("max_new_tokens", "eos_token_ids", "ignore_eos")}
    [result] = graphs.generate([run["prompt_ids"]], (Trie if beams else Greedy)(**beams), **options)
    assert [o.token_ids for o in result.outputs] == [o["token_ids"] for o in run["outputs"]]
    ids = run["prompt_ids"]
    torch.testing.assert_close(graphs.logits(ids), plain.logits(ids), rtol=1e-4, atol=1e-4)


@needs_interpreter
def test_every_pass_of_a_graph_lists_the_tasks_of_attention(monkeypatch):
    """Once for all layers, and within what is recorded: the lengths of trees are others at each replay."""
    from kernels.tree_attention import triton

    listed, passes, real = [], [], triton.tasks
    _, graphs = engines("gqa", "triton")
    assert graphs.pool.cache.k_LGSD.shape[0] > 1

    def counted(p, compute=graphs.runner.compute):
        before = len(listed)
        compute(p)
        passes.append(len(listed) - before)

    monkeypatch.setattr(graphs.runner, "compute", counted)
    monkeypatch.setattr(triton, "tasks", lambda *given, **sizes: (listed.append(1), real(*given, **sizes))[1])
    graphs.generate([[7, 20, 33]], Trie(beams=2), max_new_tokens=5, ignore_eos=True)
    assert passes == [1, 1, 1, 1] and graphs.runner.record.replayed == 3


@needs_interpreter
@pytest.mark.full(unless=lambda variant: variant in ONE_PER_OPTION)
@pytest.mark.parametrize("variant", FAMILIES)
def test_triton_kernels_compute_the_golden_logits(variant):
    """One pass of each family, past the end of its windows, or at the end of a recurrent layer's block."""
    folder = GOLDEN.parent / variant
    _, graphs = engines(folder, "triton")
    entries = json.loads((folder / "golden.json").read_text())["logits"]
    entry = min((e for e in entries if len(e["prompt_ids"]) >= 17), key=lambda e: len(e["prompt_ids"]))
    expected_TV = load_file(folder / "golden.safetensors")[entry["tensor"]]
    error_T = (graphs.logits(entry["prompt_ids"])[-entry["rows"] :] - expected_TV).abs().amax(-1)
    assert (error_T / (expected_TV.amax(-1) - expected_TV.amin(-1))).max() < 1e-5


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=needs_interpreter)])
def test_graphs_over_an_int8_cache(impl):
    plain, graphs = engines("gqa", impl, "int8", dtype=torch.float32)
    check(plain, graphs, [[7, 20, 33], list(range(5, 40))], Trie(beams=3), max_new_tokens=5)
    assert graphs.runner.record.replayed


def test_which_runner(monkeypatch):
    plain, _ = engines("plain", "reference")
    assert type(make_runner(None, plain.pool, 9)) is Runner
    if importlib.util.find_spec("triton"):
        for head, dtype in ((8, torch.float64), (264, torch.float32)):
            pool = PagePool(replace(plain.shape, head_dim=head), 4, 16, dtype, "meta")
            with pytest.raises(UsageError, match="cannot serve"):
                make_runner(None, pool, 9)
        latent = SimpleNamespace(config=SimpleNamespace(latent=SimpleNamespace(rank=512, rotated=64)))
        pool = PagePool(replace(plain.shape, head_dim=576), 4, 16, torch.float32, "meta")
        with pytest.raises(UsageError, match=r"(?s)cannot serve these latents.*at most 128 elements in float32"):
            make_runner(latent, pool, 9)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"(?s)needs the package triton.*pip install triton"):
        make_runner(None, PagePool(plain.shape, 4, 16, torch.float32, "meta"), 9)


@needs_interpreter
def test_rows_are_copied_only_for_those_who_keep_them(monkeypatch):
    """Log-probabilities are written where they are read, but the next pass overwrites them."""
    plain, graphs = engines("gqa", "triton", dtype=torch.float32)
    graphs.runner.asynchronous = True
    rows, made = [], Launched.__init__

    def noted(self, logp_NV, *others):
        rows.append(logp_NV)
        made(self, logp_NV, *others)

    monkeypatch.setattr(Launched, "__init__", noted)
    for search, copied in ((Trie(beams=2), False), (Sample(seed=3), True)):
        rows.clear()
        check(plain, graphs, [[7, 20, 33]], search, max_new_tokens=4, ignore_eos=True)
        there = graphs.runner._outputs[0].data_ptr()
        assert {x.data_ptr() == there for x in rows[1:]} == {not copied} and len(rows) > 3

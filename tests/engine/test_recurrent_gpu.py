"""Models with recurrent layers by the Triton kernels, in the interpreter: graphs, drafts, chunks, prefixes, preemption;
where `COPPICE_SAME_BITS=on` asks for one order of sums, the same bits in all of these."""

import pytest
import torch

from engine import Engine, Request
from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.load.loading import LoadedModel
from engine.step.driver import Driver
from engine.step.graphs import GraphRunner
from engine.step.packing import Chunk
from engine.step.runner import PassWork
from kernels.layout import BLOCK, DeltaKind, ScanKind
from models.formats import floats
from search import ADED, Greedy, Trie
from tests.engine.test_same_bits import answer, bits
from tests.marks import needs_cpp, needs_interpreter
from tests.recurrent import check_stores, fresh, hybrid

pytestmark = [needs_interpreter, needs_cpp]
SIZES = 1, 2, 4, 4, 4
PROMPTS = [[*range(3, 37)], [5, 6, 7] * 9 + [5, 6]]  # blocks of states end in the prompt, and after it
SEARCHES = Greedy(), Trie(beams=2)


@pytest.fixture(
    params=[
        {"kind": DeltaKind(*SIZES)},
        pytest.param({"kind": ScanKind(*SIZES)}, marks=pytest.mark.full),
        pytest.param({"kind": ScanKind(*SIZES), "beside": True}, marks=pytest.mark.full),
    ],
    ids=["delta net", "scan", "scan beside attention"],
)
def load(request, tmp_path, monkeypatch, one_order):
    """Loads one model: into C++, and into Triton, which multiplies its matrices as well."""
    from kernels.linear import triton

    def multiply(layer, x, forward=floats.FloatLinear.forward):
        if layer.matrix is not None:  # packed for C++
            return forward(layer, x)
        return triton.floats(x, torch.cat(layer.weights), layer.bias)

    sizes = {"width": 16, "mlp": 16, "heads": 2, "kv_heads": 1}
    folder = hybrid(tmp_path / "model", monkeypatch, layers="ra", **request.param, **sizes)
    plain = Engine.load(folder, dtype="float32", kv_memory="8M", threads=1)
    monkeypatch.setattr(floats, "has_kernels", lambda *_: False)
    monkeypatch.setattr(floats, "can_pack", lambda *_: False)
    monkeypatch.setattr(floats.FloatLinear, "forward", multiply)
    model = Engine.load(folder, dtype="float32", kv_memory="8M", threads=1).runner.model

    def make(**options):
        pool = PagePool(plain.shape, 40, 16, torch.float32, **options)
        for x_L in pool.cache.recurrent:
            x_L[:, 1:] = float("nan")
        runner = GraphRunner(model, pool, plain.runner.vocab_size, impl="triton", record=lambda run: run)
        runner.host.fill_(2**31 - 1)
        runner.memory.fill_(2**31 - 1)
        return Engine(LoadedModel(runner, plain.shape, None, eos_token_ids=plain.eos_token_ids))

    return plain, make


def asked(search, prompts=PROMPTS, new=4):
    return [Request(prompt, search, new, ignore_eos=True, logprobs=1) for prompt in prompts]


def test_answers_are_those_of_a_cpu_in_whatever_pass_they_are_computed(load, monkeypatch):
    plain, make = load
    engine, expected = make(), {}
    for search in SEARCHES:
        wanted = [r.outputs[0] for r in answer(plain, asked(search))]
        found = answer(engine, asked(search))
        assert [r.outputs[0].token_ids for r in found] == [output.token_ids for output in wanted]
        for result, output in zip(found, wanted, strict=True):
            assert result.outputs[0].token_logprobs == pytest.approx(output.token_logprobs, abs=1e-4)
        expected[search] = bits(found)
    assert any(step.replay for step in engine.runner._steps.values())

    engine.runner.budget = 19  # prompts in chunks
    assert bits(answer(engine, asked(Greedy(), PROMPTS[:1]))) == expected[Greedy()][:1]
    drafted = answer(engine, asked(ADED(nodes=4), PROMPTS[1:]))
    assert bits(drafted) == expected[Greedy()][1:] and drafted[0].stats["nodes_evaluated"] > 4
    check_stores(engine)

    preempted, preempt = [], Driver._preempt
    monkeypatch.setattr(Driver, "_preempt", lambda driver, job: (preempted.append(job), preempt(driver, job))[1])
    small = make(rows=40, states=8)
    assert bits(answer(small, asked(Trie(beams=2)))) == expected[Trie(beams=2)] and preempted
    check_stores(small)


def test_continuations_ride_along_with_their_prompt(load):
    """In one pass, past the end of a block."""
    plain, make = load
    engine = make()
    for prompt, continuations in zip(PROMPTS, [[[9, 8], [9, 7, 6], [4]], [[3]]], strict=True):
        wanted, found = (e.score(prompt, continuations) for e in (plain, engine))
        for one, other in zip(wanted, found, strict=True):
            assert other.token_logprobs == pytest.approx(one.token_logprobs, abs=1e-4)
    check_stores(engine)


@torch.inference_mode()
def test_a_pass_that_reads_a_state_it_makes_is_no_graph(load, caplog):
    """A node that ends a block, and two below it."""
    _, make = load
    engine = make()
    runner, tree = engine.runner, TokenTree(engine.pool, prompt := [*range(3, 2 + BLOCK)])
    runner.forward([Chunk(tree, len(prompt), [], tree.allocate(len(prompt), []))])
    nodes = tree.grow([tree.root], [7])
    nodes += tree.grow([nodes[0], nodes[0]], [8, 9])
    with caplog.at_level("INFO", "engine.step.graphs"):
        rows = runner.launch(PassWork([Chunk(tree, 0, nodes, tree.allocate(0, nodes))], [0, 1, 2])).logp_NV
    assert [r.message for r in caplog.records] == ["without a CUDA graph: a pass that reads a state it makes"]
    for row, text in zip(rows, ([7], [7, 8], [7, 9]), strict=True):
        torch.testing.assert_close(row, fresh(engine, [*prompt, *text])[-1], rtol=0, atol=1e-5)
    tree.release()
    check_stores(engine)


def test_prefixes_are_kept(load):
    _, make = load
    engine = make()
    engine.pool.cache_prefixes(20, 60, 20)
    expected = bits(answer(engine, asked(Greedy(), PROMPTS[:1], 3)))
    again = answer(engine, asked(Greedy(), PROMPTS[:1], 3))
    assert bits(again) == expected and again[0].stats["reused_tokens"] >= BLOCK

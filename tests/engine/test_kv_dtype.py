"""Caches of 8 bits end to end: their bytes, the searches on them, what implementations agree on, what is refused."""

import io
from pathlib import Path

import pytest
import torch

from engine import Engine
from engine.app import chat
from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.demo import demo_folder
from engine.errors import UsageError
from engine.load.capabilities import Capabilities, Precision
from engine.load.loading import LoadedModel
from engine.step.runner import Runner
from kernels.kv_fp8 import DTYPE as FP8
from kernels.kv_kinds import parts
from models.formats.linear import FORMATS
from models.shape import ModelShape
from search import ADED, DSBD, ULTS, BeamSample, Greedy, Sample, SBoN, Speculative, Trie
from tests.invariants import check_pool
from tests.marks import IMPLS, needs_interpreter

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPTS = ["What is the opposite of hot?", "Once upon a time there was", "Hello"]
SEARCHES = [Trie(beams=5), ADED(), DSBD(width=3, seed=1), SBoN(n=4, seed=2), ULTS(seed=3)]
OTHERS = [Greedy(), Sample(seed=4, temperature=0.8), BeamSample(beams=3, seed=5), Speculative(seed=6)]
FAMILIES = ["llama/gqa", "llama/head_dim", "opt/plain", "gpt2/plain", "phi3/window", "qwen3/windows"]


def load(quant="none"):
    companions = {"draft": demo_folder("draft"), "reward": demo_folder("reward")}
    return Engine.load(demo_folder(), dtype="float32", quant=quant, kv_dtype="int8", kv_memory="32M", **companions)


@pytest.fixture(scope="module")
def engine():
    return load()


@pytest.fixture(scope="module")
def four():
    if FORMATS["int4"].why_not(torch.device("cpu")):
        pytest.skip("int4 needs the C++ kernels")
    return load("int4")


def outputs(results):
    return [[(o.token_ids, o.finish_reason) for o in result.outputs] for result in results]


@pytest.mark.parametrize("search", [*SEARCHES, *OTHERS], ids=lambda search: type(search).__name__)
@pytest.mark.parametrize("weights", ["engine", "four"])
def test_searches_run_and_a_batch_gives_the_tokens_of_its_lines_alone(weights, search, request):
    engine = request.getfixturevalue(weights)
    options = {"max_new_tokens": 16}
    together = engine.generate(PROMPTS, search, **options)
    alone = [engine.generate([prompt], search, **options)[0] for prompt in PROMPTS]
    assert outputs(together) == outputs(alone) and all(len(result.outputs[0].token_ids) for result in together)
    for one in (engine, *engine.companions.values()):
        assert one.pool.cache.k_LGSD.dtype == torch.int8
        check_pool(one.pool, [])


@pytest.mark.parametrize("search", [Greedy(), Trie(beams=5)], ids=repr)
def test_implementations_agree(engine, search, monkeypatch):
    found = []
    for impl in IMPLS:
        monkeypatch.setattr(engine.runner, "impl", impl)
        found.append(engine.generate(PROMPTS[:2], search, max_new_tokens=10))
    for other in found[1:]:
        assert outputs(other) == outputs(found[0])
        pairs = zip(found[0], other, strict=True)
        for one, two in ((x, y) for a, b in pairs for x, y in zip(a.outputs, b.outputs, strict=True)):
            assert one.logprob == pytest.approx(two.logprob, abs=5e-3)


@pytest.mark.parametrize(
    "variant", ["llama/gqa", "llama/head_dim", "opt/plain", "gpt2/plain", "phi3/window", "qwen3/windows"]
)
def test_families(variant, monkeypatch):
    """A rounding that differs in float32 may be a step of int8 here and there, and no more."""
    options = {"dtype": "float32", "kv_memory": "8M"}
    plain, eight = Engine.load(GOLDEN / variant, **options), Engine.load(GOLDEN / variant, kv_dtype="int8", **options)
    ids = [7, 20, 33, *range(5, 25)]
    theirs, found = plain.logits(ids), []
    for impl in IMPLS:
        monkeypatch.setattr(eight.runner, "impl", impl)
        found.append(eight.logits(ids))
        trie = eight.generate([ids], Trie(beams=4), max_new_tokens=6, ignore_eos=True)[0]
        assert len(trie.outputs[0].token_ids) == 6
    spread = theirs.max() - theirs.min()
    assert all((logits - found[0]).abs().max() <= 5e-3 * spread for logits in found)
    assert 0 < (found[0] - theirs).abs().max() <= 0.1 * spread
    check_pool(eight.pool, [])


@pytest.mark.parametrize("impl", IMPLS)
def test_close_to_the_float_cache(engine, impl, monkeypatch):
    plain = Engine.load(demo_folder(), dtype="float32", kv_memory="8M")
    ids = plain.tokenizer.encode("Once upon a time there was a brave girl called Lily. Lily lived in a village.")
    monkeypatch.setattr(engine.runner, "impl", impl)
    ours, theirs = (torch.log_softmax(one.logits(ids), -1) for one in (engine, plain))
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    assert 0 < divergence.mean() < 0.01  # 0: nothing was quantised


def test_promotion_copies_elements_and_scales():
    pool = PagePool(ModelShape(2, 3, 8, 1, None), 60, 4, torch.int8)
    for cache in (pool.cache.k_LGSD, pool.cache.v_LGSD):
        cache.copy_(torch.randint(-128, 128, cache.shape, dtype=torch.int8))
    tree = TokenTree(pool, [1, 2, 3])
    stem, other = tree.grow([tree.root] * 2, [7, 8])
    leaves = tree.grow([stem] * 2, [9, 10])
    *_, kept, _, _, _ = tree.allocate(*tree.pending([stem, other, *leaves]))
    rows = [part for x_LGSD in (pool.cache.k_LGSD, pool.cache.v_LGSD) for part in parts(x_LGSD)]
    before = [x[:, :, kept].clone().view(torch.int8) for x in rows]
    tree.keep(leaves)
    slots = [slot + i for slot, n in tree.trunk_runs() for i in range(n)]
    assert len(slots) == 4 and slots[3] != kept
    assert all(x[:, :, slots[3]].view(torch.int8).equal(y) for x, y in zip(rows, before, strict=True))
    tree.release()
    check_pool(pool, [])


def test_an_int8_cache_takes_little_more_than_half_of_bfloat16():
    shape = ModelShape(2, 2, 64, 1, None)
    eight, sixteen = (PagePool(shape, 50, 16, dtype) for dtype in (torch.int8, torch.bfloat16))
    for pool in (eight, sixteen):
        held = pool.cache.k_LGSD.nbytes + pool.cache.v_LGSD.nbytes
        assert held == (pool.pages + pool.reserved) * pool.page_bytes
    assert eight.bytes_per_token == 2 * 2 * 2 * 66 and eight.bytes_per_token <= 0.53 * sixteen.bytes_per_token


def test_a_budget_holds_as_many_more_tokens(engine):
    plain = Engine.load(demo_folder(), dtype="float32", kv_memory="8M")
    eight = Engine.load(demo_folder(), dtype="float32", kv_dtype="int8", kv_memory="8M")
    assert eight.pool.pages * eight.pool.bytes_per_token <= 8 << 20
    assert eight.pool.pages >= 3.7 * plain.pool.pages
    result = eight.generate(PROMPTS[:1], Greedy(), max_new_tokens=4)[0]
    assert result.stats["kv_bytes_per_token"] == eight.pool.bytes_per_token
    assert eight.model_key != plain.model_key  # what is kept between runs depends on the numbers


def test_it_is_told(engine, capsys, monkeypatch):
    assert engine.capabilities.precision == "float32, int8 cache"
    told = chat.banner(engine, chat.Settings("greedy", {}, 256, False, ()), demo_folder())
    assert "float32, int8 cache" in told
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PROMPTS[0].encode())))
    flags = ["--kv-dtype", "int8", "--dtype", "float32", "--stats", "--max-new-tokens", "2"]
    assert chat.main(flags) == 0
    assert "numbers  float32, int8 cache\n" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_with_other_dtypes(dtype):
    engine = Engine.load(demo_folder(), dtype=dtype, kv_dtype="int8", kv_memory="8M")
    result = engine.generate(PROMPTS[:1], Trie(beams=3), max_new_tokens=8)[0]
    assert result.outputs[0].token_ids and engine.runner.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("wrong", ["int4", "float8", "bfloat16", None, 8, []])
def test_other_names_are_refused(wrong):
    with pytest.raises(UsageError, match="kv_dtype: expected auto, int8 or fp8, got"):
        Engine.load(demo_folder(), kv_dtype=wrong)


def fp8_engine(impl):
    """The demo on an FP8 cache, by operators that a CPU does not get by itself."""
    plain = Engine.load(demo_folder(), dtype="float32", device="cpu", kv_memory="8M")
    pool = PagePool(plain.shape, 60, 16, FP8)
    runner = Runner(plain.runner.model, pool, plain.runner.vocab_size, impl=impl, dtype=torch.float32)
    tokenizer, eos = plain.model.tokenizer, plain.eos_token_ids
    return Engine(LoadedModel(runner, plain.shape, tokenizer, eos_token_ids=eos, key="demo-fp8"))


@pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=(needs_interpreter, pytest.mark.full))])
def test_fp8_gives_what_the_definition_gives(impl):
    """A trie, whose promotions copy rows with their scales."""
    prompt = "Once upon a time there was a brave girl"
    defined, engine = fp8_engine("reference"), fp8_engine(impl)
    (wanted,), (got,) = (one.generate([prompt], Trie(beams=3), max_new_tokens=6) for one in (defined, engine))
    assert outputs([got]) == outputs([wanted])
    assert [o.logprob for o in got.outputs] == pytest.approx([o.logprob for o in wanted.outputs], abs=5e-3)
    check_pool(engine.pool, [])
    plain = Engine.load(demo_folder(), dtype="float32", kv_memory="8M")
    ids = plain.tokenizer.encode(f"{prompt} called Lily. Lily lived in a village.")
    ours, theirs = (torch.log_softmax(one.logits(ids), -1) for one in (defined, plain))
    assert 0 < (theirs.exp() * (theirs - ours)).sum(-1).mean() < 0.02


def test_an_fp8_prefix_in_a_file(tmp_path):
    """Elements and scales, which do not lie together."""
    writer, reader = (fp8_engine("torch") for _ in range(2))
    for engine in (writer, reader):
        engine.model.cache_prefixes(bounded=True)
    prefix = writer.tokenizer.encode("Once upon a time there was a brave girl called Lily. Lily lived in a village.")
    writer.save_prefix(tmp_path / "prefix", prefix)
    assert reader.load_prefix(tmp_path / "prefix") == prefix
    results = [one.generate([[*prefix, 9]], Greedy(), max_new_tokens=4)[0] for one in (reader, fp8_engine("torch"))]
    assert outputs(results[:1]) == outputs(results[1:]) and results[0].stats["reused_tokens"] == len(prefix)
    assert results[0].outputs[0].logprob == pytest.approx(results[1].outputs[0].logprob, abs=1e-4)


def test_an_fp8_cache_takes_little_more_than_half_of_bfloat16():
    shape = ModelShape(2, 2, 128, 1, None)
    eight, sixteen = (PagePool(shape, 50, 16, dtype) for dtype in (FP8, torch.bfloat16))
    held = eight.cache.k_LGSD.nbytes + eight.cache.v_LGSD.nbytes
    assert held == (eight.pages + eight.reserved) * eight.page_bytes
    assert eight.bytes_per_token == 2 * 2 * 2 * 132 and eight.bytes_per_token <= 0.52 * sixteen.bytes_per_token


def test_fp8_is_refused_on_a_cpu(capsys, monkeypatch):
    with pytest.raises(UsageError, match=r"kv_dtype: the kernels of a CPU do not read fp8"):
        Engine.load(demo_folder(), kv_dtype="fp8", device="cpu")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hello")))
    assert chat.main(["--kv-dtype", "fp8", "--device", "cpu"]) == 2
    assert "use --kv-dtype int8" in capsys.readouterr().err


def test_fp8_is_told():
    precision = Precision(torch.bfloat16)
    told = Capabilities.of(None, precision, "none", torch.device("cuda"), "triton", "fp8")
    assert told.precision == "bfloat16, fp8 cache"


def test_the_command_line_refuses_other_names(capsys):
    with pytest.raises(SystemExit) as stopped:
        chat.main(["--kv-dtype", "int4"])
    assert stopped.value.code == 2 and "--kv-dtype" in capsys.readouterr().err

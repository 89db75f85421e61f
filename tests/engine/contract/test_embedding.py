"""Embeddings beside the definition of the model's pass: pooling, batches, long texts, caches, errors."""

import asyncio
import json
import random
from pathlib import Path

import pytest
import torch

from engine import AsyncEngine, Engine, Request
from engine.app import batch
from engine.cache.tree import TokenTree
from engine.contract.embedding import PooledRows
from engine.demo import demo_folder
from engine.embeddings import embedding_of, embedding_request
from engine.errors import CheckpointError, NumericsError, UsageError
from engine.load.pooling import Pooling
from engine.step.packing import Chunk
from kernels.stack import one_by_one
from search import Sample, Trie

GOLDEN = Path("tests/golden")
FAMILIES = sorted({path.parent.parent for path in GOLDEN.glob("*/*/golden.json")})
TEXTS = ["Once upon a time there was a little dog.", "The cat sat.", "A", "One day the fox wanted to bake a cake."]


@pytest.fixture(scope="module")
def engine():
    return Engine.load(demo_folder(), dtype="float32", kv_memory="8M", prefix_cache="on")


def defined(engine, ids):
    """The hidden rows of a text in one pass, by PyTorch and the definition of attention, layer by layer."""
    runner, n = engine.runner, len(ids)
    tree, impl = TokenTree(engine.pool, ids), runner.impl
    runner.impl = "reference"
    try:
        with torch.inference_mode(), one_by_one(runner.model):
            rows_TE = runner.forward([Chunk(tree, n, [], tree.allocate(n, []))])
            return runner.model.outputs(rows_TE).double()
    finally:
        runner.impl = impl
        tree.release()


def pooled(rows_TE, pooling, normalize=True):
    vector_E = rows_TE.mean(0) if pooling == "mean" else rows_TE[-1]
    return torch.nn.functional.normalize(vector_E, dim=0) if normalize else vector_E


def check(engine, texts, **options):
    found_NE = engine.embed(texts, **options)
    settings = {"pooling": "mean", "normalize": True} | options
    for text, vector_E in zip(texts, found_NE, strict=True):
        ids = engine.encode(text) if isinstance(text, str) else text
        expected_E = pooled(defined(engine, ids), **settings)
        torch.testing.assert_close(vector_E.double(), expected_E, atol=1e-4, rtol=1e-4)
    return found_NE


@pytest.mark.parametrize("folder", FAMILIES, ids=lambda folder: folder.name)
def test_equals_the_definition_in_every_family(folder):
    name = next(path.parent for path in sorted(folder.glob("*/golden.json")) if "logits" in path.read_text())
    engine, rng = Engine.load(name, dtype="float32", quant="none", kv_memory="4M"), random.Random(1)
    most = min(60, engine.shape.max_positions or 60)
    lengths = [1, 2, 7, most, 13, most - 1]
    texts = [[rng.randrange(engine.runner.vocab_size) for _ in range(n)] for n in lengths]
    for pooling in ("mean", "last"):
        found_NE = check(engine, texts, pooling=pooling)
        assert torch.allclose(found_NE.norm(dim=1), torch.ones(len(texts)), atol=1e-6)
        check(engine, texts[::-1], pooling=pooling, normalize=False)
    assert engine.pool.used_pages == 0


@pytest.mark.parametrize("other", [Sample(seed=3), Trie(4)], ids=["sample", "trie"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_beside_a_search_in_any_order(engine, pooling, other):
    alone = [engine.embed([text], pooling=pooling)[0] for text in TEXTS]
    search = embedding_of(engine.model, pooling)
    plain = Request("Once upon", other, 8)
    [(_, without)] = engine.serve([plain])
    requests = [embedding_request(engine.model, text, search) for text in TEXTS]
    results = dict(engine.serve([requests[2], plain, requests[0], requests[3], requests[1]]))
    assert [output.token_ids for output in results[1].outputs] == [output.token_ids for output in without.outputs]
    for i, text in ((0, 2), (2, 0), (3, 3), (4, 1)):
        torch.testing.assert_close(results[i].embedding, alone[text], atol=1e-5, rtol=0)


def test_long_texts_in_passes_of_the_budget(engine, monkeypatch):
    rng = random.Random(2)
    texts = [[rng.randrange(3, 1500) for _ in range(n)] for n in (300, 70, 299, 5)]
    expected = {pooling: check(engine, texts, pooling=pooling, normalize=False) for pooling in ("mean", "last")}
    monkeypatch.setattr(engine.runner, "budget", 64)
    for pooling, expected_NE in expected.items():
        engine.pool.prefixes.clear()
        found_NE = engine.embed(texts, pooling=pooling, normalize=False)
        torch.testing.assert_close(found_NE, expected_NE, atol=1e-4, rtol=0)


def test_a_mean_reads_all_tokens_and_the_last_row_what_is_not_cached(engine):
    text, other = TEXTS[0] * 3, TEXTS[0] * 3 + " The end."
    engine.generate([text], Sample(seed=1), max_new_tokens=1)
    for pooling in ("mean", "last"):
        request = embedding_request(engine.model, other, embedding_of(engine.model, pooling))
        [(_, result)] = engine.serve([request])
        assert (result.stats["reused_tokens"] > 0) == (pooling == "last")
        check(engine, [other], pooling=pooling)


def test_any_number_fits_a_small_cache():
    """Texts that together need more pages than there are: some give way and begin again, with the same vectors."""
    engine = Engine.load(demo_folder(), dtype="float32", kv_memory="1M", parallel=4)
    room, rng = engine.pool.pages * engine.pool.page_size, random.Random(3)
    texts = [[rng.randrange(3, 1500) for _ in range(min(room * 2 // 3, 500))] for _ in range(5)]
    for pooling in ("mean", "last"):
        check(engine, texts, pooling=pooling)
    assert engine.pool.used_pages == 0


def test_no_head_is_evaluated(engine, monkeypatch):
    monkeypatch.setattr(engine.runner.model, "logits", None)
    engine.embed(TEXTS)


def test_the_first_numbers(engine):
    whole_NE = engine.embed(TEXTS, normalize=False)
    torch.testing.assert_close(engine.embed(TEXTS, normalize=False, dimensions=5), whole_NE[:, :5])
    first_NE = torch.nn.functional.normalize(whole_NE[:, :5].double()).float()
    torch.testing.assert_close(engine.embed(TEXTS, dimensions=5), first_NE)
    assert engine.embed([]).shape == (0, 192) and engine.embed([], dimensions=5).shape == (0, 5)


def test_a_vector_that_is_not_finite_is_an_error_of_its_text(engine, monkeypatch):
    bad, outputs = engine.encode(TEXTS[1]), engine.runner.model.outputs

    def spoiled(rows_TE):
        return outputs(rows_TE) * (float("nan") if len(rows_TE) == len(bad) else 1)

    monkeypatch.setattr(engine.runner.model, "outputs", spoiled)
    search = embedding_of(engine.model)
    outcomes = dict(engine.serve(embedding_request(engine.model, text, search) for text in TEXTS))
    assert isinstance(outcomes[1], NumericsError)
    assert all(outcomes[i].embedding is not None for i in (0, 2, 3))


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ("one", {}, "texts: expected a list"),
        (["a", 3], {}, r"texts\[1\]: expected a text or token ids"),
        ([[]], {}, r"texts\[0\]: the text is empty"),
        ([[1], [1536]], {}, r"texts\[1\]: expected token ids from 0 to 1535"),
        ([[5] * 513], {}, r"texts\[0\]: the text has 513 tokens, this model's maximum context length is 512"),
        (["a"], {"pooling": "cls"}, "pooling: expected mean or last"),
        (["a"], {"normalize": 1}, "normalize: expected true or false"),
        (["a"], {"dimensions": 193}, "dimensions: expected an integer from 1 to 192"),
        (["a"], {"adapter": "none such"}, "adapter"),
    ],
)
def test_refusals(engine, texts, options, message):
    with pytest.raises(UsageError, match=message):
        engine.embed(texts, **options)


def test_what_the_checkpoint_says(engine, monkeypatch):
    monkeypatch.setattr(engine.model, "pooling", Pooling("last", False))
    torch.testing.assert_close(engine.embed(TEXTS), engine.embed(TEXTS, pooling="last", normalize=False))
    monkeypatch.setattr(engine.model, "pooling", Pooling(why_not="it is made for the pooling cls_token"))
    with pytest.raises(UsageError, match="made for the pooling cls_token"):
        engine.embed(TEXTS)
    assert engine.embed(TEXTS, pooling="mean").shape == (4, 192)


def test_a_reward_model_embeds_nothing():
    with pytest.raises(UsageError, match="reward model"):
        Engine.load(GOLDEN / "llama" / "classifier", dtype="float32").embed([[1, 2]])


def test_without_a_tokenizer_token_ids_remain(engine, monkeypatch):
    ids = engine.encode(TEXTS[0])
    expected_NE = engine.embed([ids])
    monkeypatch.setattr(engine.model, "tokenizer", None)
    torch.testing.assert_close(engine.embed([ids]), expected_NE)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        engine.embed([TEXTS[0]])


def test_coroutines(engine):
    async def work():
        async with AsyncEngine(Engine(engine.model)) as shared:
            found = await asyncio.gather(*(shared.embed(TEXTS[i:], pooling="last") for i in range(5)))
            with pytest.raises(UsageError, match=r"texts\[1\]"):
                await shared.embed(["a", 1])
            return found

    expected_NE = engine.embed(TEXTS, pooling="last")
    for i, found_NE in enumerate(asyncio.run(work())):
        torch.testing.assert_close(found_NE, expected_NE[i:], atol=1e-5, rtol=0)


def test_lines_of_a_batch(engine, tmp_path):
    (tmp_path / "in").write_text(
        "\n".join(
            json.dumps(line)
            for line in (
                {"embed": TEXTS[0], "id": "a"},
                {"embed": [1, 2, 3], "params": {"pooling": "last", "normalize": False, "dimensions": 7}},
                {"embed": TEXTS[0], "prompt": "Once"},
                {"embed": "a", "params": {"pool": "mean"}},
            )
        )
    )
    flags = ["--dtype", "float32", "--kv-memory", "8M", "-q", "--trace", str(tmp_path / "trace.html")]
    assert batch.main([*flags, "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 2
    first, second, third, fourth = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert first["id"] == "a" and first["stats"]["prompt_tokens"] == len(engine.encode(TEXTS[0]))
    assert first["embedding"] == pytest.approx(engine.embed([TEXTS[0]])[0].tolist(), abs=1e-5)
    expected_E = engine.embed([[1, 2, 3]], pooling="last", normalize=False)[0, :7]
    assert second["embedding"] == pytest.approx(expected_E.tolist(), abs=1e-4)
    assert "prompt" in third["error"]["message"] and "did you mean pooling" in fourth["error"]["message"]


def test_a_sum_of_many_rows_in_halves_is_no_worse_than_in_one_piece():
    rows_TE = torch.randn(3000, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    kept = PooledRows("mean")
    for part_TE in rows_TE.split(7):
        kept.add(part_TE)
    torch.testing.assert_close(kept.vector(), rows_TE.double().mean(0), atol=1e-12, rtol=0)

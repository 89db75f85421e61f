"""Requests with different adapters, or none, in one pass: each as alone; in caches, batches, plans and the server."""

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Choices, Engine, LoadOptions, Request, Session, UsageError
from engine.app import batch, chat
from engine.load.budget import plan
from engine.load.loading import open_adapters
from engine.load.sizes import Workload
from engine.service import Entry
from models.checkpoint.headers import Checkpoint
from models.families import FAMILIES
from models.families.llama import Llama
from search import ADED, ULTS, Greedy, Speculative, Trie
from tests.marks import needs_cpp
from tests.served import background

GOLDEN = Path(__file__).parents[1] / "golden"
MODEL, ADAPTERS = GOLDEN / "llama" / "gqa", GOLDEN / "adapters"
ADAPTED = "llama_all", "llama_some", "llama_whole", "llama_ends"  # the last two change the embedding and the head
FOLDERS = [ADAPTERS / name for name in ADAPTED]
NAMES = *ADAPTED, "none"
PROMPTS = [[5, 9, 2, 7, 11, 3, 8, 4], [6, 1, 9, 9, 14], [5, 9, 2, 7, 11, 3, 8, 21, 30]]
OPTIONS: dict[str, Any] = {"kv_memory": "4M", "threads": 2, "adapters": FOLDERS}


def tokens(engine: Engine, prompt: list[int], adapter: str | None, search: Any = None) -> tuple[list[int], float]:
    [result] = engine.generate([prompt], search or Greedy(), max_new_tokens=10, ignore_eos=True, adapter=adapter)
    return result.outputs[0].token_ids, result.outputs[0].logprob


@needs_cpp  # products of PyTorch depend on the rows beside
@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quant": "int8"}, {"quant": "int4"}], ids=str
)
def test_requests_with_other_adapters_share_passes_and_are_as_alone(options: dict[str, Any]):
    engine = Engine.load(MODEL, **OPTIONS, **options)
    assert engine.runner.model.stack is not None  # all layers in one call
    running: list[int] = []
    for search in (Greedy(), Trie(beams=3)):
        wanted = [(prompt, name) for prompt in PROMPTS for name in NAMES]
        options = {"max_new_tokens": 10, "ignore_eos": True, "logprobs": 0}
        requests = [Request(prompt, search, adapter=name, **options) for prompt, name in wanted]
        together = dict(engine.serve(requests, on_step=lambda driver: running.append(len(driver.running))))
        assert running[0] == len(requests)
        running.clear()
        for i, request in enumerate(requests):
            [(_, alone)] = engine.serve([request])
            pairs = zip(together[i].outputs, alone.outputs, strict=True)
            assert all((a.token_ids, a.token_logprobs) == (b.token_ids, b.token_logprobs) for a, b in pairs)


def test_without_its_adapters_the_engine_is_as_one_without():
    with_adapters, plain = Engine.load(MODEL, **OPTIONS), Engine.load(MODEL, **(OPTIONS | {"adapters": ()}))
    for prompt in PROMPTS:
        assert with_adapters.logits(prompt, "none").equal(plain.logits(prompt))
        assert tokens(with_adapters, prompt, "none") == tokens(plain, prompt, None)
        assert tokens(with_adapters, prompt, None) == tokens(with_adapters, prompt, "llama_all")


def test_each_adapter_has_a_prior_of_its_own_in_a_server():
    engine = Engine.load(MODEL, **OPTIONS, dtype="float32")
    (service := engine.service()).keeps_files = False
    found = []
    for name in ("none", "llama_all", "llama_some", "llama_all"):
        request = Request(PROMPTS[0], ULTS(k_max=2, children=3), 5, adapter=name, ignore_eos=True)
        service.submit(Entry(service.check(request), lambda news: found.append(news.outcome)))
        while service.busy:
            service.step()
    service.close()
    assert [result.stats["prior"] for result in found if result] == ["gathered", "gathered", "gathered", "cached"]


def test_an_adapter_of_the_ends_alone_needs_none_in_the_layers():
    folder = ADAPTERS / "gpt2_ends"
    engine = Engine.load(GOLDEN / "gpt2" / "plain", **(OPTIONS | {"adapters": [folder]}), dtype="float32")
    both = [folder, ADAPTERS / "gpt2_all"]
    other = Engine.load(GOLDEN / "gpt2" / "plain", **(OPTIONS | {"adapters": both}), dtype="float32")
    for name in ("gpt2_ends", "none"):
        assert tokens(engine, PROMPTS[0], name) == tokens(other, PROMPTS[0], name)


@needs_cpp
def test_rows_of_an_adapted_embedding_do_not_depend_on_their_number():
    model = Engine.load(MODEL, dtype="float32", **OPTIONS | {"adapters": [ADAPTERS / "llama_ends"]}).runner.model
    tokens_T = torch.arange(3, 43)
    embed = lambda ids: model.ends.embed(torch.zeros(len(ids), 32), ids, torch.ones_like(ids))  # noqa: E731
    rows_TE = embed(tokens_T)
    assert rows_TE.any() and all(embed(tokens_T[i : i + n]).equal(rows_TE[i : i + n]) for n in (1, 3) for i in range(9))


def test_names(tmp_path: Path):
    engine, plain = Engine.load(MODEL, **OPTIONS), Engine.load(MODEL, kv_memory="1M")
    with pytest.raises(UsageError, match=f"adapter: expected one of none, {', '.join(ADAPTED)}, got 'other'"):
        tokens(engine, PROMPTS[0], "other")
    with pytest.raises(UsageError, match="adapter: expected none: the engine has no adapters, got 'llama_all'"):
        tokens(plain, PROMPTS[0], "llama_all")
    with pytest.raises(UsageError, match="two of them have the name 'llama_all'"):
        LoadOptions(MODEL, adapters=[FOLDERS[0], f"{FOLDERS[0]}=0.5"])
    with pytest.raises(UsageError, match="'none' cannot be the name of one"):
        LoadOptions(MODEL, adapters={"none": FOLDERS[0]})
    with pytest.raises(UsageError, match="adapters: expected a list of folders"):
        LoadOptions(MODEL, adapters=str(FOLDERS[0]))
    with pytest.raises(UsageError, match="adapters: expected DIR or DIR=SCALE"):
        LoadOptions(MODEL, adapters=[3])  # type: ignore[list-item]
    named = tmp_path / "a=2"
    named.mkdir()
    assert LoadOptions(MODEL, adapters=[f"{named}", f"{named}x=0.5"]).scaled_adapters == {
        "a=2": (named, 1.0), "a=2x": (Path(f"{named}x"), 0.5),
    }  # fmt: skip


def test_adapters_are_checked_against_the_configuration_that_the_family_reads(monkeypatch: pytest.MonkeyPatch):
    class Viewed(Llama):
        """A family that finds its width of the MLP in its tensors."""

        @classmethod
        def view(cls, checkpoint: Checkpoint) -> Checkpoint:
            return replace(checkpoint, config=checkpoint.config | {"intermediate_size": width})

    width = Checkpoint.open(MODEL).config["intermediate_size"]
    lacking = {**Checkpoint.open(MODEL).config, "intermediate_size": 1}
    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", Viewed)
    checkpoint = replace(Checkpoint.open(MODEL), config=lacking)
    assert [*open_adapters(LoadOptions(MODEL, adapters=FOLDERS), checkpoint)] == [*ADAPTED]


def test_cached_prefixes_are_of_one_adapter():
    cold = Engine.load(MODEL, dtype="float32", **OPTIONS)
    warm = Engine.load(MODEL, dtype="float32", prefix_cache="on", **OPTIONS)
    prompt = PROMPTS[0] * 4
    for _ in range(2):
        for name in NAMES:
            assert tokens(warm, prompt, name)[0] == tokens(cold, prompt, name)[0]
    [result] = warm.generate([prompt], Greedy(), max_new_tokens=1, adapter="llama_some")
    assert result.stats["reused_tokens"] > 0  # of its own


def test_a_session_that_changes_its_adapter_evaluates_its_prompt_again():
    engine, alone = (Engine.load(MODEL, dtype="float32", **OPTIONS) for _ in range(2))
    session, reused = Session(engine), []
    for name in ("llama_all", "llama_all", "none", "llama_some"):
        *_, done = session.stream(PROMPTS[0], Greedy(), max_new_tokens=6, ignore_eos=True, adapter=name)
        [other] = alone.generate([PROMPTS[0]], Greedy(), max_new_tokens=6, ignore_eos=True, adapter=name)
        assert done.result.outputs[0].token_ids == other.outputs[0].token_ids
        reused.append(done.result.stats["reused_tokens"] > 0)
    assert reused == [False, True, False, False]
    session.close()
    assert engine.pool.used_pages == 0


def test_drafts_have_none_and_are_checked_by_the_model_with_its_adapter():
    engine = Engine.load(MODEL, draft=MODEL, dtype="float32", **OPTIONS)
    for name in NAMES:
        wanted = tokens(engine, PROMPTS[0], name)[0]
        for search in (Speculative(top_k=1, seed=0), ADED(temperature=None)):
            assert tokens(engine, PROMPTS[0], name, search)[0] == wanted


def test_scores_are_of_the_adapter_that_is_asked_for():
    engine = Engine.load(MODEL, dtype="float32", **OPTIONS)
    for name in NAMES:
        [score] = engine.score(PROMPTS[0], [[4, 8, 15]], adapter=name)
        rows = engine.logits([*PROMPTS[0], 4, 8], name).log_softmax(-1)[-3:]
        assert score.logprob == pytest.approx(float(rows[range(3), [4, 8, 15]].sum()), abs=1e-4)


def test_scalar_heads_score_with_the_adapter_that_is_asked_for():
    options: dict[str, Any] = OPTIONS | {"adapters": FOLDERS[:2]}
    engine = Engine.load(GOLDEN / "llama" / "classifier", dtype="float32", **options)
    for name in (*ADAPTED[:2], "none", None):
        [score] = engine.scores(PROMPTS[:1], adapter=name)
        assert score == pytest.approx(float(engine.logits(PROMPTS[0], name)[-1]), abs=1e-5)
    with pytest.raises(UsageError, match="adapter: expected one of none, llama_all, llama_some"):
        engine.scores(PROMPTS[:1], adapter="other")


@pytest.mark.parametrize("scores", ["model", "renormalised"])
def test_a_constraint_that_allows_few_tokens_has_the_head_of_its_adapter(scores: str, monkeypatch: pytest.MonkeyPatch):
    """Where few tokens are allowed, the base's head computes no others; a head of an adapter's own computes all."""
    engine = Engine.load(MODEL, dtype="float32", **OPTIONS)
    options: dict[str, Any] = {"constraint": Choices([[4, 8], [15, 16], [23, 42, 7]], [2]), "constraint_scores": scores}
    options |= {"eos_token_ids": [2], "max_new_tokens": 5}
    found = []
    for whole in (False, True):
        if whole:
            monkeypatch.setattr("engine.rules.constrained.Constrained.few_tokens", lambda *_: None)
        found.append([])
        for name in NAMES:
            [result] = engine.generate([PROMPTS[0]], Trie(beams=2), adapter=name, **options)
            found[-1] += [(output.token_ids, pytest.approx(output.logprob, abs=1e-5)) for output in result.outputs]
    assert found[0] == found[1] and len({str(each) for each in found[0]}) > 2


def test_the_plan_counts_adapters():
    plain, both = (plan(LoadOptions(MODEL, dtype="float32", adapters=x), Workload(), 0) for x in ((), FOLDERS))
    size = both.lines["weights of adapters"]
    assert both.fixed - plain.fixed == size > 0
    model = Engine.load(MODEL, dtype="float32", **OPTIONS).runner.model
    products = [call.adapters for layer in model.layers for call in layer.calls] + [model.ends._products]
    held = [x for each in products if each for x in each.adapters if x]
    assert size <= sum(map(bytes_of, held)) + bytes_of_ends(model.ends) <= 1.3 * size + 4096


def bytes_of(low_rank):
    """Bytes of both factors."""
    return sum(x.nbytes for x in low_rank.panels or [x for part in low_rank.parts for x in (part.a_RI, part.b_OR)])


def bytes_of_ends(ends):
    """Bytes of changed embeddings and heads, but for the products of factors."""
    kept = [*ends._tables.values(), *(a_VR for a_VR, _ in ends._added.values())]
    for linear in (*ends._heads.values(), *(b for _, b in ends._added.values())):
        kept += [linear.packed.panels] if linear.packed else linear.weights
    return sum(x.nbytes for x in kept)


def test_lines_of_a_batch():
    lines = [{"prompt_ids": PROMPTS[0], "params": {"adapter": name}} for name in (*NAMES, "other")]
    lines += [{"prompt_ids": PROMPTS[0]}, {"prompt_ids": PROMPTS[0], "score": [[4, 8]], "params": {"adapter": "none"}}]
    flags = ["--model", MODEL, "--max-new-tokens", "10", "--ignore-eos", "--dtype", "float32", "--kv-memory", "4M"]
    flags += [flag for folder in FOLDERS for flag in ("--adapter", folder)]
    out = io.BytesIO()
    code = batch.main([*map(str, flags), "-q"], io.BytesIO("".join(json.dumps(x) + "\n" for x in lines).encode()), out)
    *named, other, first, score = map(json.loads, out.getvalue().splitlines())
    engine = Engine.load(MODEL, dtype="float32", **OPTIONS)
    for name, record in zip((*NAMES, None), (*named, first), strict=True):
        assert record["outputs"][0]["token_ids"] == tokens(engine, PROMPTS[0], name)[0]
    assert code == 2 and f"adapter: expected one of none, {', '.join(ADAPTED)}" in other["error"]["message"]
    [expected] = engine.score(PROMPTS[0], [[4, 8]], adapter="none")
    assert score["scores"][0]["logprob"] == pytest.approx(expected.logprob, abs=1e-5)


@pytest.fixture
def server() -> Iterator[Any]:
    pytest.importorskip("uvicorn", reason="needs the extra serve")
    pytest.importorskip("starlette", reason="needs the extra serve")
    from engine.serve import command

    flags = ["--model", f"base={MODEL}", "--model", f"other={MODEL}", "--dtype", "float32", "--kv-memory", "4M", "-q"]
    args = command.make_parser().parse_args([*flags, *(f"--adapter={folder}" for folder in FOLDERS)])
    with command.application(args) as app, background(app) as url:
        yield url


def test_models_of_the_server(server: Any):
    httpx = pytest.importorskip("httpx2")
    listed = [one["id"] for one in httpx.get(f"{server}/v1/models").json()["data"]]
    assert sorted(listed) == ["base", *sorted(f"base:{name}" for name in ADAPTED), "other"]
    engine = Engine.load(MODEL, dtype="float32", **OPTIONS)

    def ask(model: str, **fields: Any) -> Any:
        body = {"model": model, "prompt": PROMPTS[0], "max_tokens": 10, "search": "greedy", "ignore_eos": True}
        return httpx.post(f"{server}/v1/completions", json=body | {"return_token_ids": True} | fields, timeout=60)

    for model, name in (("base", "none"), ("base:llama_ends", "llama_ends"), ("other", "none")):
        answer = ask(model).json()
        assert answer["model"] == model
        assert answer["choices"][0]["coppice"]["token_ids"] == tokens(engine, PROMPTS[0], name)[0]
    assert ask("other:llama_all").status_code == 404 and ask("base:x").json()["error"]["code"] == "model_not_found"
    assert "adapter: it cannot be served" in ask("base", adapter="llama_all").json()["error"]["message"]


def test_what_is_not_served_with_adapters():
    from models.shard import Shard

    with pytest.raises(UsageError, match="adapters: they cannot be combined with shard"):
        plan(LoadOptions(MODEL, adapters=FOLDERS, shard=Shard(0, 2)), Workload(), 0)


def test_a_folder_of_an_adapter_says_what_to_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", None)
    assert chat.main(["--model", str(FOLDERS[0]), "-p", "x", "-q"]) == 3
    err = capsys.readouterr().err
    assert "the folder holds an adapter (LoRA) for llama/gqa, not a model" in err
    assert f"--model BASE --adapter {FOLDERS[0]}" in err

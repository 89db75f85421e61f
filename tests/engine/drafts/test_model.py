"""Drafts of a smaller model under every search: the same bits, fewer passes, one pass a level for all requests."""

import functools

import pytest

from engine import Engine, KVMemoryError, Request, UsageError
from engine.drafts import Wanted
from engine.drafts.model import LEVELS, ModelDrafter
from search import DSBD, Greedy, Trie
from tests import draws as random_draws
from tests.eager import EagerDrafts
from tests.engine.step import test_drafting
from tests.engine.step.test_drafting import (
    GOLDEN,
    SEARCHES,
    VOCAB,
    answers,
    checked,  # noqa: F401, a fixture that checks every tree
    facts,
    passes,
    prompts,
    requests,
)
from tests.invariants import check_tree
from tests.marks import needs_cpp
from tools.random_checkpoint import make

pytestmark = needs_cpp
SIZES = {"layers": 2, "width": 64, "mlp": 96, "heads": 4, "kv_heads": 2, "vocab": VOCAB, "max_positions": 600}
SMALL = {**SIZES, "layers": 1, "width": 32, "heads": 2, "mlp": 48}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, another one that knows nothing of it, one of a short context, and one of another vocabulary."""
    made = {"target": (SIZES, 1), "other": (SMALL, 2), "short": ({**SMALL, "max_positions": 24}, 3)}
    made |= {"foreign": ({**SMALL, "vocab": VOCAB + 20}, 4)}
    found = {name: tmp_path_factory.mktemp(name) for name in made}
    for name, (sizes, seed) in made.items():
        make(found[name], **sizes, seed=seed, scale=0.7)
    return found


@pytest.fixture(scope="module")
def loaded(folders):
    @functools.cache
    def load(draft="target", **options):
        given = {"kv_memory": 1 << 22, "threads": 1, "parallel": 4} | options
        return Engine.load(folders["target"], draft=folders[draft], **given)

    return load


def with_drafts(engine, asked, always=True):
    """Answers with drafts of the engine's draft model."""
    return test_drafting.with_drafts(engine, ModelDrafter(engine.companions["draft"].runner), asked, always)


@pytest.fixture(scope="module")
def plain_answers(loaded):
    """Answers without drafts, by a search's name; no neighbour changes a bit of them."""

    @functools.cache
    def of(name):
        return answers(loaded("target"), requests(random_draws.draws(40), SEARCHES[name], seed=7))

    return of


@pytest.mark.parametrize("always", [True, False], ids=["always", "by time"])
@pytest.mark.parametrize("draft", ["target", "other"], ids=["right", "wrong"])
@pytest.mark.parametrize("name", SEARCHES)
def test_answers_are_the_same_bits(name, draft, always, loaded, plain_answers):
    engine = loaded(draft)
    asked = random_draws.draws(40 if draft == "target" else 10) // (1 if random_draws.FULL else 2)
    plain = plain_answers(name)[:asked]
    got = with_drafts(engine, requests(asked, SEARCHES[name], seed=7), always)
    assert facts(got) == facts(plain)
    if always and draft == "target" and name != "sbon":  # its sequences are many and differ
        assert sum(result.stats["passes_saved"] for result in got) > 0
        assert passes(got) < passes(plain)


def test_a_model_that_drafts_for_itself_is_always_right(loaded):
    [got] = with_drafts(loaded(), [Request([1, 9, 8], Greedy(), 33, ignore_eos=True)])
    assert got.stats["forward_passes"] <= 2 + 32 // (LEVELS + 1) + 1
    assert got.stats["passes_saved"] + got.stats["forward_passes"] == 33
    assert got.stats["draft_forward_passes"] > 0 and got.stats["draft_nodes_evaluated"] > 0


def test_beams_are_drafted_as_beam_search_goes_on(loaded):
    """Levels are whole, so that passes are saved, and hardly a node is evaluated that the search does not ask for."""
    [got] = with_drafts(loaded(), [Request([1, 9, 8], Trie(beams=4), 24, ignore_eos=True)])
    assert got.stats["passes_saved"] >= 16
    assert got.stats["drafted_accepted"] >= got.stats["drafted_nodes"] * 0.8


def test_requests_share_the_passes_of_the_draft_model(loaded):
    engine, work = loaded(), {}
    engine.drafts = EagerDrafts(ModelDrafter(engine.companions["draft"].runner))
    try:
        asked = [Request(prompt, Greedy(), 20, ignore_eos=True) for prompt in prompts(4)]
        results = dict(engine.serve(asked, on_step=lambda driver: work.update(all=driver.work["draft"])))
    finally:
        engine.drafts = None
    own = sum(result.stats["draft_forward_passes"] for result in results.values())
    tokens = sum(map(len, prompts(4))) - 4 + sum(r.stats["draft_nodes_evaluated"] for r in results.values())
    assert work["all"].passes <= own / 2
    assert work["all"].tokens <= tokens + 4 * 33


@pytest.mark.parametrize(
    "rules",
    [
        {"regex": "[a-z]{4,40}"},
        {"choices": ["abcdef", "abcxyz", "q"]},
        {"repetition_penalty": 1.3},
        {"bad_words": ["e"]},
    ],
    ids=["regex", "choices", "penalty", "words"],
)
@pytest.mark.parametrize("name", ["greedy", "samples", "trie"])
def test_drafts_obey_what_edits_rows(name, rules):
    engine = demo()
    asked = lambda: [  # noqa: E731
        Request(text, SEARCHES[name], max_new_tokens=12, logprobs=1, **rules) for text in ("The ", "One two", "a")
    ]
    plain = answers(engine, asked())
    got = with_drafts(engine, asked())
    assert facts(got) == facts(plain)
    if "regex" in rules:  # the model's likeliest tokens are forbidden, the likeliest allowed ones are drafted
        assert sum(result.stats["drafted_nodes"] for result in got) > 0


@functools.cache
def demo():
    from engine.demo import demo_folder

    return Engine.load(demo_folder(), draft=demo_folder("draft"), kv_memory=1 << 25, threads=1)


def test_a_long_prompt_is_read_in_parts(loaded):
    engine = loaded()
    runner = engine.companions["draft"].runner
    asked = lambda: [Request([1] + [5 + i % 90 for i in range(300)], Greedy(), 40, ignore_eos=True)]  # noqa: E731
    plain, seen = answers(engine, asked()), []
    run = ModelDrafter._best
    sizes = lambda parts: sum(len(part.chunk) for part in parts)  # noqa: E731
    ModelDrafter._best = lambda self, parts, places: seen.append(sizes(parts)) or run(self, parts, places)
    try:
        got = with_drafts(engine, asked())
    finally:
        ModelDrafter._best = run
    assert facts(got) == facts(plain) and got[0].stats["passes_saved"] > 10
    assert seen[0] == runner.budget == max(seen) and seen[1] < runner.budget


def test_what_does_not_fit_the_draft_models_context_is_not_drafted(loaded):
    engine = loaded("short")
    asked = lambda: [Request([1, *range(5, 5 + n)], Trie(beams=2), 40, ignore_eos=True) for n in (3, 15, 40)]  # noqa: E731
    plain = answers(engine, asked())
    got = with_drafts(engine, asked())
    assert facts(got) == facts(plain)
    assert got[0].stats["drafted_nodes"] > 0 == got[2].stats["drafted_nodes"]


@pytest.mark.parametrize("golden", ["lfm2/plain", "mistral/window"])
@pytest.mark.parametrize("name", ["greedy", "samples", "trie"])
def test_on_other_models(name, golden):
    engine = Engine.load(GOLDEN / golden, draft=GOLDEN / golden, kv_memory=1 << 22, threads=1)
    plain = answers(engine, requests(4, SEARCHES[name], ignore_eos=True))
    got = with_drafts(engine, requests(4, SEARCHES[name], ignore_eos=True))
    assert facts(got) == facts(plain)
    assert passes(got) < passes(plain)


@pytest.mark.parametrize("golden", ["phi3/longrope", "qwen3_5/recurrent"])
@pytest.mark.parametrize("name", ["greedy", "trie"])
def test_models_whose_rows_differ_in_their_last_bits(name, golden):
    """A switch of rotary embeddings, which one of the prompts is before; recurrent layers."""
    engine = Engine.load(GOLDEN / golden, draft=GOLDEN / golden, kv_memory=1 << 22, threads=1)
    plain = answers(engine, requests(4, SEARCHES[name], ignore_eos=True))
    got = with_drafts(engine, requests(4, SEARCHES[name], ignore_eos=True))
    assert [r.outputs[0].token_ids for r in got] == [r.outputs[0].token_ids for r in plain]
    assert all(result.stats["passes_saved"] > 0 for result in got)


@pytest.mark.parametrize("name", ["samples", "trie", "sbon"])
def test_small_pools(name, loaded):
    """Requests give way to each other and begin again; the draft model's pages go with them."""
    engine, gave_way = loaded(), 0
    asked = functools.partial(requests, 6, SEARCHES[name])
    plain, unit = (
        answers(engine, asked()),
        engine.pool.bytes_per_token + engine.companions["draft"].pool.bytes_per_token,
    )
    for tokens in (90, 120, 200):
        small = loaded(kv_memory=tokens * unit)
        try:
            alone = answers(small, asked())
        except KVMemoryError:
            continue
        assert facts(alone) == facts(plain)
        assert facts(with_drafts(small, asked())) == facts(plain)
        gave_way += 1
    assert gave_way


def test_dsbd_may_use_the_same_draft_model(loaded):
    unit = loaded().pool.bytes_per_token + loaded().companions["draft"].pool.bytes_per_token
    for memory in (1 << 22, 160 * unit):
        engine = loaded(kv_memory=memory)
        asked = lambda: [*requests(2, DSBD(seed=3, gamma=2)), *requests(3, Trie(beams=3), 5)]  # noqa: E731
        plain = answers(engine, asked())
        got = with_drafts(engine, asked())
        assert facts(got)[2:] == facts(plain)[2:]  # DSBD's layers follow the memory that is free
        assert "drafted_nodes" in got[2].stats and "drafted_nodes" not in got[0].stats


def test_a_draft_model_with_nan_drafts_nothing(folders):
    engine = Engine.load(folders["target"], draft=folders["other"], kv_memory=1 << 22, threads=1)
    runner = engine.companions["draft"].runner
    evaluate = runner.evaluate_top_sums
    runner.evaluate_top_sums = lambda work, wanted: (evaluate(work, wanted)[0], [False] * len(work.asked))
    plain = answers(engine, requests(2, Greedy()))
    got = with_drafts(engine, requests(2, Greedy()))
    assert facts(got) == facts(plain) and sum(result.stats["drafted_nodes"] for result in got) == 0


def test_refusals(folders):
    with pytest.raises(UsageError, match="drafts: model needs a draft model"):
        Engine.load(folders["target"], drafts="model", kv_memory=1 << 22)
    with pytest.raises(UsageError, match="the draft has another tokenizer than the model"):
        Engine.load(folders["target"], draft=folders["foreign"], drafts="model", kv_memory=1 << 22)


def test_by_name(folders):
    engine = Engine.load(folders["target"], draft=folders["other"], drafts="model", kv_memory=1 << 22, threads=1)
    [result] = answers(engine, requests(1, Greedy()))
    assert result.stats["draft_forward_passes"] > 0


def test_a_drafter_by_itself(loaded):
    """It guesses what the model does after the text and what is ahead, and follows live nodes to and fro."""
    engine = loaded()
    drafter, prompt = ModelDrafter(engine.companions["draft"].runner), [1, 9, 8, 7]
    [want] = answers(engine, [Request(prompt, Greedy(), 12, ignore_eos=True)])
    text, request = want.outputs[0].token_ids, drafter.open(None, prompt)
    draft = request.draft([], 20, 6)
    chain = [at for at, parent in enumerate(draft.parents)]
    best, at = [], -1
    for _ in range(6):
        at = next(i for i in chain if draft.parents[i] == at)
        best.append(draft.tokens[at])
    assert best == text[:6]
    assert request.draft(text[:4], 20, 2).tokens[0] == text[4]
    run = drafter.passes
    assert request.draft(text[:2], 1, 1).tokens == [text[2]]
    assert drafter.passes == run + 1  # a node without a row, as it was an ancestor only
    assert request.draft([7, 7], 3, 1).parents == [-1] * 2
    request.learn(text[:5])
    assert request.draft([text[5]], 1, 1).tokens == [text[6]]
    check_tree(request.tree)
    [[first, second]] = drafter.draft_together(
        [Wanted(request, [[text[5]], [7]], [3, 0], 4, sums=[0.0, -1.0], width=2)]
    )
    assert first.tokens[0] == text[6] and second.tokens == []
    request.close([])
    request.tree.release()
    assert request.tree.pool.used_pages == 0


def test_a_pass_that_fails_leaves_no_slots(loaded, monkeypatch):
    drafter = ModelDrafter(loaded().companions["draft"].runner)
    request = drafter.open(None, [1, 9, 8, 7])
    monkeypatch.setattr(drafter, "_best", lambda parts, places: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        request.draft([5], 4, 2)
    assert request.tree.live_tokens == 0
    monkeypatch.undo()
    assert request.draft([5], 4, 2).tokens
    request.tree.release()

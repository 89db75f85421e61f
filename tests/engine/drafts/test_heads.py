"""Drafts of the model's own heads under every search: the same bits, right rows for the head, fewer passes."""

import functools
import math
import shutil
from collections import defaultdict

import pytest
import torch

from engine import CheckpointError, Engine, KVMemoryError, Request, UsageError
from engine.cache.tree import TokenTree
from engine.drafts.heads import HeadDrafter, HeadDrafts
from engine.step.packing import Chunk
from engine.step.runner import Keep, PassWork
from search import DSBD, Greedy
from tests import draws as random_draws
from tests.draft_heads import add_mtp, make_eagle
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
from tests.marks import needs_cpp
from tools.random_checkpoint import make

pytestmark = needs_cpp
SIZES = {"layers": 4, "width": 64, "mlp": 96, "heads": 4, "kv_heads": 2, "vocab": VOCAB, "max_positions": 600}
READ = [0, 2, 4]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {name: tmp_path_factory.mktemp(name) for name in ("target", "head", "qwen")}
    make(found["target"], **SIZES, seed=1, scale=0.7)
    make_eagle(found["head"], width=64, vocab=VOCAB, known=VOCAB // 2, read=READ)
    shutil.copytree(GOLDEN / "qwen3_5/recurrent", found["qwen"], dirs_exist_ok=True)
    add_mtp(found["qwen"])
    return found


@pytest.fixture(scope="module")
def loaded(folders):
    @functools.cache
    def load(**options):
        given = {"kv_memory": 1 << 22, "threads": 1, "parallel": 4} | options
        engine = Engine.load(folders["target"], draft=folders["head"], drafts="model", **given)
        engine.drafts = None
        return engine

    return load


def with_drafts(engine, asked, always=True):
    """Answers with drafts of the engine's head."""
    return test_drafting.with_drafts(engine, HeadDrafter(engine.companions["draft"].runner), asked, always)


def given_rows(request, chunk, rows, guessed):
    """(text of a token but for the first one, row, whether it is the head's own) of a chunk."""
    tree = chunk.tree
    first, trunk = chunk.cached - chunk.trunk_tokens, tree.trunk.tokens
    paths = [trunk[: at + 1] for at in range(first, chunk.cached)]
    paths += [[*trunk[: tree.prompt_length], *tree.path(node)] for node in chunk.nodes]
    own = [False] * chunk.trunk_tokens + [node in guessed for node in chunk.nodes]
    return zip(map(tuple, paths), rows, own, strict=True)


@pytest.fixture
def given(monkeypatch):
    """The rows that heads were given, by texts: the model's, and the head's own."""
    found, own, real = {}, {}, HeadDrafts.given

    def recording(self, chunk, zeros_E):
        before = len(self._guessed)
        rows = real(self, chunk, zeros_E)
        for path, row_E, guessed in given_rows(self, chunk, rows, {*self._guessed[before:]}):
            (own if guessed else found)[path] = row_E
        return rows

    monkeypatch.setattr(HeadDrafts, "given", recording)
    return found, own


@pytest.fixture
def knowing(monkeypatch, checked):  # noqa: F811
    """Have heads guess what searches asked for so far, whatever their logits are."""
    real = HeadDrafter._best

    def know():
        children = defaultdict(list)
        for path in sorted(checked):
            children[path[1:-1]].append(path[-1])

        def best(self, parts, places):
            rows, places = real(self, parts, places), []
            for part in parts:
                tree = part.chunk.tree
                for node, _ in part.rows:
                    found = children[(*tree.trunk.tokens[: tree.prompt_length], *tree.path(node))][:8]
                    places.append([(token, math.log(0.9 / len(found))) for token in found])
            return [known or row for known, row in zip(places, rows, strict=True)]

        monkeypatch.setattr(HeadDrafter, "_best", best)

    return know


@pytest.fixture(scope="module")
def kept():
    """Answers and the paths that the searches asked for, by a search's name."""
    return {}


@pytest.fixture
def plain_answers(loaded, checked, kept):  # noqa: F811
    """Answers without drafts, by a search's name, made once: no neighbour changes a bit of them."""

    def of(name):
        if name not in kept:
            kept[name] = answers(loaded(), requests(random_draws.draws(30), SEARCHES[name], seed=7)), {*checked}
        found, paths = kept[name]
        checked.update(paths)
        return found

    return of


@pytest.mark.parametrize("always", [True, False], ids=["always", "by time"])
@pytest.mark.parametrize("right", [True, False], ids=["right", "random"])
@pytest.mark.parametrize("name", SEARCHES)
def test_answers_are_the_same_bits(name, right, always, loaded, knowing, plain_answers):
    engine = loaded()
    asked = random_draws.draws(30 if right else 10) // (1 if random_draws.FULL else 2)
    plain = plain_answers(name)[:asked]
    if right:
        knowing()
    got = with_drafts(engine, requests(asked, SEARCHES[name], seed=7), always)
    assert facts(got) == facts(plain)
    if always:
        assert sum(result.stats["drafted_nodes"] for result in got) > 0
    if always and right and name not in ("sbon", "ults"):  # their nodes are many and differ
        assert sum(result.stats["passes_saved"] for result in got) > 0
        assert passes(got) < passes(plain)


def fresh_rows(engine, text):
    """The model's rows of a text as the head reads them, evaluated afresh [T, E]."""
    runner, head, found = engine.runner, engine.companions["draft"].runner.model, []
    tree = TokenTree(runner.pool, text)
    keep = Keep(slice(0, len(text)), lambda rows: found.append(head.taken(rows)), head.taps)
    with torch.inference_mode():
        runner.evaluate(PassWork([Chunk(tree, len(text), [], tree.allocate(len(text), []))], [], keeps=[keep]))
    tree.release()
    return found[0]


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
@pytest.mark.parametrize("name", ["greedy", "samples", "trie", "beam-sample"])
def test_heads_read_the_models_rows_of_the_tokens_before(name, kind, loaded, folders, knowing, given):
    """Whatever was drafted, pruned, kept or read again meanwhile; what is guessed has the head's own rows."""
    options = {"kv_memory": 1 << 24, "threads": 1, "parallel": 4}
    engine = loaded() if kind == "eagle" else Engine.load(folders["qwen"], drafts="mtp", **options)
    engine.drafts = None
    asked = lambda: [Request(prompt, SEARCHES[name], 20, ignore_eos=True) for prompt in ([1, 9, 8], [7, 6, 5, 4, 3])]  # noqa: E731
    plain = answers(engine, asked())
    knowing()
    got = with_drafts(engine, asked())
    assert [r.outputs[0].token_ids for r in got] == [r.outputs[0].token_ids for r in plain]
    assert sum(result.stats["passes_saved"] for result in got) > 0
    found, own = given
    assert len(found) > 30 and len(own) > 5
    fresh, first = {}, {9: 1, 6: 7}
    for path, row_E in found.items():
        text = (first[path[0]], *path)
        longest = next((known for known in fresh if known[: len(text)] == text), None)
        if longest is None:
            longest = max((p for p in found if p[: len(path)] == path), key=len)
            longest = (first[path[0]], *longest)
            fresh[longest] = fresh_rows(engine, longest)
        torch.testing.assert_close(row_E, fresh[longest][len(text) - 2], rtol=1e-4, atol=1e-4)


def test_a_long_prompt_is_read_in_parts(loaded, knowing, given):
    engine, prompt = loaded(), [1] + [5 + i % 90 for i in range(299)]
    asked = lambda: [Request(prompt, Greedy(), 40, ignore_eos=True)]  # noqa: E731
    plain = answers(engine, asked())
    knowing()
    got = with_drafts(engine, asked())
    assert facts(got) == facts(plain) and got[0].stats["passes_saved"] > 10
    fresh, found = fresh_rows(engine, prompt), given[0]
    for at in (0, 100, 254, 255, 256, 298):
        torch.testing.assert_close(found[tuple(prompt[1 : at + 2])], fresh[at], rtol=1e-4, atol=1e-4)


def test_one_token_is_not_enough(loaded):
    [got] = with_drafts(loaded(), [Request([5], Greedy(), 20, ignore_eos=True)])
    assert got.stats["drafted_nodes"] == 0


def test_requests_share_the_passes_of_the_head(loaded):
    engine, work = loaded(), {}
    engine.drafts = EagerDrafts(HeadDrafter(engine.companions["draft"].runner))
    try:
        asked = [Request(prompt, Greedy(), 20, ignore_eos=True) for prompt in prompts(4)]
        results = dict(engine.serve(asked, on_step=lambda driver: work.update(all=driver.work["draft"])))
    finally:
        engine.drafts = None
    own = sum(result.stats["draft_forward_passes"] for result in results.values())
    assert work["all"].passes <= own / 2


def test_prefixes_of_the_head_are_cached(loaded, knowing, given):
    """A prompt that the model does not read again has no rows: the head has it in its own cache, but for a token."""
    engine = loaded(prefix_cache="on")
    asked = lambda: [Request([1, *range(5, 105)], Greedy(), 16, ignore_eos=True)]  # noqa: E731
    plain = answers(loaded(), asked())
    with_drafts(engine, asked())
    knowing()
    given[0].clear()
    [got] = with_drafts(engine, asked())
    assert facts([got]) == facts(plain)
    assert got.stats["reused_tokens"] == 100 and got.stats["passes_saved"] > 8
    assert min(map(len, given[0])) >= 99  # the head did not read the prompt again


@pytest.mark.parametrize("name", ["samples", "trie", "sbon"])
def test_small_pools(name, loaded, knowing):
    """Requests give way to each other and begin again; the head's pages go with them."""
    engine, served = loaded(), 0
    asked = functools.partial(requests, 6, SEARCHES[name])
    unit = engine.pool.bytes_per_token + engine.companions["draft"].pool.bytes_per_token
    plain = answers(engine, asked())
    knowing()
    for tokens in (90, 120, 200):
        small = loaded(kv_memory=tokens * unit)
        try:
            alone = answers(small, asked())
        except KVMemoryError:
            continue
        assert facts(alone) == facts(plain)
        assert facts(with_drafts(small, asked())) == facts(plain)
        served += 1
    assert served


@pytest.mark.parametrize("rules", [{"regex": "[a-z]{4,40}"}, {"repetition_penalty": 1.3}], ids=["regex", "penalty"])
@pytest.mark.parametrize("name", ["greedy", "samples", "trie"])
def test_drafts_obey_what_edits_rows(name, rules, loaded):
    engine = loaded()
    asked = lambda: [Request(prompt, SEARCHES[name], 12, logprobs=1, **rules) for prompt in prompts(3)]  # noqa: E731
    plain = answers(engine, asked())
    assert facts(with_drafts(engine, asked())) == facts(plain)


def test_a_head_with_nan_drafts_nothing(loaded, monkeypatch):
    engine = loaded()
    head = engine.companions["draft"].runner.model
    monkeypatch.setattr(head, "logits", lambda hidden_NE, impl: torch.full((len(hidden_NE), VOCAB // 2), math.nan))
    plain = answers(engine, requests(2, Greedy()))
    got = with_drafts(engine, requests(2, Greedy()))
    assert facts(got) == facts(plain) and sum(result.stats["drafted_nodes"] for result in got) == 0


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_by_name(kv_dtype, folders):
    engine = Engine.load(
        folders["target"], draft=folders["head"], drafts="model", kv_memory=1 << 22, threads=1, kv_dtype=kv_dtype
    )
    [result] = answers(engine, requests(1, Greedy()))
    assert result.stats["draft_forward_passes"] > 0
    [result] = engine.generate([[1, 2, 3]], Greedy(), max_new_tokens=8, ignore_eos=True, drafts="model")
    assert engine.drafters._made == {}  # the engine's own
    with pytest.raises(UsageError, match="drafts: the model was loaded without its own head"):
        engine.generate([[1, 2, 3]], Greedy(), max_new_tokens=8, drafts="mtp")
    with pytest.raises(UsageError, match="this search needs a draft model, and the draft is a head of the model"):
        engine.generate([[1, 2, 3]], DSBD(), max_new_tokens=8)


@pytest.mark.parametrize(
    "golden", ["qwen3_5/plain", "experts/qwen3_5_recurrent", "experts/qwen3_next", "wrapped/qwen3_5"]
)
def test_heads_of_the_checkpoints_own(golden, tmp_path, knowing):
    shutil.copytree(GOLDEN / golden, tmp_path, dirs_exist_ok=True)
    add_mtp(tmp_path)
    engine = Engine.load(tmp_path, drafts="mtp", kv_memory=1 << 24, threads=1)
    engine.drafts = None
    for name in ("greedy", "sample", "trie"):
        asked = lambda name=name: requests(4, SEARCHES[name], ignore_eos=True)  # noqa: E731
        plain = answers(engine, asked())
        knowing()
        got = with_drafts(engine, asked())
        assert [[o.token_ids for o in r.outputs] for r in got] == [[o.token_ids for o in r.outputs] for r in plain]
        assert sum(result.stats["passes_saved"] for result in got) > 0


def test_what_has_no_head_of_its_own(folders):
    with pytest.raises(CheckpointError, match=r"the checkpoint has no draft head of its own \(mtp\.\*\)"):
        Engine.load(GOLDEN / "qwen3_5/plain", drafts="mtp", kv_memory=1 << 22)
    with pytest.raises(CheckpointError, match="the checkpoint has no draft head of its own"):
        Engine.load(folders["target"], drafts="mtp", kv_memory=1 << 22)
    with pytest.raises(UsageError, match="drafts: mtp is the head of the model's own checkpoint"):
        Engine.load(folders["qwen"], draft=folders["qwen"], drafts="mtp", kv_memory=1 << 24)

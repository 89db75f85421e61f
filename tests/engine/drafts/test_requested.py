"""Which drafts a request has: the engine's, none, those that it names, or a drafter of its own."""

import json
import sys
from types import SimpleNamespace

import pytest

from engine import Engine, Request, UsageError
from engine.batch import main
from engine.demo import demo_folder
from engine.drafts import Draft
from engine.drafts.backoff import NGramDrafter
from engine.drafts.model import ModelDrafter
from engine.drafts.suffixes import CAPACITY, FIRST_CAPACITY, SuffixDrafter
from search import DSBD, Greedy, Trie
from tests.marks import needs_cpp

pytestmark = needs_cpp
OPTIONS = {"kv_memory": 1 << 25, "threads": 1}


@pytest.fixture(scope="module")
def engine():
    return Engine.load(demo_folder(), draft=demo_folder("draft"), **OPTIONS)


def chosen(engine, drafts, search=None):
    return engine.service().check(Request([5, 6], search or Greedy(), drafts=drafts)).drafts


def test_names(engine):
    for name, kind in [("ngrams", NGramDrafter), ("suffix", SuffixDrafter), ("auto", SuffixDrafter)]:
        assert isinstance(chosen(engine, name).drafter, kind)
        assert chosen(engine, name) is chosen(engine, name)  # what it has learnt is kept
    assert chosen(engine, "suffix").drafter.store.capacity == FIRST_CAPACITY < CAPACITY
    assert isinstance(chosen(engine, "model").drafter, ModelDrafter)
    assert chosen(engine, "off") is chosen(engine, False) is chosen(engine, True) is None


def test_the_engines_own_drafter_is_taken_where_it_is_of_the_kind():
    engine = Engine.load(demo_folder(), drafts="suffix", **OPTIONS)
    assert chosen(engine, "suffix") is chosen(engine, "auto") is chosen(engine, True) is engine.drafts
    assert isinstance(chosen(engine, "ngrams").drafter, NGramDrafter)
    with pytest.raises(UsageError, match="drafts: model needs a draft model"):
        chosen(engine, "model")


def test_drafts_that_memory_does_not_count_are_refused():
    """A plan of the whole process has no rows for drafts if the engine is loaded without."""
    own, options = SimpleNamespace(open=lambda salt, prompt: None), {"memory": "900M", "threads": 1}
    without, some = (Engine.load(demo_folder(), drafts=drafts, **options) for drafts in ("off", "ngrams"))
    for drafts in ("ngrams", "suffix", "model", own):
        with pytest.raises(UsageError, match="drafts: --memory leaves no room for drafts") as refused:
            chosen(without, drafts)
        assert "load the model with --drafts" in refused.value.remedy
    assert [chosen(without, drafts) for drafts in ("off", "auto", True, False)] == [None] * 4
    assert chosen(some, "ngrams") is some.drafts and isinstance(chosen(some, "suffix").drafter, SuffixDrafter)


def test_a_drafter_of_ones_own(engine):
    class Own:
        def open(self, salt, prompt):
            return SimpleNamespace(
                learn=lambda tokens: None, close=lambda tokens: None, draft=lambda *_: Draft([265], [-1], [0.5])
            )

    own = Own()
    assert chosen(engine, own).drafter is own
    plain = engine.generate(["The moon"], Trie(beams=3), max_new_tokens=12)
    [got] = engine.generate(["The moon"], Trie(beams=3), max_new_tokens=12, drafts=own)
    assert got.outputs == plain[0].outputs and "drafted_nodes" in got.stats


def test_searches_with_drafts_of_their_own_have_no_others(engine):
    assert chosen(engine, "ngrams", DSBD()) is None


@pytest.mark.parametrize("wrong", ["fast", "", 1, None, ["ngrams"], {"open": 1}])
def test_other_values_are_refused(wrong, engine):
    with pytest.raises(UsageError, match=r"^drafts: expected off, auto, .*, true or false, got "):
        chosen(engine, wrong)


def test_requests_of_different_drafts_share_passes(engine):
    names = ["off", "ngrams", "suffix", "model", "auto", True]
    asked = [Request("1 1 1 1 1 1 1", Trie(beams=3), 24, ignore_eos=True, drafts=name) for name in names]
    results = dict(engine.serve(asked))
    assert all(results[i].outputs == results[0].outputs for i in results)
    assert ["drafted_nodes" in results[i].stats for i in range(6)] == [False, True, True, True, True, False]
    assert "draft_forward_passes" in results[3].stats and "draft_forward_passes" not in results[1].stats


def test_lines_of_a_batch(tmp_path, monkeypatch):
    lines = [{"prompt": "The moon", "params": {"drafts": name}} for name in ("off", "ngrams", "model", True, "fast")]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(sys, "argv", ["batch"])
    main(["--input", str(source), "--output", str(target), "--max-new-tokens", "8", "--threads", "1", "--quiet"])
    answers = {(a := json.loads(line))["id"]: a for line in target.read_text().splitlines()}
    stats = [answers[i].get("stats", {}) for i in range(4)]
    assert ["drafted_nodes" in each for each in stats] == [False, True, True, False]
    assert len({answers[i]["outputs"][0]["text"] for i in range(4)}) == 1
    assert "drafts: expected off, auto" in json.dumps(answers[4]["error"])

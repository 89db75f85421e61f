"""A draft and a reward model beside the target: one budget, one driver, trees of their own."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine import Engine, KVMemoryError, UsageError
from engine.app.chat import main
from search.base import Evaluate, Output, Search, SearchResult
from tools.random_checkpoint import make

GOLDEN = Path(__file__).parents[1] / "golden"
REWARD = GOLDEN / "llama" / "classifier"


def checkpoint(folder, vocab=260, layers=2, **options):
    make(folder, layers=layers, width=32, mlp=48, heads=4, kv_heads=2, vocab=vocab, max_positions=200, **options)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("draft"), layers=1, seed=2)


@pytest.fixture(scope="module")
def engine(target, draft):
    return Engine.load(target, draft=draft, reward=REWARD, dtype="float32", kv_memory=1 << 22)


@dataclass(frozen=True)
class AskAll(Search):
    """Reads the prompt with all three models, then one more token with each; keeps what they said."""

    told: dict
    models = ("draft", "reward")

    def run(self, task):
        prompt = [5, 6, 7]
        for role, tree in {"target": task.tree, **{r: task.open_tree(r, prompt) for r in self.models}}.items():
            first, _ = yield Evaluate(tree, [tree.root])
            [node] = tree.grow([tree.root], [9])
            second, _ = yield Evaluate(tree, [node])
            self.told[role] = (first[0].clone(), second[0].clone())
        return SearchResult([Output([9], 0.0, 0.0, "length")])


def test_each_model_answers_for_its_own_trees(engine, draft):
    search = AskAll({})
    [result] = engine.generate([[5, 6, 7]], search)
    own = Engine.load(draft, kv_memory=1 << 20).logits([5, 6, 7, 9]).log_softmax(-1)
    for i, row in enumerate(search.told["draft"]):
        assert row.tolist() == pytest.approx(own[2 + i].tolist(), abs=1e-5)
    scores = [float(row) for row in search.told["reward"]]
    assert scores == pytest.approx(engine.companions["reward"].scores([[5, 6, 7], [5, 6, 7, 9]]), abs=1e-5)
    assert search.told["target"][0].shape == (260,)
    assert result.stats["forward_passes"] == 2 and result.stats["nodes_evaluated"] == 2
    for role in ("draft", "reward"):
        assert result.stats[f"{role}_forward_passes"] == 2 and result.stats[f"{role}_nodes_evaluated"] == 4
        assert result.stats[f"{role}_seconds"] > 0
        assert engine.companions[role].pool.used_pages == 0
    assert engine.pool.used_pages == 0


def test_one_budget_for_all(engine, target):
    pools = [engine.pool, *(e.pool for e in engine.companions.values())]
    assert len({pool.pages for pool in pools}) == 1
    total = sum(pool.pages * pool.page_bytes for pool in pools)
    assert (1 << 22) - sum(pool.page_bytes for pool in pools) < total <= 1 << 22
    with pytest.raises(KVMemoryError, match="less than a page"):
        Engine.load(target, reward=REWARD, kv_memory=engine.pool.page_bytes)


def test_a_model_that_is_missing_is_asked_for(target):
    with pytest.raises(UsageError, match=r"needs a draft model\ngive --draft DIR"):
        Engine.load(target, kv_memory=1 << 20).generate([[5]], AskAll({}))


def test_models_that_do_not_fit_are_refused(target, draft, tmp_path, capsys, monkeypatch):
    with pytest.raises(UsageError, match="reward model has no scalar head"):
        Engine.load(target, reward=draft)
    with pytest.raises(UsageError, match="the draft is a reward model"):
        Engine.load(REWARD).add("draft", Engine.load(REWARD))
    other = checkpoint(tmp_path, vocab=264, seed=3)
    monkeypatch.setattr("sys.stdin", None)
    assert main(["--model", str(target), "--draft", str(other), "-p", "Hello"]) == 2
    assert "another tokenizer" in capsys.readouterr().err
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    checkpoint(tmp_path / "renamed", seed=3)
    vocab = tokenizer["model"]["vocab"]
    a, b = (next(t for t, i in vocab.items() if i == n) for n in (100, 101))
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (tmp_path / "renamed" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UsageError, match="token 100 is"):
        Engine.load(target, draft=tmp_path / "renamed")
    with pytest.raises(UsageError, match="expected draft or reward"):
        Engine.load(target).add("judge", Engine.load(draft))

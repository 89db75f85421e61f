"""The demo models' text and training: equal seeds give equal text, what is trained is what the engine reads."""

import json
import re
import shutil
from pathlib import Path
from random import Random

import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from engine import Engine
from engine.demo import demo_folder
from tools.bench.texts import prompt
from tools.demo import train
from tools.demo.generator import TASKS, dialogue, pair
from tools.demo.train import BEGIN, END, encode

FOLDER = demo_folder().parent


@pytest.fixture(scope="module")
def target() -> Engine:
    return Engine.load(demo_folder(), dtype="float32", kv_memory=32 << 20)


# --- generator ---


def test_same_seed_same_text():
    talks = [[dialogue(Random(f"{seed}:{i}")).messages() for i in range(50)] for seed in "aab"]
    assert talks[0] == talks[1] != talks[2]
    assert {turn.task for i in range(500) for turn in dialogue(Random(f"tasks:{i}")).turns} == {*TASKS}


def test_pairs_differ():
    faults = set()
    for i in range(1000):
        judged = pair(Random(f"pairs:{i}"))
        faults.add(judged.fault)
        assert judged.better == judged.dialogue.turns[-1].reply != judged.worse
    assert faults == {"wrong", "rude", "unhelpful", "rambling", "beside", "torn", "garbled"}


# --- text ---


def test_training_rows_are_what_the_engine_reads(target: Engine):
    tokenizer = tokenizers.Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))
    assert target.template is not None
    for i in range(40):
        talk = dialogue(Random(f"rows:{i}"))
        rendered = target.template.render(talk.messages(), add_generation_prompt=False)
        row = encode(tokenizer, talk)
        assert row.ids == target.tokenizer.encode_rendered(rendered)
        assert row.ids[: row.reply] == prompt(target, talk)
        assert len(row.weights) == len(row.ids) and row.ids[-1] == END
        assert target.tokenizer.decode(row.ids[row.reply :]) == talk.turns[-1].reply
    assert tokenizer.encode("Once upon").ids[0] == BEGIN
    assert len(tokenizer.encode("2026", add_special_tokens=False).ids) == 4


# --- training ---


def test_training_from_nothing_to_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(train, "CHUNK", 40)
    monkeypatch.setattr(train, "TOKENS", 800)
    monkeypatch.setattr(train, "STEPS", {"target": 51, "reward": 2, "draft": 2})
    for name in train.STEPS:
        shutil.copytree(FOLDER / name, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((tmp_path / name / "config.json").read_text())
        config |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
                   "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert train.main(["--folder", str(tmp_path)]) == 0
    losses = [float(loss) for loss in re.findall(r"target: step \d+, loss ([\d.]+)", capsys.readouterr().err)]
    assert len(losses) == 2 and losses[1] < losses[0] - 0.5

    engine = Engine.load(tmp_path / "target", draft=tmp_path / "draft", reward=tmp_path / "reward",
                         dtype="float32", kv_memory=1 << 20)  # fmt: skip
    ids = engine.tokenizer.encode("What is 2 + 3?")
    for name, said in (("target", engine.logits(ids)), ("draft", engine.companions["draft"].logits(ids))):
        weights, rows = trained(tmp_path / name, ids)
        torch.testing.assert_close(said.float(), train.logits(weights, rows), atol=1e-4, rtol=1e-4)
    [score] = engine.companions["reward"].scores([ids])
    weights, rows = trained(tmp_path / "reward", ids)
    assert score == pytest.approx((rows[-1] @ weights["score.weight"][0]).item(), abs=1e-4)


def trained(folder: Path, ids: list[int]) -> tuple[train.Weights, torch.Tensor]:
    """The weights that were written, and the rows that the training's own model makes of them."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    return weights, train.hidden(weights, config, torch.tensor([ids]), torch.float32)[0]

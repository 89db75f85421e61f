"""The demo models' text and training: the generator checks itself, what is trained is what the engine reads."""

import json
from pathlib import Path
from random import Random

import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from engine import Engine
from engine.demo import ROLES, demo_folder
from tools.demo import card, evaluate, train
from tools.demo.generator import STYLES, TASKS, dialogue, pair
from tools.demo.net import Net, Size
from tools.demo.talk import Talk, is_brief, is_polite
from tools.demo.text import BEGIN, END, batches, encode, rows

FOLDER = demo_folder().parent


@pytest.fixture(scope="module")
def target() -> Engine:
    return Engine.load(demo_folder(), dtype="float32", kv_memory=32 << 20)


# --- generator ---


def test_same_seed_same_text():
    talks = [[dialogue(Random(f"{seed}:{i}")).messages() for i in range(50)] for seed in "aab"]
    assert talks[0] == talks[1] != talks[2]


def test_every_answer_is_checked():
    tasks = set()
    for i in range(3000):
        for turn in dialogue(Random(f"self-check:{i}")).turns:
            tasks.add(turn.task)
            assert turn.check(turn.reply), turn
            assert not turn.check(turn.wrong), turn
            assert not turn.check(""), turn
    assert tasks == {*TASKS}


@pytest.mark.parametrize("style", STYLES)
def test_styles_are_kept(style: str):
    kept = {"brief": is_brief, "polite": is_polite}[style]
    talk = Talk(Random(0), style)
    own = [talk.opposite() for _ in range(200)]
    own = [turn for turn in own if not any(word in turn.user.lower() for word in ("brief", "word", "short", "polite"))]
    assert own and all(kept(turn.reply) for turn in own)
    assert not own[0].check("I am not telling you what it is.")


def test_what_was_told_is_what_is_asked():
    asked = 0
    for i in range(300):
        talk = Talk(Random(f"memory:{i}"))
        talk.tell()
        turn = talk.ask()
        if "not told" not in turn.reply:
            asked += 1
            assert any(word in turn.reply.lower() for value in talk.facts.values() for word in value.lower().split())
    assert asked > 200


def test_pairs_differ_and_the_better_is_right():
    faults = set()
    for i in range(1000):
        judged = pair(Random(f"pairs:{i}"))
        faults.add(judged.fault)
        assert judged.better != judged.worse
        assert judged.dialogue.turns[-1].check(judged.better)
        if judged.fault in ("wrong", "beside"):
            assert not judged.dialogue.turns[-1].check(judged.worse)
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
        assert row.ids[: row.reply] == evaluate.prompt(target, talk)
        assert len(row.weights) == len(row.ids) and row.ids[-1] == END
        assert target.tokenizer.decode(row.ids[row.reply :]) == talk.turns[-1].reply
    assert tokenizer.encode("Once upon").ids[0] == BEGIN
    assert len(tokenizer.encode("2026", add_special_tokens=False).ids) == 4


def test_batches_hold_every_row_once():
    tokenizer = tokenizers.Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))
    drawn = list(rows(tokenizer, "batches", 200))
    made = batches(drawn, 1000, Random(0))
    assert sum(len(ids) for ids, _ in made) == len(drawn)
    assert sum(int((ids != 0).sum()) for ids, _ in made) == sum(len(row.ids) for row in drawn)
    assert all(ids.numel() <= 1000 or len(ids) == 1 for ids, _ in made)
    assert all(bool((weights[ids == 0] == 0).all()) for ids, weights in made)


# --- training ---


def run(folder: Path, *flags: str) -> None:
    options = ["--tiny", "--chunk", "40", "--tokens", "800", "--device", "cpu"]
    assert train.main([*flags, *options, "--work", str(folder), "--out", str(folder / "out")]) == 0


def test_training_from_nothing_to_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture):
    run(tmp_path, "--steps", "2")
    run(tmp_path, "target", "--steps", "12")
    assert "target: going on at step 2" in capsys.readouterr().err
    figures = json.loads((tmp_path / "out/figures.json").read_text())["training"]
    assert {name: figure["step"] for name, figure in figures.items()} == {"target": 12, "reward": 2, "draft": 2}
    curve = [point["validation"] for point in figures["target"]["curve"]]
    assert curve[-1] < curve[0] - 0.05
    assert (tmp_path / "out/SHA256SUMS").read_text().count("\n") == 14

    engine = Engine.load(tmp_path / "out/target", draft=tmp_path / "out/draft", reward=tmp_path / "out/reward",
                         dtype="float32", kv_memory=1 << 20)  # fmt: skip
    ids = engine.tokenizer.encode("What is 2 + 3?")
    for folder, said in (("target", engine.logits(ids)), ("draft", engine.companions["draft"].logits(ids))):
        torch.testing.assert_close(said.float(), trained(tmp_path / "out" / folder)(ids), atol=1e-4, rtol=1e-4)
    [score] = engine.companions["reward"].scores([ids])
    assert score == pytest.approx(trained(tmp_path / "out/reward")(ids)[-1].item(), abs=1e-4)


def trained(folder: Path):
    """What the training's own model makes of the weights that were written: logits, or scores."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    net = Net(Size(config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"],
                   config["num_attention_heads"], config["num_key_value_heads"], "score.weight" in weights,
                   config["vocab_size"]))  # fmt: skip
    net.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    head = net.score if net.size.scores else net.logits
    return lambda ids: head(net.hidden(torch.tensor([ids])))[0].detach()


def test_unknown_models_are_refused(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        train.main(["teacher"])
    assert "expected models out of target, reward, draft, got teacher" in capsys.readouterr().err


# --- the bundled models ---


def test_the_card_has_the_figures_and_the_figures_reach_the_goals():
    figures = json.loads((FOLDER / "figures.json").read_text(encoding="utf-8"))
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == card.card(figures)
    told = figures["evaluation"]
    assert told["target"]["questions"] == 500 and told["target"]["accuracy"] >= 0.9
    assert told["draft"]["agreement"] >= 0.6
    assert told["reward"]["accuracy"] >= 0.85
    for name in ROLES:
        weights = load_file(FOLDER / name / "model.safetensors")
        assert figures["training"][name]["parameters"] == sum(tensor.numel() for tensor in weights.values())
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_the_bundled_models_are_that_good(target: Engine):
    """The same figures on a part of the questions, with room for its chance: four standard deviations at least."""
    talks = list(evaluate.questions(60, "another seed"))
    figures, texts = evaluate.answers(target, talks)
    assert figures["accuracy"] >= 0.75
    draft = Engine.load(demo_folder("draft"), dtype="float32", kv_memory=8 << 20)
    assert evaluate.agreement(draft, texts[:20]) >= 0.5
    reward = Engine.load(demo_folder("reward"), dtype="float32", kv_memory=32 << 20)
    assert evaluate.preference(reward, evaluate.pairs(60, "another seed"))["accuracy"] >= 0.7

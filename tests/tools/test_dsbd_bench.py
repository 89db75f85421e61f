"""The DSBD benchmark on tiny shapes: it runs, its figures agree."""

import pytest
import torch

from engine import Engine
from tests.marks import needs_figures
from tests.tools.output import last_line
from tools.bench.__main__ import main
from tools.bench.dsbd import mark_front, simulate, speedups
from tools.random_checkpoint import make


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    for seed, name in enumerate(("target", "draft")):
        make(folder / name, layers=1, width=32, mlp=48, heads=2, vocab=300, seed=seed)
    return folder


def test_front(pair, capsys, tmp_path):
    page = tmp_path / "page.md"
    command = ["dsbd", "front", "--model", str(pair / "target"), "--draft", str(pair / "draft"), "--prompts", "2",
               "--new-tokens", "6", "--draft-beams", "2", "--threshold", "0.7", "--min-width", "1", "2", "3",
               "--beams", "1", "2", "--save", str(page)]  # fmt: skip
    assert main(command) == 0
    found = last_line(capsys)
    labels = [row["label"] for row in found["rows"]]
    assert labels == ["beam-sample W=1", "beam-sample W=2", "speculative gamma=3",
                      "dsbd W_S=2 t=0.7 W_min=1", "dsbd W_S=2 t=0.7 W_min=2"]  # fmt: skip
    for row in found["rows"]:
        assert row["quality"] < 0 < row["speed"] and row["seconds"] >= row["draft_seconds"]
        assert (row["draft_seconds"] > 0) == (row["search"] != "beam-sample")
    assert [r["beams"] for r in found["speedups"]] == ["1", "2"]
    assert "bench:dsbd-target-draft" in page.read_text() and str(tmp_path) not in page.read_text()


def test_front_of_n_grams(pair, capsys):
    command = ["dsbd", "front", "--model", str(pair / "target"), "--draft", str(pair / "draft"), "--prompts", "1",
               "--new-tokens", "4", "--draft-beams", "2", "--threshold", "0.7", "--min-width", "1", "--beams", "1",
               "--corpus-tokens", "300"]  # fmt: skip
    assert main(command) == 0
    found = last_line(capsys)
    model, counted = found["rows"][-2:]
    assert (model["label"], counted["label"]) == ("dsbd W_S=2 t=0.7 W_min=1", "n-grams W_S=2 t=0.7 W_min=1")
    assert counted["draft_seconds"] == 0 < model["draft_seconds"] and len(found["speedups"]) == 2


def test_which_pair(capsys):
    assert main(["dsbd", "front"]) == 2
    assert "--simulate" in capsys.readouterr().err


@needs_figures
def test_figure(pair, capsys, tmp_path):
    figure = tmp_path / "front.svg"
    command = ["dsbd", "front", "--model", str(pair / "target"), "--draft", str(pair / "draft"), "--prompts", "1",
               "--new-tokens", "4", "--draft-beams", "2", "--beams", "1", "--figure", str(figure)]  # fmt: skip
    assert main(command) == 0 and figure.read_text().startswith("<?xml")


def test_overhead(capsys):
    assert main(["dsbd", "overhead", "--vocab", "640", "--runs", "2", "--new-tokens", "12"]) == 0
    rows = last_line(capsys)["rows"]
    assert len(rows) == 8 and all(0 < row["ms"]["min"] <= row["ms"]["median"] <= row["ms"]["max"] for row in rows)
    assert all(1 <= row["steps_per_round"] <= 4 for row in rows)


def test_fronts_and_speedups():
    rows = [
        {"search": "beam-sample", "label": "beam-sample W=1", "quality": -2.0, "speed": 10.0},
        {"search": "beam-sample", "label": "beam-sample W=2", "quality": -1.0, "speed": 5.0},
        {"search": "dsbd", "label": "dsbd a", "quality": -1.5, "speed": 15.0},
        {"search": "dsbd", "label": "dsbd b", "quality": -1.7, "speed": 12.0},
    ]
    counted = {"search": "n-grams", "label": "n-grams a", "quality": -0.5, "speed": 20.0}
    assert [r["ratio"] for r in speedups([*rows, counted])] == [1.5, None, 2.0, 4.0]
    mark_front(rows[2:])
    assert [row["front"] for row in rows[2:]] == [True, False]
    one, two = speedups(rows)
    assert one["ratio"] == 1.5 and one["by"] == "dsbd a" and two["ratio"] is None and two["text"] == "none"


def test_the_simulated_pair_agrees_as_told(tmp_path):
    """The closer, the smaller the deviation; the draft's logits are the target's without what context adds."""
    ids, apart = list(range(3, 40)), []
    for deviation in (0.0, 0.5, 2.0):
        target, draft = simulate(tmp_path / str(deviation), deviation, layers=1, vocab=512)
        logits = [Engine.load(folder).logits(ids)[:, :300] for folder in (target, draft)]
        apart.append(float((torch.log_softmax(logits[0], -1) - torch.log_softmax(logits[1], -1)).std()))
    assert apart[0] < 0.05 < apart[1] < 0.8 < apart[2] < 3

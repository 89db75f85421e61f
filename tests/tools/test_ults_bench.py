"""The ULTS benchmark, at sizes that measure nothing."""

import importlib.util
import json

import pytest

from tools.bench.__main__ import main
from tools.bench.ults import abscissa
from tools.random_checkpoint import make

FIGURES = importlib.util.find_spec("matplotlib") is not None


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_curves_are_read_where_they_reach_a_value():
    curve = [(10, -1.0), (5, -3.0), (20, -1.0), (30, -0.5)]
    assert abscissa(curve, -2.0) == 7.5 and abscissa(curve, -1.0) == 10 and abscissa(curve, -0.75) == 25
    assert abscissa(curve, -3.1) is None and abscissa(curve, -0.4) is None


def test_toy(capsys):
    assert main(["ults", "toy", "--trees", "3"]) == 0
    result = last_line(capsys)
    assert len(result["results"]) == 4 * 3 * 2 * 3
    for row in result["results"]:
        assert row["value"] <= result["optima"][str(row["alpha"])] + 1e-6 and row["nodes"] >= 5


def test_overhead(capsys):
    argv = ["ults", "overhead", "--depth", "4", "--k-max", "3", "--vocab", "50", "--samples", "20", "--runs", "2"]
    assert main(argv) == 0
    rows = last_line(capsys)["results"]
    assert [(r["select"], r["batch"]) for r in rows][:2] == [("flat", 1), ("flat", 8)] and len(rows) == 6
    assert all(r["min"] <= r["ms"] <= r["max"] and 4 <= r["nodes"] <= 10 for r in rows)


@pytest.mark.parametrize("save", [False, True])
def test_model(tmp_path, capsys, save):
    if save and not FIGURES:
        pytest.skip("matplotlib is not installed (extra viz)")
    make(tmp_path / "m", layers=1, width=32, mlp=48, heads=4, vocab=260, max_positions=64, seed=2)
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    argv = ["ults", "model", "--model", str(tmp_path / "m"), "--prompts", "2", "--prompt-tokens", "3", "--depths", "4"]
    argv += ["--beams", "1", "3", "--k-max", "2", "3", "--select", "flat", "--batches", "2"]
    assert main(argv + ["--save", str(page)] * save) == 0
    rows = last_line(capsys)["results"]
    assert [(r["search"], r["k"]) for r in rows] == [
        ("beam", 1),
        ("beam", 3),
        ("flat, batch 2", 2),
        ("flat, batch 2", 3),
    ]
    assert [r["nodes"] for r in rows[:2]] == [4, 1 + 3 * 3]
    assert rows[0]["value"] <= rows[1]["value"] and all(r["passes"] <= 10 and r["ms"] > 0 for r in rows)
    if save:
        assert "flat, batch 2" in page.read_text() and (page.parent / "ults-m.svg").read_text().startswith("<?xml")


@pytest.mark.skipif(FIGURES, reason="matplotlib is installed")
def test_figures_without_matplotlib(capsys, tmp_path):
    assert main(["ults", "toy", "--trees", "2", "--save", str(tmp_path / "page.md")]) == 2
    assert "coppice[viz]" in capsys.readouterr().err

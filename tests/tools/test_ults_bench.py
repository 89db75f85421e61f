"""The ULTS benchmark, at sizes that measure nothing."""

import pytest

from tests.marks import HAS_FIGURES
from tests.tools.output import last_line
from tools.bench.__main__ import main
from tools.bench.curves import abscissa, ordinate
from tools.bench.ults import beside_beams
from tools.random_checkpoint import make


def test_curves_are_read_where_they_reach_a_value():
    curve = [(10, -1.0), (5, -3.0), (20, -1.0), (30, -0.5)]
    assert abscissa(curve, -2.0) == 7.5 and abscissa(curve, -1.0) == 10 and abscissa(curve, -0.75) == 25
    assert abscissa(curve, -3.1) is None and abscissa(curve, -0.4) is None
    assert [ordinate(curve, x) for x in (5, 7.5, 25, 30)] == [-3.0, -2.0, -0.75, -0.5]


def test_what_beam_search_needs_is_read_at_the_same_width():
    """Also where its times are out of order, as measured times may be."""
    beams = [(1, -4.0, 10, 9.0), (3, -2.0, 30, 8.0), (5, -1.0, 50, 10.0)]
    rows = [dict(depth=5, search="beam", k=k, value=v, nodes=n, ms=ms, cpu_ms=ms, passes=5) for k, v, n, ms in beams]
    rows += [
        dict(depth=5, search="flat", k=7, value=v, nodes=10, ms=17.0, cpu_ms=17.0, passes=7) for v in (-3.0, -1.5, -0.5)
    ]
    beside_beams(rows)
    first, second, none = rows[3:]
    assert (first["nodes_of_beam"], first["ms_of_beam"]) == (0.5, 2.0)
    assert (second["nodes_of_beam"], second["ms_of_beam"]) == (0.25, 17 / 9)
    assert [row["cpu_ms_of_beam"] for row in rows[3:]] == [2.0, 17 / 9, None]
    assert first["break_even"] == 2 / 10 and second["break_even"] == pytest.approx(2 / 30)
    assert none["nodes_of_beam"] is none["ms_of_beam"] is none["break_even"] is rows[0]["nodes_of_beam"] is None


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
    if save and not HAS_FIGURES:
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

"""The papers' comparisons at sizes that measure nothing: every part runs on the demo, the page is written and kept."""

import json
import re
from pathlib import Path

import pytest

from tests.marks import needs_figures
from tools.bench.__main__ import main
from tools.bench.papers import aded, dsbd, sbon, trie, ults
from tools.random_checkpoint import make

TINY = ["--layers", "1", "--width", "64", "--heads", "2", "--vocab", "1536"]


def ask(capsys, *words):
    """Exit code, what was printed before the JSON line, and that."""
    code = main(["papers", "--quick", "--threads", "1", *words])
    out = capsys.readouterr().out.splitlines()
    return code, "\n".join(out[:-1]), json.loads(out[-1])["papers"]


def test_trie(capsys):
    code, text, found = ask(capsys, "trie")
    rows = found["trie"]["rows"]
    assert code == 0 and [(r["text"], r["beams"]) for r in rows] == [(t, b) for t in ("short", "long") for b in (1, 3)]
    for row in rows:
        assert row["trie"] <= row["batch"] and row["score"] < 0 < row["tokens_per_second"]
        assert (row["trie"] == row["batch"]) == (row["beams"] == 1)
        assert max(row["series"]["batch"]) >= max(row["series"]["trie"])
    assert [row["peer"] for row in found["trie"]["measured"]] == ["coppice", "transformers"]
    assert "19.95" not in text and "4.06 → 1.51 (2.69x)" in text  # table 1 for the beams that were run


def test_ults(capsys):
    code, text, found = ask(capsys, "ults")
    rows = found["ults"]["rows"]
    names = ["beam", "ULTS, Dirichlet 1e-4", "ULTS, empirical", "flat, batch 8"]
    assert code == 0 and list(dict.fromkeys(row["search"] for row in rows)) == names
    assert [r["nodes"] for r in rows[:2]] == [4, 1 + 3 * 3] and all(r["value"] < 0 for r in rows)
    assert {row["alpha"] for row in found["ults"]["toy"]} == set(ults.ALPHAS)
    assert "-18.31" in text and "137.9" in text


def test_sbon(capsys):
    code, text, found = ask(capsys, "sbon")
    rows = {row["search"]: row for row in found["sbon"]["rows"]}
    assert code == 0 and list(rows)[:4] == ["Bo8", "SBoN", "Bo2", "SBoN, the paper's rule"]
    assert rows["SBoN"]["score"] >= rows["SBoN, the paper's rule"]["score"] and rows["Bo8"]["score"] == 100
    assert "4.95" in text


def test_aded(capsys):
    code, text, found = ask(capsys, "aded")
    assert code == 0 and all(row["same"] and row["accept_length"] >= 1 for row in found["aded"]["rows"])
    assert set(found["aded"]["curves"]) == {"adapting", "not adapting"}
    assert "paper: MT-Bench, Vicuna-7B" in text and "1.91x" in text  # 24.77 / 12.95


def test_dsbd(capsys):
    code, text, found = ask(capsys, "dsbd")
    kinds = {row["search"] for row in found["dsbd"]["rows"]}
    assert code == 0 and kinds == set(dsbd.bench.COLORS) - {"n-grams"}  # drawn only where there is a corpus
    assert "1.5 to 1.9" in text and "paper: Llama-2, SQuAD, DSBD" in text


@pytest.mark.full
def test_a_random_model_shows_what_it_can(capsys):
    code, text, found = ask(capsys, "trie", "ults", "sbon", "aded", "--random", *TINY)
    assert code == 0 and "not_shown" in found["ults"] and "not_shown" in found["sbon"]
    assert "nothing to be shown" in text and all(row["same"] for row in found["aded"]["rows"])
    assert {row["input"] for row in found["trie"]["rows"]} == {12}


def test_a_paper_that_fails_does_not_lose_the_others(capsys, monkeypatch, tmp_path):
    def fail(models):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(trie, "run", fail)
    assert main(["papers", "--quick", "--threads", "1", "trie", "dsbd"]) == 1
    told = capsys.readouterr()
    found = json.loads(told.out.splitlines()[-1])["papers"]
    assert found["trie"] == {"failed": "RuntimeError: out of luck"} and found["dsbd"]["rows"]
    assert "trie failed: out of luck" in told.err and "Traceback" not in told.err


@pytest.mark.parametrize("command", [["papers", "ults"], ["kv"], ["speed"], ["ults", "toy"], ["gpu"]], ids=str)
def test_pages_that_cannot_be_written_are_refused_before_anything_is_measured(command, capsys, tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    for page, words in (("none/page.md", "no such folder"), (".", "a folder"), ("picture.png", "cannot be read")):
        with pytest.raises(SystemExit) as stopped:
            main([*command, "--save", str(tmp_path / page)])
        assert stopped.value.code == 2 and words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


def test_what_is_wrong_is_said(capsys, tmp_path):
    assert main(["papers", "--model", "x", "--random"]) == 2
    assert "--random" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["papers", "nonsense"])
    assert stopped.value.code == 2 and "trie, ults" in capsys.readouterr().err
    make(tmp_path / "m", layers=1, width=32, mlp=48, heads=2, vocab=300)
    assert main(["papers", "--quick", "sbon", "dsbd", "--model", str(tmp_path / "m")]) == 1
    told = capsys.readouterr()
    assert "no reward model" in told.err and "no draft model" in told.err and "failed: sbon, dsbd" in told.err


@needs_figures
def test_the_page_is_written_and_sections_replaced(capsys, tmp_path):
    page = tmp_path / "papers.md"
    for _ in range(2):
        assert ask(capsys, "dsbd", "--save", str(page))[0] == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"## {dsbd.TITLE}\n") and str(tmp_path) not in text
    assert text.count("<!-- bench:papers-dsbd -->") == 1
    assert text.count("![") == 1 and (tmp_path / "papers-dsbd.svg").read_text().startswith("<?xml")
    assert "python -m tools.bench papers --quick --threads 1 dsbd --save papers.md" in text
    first = (tmp_path / "papers-dsbd.svg").stat().st_size
    assert ask(capsys, "ults", "--random", *TINY, "--save", str(page))[0] == 0
    grown = page.read_text(encoding="utf-8")
    assert grown.startswith(text) and "bench:papers-ults-random" in grown and first < 200_000


def test_the_papers_numbers_agree_with_each_other():
    """Ratios and sums that the papers print beside their tables."""
    batch, ours = trie.TABLE_1["CNN/DM"][2][15]
    assert batch and ours and round(100 * (1 - ours[0] / batch[0])) == 92  # section 4.2
    assert round(100 / sbon.MEAN_M) == 4  # "roughly a 4x" (section 6.1)
    assert sbon.SLOWEST[1] < sbon.TABLE_1["SBoN"][0] < sbon.FASTEST[1]
    assert ults.PAPER["beam search, k 5"][1] == 1 + 5 * (40 - 1)
    autoregressive, rest, adaptive, _, _ = aded.TABLE_1["MT-Bench"]["Vicuna-7B"]
    assert adaptive < rest < autoregressive and round(autoregressive / adaptive, 1) == 1.9  # table 2 has 1.93
    faster = [
        dsbd.TABLE_1[pair, "DSBD"][1] / dsbd.TABLE_1[pair, "beam sampling, W = 5"][1]
        for pair in ("Llama-2-13B", "Llama-3-8B")
    ]
    assert sum(faster) / 2 == pytest.approx(1.53, abs=0.005)  # section 4.2


@pytest.mark.parametrize(
    ("paper", "names"),
    [(trie, ["TABLE_1"]), (ults, ["PAPER", "ALPHAS", "BEAMS"]), (sbon, ["TABLE_1", "MEAN_M", "SLOWEST"]),
     (aded, ["TABLE_1", "CHAIN"]), (dsbd, ["TABLE_1", "TABLE_2", "SPEEDUP"])],
)  # fmt: skip
def test_every_number_of_a_paper_says_where_it_stands(paper, names):
    source = Path(paper.__file__).read_text(encoding="utf-8")
    for name in names:
        found = re.search(rf"(?:^#.*\n)*^{name}\b[^=]* =(?: .*|\n)(?:\n.*)?", source, re.MULTILINE)
        assert found and re.search(r"([Tt]able|[Ff]igure|[Ss]ection) \d|Ablation Study|likewise", found[0]), name
    assert re.search(r"[Ss]ections? \d|Experimental Setup", paper.SETTING)

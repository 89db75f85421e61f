"""The papers' comparisons at sizes that measure nothing: every part runs, and the page is written and kept."""

import importlib.util
import json
import shutil
import sys

import pytest

if importlib.util.find_spec("numpy") is None:
    pytest.skip("needs NumPy", allow_module_level=True)

from engine.demo import demo_folder
from tests.marks import needs_figures
from tools.bench.__main__ import main
from tools.bench.papers import aded, dsbd, programs, sbon, trie, ults
from tools.bench.papers.common import Findings
from tools.bench.papers.curves import abscissa, ordinate


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
        assert max(row["series"]["batch"]) >= max(row["series"]["trie"]) and 1 <= row["held"] <= 1.1
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


def test_dsbd(capsys):
    code, text, found = ask(capsys, "dsbd")
    kinds = {row["search"] for row in found["dsbd"]["rows"]}
    assert code == 0 and kinds == set(dsbd.COLORS) - {"n-grams"}  # drawn only where there is a corpus
    assert "1.5 to 1.9" in text and "paper: Llama-2, SQuAD, DSBD" in text


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A model that is none of the demo's, with its weights and its words: what is measured on real ones, in short."""
    folder = tmp_path_factory.mktemp("papers") / "smollm2-135m-instruct-tiny"
    shutil.copytree(demo_folder(), folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["max_position_embeddings"] = 1024  # sources and documentation of newer Pythons are longer
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return str(folder)


def test_trie_on_a_real_model(capsys, real):
    code, text, found = ask(capsys, "trie", "--model", real)
    rows, measured = found["trie"]["rows"], found["trie"]["measured"]
    assert code == 0 and all(50 < row["input"] <= 60 and row["trie"] <= row["batch"] for row in rows)
    assert [(row["peer"], row["prompt"]) for row in measured] == [("coppice", 60), ("transformers", 60)]
    assert "chapters of Python's documentation" in text


def test_ults_on_a_real_model_counts_answers_that_end(capsys, real):
    code, text, found = ask(capsys, "ults", "--model", real)
    ended = found["ults"]["ended"]
    assert code == 0 and [(r["search"], r["k"]) for r in ended] == [
        ("beam", 1), ("beam", 3), ("flat, batch 8", 3), ("flat, batch 8, prior of documentation", 3),
    ]  # fmt: skip
    assert ended[0]["nodes"] <= 4 < ended[1]["nodes"] and "With real ends" in text


def test_aded_on_a_real_model_keeps_kinds_of_text_apart(capsys, real):
    code, text, found = ask(capsys, "aded", "--model", real)
    rows = found["aded"]["rows"]
    assert "from 2.21 to 2.81 (2.42 for MT-Bench" in text
    assert code == 0 and [(row["kind"], row["method"]) for row in rows] == [
        (kind, method)
        for kind in ("code edits", "docstrings", "copies", "summaries", "chat")
        for method in [row["method"] for row in rows[: len(rows) // 5]]
    ]
    assert rows[0]["method"] == "autoregressive" and len(rows) == 5 * 7
    assert all(row["same"] and row["accept_length"] >= 1 and row["cpu_ms"] > 0 for row in rows)
    assert all(row["cpu_ratio"] == 1 for row in rows if row["method"] == "autoregressive")


def test_models_of_the_caller_draft_and_judge(capsys, real):
    given = ["--draft", str(demo_folder("draft")), "--reward", str(demo_folder("reward"))]
    code, text, found = ask(capsys, "dsbd", "sbon", "--model", real, *given)
    assert code == 0 and "smollm2-135m-instruct-tiny, drafts by draft (" in text
    assert {row["search"] for row in found["dsbd"]["rows"]} == set(dsbd.COLORS) - {"n-grams"}
    assert [row["search"] for row in found["sbon"]["rows"]][:2] == ["Bo8", "SBoN"]


@pytest.mark.parametrize("own", [False, True])
def test_dsbd_drafts_by_the_target_itself(capsys, real, own):
    code, text, found = ask(capsys, "dsbd", "--model", real, "--draft", "int8", *["--own"] * own)
    assert ("its own format, drafts" in text and "layers, in int8" in text) is own
    kinds = {row["search"] for row in found["dsbd"]["rows"]}
    assert code == 0 and kinds == set(dsbd.COLORS) and "the target itself in int8" in text
    [one, *_] = [row for row in found["dsbd"]["rows"] if row["search"] == "dsbd"]
    assert one["draft_seconds"] > 0 and one["tokens_per_pass"] > 1
    assert [row["label"] for row in found["dsbd"]["rows"]][-2:] == [
        f"speculative gamma=3, first {count} of 6 layers" for count in (3, 5)
    ]


def test_sbon_checks_programs(capsys, real, tmp_path):
    coder = tmp_path / "qwen2.5-coder-tiny"
    shutil.copytree(real, coder)
    code, text, found = ask(capsys, "sbon", "--model", str(coder))
    rows = {row["search"]: row for row in found["sbon"]["rows"]}
    assert code == 0 and "functions to write" in text and rows["Bo4"]["reward"] == 0 == rows["Bo4"]["solved"]


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process")
@pytest.mark.parametrize(("source", "share"), [
    ("def is_leap(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)", 1.0),
    ("import calendar\n\ndef is_leap(year):\n    return year % 4 == 0", 0.0),  # a file would be opened
    ("def is_leap(year):\n    return year % 4 == 0\nprint(", 0.75),  # what compiles
    ("def is_leap(year):\n    return open('x', 'w')", 0.0),
    ("def is_leap(year):\n    while True: pass", 0.0),
    ("def is_leap(year):\n    return [0] * 10**12", 0.0),
    ("print(4)", 0.0),
])  # fmt: skip
def test_programs_are_judged_by_their_tests_and_may_do_nothing_else(source, share):
    [one] = [exercise for exercise in programs.EXERCISES if exercise.name == "is_leap(year)"]
    assert programs.reward(one.text, [f"Here it is:\n```python\n{source}\n```\nIt works."]) == [share]
    assert programs.reward([{"role": "user", "content": one.text}], [source]) == [share]


def test_sbon_checks_sums(capsys, real):
    code, text, found = ask(capsys, "sbon", "--model", real)
    rows = {row["search"]: row for row in found["sbon"]["rows"]}
    assert code == 0 and list(rows) == ["Bo1", "Bo4", "SBoN, N = 4", "SBoN, N = 4, memory"]
    assert rows["Bo1"]["drawn"] < rows["SBoN, N = 4"]["drawn"] <= rows["Bo4"]["drawn"]
    assert rows["SBoN, N = 4"]["tokens"] <= 1 and rows["SBoN, N = 4, memory"]["bytes"] < rows["Bo4"]["bytes"]
    assert all(row["of"] == 2 for row in rows.values())
    assert [row["search"] for row in found["sbon"]["judged"]] == ["Bo4", "SBoN, N = 4"]
    assert [row["tokens"] for row in found["sbon"]["ranks"]] == list(sbon.AFTER) and "reward head" in text


def test_sbon_is_compared_with_the_least_best_of_n_that_is_as_good():
    rows = [{"search": name, "n": n, "reward": reward, "drawn": 10 * n, "cpu": n}
            for name, n, reward in (("Bo16", 16, 0.5), ("Bo4", 4, 0.3), ("Bo1", 1, 0.0))]  # fmt: skip
    rows += [{"search": f"SBoN, N = {n}", "n": n, "reward": reward, "drawn": 80, "cpu": 2.0}
             for n, reward in ((16, 0.25), (4, 0.9))]  # fmt: skip
    sbon.beside_best_of_n(rows)
    assert (rows[3]["tokens"], rows[3]["times"]) == (0.5, 8)
    assert (rows[3]["equal"], rows[3]["equal_tokens"], rows[3]["equal_times"]) == ("Bo4", 2, 2)
    assert rows[4]["times"] == 2 and "equal" not in rows[4]  # none is as good


def test_each_paper_has_a_model_of_its_own(capsys, monkeypatch, tmp_path, real):
    (tmp_path / "Qwen2.5-Coder-0.5B-Instruct").symlink_to(real)
    monkeypatch.setenv("COPPICE_CHECKPOINTS", str(tmp_path))
    asked = {}
    for paper in (trie, aded):
        monkeypatch.setattr(paper, "run", lambda models, paper=paper: asked.update({paper: models}) or Findings("", {}))
    assert ask(capsys, "trie", "aded")[0] == 0
    assert asked[trie].demo and asked[aded].target == tmp_path / "Qwen2.5-Coder-0.5B-Instruct"
    assert str(asked[aded].draft) == "int4" and asked[aded].reward is None and asked[trie].reward is not None


def test_an_answer_is_judged_by_its_first_own_number():
    prompt = [{"role": "user", "content": "What is 17 + 26?"}]
    texts = ["17 + 26 is", "17 + 26 = 43.", "It is 4", "It is 44, or 43", "43", "The sum of 17 and 26 is 17 + 26 = 43"]
    assert sbon.right(prompt, texts) == [0, 1, 0, -1, 1, 1]
    assert sbon.right(prompt, ["17 + 2", "17 + 26 = 3", "17 + 2 = 19", "26 + 4, 3"]) == [0, -1, -1, -1]
    assert sbon.right("What is 1 + 2?", ["", "3"]) == [0, 1]
    asked = sbon.questions(4, 0)
    assert [text.count("+") for text in asked] == [1, 1, 1, 2] and asked != sbon.questions(4, 1)
    assert len({*sbon.questions(sbon.TRAINING, 0)}) == sbon.TRAINING
    with pytest.raises(ValueError, match="two numbers"):
        sbon.questions(400, 0)


def test_a_paper_that_fails_does_not_lose_the_others(capsys, monkeypatch):
    def fail(models):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(trie, "run", fail)
    assert main(["papers", "--quick", "--threads", "1", "trie", "dsbd"]) == 1
    told = capsys.readouterr()
    found = json.loads(told.out.splitlines()[-1])["papers"]
    assert found["trie"] == {"failed": "RuntimeError: out of luck"} and found["dsbd"]["rows"]
    assert "trie failed: out of luck" in told.err and "Traceback" not in told.err


@pytest.mark.parametrize("command", [["papers", "ults"], ["memory"], ["speed"], ["gpu"]], ids=str)
def test_pages_that_cannot_be_written_are_refused_before_anything_is_measured(command, capsys, tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    for page, words in (("none/page.md", "no such folder"), (".", "a folder"), ("picture.png", "cannot be read")):
        with pytest.raises(SystemExit) as stopped:
            main([*command, "--save", str(tmp_path / page)])
        assert stopped.value.code == 2 and words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


def test_what_is_wrong_is_said(capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        main(["papers", "nonsense"])
    assert stopped.value.code == 2 and "trie, ults" in capsys.readouterr().err
    assert main(["papers", "--quick", "sbon", "dsbd", "--model", str(tmp_path / "m")]) == 1
    told = capsys.readouterr()
    assert "there is no such folder" in told.err and "failed: sbon, dsbd" in told.err
    assert main(["papers", "--quick", "dsbd", "--own"]) == 2
    assert "give --draft int8 or int4" in capsys.readouterr().err


def test_curves_are_read_where_they_reach_a_value():
    curve = [(10, -1.0), (5, -3.0), (20, -1.0), (30, -0.5)]
    assert abscissa(curve, -2.0) == 7.5 and abscissa(curve, -1.0) == 10 and abscissa(curve, -0.75) == 25
    assert abscissa(curve, -3.1) is None and abscissa(curve, -0.4) is None
    assert [ordinate(curve, x) for x in (5, 7.5, 25, 30)] == [-3.0, -2.0, -0.75, -0.5]


def test_what_beam_search_needs_is_read_at_the_same_width():
    """Also where its times are out of order, as measured times may be."""
    beams = [(1, -4.0, 10, 9.0), (3, -2.0, 30, 8.0), (5, -1.0, 50, 10.0)]
    rows = [dict(search="beam", k=k, value=v, nodes=n, ms=ms, cpu_ms=ms) for k, v, n, ms in beams]
    rows += [dict(search="flat", k=7, value=v, nodes=10, ms=17.0, cpu_ms=17.0) for v in (-3.0, -1.5, -0.5)]
    ults.beside_beams(rows)
    assert [row["nodes_of_beam"] for row in rows[3:]] == [0.5, 0.25, None]
    assert [row["ms_of_beam"] for row in rows[3:]] == [row["cpu_ms_of_beam"] for row in rows[3:]] == [2.0, 17 / 9, None]


def test_fronts_and_speedups_of_dsbd():
    rows = [
        {"search": "beam-sample", "label": "beam-sample W=1", "quality": -2.0, "speed": 10.0},
        {"search": "beam-sample", "label": "beam-sample W=2", "quality": -1.0, "speed": 5.0},
        {"search": "dsbd", "label": "dsbd a", "quality": -1.5, "speed": 15.0},
        {"search": "dsbd", "label": "dsbd b", "quality": -1.7, "speed": 12.0},
    ]
    counted = {"search": "n-grams", "label": "n-grams a", "quality": -0.5, "speed": 20.0}
    assert [r["ratio"] for r in dsbd.speedups([*rows, counted])] == [1.5, None, 2.0, 4.0]
    dsbd.mark_front(rows[2:])
    assert [row["front"] for row in rows[2:]] == [True, False]
    one, two = dsbd.speedups(rows)
    assert one["by"] == "dsbd a" and two["text"] == "none"


@needs_figures
def test_the_page_is_written_and_sections_replaced(capsys, tmp_path, real):
    page = tmp_path / "papers.md"
    for _ in range(2):
        assert ask(capsys, "dsbd", "--save", str(page))[0] == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"## {dsbd.TITLE}\n") and str(tmp_path) not in text
    assert text.count("<!-- bench:papers-dsbd -->") == 1
    assert text.count("![") == 1 and (tmp_path / "papers-dsbd.svg").read_text().startswith("<?xml")
    assert "python -m tools.bench papers --quick --threads 1 dsbd --save papers.md" in text
    first = (tmp_path / "papers-dsbd.svg").stat().st_size
    assert ask(capsys, "ults", "--model", real, "--save", str(page))[0] == 0
    grown = page.read_text(encoding="utf-8")
    assert grown.startswith(text) and "bench:papers-ults-smollm2-135m-instruct-tiny" in grown and first < 200_000


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

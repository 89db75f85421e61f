"""The counterfactual analysis: the Gaussian table, agreement with real runs of the search, the commands."""

import json
import math

import pytest
import torch

from engine import Engine
from search import BoN, SBoN
from search.sbon.rates import accepted
from tools.random_checkpoint import make
from tools.sbon_counterfactual import (
    ALPHAS,
    Collect,
    Utterances,
    bootstrap,
    correlations,
    counterfactual,
    fewer,
    gaussian_fewer,
    gaussian_table,
    main,
)

# rho: (chance of keeping the best, mean score) at alpha 0.5, 0.8, 0.9, 0.95; standard errors 0.004 and 0.1
TABLE = {
    0.0: [(0.50, 95.0), (0.20, 87.5), (0.10, 81.0), (0.05, 73.6)],
    0.5: [(0.92, 99.5), (0.68, 97.4), (0.49, 94.6), (0.33, 90.7)],
    0.7: [(0.99, 99.95), (0.89, 99.4), (0.73, 98.1), (0.56, 95.9)],
    0.9: [(1.00, 100), (0.996, 99.99), (0.966, 99.9), (0.87, 99.4)],
    1.0: [(1, 100), (1, 100), (1, 100), (1, 100)],
}


def test_the_gaussian_table():
    rows = list(gaussian_table(100, 4000, seed=1))
    expected = [(rho, *cell) for rho, cells in TABLE.items() for cell in cells]
    for row, (rho, kept, score) in zip(rows, expected, strict=True):
        assert row["rho"] == rho
        spread = math.sqrt(kept * (1 - kept) / 4000) + 0.004
        assert abs(row["kept"] - kept) <= 4 * spread + 0.005, row  # the table is rounded to 0.01
        assert abs(row["score"] - score) <= 4 * (row["score_se"] + 0.1), row
    assert gaussian_fewer(100, 25, 4000, seed=1) == pytest.approx(89.5, abs=0.7)


def test_one_run_by_hand():
    """Utterances of 2 to 9 tokens, judged at 4; those of 2 and 4 have ended by then."""
    length = torch.tensor([[2.0, 9, 4, 7, 5, 8]])
    partial = torch.tensor([[0.0, 5, 3, 1, 4, 2]])
    final = torch.tensor([[0.0, 2, 3, 9, 4, 8]])
    rate, score, kept = counterfactual(partial, final, length, 4, 0.5, keep_finished=False)  # accepted: 1, 4, 2
    assert float(rate) == pytest.approx((9 + 5 + 4 + 2 + 4 + 4) / 35) and not kept
    assert float(score) == pytest.approx(100 * 4 / 9)
    rate, score, kept = counterfactual(partial, final, length, 4, 0.5, keep_finished=True)
    assert float(rate) == pytest.approx(28 / 35) and float(score) == pytest.approx(100 * 4 / 9)
    best_ended = torch.tensor([[9.0, 2, 3, 1, 4, 8]])
    _, score, kept = counterfactual(partial, best_ended, length, 4, 0.5, keep_finished=True)
    assert kept and float(score) == 100
    ties = counterfactual(torch.zeros(1, 6), final, length, 4, 0.5, keep_finished=False)  # the first three
    assert float(ties[1]) == pytest.approx(100 * 3 / 9)
    assert float(counterfactual(partial, final, length, 4, 0.0, False)[0]) == 1
    assert float(counterfactual(partial, torch.ones(1, 6), length, 4, 0.9, False)[1]) == 100
    assert float(fewer(final, 3)) == pytest.approx(100 * 3 / 9)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    make(folder, layers=1, width=32, mlp=48, heads=4, kv_heads=2, vocab=120, max_positions=200, seed=1, scale=0.3)

    def reward(prompt, texts):
        return [sum(ord(c) * (i % 7 + 1) for i, c in enumerate(text)) % 101 / 10 + len(text) / 8 for text in texts]

    return Engine.load(folder, kv_memory=1 << 22, reward=reward)


def test_it_says_what_the_search_does(engine):
    """Collected once; then for several tau and alpha the same utterances win and the same tokens are drawn."""
    prompts = [[1, 20, 30], [1, 44]]
    options = {"max_new_tokens": 40}
    collected = [r.stats["collected"] for r in engine.generate(prompts, Collect(n=24, every=4, seed=2), **options)]
    plain = engine.generate(prompts, BoN(n=24, seed=2), **options)
    for rows, result in zip(collected, plain, strict=True):
        assert [row["final"] for row in rows] == [reward for _, reward in result.stats["rewards"]]
        assert sum(row["length"] for row in rows) == result.stats["tokens_drawn"]
        assert all(len(row["partial"]) == (row["length"] - 1) // 4 for row in rows)
        assert len({row["length"] for row in rows}) > 3
    for tau, alpha, keep in [(4, 0.5, True), (8, 0.8, True), (8, 0.9, False), (12, 0.5, False)]:
        search = SBoN(n=24, seed=2, tau=tau, alpha=alpha, keep_finished=keep)
        for rows, result in zip(collected, engine.generate(prompts, search, **options), strict=True):
            told = Utterances.of({"utterances": rows, "every": 4})
            columns = told.partial_MP[:, tau // 4 - 1][None], told.final_M[None], told.length_M[None]
            rate, _, _ = counterfactual(*columns, tau, alpha, keep)
            assert result.stats["tokens_drawn"] == round(float(rate) * sum(row["length"] for row in rows))
            order = sorted(range(24), key=lambda i: (-float(columns[0][0, i]), i))
            alive = set(order[: accepted(24, alpha)]) | (
                {i for i in range(24) if rows[i]["length"] <= tau} if keep else set()
            )
            assert result.stats["winner"] == max(alive, key=lambda i: (rows[i]["final"], -i))
            assert result.outputs[0].score == rows[result.stats["winner"]]["final"]


def walks(count, every=4):
    """Utterances whose rewards are random walks along their length."""
    generator = torch.Generator().manual_seed(count)
    rows = []
    for _ in range(count):
        length = 4 + int(torch.randint(40, (1,), generator=generator))
        path = torch.randn(length, generator=generator).cumsum(0).tolist()
        beginnings = range(every, length, every)
        rows.append({"length": length, "partial": [path[t - 1] for t in beginnings], "final": path[-1]})
    return rows


def test_bootstrap_and_correlations():
    prompts = [Utterances.of({"utterances": walks(count), "every": 4}) for count in (150, 200)]
    rows = bootstrap(prompts, n=50, trials=100, keep_finished=True, seed=0)
    cells = {(row["tau"], row["alpha"]): row for row in rows}
    taus = sorted({tau for tau, _ in cells})
    assert taus == list(range(4, 44, 4)) and len(rows) == len(taus) * len(ALPHAS)
    for alpha in ALPHAS:  # later decisions cost more and lose less
        assert (
            cells[4, alpha]["score"] < cells[24, alpha]["score"]
            and cells[4, alpha]["token_rate"] < cells[24, alpha]["token_rate"]
        )
    for tau in taus:
        rates = [cells[tau, alpha]["token_rate"] for alpha in ALPHAS]
        assert rates == sorted(rates, reverse=True) and all(0 < cells[tau, a]["score"] <= 100 for a in ALPHAS)
    related = correlations(prompts)
    assert related[0]["pearson"] < related[5]["pearson"] and related[0]["kendall"] < related[5]["kendall"] <= 1
    assert all(row["pearson_std"] >= 0 and row["prompts"] <= 2 for row in related)


def test_the_commands(tmp_path, capsys):
    file = tmp_path / "data.jsonl"
    lines = [json.dumps({"id": i, "every": 4, "utterances": walks(60 + i)}) for i in range(2)]
    file.write_text("\n".join(lines) + "\n")
    told = {}
    for mode in ([], ["--faithful"]):
        assert main(["analyse", str(file), "--n", "20", "--trials", "20", "--score", "90", *mode]) == 0
        out = capsys.readouterr().out
        told[bool(mode)] = json.loads(out.splitlines()[-1])
        assert "alpha 0.95" in out and "M = 5: score" in out
        rows = [row for row in told[bool(mode)]["rows"] if row["score"] >= 90]
        cheapest = min(rows, key=lambda row: row["token_rate"])
        assert f"90 or more: tau {cheapest['tau']}, alpha {cheapest['alpha']}," in out
    for ours, papers in zip(told[False]["rows"], told[True]["rows"], strict=True):
        assert ours["token_rate"] == papers["token_rate"] and ours["score"] >= papers["score"]
    assert main(["gaussian", "--n", "20", "--trials", "50"]) == 0
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]) == 20
    (tmp_path / "empty.jsonl").write_text("\n")
    assert main(["analyse", str(tmp_path / "empty.jsonl")]) == 2
    pytest.importorskip("matplotlib")
    for args in (["analyse", str(file), "--n", "20", "--trials", "5"], ["gaussian", "--n", "20", "--trials", "50"]):
        picture = tmp_path / "figure.svg"
        assert main([*args, "--figure", str(picture)]) == 0
        first = picture.read_bytes()
        assert main([*args, "--figure", str(picture)]) == 0 and picture.read_bytes() == first


def test_collecting_from_the_command_line(tmp_path, capsys):
    folder, source, sink = tmp_path / "model", tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    make(folder, layers=1, width=32, mlp=48, heads=4, kv_heads=2, vocab=104, max_positions=100, seed=1)
    source.write_text('{"prompt": "ab"}\n\n{"id": "two", "prompt": "c"}\n')
    reward = "tests/golden/llama/classifier"
    args = ["--model", str(folder), "--reward", reward, "--input", str(source), "--output", str(sink)]
    assert main(["collect", *args, "--n", "5", "--every", "3", "--max-new-tokens", "8"]) == 0
    records = [json.loads(line) for line in sink.read_text().splitlines()]
    assert [r["id"] for r in records] == [0, "two"] and all(len(r["utterances"]) == 5 for r in records)
    assert all(math.isfinite(u["final"]) and u["length"] <= 8 for r in records for u in r["utterances"])
    assert main(["collect", *args, "--model", "nowhere"]) == 3

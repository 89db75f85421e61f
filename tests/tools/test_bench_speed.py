"""The speed benchmark on tiny shapes: it runs, its floors and verdicts are computed, never written down."""

import json
from pathlib import Path

import pytest
import torch

from kernels import cpp
from models.checkpoint.headers import Checkpoint
from models.errors import CheckpointError
from tools.bench import host, limits, measure, peaks, speed
from tools.bench.__main__ import main
from tools.random_checkpoint import make


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speed") / "tiny"
    make(folder, layers=2, width=64, mlp=96, heads=4, vocab=300)
    return str(folder)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(limits, "BYTES", 1 << 16)
    monkeypatch.setattr(limits, "GEMM", (4, 8, 16))
    monkeypatch.setattr(peaks, "ROUNDS", 1 << 10)


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is measured instead")
def test_it_runs_and_saves_by_machine(model, quick, capsys, tmp_path):
    page = tmp_path / "page.md"
    command = ["speed", "--model", model, "--prompt-tokens", "6", "--new-tokens", "4", "--beams", "1", "2",
               "--runs", "1", "--depths", "3", "9", "--dtypes", "float32", "--threads", "1",
               "--save", str(page)]  # fmt: skip
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["beams"] for row in found["results"]] == [1, 2]
    for row in found["results"]:
        assert row["steps"] == 4 and row["weight_bytes"] > 0 and 0 < row["floor_step_seconds"] < row["floor_seconds"]
    verdicts = {v["name"]: v for v in found["verdicts"]}
    assert verdicts["weights: int8 / float32"]["met"] is None
    wide = verdicts["step, float32: 2 beams / 1"]
    settings = (found["in_turn"][key] for key in ("float32 2 6", "float32 1 6"))
    slower = sorted(a / b for a, b in zip(*settings, strict=True))
    assert len(slower) == speed.ROUNDS
    assert wide["value"] == slower[speed.ROUNDS // 2] and wide["met"] == (wide["value"] <= wide["target"])
    assert found["depths"].keys() == {"3", "9"} and all(len(x) == speed.ROUNDS for x in found["depths"].values())
    assert all(found["host_seconds"].values())
    assert found["bench"].startswith("speed-") and f"<!-- bench:{found['bench']} -->" in page.read_text()


def test_targets_are_comparisons():
    assert speed.comparison("a", 2.0, 1.9)["met"] is True
    assert speed.comparison("a", 2.0, 1.9, at_most=True)["met"] is False
    host, absent = speed.comparison("host", 4e-4, 5e-4, True, "ms"), speed.comparison("x", None, 8.0)
    assert (host["measured"], host["sign"], host["wanted"]) == ("0.40 ms", "at most", "0.50 ms")
    assert (absent["met"], absent["measured"], absent["wanted"]) == (None, "not measured", "8.00")


def test_rounds_are_interleaved_and_ratios_are_medians_of_rounds():
    calls = []
    works = {key: lambda i, key=key: calls.append((i, key)) or len(calls) for key in "abc"}
    found = measure.in_turn(works, 2, warm_up=True)
    assert [key for _, key in calls] == [*"cab", *"abc", *"bca"] and [i for i, _ in calls] == [0] * 6 + [1] * 3
    assert found == {"a": [4, 9], "b": [5, 7], "c": [6, 8]}
    assert measure.ratio([4.0, 60.0, 1.0], [2.0, 20.0, 1.0]) == 2.0


def test_work_counts_every_matrix_but_the_embedding(model):
    work = limits.Work.of(Checkpoint.open(model))
    inner, head = 2 * (4 * 64 * 64 + 3 * 64 * 96), 300 * 64
    assert (work.matrices, work.head, work.attention) == (inner + head, head, 2 * 64)
    # Bound by bytes, then by operations.
    assert work.step_seconds(1, 10, 1000, bandwidth=10.0, rate=1e12) == 100
    assert work.step_seconds(3, 10, 0, 1e12, rate=2.0) == 3 * (inner + head + 2 * 10 * 128)
    assert work.prompt_seconds(7, 2.0) == 7 * (inner + 7 * 128)


def test_limits_of_mixtures_are_not_known():
    with pytest.raises(CheckpointError, match="depend on what tokens choose"):
        limits.Work.of(Checkpoint.open(Path(__file__).parents[1] / "golden/experts/qwen3"))


def test_the_idle_model_measures_the_host_alone():
    times = host.step_seconds(2, [5, 20])
    assert set(times) == {5, 20} and all(0 < t < 1 for t in times.values())


@pytest.mark.skipif(cpp.compiler() is None, reason="there is no C++ compiler")
def test_the_processor_is_measured_by_its_instructions(monkeypatch):
    monkeypatch.setattr(peaks, "ROUNDS", 1 << 18)
    rates = peaks.product_rates(["float32", "bfloat16", "int8"], 1)
    assert rates["float32"] > 1e9 and rates["int8"] > rates["float32"] / 2, rates
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(cpp.BuildError, match="could not be compiled"):
        peaks.product_rates(["float32"], 1)

"""The GPU benchmark: its stages on tiny shapes and a CPU, with stand-ins for what only a GPU has."""

import argparse
import contextlib
import dataclasses
import gc
import importlib
import json
import re
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from engine.cache.pool import PagePool
from engine.demo import demo_folder
from kernels.tree_attention import tree_attention
from models.shape import ModelShape
from tests.marks import needs_interpreter
from tools.bench import device, gpu, peers
from tools.bench.__main__ import main
from tools.bench.gpu import (
    each_kernel,
    graph_times,
    real_models,
    recommending,
    recurrent_layers,
    setting,
    single_kernels,
    whole_model,
    whole_steps,
)
from tools.bench.gpu.journal import Journal
from tools.kernels import contenders
from tools.kernels.scenes import scene

ROOT = Path(__file__).parents[2]
TINY = {"vocab_size": 70, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
COMMAND = ["gpu", "--prefix", "20", "--queries", "2", "--beams", "3", "--searches", "3", "--prompt", "5"]
COMMAND += ["--wide", "5", "--new-tokens", "6", "--runs", "1", "--catalogue-beams", "7", "--model", str(demo_folder())]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["gpu"]) == 0
    assert capsys.readouterr().out == "no GPU here: nothing to measure\n"


def test_rivals_are_given_the_same_attention():
    pool = PagePool(ModelShape(1, 2, 8, 1, None), 40, 16)
    k_GSD, v_GSD = pool.cache.k_LGSD[0].normal_(), pool.cache.v_LGSD[0].normal_()
    s = scene(pool, 100, 7)
    q_THD = torch.randn(7, 2, 8)
    layout = dataclasses.replace(s.layout, impl="reference")
    ours = tree_attention(q_THD, k_GSD, v_GSD, layout, scale=8**-0.5)
    k, v = (x[:, s.slots_S][None] for x in (k_GSD, v_GSD))
    theirs = F.scaled_dot_product_attention(q_THD.transpose(0, 1)[None], k, v, attn_mask=s.visible_QS)
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1))
    assert len(s.slots_S) == 100 + 2 * 7 and s.visible_QS.sum() == 7 * (100 + 2)


@pytest.fixture
def stand_in(monkeypatch):
    """A GPU whose events are the clock, whose graphs call again and whose kernels are a list. Runs the command."""

    def once(work):
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    def recorded(calls):
        return lambda: [call() for call in calls]

    def kernel(name, start, end):
        of = SimpleNamespace(name="CUDA" if name else "CPU")
        return SimpleNamespace(name=name, device_type=of, time_range=SimpleNamespace(start=start, end=end))

    ran = [kernel("early", 0, 9), kernel("", 0, 99), kernel("early", 9, 10), kernel("a", 10, 14), kernel("b", 20, 22)]
    profiled = contextlib.nullcontext(SimpleNamespace(events=lambda: ran))
    found = {"seconds": 1, "steps_per_second": {"max": 0.001}, "versions": {"transformers": "9"}}
    settings = {"is_available": True, "get_device_name": "stand-in", "memory_allocated": 0, "max_memory_allocated": 0}
    for name, value in (settings | {"reset_peak_memory_stats": None, "empty_cache": None}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(device, "once", once)
    monkeypatch.setattr(device, "recorded", recorded)
    monkeypatch.setattr(device, "copying", lambda: (lambda: time.sleep(1e-5), 10_000))
    monkeypatch.setattr(device, "read_bandwidth", lambda runs: 2e9)
    monkeypatch.setattr(contenders, "flex_attention", lambda *_: 1 / 0)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    monkeypatch.setattr(single_kernels, "ROWS", (2,))
    monkeypatch.setattr(single_kernels, "MIXTURE", (7, 2, 64, 32))
    monkeypatch.setattr(recurrent_layers, "PASSES", ((1, 1), (1, 33)))
    for name, kind in recurrent_layers.LAYERS.items():
        small = dataclasses.replace(kind, key_heads=1, value_heads=min(2, kind.value_heads), key_size=4, value_size=4)
        monkeypatch.setitem(recurrent_layers.LAYERS, name, small)
    monkeypatch.setattr(whole_steps, "RUNS", 1)
    monkeypatch.setattr(single_kernels, "COLD", 0)
    monkeypatch.setattr(each_kernel, "LATER", 1)
    monkeypatch.setattr(whole_steps, "profile", lambda **_: profiled)
    monkeypatch.setattr(peers, "measure", lambda *_: found | {"growth_bytes": {"median": 1}})

    monkeypatch.setattr(recommending, "ITEMS", 90)
    monkeypatch.setattr(recommending, "BOOK", 20)
    monkeypatch.setattr(recommending, "RUNS", 1)
    monkeypatch.setattr(recommending, "PUBLISHED", {(4, 9, 1): (2.0, 1.0), (4, 9, 2): (4.0, 2.0)})
    monkeypatch.setattr(recommending, "WIDTHS", (2, 5))
    monkeypatch.setattr(recommending, "READ", 6)
    monkeypatch.setattr(real_models, "PROMPTS", real_models.PROMPTS[:2])
    monkeypatch.setattr(real_models, "FAST", "float32")
    monkeypatch.setattr(real_models, "SHORT", 3)

    def make(args, journal):
        small = TINY | {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}
        return setting.Setting(args, journal, torch.device("cpu"), TINY, small, small)

    def run(*words, journal=None):
        args, journal = parser_of([*COMMAND, *words]), journal or Journal()
        gpu.measure_all(args, [*COMMAND, *words], journal, make)
        return gpu.summed_up(args, journal)

    run.setting = lambda: make(parser_of(COMMAND), Journal())  # type: ignore[attr-defined]
    return run


def parser_of(words):
    parser = argparse.ArgumentParser()
    gpu.add_parser(parser.add_subparsers())
    return parser.parse_args(words)


@needs_interpreter
def test_all_kernels_are_compiled_before_one_runs(stand_in, monkeypatch):
    from kernels import gpu as of_kernels
    from kernels.tree_attention import triton_fixed

    def warm(kernel, grid):
        return lambda *_, **options: warmed.append((kernel.fn.__module__, kernel.fn.__name__))

    @contextlib.contextmanager
    def compiling(tell):
        with of_kernels.launching_by(warm):
            yield

    warmed = []
    monkeypatch.setattr(of_kernels, "compiling", compiling)
    monkeypatch.setattr(triton_fixed, "CUT", type(triton_fixed.CUT)(4))  # shares, as of long prompts
    each_kernel.compile_ahead(stand_in.setting(), 1)
    found = re.compile(r"\blaunch\(\s*(\w+),")
    every = set()
    for path in (ROOT / "kernels").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for name in found.findall(path.read_text("utf-8")) if module != "kernels.gpu" else []:
            kernel = getattr(importlib.import_module(module), name, None)
            every |= {(module, name) if kernel is None else (kernel.fn.__module__, name)}
    assert len(every) > 25 and every == {*warmed}


def test_a_shape_of_attention_frees_its_memory(stand_in):
    """Those of a stage together exceed a GPU's, and collections of cycles are rare."""
    gc.disable()
    try:
        layers = single_kernels.Layers(stand_in.setting(), 2, 20, 3)
        assert layers.ours[1]().shape == layers.q_THD.shape
        keys = weakref.ref(layers.k_LGSD)
        del layers
        assert keys() is None
    finally:
        gc.enable()


@needs_interpreter
def test_every_stage_finds_its_figures(stand_in, capsys, tmp_path):
    page = tmp_path / "page.md"
    results = stand_in("--save", str(page), "--seconds", "600")
    assert list(results) == [name for name, stage in gpu.STAGES.items() if stage.usual]
    notes = [note for result in results.values() for note in result["notes"]]
    flex = "FlexAttention, 2 key/value heads, 20 tokens, {} queries: ZeroDivisionError: division by zero"
    assert notes == [flex.format(queries) for queries in (2, 3)]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["bench"] for line in lines] == [f"gpu-{name}" for name in results]
    assert all(f"<!-- bench:gpu-{name} -->" in page.read_text() for name in results)
    for name, result in results.items():
        assert result["rows"] and all("of_floor" not in row or row["of_floor"] > 0 for row in result["rows"]), name
    targets = {target["name"]: target for result in results.values() for target in result["targets"]}
    unmet = [name for name, target in targets.items() if target["value"] is None]
    assert len(targets) == 19 and unmet == ["attention, least x FlexAttention"]
    assert targets["kernels that fail or are wrong"]["met"], results["smoke"]
    assert len(results["smoke"]["rows"]) == 47
    assert all(row["difference"] < 0.05 for row in results["attention"]["rows"])
    assert targets["3 beams, prompt 20, x transformers"]["met"] and targets["beams of Qwen3-0.6B's shape"]["met"]
    assert {row["searches"]: row["bytes"] for row in results["searches"]["rows"]}.keys() == {1, 3}
    assert [row["weights"] for row in results["experts"]["rows"]] == ["bfloat16", "int8", "int4"]
    assert [row["tokens"] for row in results["states"]["rows"]] == [1, 33] * 4
    anything, items = results["catalogue"]["rows"]
    assert (anything["outputs"], items["outputs"], items["beams"]) == ("any tokens", "items", 7)
    assert items["steps"].count("+") >= 2 and "wait" not in items["host"] and items["device"] == pytest.approx(16e-6)
    assert [row["searches"] for row in results["widths"]["rows"]] == [1, 2, 3, 3]
    [model] = results["models"]["rows"]
    assert model["same_greedy"] == model["same_beams"] == 2 and min(model["greedy"], model["beams_rate"]) > 0
    plain, small, smaller = (row["gigabytes"] for row in results["weights"]["rows"])
    assert plain > small > smaller


def test_a_model_that_comes_later_is_measured_then(stand_in, tmp_path):
    """It may be too large for the first call; the figures of other stages do not depend on it."""
    journal, file = Journal(), tmp_path / "late"
    words = "--stages", "models", "--model", str(file)
    found = stand_in(*words, journal=journal)["models"]
    assert not found["rows"] and found["notes"] == [f"models: --model FILE: {file}"] and journal.left["models"] == 1
    file.symlink_to(demo_folder())
    journal.run()
    [row] = stand_in(*words, journal=journal)["models"]["rows"]
    assert row["model"] == "late" and not journal.left["models"]
    assert gpu.settings(parser_of(COMMAND)) == gpu.settings(parser_of([*COMMAND, "--model", "other"]))


@needs_interpreter
def test_what_fails_or_comes_too_late_is_said(stand_in, capsys, monkeypatch):
    monkeypatch.setattr(whole_steps, "decode", lambda *_: 1 / 0)
    found = stand_in("--stages", "steps", "where", "products", "--seconds", "0")
    assert found["steps"]["rows"] == [] and found["steps"]["targets"][0]["met"] is None
    assert {note.partition(": ")[2] for note in found["steps"]["notes"]} == {"the stage's time is over"}
    assert found["where"]["notes"] == ["where: ZeroDivisionError: division by zero"]
    assert len(found["products"]["notes"]) == 4
    assert "not measured" in capsys.readouterr().err


@needs_interpreter
def test_programs_of_other_shapes_are_tried(stand_in, monkeypatch):
    monkeypatch.setattr(single_kernels, "OPTIONS", ({"N": 32}, {"N": 128}, {"M": 0}))
    monkeypatch.setattr(single_kernels, "ALONE", ())
    monkeypatch.setattr(single_kernels, "TURNS", ({"TURN": 2, "ALONE": 1 << 14},))
    found = stand_in("--stages", "tune", "--seconds", "600")["tune"]
    shapes = [(row["queries"], row["shape"]) for row in found["rows"]]
    assert sorted(shapes) == [
        (q, shape) for q in (2, 3) for shape in ("N 128", "N 32", "TURN 2, ALONE 16384", "as it is")
    ]
    assert [shape for _, shape in shapes[::4]] == ["as it is"] * 2 and len(found["notes"]) == 2


@needs_interpreter
def test_a_compiled_model_is_compared(stand_in, monkeypatch):
    real, without = torch.compile, mock.patch.object(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "compile", lambda model, **options: without(real(model, **options)))
    monkeypatch.setattr(whole_model, "COMPILER", {"backend": "eager"})
    monkeypatch.setattr(whole_model, "SIZES", (1, 3))
    found = stand_in("--stages", "compiled", "--seconds", "600")["compiled"]
    assert [row["tokens"] for row in found["rows"]] == [1, 3] and not found["notes"]
    assert all(row["difference"] < 0.02 and row["compiled"] > 0 for row in found["rows"])


def test_all_stages_end_within_nine_minutes(stand_in, capsys):
    """The last case of a stage may begin at its end; a stage without time makes no model."""
    assert sum(stage.seconds for stage in gpu.STAGES.values() if stage.usual) <= gpu.TOTAL
    assert gpu.TOTAL + gpu.GRACE <= 540
    found = stand_in("--stages", "products", "steps", "--inside", str(time.time() - 1))
    for stage in found.values():
        assert {note.partition(": ")[2] for note in stage["notes"]} == {"the stage's time is over"}
    assert "making" not in capsys.readouterr().err


def test_graphs_are_timed_as_they_are_replayed():
    replayed = []
    steps = (16, 1, 1), (1, 1, 1), (8, 1, 1)
    kept = {key: SimpleNamespace(replay=lambda key=key: replayed.append(key)) for key in steps}
    kept[32, 1, 1] = SimpleNamespace(replay=None)  # not recorded yet
    usual = [step.replay for step in kept.values()]
    runner = SimpleNamespace(device=torch.device("cpu"), _steps=kept)
    with graph_times.graph_times(runner) as times:
        for key in (1, 1, 1), (16, 1, 1), (16, 1, 1):
            kept[key].replay()
    assert [step.replay for step in kept.values()] == usual and replayed == [(1, 1, 1), (16, 1, 1), (16, 1, 1)]
    assert {key: len(seconds) for key, seconds in times.items()} == {(1, 1, 1): 1, (16, 1, 1): 2}
    assert all(second > 0 for seconds in times.values() for second in seconds)
    assert graph_times.largest({(1, 1, 1): [9.0], (16, 1, 1): [3.0, 1.0, 2.0], (32, 1, 0): [5.0]}) == 2.0
    assert graph_times.largest({}) is None


def test_kernels_by_time():
    ran = [("warm", 0, 5), ("warm", 5, 9), ("warm", 9, 10), ("b", 20, 22), ("a", 10, 14), ("a", 21, 23)]
    rows, busy, gaps = whole_steps.by_kernel(ran)
    assert [(row["kernel"], row["launches"], row["microseconds"]) for row in rows] == [("a", 2, 3), ("b", 1, 2)]
    assert rows[0]["share"] == 6 / 8 and busy == 1 - 6 / 13 and gaps == [(6, "a")]


def test_launches_are_counted_by_passes():
    ran = [(name, float(at), at + 0.5) for at, name in enumerate(["a", "b", "_log_softmax", "copy"] * 6)]
    assert whole_steps.launches_a_pass(ran[::-1]) == 4 and whole_steps.launches_a_pass(ran[:2]) is None

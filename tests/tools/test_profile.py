"""The profiler: its arithmetic by hand, its parts on small runs of real searches."""

import json
import sys
from pathlib import Path

import pytest
import torch

from engine import Engine
from engine.cache.pool import PagePool
from engine.demo import demo_folder
from kernels.cpp import why_not
from kernels.stack import clocks
from models.formats.floats import FloatLinear
from models.shape import ModelShape
from search import Trie
from tests.marks import HAS_FIGURES, needs_figures
from tools.bench import limits
from tools.kernels.scenes import scene
from tools.profile.__main__ import describe, main
from tools.profile.clock import Watch, linear_work, watched
from tools.profile.report import group_of, operator_table, shares
from tools.profile.trace import read_profile


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "BYTES", 1 << 16)
    monkeypatch.setattr(limits, "GEMM", (4, 8, 16))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def profile(capsys, *words):
    assert main(["--runs", "1", "--max-new-tokens", "6", "--trace-steps", "2", *words]) == 0
    told = capsys.readouterr()
    return json.loads(told.out.splitlines()[-1]), told


# --- arithmetic ---


def test_attention_by_hand():
    pool = PagePool(ModelShape(1, 2, 8, 1, None), 100, 4)
    s = scene(pool, 10, 3, impl="torch")  # two levels of three: each query sees the trunk, its parent, itself
    size = torch.bfloat16.itemsize
    rows = 2 * (10 + 6) * 2 + 2 * 3 * 4  # keys and values of 2 heads, queries and outputs of 4
    operations = 4 * 3 * (10 + 2) * 4 * 8
    assert limits.attention_work(s.layout, 4, 2, 8, torch.bfloat16) == (rows * 8 * size, operations)
    # Positions 11 look back over 4: trunk tokens 8 and 9, parent, self.
    rows = 2 * (2 + 6) * 2 + 2 * 3 * 4
    assert limits.attention_work(s.layout, 4, 2, 8, torch.bfloat16, 4) == (rows * 8 * size, 4 * 3 * 4 * 4 * 8)


def test_linear_layers_by_hand():
    layer = FloatLinear([torch.randn(5, 8), torch.randn(3, 8)], dtype=torch.float32, device=torch.device("cpu"))
    x = torch.randn(4, 8)
    assert linear_work(layer, x, layer(x)) == (4 * (64 + 32 + 32), 2 * 4 * 8 * 8)


def test_operators_are_those_of_the_profile():
    x, y = torch.randn(3, 5), torch.randn(5, 7)
    with torch.profiler.profile(with_flops=True, record_shapes=True, acc_events=True) as profiler:
        for _ in range(2):
            with torch.profiler.record_function("target: layers"):
                x @ y
    operators, kernels = read_profile(profiler, torch.float32)
    found = {op.name: op for op in operators}
    assert (found["aten::mm"].calls, found["aten::mm"].operations) == (2, 2 * 2 * 3 * 5 * 7) and not kernels
    assert "target: layers" not in found and all(op.seconds >= 0 for op in operators)
    text = operator_table(operators, 1, 2, 1.0)
    assert "| Python, and the profiler itself |" in text and f"| {len(operators) - 1} others" in text


def test_words():
    assert describe(Trie()) == "Trie" and describe(Trie(beams=15)) == "Trie (beams 15)"
    assert [group_of(p) for p in ("draft: linear layers", "search", "admit", "text and events")] == [
        "model", "search", "engine", "text",
    ]  # fmt: skip
    rows = [
        {"part": p, "group": group_of(p), "share": 0.25} for p in ("target: head", "target: linear layers", "search")
    ]
    assert shares(rows) == "50% the model, 25% the search"
    rows.append({"part": "draft: head", "group": "model", "share": 0.25})
    assert shares(rows) == "50% target, 25% draft, 25% the search"


# --- runs ---


@pytest.fixture(scope="module")
def demo():
    return Engine.load(demo_folder(), kv_memory=1 << 24)


def test_attention_is_that_of_every_layer(demo):
    watch = Watch(demo)
    with watched(watch, deep=True):
        demo.generate([[5, 6, 7, 8]], Trie(beams=3), max_new_tokens=4, ignore_eos=True)
    c, G, D = demo.runner.model.config, demo.shape.kv_heads, demo.shape.head_dim
    pairs = 4 * 5 // 2  # of the prompt's step: each token sees itself and those before it
    moved = (2 * 4 * G + 2 * 4 * c.heads) * D * demo.pool.cache.k_LGSD.itemsize
    assert watch.attention(slice(0, 1)) == (c.layers * moved, c.layers * 4 * pairs * c.heads * D)
    assert watch.attention(slice(0, 4)) > watch.attention(slice(0, 2)) > watch.attention(slice(0, 1))


@pytest.mark.parametrize("deep", [True, False])
def test_watching_changes_nothing_and_books_every_moment(demo, deep):
    prompt, search = [5, 6, 7, 8], Trie(beams=3)
    plain = demo.generate([prompt], search, max_new_tokens=5, ignore_eos=True)[0]
    watch = Watch(demo)
    with watched(watch, deep):
        found = demo.generate([prompt], search, max_new_tokens=5, ignore_eos=True)[0]
    assert found.outputs == plain.outputs
    steps = watch.steps[:-1]
    assert [step.nodes["target"] for step in steps] == [4, 3, 3, 3, 3]
    assert [step.reads_prompt for step in steps] == [True, False, False, False, False]
    assert max(step.live for step in steps) == plain.stats["live_nodes_peak"]
    assert max(step.kv_bytes for step in steps) <= plain.stats["kv_bytes_peak"]  # which a promotion may exceed briefly
    assert all(step.kv_bytes >= step.live * plain.stats["kv_bytes_per_token"] for step in steps)
    for step in steps:
        assert sum(step.parts.values()) == pytest.approx(step.seconds)
        assert (
            ("target: linear layers" in step.parts) == deep and "target: head" in step.parts and "search" in step.parts
        )
        assert all(seconds >= 0 for part, seconds in step.parts.items() if part != "text and events")
        called = {name for name, seconds in step.calls.items() if seconds}
        assert ({"product", "attend"} <= called) == (not deep and not why_not()) and "convolve" not in called
        assert sum(step.calls.values()) < step.seconds
        if deep:
            asked = 1 if step.reads_prompt else 3
            assert step.work["target: head"][1] == 2 * asked * demo.shape.vocab_size * demo.runner.model.config.width
    before = clocks()
    assert demo.generate([prompt], search, max_new_tokens=5, ignore_eos=True)[0].outputs == plain.outputs
    assert why_not() or all(clocks()[name] > before[name] for name in ("product", "head", "top sums"))
    assert demo.observer is None and demo.runner.observer is None, "nothing observes the engine any more"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in demo.runner.model.modules())


def test_the_bundled_demo_by_default(capsys):
    found, told = profile(capsys, "--search", "trie", "--beams", "3", "--ignore-eos", "--out", "here")
    assert found["bench"] == "profile-demo-trie" and "tools.profile --runs 1" in found["command"]
    assert sum(row["share"] for row in found["parts"]) == pytest.approx(1)
    assert [step["nodes"]["target"] for step in found["timeline"]] == [found["prompt_tokens"], 3, 3, 3, 3, 3]
    assert {"bare", "watched", "profiled"} == set(found["steps_per_second_by"])
    called = {row["operator"] for row in found["calls"]}
    assert why_not() or ({"attend", "product"} <= called and "| attend" in told.out)
    assert sum(row["share"] for row in found["calls"]) < 1
    products = [op for op in found["operators"] if op["name"].endswith("linear")]
    assert products and all(op["calls"] % (4 * 6 + 1) == 0 for op in products)
    assert "A step takes" in told.out and "% the model" in told.out and "| target: linear layers" in told.out
    events = json.loads(Path("here/trace.json").read_text())["traceEvents"]
    assert sum(e["name"] == "step" and e.get("cat") == "user_annotation" for e in events) in (1, 2)
    assert json.loads(Path("here/result.json").read_text())["parts"] == found["parts"]
    assert Path("here/timeline.svg").exists() == HAS_FIGURES == ("saved: here/timeline.svg" in told.err)
    assert "saved: here/trace.json" in told.err


@pytest.mark.parametrize(
    ("search", "roles"),
    [("dsbd", {"target", "draft"}), ("sbon", {"target", "reward"}), ("ults", {"target"}), ("aded", {"target"})],
)
def test_any_search(search, roles, capsys):
    found, _ = profile(capsys, "--search", search, "--trace-from", "0")
    assert {role for step in found["timeline"] for role in step["nodes"]} == roles
    assert {row["part"].partition(":")[0] for row in found["parts"] if row["group"] == "model"} <= roles
    assert found["traced_steps"][0] == 0


def test_random_checkpoints(capsys):
    shape = ["--random", "--layers", "1", "--width", "64", "--heads", "4", "--kv-heads", "2", "--vocab", "300"]
    found, told = profile(capsys, *shape, "--prompt-tokens", "9", "--search", "sample", "--seed", "3")
    assert found["prompt_tokens"] == 9 and len(found["timeline"]) == 6 and found["bench"] == "profile-random-sample"
    assert "random Llama" in told.out and "Sample (seed 3)" in told.out


def test_what_cannot_be(capsys):
    assert main(["--random", "--model", "x"]) == 2 and "--random: not with --model" in capsys.readouterr().err
    assert main(["--runs", "0"]) == 2 and "at least 1" in capsys.readouterr().err
    assert main(["--search", "greedy", "--beams", "3"]) == 2 and "no such parameter" in capsys.readouterr().err
    assert main(["--runs", "1", "--max-new-tokens", "3", "--trace-from", "99"]) == 2
    assert "the search ended after 3 steps, got 99" in capsys.readouterr().err


def test_without_matplotlib(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--save", "page.md"]) == 2 and "pip install matplotlib" in capsys.readouterr().err
    _, told = profile(capsys)
    assert "no picture: figures need matplotlib" in told.err and ".svg" not in told.out


@needs_figures
def test_the_picture_is_kept_beside_the_page(capsys, tmp_path):
    profile(capsys, "--search", "dsbd", "--save", "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "<!-- bench:profile-demo-dsbd -->" in page and "![](profile-demo-dsbd.svg)" in page
    picture = (tmp_path / "profile-demo-dsbd.svg").read_text()
    assert picture.startswith("<?xml") and len(picture) < 150_000

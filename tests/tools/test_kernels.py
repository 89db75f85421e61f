"""The kernel lab: it finds right candidates right, wrong ones wrong, and says of broken ones where they broke."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from engine.cache.pool import PagePool
from kernels import cpp
from models.shape import ModelShape
from tests.marks import needs_figures
from tools.bench import limits
from tools.kernels import contenders
from tools.kernels.__main__ import TEMPLATE, main
from tools.kernels.lab import Row, Shape, definition, errors, errors_of
from tools.kernels.report import paint
from tools.kernels.scenes import PLANS, level_sizes, scene, traps

SMALL = ["--prefix", "20", "--queries", "3", "--branching", "1", "--depth", "2", "--heads", "4:2", "--head-dim", "16",
         "--seconds", "0.001"]  # fmt: skip
TEMPLATE_TEXT = TEMPLATE.read_text("utf-8")
BESIDE = ["--impls", "torch"]  # what a candidate is compared with where the others do not matter


DEFINED = {}


def once(q_THD, k_GSD, v_GSD, layout, *options):
    """The definition's results, which take most of the time and are those of other tests: once for the same numbers."""
    tensors = q_THD, k_GSD, v_GSD, *layout.seen
    key = *((x.dtype, x.shape, x.contiguous().view(torch.uint8).numpy().tobytes()) for x in tensors), str(options)
    if key not in DEFINED:
        DEFINED[key] = definition(q_THD, k_GSD, v_GSD, layout, *options)
    return DEFINED[key]


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr("tools.kernels.lab.definition", once)
    monkeypatch.setattr(limits, "BYTES", 1 << 16)
    monkeypatch.setattr(limits, "GEMM", (4, 8, 16))
    monkeypatch.setattr("tools.kernels.lab.cache_bytes", lambda device: 1 << 16)
    monkeypatch.chdir(tmp_path)


def lab(capsys, *words, code=0):
    assert main([*SMALL, "--device", "cpu", *words]) == code
    told = capsys.readouterr()
    return (json.loads(told.out.splitlines()[-1]) if told.out else None), told


def candidate(tmp_path, text):
    (tmp_path / "mine.py").write_text(text)
    return ["--candidate", "mine.py"]


def test_everything_that_is_there(capsys):
    found, told = lab(capsys)
    ours = ["reference", "torch"] if cpp.why_not() else ["reference", "torch", "cpp"]
    assert found["right"]["tree_attention"] == dict.fromkeys([*ours, "sdpa"], True)
    assert found["right"]["kv_write"] == dict.fromkeys(ours, True)
    assert "flex" in found["absent"]["tree_attention"] and "triton" in found["absent"]["tree_attention"]
    assert "Not measured: triton" in told.out
    for row in found["rows"]:
        assert row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"]
        assert row["of_floor"] == pytest.approx(row["floor_seconds"] / row["seconds"]["median"])
        assert row["bytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"]["median"])
    # 20 trunk tokens and two levels of 3; keys and values of 2 heads, queries and outputs of 4, in float32
    attention = next(row for row in found["rows"] if row["operator"] == "tree_attention")
    assert attention["bytes"] == 4 * 16 * (2 * 26 * 2 + 2 * 3 * 4)
    writes = next(row for row in found["rows"] if row["operator"] == "kv_write")
    assert writes["bytes"] == 2 * 2 * (3 * 2 * 16 * 4) + 3 * 8
    passed = [trap for trap in found["traps"] if trap["impl"] == "torch" and not trap["wrong"]]
    assert len(passed) == 2 * 2 * len(PLANS)


def test_the_template_is_right(capsys, tmp_path):
    assert main(["--print-template"]) == 0
    found, told = lab(capsys, *candidate(tmp_path, capsys.readouterr().out), "--dtypes", "float32", "bfloat16", *BESIDE)
    assert found["candidate"] == "mine"
    assert found["right"]["tree_attention"]["mine"] and found["right"]["kv_write"]["mine"]
    assert "mine is right, takes" in told.out and "mine in detail:" in told.out and not found["traps"][0]["wrong"]


@pytest.mark.parametrize(
    ("old", "new", "trap"),
    [
        ("if window is not None:", "if False:", "a window"),
        ("mask_TW[own]], 1)", "mask_TW[own] | True], 1)", "beams"),
        ("place < layout.trunk_seen_T[own].unsqueeze(1)", "(place < 999).expand(last - first, -1)",
         "the end of a prompt"),
        ("layout.trunk_pages_RP[r, place // size].long() * size + place % size",
         "(layout.trunk_pages_RP[r, 0].long() * size + place) % k_GSD.shape[1]", "a trunk in pieces"),
        ("scale=scale", "scale=1.01 * scale", "beams"),
        ("out_THD[own] = mixed", "q_THD[own] = out_THD[own] = mixed", "beams"),
        ("k_GSD[:, slots_T] = ", "k_GSD[:, slots_T - 1] = ", "beams"),
        ("v_GSD[:, slots_T] = v_TGD", "v_GSD[:, slots_T] = 1.001 * v_TGD", "padding"),
    ],
)  # fmt: skip
def test_wrong_candidates_are_found_out(old, new, trap, capsys, tmp_path):
    assert TEMPLATE_TEXT.count(old) == 1
    operator = "kv_write" if "slots_T" in old else "tree_attention"
    words = *candidate(tmp_path, TEMPLATE_TEXT.replace(old, new)), "--dtypes", "float32", "--ops", operator
    found, told = lab(capsys, *words, *BESIDE, code=2)
    assert not found["right"][operator]["mine"] and found["right"][operator]["torch"]
    assert trap in [t["name"] for t in found["traps"] if t["wrong"] and t["impl"] == "mine"]
    assert "mine is WRONG" in told.out and f"- mine, float32, {trap}: " in told.out


def test_nan_is_counted(capsys, tmp_path):
    greedy = "def tree_attention(q, k, v, layout, scale, window):\n    return (q + k.sum() * 0).to(q.dtype)\n"
    found, _ = lab(capsys, *candidate(tmp_path, greedy), "--dtypes", "float32", *BESIDE, code=2)
    told = next(t for t in found["traps"] if t["impl"] == "mine" and t["name"] == "a prompt from its start")
    assert told["wrong"].startswith(f"{40 * 4 * 32} NaN of {40 * 4 * 32}")
    nan = "def tree_attention(q, *rest):\n    out = q.clone()\n    out[0] = float('nan')\n    return out\n"
    found, _ = lab(capsys, *candidate(tmp_path, nan), "--dtypes", "float32", *BESIDE, code=2)
    row = next(row for row in found["rows"] if row["impl"] == "mine")
    assert row["nan"] == 4 * 16 and row["x_plain"] is None and not row["right"]


def test_what_a_candidate_refuses_is_listed(capsys, tmp_path):
    text = TEMPLATE_TEXT.replace("    out_THD, size =", "    if q_THD.dtype == torch.bfloat16:\n        "
                                 "raise NotImplementedError('only float32')\n    out_THD, size =")  # fmt: skip
    found, told = lab(capsys, *candidate(tmp_path, text), "--ops", "tree_attention")
    assert found["right"]["tree_attention"]["mine"] and "- mine refuses: only float32" in told.out
    assert {row["refused"] for row in found["rows"] if row["impl"] == "mine"} == {"", "only float32"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "there is no file mine.py"),
        ("def attention(q):\n    pass\n", "mine.py defines attention"),
        ("x = 1\n", "defines no tree_attention or kv_write"),
        ("def f(:\n", "mine.py:1"),
        ("import torch\n\nboom = 1 / 0\n", "ZeroDivisionError: division by zero\nmine.py:3: boom = 1 / 0"),
        ("def tree_attention(*_):\n    return help_me()\n", "NameError: name 'help_me' is not defined\nmine.py:2: "),
        ("def tree_attention(*_):\n    1 / 0\n", "mine.py:2: 1 / 0 (trap: a prompt from its start, float32)"),
        ("def tree_attention(q, k):\n    pass\n", "takes 2 positional arguments"),
        ("def tree_attention(*_):\n    pass\n", "return a tensor [40, 4, 32] of torch.float32 on cpu, got NoneType"),
        ("def tree_attention(q, *_):\n    return q[:, :1]\n", "got [40, 1, 32] of torch.float32"),
        ("def tree_attention(q, *_):\n    return q.double()\n", "got [40, 4, 32] of torch.float64"),
        ("def kv_write(*_):\n    import torch\n    torch.ones(2) @ torch.ones(3)\n", "mine.py:3: torch.ones(2)"),
    ],
)
def test_broken_candidates(text, complaint, capsys, tmp_path):
    words = candidate(tmp_path, text) if text is not None else ["--candidate", "mine.py"]
    _, told = lab(capsys, *words, code=2)
    assert complaint in told.err and "Traceback" not in told.err


def test_one_of_ours_that_is_wrong_is_no_success(capsys, monkeypatch):
    right = contenders.attend
    monkeypatch.setattr(contenders, "attend", lambda *args, impl: right(*args, impl=impl) * (1 + (impl == "torch")))
    found, told = lab(capsys, "--ops", "tree_attention", "--dtypes", "float32", code=1)
    assert not found["right"]["tree_attention"]["torch"] and "torch is WRONG" in told.out


def test_small_shapes_are_not_judged_by_luck(capsys):
    words = ["--heads", "1:1", "4:1", "--prefix", "5", "64", "300", "--queries", "1", "2", "3"]
    found, _ = lab(capsys, *words, "--ops", "tree_attention", "--dtypes", "float32", "bfloat16")
    assert max(row["x_plain"] for row in found["rows"]) < 1.8  # a single draw gives up to 3.4


def test_errors_by_hand():
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    plain, mine = torch.tensor([1.0, 2.25]), torch.tensor([1.5, 2.0])
    found = errors(mine, exact, errors_of(plain, exact))
    assert (found["error_max"], found["error_mean"], found["nan"]) == (0.5, 0.25, 0)
    assert found["x_plain"] == pytest.approx(2.0, rel=1e-6)


def test_trees():
    assert level_sizes(15, 1, 3) == [15, 15, 15] and level_sizes(15, 4, 3) == [1, 4, 15]
    for trap in traps(torch.float32, torch.device("cpu")):
        assert trap.k_GSD.isnan().any() and not trap.k_GSD[:, 0].any(), trap.name
        assert not trap.q_THD[: trap.rows].isnan().any() and trap.q_THD[trap.rows :].isnan().all()


def test_bad_grids(capsys):
    assert main(["--prefix", "0"]) == 2 and "at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["--heads", "5:2"])
    assert "divide the query heads" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled where there is a GPU")
def test_triton_is_interpreted_when_asked_for_and_not_timed(capsys):
    found, told = lab(capsys, "--impls", "triton", "torch", "--dtypes", "float32")
    assert found["right"]["tree_attention"] == {"torch": True, "triton": True} == found["right"]["kv_write"]
    assert {row["seconds"] is None for row in found["rows"] if row["impl"] == "triton"} == {True}
    assert "interpreted" in told.out and found["absent"]["tree_attention"]["sdpa"] == "not asked for"


def test_without_matplotlib(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    _, told = lab(capsys, "--picture", "p.svg", code=2)
    assert "pip install matplotlib" in told.err


@needs_figures
def test_pictures(capsys, tmp_path):
    lab(capsys, "--picture", "p.png", "--save", "page.md", "--dtypes", "float32")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "![](kernels-cpu.svg)" in (tmp_path / "page.md").read_text()
    assert len((tmp_path / "kernels-cpu.svg").read_text()) < 150_000


@needs_figures
def test_an_implementation_has_one_colour_in_a_picture():
    from matplotlib.figure import Figure  # type: ignore[import-not-found]

    shape = Shape("float32", 4, 2, 16, 20, 3, 1, 2)
    timed = {"bytes": 1, "floor_seconds": 1.0, "bound": "bytes", "x_plain": 1.0, "seconds": {"median": 2.0}}
    named = [("tree_attention", "torch"), ("tree_attention", "sdpa"), ("tree_attention", "mine")]
    named += [("kv_write", "torch"), ("kv_write", "mine")]
    paint(figure := Figure(layout="constrained"), [Row(operator, shape, impl, **timed) for operator, impl in named])
    drawn = [[line.get_color() for line in axes.get_lines() if line.get_marker() == "o"] for axes in figure.axes[:2]]
    assert drawn == [["C0", "C1", "C2"], ["C0", "C2"]]
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["floor", "torch", "sdpa", "mine"]
    assert [line.get_color() for line in legend.get_lines()] == ["black", "C0", "C1", "C2"]


class Cascade:
    """FlashInfer's wrapper, as its documentation has it: each query reads one request of each level."""

    def __init__(self, levels, workspace, layout):
        assert (levels, workspace.dtype, layout) == (2, torch.uint8, "NHD")

    def plan(self, queries, pages, indices, last, heads, kv_heads, head, page, *, sm_scale, q_data_type, kv_data_type):
        assert all(x.dtype == torch.int32 for level in (queries, pages, indices, last) for x in level)
        assert q_data_type == kv_data_type
        self.levels, self.sizes = list(zip(queries, pages, indices, last, strict=True)), (heads, kv_heads, head, page)
        self.scale = sm_scale

    def run(self, q_THD, cache):
        _, kv_heads, head, page = self.sizes
        assert all(x.shape[1:] == (page, kv_heads, head) for x in cache)
        return torch.stack([self.attend(q_HD, t, *cache) for t, q_HD in enumerate(q_THD)])

    def attend(self, q_HD, t, *cache):
        seen = []
        for queries, pages, indices, last in self.levels:
            r = int(torch.searchsorted(queries, t, right=True)) - 1
            chosen = indices[pages[r] : pages[r + 1]].long()
            length = (len(chosen) - 1) * self.sizes[3] + last[r]
            seen.append([x[chosen].flatten(0, 1)[:length] for x in cache])
        k, v = (torch.cat(x).repeat_interleave(len(q_HD) // self.sizes[1], 1) for x in zip(*seen, strict=True))
        return torch.einsum("hs,shd->hd", (torch.einsum("hd,shd->hs", q_HD, k) * self.scale).softmax(1), v)


@pytest.mark.parametrize(("prefix", "queries", "branching", "depth"), [(37, 5, 1, 3), (32, 9, 3, 2), (20, 2, 1, 18)])
def test_flashinfer_reads_the_trunk_once_and_each_branch(prefix, queries, branching, depth, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(MultiLevelCascadeAttentionWrapper=Cascade))
    pool = PagePool(ModelShape(1, 2, 8, 1, None), 200, 1)
    s = scene(pool, prefix, queries, branching=branching, depth=depth, impl="torch")
    k_GSD, v_GSD = pool.cache.k_LGSD[0].normal_(), pool.cache.v_LGSD[0].normal_()
    q_THD = torch.randn(queries, 4, 8)
    pages, theirs = contenders.flashinfer(q_THD, s, 0.3)
    pack, ours = contenders.sdpa(q_THD, s, 0.3)
    torch.testing.assert_close(theirs(*pages(k_GSD, v_GSD)), ours(*pack(k_GSD, v_GSD)))


def test_flashinfer_is_no_dependency(monkeypatch):
    cuda = torch.device("cuda")
    assert "pip install flashinfer-python" in contenders.why_not("flashinfer", cuda, True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert "--impls flashinfer" in contenders.why_not("flashinfer", cuda, False)
    assert contenders.why_not("flashinfer", cuda, True) is None
    assert "GPU" in contenders.why_not("flashinfer", torch.device("cpu"), True)

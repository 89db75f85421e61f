"""How many kernels a layer launches on a GPU: Triton's, and PyTorch's operators that compute or copy.

Counted in the interpreter; an operator of PyTorch counts for one launch, though cuBLAS may split a product into two.
"""

import importlib.util
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from engine import Engine
from engine.cache.tree import TokenTree
from engine.step.packing import Chunk, pack
from kernels.experts import Routing, Stacked, routed
from kernels.rows import TopSums, log_softmax, top_sums_of
from models.formats.floats import FloatLinear

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs triton, and no GPU", allow_module_level=True)

from triton.runtime.interpreter import GridExecutor

from kernels.gpu import counters

GOLDEN = Path(__file__).parents[1] / "golden"
DOCS = Path(__file__).parents[2] / "docs/operators-gpu.md"
FREE = re.compile(
    "aten::(empty|view|as_strided|slice|select|split|unsqueeze|squeeze|transpose|t|permute|expand|alias|detach|unbind"
    "|chunk|narrow|_unsafe_view|_reshape_alias|lift_fresh|unflatten|flatten|reshape)"
)
MODELS = {
    "Llama": "llama/gqa",
    "Qwen3": "qwen3/defaults",
    "Gemma 2": "gemma/two",
    "OLMo 2": "olmo/plain",
    "Phi": "phi/plain",
    "OPT": "opt/plain",
}


class Launches(TorchDispatchMode):
    """Counts launches within it, by name."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not FREE.match(func.name()):
            self.found[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch):
    counting = Launches()
    run = GridExecutor.__call__

    def launch(self, *args, **kwargs):
        counting.found[self.fn.__name__] += 1
        with _disable_current_modes():  # the interpreter's own copies
            return run(self, *args, **kwargs)

    def whole(name):
        """An operator that is one launch on a GPU, whatever it is made of on a CPU."""
        real = getattr(F, name)

        def one(*args, **kwargs):
            counting.found[name] += 1
            with _disable_current_modes():
                return real(*args, **kwargs)

        return one

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    for name in ("rms_norm", "layer_norm", "linear"):
        monkeypatch.setattr(F, name, whole(name))
    return counting


def of_a_layer(variant, rows, launches):
    """Launches of each layer but the first and the last, for a step of 3 beams after 5 tokens."""
    engine = Engine.load(GOLDEN / variant, dtype="float32", device="cpu", kv_memory=1 << 22)
    model, pool = engine.runner.model, engine.pool
    model.stack = None
    for layer in (layer for layer in model.modules() if isinstance(layer, FloatLinear)):  # as on a GPU
        if layer.packed is not None:
            layer.weights = [torch.zeros(layer.packed.outs, layer.packed.width)]
        elif layer.blocked:
            layer.weights = [layer.weights[0].to_dense()]
        layer.packed, layer.blocked, layer.joined = None, False, True
    tree = TokenTree(pool, [5, 6, 7, 8, 9])
    p = pack([Chunk(tree, 5, [], tree.allocate(5, []))], pool.page_size, impl="triton", ancestors=pool.ancestors)
    layout = replace(p.layout, rows=rows)
    counts = []
    for count in (1, 2):
        kept, model.layers = model.layers, model.layers[:count]
        launches.found.clear()
        with torch.inference_mode(), launches:
            model.forward(p.tokens_T, layout.positions_T, p.spans_T, pool.cache, layout)
        counts.append(+launches.found)
        model.layers = kept
    tree.release()
    return counts[1] - counts[0]


@pytest.mark.parametrize("name", MODELS)
def test_launches_of_a_layer(name, launches):
    """The page has the numbers, by operators of PyTorch and by Triton's, each one that is not needed found out."""
    one_by_one, together = (of_a_layer(MODELS[name], rows, launches) for rows in ("torch", None))
    assert f"| {name} | {one_by_one.total()} | {together.total()} |" in DOCS.read_text(encoding="utf-8")
    assert not [operator for operator in together if operator.startswith("aten")]


def test_launches_of_latents(launches, monkeypatch):
    """Two products of all heads, and one launch for what stands between the first and attention."""
    monkeypatch.setattr("models.latent.stacks", lambda device: True)
    found = of_a_layer("deepseek/dense", None, launches)
    assert found == {"linear": 5, "aten::bmm.out": 2, "_turn": 1, "_attend": 1, "_sum": 2, "_activate": 1}


def test_launches_of_experts(launches):
    """The choice, the tiles, two products and the sums; nothing that a host would wait for."""
    up, down = (Stacked(6, torch.randn(6 * outs, width)) for outs, width in ((32, 8), (8, 16)))
    x_TE, logits_TX, bias_X = torch.randn(3, 8), torch.randn(3, 6), torch.zeros(6)
    counters(x_TE.device)
    with torch.inference_mode(), launches:
        routed(x_TE, logits_TX, up, down, Routing(2, "sigmoid"), "silu", bias_X=bias_X, shared_TE=x_TE)
    assert +launches.found == {"_choose": 1, "_sort": 1, "_product": 2, "_add_up": 1}


def test_launches_after_the_last_layer(launches):
    """Launches of log-probabilities, and of the top sums of three searches."""
    logits_NV = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    counters(logits_NV.device)  # made once per process
    with torch.inference_mode(), launches:
        logp_NV, _, peaks_NB = log_softmax(logits_NV, 4990, impl="triton")
        assert peaks_NB is not None
        wanted = [(slice(0, 1), TopSums([0.0], 4)), (slice(1, 4), TopSums([0.5] * 3, 9))]
        wanted += [(slice(4, 6), TopSums([0.0] * 2, 4))]
        top_sums_of(logp_NV, wanted, peaks_NB, impl="triton")
    assert {name: count for name, count in launches.found.items() if name[0] == "_"} == {
        "_mass": 1, "_log_softmax": 1, "_top_sums": 1,
    }  # fmt: skip
    assert launches.found.total() == 3, launches.found

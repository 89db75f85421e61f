"""An engine on a CUDA device that is pretended (`pretended_cuda.py`): what only a GPU runs in Python, without one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import Engine
from models.checkpoint.headers import Checkpoint
from models.checkpoint.sizes import measure
from models.families import load_model
from search import Sample, Trie
from tests.marks import needs_interpreter
from tests.pretended_cuda import pretending
from tools.random_checkpoint import make

pytestmark = needs_interpreter


@pytest.fixture
def device(monkeypatch):
    with pretending(monkeypatch) as device:
        yield device


@pytest.fixture
def engines(tmp_path, device):
    make(tmp_path, layers=1, width=32, mlp=40, heads=4, kv_heads=2, vocab=48, max_positions=64, seed=3)
    return [Engine.load(tmp_path, dtype="float32", device=name, kv_memory=1 << 20) for name in ("cpu", "cuda")]


def test_an_engine_on_the_device(engines, device):
    """Graphs read what a pass gives them, whatever was in that memory before; a step waits for its answer alone."""
    cuda = engines[1]
    for search in (Trie(beams=2), Sample(seed=3)):
        before = device.replays
        want, got = (e.generate([[7, 20, 33], [9]], search, max_new_tokens=5, ignore_eos=True) for e in engines)
        assert [o.token_ids for r in got for o in r.outputs] == [o.token_ids for r in want for o in r.outputs]
        assert device.replays > before, search
    waits = []
    for tokens in (9, 5, 9):  # at first graphs are recorded
        before = device.waits
        cuda.generate([[7, 20, 33]], Trie(beams=2), max_new_tokens=tokens, ignore_eos=True)
        waits.append(device.waits - before)
    assert waits[1] == waits[2]


@pytest.mark.parametrize("variant", ["gemma4/everything", "gemma3n/plain"])
def test_layers_that_differ(variant, device):
    """Gemma 4: heads by layer, keys of other layers, values that are keys and normed, inputs of layers, experts beside
    an MLP. Gemma 3n: several streams. A table of inputs lies on the device, so that graphs read it."""
    folder, options = Path(__file__).parent / "golden" / variant, {"dtype": "float32", "kv_memory": 1 << 20}
    cpu, cuda = (Engine.load(folder, device=name, **options) for name in ("cpu", "cuda"))
    assert cuda.runner.model.inputs.table.weight.is_cuda and cpu.runner.model.inputs.table.weight is None
    ids, before = [7, 20, 33, 5], device.replays
    torch.testing.assert_close(cuda.logits(ids).cpu(), cpu.logits(ids), rtol=0, atol=1e-4)
    want, got = (e.generate([ids], Trie(beams=2), max_new_tokens=3, ignore_eos=True) for e in (cpu, cuda))
    assert [o.token_ids for o in got[0].outputs] == [o.token_ids for o in want[0].outputs]
    assert device.replays > before


def test_what_a_capture_refuses(device):
    x, graph = torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    for wrong in (
        lambda: x.sum().item(),
        lambda: x + torch.ones(3).to("cuda"),
        lambda: x.nonzero(),
        lambda: x.tolist(),
    ):
        with pytest.raises(RuntimeError, match="stream is capturing"), torch.cuda.graph(graph, pool=pool):
            wrong()
    with pytest.raises(RuntimeError, match="the same device"):
        x + torch.ones(3)


def test_what_a_graph_repeats(device):
    """Operators, in the memory of the capture; within it nothing is computed."""
    x, graph = torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        y = x + 1
        x.mul_(2)
    assert y.isnan().all()
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [5, 5, 5] and x.tolist() == [8, 8, 8]


def test_a_copy_to_the_host_comes_later(device):
    there = torch.empty(2, pin_memory=True).copy_(torch.ones(2, device="cuda"), non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    with pytest.raises(RuntimeError, match="reads memory of a copy that is under way"):
        there + 1
    done.synchronize()
    assert there.tolist() == [1, 1]


def test_a_tied_head_is_the_embedding(tmp_path, device):
    make(tmp_path, layers=1, width=32, mlp=40, heads=4, kv_heads=2, vocab=48, tied=True)
    checkpoint, on = Checkpoint.open(tmp_path), torch.device("cuda")
    model, size = load_model(checkpoint, torch.float32, on), measure(checkpoint, torch.float32, on)
    assert model.head.weights[0] is model.embedding.weight
    untied = tmp_path / "untied"
    make(untied, layers=1, width=32, mlp=40, heads=4, kv_heads=2, vocab=48)
    assert measure(Checkpoint.open(untied), torch.float32, on).weights - size.weights == 4 * 48 * 32
    assert size.touched == measure(checkpoint, torch.float32, torch.device("meta")).touched


@pytest.mark.full
def test_tests_of_a_gpu_run_on_it():
    """Their tensors lie on one device; `python -m pytest -p tests.pretending` runs all of them in half an hour."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.pretending", "--full", "-m", "gpu", "-n", "0"]
    files = [f"tests/kernels/test_{name}.py" for name in ("rows_triton", "latent", "kv_write")]
    chosen = ["-k", "several_ranges or absorb or copies or peaks", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *files, *chosen], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

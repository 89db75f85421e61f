"""The waits for a GPU: one answer for each pass, whatever the search, and the tokens of a CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from engine import Engine
from engine.step.packing import Blank
from engine.step.runner import Runner
from kernels.rows import TopSums, top_sums_of
from search.base import REGISTRY, make_search
from tests.search.device import DEVICE, Device, OnDevice, bare

ROOT = Path(__file__).parents[2] / "models" / "demo"
OPTIONS = {
    "aded": {"aded_drafter": "backoff", "aded_nodes": 6},
    "beam-sample": {"beams": 3, "seed": 1},
    "bon": {"bon_n": 6, "seed": 1},
    "diverse": {"beams": 6, "diverse_groups": 3, "num_return_sequences": 6},
    "sample": {"num_return_sequences": 4, "seed": 1, "temperature": 0.8, "top_p": 0.9, "top_k": 20},
    "sbon": {"sbon_n": 6, "sbon_tau": 4, "seed": 1},
    "trie": {"beams": 15},
    "ults": {"ults_k_max": 3},
}


@pytest.fixture(scope="module")
def engine():
    return Engine.load(ROOT / "target", device="cpu", draft=ROOT / "draft", reward=ROOT / "reward", kv_memory=1 << 26)


def ask(engine, search, **options):
    [result] = engine.generate(["Once upon a time there was"], search, max_new_tokens=10, ignore_eos=True, **options)
    return [output.token_ids for output in result.outputs]


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_one_wait_per_pass(name, engine, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the priors of ULTS
    search, passes, guessed = make_search(name, OPTIONS.get(name, {})), [], []
    expected = ask(engine, search)
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()  # gathered again
    real = Runner.answer

    def answer(self, hidden_NE, *edits):
        passes.append(len(hidden_NE))
        with _disable_current_modes():
            return tuple(x if x is None else OnDevice(x.clone()) for x in real(self, hidden_NE, *edits))

    def top(logp_NV, wanted, peaks_NB, *, impl=None, real=top_sums_of):
        """A GPU's kernel breaks ties, as that of a CPU does."""
        with _disable_current_modes():
            wanted = [(rows, TopSums(bare(sums), k)) for rows, (sums, k) in wanted]
            return [OnDevice(x) for x in real(bare(logp_NV), wanted, bare(peaks_NB))]

    def forward(self, chunks, ready, real=Runner.forward):
        guessed.extend(chunk for chunk in chunks if isinstance(chunk, Blank))

        def wrapped(p):
            layout = replace(p.layout, ancestry_TC=OnDevice(p.layout.ancestry_TC))
            ready(replace(p, tokens_T=OnDevice(p.tokens_T), layout=layout))

        with _disable_current_modes():
            return real(self, chunks, wrapped)

    monkeypatch.setattr(Runner, "answer", answer)
    monkeypatch.setattr(Runner, "forward", forward)
    for module in ("engine.step.runner", "search.diverse"):
        monkeypatch.setattr(f"{module}.top_sums_of", top)
    for each in (engine, *engine.companions.values()):
        monkeypatch.setattr(each.pool, "device", DEVICE)
        monkeypatch.setattr(each.runner, "asynchronous", True)
    for options in ({"logprobs": 2}, {}):  # the former look at hidden rows, and do not look ahead
        passes.clear()
        guessed.clear()
        with Device():
            found = ask(engine, search, **options)
        assert found == expected
        assert len(passes) >= 5 and sum(Device.waits.values()) <= 1.05 * len(passes), (len(passes), Device.waits)
        assert bool(guessed) == (name in ("greedy", "trie") and not options)


def test_what_counts_as_a_wait():
    x_N = OnDevice(torch.tensor([3.0, 1.0, 2.0]))
    with Device():
        assert x_N.device == DEVICE and not x_N.is_cpu
        assert (x_N + 1).cpu().tolist() == [4.0, 2.0, 3.0] and float(x_N[0]) == 3.0 and x_N.tolist() == [3.0, 1.0, 2.0]
        assert (x_N > 1.5).nonzero().view(-1).cpu().tolist() == [0, 2]
        assert Device.waits == {"copy": 2, "item": 1, "tolist": 1, "aten::nonzero": 1}
        with pytest.raises(RuntimeError, match="another on the CPU"):
            x_N + torch.ones(3)
        assert (x_N + torch.ones(3).to(DEVICE)).cpu().sum() == 9

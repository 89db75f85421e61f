"""Attention on a GPU in one order: a row's bits, whatever is beside it, and its error."""

import random
from functools import partial

import pytest
import torch

from tests.kernels.test_same_bits import Sequences
from tests.marks import TRITON

pytestmark = pytest.mark.parametrize("device", TRITON)
SINKS = torch.tensor([1.5, -2.0])
SLOPES = torch.tensor([0.05, -0.01])


@pytest.fixture
def processors(monkeypatch, one_order):
    """How many multiprocessors the GPU is taken to have."""
    from kernels import gpu
    from kernels.tree_attention import triton_fixed

    def take(count):
        monkeypatch.setattr(triton_fixed, "properties", lambda _: gpu.Properties(count, False))

    return take


@pytest.mark.parametrize(("dtype", "kept", "options"), [
    pytest.param(torch.float32, None, {}, id="float32", marks=pytest.mark.full),
    pytest.param(torch.bfloat16, None, {"window": 300, "sinks_H": SINKS}, id="window and sinks"),
    pytest.param(torch.bfloat16, None, {"slopes_H": SLOPES}, id="slopes"),
    pytest.param(torch.bfloat16, torch.int8, {"window": 40, "slopes_H": SLOPES.bfloat16()}, id="coarse slopes"),
    pytest.param(torch.bfloat16, torch.int8, {"cap": 2.0}, id="int8"),
    pytest.param(torch.float16, None, {"window": 40}, id="float16"),
])  # fmt: skip
def test_neighbours_shares_and_where_keys_lie_do_not_show(dtype, kept, options, device, processors):
    """Sequences alone in a trunk, whose parts one program joins; and as branches, in shares of any number of parts."""
    for length in (33, 590):
        sequences = Sequences(length, length, length * 2 // 3, 4, (1, 2, 32))
        attend = partial(sequences.attend, dtype=dtype, kept=kept, impl="triton", device=device, **options)
        processors(1)
        alone = [attend([], 0, alone=i)[0] for i in range(4)]
        for i in (0, 3):
            exact = sequences.attend([], 0, torch.float64, kept, alone=i, impl="reference", **options)[0]
            torch.testing.assert_close(alone[i].double(), exact, rtol=3e-2, atol=3e-2 if kept else 1e-2)
        for count, trunk, tokens in ((1, 0, 1), (2, length // 2, 3), (20, length * 2 // 3, 1)):
            processors(count)
            asked = random.Random(count).sample(range(4), 3)
            for i, rows in zip(asked, attend(asked, trunk, tokens=tokens), strict=True):
                assert rows[-1:].equal(alone[i]), (length, count, i)


def test_chunks_of_a_prompt(device, processors):
    """A prompt as a whole, in chunks, and its last tokens as a chain of branch nodes."""
    length = 300
    sequences = Sequences(length, length, length, 1, (1, 2, 32))
    attend = partial(sequences.attend, dtype=torch.bfloat16, kept=None, impl="triton", device=device)
    processors(1)
    whole = attend([], 0, alone=0, tokens=length)[0]
    processors(8)
    for tokens in (1, 70):
        assert attend([], 0, alone=0, tokens=tokens)[0].equal(whole[-tokens:])
    assert attend([0], length - 19, tokens=19)[0].equal(whole[-19:])


def test_programs_of_many_tiles_share_their_memory_in_turns(device, processors, monkeypatch):
    from kernels import gpu
    from kernels.tree_attention import triton_fixed

    sequences = Sequences(300, 300, 300, 1, (1, 2, 32))
    attend = partial(sequences.attend, [], 0, dtype=torch.bfloat16, kept=None, impl="triton", device=device, alone=0)
    processors(1)
    whole, grids = attend(tokens=300)[0], []

    def counted(kernel, grid):
        grids.append((kernel.fn.__name__, *grid))
        return kernel[grid]

    monkeypatch.setattr(triton_fixed, "SCRATCH", 1)
    with gpu.launching_by(counted):
        assert attend(tokens=300)[0].equal(whole)
    assert [grid for name, grid in grids if name == "_attend"] == [8, 2]

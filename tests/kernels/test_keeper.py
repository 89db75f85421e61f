"""Experts in mapped files: the least recently used go, and nothing goes that a file could not give back."""

import mmap
import random
import re
from pathlib import Path

import pytest
import torch

from kernels.experts import Expert, Keeper, PackedExperts, experts, least_limit
from kernels.experts.keeper import AROUND
from kernels.linear import Packed
from kernels.stack import Matrix
from tests.kernels.test_experts import ROUTINGS, draw, mixture, native

pytestmark = [
    native,
    pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not say what it maps"),
]
COUNT = 7


def mapped(path, whole):
    """The same mixture, its experts in a mapped file, whose pages the process could write to; and all of the file."""
    panels = [matrix.packed.panels for expert in whole.experts for matrix in expert]
    size = max(x.nbytes for x in panels)
    step = -(-size // AROUND) * AROUND
    content = bytearray(step * len(panels))
    every = torch.frombuffer(content, dtype=torch.uint8)
    for i, x in enumerate(panels):
        every[i * step : i * step + x.nbytes] = x.contiguous().view(-1).view(torch.uint8)
    path.write_bytes(content)
    with path.open("rb") as file:
        every = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    places = iter(range(len(panels)))

    def moved(matrix):
        old, start = matrix.packed, next(places) * step
        new = every[start : start + old.panels.nbytes].view(old.panels.dtype).view(old.panels.shape)
        return Matrix(Packed(new, old.outs, old.width), matrix.bias)

    found = [Expert(*map(moved, expert)) for expert in whole.experts]
    return PackedExperts(whole.routing, "silu", whole.router, found), every


def rights(path):
    return re.findall(rf"^\S+ (\S+) .* {re.escape(str(path))}$", Path("/proc/self/maps").read_text(), re.MULTILINE)


def test_the_same_bits_within_a_limit(tmp_path):
    whole = mixture(ROUTINGS["softmax"], count=COUNT, width=64, inner=512)
    parts, _ = mapped(tmp_path / "one", whole)
    others, _ = mapped(tmp_path / "two", whole)
    free = Keeper([parts, others], 1 << 30)
    limit = free.bytes // 2
    keeper = Keeper([parts, others], limit)
    assert keeper.held == 0 and keeper.bytes == free.bytes
    assert limit <= least_limit(sum(x.packed.panels.nbytes for each in whole.experts for x in each), COUNT)
    assert rights(tmp_path / "one") == rights(tmp_path / "two") == ["r--p"]
    drawn, most = random.Random(0), 0
    for i in range(60):
        x_TE = draw(drawn.choice([1, 2, 9]), 64, seed=i)
        assert experts(x_TE, drawn.choice([parts, others])).equal(experts(x_TE, whole))
        assert 0 < keeper.held <= limit
        most = max(most, keeper.held)
    assert most > limit - keeper.bytes // (2 * COUNT)  # it uses what it has
    assert free.held == 0  # the later one took over


def test_what_is_in_no_file_or_was_written_to_is_refused(tmp_path):
    whole = mixture(ROUTINGS["softmax"], count=COUNT, width=64, inner=512)
    before = experts(draw(5, 64), whole)
    with pytest.raises(ValueError, match="a matrix of an expert lies in no mapped file"):
        Keeper([whole], 1 << 30)
    assert experts(draw(5, 64), whole).equal(before)

    parts, every = mapped(tmp_path / "file", whole)
    parts.experts[3] = Expert(parts.experts[3].up, whole.experts[3].down)
    with pytest.raises(ValueError, match="a matrix of an expert lies in no mapped file"):
        Keeper([parts], 1 << 30)

    parts, every = mapped(tmp_path / "written", whole)
    every[-1] = 7  # of no matrix
    with pytest.raises(ValueError, match="was written to in memory"):
        Keeper([parts], 1 << 30)
    assert every[-1] == 7 and experts(draw(5, 64), parts).equal(before)


def test_a_limit_below_a_layer_is_refused(tmp_path):
    parts, _ = mapped(tmp_path / "file", mixture(ROUTINGS["softmax"], count=COUNT, width=64, inner=512))
    size = Keeper([parts], 1 << 30).bytes
    assert Keeper([parts], size).bytes == size
    with pytest.raises(ValueError, match=f"expected the {size} bytes of the experts of a layer at least"):
        Keeper([parts], size - 1)

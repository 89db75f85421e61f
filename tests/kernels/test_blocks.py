"""Block formats of ggml: the definition against the `gguf` package, packed matrices against the definition."""

import pytest
import torch

from kernels import cpp
from kernels.linear import linear, reference
from kernels.linear.blocks import BLOCKS, BlockPanels
from kernels.linear.panels import default_zero, numbers
from tests.models.gguf.files import HALVES, gguf, put_scale

TYPES = gguf.GGMLQuantizationType


def stored(name, outs, width, seed=0):
    """Random bytes, whose scales are finite numbers."""
    block, draw = BLOCKS[name], torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 256, (outs, width // block.size, block.bytes), generator=draw, dtype=torch.uint8)
    for at in HALVES[name]:
        put_scale(rows.numpy(), name, at, torch.randn(outs, width // block.size, generator=draw).numpy())
    if name == "MXFP4":
        rows[..., 0] = torch.randint(0, 160, rows.shape[:2], generator=draw, dtype=torch.uint8)
    return rows.flatten(1)


def values(block, rows_OB):
    """The elements, float32."""
    codes, scale, least = block.rows(rows_OB)
    spread = lambda x: x.repeat_interleave(block.group, 1)  # noqa: E731
    zero = default_zero(block.kind, block.least)
    found = (numbers(block.kind, codes) - zero) * spread(scale)
    return found if least is None else found + spread(least)


def test_sizes_are_those_of_the_package():
    for name, block in BLOCKS.items():
        assert int(TYPES[name]) == block.number
        assert gguf.GGML_QUANT_SIZES[TYPES[name]] == (block.size, block.bytes)


@pytest.mark.parametrize("name", BLOCKS)
def test_values_are_those_of_the_package(name):
    block, rows = BLOCKS[name], stored(name, 7, 512)
    assert values(block, rows).equal(torch.from_numpy(gguf.quants.dequantize(rows.numpy(), TYPES[name])))
    codes, scale, least = block.rows(rows)
    assert codes.shape == (7, 512) and scale.shape == (7, 512 // block.group) and (least is not None) == block.least


@pytest.mark.skipif(bool(cpp.why_not()), reason=f"no C++ kernels: {cpp.why_not()}")
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("parts", "width"), [((7,), 256), ((64,), 512), ((40, 1, 9, 83), 1024)])
def test_packed_matrices_hold_the_same_numbers(name, parts, width):
    """However many files' rows make up the matrix, and wherever in a panel they begin."""
    block, outs = BLOCKS[name], sum(parts)
    panels, rows = BlockPanels(block, outs, width), stored(name, outs, width)
    for part in rows.split(parts):
        panels.add(part)
    packed, exact = panels.done(), values(block, rows)
    assert reference.unpack(packed).equal(block.rows(rows).codes_OI)
    assert reference.unpacked(packed).equal(exact)
    kept = [x for x in packed.groups[2:] if x is not None]
    assert packed.panels.nbytes + sum(x.nbytes for x in kept) == block.packed_bytes(outs, width)
    for count in (1, 3, 20):
        x = torch.randn(count, width, generator=torch.Generator().manual_seed(count))
        found, right = linear(x, packed), x.double() @ exact.double().T
        sizes = x.double().abs() @ (exact.double().abs() + block.rows(rows).scale_OG.abs().max() * 15).T
        assert ((found - right).abs() <= 16 * torch.finfo(torch.float32).eps * sizes).all()
        some = torch.tensor([outs - 1, 0, outs // 2])
        assert linear(x, packed.rows(some)).equal(found[:, some])


@pytest.mark.skipif(bool(cpp.why_not()), reason=f"no C++ kernels: {cpp.why_not()}")
def test_what_is_refused():
    block, rows = BLOCKS["Q8_0"], stored("Q8_0", 4, 64)
    for make, what in (
        (lambda panels: panels.add(rows[:, :34]), r"rows: expected contiguous uint8 \[4, 68\]"),
        (lambda panels: panels.add(torch.cat([rows, rows])), "expected 4 rows, got 8"),
        (lambda panels: panels.done(), "expected 4 rows, got 0"),
    ):
        with pytest.raises(ValueError, match=what):
            make(BlockPanels(block, 4, 64))
    rows[2, 35:36] = 0x7C  # infinity
    rows[2, 34:35] = 0
    with pytest.raises(ValueError, match="not finite"):
        BlockPanels(block, 4, 64).add(rows)

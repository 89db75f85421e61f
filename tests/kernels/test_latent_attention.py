"""Tree attention over keys that are the values, by Triton's kernel, against the definition: latents of every size."""

import pytest
import torch

from kernels import gpu
from kernels.kv_fp8 import DTYPE as FP8
from kernels.same_bits import asking
from kernels.tree_attention import reference, tree_attention
from tests.kernels.forests import cast, forest
from tests.marks import DEVICES, HAS_TRITON, needs_interpreter

if HAS_TRITON:
    from kernels.tree_attention import triton as attention

MIXED = [(150, 0, 70, 9), (40, 12, 0, 0), (10, 0, 3, 0), (0, 0, 33, 4)]
WIDE = [(70, 0, 40, 3)]
CASES = [  # trees, rotated, rank, heads, dtype, cache
    (MIXED, 8, 16, 5, torch.float32, None),
    (MIXED, 2, 33, 3, torch.bfloat16, None),
    (WIDE, 64, 512, 16, torch.bfloat16, None),
    (WIDE, 6, 160, 3, torch.float16, None),
    (WIDE, 8, 24, 20, torch.float32, torch.int8),
    (WIDE, 8, 24, 4, torch.float16, torch.int8),
    (WIDE, 16, 40, 4, torch.bfloat16, FP8),
]


def case(trees, rotated, rank, heads, dtype, kept):
    """A forest, what attention takes of it, and the same numbers in float64."""
    f = forest(rank, trees, heads=heads, kv_heads=1, head_dim=rotated + rank, padding=3)
    (q, row, _), (wide_q, wide_row, _) = cast(f, dtype, kept)
    return f.layout, (q, row, row), (wide_q, wide_row, wide_row)


@DEVICES
@pytest.mark.parametrize("later", [False, True], ids=["merged by the last", "merged later"])
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_error_is_at_most_twice_that_of_the_definition(shape, later, device, monkeypatch):
    """Slots that are not live, and padding, hold NaN; trees are in shares."""
    monkeypatch.setattr(attention, "ALONE", -1 if later else 1 << 30)
    if device == "cpu":
        monkeypatch.setattr(attention, "properties", lambda _: gpu.Properties(6, roomy=False))
    layout, given, wide = case(*shape)
    rotated, dtype = shape[1], shape[4]
    moved = [x.to(device) for x in given]
    moved[2] = moved[1]
    found = tree_attention(*moved, layout.to(device), scale=0.1, unread=rotated, impl="triton").cpu()
    options = layout, 0.1, None
    exact = reference.tree_attention(*wide, *options)
    plain = (reference.tree_attention(*(x.to(dtype) for x in wide), *options).double() - exact).abs()
    own = slice(-3), slice(None), slice(rotated, None)
    ours, tiny = (found.double() - exact).abs()[own], torch.finfo(dtype).eps * 0.1
    assert ours.max() <= 2 * plain[own].max() + tiny
    assert ours.square().mean().sqrt() <= 2 * plain[own].square().mean().sqrt() + tiny


@needs_interpreter
@pytest.mark.parametrize("options", [{"window": 9}, {"cap": 2.0}, {"sinks_H": torch.tensor([0.5, -1.0, 2.0])}], ids=str)
def test_options(options):
    layout, given, wide = case(MIXED, 8, 16, 3, torch.float32, None)
    given[0][-3:] = 0
    found = tree_attention(*given, layout, scale=0.3, unread=8, impl="triton", **options)
    wide[0][-3:] = 0
    exact = tree_attention(*wide, layout, scale=0.3, impl="reference", **options)
    torch.testing.assert_close(found[:-3, :, 8:].double(), exact[:-3, :, 8:], rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused():
    layout, (q, row, _), _ = case(WIDE, 8, 16, 2, torch.float32, None)
    with pytest.raises(ValueError, match="unread: expected 0, or keys that are the values, got 8"):
        tree_attention(q, row, row.clone(), layout, scale=1, unread=8, impl="reference")
    for unread in (-1, 24):
        with pytest.raises(ValueError, match="unread: expected at least 0 and less than 24"):
            tree_attention(q, row, row, layout, scale=1, unread=unread, impl="reference")


@needs_interpreter
def test_what_the_kernel_cannot_do_is_refused():
    for rotated, rank, dtype, most in ((8, 513, "float16", 512), (8, 129, "float32", 128), (130, 16, "float32", 128)):
        layout, given, _ = case(WIDE, rotated, rank, 2, getattr(torch, dtype), None)
        expected = f"at most {most} elements in {dtype} and 128 rotated, got {rank} and {rotated}"
        with pytest.raises(ValueError, match=expected):
            tree_attention(*given, layout, scale=1, unread=rotated, impl="triton")
    layout, given, _ = case(WIDE, 8, 16, 2, torch.float32, None)
    with asking("on"), pytest.raises(ValueError, match="COPPICE_SAME_BITS=on is not supported"):
        tree_attention(*given, layout, scale=1, unread=8, impl="triton")


@needs_interpreter
def test_keys_are_loaded_once(monkeypatch):
    """A second tensor, of NaN, in the place of the values changes no bit: floats are not read from it."""
    layout, (q, row, _), _ = case(WIDE, 8, 16, 2, torch.float32, None)
    monkeypatch.setattr("kernels.checks.unread", lambda *_: None)
    found = [
        tree_attention(q, row, values, layout, scale=1, unread=8, impl="triton")[:-3, :, 8:]
        for values in (row, torch.full_like(row, float("nan")))
    ]
    assert found[0].equal(found[1]) and found[0].isfinite().all()

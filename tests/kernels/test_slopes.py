"""Slopes of ALiBi: scores of each head fall with the distance of a key, in every implementation."""

import pytest
import torch

from tests.gpu_errors import FAST
from tests.kernels.forests import FORESTS, cast, forest, hash_of
from tests.kernels.test_tree_attention import CACHES, FAST_DTYPES, LATER, check_error, check_shares, naive, quick, run
from tests.marks import TRITON, needs_interpreter

SLOPES = torch.tensor([0.5, 0.03, 0.0, -0.01, 2.0, 0.125])
KINDS = pytest.mark.parametrize("slopes", [SLOPES, SLOPES.bfloat16()], ids=["float32", "bfloat16"])


@KINDS
@CACHES
@pytest.mark.parametrize("name", FORESTS)
def test_slopes_equal_the_definition_in_float64(name, kept, slopes):
    trees, shape = FORESTS[name]
    f = forest(hash_of(name), trees, **shape)
    (q, k, v), _ = cast(f, torch.float64, kept)
    own = slice(0, len(q) - shape.get("padding", 0))
    slopes = slopes[: q.shape[1]].contiguous()
    exact = slopes.double() if slopes.dtype == torch.float32 else slopes
    for window, sinks in ((None, None), (7, torch.ones(q.shape[1]))):
        expected = naive(q, k, v, f.layout, 0.3, window, None, sinks, exact)[own]
        for impl in ("reference", "torch"):
            out = run(impl, "cpu", q, k, v, f.layout, 0.3, window, None, sinks, slopes)[own]
            torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.full(unless=quick)
@KINDS
@CACHES
@pytest.mark.parametrize(("impl", "device", "dtype"), FAST_DTYPES)
@pytest.mark.parametrize("name", ["long trunks", "multi-query", "padding rows"])
def test_error_is_at_most_twice_that_of_plain_pytorch(name, dtype, impl, device, kept, slopes):
    trees, shape = FORESTS[name]
    f = forest(hash_of(name) + 1, trees, **shape)
    for window in (None, 100):
        check_error(f, dtype, kept, impl, device, 0.3, window, None, None, slopes[: f.q_THD.shape[1]].contiguous())


@needs_interpreter
def test_fast_exponentials_add_what_they_may(monkeypatch):
    """If all are off by most in one direction, one output has more than twice the error of plain PyTorch."""
    from tests.interpreter import err_as_gpus

    err_as_gpus(monkeypatch, alike=1.0)
    trees, shape = FORESTS["long trunks"]
    f = forest(hash_of("long trunks") + 1, trees, **shape)
    given = f, torch.float32, None, "triton", "cpu", 0.3, None, None, None, SLOPES[: f.q_THD.shape[1]].bfloat16()
    check_error(*given, fast=FAST)
    with pytest.raises(AssertionError):
        check_error(*given)


@pytest.mark.parametrize(("impl", "device", "dtype"), [p for p in FAST_DTYPES if p.values[2] == torch.float32])
def test_a_steep_slope_leaves_the_nearest_key(impl, device, dtype):
    f = forest(3, [(300, 2, 33, 4)])
    (q, k, v), _ = cast(f, dtype)
    out = run(impl, device, q, k, v, f.layout, 0.3, slopes=torch.full([4], 1e3))
    own = f.layout.write_slots_T[:2]
    torch.testing.assert_close(out[:2], v[:, own].transpose(0, 1).repeat_interleave(2, 1), rtol=1e-5, atol=1e-6)


@LATER
@pytest.mark.parametrize("device", TRITON)
def test_shares_of_the_keys_have_slopes(device, later, monkeypatch):
    check_shares(device, later, monkeypatch, slopes=torch.tensor([0.1, -0.02]))

"""Attention sinks: a logit of each head in the denominator of its softmax, in every implementation."""

import pytest
import torch

from kernels.tree_attention import tree_attention
from tests.kernels.forests import FORESTS, cast, forest, hash_of
from tests.kernels.test_tree_attention import CACHES, FAST_DTYPES, LATER, check_error, check_shares, naive, quick, run
from tests.marks import TRITON, needs_cpp

SINKS = torch.tensor([1.5, -2.0, 0.0, 4.0, -0.5, 2.5])


@CACHES
@pytest.mark.parametrize("name", FORESTS)
def test_sinks_equal_the_definition_in_float64(name, kept):
    trees, shape = FORESTS[name]
    f = forest(hash_of(name), trees, **shape)
    (q, k, v), _ = cast(f, torch.float64, kept)
    own, sinks = slice(0, len(q) - shape.get("padding", 0)), SINKS[: q.shape[1]]
    for window, cap in ((None, None), (7, 0.7)):
        expected = naive(q, k, v, f.layout, 0.3, window, cap, sinks)[own]
        for impl in ("reference", "torch"):
            out = run(impl, "cpu", q, k, v, f.layout, 0.3, window, cap, sinks)[own]
            torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.full(unless=quick)
@CACHES
@pytest.mark.parametrize(("impl", "device", "dtype"), FAST_DTYPES)
@pytest.mark.parametrize("name", ["long trunks", "multi-query", "padding rows"])
def test_error_is_at_most_twice_that_of_plain_pytorch(name, dtype, impl, device, kept):
    trees, shape = FORESTS[name]
    f = forest(hash_of(name), trees, **shape)
    for window, sinks in ((None, SINKS), (100, SINKS.flip(0) * 3)):
        check_error(f, dtype, kept, impl, device, 0.3, window, None, sinks[: f.q_THD.shape[1]].contiguous())


@pytest.mark.parametrize(("impl", "device", "dtype"), [p for p in FAST_DTYPES if p.values[2] == torch.float32])
def test_sinks_far_from_the_scores(impl, device, dtype):
    """One that takes all of the weight, however far it lies above, and one that takes none."""
    f = forest(3, [(300, 0, 33, 4), (20, 20, 0, 0)], padding=2)
    (q, k, v), _ = cast(f, dtype)
    sinks = torch.tensor([1e30, 200.0, -200.0, -torch.inf])
    out = run(impl, device, q, k, v, f.layout, 0.3, sinks=sinks)[:-2]
    without = run(impl, device, q, k, v, f.layout, 0.3)[:-2]
    assert out[:, :2].abs().max() < 1e-30
    torch.testing.assert_close(out[:, 2:], without[:, 2:], rtol=1e-5, atol=1e-6)


@LATER
@pytest.mark.parametrize("device", TRITON)
def test_shares_of_the_keys_take_a_sink_once(device, later, monkeypatch):
    check_shares(device, later, monkeypatch, sinks=torch.tensor([1.0, -1.0]))


@needs_cpp
def test_a_sink_does_not_hide_nan():
    f = forest(6, [(70, 0, 33, 4)])
    (q, k, v), _ = cast(f, torch.float32)
    q[0, 0, 0] = torch.nan
    out = tree_attention(q, k, v, f.layout, scale=0.3, sinks_H=SINKS[:4], impl="cpp")
    assert out[0, 0].isnan().all() and out[1:].isfinite().all()

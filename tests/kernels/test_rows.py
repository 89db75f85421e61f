"""Operators on rows: C++ against the definitions, at widths that fill vectors and that do not."""

import inspect
import math

import pytest
import torch

from kernels import cpp, rows
from kernels.rows import checks, front, native, reference
from kernels.whole_graph import traceable

pytestmark = pytest.mark.skipif(bool(cpp.why_not()), reason=f"no C++ kernels: {cpp.why_not()}")
DTYPES = pytest.mark.parametrize("dtype", cpp.KINDS, ids=lambda d: str(d).removeprefix("torch."))


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def no_worse(found, dtype, exact, plain):
    """At most the error of plain PyTorch in the same dtype, or half a step of rounding if that has less."""
    assert found.dtype == dtype and found.shape == exact.shape
    error, allowed = (found.double() - exact).abs(), (plain.double() - exact).abs().max()
    assert (error <= torch.maximum(allowed, exact.abs() * torch.finfo(dtype).eps * 2) + 1e-6).all()


@DTYPES
@pytest.mark.parametrize("width", [1, 7, 16, 33, 768])
@pytest.mark.parametrize("count", [1, 15, 100])
def test_rms_norm(dtype, width, count):
    x, weight = draw(count, width, dtype=dtype) * 3, draw(width, dtype=dtype, seed=1)
    exact = reference.rms_norm(x.double(), weight.double(), 1e-5)
    no_worse(rows.rms_norm(x, weight, 1e-5, impl="cpp"), dtype, exact, reference.rms_norm(x, weight, 1e-5))


@DTYPES
@pytest.mark.parametrize("impl", ["cpp", "torch"])
def test_rms_norm_with_a_weight_of_float32_rounds_once(dtype, impl):
    x, weight = draw(15, 33, dtype=dtype) * 3, 1 + draw(33, seed=1) / 64
    exact = reference.rms_norm(x.double(), weight.double(), 1e-5)
    found = rows.rms_norm(x, weight, 1e-5, impl=impl)
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 1.99 + 1e-6).all()


@DTYPES
@pytest.mark.parametrize("width", [1, 7, 16, 33, 768, 2560])
@pytest.mark.parametrize("offset", [0, 50])
@pytest.mark.parametrize("count", [1, 15, 100])
def test_layer_norm(dtype, width, offset, count):
    x = draw(count, width, dtype=dtype) * 3 + offset
    x[0] = offset
    weight, bias = draw(width, dtype=dtype, seed=1), draw(width, dtype=dtype, seed=2)
    exact = reference.layer_norm(x.double(), weight.double(), bias.double(), 1e-5)
    found, plain = rows.layer_norm(x, weight, bias, 1e-5, impl="cpp"), reference.layer_norm(x, weight, bias, 1e-5)
    no_worse(found, dtype, exact, plain)
    assert found[0].equal(bias)


def test_layer_norm_of_rows_far_from_zero():
    x, one, zero = draw(15, 768) + 1000, torch.ones(768), torch.zeros(768)
    exact = reference.layer_norm(x.double(), one.double(), zero.double(), 1e-5)
    assert (rows.layer_norm(x, one, zero, 1e-5, impl="cpp").double() - exact).abs().max() < 5e-5


@DTYPES
@pytest.mark.parametrize(("head_dim", "dims"), [(2, 2), (64, 64), (80, 32), (96, 90), (33, 14)])
def test_rotary_of_strided_heads(dtype, head_dim, dims):
    wide = draw(9, 5, head_dim, dtype=dtype)
    angles = draw(9, dims // 2, seed=1).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for x in (wide, wide[:, 1:4], wide.transpose(0, 1).contiguous().transpose(0, 1), wide.repeat(1, 1, 2)[..., ::2]):
        exact = reference.rotary(x.double(), cos.double(), sin.double())
        found = rows.rotary(x, cos, sin, impl="cpp")
        no_worse(found, dtype, exact, reference.rotary(x, cos, sin))
        assert found[..., dims:].equal(x[..., dims:]) and found.is_contiguous()


@DTYPES
@pytest.mark.parametrize("name", [*reference.ACTIVATIONS, *reference.GATES])
@pytest.mark.parametrize("width", [1, 16, 40, 2048])
def test_activation_mul(dtype, name, width):
    x = draw(15, 2 * width, dtype=dtype) * 4
    x[0, 0], x[1, 0], x[2, 0] = 1000, -1000, 0
    x[0, -1], x[1, -1] = 20, -20
    exact, plain = reference.activation_mul(x.double(), name), reference.activation_mul(x, name)
    no_worse(rows.activation_mul(x, name, impl="cpp"), dtype, exact, plain)


@pytest.mark.parametrize("impl", ["reference", "cpp"])
def test_a_clamped_gate(impl):
    """The clamped gates equal gpt-oss's own formula; NaN stays."""
    gate, up = draw(9, 40) * 9, draw(9, 40, seed=1) * 9
    found = rows.activation_mul(torch.cat([gate, up], 1), "clamped_swiglu", impl=impl)
    low = gate.double().clamp(max=7.0)
    expected = (up.double().clamp(-7.0, 7.0) + 1) * low * torch.sigmoid(1.702 * low)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    bad = torch.tensor([[math.nan, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, math.nan]])
    assert rows.activation_mul(bad, "clamped_swiglu", impl=impl).isnan().equal(torch.eye(2).bool())
    with pytest.raises(ValueError, match=r"name: expected one of relu, .*got 'clamped_swiglu'"):
        rows.activation(gate, "clamped_swiglu", impl=impl)


@DTYPES
@pytest.mark.parametrize("name", reference.ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 16, 40, 2048])
def test_activation(dtype, name, width):
    x = draw(15, width, dtype=dtype) * 4
    x[0, 0], x[1, 0], x[2, 0] = 1000, -1000, 0
    exact, plain = reference.activation(x.double(), name), reference.activation(x, name)
    no_worse(rows.activation(x, name, impl="cpp"), dtype, exact, plain)


CURVES = torch.tensor([[0.7, 1.3, 0.5, -1e-6], [1.9, 0.4, 0.8, -0.3], [0.5, 0.6, 0.5, 0.0]])


@DTYPES
@pytest.mark.parametrize("curve", CURVES, ids=str)
@pytest.mark.parametrize("width", [1, 16, 40, 2048])
def test_xielu(dtype, curve, width):
    x = draw(15, width, dtype=dtype) * 4
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = 200, -1000, 0, -1e-7
    exact, plain = reference.xielu(x.double(), curve), reference.xielu(x, curve)
    found = rows.xielu(x, curve, impl="cpp")
    no_worse(found, dtype, exact, plain)
    below = x.double().clamp(max=0)
    low = (below.minimum(curve[3].double()).exp() - 1 - below) * curve[1].double()  # as its paper has it
    written = torch.where(x > 0, curve[0].double() * x.double() ** 2, low) + curve[2].double() * x.double()
    assert (exact - written).abs().max() <= 1e-12 * written.abs().max()


@DTYPES
@pytest.mark.parametrize("factor", [-0.5, 1.6448533535003662])
@pytest.mark.parametrize("width", [1, 16, 41, 2048])
def test_sparsify(dtype, factor, width):
    x = draw(9, 2 * width, dtype=dtype) + 3
    exact, plain = reference.sparsify(x.double(), factor), reference.sparsify(x, factor)
    found = rows.sparsify(x, factor, impl="cpp")
    no_worse(found[:, :width], dtype, exact[:, :width], plain[:, :width])
    assert found[:, width:].equal(x[:, width:])
    if width == 2048:  # of normally distributed gates
        assert abs((found[:, :width] > 0).double().mean() - (0.05 if factor > 0 else 0.69)) < 0.01
    x[0, 0] = math.nan
    assert rows.sparsify(x, factor, impl="cpp")[0, :width].isnan().all()


@DTYPES
@pytest.mark.parametrize(("count", "sources"), [(4, 4), (4, 1), (3, 3), (16, 2)])
@pytest.mark.parametrize("width", [1, 40, 2048])
def test_add_weighted(dtype, count, sources, width):
    x, more = (draw(5 * n, width, seed=n, dtype=dtype).view(5, n, width) for n in (count, sources))
    weights = draw(5, count * sources, seed=7, dtype=dtype)
    exact = reference.add_weighted(*(v.double() for v in (x, more, weights)))
    by_hand = [sum(weights[2, 0 * sources + m].double() * more[2, m].double() for m in range(sources))]
    assert torch.allclose(exact[2, 0], x[2, 0].double() + by_hand[0])
    no_worse(rows.add_weighted(x, more, weights, impl="cpp"), dtype, exact, reference.add_weighted(x, more, weights))


def test_xielu_keeps_digits_near_zero():
    x = -torch.logspace(-30, 0, 8001).unsqueeze(0)
    exact, found = reference.xielu(x.double(), CURVES[2]), rows.xielu(x, CURVES[2], impl="cpp").double()
    assert ((found - exact) / exact).abs().max() < 2e-6
    strange = torch.tensor([[math.nan, math.inf, 1.0]])
    assert rows.xielu(strange, CURVES[0], impl="cpp").isfinite().tolist() == [[False, False, True]]


SOFTPLUS = pytest.mark.parametrize("softplus", [False, True], ids=["sigmoid", "softplus"])


@SOFTPLUS
@DTYPES
@pytest.mark.parametrize("width", [1, 16, 40, 2048])
def test_sigmoid_mul(dtype, width, softplus):
    wide = draw(15, 3 * width, dtype=dtype) * 4
    for x, gate in ((wide[:, :width], wide[:, width : 2 * width]), (wide[:, ::3], wide[:, 1::3])):
        gate[0, 0], gate[1, 0], gate[2, 0] = 1000, -1000, 0
        exact, plain = (reference.sigmoid_mul(a, b, softplus) for a, b in ((x.double(), gate.double()), (x, gate)))
        no_worse(rows.sigmoid_mul(x, gate, softplus, impl="cpp"), dtype, exact, plain)


@SOFTPLUS
@DTYPES
@pytest.mark.parametrize(("gates", "share"), [(1, 1), (3, 5), (4, 64), (1, 40)])
def test_sigmoid_mul_of_runs(dtype, gates, share, softplus):
    """A gate of several elements, as that gate for each of them."""
    x, gate = draw(40, gates * share, dtype=dtype), draw(40, 2 * gates, dtype=dtype)[:, gates:] * 4
    exact, plain = (reference.sigmoid_mul(a, b, softplus) for a, b in ((x.double(), gate.double()), (x, gate)))
    each = gate.repeat_interleave(share, 1).double()
    torch.testing.assert_close(exact, reference.sigmoid_mul(x.double(), each, softplus))
    no_worse(rows.sigmoid_mul(x, gate, softplus, impl="cpp"), dtype, exact, plain)


def test_softplus_keeps_digits_of_small_gates():
    gate = torch.linspace(-80, 80, 4001).unsqueeze(0)
    exact = torch.nn.functional.softplus(gate.double(), threshold=1e9)
    found = rows.sigmoid_mul(torch.ones_like(gate), gate, True, impl="cpp").double()
    assert ((found - exact) / exact).abs().max() < 1e-6


@pytest.mark.parametrize("name", reference.ACTIVATIONS)
def test_activation_of_every_size(name):
    """For each sign and magnitudes from 1e-30 to 1e30 the error is a few roundings, to where the value dwindles."""
    x = torch.logspace(-30, 30, 20001)
    x = torch.cat((x, -x, torch.linspace(-10, 10, 20001)))
    exact, found = reference.activation(x.double(), name), rows.activation(x, name, impl="cpp").double()
    if name == "gelu":  # whose own formula has no digits left far below zero
        exact = x.double() * torch.special.ndtr(x.double())
    there = exact.abs() <= torch.finfo(torch.float32).max  # squares of the largest are infinite
    assert found[~there].isinf().all()
    x, exact, found = x[there], exact[there], found[there]
    few = exact.abs() * torch.finfo(torch.float32).eps * 4
    assert (found - exact).abs().le(few + 1e-7).all()
    assert (found - exact).abs().le(few + 1e-37)[x.abs() < 0.5].all()


@DTYPES
@pytest.mark.parametrize(
    ("width", "size"), [(1, 1), (2, 1), (7, 7), (16, 9), (40, 40), (300, 128), (5000, 4999), (32000, 32000)]
)
def test_log_softmax(dtype, width, size):
    x = draw(15, width, dtype=dtype) * 5
    x[1], x[2], x[3] = 7, x[2] + 500, x[3] - 500
    found, finite, peaks = rows.log_softmax(x, size, impl="cpp")
    assert found.dtype == torch.float32 and finite.dtype == torch.bool and finite.all()
    assert peaks.equal(reference.peaks(found))
    exact = torch.log_softmax(x.double(), -1)
    plain, *_ = reference.log_softmax(x, size)
    no_worse(found[:, :size], torch.float32, exact[:, :size], plain[:, :size])
    assert (found[:, size:] == -math.inf).all() and plain[:, size:].equal(found[:, size:])
    assert (found[:, :size].double().exp().sum(-1) <= 1 + 1e-6).all()


@pytest.mark.parametrize("impl", ["torch", "cpp"])
def test_log_softmax_is_as_exact_in_a_large_vocabulary(impl):
    x = draw(2, 151936) * 4
    exact = torch.log_softmax(x.double(), -1)
    assert (rows.log_softmax(x, x.shape[1], impl=impl)[0] - exact).abs().max() < 5e-6


@DTYPES
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 17, 39])
def test_log_softmax_tells_rows_that_are_not_finite(dtype, bad, place):
    x = draw(6, 40, dtype=dtype)
    expected = rows.log_softmax(x, 40, impl="cpp")[0]
    x[2, place] = bad
    found, finite, _ = rows.log_softmax(x, 40, impl="cpp")
    assert finite.tolist() == [True, True, False, True, True, True] == reference.log_softmax(x, 40)[1].tolist()
    assert found[finite].equal(expected[finite])


@DTYPES
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(dtype, bad):
    x = draw(4, 40, dtype=dtype)
    x[2, 35] = bad
    cos, sin = torch.ones(4, 10, dtype=dtype), torch.ones(4, 10, dtype=dtype)
    for y in (
        rows.rms_norm(x, torch.ones(40, dtype=dtype), 1e-5, impl="cpp"),
        rows.layer_norm(x, torch.ones(40, dtype=dtype), torch.zeros(40, dtype=dtype), 1e-5, impl="cpp"),
        *(rows.activation(x, name, impl="cpp") for name in reference.ACTIVATIONS if name != "tanh" or bad != math.inf),
        rows.activation_mul(x, "silu", impl="cpp"),
        rows.sigmoid_mul(x, torch.ones_like(x), impl="cpp"),
        rows.rotary(x.view(4, 4, 10), cos, sin, impl="cpp").flatten(1),
    ):
        assert y.isfinite().all(-1).tolist() == [True, True, False, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_converted_as_pytorch_does(dtype):
    """All as they are, and exact numbers of 24 bits to the nearest: ties to even, too large ones to infinity."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    one, zero, tied = torch.ones_like(every), torch.zeros_like(every), 1 + torch.arange(1 << 16) % 1024 / 1024
    mixed = every[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))]
    little = torch.tensor([sign * 2.0**-k for k in range(6, 24) for sign in (1, -1)]).repeat(1821)[: 1 << 16]
    for first, cos, second, sin in (
        (every, one, zero, zero),
        (every, mixed, zero, zero),
        (tied.to(dtype), one, one, little.to(dtype)),
    ):
        exact = first.double() * cos.double() - second.double() * sin.double()
        pairs = (first, second), (cos, cos), (sin, sin)
        x, cos, sin = (torch.cat(pair).view(1, 1, -1) for pair in pairs)
        found = rows.rotary(x, cos[0], sin[0], impl="cpp").flatten()[: 1 << 16]
        expected = exact.float().to(dtype)
        assert found.isnan().equal(expected.isnan()) and found.nan_to_num().equal(expected.nan_to_num())


def test_cpp_refuses_what_it_cannot_do():
    x, weight, cos = draw(2, 8), draw(8), draw(2, 8)
    windows = torch.tensor([[0, 5]]), torch.zeros(1, 2)
    for run in (
        lambda: rows.rms_norm(x.double(), weight.double(), 1e-5, impl="cpp"),
        lambda: rows.layer_norm(x.double(), weight.double(), weight.double(), 1e-5, impl="cpp"),
        lambda: rows.activation(x.double(), "gelu", impl="cpp"),
        lambda: rows.rotary(x.double().view(2, 1, 8), cos.double(), cos.double(), impl="cpp"),
        lambda: rows.activation_mul(x.double(), "silu", impl="cpp"),
        lambda: rows.sigmoid_mul(x.double(), x.double(), impl="cpp"),
        lambda: rows.top_k(x.double(), 2, impl="cpp"),
        lambda: rows.top_k(x.to("meta"), 2, impl="cpp"),
        lambda: rows.at_least(x.double(), 0.5, 2, impl="cpp"),
        lambda: rows.top_sums(x.double(), [0.0, 0.0], 2, impl="cpp"),
        lambda: rows.gumbel_argmax(x.double(), [1, 2, 3, 4], impl="cpp"),
        lambda: rows.window_max(x[0].double(), *windows, 3, impl="cpp"),
        lambda: rows.window_wins(x[0].double(), *windows, x[0, :3], impl="cpp"),
    ):
        with pytest.raises(ValueError, match="impl 'cpp': expected float32"):
            run()
    with pytest.raises(ValueError, match="expected k from 0 to 8"):
        rows.top_k(x, 9, impl="cpp")
    with pytest.raises(ValueError, match="expected k from 0 to 8"):
        rows.at_least(x, 0.5, 9)
    with pytest.raises(ValueError, match=r"peaks_NB: expected contiguous float32 \[2, 1\]"):
        rows.at_least(x, 0.5, 3, draw(2, 2), impl="cpp")
    with pytest.raises(ValueError, match=r"weight_E: expected float32 \[8\]"):
        rows.rms_norm(x, draw(7), 1e-5, impl="cpp")
    with pytest.raises(ValueError, match=r"bias_E: expected float32 \[8\]"):
        rows.layer_norm(x, weight, draw(7), 1e-5, impl="cpp")
    with pytest.raises(ValueError, match=r"name: expected one of relu, gelu, .*got 'mish'"):
        rows.activation(x, "mish", impl="cpp")
    with pytest.raises(ValueError, match="cos_TR: expected an even number of columns, at most 4"):
        rows.rotary(x.view(2, 2, 4), cos, cos, impl="cpp")


def test_the_compiler_sees_the_definitions():
    def middle(x, weight):
        x = rows.activation(rows.layer_norm(x, weight, weight, 1e-5, impl="cpp"), "gelu", impl="cpp")
        return rows.activation_mul(rows.rms_norm(x, weight, 1e-5, impl="cpp"), "silu", impl="cpp")

    x, weight = draw(3, 8), draw(8)
    traceable()
    compiled = torch.compile(middle, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), middle(x, weight))


def read(best_N2K):
    """Values and places."""
    assert best_N2K.dtype == torch.float64
    return best_N2K[:, 0].float(), best_N2K[:, 1].long()


@pytest.mark.parametrize("width", [1, 5, 128, 340, 1000, 2015, 32000])
def test_top_k(width):
    for k in {0, 1, min(3, width), min(21, width), min(300, width), width if width <= 1000 else 64}:
        for x in (draw(7, width), draw(7, width).sort(1).values, (draw(7, width) * 2).round()):
            x[2, width // 2 :] = float("-inf")
            values, places = read(rows.top_k(x, k, impl="cpp"))
            ranked = x.sort(dim=1, descending=True, stable=True)  # of equals the first
            assert values.equal(ranked.values[:, :k]) and places.equal(ranked.indices[:, :k])
            values, places = read(rows.top_k(x, k, impl="torch"))
            assert values.equal(ranked.values[:, :k]) and x.gather(1, places).equal(values)
            assert all(len(set(row)) == k for row in places.tolist())


def test_top_k_of_nan_is_anything():
    for width in (5, 1000, 2015):
        x = draw(4, width)
        x[1], x[2, ::2], x[3, 1:] = float("nan"), float("nan"), float("nan")
        values, places = read(rows.top_k(x, 4, impl="cpp"))
        assert values[0].equal(x[0].topk(4).values) and x.gather(1, places).nan_to_num().equal(values.nan_to_num())


@pytest.mark.parametrize("impl", ["cpp", "torch"])
@pytest.mark.parametrize("width", [1, 15, 16, 100, 3001])
def test_at_least(width, impl):
    x = torch.log_softmax(torch.linspace(0, 8, 300).unsqueeze(1) * draw(300, width), -1)
    x[1], x[2, 1:], x[3, ::2], x[2, 0] = float("-inf"), float("-inf"), float("nan"), 0.0
    peaks = reference.peaks(x.nan_to_num(-math.inf))
    for least in (-9.0, -3.0, -1.0, 0.0):
        for k in {0, 1, min(10, width), width}:
            told = [rows.at_least(x, least, k, known, impl=impl).nan_to_num(-1.0) for known in (None, peaks)]
            assert told[0].equal(told[1])
            for row, (values, places) in zip(x.tolist(), rows.at_least(x, least, k, impl=impl).tolist(), strict=True):
                expected = [(value, place) for place, value in enumerate(row) if value >= least][:k]
                assert list(zip(values, places, strict=True))[: len(expected)] == expected
                assert all(math.isnan(x) for x in values[len(expected) :] + places[len(expected) :])


@pytest.mark.parametrize("width", [1, 5, 128, 340, 1000, 32000])
@pytest.mark.parametrize("n", [1, 4, 15])
def test_top_sums(width, n):
    """The same values, places and order whether peaks are known or not; the definition has the same values."""
    for k in {1, min(3, n * width), min(40, n * width), min(600, n * width)}:
        for x in (draw(n, width), (draw(n, width) * 2).round()):
            x[-1, width // 2 :] = float("-inf")
            sums = (draw(n) * 3).round().tolist()
            added = (x + torch.tensor(sums).unsqueeze(1)).view(-1)
            ranked = added.sort(descending=True, stable=True)
            for peaks in (None, reference.peaks(x)):
                told = rows.top_sums(x, sums, k, peaks, impl="cpp")
                assert told[:k].float().equal(ranked.values[:k]) and told[k:-1].long().equal(ranked.indices[:k])
                assert told[-1] == math.inf
            told = rows.top_sums(x, sums, k, impl="torch")
            assert told[:k].float().equal(ranked.values[:k]) and added[told[k:-1].long()].equal(ranked.values[:k])
            rest = ranked.values[k:].max() if k < n * width else torch.tensor(float("-inf"))
            assert told[-1].float() == rest or told[-1] <= rest < ranked.values[k - 1]
    assert rows.top_sums(x, sums, 10**6, impl="cpp").shape == rows.top_sums(x, sums, 10**6, impl="torch").shape


@pytest.mark.parametrize("dtype", cpp.KINDS, ids=str)
@pytest.mark.parametrize(("width", "size"), [(1, 1), (5, 3), (128, 128), (340, 257), (1000, 128), (32000, 31999)])
def test_top_sums_of_logits(width, size, dtype):
    """To the bit the sums of the log-probabilities, of equals the first; none of tokens that do not exist."""
    counts, impossible = (1, 4, 2), torch.tensor(-math.inf)
    x = (draw(sum(counts), width) * 4).round().to(dtype)
    wanted = [checks.TopSums((draw(n) * 3).round().tolist(), k) for n, k in zip(counts, (1, 600, 7), strict=True)]
    wanted[1].sums[2] = -math.inf
    found, finite = rows.top_sums_of_logits(x, size, wanted, impl="cpp")
    assert finite == [True] * len(x)
    logp, *_ = rows.log_softmax(x, size, impl="cpp")
    for told, part, (sums, k) in zip(found, logp.split([*counts]), wanted, strict=True):
        ranked = (part + torch.tensor(sums).unsqueeze(1)).view(-1).sort(descending=True, stable=True)
        count = min(k, int((ranked.values > impossible).sum()))
        assert told.shape == (2, count) and told[0].float().equal(ranked.values[:count])
        assert told[1].long().equal(ranked.indices[:count])
    for told, defined in zip(found, rows.top_sums_of_logits(x, size, wanted, impl="torch")[0], strict=True):
        torch.testing.assert_close(told[0], defined[0], rtol=1e-5, atol=1e-5)
    x[3, 0] = math.nan
    assert rows.top_sums_of_logits(x, size, wanted, impl="cpp")[1] == [i != 3 for i in range(len(x))]


@pytest.mark.parametrize("width", [1, 15, 16, 100, 3001])
@pytest.mark.parametrize("scale", [0.0, 1.0, 20.0])
def test_gumbel_argmax(width, scale):
    keys = torch.randint(1 << 32, (400,), generator=torch.Generator().manual_seed(width)).tolist()
    logp = draw(200, width) * scale
    logp[5], logp[6, 1:], logp[7, ::2] = float("-inf"), float("-inf"), float("-inf")
    found = rows.gumbel_argmax(logp, keys, impl="cpp")
    assert found.equal(rows.gumbel_argmax(logp, keys, impl="torch"))
    assert found.equal((logp + reference.gumbels(keys, width, logp.device)).argmax(1))
    logp[3] = float("nan")
    assert 0 <= rows.gumbel_argmax(logp, keys, impl="cpp")[3] < width
    with pytest.raises(ValueError, match="expected 400 keys"):
        rows.gumbel_argmax(logp, keys[1:], impl="cpp")


@pytest.mark.parametrize("width", [1, 7, 8, 16, 33, 1000])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (40, 20), (2, 0), (0, 4)])
def test_windows(width, shape):
    """The largest sample of a row, and how often each window has the best."""
    generator = torch.Generator().manual_seed(width)
    tape = draw(3000, 1).view(-1) * 3
    starts = torch.randint(3000 - width + 1, shape, generator=generator)
    sums = (draw(shape[0] * shape[1], 1).view(shape) * 2).masked_fill(draw(*shape, seed=1) > 1, -math.inf)
    if shape[1]:
        found = rows.window_max(tape, starts, sums, width, impl="cpp")
        assert found.equal(rows.window_max(tape, starts, sums, width, impl="torch"))
        for row, values in enumerate(found):
            windows = [tape[s : s + width] + x for s, x in zip(starts[row].tolist(), sums[row], strict=True)]
            assert values.equal(torch.stack(windows).amax(0))
        best = found.amax(0) if len(found) else torch.zeros(width)
        best[::3] = math.inf
    else:
        best = torch.zeros(width)
    wins = rows.window_wins(tape, starts, sums, best, impl="cpp")
    assert wins.equal(rows.window_wins(tape, starts, sums, best, impl="torch"))
    assert not wins.numel() or int(wins.sum()) >= int((best < math.inf).sum())
    assert not wins[sums == -math.inf].any()
    none = torch.full_like(best, -math.inf)
    assert rows.window_wins(tape, starts, sums, none, impl="cpp").equal((sums > -math.inf) * width)


def test_top_k_of_other_rows_is_pytorchs(monkeypatch):
    x = draw(2, 40)
    assert rows.top_k(x.double(), 3)[:, 0].equal(x.double().topk(3).values)
    wide = draw(2, 80)[:, ::2]
    assert read(rows.top_k(wide, 3))[0].equal(wide.topk(3).values)
    monkeypatch.setattr(front, "why_not", lambda: "nothing to build with")
    monkeypatch.setattr(front.native, "top_k", lambda *_: pytest.fail("there is no C++"))
    assert read(rows.top_k(x, 3))[0].equal(x.topk(3).values)


@pytest.mark.parametrize("name", [name for name, x in vars(rows).items() if hasattr(x, "__wrapped__")])
def test_a_front_has_the_arguments_of_its_checks_and_of_its_implementations(name):
    arguments = dict(inspect.signature(getattr(rows, name)).parameters)
    assert arguments.pop("impl").kind == inspect.Parameter.KEYWORD_ONLY
    described = [(x.name, x.kind, x.default) for x in arguments.values()]
    for module in (checks, reference, native):
        if found := getattr(module, name, None):
            parameters = inspect.signature(found).parameters.values()
            assert [(x.name, x.kind, x.default) for x in parameters] == described, module.__name__


def test_custom_ops():
    """A profiler sees one operator."""
    x, weight, heads = draw(5, 16), draw(16), draw(5, 2, 8)
    cos, sin = draw(5, 4), draw(5, 4, seed=1)
    calls = {"rms_norm": (x, weight, 1e-5), "rotary": (heads, cos, sin), "top_k": (x, 3)}
    calls |= {"layer_norm": (x, weight, weight, 1e-5), "activation": (x, "gelu"), "activation_mul": (x, "silu")}
    calls |= {"sigmoid_mul": (x[:, :8], x[:, 8:]), "xielu": (x, CURVES[0])}
    calls |= {"sparsify": (x, 0.5), "add_weighted": (x.view(5, 4, 4), x.view(5, 4, 4), x)}
    calls["at_least"] = (torch.log_softmax(x, -1), -9.0, 3)
    calls["top_sums"] = (x, [0.0, 1.0, 2.0, 3.0, 4.0], 3, reference.peaks(x))
    calls["log_softmax"] = (x, 15)
    calls["gumbel_argmax"] = (x, list(range(10)))
    windows = x.view(-1), torch.tensor([[0, 9], [70, 3]]), torch.zeros(2, 2)
    calls |= {"window_max": (*windows, 10), "window_wins": (*windows, torch.zeros(10))}
    for name, arguments in calls.items():
        torch.library.opcheck(getattr(torch.ops.coppice, name).default, arguments)
    with torch.profiler.profile(acc_events=True) as seen:
        rows.rms_norm(x, weight, 1e-5, impl="cpp")
    assert "coppice::rms_norm" in {event.key for event in seen.key_averages()}

"""Scans by channels over trees: the plain recurrence along every path, implementations, what is refused."""

import re
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import cpp
from kernels.channel_scan import ChannelWeights, channel_conv, channel_scan
from kernels.layout import CHANNEL_BLOCK, NULL_SLOT, NULL_STATE, ChannelKind
from tests.kernels.test_checks import refusals
from tests.kernels.test_delta_net import Growing, errors_of, sequence
from tests.marks import needs_cpp, needs_interpreter

FAST = ["torch", *([] if cpp.why_not() else ["cpp"])]
SMALL = ChannelKind(1, 1, 16, 37, taps=4)
BARE = ChannelKind(1, 1, 5, 16, taps=2)  # B and C have no norms
KINDS = [SMALL, BARE, ChannelKind(1, 1, 1, 3, taps=1), ChannelKind(1, 1, 17, 8, taps=7)]
TRITON = pytest.param("triton", marks=needs_interpreter)
RANK = 3  # of the inputs of steps, which lie before B and C


class Layer(NamedTuple):
    """A Mamba layer between its first and its last matrix: the operators with two small matrices between."""

    weights: ChannelWeights
    low_LC: Tensor
    high_CR: Tensor

    @property
    def kind(self):
        return self.weights.kind


def weights_of(kind, draw, dtype=torch.float32):
    K, C = kind.key_size, kind.channels
    shapes = (kind.taps, C), (C,), (K, C), (C,), (C,), (2 * K,), (RANK + 2 * K, C), (C, RANK)
    drawn = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)
    taps, shift, rates, bias, skip, norms, low, high = drawn
    vectors = taps, shift, -rates.exp(), bias - 1, skip, None if kind == BARE else norms
    return Layer(ChannelWeights(kind, RANK, *vectors, 1e-6), low * C**-0.5, high)


def inputs_of(kind, tokens, draw, dtype=torch.float32):
    return torch.randn(tokens, kind.width, generator=draw, dtype=torch.float64).to(dtype)


def layer(x_TF, layer, rows_RW, states_SHKV, paths, *, impl):
    """Both operators, and the products between them."""
    weights, low_LC, high_CR = layer
    convolved_TC = channel_conv(x_TF, weights, rows_RW, paths, impl=impl)
    low_TL = convolved_TC @ low_LC.to(x_TF.dtype).T
    steps_TC = low_TL[:, :RANK] @ high_CR.to(x_TF.dtype).T
    return channel_scan(x_TF, convolved_TC, low_TL, steps_TC, weights, rows_RW, states_SHKV, paths, impl=impl)


def along(x_TF, layer):
    """The recurrence of one sequence as the paper has it, with a state that every token overwrites."""
    w, low_LC, high_CR = layer
    kind, out = w.kind, []
    K, C = kind.key_size, kind.channels
    x_TC, z_TC = x_TF.split(C, 1)
    padded = F.pad(x_TC.T, (kind.taps - 1, 0))
    mixed_TC = F.silu(F.conv1d(padded, w.taps_KC.T.unsqueeze(1), w.shift_C, groups=C)).T
    state_CK = x_TF.new_zeros(C, K)
    for x_C, z_C in zip(mixed_TC, z_TC, strict=True):
        low, *pair = (low_LC @ x_C).split([RANK, K, K])
        if w.norms_E is not None:
            normed = zip(pair, w.norms_E.split(K), strict=True)
            pair = [x / (x.square().mean() + w.eps).sqrt() * norm for x, norm in normed]
        step_C1 = F.softplus(high_CR @ low + w.bias_C).unsqueeze(1)
        state_CK = (step_C1 * w.rates_KC.T).exp() * state_CK + step_C1 * torch.outer(x_C, pair[0])
        out.append((state_CK @ pair[1] + w.skip_C * x_C) * F.silu(z_C))
    return torch.stack(out)


def doubled(layer):
    vectors = (x.double() if torch.is_tensor(x) else x for x in layer.weights)
    return Layer(ChannelWeights(*vectors), *(x.double() for x in layer[1:]))


def moved(layer, device):
    vectors = (x.to(device) if torch.is_tensor(x) else x for x in layer.weights)
    return Layer(ChannelWeights(*vectors), *(x.to(device) for x in layer[1:]))


class ByChannels(Growing):
    """Trees of a Mamba layer."""

    operator, weights_of, inputs_of, along = map(staticmethod, (layer, weights_of, inputs_of, along))
    doubled, moved = staticmethod(doubled), staticmethod(moved)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_every_path_is_the_recurrence(impl, kind):
    """In float64, to its last digits: states of blocks, rows of earlier passes and of the same one."""
    forest = ByChannels(kind, 1, torch.float32 if impl == "cpp" else torch.float64)
    for tokens, chains in ((70, 40), (1, 1), (40, 3), (30, 1)):
        forest.run(impl, tokens, chains)
    assert forest.check(1e-4 if impl == "cpp" else 1e-9) > 8 * CHANNEL_BLOCK
    assert forest.states[NULL_STATE].eq(0).all() and forest.rows[NULL_SLOT].eq(0).all()


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_error_is_at_most_twice_that_of_the_definition(impl, kind):
    errors = errors_of(ByChannels, kind, impl, draws=8)
    assert errors[1] <= 2 * errors[0], errors


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("chunks", [[50], [4, 4, 42], [5, 20, 1, 1, 23], [3, 1, 1, 45]], ids=str)
def test_a_state_takes_the_place_of_the_one_before(impl, chunks):
    """A prompt in chunks keeps the rows that later tokens may read, and one state."""
    draw, rows, kept, first, found = torch.Generator().manual_seed(3), {}, torch.zeros(92, SMALL.row), 0, []
    weights, x_TF, states = weights_of(SMALL, draw), inputs_of(SMALL, 50, draw), torch.zeros(2, *SMALL.state)
    for tokens in chunks:
        paths = sequence(tokens, first, SMALL, 1, rows)
        found.append(layer(x_TF[first : first + tokens], weights, kept, states, paths, impl=impl))
        first += tokens
    expected = along(x_TF.double(), doubled(weights)).float()
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4)  # some numbers exceed 100
    assert states[NULL_STATE].eq(0).all() and kept[NULL_SLOT].eq(0).all()


@pytest.mark.parametrize("impl", [pytest.param("cpp", marks=needs_cpp), TRITON])
def test_bits_hang_on_the_sequence_alone(impl):
    """In one pass, in several, token by token."""
    draw, found = torch.Generator().manual_seed(5), []
    weights, x_TF = weights_of(SMALL, draw), inputs_of(SMALL, 41, draw)
    w, low_TL, steps_TC = weights.weights, torch.randn(41, RANK + 32), torch.randn(41, 37)
    for chunks in ([41], [5, 26, 1, 1, 8], [*[1] * 9, 32]):
        rows, kept, states, first, outputs = {}, torch.zeros(92, SMALL.row), torch.zeros(2, *SMALL.state), 0, []
        for tokens in chunks:
            paths, some = sequence(tokens, first, SMALL, 1, rows), slice(first, first + tokens)
            convolved = channel_conv(x_TF[some], w, kept, paths, impl=impl)
            given = x_TF[some], convolved, low_TL[some], steps_TC[some]
            outputs.append(channel_scan(*given, w, kept, states, paths, impl=impl))
            first += tokens
        found.append([torch.cat(outputs), states])
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("impl", ["reference", *FAST, TRITON])
def test_half_precision_rounds_the_results_alone(impl):
    forest = ByChannels(SMALL, 4)
    x_TF, paths = forest.grow(40, 12)
    x_TF, weights = x_TF.bfloat16(), forest.weights.weights
    convolved_TC = channel_conv(x_TF, weights, forest.rows, paths, impl=impl)
    exact_TC = channel_conv(x_TF.float(), weights, forest.rows, paths, impl="reference")
    torch.testing.assert_close(convolved_TC, exact_TC.bfloat16(), rtol=2e-2, atol=1e-3)
    given = x_TF, convolved_TC, *(torch.randn(40, width).bfloat16() for width in (RANK + 32, 37))
    wide = (x.float() for x in given)
    exact = channel_scan(*wide, weights, forest.rows.clone(), forest.states.clone(), paths, impl="reference")
    found = channel_scan(*given, weights, forest.rows, forest.states, paths, impl=impl)
    torch.testing.assert_close(found, exact.bfloat16(), rtol=2e-2, atol=1e-3)


@needs_cpp
def test_steps_of_any_size():
    """Softplus to the last digits, also of inputs far below 0, and decays that vanish."""
    kind, steps_TC = ChannelKind(1, 1, 1, 64, taps=1), torch.linspace(-80, 90, 64).view(1, 64)
    ones = torch.ones(64)
    w = ChannelWeights(kind, 1, torch.ones(1, 64), 0 * ones, -torch.ones(1, 64), 0 * ones, 0 * ones, None, 0.0)
    found = []
    for impl, dtype in (("cpp", torch.float32), ("reference", torch.float64)):
        rows, states = torch.zeros(3, kind.row, dtype=dtype), torch.zeros(2, *kind.state, dtype=dtype)
        given = torch.ones(1, 128), torch.ones(1, 64), torch.ones(1, 3), steps_TC
        weights = ChannelWeights(*(x.to(dtype) if torch.is_tensor(x) else x for x in w))
        channel_scan(*(x.to(dtype) for x in given), weights, rows, states, sequence(1, 0, kind, 1, {}), impl=impl)
        found.append(rows[2, -64:].double())
    errors = (found[0] / found[1] - 1).abs()
    assert bool((errors < 1e-7 * (3 + steps_TC[0].abs())).all()), errors  # the argument of an exponential is rounded


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("x_TF", lambda x: x[:, 1:]),
        ("taps_KC", lambda x: x[1:]),
        ("shift_C", lambda x: x.double()),
        ("rates_KC", lambda x: x[1:]),
        ("bias_C", lambda x: x.double()),
        ("skip_C", lambda x: x[1:]),
        ("norms_E", lambda x: x[1:]),
        ("rows_RW", lambda x: x[:, 1:].contiguous()),
        ("states_SHKV", lambda x: x.mT),
        ("convolved_TC", lambda x: x[1:]),
        ("low_TL", lambda x: x[:, :31]),
        ("low_TL", lambda x: x.double()),
        ("steps_TC", lambda x: x[:, 1:]),
        ("paths_TN", lambda x: x + 900),
        ("lengths_T", lambda x: x + 4),
        ("bases_T", lambda x: x - 1),
    ],
)
def test_what_is_refused(name, spoil):
    forest = ByChannels(SMALL, 5)
    x_TF, paths = forest.grow(9, 4)
    weights, drawn = forest.weights.weights, [torch.randn(9, width) for width in (37, RANK + 32, 37)]
    given = dict(zip(("x_TF", "convolved_TC", "low_TL", "steps_TC"), (x_TF, *drawn), strict=True))
    given |= {"weights": weights, "rows_RW": forest.rows, "states_SHKV": forest.states, "paths": paths}
    if name in given:
        given[name] = spoil(given[name])
    elif hasattr(weights, name):
        given["weights"] = weights._replace(**{name: spoil(getattr(weights, name))})
    else:
        given["paths"] = type(paths)(**{**vars(paths), name: spoil(getattr(paths, name))})
    said = refusals(lambda impl: channel_scan(**given, impl=impl), ["reference", *FAST])
    assert re.match(rf"{name}: expected ", said)


def test_what_the_convolution_refuses():
    forest = ByChannels(SMALL, 5)
    x_TF, paths = forest.grow(9, 4)
    weights, rows = forest.weights.weights, forest.rows
    spoilt = {"x_TF": (x_TF[:, 1:], weights, rows, paths), "rows_RW": (x_TF, weights, rows[:, 1:], paths)}
    for name, given in spoilt.items():
        said = refusals(lambda impl, given=given: channel_conv(*given, impl=impl), ["reference", *FAST])
        assert re.match(rf"{name}: expected ", said)


def test_sizes_and_implementations_that_do_not_exist():
    forest = ByChannels(SMALL, 6)
    x_TF, paths = forest.grow(2, 1)
    weights = forest.weights.weights
    for heads in (0, 2):
        wrong = weights._replace(kind=replace(SMALL, key_heads=heads))
        with pytest.raises(ValueError, match="weights: expected"):
            channel_conv(x_TF, wrong, forest.rows, paths)
    with pytest.raises(ValueError, match="impl: expected one of reference, torch, cpp, triton, got 'c'"):
        channel_conv(x_TF, weights, forest.rows, paths, impl="c")

"""Selective scans over trees: the plain recurrence along every path, implementations, what is refused."""

import pytest
import torch
from torch.nn import functional as F

from kernels import cpp
from kernels.layout import BLOCK, NULL_SLOT, NULL_STATE, ScanKind
from kernels.scan import ScanWeights, scan
from tests.kernels.test_delta_net import Growing, check_refused, check_refused_sizes, errors_of, sequence

FAST = ["torch", *([] if cpp.why_not() else ["cpp"])]
SMALL = ScanKind(key_heads=2, value_heads=4, key_size=8, value_size=6, taps=4)
BARE = ScanKind(3, 3, 4, 4, 2)  # no norm follows its gates
KINDS = [SMALL, ScanKind(1, 1, 5, 3, 1), BARE, ScanKind(1, 6, 16, 40, 7)]


def weights_of(kind, draw, dtype=torch.float32):
    heads, values = (kind.value_heads,), kind.value_heads * kind.value_size
    shapes = (kind.taps, kind.channels), (kind.channels,), heads, heads, heads, (values,)
    drawn = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    taps, shift, decay, bias, skip, norm = (x.to(dtype) for x in drawn)
    vectors = taps, shift, -(decay - 1).exp(), bias, skip, None if kind == BARE else norm
    return ScanWeights(kind, *vectors, 1e-6, 0.05, 1.5, gate=0.7, step=1.3)


def inputs_of(kind, tokens, draw, dtype=torch.float32):
    return torch.randn(tokens, kind.width, generator=draw, dtype=torch.float64).to(dtype)


def along(x_TF, weights):
    """The recurrence of one sequence as papers have it, with a state that every token overwrites."""
    kind, out = weights.kind, []
    (H, K, V), G = kind.state, kind.key_heads
    z, channels_TC, d = x_TF.split([H * V, kind.channels, H], -1)
    padded = F.pad(channels_TC.T, (kind.taps - 1, 0))
    mixed = F.silu(F.conv1d(padded, weights.taps_KC.T.unsqueeze(1), weights.shift_C, groups=kind.channels)).T
    state = x_TF.new_zeros(H, V, K)
    for t, row in enumerate(mixed):
        x, b, c = row.split([H * V, G * K, G * K])
        x, b, c = x.view(H, V), *(each.view(G, K).repeat_interleave(H // G, 0) for each in (b, c))
        step = F.softplus(weights.step * d[t] + weights.bias_H).clamp(weights.least, weights.most).view(H, 1, 1)
        state = state * (weights.decay_H.view(H, 1, 1) * step).exp() + step * torch.einsum("hv,hk->hvk", x, b)
        read = torch.einsum("hvk,hk->hv", state, c) + weights.skip_H.view(H, 1) * x
        gated = (read.flatten() * F.silu(weights.gate * z[t])).view(G, -1)
        if weights.norm_E is not None:
            gated = (gated / (gated.square().mean(-1, True) + weights.eps).sqrt()) * weights.norm_E.view(G, -1)
        out.append(gated.flatten())
    return torch.stack(out)


class Scanned(Growing):
    """Trees of a scan."""

    operator, weights_of = staticmethod(scan), staticmethod(weights_of)
    inputs_of, along = staticmethod(inputs_of), staticmethod(along)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_every_path_is_the_recurrence(impl, kind):
    """In float64, to its last digits: states of blocks, rows of earlier passes and of the same one."""
    forest = Scanned(kind, 1, torch.float32 if impl == "cpp" else torch.float64)
    for tokens, chains in ((70, 40), (1, 1), (40, 40)):
        forest.run(impl, tokens, chains)
    assert forest.check(1e-4 if impl == "cpp" else 1e-9) > 2 * BLOCK


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_error_is_at_most_twice_that_of_the_definition(impl, kind):
    # A norm of few values enlarges the errors of a token whose values nearly vanish: one would decide a single draw.
    errors = errors_of(Scanned, kind, impl, draws=8)
    assert errors[1] <= 2 * errors[0], errors


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("chunks", [[150], [32, 32, 86], [5, 40, 1, 1, 103], [31, 1, 1, 117]], ids=str)
def test_a_state_takes_the_place_of_the_one_before(impl, chunks):
    """A prompt in chunks keeps the rows that later tokens may read, and one state."""
    draw, rows, kept, first, found = torch.Generator().manual_seed(3), {}, torch.zeros(92, SMALL.row), 0, []
    weights, x_TF, states = weights_of(SMALL, draw), inputs_of(SMALL, 150, draw), torch.zeros(2, *SMALL.state)
    for tokens in chunks:
        paths = sequence(tokens, first, SMALL, 1, rows)
        found.append(scan(x_TF[first : first + tokens], weights, kept, states, paths, impl=impl))
        first += tokens
    torch.testing.assert_close(torch.cat(found), along(x_TF, weights), rtol=1e-4, atol=1e-5)
    assert states[NULL_STATE].eq(0).all() and kept[NULL_SLOT].eq(0).all()


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_half_precision_rounds_the_result_alone(impl):
    forest = Scanned(SMALL, 4)
    x_TF, paths = forest.grow(40, 12)
    x_TF = x_TF.bfloat16()
    found = scan(x_TF, forest.weights, forest.rows, forest.states, paths, impl=impl)
    exact = scan(x_TF.float(), forest.weights, forest.rows.clone(), forest.states.clone(), paths, impl="reference")
    torch.testing.assert_close(found, exact.bfloat16(), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("x_TF", lambda x: x[:, 1:]),
        ("taps_KC", lambda x: x[1:]),
        ("shift_C", lambda x: x.double()),
        ("decay_H", lambda x: x[1:]),
        ("bias_H", lambda x: x.double()),
        ("skip_H", lambda x: x[1:]),
        ("norm_E", lambda x: x[1:]),
        ("least", lambda x: -x),
        ("least", lambda x: x + 2),
        ("rows_RW", lambda x: x[:, 1:].contiguous()),
        ("states_SHKV", lambda x: x.mT),
        ("paths_TN", lambda x: x + 900),
        ("bases_T", lambda x: x - 1),
    ],
)
def test_what_is_refused(name, spoil):
    check_refused(Scanned(SMALL, 5), name, spoil)


def test_sizes_and_implementations_that_do_not_exist():
    check_refused_sizes(Scanned(SMALL, 6))

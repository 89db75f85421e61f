"""Gated delta nets over trees: the plain recurrence along every path, implementations, what is refused."""

import random
import re
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from kernels import cpp
from kernels.delta_net import DeltaWeights, delta_net
from kernels.delta_net.chains import with_chains
from kernels.layout import BLOCK, NULL_SLOT, NULL_STATE, TRASH_SLOT, DeltaKind, DeltaPaths
from tests.kernels.test_checks import refusals

FAST = ["torch", *([] if cpp.why_not() else ["cpp"])]
SMALL = DeltaKind(key_heads=2, value_heads=4, key_size=8, value_size=6, taps=4)
KINDS = [SMALL, DeltaKind(1, 1, 5, 3, 1), DeltaKind(3, 3, 4, 4, 2), DeltaKind(1, 6, 16, 8, 7)]
KINDS += [
    DeltaKind(2, 4, 8, 6, 4, key_decays=True),
    DeltaKind(1, 1, 1, 3, 1, True),
    DeltaKind(3, 3, 21, 19, 2, True),
    DeltaKind(1, 2, 16, 33, 7, True),
]


def weights_of(kind, draw, dtype=torch.float32):
    """With strengths up to 2, bounded decays and logistic gates for some kinds."""
    shapes = (kind.taps, kind.channels), (kind.value_heads,), (kind.decays,), (kind.value_size,)
    most, bound = 2.0 if kind.key_heads % 2 else 1.0, -5.0 if kind.key_heads == 3 else 0.0
    taps, decay, bias, norm = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    vectors = taps.to(dtype), -decay.exp().to(dtype), bias.to(dtype), norm.to(dtype)
    return DeltaWeights(kind, *vectors, 1e-6, most, bound, sigmoid=kind.taps in (1, 2))


def inputs_of(kind, tokens, draw, dtype=torch.float32):
    H, _, V = kind.state
    return torch.randn(tokens, kind.channels + H * V + H + kind.decays, generator=draw, dtype=torch.float64).to(dtype)


def along(x_TF, weights):
    """The recurrence of one sequence as papers have it, with a state that every token overwrites."""
    kind, out = weights.kind, []
    H, K, V = kind.state
    channels_TC, z, b, a = x_TF.split([kind.channels, H * V, H, kind.decays], -1)
    padded = F.pad(channels_TC.T, (kind.taps - 1, 0))
    mixed = F.silu(F.conv1d(padded, weights.taps_KC.T.unsqueeze(1), groups=kind.channels)).T
    state = x_TF.new_zeros(H, K, V)
    for t, row in enumerate(mixed):
        q, k, v = row.split([kind.key_heads * K, kind.key_heads * K, H * V])
        q, k = (x.view(-1, K).repeat_interleave(H // kind.key_heads, 0) for x in (q, k))
        q, k = (x / (x.square().sum(-1, True) + 1e-6).sqrt() for x in (q, k))
        steps, rates = (a[t] + weights.bias_D).view(H, -1, 1), -weights.decay_H.view(H, 1, 1)
        logs = weights.bound / (1 + (-rates * steps).exp()) if weights.bound else -rates * F.softplus(steps)
        state = state * logs.exp()
        change = weights.most * b[t].sigmoid().view(H, 1) * (v.view(H, V) - torch.einsum("hkv,hk->hv", state, k))
        state = state + torch.einsum("hk,hv->hkv", k, change)
        read = torch.einsum("hkv,hk->hv", state, q) * K**-0.5
        read = read / (read.square().mean(-1, True) + weights.eps).sqrt() * weights.norm_V
        out.append(read.flatten() * (z[t].sigmoid() if weights.sigmoid else F.silu(z[t])))
    return torch.stack(out)


def doubled(weights):
    return type(weights)(*(x.double() if torch.is_tensor(x) else x for x in weights))


def moved(weights, device):
    return type(weights)(*(x.to(device) if torch.is_tensor(x) else x for x in weights))


class Growing:
    """Trees that grow from pass to pass, each token with a row, each token at a block's end with a state.

    Attributes:
        operator, weights_of, inputs_of, along: of the layer that is checked.
        doubled, moved: make weights float64, or move them to a device.
    """

    operator, weights_of = staticmethod(delta_net), staticmethod(weights_of)
    inputs_of, along = staticmethod(inputs_of), staticmethod(along)
    doubled, moved = staticmethod(doubled), staticmethod(moved)

    def __init__(self, kind, seed, dtype=torch.float32, roots=3):
        self.kind, self.draw, self.rng = kind, torch.Generator().manual_seed(seed), random.Random(seed)
        self.weights = self.weights_of(kind, self.draw, dtype)
        self.parents, self.inputs, self.outputs = [], [], []
        self.rows = torch.full((900, kind.row), float("nan"), dtype=dtype)
        self.states = torch.full((200, *kind.state), float("nan"), dtype=dtype)
        self.rows[NULL_SLOT], self.states[NULL_STATE] = 0, 0
        self.state, self.count, self.roots = {}, 1, roots

    def path(self, node):
        found = []
        while node is not None:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def grow(self, tokens, chains):
        """The inputs of a pass of new tokens: chains below random nodes."""
        first = len(self.parents)
        while len(self.parents) < first + tokens:
            node = None if len(self.parents) < self.roots else self.rng.randrange(len(self.parents))
            for _ in range(min(chains, first + tokens - len(self.parents))):
                self.parents.append(node)
                node = len(self.parents) - 1
        columns = [], [], [], [], []
        for node in range(first, first + tokens):
            above = self.path(node)[:-1]
            latest = [(first - 1 - n if n >= first else n + 2) for n in above[::-1]][: self.kind.reach]
            if (len(above) + 1) % self.kind.block == 0:
                self.state[node], self.count = self.count, self.count + 1
            whole = self.kind.whole(len(above))
            base = self.state[above[whole - 1]] if whole else NULL_STATE
            path = latest + [NULL_SLOT] * (self.kind.reach - len(latest))
            row = node + 2, path, len(above) - whole, base, self.state.get(node, NULL_STATE)
            for column, each in zip(columns, row, strict=True):
                column.append(each)
        x_TF = self.inputs_of(self.kind, tokens, self.draw, self.rows.dtype)
        self.inputs.append(x_TF)
        return x_TF, DeltaPaths(*(torch.tensor(column, dtype=torch.int64) for column in columns))

    def run(self, impl, tokens, chains, device="cpu"):
        x_TF, paths = self.grow(tokens, chains)
        self.rows, self.states, weights = self.rows.to(device), self.states.to(device), self.moved(self.weights, device)
        given = x_TF.to(device), weights, self.rows, self.states, paths.to(device)
        self.outputs.append(self.operator(*given, impl=impl).cpu())
        self.levels = with_chains(paths).levels

    def check(self, tolerance):
        x_TF, found = torch.cat(self.inputs).double(), torch.cat(self.outputs).double()
        for node in range(0, len(x_TF), 7):
            path = self.path(node)
            expected = self.along(x_TF[path], self.doubled(self.weights))
            torch.testing.assert_close(found[path], expected, rtol=tolerance, atol=tolerance)
        return max(len(self.path(node)) for node in range(len(x_TF)))


PASSES = (45, 40), (20, 9), (5, 1)  # tokens and chains


def errors_of(growing, kind, impl, draws=1, device="cpu"):
    """The errors of the definition and of an implementation in float32, against the definition in float64."""
    errors = []
    for name in ("reference", impl):
        squares = []
        for seed in range(2, 2 + draws):
            forest, exact = growing(kind, seed), growing(kind, seed, torch.float64)
            for tokens, chains in PASSES:
                forest.run(name, tokens, chains, device if name == impl else "cpu")
                _, paths = exact.grow(tokens, chains)
                x_TF = forest.inputs[-1].double()
                stores = exact.rows, exact.states
                exact.outputs.append(
                    exact.operator(x_TF, exact.doubled(forest.weights), *stores, paths, impl="reference")
                )
            squares.append((torch.cat(forest.outputs).double() - torch.cat(exact.outputs)).square())
        errors.append(torch.cat(squares).mean().sqrt().item())
    return errors


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_every_path_is_the_recurrence(impl, kind):
    """In float64, to its last digits: states of blocks, rows of earlier passes and of the same one."""
    forest = Growing(kind, 1, torch.float32 if impl == "cpp" else torch.float64)
    for tokens, chains in ((70, 40), (1, 1), (40, 40)):
        forest.run(impl, tokens, chains)
    assert forest.check(1e-4 if impl == "cpp" else 1e-9) > 2 * BLOCK


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_error_is_at_most_twice_that_of_the_definition(impl, kind):
    errors = errors_of(Growing, kind, impl)
    assert errors[1] <= 2 * errors[0], errors


def sequence(tokens, first, kind, state, rows):
    """The paths of tokens of one sequence, from the first on; only the last rows are kept, and one state in place."""
    lasts = range(max(0, kind.whole(first + tokens) - kind.taps + 1), first + tokens)
    columns = [], [], [], [], []
    for p in range(first, first + tokens):
        earliest = max(0, p - max(p % kind.block, kind.taps - 1))
        path = [first - 1 - q if q >= first else rows[q] for q in range(p - 1, earliest - 1, -1)]
        path += [NULL_SLOT] * (kind.reach - len(path))
        base, fold = (state if p >= kind.block else NULL_STATE), (NULL_STATE if (p + 1) % kind.block else state)
        row = 2 + p % 90 if p in lasts else TRASH_SLOT, path, p % kind.block, base, fold
        for column, each in zip(columns, row, strict=True):
            column.append(each)
    rows.update({p: 2 + p % 90 for p in lasts})
    return DeltaPaths(*(torch.tensor(column, dtype=torch.int64) for column in columns))


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("chunks", [[150], [32, 32, 86], [5, 40, 1, 1, 103], [31, 1, 1, 117]], ids=str)
def test_a_state_takes_the_place_of_the_one_before(impl, chunks):
    """A prompt in chunks keeps the rows that later tokens may read, and one state."""
    draw, rows, kept, first, found = torch.Generator().manual_seed(3), {}, [torch.zeros(92, SMALL.row)], 0, []
    weights, x_TF, states = weights_of(SMALL, draw), inputs_of(SMALL, 150, draw), torch.zeros(2, *SMALL.state)
    for tokens in chunks:
        paths = sequence(tokens, first, SMALL, 1, rows)
        found.append(delta_net(x_TF[first : first + tokens], weights, kept[0], states, paths, impl=impl))
        first += tokens
    torch.testing.assert_close(torch.cat(found), along(x_TF, weights), rtol=1e-4, atol=1e-5)
    assert states[NULL_STATE].eq(0).all() and kept[0][NULL_SLOT].eq(0).all()


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_half_precision_rounds_the_result_alone(impl):
    forest = Growing(SMALL, 4)
    x_TF, paths = forest.grow(40, 12)
    x_TF = x_TF.bfloat16()
    found = delta_net(x_TF, forest.weights, forest.rows, forest.states, paths, impl=impl)
    exact = delta_net(x_TF.float(), forest.weights, forest.rows.clone(), forest.states.clone(), paths, impl="reference")
    torch.testing.assert_close(found, exact.bfloat16(), rtol=2e-2, atol=1e-3)


def check_refused(forest, name, spoil):
    """A spoilt argument, weight or path is refused by name, by every implementation alike."""
    x_TF, paths = forest.grow(9, 3)
    options = {"x_TF": x_TF, "weights": forest.weights, "rows_RW": forest.rows, "states_SHKV": forest.states}
    options["paths"] = paths
    if name in options:
        options[name] = spoil(options[name])
    elif name in forest.weights._fields:
        options["weights"] = forest.weights._replace(**{name: spoil(getattr(forest.weights, name))})
    else:
        options["paths"] = replace(paths, **{name: spoil(getattr(paths, name))})
    said = refusals(lambda impl: forest.operator(**options, impl=impl), ["reference", *FAST])
    assert re.match(rf"{name}: expected ", said)


def check_refused_sizes(forest):
    """Heads that do not divide one another are refused, and so is an implementation that does not exist."""
    x_TF, paths = forest.grow(2, 1)
    wrong = forest.weights._replace(kind=replace(forest.kind, key_heads=3))
    with pytest.raises(ValueError, match="weights: expected a tap, a head"):
        forest.operator(x_TF, wrong, forest.rows, forest.states, paths)
    with pytest.raises(ValueError, match="impl: expected one of reference, torch, cpp, triton, got 'c'"):
        forest.operator(x_TF, forest.weights, forest.rows, forest.states, paths, impl="c")


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("x_TF", lambda x: x[:, 1:]),
        ("x_TF", lambda x: x.long()),
        ("taps_KC", lambda x: x[1:]),
        ("decay_H", lambda x: x.double()),
        ("bias_D", lambda x: x[1:]),
        ("norm_V", lambda x: x[1:]),
        ("rows_RW", lambda x: x.bfloat16()),
        ("rows_RW", lambda x: x[:, 1:].contiguous()),
        ("states_SHKV", lambda x: x.mT),
        ("rows_T", lambda x: x.int()),
        ("rows_T", lambda x: x + 900),
        ("paths_TN", lambda x: x[:, 1:].contiguous()),
        ("paths_TN", lambda x: x + 900),
        ("paths_TN", lambda x: x - 9),
        ("lengths_T", lambda x: x + BLOCK),
        ("bases_T", lambda x: x - 1),
        ("folds_T", lambda x: x + 200),
    ],
)
def test_what_is_refused(name, spoil):
    check_refused(Growing(SMALL, 5), name, spoil)


def test_sizes_and_implementations_that_do_not_exist():
    check_refused_sizes(Growing(SMALL, 6))

"""Gated delta nets and selective scans on a GPU: the recurrence along every path, errors, bits, what is refused."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from kernels.layout import NULL_SLOT, NULL_STATE, TRASH_SLOT, ChannelKind, DeltaKind, ScanKind
from tests.gpu_errors import FAST
from tests.kernels.test_channel_scan import BARE as WITHOUT_NORMS
from tests.kernels.test_channel_scan import ByChannels
from tests.kernels.test_delta_net import PASSES, Growing, errors_of, sequence
from tests.kernels.test_scan import BARE, Scanned
from tests.marks import DEVICES, INTERPRETED, needs_interpreter, needs_triton

pytestmark = needs_triton
LAYERS = [
    pytest.param(Growing, DeltaKind(1, 2, 6, 20, 4), id="delta net"),
    pytest.param(Growing, DeltaKind(1, 1, 5, 3, 1), id="delta net of one tap"),
    pytest.param(Growing, DeltaKind(2, 2, 3, 4, 7), id="delta net of seven taps"),
    pytest.param(Growing, DeltaKind(1, 2, 6, 20, 4, True), id="delta net by key"),
    pytest.param(Growing, DeltaKind(3, 3, 5, 3, 2, True), id="delta net by key, bounded"),
    pytest.param(Scanned, ScanKind(1, 2, 6, 20, 4), id="scan"),
    pytest.param(Scanned, ScanKind(2, 2, 5, 3, 1), id="scan of groups"),
    pytest.param(Scanned, BARE, id="scan without a norm"),
    pytest.param(ByChannels, ChannelKind(1, 1, 6, 20, 4), id="scan by channels"),
    pytest.param(ByChannels, ChannelKind(1, 1, 1, 37, 7), id="scan by channels of one state"),
    pytest.param(ByChannels, WITHOUT_NORMS, id="scan by channels without norms"),
]
FEW = [LAYERS[0], LAYERS[3], LAYERS[5]]  # `tests/kernels/test_channel_scan.py` has the like of scans by channels
SOME = [*FEW, LAYERS[8]]


@DEVICES
@pytest.mark.parametrize(("growing", "kind"), LAYERS)
def test_every_path_is_the_recurrence(growing, kind, device):
    """States of blocks, rows of earlier passes and tokens of the same one; heads in several blocks of columns."""
    forest = growing(kind, 1)
    for tokens, chains in ((70, 40), (1, 1), (40, 40)):
        forest.run("triton", tokens, chains, device)
    assert forest.check(1e-4) > 64
    assert forest.states[NULL_STATE].eq(0).all() and forest.rows[NULL_SLOT].eq(0).all()


@DEVICES
@pytest.mark.parametrize("growing", [Growing, Scanned])
def test_chains_of_several_levels(growing, device):
    """Branches below a prompt of the same pass, past the ends of its blocks."""
    forest = growing((ScanKind if growing is Scanned else DeltaKind)(1, 1, 3, 2, 4), 3, roots=1)
    forest.rng = SimpleNamespace(randrange=lambda nodes: nodes - 3)
    forest.run("triton", 40, 36, device)
    assert forest.levels == (1, 1)
    forest.run("triton", 30, 27, device)
    forest.check(1e-4)


def moved_by_fast_operations(growing, kind, monkeypatch):
    """How far results move, as a root mean square, if all exponentials are off by as much as a GPU's may be, and the
    quotients of sigmoids too. Decays multiply each other, so their errors add up."""

    def outputs():
        forest = growing(kind, 2, torch.float64)
        for tokens, chains in PASSES:
            forest.run("reference", tokens, chains)
        return torch.cat(forest.outputs)

    exact = outputs()
    with monkeypatch.context() as patch:
        for owner, name, off in ((torch.Tensor, "exp", 1), (torch.Tensor, "sigmoid", 2), (F, "silu", 2)):
            run = getattr(owner, name)
            patch.setattr(owner, name, lambda x, run=run, off=off: run(x) * (1 + off * FAST))
        return (outputs() - exact).square().mean().sqrt().item()


@DEVICES
@pytest.mark.parametrize(("growing", "kind"), SOME)
def test_the_error_is_at_most_twice_that_of_the_definition(growing, kind, device, monkeypatch):
    errors = errors_of(growing, kind, "triton", device=device)
    fast = moved_by_fast_operations(growing, kind, monkeypatch) if device == "cuda" else 0.0
    assert errors[1] <= 2 * errors[0] + fast, (errors, fast)


@needs_interpreter
@pytest.mark.parametrize(("growing", "kind"), [LAYERS[5], LAYERS[8]])
def test_fast_operations_add_what_they_may(growing, kind, monkeypatch):
    """If all are off by most in one direction, the error is more than twice the definition's, and within the bound."""
    from tests.interpreter import err_as_gpus

    fast = moved_by_fast_operations(growing, kind, monkeypatch)
    err_as_gpus(monkeypatch, alike=1.0)
    errors = errors_of(growing, kind, "triton")
    assert 2 * errors[0] < errors[1] <= 2 * errors[0] + fast, (errors, fast)


@DEVICES
@pytest.mark.parametrize(("growing", "kind"), FEW)
def test_bits_hang_on_the_sequence_alone(growing, kind, device):
    """In one pass, in several, and beside another sequence: outputs and what is kept of the last tokens."""
    forest, found = growing(kind, 2), []
    x_TF = forest.inputs_of(kind, 50, forest.draw).to(device)
    weights = forest.moved(forest.weights, device)
    for chunks in ([50], [5, 26, 1, 1, 17], [32, 18]):
        rows, first, outputs = {}, 0, []
        kept = torch.zeros(92, kind.row, device=device), torch.zeros(2, *kind.state, device=device)
        for tokens in chunks:
            paths = sequence(tokens, first, kind, 1, rows).to(device)
            outputs.append(growing.operator(x_TF[first : first + tokens], weights, *kept, paths, impl="triton"))
            first += tokens
        found.append([torch.cat(outputs), kept[0][[rows.get(p, NULL_SLOT) for p in (47, 48, 49)]], kept[1]])
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


@DEVICES
@pytest.mark.parametrize(("growing", "kind"), FEW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_the_result_alone(growing, kind, dtype, device):
    """Rows of x stand apart, as where other outputs of a product lie between them."""
    forest = growing(kind, 4)
    x_TF, paths = forest.grow(20, 12)
    apart_TF = torch.cat([x_TF, x_TF], 1).to(dtype)[:, : x_TF.shape[1]]
    exact = growing.operator(
        apart_TF.float(), forest.weights, forest.rows.clone(), forest.states.clone(), paths, impl="reference"
    )
    given = (x.to(device) for x in (forest.rows, forest.states))
    weights = forest.moved(forest.weights, device)
    found = growing.operator(apart_TF.to(device), weights, *given, paths.to(device), impl="triton")
    torch.testing.assert_close(found.cpu(), exact.to(dtype), rtol=2e-2, atol=1e-3)


@DEVICES
@pytest.mark.parametrize(("growing", "kind"), SOME)
def test_padding_and_passes_without_tokens(growing, kind, device):
    """Padding tokens share the trash slot, which nobody writes; empty chains do nothing."""
    forest = growing(kind, 5)
    x_TF, paths = forest.grow(3, 2)
    paths.rows_T[:] = TRASH_SLOT
    kept, weights = [x.to(device) for x in (forest.rows, forest.states)], forest.moved(forest.weights, device)
    before, planned = [x.clone() for x in kept], paths.to(device)
    found = growing.operator(x_TF.to(device), weights, *kept, planned, impl="triton")
    assert found.isfinite().all() and all(x.equal(y) for x, y in zip(kept, before, strict=True) if not y.isnan().any())
    assert kept[0].isnan().equal(before[0].isnan())
    empty = type(paths)(*(x[:0].to(device) for x in vars(paths).values() if torch.is_tensor(x)))
    assert growing.operator(x_TF[:0].to(device), weights, *kept, empty, impl="triton").shape == found[:0].shape


@pytest.mark.parametrize(("growing", "kind"), SOME)
def test_what_the_kernels_do_not_take(growing, kind):
    forest = growing(kind, 6, torch.float64)
    x_TF, paths = forest.grow(2, 1)
    wanted = "float64" if INTERPRETED else "CUDA tensors"
    with pytest.raises(ValueError, match=f"impl 'triton': expected .*{wanted}"):
        growing.operator(x_TF, forest.weights, forest.rows, forest.states, paths, impl="triton")

"""Experts on a GPU: the choice, the tiles of rows sorted by expert, and what their matrices make of them."""

import functools

import pytest
import torch

from kernels.experts import Routing, Stacked, choose, routed
from kernels.linear.codes import Codes
from tests.kernels.test_codes import draw as draw_codes
from tests.kernels.test_codes import packed
from tests.kernels.test_experts import ROUTINGS, draw, is_sigmoid
from tests.marks import DEVICES, INTERPRETED, TRITON, needs_triton

pytestmark = needs_triton
COUNT, WIDTH, INNER = 7, 40, 24
FORMATS = {  # numbers, elements that share a scale (0: a row), zeros or minimums, order of columns; None: floats
    "floats": None,
    "int4": ("int4", 32, False, False),
    "int4 with zeros": ("int4", 32, True, True),
    "int4 with minimums": ("int4", 0, "least", False),
    "int8": ("int8", 0, False, False),
    "MXFP4": ("int8", 32, False, False),
    "float8": ("float8", 16, False, False),
}
DTYPES = "float32", "bfloat16", "float16"
CASES = [  # every rule and every format, in any dtype
    *((routing, "floats", dtype) for routing, dtype in zip(ROUTINGS, DTYPES * 3, strict=False)),
    *(("normalized", kind, dtype) for kind, dtype in zip(FORMATS, DTYPES * 3, strict=False)),
]


def stacked(outs, width, kind, seed):
    """Matrices of all experts, and the elements that they stand for, float64."""
    if FORMATS[kind] is None:
        exact = draw(COUNT * outs, width, seed=seed).double() / width**0.5
        return exact, exact
    numbers, size, zeros, ordered = FORMATS[kind]
    made, exact, order = draw_codes(numbers, size or width, zeros, COUNT * outs, width, ordered, seed)
    return packed(made, numbers, size or width, COUNT * outs, width, order), exact


class Made:
    """Random experts, and random rows for them."""

    def __init__(
        self,
        routing,
        kind="floats",
        dtype="float32",
        *,
        tokens=30,
        function="silu",
        bias=True,
        shared=True,
        biased=False,
        factors=False,
    ):
        self.routing, self.function, self.dtype = routing, function, getattr(torch, dtype)
        cast = functools.partial(torch.Tensor.to, dtype=self.dtype)
        outs = INNER if function == "relu_squared" else 2 * INNER  # which has no gates here
        self.tables = [stacked(outs, WIDTH, kind, 1), stacked(WIDTH, INNER, kind, 2)]
        if FORMATS[kind] is None:
            self.tables = [(cast(table), cast(table).double()) for table, _ in self.tables]
        scale = self.tables[0][1].square().sum(1).mean().rsqrt()  # products of random numbers would be large
        self.x_TE = cast(draw(tokens, WIDTH, seed=3) * scale)
        self.logits_TX = cast(draw(tokens, COUNT, seed=4))
        self.biases = [cast(draw(len(exact), seed=5)) if bias else None for _, exact in self.tables]
        self.bias_X = draw(COUNT, seed=6) if is_sigmoid(routing) or biased else None
        self.factors_X = draw(COUNT, seed=8) if factors else None
        self.shared = [cast(draw(tokens, size, seed=7)) if shared else None for size in (WIDTH, 1)]

    def run(self, impl, device="cpu", dtype=None):
        """With a dtype, all is cast to it, and matrices are floats."""

        def to(x):
            return x if x is None else x.to(device) if isinstance(x, Codes) else x.to(device, dtype)

        tables = [to(table if dtype is None else exact) for table, exact in self.tables]
        up, down = (Stacked(COUNT, *each) for each in zip(tables, map(to, self.biases), strict=True))
        rules = self.routing, self.function
        own = {"bias_X": self.bias_X, "factors_X": self.factors_X}
        own = {name: None if x_X is None else x_X.to(device) for name, x_X in own.items()}
        shared = dict(zip(("shared_TE", "gate_T1"), map(to, self.shared), strict=True))
        return routed(to(self.x_TE), to(self.logits_TX), up, down, *rules, **own, **shared, impl=impl).cpu()


def check(made, device):
    exact_TE, plain_TE = (made.run("reference", dtype=dtype) for dtype in (torch.float64, made.dtype))
    found_TE = made.run("triton", device)
    assert found_TE.dtype == made.dtype
    plain, found = ((x_TE.double() - exact_TE).square().mean().sqrt() for x_TE in (plain_TE, found_TE))
    assert found <= 2 * plain


@DEVICES
@pytest.mark.parametrize(("routing", "kind", "dtype"), CASES)
def test_the_error_is_at_most_twice_that_of_pytorch(routing, kind, dtype, device):
    check(Made(ROUTINGS[routing], kind, dtype, shared=kind == "floats", bias=kind != "int8"), device)


@DEVICES
def test_a_bias_of_the_choice_beside_a_softmax(device):
    check(Made(ROUTINGS["normalized"], biased=True), device)


@DEVICES
def test_factors_of_experts(device):
    check(Made(ROUTINGS["normalized"], factors=True), device)


@DEVICES
@pytest.mark.parametrize("function", ["clamped_swiglu", "gelu_tanh"])
@pytest.mark.parametrize("tokens", [1, 5, 100])
def test_gates_and_tiles_of_all_sizes(function, tokens, device):
    made = Made(ROUTINGS["of chosen"], "MXFP4", "bfloat16", tokens=tokens, function=function)
    made.x_TE *= 9  # beyond the clamps
    check(made, device)


@DEVICES
@pytest.mark.parametrize(("kind", "tokens"), [("floats", 30), ("MXFP4", 5), ("int8", 1)])
def test_experts_without_gates(kind, tokens, device):
    made = Made(ROUTINGS["normalized"], kind, tokens=tokens, function="relu_squared", bias=kind != "int8")
    check(made, device)


@pytest.mark.parametrize("device", TRITON)
@pytest.mark.parametrize("shares", [2, 5])
def test_shares_of_the_width_do_not_show(shares, device, monkeypatch):
    from kernels.linear import triton

    made = Made(ROUTINGS["normalized"], "floats")
    whole_TE = made.run("triton", device)
    monkeypatch.setattr(triton, "split_count", lambda *_: shares)
    for _ in range(2):
        torch.testing.assert_close(made.run("triton", device), whole_TE, rtol=1e-5, atol=1e-5)
    assert not triton.counters(torch.device(device, 0) if device == "cuda" else torch.device("cpu")).any()


@pytest.mark.parametrize("device", TRITON)
@pytest.mark.parametrize("name", ["even", "one expert", "the last one", "one entry"])
def test_tiles(name, device):
    """Each entry is in one tile, which is of its expert; entries stay in order, and spare tiles are marked."""
    from kernels.experts.triton import ENTRIES, _sort
    from kernels.gpu import launch

    X, M, entries = 6, 16, 1 if name == "one entry" else ENTRIES + 90
    experts_P = {"one expert": torch.full((entries,), 2), "the last one": torch.full((entries,), X - 1)}.get(
        name, torch.randint(X, (entries,), generator=torch.Generator().manual_seed(0))
    ).int()
    tiles = min(X, entries) + (entries - min(X, entries)) // M
    order_P, tiles_3 = (torch.full(s, 99, dtype=torch.int32, device=device) for s in ((entries,), (3, tiles)))
    launch(_sort, X)(experts_P.to(device), order_P, tiles_3, entries, tiles, X2=8, M=M, ENTRIES=ENTRIES)
    assert order_P.tolist() == experts_P.argsort(stable=True).tolist()
    found = [tile for tile in zip(*tiles_3.tolist(), strict=True) if tile[0] >= 0]
    expected, place = [], 0
    for expert, count in enumerate(experts_P.bincount(minlength=X).tolist()):
        expected += [(expert, place + i, min(place + i + M, place + count)) for i in range(0, count, M)]
        place += count
    assert found == expected and tiles_3[0, len(found) :].eq(-1).all()


GROUPS = [
    Routing(3, groups=4, kept=2),
    Routing(4, "sigmoid", True, 1e-20, 2.5, groups=4, kept=2, best=2),
    Routing(5, "sigmoid", groups=3, kept=2, best=2),
]


@DEVICES
@pytest.mark.parametrize("routing", GROUPS, ids=str)
def test_experts_of_the_best_groups(routing, device):
    """The choice is the definition's: of equals the lower number; NaN comes first."""
    from kernels.experts import triton

    logits_TX, bias_X = draw(40, 12, seed=1), draw(12, seed=2) if routing.scores == "sigmoid" else None
    logits_TX[0], logits_TX[1, 6:], logits_TX[2, 5], logits_TX[3, :3] = 0.5, 0.5, torch.nan, -torch.inf
    experts_TK, weights_TK = choose(logits_TX, routing, bias_X)
    moved = logits_TX.to(device), None if bias_X is None else bias_X.to(device)
    found_TK, by_TK = (x.cpu() for x in triton.chosen(*moved, None, routing))
    assert found_TK.long().equal(experts_TK)
    torch.testing.assert_close(by_TK, weights_TK, rtol=1e-5, atol=1e-6, equal_nan=True)


@DEVICES
def test_equals_go_to_the_lower_number_and_nan_stays_in_its_row(device):
    for routing in ROUTINGS.values():
        made = Made(routing, tokens=5, shared=False)
        made.logits_TX[0], made.x_TE[1], made.logits_TX[3] = 0.5, torch.nan, torch.nan
        found_TE, exact_TE = made.run("triton", device), made.run("reference", dtype=torch.float64)
        torch.testing.assert_close(found_TE.double(), exact_TE, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert found_TE[[0, 2, 4]].isfinite().all() and found_TE[[1, 3]].isnan().all()


def test_what_does_not_fit_is_refused():
    made = Made(Routing(2))
    up, down = (Stacked(COUNT, table, bias) for (table, _), bias in zip(made.tables, made.biases, strict=True))
    given = made.x_TE, made.logits_TX, up, down, Routing(2), "silu"
    for at, value, message in (
        (0, made.x_TE[:, 1:], r"up: expected 7 matrices \[48, 39\]"),
        (0, made.x_TE.half(), "up: expected contiguous float16"),
        (1, made.logits_TX[:, 1:], r"logits_TX: expected contiguous float32 \[30, 7\]"),
        (3, up, "up: expected 7 matrices"),
        (4, Routing(8), "1 to 7 experts, got 8"),
    ):
        with pytest.raises(ValueError, match=message):
            routed(*given[:at], value, *given[at + 1 :])
    with pytest.raises(ValueError, match=r"gate_T1: expected contiguous float32 \[30, 1\]"):
        routed(*given, gate_T1=made.x_TE)
    whole = Stacked(COUNT, made.tables[1][0].new_ones(COUNT * INNER, WIDTH))
    with pytest.raises(ValueError, match="function: expected one without a gate"):
        routed(*given[:2], whole, down, Routing(2), "clamped_swiglu")
    with pytest.raises(ValueError, match="impl: expected one of reference, triton"):
        routed(*given, impl="cpp")
    if INTERPRETED:
        with pytest.raises(ValueError, match=r"no product of torch\.float64"):
            made.run("triton", dtype=torch.float64)
    with pytest.raises(ValueError, match="expected the rows of 5 matrices, got 336"):
        Stacked(5, made.tables[0][0])

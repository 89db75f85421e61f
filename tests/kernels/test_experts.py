"""Mixtures of experts: the choice of tokens, and what their experts make of them, against the definition."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from kernels import cpp
from kernels.experts import Expert, PackedExperts, Routing, choose, experts, grouped
from kernels.linear import Packed, PackedParts, linear, pack, pack_groups, reference
from kernels.rows import activation, activation_mul
from kernels.stack import Matrix

native = pytest.mark.skipif(bool(cpp.why_not()), reason=f"no C++ kernels: {cpp.why_not()}")
ROUTINGS = {
    "softmax": Routing(2),
    "normalized": Routing(3, normalized=True),
    "of chosen": Routing(3, "softmax_of_chosen"),
    "sigmoid": Routing(3, "sigmoid", normalized=True, epsilon=1e-6, scale=2.5),
    "all": Routing(7),
    "sparsemixer": Routing(2, "sparsemixer", jitter=0.1),
    "sigmoid of chosen": Routing(3, "sigmoid_of_chosen", normalized=True),
    "on inputs": Routing(2, "sigmoid_of_chosen", on_inputs=True),
}
GROUPS = {  # of six experts
    "one group": Routing(2, groups=3, kept=1),
    "two groups": Routing(3, normalized=True, groups=3, kept=2),
    "groups by their two best": Routing(3, "sigmoid", True, 1e-20, 2.5, groups=2, kept=1, best=2),
}


UNGATED = "relu_squared"  # the function of experts whose first matrix has no gates


def is_sigmoid(routing):
    return routing.scores.startswith("sigmoid")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(outs, width, kind, seed, bias=False):
    weight_OI = draw(outs, width, seed=seed) / width**0.5
    own = draw(outs, seed=seed + 1) if bias else None
    if kind == "int4":
        codes_OI = (weight_OI * 4 + 8).clamp(0, 15).to(torch.uint8)
        panels, groups = pack_groups([(codes_OI, torch.full((outs, 1), 0.25))], "int4", outs, width, width)
        return Matrix(Packed(panels, outs, width, groups=groups, levels=127.0), own)
    return Matrix(Packed(pack([weight_OI], torch.float32, outs, width), outs, width), own)


def mixture(
    routing,
    kind="float32",
    *,
    count=7,
    width=40,
    inner=24,
    bias=False,
    shared=0,
    gated=False,
    parts=False,
    biased=False,
    function="silu",
):
    def expert(inner, seed):
        up = matrix(inner if function == UNGATED else 2 * inner, width, kind, seed, bias)
        if parts:
            halves = [matrix(inner, width, kind, seed + i).packed for i in range(2)]
            up = Matrix(PackedParts(halves), up.bias)
        return Expert(up, matrix(width, inner, kind, seed + 7, bias))

    return PackedExperts(
        routing,
        function,
        matrix(count, width, "float32", 1),
        [expert(inner, 100 * i + 2) for i in range(count)],
        draw(count, seed=9) if is_sigmoid(routing) or (biased and routing.scores == "softmax") else None,
        expert(shared, 9000) if shared else None,
        matrix(1, width, "float32", 3) if gated else None,
    )


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_choice_is_what_its_rules_say(routing):
    rules, logits_TX = ROUTINGS[routing], draw(50, 7).double()
    experts_TK, weights_TK = choose(logits_TX, rules)
    best_TK = logits_TX.topk(rules.chosen).indices
    assert experts_TK.equal(best_TK)
    every_TX = logits_TX.sigmoid() if is_sigmoid(rules) else logits_TX.softmax(-1)
    expected_TK = every_TX.gather(1, best_TK)
    if rules.normalized or rules.scores == "softmax_of_chosen":
        expected_TK = expected_TK / expected_TK.sum(-1, keepdim=True)
    if rules.scores != "sparsemixer":
        assert torch.allclose(weights_TK, expected_TK * rules.scale, atol=1e-6)
    else:
        assert ((weights_TK > 0) & (weights_TK <= 1)).all() and (weights_TK == 1).any() and (weights_TK < 1).any()


def test_factors_are_of_chosen_experts_and_change_no_choice():
    logits_TX, factors_X = draw(50, 7).double(), draw(7, seed=3)
    rules = Routing(3, normalized=True, scale=2.5)
    (experts_TK, weights_TK), (plain_TK, ones_TK) = choose(logits_TX, rules, None, factors_X), choose(logits_TX, rules)
    assert experts_TK.equal(plain_TK)
    assert torch.allclose(weights_TK, ones_TK * factors_X[experts_TK])


@native
def test_a_router_that_reads_other_rows():
    """With factors."""
    plain = mixture(Routing(3, normalized=True), shared=16)
    given = PackedExperts(plain.routing, "silu", plain.router, plain.experts, shared=plain.shared, factors_X=draw(7))
    x_TE, scored_TE = draw(9, 40, seed=1), draw(9, 40, seed=2)
    found, expected = (experts(x_TE, given, scored_TE, impl=impl) for impl in ("cpp", "reference"))
    assert torch.allclose(found, expected, atol=1e-5) and not torch.allclose(found, experts(x_TE, given), atol=0.1)
    with pytest.raises(ValueError, match="scored_TE: expected"):
        experts(x_TE, given, scored_TE[:3])
    wide = PackedExperts(plain.routing, "silu", matrix(7, 56, "float32", 1), plain.experts)  # of another width
    scored_TE = draw(9, 56, seed=3)
    found, expected = (experts(x_TE, wide, scored_TE, impl=impl) for impl in ("cpp", "reference"))
    assert torch.allclose(found, expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"scored_TE: expected \[9, 56\] of torch.float32, got \[9, 40\]"):
        experts(x_TE, wide)


def test_equals_go_to_the_lower_number():
    logits_TX = torch.tensor([[0.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    for routing in (Routing(2), Routing(2, "sparsemixer", jitter=0.01)):
        assert choose(logits_TX, routing)[0].tolist() == [[1, 2], [0, 1]]
    assert choose(logits_TX, Routing(2, "sigmoid"), torch.tensor([9.0, 0, 0, 9]))[0].tolist() == [[3, 0], [0, 3]]


def test_logits_choose_where_sigmoids_are_equal():
    logits_TX = torch.tensor([[20.0, 30.0, 25.0]])
    for scores, first in (("sigmoid", 0), ("sigmoid_of_chosen", 1)):
        assert choose(logits_TX, Routing(1, scores))[0].tolist() == [[first]]


@pytest.mark.parametrize("routing", GROUPS)
def test_experts_are_chosen_from_the_best_groups(routing):
    rules, logits_TX, bias_X = GROUPS[routing], draw(50, 6).double(), None
    if rules.scores == "sigmoid":
        bias_X = draw(6, seed=1)
    experts_TK, weights_TK = choose(logits_TX, rules, bias_X)
    every = logits_TX.sigmoid() if rules.scores == "sigmoid" else logits_TX.softmax(-1)
    for row, found, weights in zip(every.tolist(), experts_TK.tolist(), weights_TK, strict=True):
        keys = row if bias_X is None else [x + y for x, y in zip(row, bias_X.tolist(), strict=True)]
        size = 6 // rules.groups
        groups = [range(g * size, (g + 1) * size) for g in range(rules.groups)]
        groups.sort(key=lambda group: -sum(sorted(keys[i] for i in group)[-rules.best :]))
        there = sorted((i for group in groups[: rules.kept] for i in group), key=lambda i: -keys[i])
        assert found == there[: rules.chosen]
        own = torch.tensor([row[i] for i in found])
        assert torch.allclose(weights.float(), rules.scale * (own / own.sum() if rules.normalized else own), atol=1e-6)


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"bias": True, "shared": 20},
        {"shared": 33, "gated": True, "parts": True},
        {"biased": True},
        {"shared": 33, "function": "relu_squared"},
    ],
)
@pytest.mark.parametrize("routing", [*ROUTINGS, *GROUPS])
def test_as_near_to_float64_as_pytorch(routing, shape, dtype):
    """Rows whose choice the dtype changes are left out."""
    count = 6 if routing in GROUPS else 7
    made = cast(mixture((ROUTINGS | GROUPS)[routing], count=count, **shape), dtype)
    x_TE = draw(60, 40, seed=5).to(dtype)
    exact = cast(made, torch.float64)
    exact_TE = experts(x_TE.double(), exact, impl="reference")
    chosen = choose(logits(x_TE, made), made.routing, made.bias_X)
    same_T = chosen[0].eq(choose(logits(x_TE.double(), exact), made.routing, made.bias_X)[0]).all(-1)
    assert same_T.float().mean() > 0.8
    products = [(plain(expert.up, dtype), plain(expert.down, dtype)) for expert in made.experts]
    activate = partial(activation if made.function == UNGATED else activation_mul, name=made.function, impl="torch")
    plain_TE = grouped(x_TE, *chosen, products, activate, made.routing.on_inputs)
    if made.shared is not None:
        y_TE = plain(made.shared.down, dtype)(activate(plain(made.shared.up, dtype)(x_TE))).float()
        plain_TE += y_TE if made.gate is None else plain(made.gate, dtype)(x_TE).float().sigmoid() * y_TE
    found = plain_TE.to(dtype), experts(x_TE, made)
    errors = [(x_TE.double() - exact_TE)[same_T].square().mean().sqrt() for x_TE in found]
    assert errors[1] <= 2 * errors[0]


def plain(matrix, dtype):
    parts = getattr(matrix.packed, "parts", [matrix.packed])
    weight_OI = torch.cat([reference.unpacked(part) for part in parts]).to(dtype)
    return lambda x: F.linear(x, weight_OI, matrix.bias)


def logits(x_TE, made):
    return reference.linear(x_TE, *made.router)


def cast(made, dtype):
    """The same mixture for rows of another dtype, whose biases have it too."""

    def wide(matrix):
        return None if matrix is None else Matrix(matrix.packed, None if matrix.bias is None else matrix.bias.to(dtype))

    def both(expert):
        return None if expert is None else Expert(wide(expert.up), wide(expert.down))

    every = [both(expert) for expert in made.experts]
    return PackedExperts(
        made.routing, made.function, made.router, every, made.bias_X, both(made.shared), wide(made.gate)
    )


@native
@pytest.mark.parametrize("kind", ["float32", "int4"])
def test_rows_do_not_feel_each_other(kind):
    """Also where an expert has so many rows that threads prepare them together."""
    made = mixture(Routing(2, normalized=True), kind, shared=16, gated=True)
    x_TE = draw(300, 40)
    whole_TE = experts(x_TE, made)
    for first, last in [(0, 1), (7, 8), (0, 17), (100, 300)]:
        assert experts(x_TE[first:last], made).equal(whole_TE[first:last])
    assert experts(x_TE.flip(0), made).flip(0).equal(whole_TE)


@native
def test_grouped_rows_are_those_of_each_expert():
    made = mixture(Routing(3), bias=True)
    x_TE = draw(30, 40)
    chosen = choose(logits(x_TE, made), made.routing)
    products = [
        (lambda x, m=expert.up: linear(x, *m), lambda x, m=expert.down: linear(x, *m)) for expert in made.experts
    ]
    found_TE = grouped(x_TE, *chosen, products, lambda x: activation_mul(x, "silu", impl="cpp"))
    assert torch.allclose(found_TE, experts(x_TE, made), atol=1e-6)


@native
def test_nan_stays_in_its_row():
    x_TE = draw(5, 40)
    x_TE[2] = float("nan")
    for routing in ROUTINGS.values():
        made = mixture(routing)
        found_TE = experts(x_TE, made)
        assert found_TE[2].isnan().all() and found_TE[[0, 1, 3, 4]].isfinite().all()


@native
def test_profilers_see_it():
    made, x_TE = mixture(Routing(2)), draw(3, 40)
    with torch.profiler.profile(acc_events=True) as profile:
        found_TE = experts(x_TE, made)
    assert found_TE.equal(experts(x_TE, made))
    assert "coppice::experts" in {event.key for event in profile.key_averages()}


@native
def test_what_does_not_fit_is_refused():
    made = mixture(Routing(2))
    with pytest.raises(ValueError, match="width of 40"):
        experts(draw(3, 41), made)
    with pytest.raises(ValueError, match="impl: expected one of reference, cpp"):
        experts(draw(3, 40), made, impl="triton")
    with pytest.raises(ValueError, match="expected a matrix"):
        PackedExperts(Routing(2), "silu", made.router, made.experts[:-1])
    with pytest.raises(ValueError, match="1 to 7 experts, got 8"):
        PackedExperts(Routing(8), "silu", made.router, made.experts)
    with pytest.raises(ValueError, match="sparsemixer chooses 2"):
        PackedExperts(Routing(3, "sparsemixer"), "silu", made.router, made.experts)
    for groups in ({"groups": 2}, {"groups": 7, "kept": 8}, {"groups": 7, "best": 2}, {"groups": 7, "kept": 1}):
        with pytest.raises(ValueError, match="groups: expected such as 7 experts fit into"):
            PackedExperts(Routing(2, **groups), "silu", made.router, made.experts)
    with pytest.raises(ValueError, match="function: expected one without a gate, got 'clamped_swiglu'"):
        PackedExperts(Routing(2), "clamped_swiglu", made.router, mixture(Routing(2), function=UNGATED).experts)
    with pytest.raises(ValueError, match=r"expected a matrix \[48, 40\], got \[24, 40\]"):
        PackedExperts(
            Routing(2), "silu", made.router, [*made.experts[:-1], *mixture(Routing(2), function=UNGATED).experts[:1]]
        )
    with pytest.raises(ValueError, match="bias_X"):
        PackedExperts(Routing(2, "sigmoid"), "silu", made.router, made.experts, torch.zeros(6))

"""The definition of a mixture of experts: token by token."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.experts.packed import Expert, PackedExperts
from kernels.experts.routing import Routing, choose
from kernels.experts.stacked import Stacked
from kernels.linear import PackedParts, reference
from kernels.rows.reference import activation, activation_mul
from kernels.stack import Matrix


def experts(x_TE: Tensor, mixture: PackedExperts, scored_TE: Tensor) -> Tensor:
    """See the front for arguments."""
    shared_TE = None if mixture.shared is None else _expert(x_TE, mixture.shared, mixture)
    gate_T1 = None if mixture.gate is None else _product(x_TE, mixture.gate)
    chosen = choose(_product(scored_TE, mixture.router), mixture.routing, mixture.bias_X, mixture.factors_X)

    def expert(x_1E: Tensor, number: int) -> Tensor:
        return _expert(x_1E, mixture.experts[number], mixture)

    return _sums(x_TE, *chosen, expert, shared_TE, gate_T1, mixture.routing.on_inputs)


def routed(
    x_TE: Tensor,
    logits_TX: Tensor,
    up: Stacked,
    down: Stacked,
    routing: Routing,
    function: str,
    bias_X: Tensor | None,
    shared_TE: Tensor | None,
    gate_T1: Tensor | None,
    factors_X: Tensor | None,
) -> Tensor:
    """See the front for arguments."""

    activate = activation if up.outs == down.width else activation_mul

    def expert(x_1E: Tensor, number: int) -> Tensor:
        return down.product(activate(up.product(x_1E, number), function), number)

    return _sums(x_TE, *choose(logits_TX, routing, bias_X, factors_X), expert, shared_TE, gate_T1, routing.on_inputs)


def _sums(
    x_TE: Tensor,
    numbers_TK: Tensor,
    weights_TK: Tensor,
    expert: Callable[[Tensor, int], Tensor],
    shared_TE: Tensor | None,
    gate_T1: Tensor | None,
    on_inputs: bool,
) -> Tensor:
    wide = weights_TK.dtype
    out_TE = torch.empty_like(x_TE)
    for t, (numbers, weights) in enumerate(zip(numbers_TK.tolist(), weights_TK, strict=True)):
        x_1E = x_TE[t : t + 1]
        sum_1E = torch.zeros_like(x_1E, dtype=wide)
        for number, weight in zip(numbers, weights, strict=True):
            if on_inputs:
                sum_1E += expert((weight * x_1E).to(x_1E.dtype), number).to(wide)
            else:
                sum_1E += weight * expert(x_1E, number).to(wide)
        if shared_TE is not None:
            y_E = shared_TE[t].to(wide)
            sum_1E += y_E if gate_T1 is None else gate_T1[t].to(wide).sigmoid() * y_E
        out_TE[t] = sum_1E[0]
    return out_TE


def _expert(x: Tensor, expert: Expert, mixture: PackedExperts) -> Tensor:
    activate = activation_mul if mixture.gated else activation
    return _product(activate(_product(x, expert.up), mixture.function), expert.down)


def _product(x: Tensor, matrix: Matrix) -> Tensor:
    packed, bias = matrix
    if not isinstance(packed, PackedParts):
        return reference.linear(x, packed, bias)
    parts = zip(packed.parts, packed.biases(bias), strict=True)
    return torch.cat([reference.linear(x, part, own) for part, own in parts], -1)

"""The definition of a mixture of experts: token by token."""

import torch
from torch import Tensor

from kernels.experts.packed import Expert, PackedExperts
from kernels.experts.routing import choose
from kernels.linear import PackedParts, reference
from kernels.rows.reference import activation_mul
from kernels.stack import Matrix


def experts(x_TE: Tensor, mixture: PackedExperts) -> Tensor:
    """See the front for arguments."""
    numbers_TK, weights_TK = choose(_product(x_TE, mixture.router), mixture.routing, mixture.bias_X)
    out_TE = torch.empty_like(x_TE)
    for t, (numbers, weights) in enumerate(zip(numbers_TK.tolist(), weights_TK, strict=True)):
        x_1E = x_TE[t : t + 1]
        wide = weights.dtype
        sum_1E = torch.zeros_like(x_1E, dtype=wide)
        for number, weight in zip(numbers, weights, strict=True):
            sum_1E += weight * _expert(x_1E, mixture.experts[number], mixture.function).to(wide)
        if mixture.shared is not None:
            y_1E = _expert(x_1E, mixture.shared, mixture.function).to(wide)
            sum_1E += y_1E if mixture.gate is None else _product(x_1E, mixture.gate).to(wide).sigmoid() * y_1E
        out_TE[t] = sum_1E[0]
    return out_TE


def _expert(x: Tensor, expert: Expert, function: str) -> Tensor:
    return _product(activation_mul(_product(x, expert.up), function), expert.down)


def _product(x: Tensor, matrix: Matrix) -> Tensor:
    packed, bias = matrix
    if not isinstance(packed, PackedParts):
        return reference.linear(x, packed, bias)
    parts = zip(packed.parts, packed.biases(bias), strict=True)
    return torch.cat([reference.linear(x, part, own) for part, own in parts], -1)

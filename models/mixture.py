"""A mixture of experts in the place of an MLP, see `kernels.experts`."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kernels.experts import Expert, PackedExperts, choose, experts, grouped
from kernels.rows import activation_mul
from kernels.stack.calls import Call
from models.checkpoint.weights import Weights
from models.config import Config
from models.names import Names


class Mixture(nn.Module):
    """Experts of which a token chooses a few, and perhaps one that all tokens have.

    The matrix that makes the scores stays as exact as the checkpoint has it: a choice that tips over is no small error.

    Attributes:
        matrices: the same for C++; None where it does not multiply one of the matrices.
    """

    def __init__(self, c: Config, names: Names, weights: Weights, index: int):
        super().__init__()
        mixed, layer = c.experts, names.layer.format(index)
        assert mixed is not None
        self.routing, self.activation = mixed.routing, c.activation
        self.router = weights.linear(layer + names.router, bias=mixed.bias, exact=True)

        def mlp(parts: Sequence[str]) -> nn.ModuleList:
            *up, down = (layer + part for part in parts)
            both = weights.linear(*up, bias=mixed.bias), weights.linear(down, bias=mixed.bias)
            return nn.ModuleList(both)  # type: ignore[arg-type]

        self.experts = nn.ModuleList(mlp([part.format(i) for part in names.expert]) for i in range(mixed.count))
        self.shared = mlp(names.shared) if mixed.shared_width else None
        self.gate = weights.linear(layer + names.shared_gate) if mixed.shared_gate else None
        bias = layer + names.choice_bias
        self.bias_X = weights.vector(bias, dtype=torch.float32) if mixed.choice_bias else None
        self.matrices = self._matrices()

    def _matrices(self) -> PackedExperts | None:
        mlps: list[Any] = [*self.experts, *([] if self.shared is None else [self.shared])]
        router, gate = self.router.matrix, None if self.gate is None else self.gate.matrix
        pairs = [Expert(*(linear.matrix for linear in mlp)) for mlp in mlps]
        if router is None or any(matrix is None for pair in pairs for matrix in pair) or (self.gate and gate is None):
            return None
        shared = None if self.shared is None else pairs.pop()
        return PackedExperts(self.routing, self.activation, router, pairs, self.bias_X, shared, gate)

    def calls(self, source: str) -> Iterator[Call]:
        """The call from the register `source` to "read"."""
        yield Call("mix", source, "read", mixture=self)

    def forward(self, x_TE: Tensor, impl: str) -> Tensor:
        """[T, E] -> the same; `impl` is the pass's."""
        if impl == "cpp" and self.matrices is not None:
            return experts(x_TE, self.matrices)
        activate = partial(activation_mul, name=self.activation, impl=impl)
        chosen = choose(self.router(x_TE), self.routing, self.bias_X)
        sum_TE = grouped(x_TE, *chosen, [tuple(mlp) for mlp in self.experts], activate)  # type: ignore[misc]
        if self.shared is not None:
            up, down = self.shared
            y_TE = down(activate(up(x_TE))).to(sum_TE.dtype)
            sum_TE += y_TE if self.gate is None else self.gate(x_TE).to(sum_TE.dtype).sigmoid() * y_TE
        return sum_TE.to(x_TE.dtype)

"""A mixture of experts in place of an MLP, see `kernels.experts`."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kernels.experts import Expert, PackedExperts, Stacked, choose, experts, grouped, routed
from kernels.rows import activation, activation_mul
from kernels.stack.calls import Call
from models.checkpoint.weights import Weights
from models.config import Config
from models.names import Names
from models.norms import Norm


def stacks(device: torch.device) -> bool:
    """Whether a device stacks the experts of a layer for `kernels.experts.routed`: only a GPU does."""
    return device.type == "cuda"


class Mixture(nn.Module):
    """Experts of which each token chooses a few, and possibly one that all tokens share.

    The router's matrix keeps the checkpoint's precision, because an error that changes a choice is large.

    Attributes:
        experts: the up and down products of each expert.
        stacked: the products of all experts on a GPU, in place of `experts`; None elsewhere.
        matrices: the experts for C++; None if it cannot multiply one of the matrices.
    """

    def __init__(self, c: Config, names: Names, weights: Weights, index: int):
        super().__init__()
        mixed, layer = c.experts, names.layer.format(index)
        assert mixed is not None
        self.routing, self.activation, self.gated = mixed.routing, c.activation, c.gated
        self.factor = mixed.factor
        self.norm = Norm(c, weights, layer + names.experts_out_norm) if mixed.normed else None
        self.router = weights.linear(layer + names.router, bias=mixed.bias, exact=True)

        def mlp(parts: Sequence[str]) -> nn.ModuleList:
            *up, down = (layer + part for part in parts)
            both = weights.linear(*up, bias=mixed.bias), weights.linear(down, bias=mixed.bias)
            return nn.ModuleList(both)  # type: ignore[arg-type]

        own = [[part.format(i) for part in names.expert] for i in range(mixed.count)]
        self.stacked: tuple[Stacked, Stacked] | None = None
        if stacks(weights.device):
            ups = [layer + part for parts in own for part in parts[:-1]]
            downs = [layer + parts[-1] for parts in own]
            up, down = (weights.stacked(mixed.count, *each, bias=mixed.bias) for each in (ups, downs))
            self.stacked, own = (up, down), []
        self.experts = nn.ModuleList(map(mlp, own))
        self.apart: nn.ModuleList | None = None  # the shared expert, if the others read a latent
        self.shared = mlp(names.shared) if mixed.shared_width else None
        self.latent = None
        if mixed.latent:
            ends = (weights.linear(layer + name) for name in (names.experts_in, names.experts_out))
            self.latent = nn.ModuleList(ends)  # type: ignore[arg-type]
            self.apart, self.shared = self.shared, None
        self.gate = weights.linear(layer + names.shared_gate) if mixed.shared_gate else None
        bias = layer + names.choice_bias
        self.bias_X = weights.vector(bias, dtype=torch.float32) if mixed.choice_bias else None
        factors = layer + names.factors
        self.factors_X = weights.vector(factors, dtype=torch.float32) if mixed.beside_mlp else None
        self.matrices = self._matrices()

    def _matrices(self) -> PackedExperts | None:
        mlps: list[Any] = [*self.experts, *([] if self.shared is None else [self.shared])]
        router, gate = self.router.matrix, None if self.gate is None else self.gate.matrix
        pairs = [Expert(*(linear.matrix for linear in mlp)) for mlp in mlps]
        if self.stacked or router is None or any(matrix is None for pair in pairs for matrix in pair):
            return None
        if self.gate and gate is None:
            return None
        shared = None if self.shared is None else pairs.pop()
        return PackedExperts(self.routing, self.activation, router, pairs, self.bias_X, shared, gate, self.factors_X)

    def calls(self, source: str) -> Iterator[Call]:
        """Yield the calls from the register `source` to "read"."""
        if self.latent is None:
            yield Call("mix", source, "read", mixture=self)
        else:
            yield from self._by_latent(source, *self.latent)
        if self.factor != 1.0:
            yield Call("scale", "read", "read", scale=self.factor)
        if self.norm is not None:
            yield Call("norm", "read", "read", norm=self.norm)

    def _by_latent(self, source: str, into: Any, out_of: Any) -> Iterator[Call]:
        """Yield the calls of experts that read a latent of the register `source`."""
        yield Call("product", source, "low", matrix=into)
        if self.apart is not None:
            up, down = self.apart
            yield Call("product", source, "up", matrix=up)
            yield Call("activate", "up", "middle", function=self.activation, gated=self.gated)
            yield Call("product", "middle", "out", matrix=down)
        yield Call("mix", "low", "low", source, mixture=self)
        yield Call("product", "low", "read", matrix=out_of)
        if self.apart is not None:
            yield Call("add", "out", "read")

    def forward(self, x_TE: Tensor, impl: str, scored_TE: Tensor | None = None) -> Tensor:
        """[T, E] -> [T, E]; `impl` is the pass's. The router reads `scored_TE`; None: it reads `x_TE`."""
        if impl == "cpp" and self.matrices is not None:
            return experts(x_TE, self.matrices, scored_TE)
        activate = partial(activation_mul if self.gated else activation, name=self.activation, impl=impl)
        logits_TX = self.router(x_TE if scored_TE is None else scored_TE)
        gate_T1 = None if self.gate is None else self.gate(x_TE)
        shared_TE = None
        if self.shared is not None:
            up, down = self.shared
            shared_TE = down(activate(up(x_TE)))
        if self.stacked:
            rules = {"bias_X": self.bias_X, "shared_TE": shared_TE, "gate_T1": gate_T1, "factors_X": self.factors_X}
            return routed(x_TE, logits_TX, *self.stacked, self.routing, self.activation, **rules)
        chosen = choose(logits_TX, self.routing, self.bias_X, self.factors_X)
        mlps: Any = [tuple(mlp) for mlp in self.experts]  # type: ignore[arg-type]
        sum_TE = grouped(x_TE, *chosen, mlps, activate, self.routing.on_inputs)
        if shared_TE is not None:
            y_TE = shared_TE.to(sum_TE.dtype)
            sum_TE += y_TE if gate_T1 is None else gate_T1.to(sum_TE.dtype).sigmoid() * y_TE
        return sum_TE.to(x_TE.dtype)

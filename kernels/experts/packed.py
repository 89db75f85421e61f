"""The packed matrices of a mixture of experts, as C++ and the definition take them."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.checks import expect
from kernels.cpp import OPERATORS, address
from kernels.experts.routing import SCORES, Routing
from kernels.rows.checks import ACTIVATIONS, GATES
from kernels.stack import Matrix


class Expert(NamedTuple):
    """An MLP: up [2 M, E] of a gated one, the gate's outputs first, or [M, E], and down [E, M]."""

    up: Matrix
    down: Matrix


def check_groups(routing: Routing, count: int) -> None:
    """Raises ValueError for groups that do not have so many experts, or not as many as are chosen."""
    size, rest = divmod(count, routing.groups) if routing.groups > 0 else (0, 1)
    fits = not rest and 0 < routing.kept <= routing.groups and 0 < routing.best <= size
    if not fits or routing.chosen > routing.kept * size:
        raise ValueError(f"groups: expected such as {count} experts fit into, got {routing}")


class PackedExperts:
    """A mixture of experts whose matrices are packed.

    Args:
        routing: the rules of the choice.
        function: the name of an activation, see `kernels.rows`.
        router: makes the logits of tokens.
        experts: of one width M, all gated or none, like the shared one.
        bias_X: see `choose`.
        shared: an expert of a width of its own that every token has beside those that it chose; None: there is none.
        factors_X: see `choose`.
        gate: makes a logit of each token, whose sigmoid weighs the shared expert; None: it weighs 1.

    Raises:
        ValueError: matrices that do not fit together.
    """

    def __init__(
        self,
        routing: Routing,
        function: str,
        router: Matrix,
        experts: Sequence[Expert],
        bias_X: Tensor | None = None,
        shared: Expert | None = None,
        gate: Matrix | None = None,
        factors_X: Tensor | None = None,
    ):
        self.routing, self.function, self.router, self.experts = routing, function, router, [*experts]
        self.bias_X, self.shared, self.gate, self.factors_X = bias_X, shared, gate, factors_X
        self.width, self.scored_width = experts[0].up.packed.width, router.packed.width
        self.gated = experts[0].up.packed.outs != experts[0].down.packed.width
        self._check()

    def _check(self) -> None:
        width, inner = self.width, self.experts[0].down.packed.width
        wanted = [(self.router, len(self.experts), self.scored_width)]
        parts = [(expert, inner) for expert in self.experts]
        if self.shared is not None:
            parts.append((self.shared, self.shared.down.packed.width))
        for expert, own in parts:
            wanted += [(expert.up, (1 + self.gated) * own, width), (expert.down, width, own)]
        if self.gate is not None:
            wanted.append((self.gate, 1, width))
        for matrix, outs, ins in wanted:
            if (matrix.packed.outs, matrix.packed.width) != (outs, ins):
                got = [matrix.packed.outs, matrix.packed.width]
                raise ValueError(f"experts: expected a matrix {[outs, ins]}, got {got}")
        if not self.gated and self.function in GATES:
            raise ValueError(f"function: expected one without a gate, got {self.function!r}")
        if not 0 < self.routing.chosen <= len(self.experts):
            raise ValueError(f"chosen: expected 1 to {len(self.experts)} experts, got {self.routing.chosen}")
        check_groups(self.routing, len(self.experts))
        if self.routing.scores == "sparsemixer" and self.routing.chosen != 2:
            raise ValueError(f"chosen: sparsemixer chooses 2 experts, got {self.routing.chosen}")
        if self.routing.scores == "sparsemixer" and self.factors_X is not None:
            raise ValueError("factors_X: expected none, as sparsemixer has none")
        for name, vector in (("bias_X", self.bias_X), ("factors_X", self.factors_X)):
            if vector is not None:
                expect(name, vector, torch.float32, (len(self.experts),), torch.device("cpu"))

    def described(self) -> ctypes.Structure:
        """For C++; valid as long as this object lives."""
        if not hasattr(self, "_described"):
            kind = OPERATORS.structures["Matrix"]

            def chain(matrices: Sequence[Matrix]) -> ctypes.Array[ctypes.Structure]:
                return (kind * len(matrices))(*(matrix.packed.described(matrix.bias) for matrix in matrices))

            every = [*self.experts, *([] if self.shared is None else [self.shared])]
            chains = [chain([self.router]), chain([x.up for x in every]), chain([x.down for x in every])]
            if self.gate is not None:
                chains.append(chain([self.gate]))
            self._chains, routing = chains, self.routing
            shared = 0 if self.shared is None else self.shared.down.packed.width
            sizes = self.width, self.experts[0].down.packed.width, shared
            rules = (
                SCORES.index(routing.scores),
                routing.normalized,
                (ACTIVATIONS + GATES).index(self.function),
                self.gated,
            )
            places = [ctypes.addressof(each) for each in chains] + ([] if self.gate is not None else [None])
            vectors = map(address, (self.bias_X, self.factors_X))
            numbers = routing.epsilon, routing.scale, routing.jitter
            self._described = OPERATORS.structures["Mixture"](
                len(self.experts), routing.chosen, *sizes, *rules, *places, *vectors, None, 0, *routing[6:], *numbers
            )
        return self._described

    def keep(self, keeper: Any, first: int) -> None:
        """Have a `Keeper` make room for the experts that rows choose; their numbers in it begin with `first`."""
        self._keeper, described = keeper, self.described()
        described.keeper, described.kept_from = ctypes.addressof(keeper.described), first

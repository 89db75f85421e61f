"""Calls that are fused for a GPU give what they give one by one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.stack.calls import Call
from models.running import Registers, Together, fused, run


class Norm:
    """An RMSNorm of eight elements."""

    def __init__(self, eps: float, weight: float = 1.0):
        self.eps, self.weight, self.bias = eps, torch.full((8,), weight), None

    def __call__(self, x: torch.Tensor, impl: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


ONE, SAME_EPS, OTHER_EPS = Norm(0.5), Norm(0.5, 3.0), Norm(0.01)


@pytest.mark.parametrize(
    ("of_out", "of_read", "following", "whole"),
    [
        (ONE, ONE, SAME_EPS, True),
        (None, None, OTHER_EPS, True),
        (ONE, ONE, OTHER_EPS, True),  # the norm that follows is a call of its own
        (ONE, OTHER_EPS, ONE, False),
        (ONE, SAME_EPS, ONE, False),
        (ONE, None, ONE, False),
        (None, ONE, ONE, False),
    ],
)
def test_sums_that_one_operator_computes(of_out: Any, of_read: Any, following: Any, whole: bool):
    normed = [Call("norm", name, name, norm=norm) for name, norm in (("out", of_out), ("read", of_read)) if norm]
    sums = [Call("add", "out", "read"), Call("add", "read", "stream")]
    calls = [*normed, *sums, Call("norm", "stream", "middle", norm=following)]
    made = fused(calls)
    assert isinstance(made[0], Together) == whole
    results = []
    for some in (calls, made):
        stream, out, read = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
        layout: Any = SimpleNamespace(rows_impl="torch")
        registers = Registers(stream, SimpleNamespace(), (), None, layout)  # type: ignore[arg-type]
        registers |= {"out": out, "read": read}
        run(some, registers)
        results.append((registers["stream"], registers["middle"]))
    torch.testing.assert_close(*results)

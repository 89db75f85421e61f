"""Mamba-2's selective scans over tree tokens: the front that checks and picks an implementation."""

from torch import Tensor  # `torch` is the module beside this one

from kernels import checks
from kernels.layout import DeltaPaths
from kernels.scan.weights import ScanWeights

IMPLEMENTATIONS = ("reference", "torch", "cpp", "triton")


def scan(
    x_TF: Tensor,
    weights: ScanWeights,
    rows_RW: Tensor,
    states_SHKV: Tensor,
    paths: DeltaPaths,
    *,
    impl: str = "torch",
) -> Tensor:
    """The state space layer of Mamba-2 (Dao and Gu, 2024, "Transformers are SSMs", section 7.1), with the convolution
    before it and the gated norm after it.

    A head has a state S [K, V]. A token with x [V], B and C [K] of the head's group and a step d makes of its parent's
    state S' = exp(d A) S + B (d x)^T, and reads S'^T C + D x. What a token adds is an outer product, as that of a gated
    delta net (`kernels.delta_net`) is, but does not depend on the state: rows, states and paths are the same.

    Args:
        x_TF: of each token side by side: a gate for each element of H heads [V], x of these, B and C of G groups [K],
            the inputs of steps for each of the heads.
        weights: see there; x, B and C are convolved, then silu is applied.
        rows_RW, states_SHKV, paths, impl: as of `kernels.delta_net.delta_net`, with rows of `ScanKind.row`; so are what
            is returned and raised.
    """
    checks.implementation(impl, IMPLEMENTATIONS)
    checks.scan(x_TF, weights, rows_RW, states_SHKV, paths)
    return checks.module(__name__, impl).scan(x_TF, weights, rows_RW, states_SHKV, paths)

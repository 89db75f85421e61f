"""The weights of a Mamba-2 layer."""

from typing import NamedTuple

from torch import Tensor

from kernels.layout import ScanKind


class ScanWeights(NamedTuple):
    """All in the dtype of arithmetic: float32, or float64 for inputs of float64.

    Attributes:
        kind: the sizes.
        taps_KC, shift_C: of the convolution, the own token's last; its bias.
        decay_H: below 0: A, the factor of a step that becomes the logarithm of a head's decay.
        bias_H: added before the softplus that makes a step.
        skip_H: D, the factor of what a head reads of its own x.
        norm_E: of the RMSNorm of all heads of a group, as one row; None: there is no norm.
        eps: of this norm.
        least, most: that a step may be.
        gate, step: factors of the gates, and of the inputs of steps.
    """

    kind: ScanKind
    taps_KC: Tensor
    shift_C: Tensor
    decay_H: Tensor
    bias_H: Tensor
    skip_H: Tensor
    norm_E: Tensor | None
    eps: float
    least: float = 0.0
    most: float = float("inf")
    gate: float = 1.0
    step: float = 1.0

"""The weights of a gated delta net."""

from typing import NamedTuple

from torch import Tensor

from kernels.layout import DeltaKind


class DeltaWeights(NamedTuple):
    """All in the dtype of arithmetic: float32, or float64 for inputs of float64.

    Attributes:
        kind: the sizes.
        taps_KC: of the convolution, the own token's last; it has no bias.
        decay_H: below 0: the factor of what becomes the logarithm of a head's decay.
        bias_H: added before the softplus that this factor multiplies.
        norm_V: of the RMSNorm of each head.
        eps: of this norm.
        most: strengths lie between 0 and this number; above 1 a state can change its sign (Grazzi et al., 2024,
            "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues").
    """

    kind: DeltaKind
    taps_KC: Tensor
    decay_H: Tensor
    bias_H: Tensor
    norm_V: Tensor
    eps: float
    most: float = 1.0

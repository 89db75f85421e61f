"""The weights of a gated delta net."""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from kernels.layout import DeltaKind


class DeltaWeights(NamedTuple):
    """All in the dtype of arithmetic: float32, or float64 for inputs of float64.

    Attributes:
        kind: the sizes.
        taps_KC: of the convolution, the own token's last; it has no bias.
        decay_H: below 0: the factor of what becomes the logarithm of a head's decay.
        bias_D: added to the inputs of decays.
        norm_V: of the RMSNorm of each head.
        eps: of this norm.
        most: strengths lie between 0 and this number; above 1 a state can change its sign (Grazzi et al., 2024,
            "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues").
        bound: the logarithm of a decay is above this number; 0: it has no bound.
        sigmoid: gates are multiplied by the logistic function of their inputs; otherwise by silu.
    """

    kind: DeltaKind
    taps_KC: Tensor
    decay_H: Tensor
    bias_D: Tensor
    norm_V: Tensor
    eps: float
    most: float = 1.0
    bound: float = 0.0
    sigmoid: bool = False

    def decays(self, inputs_TD: Tensor) -> Tensor:
        """Logarithms of decays [T, H, elements of keys, or 1]."""
        shifted_THX = (inputs_TD + self.bias_D).unflatten(1, (self.kind.value_heads, -1))
        factor_H1 = self.decay_H.unsqueeze(1)
        if self.bound:
            return self.bound * (-factor_H1 * shifted_THX).sigmoid()
        return factor_H1 * F.softplus(shifted_THX)

    def gated(self, x: Tensor, gates: Tensor) -> Tensor:
        """Elements times the function of their gates."""
        return x * (gates.sigmoid() if self.sigmoid else F.silu(gates))

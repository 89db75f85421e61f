"""The weights of a Mamba layer."""

from typing import NamedTuple

from torch import Tensor

from kernels.layout import ChannelKind


class ChannelWeights(NamedTuple):
    """All in the dtype of arithmetic: float32, or float64 for inputs of float64.

    Attributes:
        kind: the sizes; K elements of B and C, C channels.
        rank: elements from which a matrix makes the inputs of steps.
        taps_KC, shift_C: of the convolution, the own token's last; its bias.
        rates_KC: below 0: A, the factors of a step that become the logarithms of the decays of a channel's states.
        bias_C: added before the softplus that makes a step.
        skip_C: D, the factor of what a channel reads of its own x.
        norms_E: the weights [2 K] of RMSNorms of B and of C; None: there are no norms.
        eps: of these norms.
    """

    kind: ChannelKind
    rank: int
    taps_KC: Tensor
    shift_C: Tensor
    rates_KC: Tensor
    bias_C: Tensor
    skip_C: Tensor
    norms_E: Tensor | None
    eps: float

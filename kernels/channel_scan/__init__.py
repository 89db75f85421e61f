"""Mamba's selective scans, channel by channel, over tree tokens: the fronts that check and pick an implementation."""

from torch import Tensor  # `torch` is the module beside this one

from kernels import checks
from kernels.channel_scan.weights import ChannelWeights
from kernels.layout import DeltaPaths

IMPLEMENTATIONS = ("reference", "torch", "cpp", "triton")


def channel_conv(
    x_TF: Tensor, weights: ChannelWeights, rows_RW: Tensor, paths: DeltaPaths, *, impl: str = "torch"
) -> Tensor:
    """The convolution before a `channel_scan`, and silu. It writes nothing: the scan keeps its inputs.

    Args:
        x_TF: of each token side by side: x and a gate for each of C channels.
        weights, rows_RW, paths, impl: as of `channel_scan`.

    Returns:
        [T, C] in the dtype of x.

    Raises:
        ValueError: as of `channel_scan`.
    """
    checks.implementation(impl, IMPLEMENTATIONS)
    checks.channel_conv(x_TF, weights, rows_RW, paths)
    return checks.module(__name__, impl).channel_conv(x_TF, weights, rows_RW, paths)


def channel_scan(
    x_TF: Tensor,
    convolved_TC: Tensor,
    low_TL: Tensor,
    steps_TC: Tensor,
    weights: ChannelWeights,
    rows_RW: Tensor,
    states_SHKV: Tensor,
    paths: DeltaPaths,
    *,
    impl: str = "torch",
) -> Tensor:
    """The state space layer of Mamba (Gu and Dao, 2023, "Mamba: Linear-Time Sequence Modeling with Selective State
    Spaces", algorithm 2), with the gates after it.

    A channel has a state s [K], and a rate A [K]. A token with x and a step d of the channel, and B and C [K] that all
    channels share, makes of its parent's state s' = exp(d A) s + d x B, and reads s' C + D x. The decays differ from
    element to element, so a token's state is computed from its block's first one by the block's tokens, one after
    another. Blocks are short, see `ChannelKind.block`.

    Args:
        x_TF: as of `channel_conv`; the gates are applied to what is read.
        convolved_TC: what `channel_conv` returns, x of the recurrence.
        low_TL: after `rank` elements, which this operator does not read, B and C [K] before their norms.
        steps_TC: d before its bias and softplus.
        weights: see there.
        rows_RW, states_SHKV, paths, impl: as of `kernels.delta_net.delta_net`, with rows of `ChannelKind.row`; so are
            what is returned and raised.
    """
    checks.implementation(impl, IMPLEMENTATIONS)
    checks.channel_scan(x_TF, convolved_TC, low_TL, steps_TC, weights, rows_RW, states_SHKV, paths)
    inputs = x_TF, convolved_TC, low_TL, steps_TC
    return checks.module(__name__, impl).channel_scan(*inputs, weights, rows_RW, states_SHKV, paths)

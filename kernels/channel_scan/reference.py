"""The definition of a scan by channels over a tree: token by token, each from the state at the beginning of its
block."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.channel_scan.weights import ChannelWeights
from kernels.layout import NULL_STATE, DeltaPaths


def channel_conv(x_TF: Tensor, weights: ChannelWeights, rows_RW: Tensor, paths: DeltaPaths) -> Tensor:
    """See the front for arguments."""
    kind, inputs_TC = weights.kind, x_TF[:, : weights.kind.channels].to(rows_RW.dtype)
    out_TC = x_TF.new_empty(len(x_TF), kind.channels)
    for t, inputs_C in enumerate(inputs_TC):
        above = paths.paths_TN[t, : kind.taps - 1].tolist()
        path_KC = torch.stack(
            [*(rows_RW[i, : kind.channels] if i >= 0 else inputs_TC[-1 - i] for i in reversed(above)), inputs_C]
        )
        out_TC[t] = F.silu((path_KC * weights.taps_KC).sum(0) + weights.shift_C)
    return out_TC


def channel_scan(
    x_TF: Tensor,
    convolved_TC: Tensor,
    low_TL: Tensor,
    steps_TC: Tensor,
    weights: ChannelWeights,
    rows_RW: Tensor,
    states_SHKV: Tensor,
    paths: DeltaPaths,
) -> Tensor:
    """See the front for arguments."""
    kind, wide = weights.kind, rows_RW.dtype
    K, C = kind.key_size, kind.channels
    out_TC, passed = x_TF.new_empty(len(x_TF), C), []

    def after(state_KC: Tensor, b_K: Tensor, written_C: Tensor, step_C: Tensor) -> Tensor:
        return (step_C * weights.rates_KC).exp() * state_KC + b_K.unsqueeze(1) * written_C

    for t, x_F in enumerate(x_TF.to(wide)):
        inputs_C, z_C = x_F.split(C)
        pair_2K = low_TL[t, -2 * K :].to(wide).view(2, K)
        if weights.norms_E is not None:
            pair_2K = pair_2K * torch.rsqrt(pair_2K.square().mean(1, True) + weights.eps) * weights.norms_E.view(2, K)
        (b_K, c_K), x_C = pair_2K, convolved_TC[t].to(wide)
        step_C = F.softplus(steps_TC[t].to(wide) + weights.bias_C)
        passed.append(torch.cat([inputs_C, b_K, step_C * x_C, step_C]))

        state_KC = states_SHKV[paths.bases_T[t], 0]
        for i in reversed(paths.paths_TN[t, : int(paths.lengths_T[t])].tolist()):
            row = rows_RW[i] if i >= 0 else passed[-1 - i]
            state_KC = after(state_KC, *row[C:].split([K, C, C]))
        state_KC = after(state_KC, *passed[-1][C:].split([K, C, C]))
        rows_RW[paths.rows_T[t]] = passed[-1]
        if (fold := int(paths.folds_T[t])) != NULL_STATE:
            states_SHKV[fold, 0] = state_KC
        out_TC[t] = ((c_K.unsqueeze(1) * state_KC).sum(0) + weights.skip_C * x_C) * F.silu(z_C)
    return out_TC

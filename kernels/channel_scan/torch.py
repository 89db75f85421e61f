"""Scans by channels in PyTorch: the tokens of a block that share its first state, generation by generation.

Shape legend: N tokens of a group, P rows that they read, A = P + N, M of these in one generation, K elements of B and
C, C channels.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.channel_scan.weights import ChannelWeights
from kernels.delta_net.groups import Group, groups_of
from kernels.delta_net.torch import convolved
from kernels.layout import DeltaPaths


def channel_conv(x_TF: Tensor, weights: ChannelWeights, rows_RW: Tensor, paths: DeltaPaths) -> Tensor:
    """See the front for arguments."""
    C = weights.kind.channels
    inputs_TC = x_TF[:, :C].to(rows_RW.dtype)
    mixed_TC = convolved(inputs_TC, weights.taps_KC, rows_RW[:, :C], paths.paths_TN)
    return F.silu(mixed_TC + weights.shift_C).to(x_TF.dtype)


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
    inputs_TC, z_TC = x_TF.to(wide).split(C, 1)
    pair_T2K, x_TC = low_TL[:, -2 * K :].to(wide).unflatten(1, (2, K)), convolved_TC.to(wide)
    if weights.norms_E is not None:
        pair_T2K = pair_T2K * torch.rsqrt(pair_T2K.square().mean(-1, True) + weights.eps)
        pair_T2K = pair_T2K * weights.norms_E.view(2, K)
    b_TK, c_TK = pair_T2K.unbind(1)
    step_TC = F.softplus(steps_TC.to(wide) + weights.bias_C)
    kept_TW, read_TC = torch.cat([inputs_TC, b_TK, step_TC * x_TC, step_TC], 1), torch.empty_like(x_TC)
    for group in groups_of(paths):
        n = group.tokens_N
        rows_AW = torch.cat([rows_RW[group.rows_P, C:], kept_TW[n, C:]])
        read_TC[n] = _block(group, states_SHKV, rows_AW, c_TK[n], weights.rates_KC)
    rows_RW[paths.rows_T] = kept_TW
    return ((read_TC + weights.skip_C * x_TC) * F.silu(z_TC)).to(x_TF.dtype)


def _block(group: Group, states_SHKV: Tensor, rows_AW: Tensor, c_NK: Tensor, rates_KC: Tensor) -> Tensor:
    """Returns what a group's tokens read, [N, C]; states are kept where blocks end."""
    P, (K, C) = len(group.rows_P), rates_KC.shape
    above_A, read_NC, kept = group.within_AA.sum(1) - 1, c_NK.new_empty(len(c_NK), C), dict[int, Tensor]()
    places_A, states_MKC = above_A.new_zeros(len(above_A)), states_SHKV[group.base]  # of the generation before
    for depth in range(int(above_A.max()) + 1):
        at_M = (above_A == depth).nonzero().squeeze(1)
        if depth:
            parents_M = (group.within_AA[at_M] & (above_A == depth - 1)).int().argmax(1)
            states_MKC = states_MKC[places_A[parents_M]]
        b_MK, written_MC, step_MC = rows_AW[at_M].split([K, C, C], 1)
        decayed_MKC = (step_MC.unsqueeze(1) * rates_KC).exp() * states_MKC
        states_MKC = decayed_MKC + b_MK.unsqueeze(2) * written_MC.unsqueeze(1)
        places_A[at_M] = torch.arange(len(at_M), device=at_M.device)
        own_M = at_M >= P
        tokens_M = at_M[own_M] - P
        read_NC[tokens_M] = (c_NK[tokens_M].unsqueeze(1) @ states_MKC[own_M]).squeeze(1)
        for i, slot in group.folds:
            if above_A[P + i] == depth:
                kept[slot] = states_MKC[places_A[P + i]]
    for slot, state_KC in kept.items():  # only now: one may take the place of the state that the others are made of
        states_SHKV[slot, 0] = state_KC
    return read_NC

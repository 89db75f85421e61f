"""Selective scans in PyTorch: all tokens of a block that share its first state at once.

By the duality of states and attention (Dao and Gu, 2024, "Transformers are SSMs", section 6), within a block a token
reads what its ancestors wrote, weighted by products of its C with their B; here the order is that of a tree.

Shape legend: N tokens of a group, P rows that they read, A = P + N, G groups of B and C, H heads, K and V sizes.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.delta_net.groups import Group, groups_of
from kernels.delta_net.torch import convolved, decays
from kernels.layout import DeltaPaths
from kernels.scan.weights import ScanWeights


def scan(x_TF: Tensor, weights: ScanWeights, rows_RW: Tensor, states_SHKV: Tensor, paths: DeltaPaths) -> Tensor:
    """See the front for arguments."""
    kind, T, wide = weights.kind, len(x_TF), rows_RW.dtype
    (H, K, V), C, G = kind.state, kind.channels, kind.key_heads
    z_TE, inputs_TC, d_TH = x_TF.to(wide).split([H * V, C, H], -1)
    mixed_TC = F.silu(convolved(inputs_TC, weights.taps_KC, rows_RW[:, :C], paths.paths_TN) + weights.shift_C)
    own_TE, b_TE, c_TE = mixed_TC.split([H * V, G * K, G * K], -1)
    step_TH = F.softplus(d_TH * weights.step + weights.bias_H).clamp(weights.least, weights.most)
    decay_TH, own_THV = weights.decay_H * step_TH, own_TE.view(T, H, V)
    written_THV, read_THV = step_TH.unsqueeze(-1) * own_THV, torch.empty_like(own_THV)
    for group in groups_of(paths):
        n, kept_PW = group.tokens_N, rows_RW[group.rows_P, C:]
        key, written, decay = kept_PW.split([G * K, H * V, H], -1)
        b_AGK = torch.cat([key, b_TE[n]]).view(-1, G, K)
        written_AHV = torch.cat([written.view(-1, H, V), written_THV[n]])
        c_NGK, decay_AH = c_TE[n].view(-1, G, K), torch.cat([decay, decay_TH[n]])
        read_THV[n] = _block(group, states_SHKV, c_NGK, b_AGK, written_AHV, decay_AH)
    rows_RW[paths.rows_T] = torch.cat([inputs_TC, b_TE, written_THV.flatten(1), decay_TH], -1)
    read_THV += weights.skip_H.unsqueeze(1) * own_THV
    gated_TE = read_THV.flatten(1) * F.silu(z_TE * weights.gate)
    if weights.norm_E is None:
        return gated_TE.to(x_TF.dtype)
    gated_TGE = gated_TE.view(T, G, -1)
    normed_TGE = gated_TGE * torch.rsqrt(gated_TGE.square().mean(-1, True) + weights.eps)
    return (normed_TGE.flatten(1) * weights.norm_E).to(x_TF.dtype)


def _block(
    group: Group, states_SHKV: Tensor, c_NGK: Tensor, b_AGK: Tensor, written_AHV: Tensor, decay_AH: Tensor
) -> Tensor:
    """Returns what a group's tokens read, [N, H, V]; states are kept where blocks end."""
    state_HKV, P = states_SHKV[group.base], len(group.rows_P)
    H = len(state_HKV)
    each = H // c_NGK.shape[1]
    since_HN1, between_HNA = decays(group, decay_AH, P)
    weights_GNA = c_NGK.transpose(0, 1) @ b_AGK.transpose(0, 1).mT
    weights_HNA = weights_GNA.repeat_interleave(each, 0) * between_HNA
    c_HNK, b_HAK = (x.transpose(0, 1).repeat_interleave(each, 0) for x in (c_NGK, b_AGK))
    written_HAV = written_AHV.transpose(0, 1)
    read_HNV = since_HN1 * (c_HNK @ state_HKV) + weights_HNA @ written_HAV
    folded = [
        since_HN1[:, i : i + 1] * state_HKV + (b_HAK * between_HNA[:, i, :, None]).mT @ written_HAV
        for i, _ in group.folds
    ]  # before any is kept: one may take the place of the state that the others are made of
    for (_, slot), after_HKV in zip(group.folds, folded, strict=True):
        states_SHKV[slot] = after_HKV
    return read_HNV.transpose(0, 1)

"""Gated delta nets in PyTorch: all tokens of a block that share its first state at once.

The u of a block's tokens solve a triangular system (Yang et al., 2024, "Parallelizing Linear Transformers with the
Delta Rule over Sequence Length", section 3.2); here, ordered by the tree, ancestors take the place of earlier tokens.

Shape legend: N tokens of a group, P rows that they read, A = P + N, G heads of keys, H heads of values, K and V sizes.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.delta_net.groups import Group, groups_of
from kernels.delta_net.weights import DeltaWeights
from kernels.layout import DeltaPaths


def delta_net(x_TF: Tensor, weights: DeltaWeights, rows_RW: Tensor, states_SHKV: Tensor, paths: DeltaPaths) -> Tensor:
    """See the front for arguments."""
    kind, T, wide = weights.kind, len(x_TF), rows_RW.dtype
    H, K, V = kind.state
    C, E, G = kind.channels, kind.key_heads * K, kind.key_heads
    inputs_TC, z_TE, b_TH, a_TH = x_TF.to(wide).split([C, H * V, H, H], -1)
    mixed_TC = F.silu(convolved(inputs_TC, weights.taps_KC, rows_RW[:, :C], paths.paths_TN))
    q_TGK, k_TGK = (x.reshape(T, G, K) for x in mixed_TC[:, : 2 * E].split([E, E], -1))
    q_TGK, k_TGK = (x * torch.rsqrt(x.square().sum(-1, True) + 1e-6) for x in (q_TGK, k_TGK))
    v_THV = mixed_TC[:, 2 * E :].reshape(T, H, V)
    decay_TH, beta_TH = weights.decay_H * F.softplus(a_TH + weights.bias_H), weights.most * b_TH.sigmoid()

    written_THV, out_THV = torch.empty_like(v_THV), torch.empty_like(v_THV)
    for group in groups_of(paths):
        n, kept_PW = group.tokens_N, rows_RW[group.rows_P, C:]
        key, written, decay = kept_PW.split([E, H * V, H], -1)
        k_AGK = torch.cat([key.view(-1, G, K), k_TGK[n]])
        own = q_TGK[n], v_THV[n], beta_TH[n]
        read = _block(group, states_SHKV, own, k_AGK, written.view(-1, H, V), torch.cat([decay, decay_TH[n]]))
        written_THV[n], out_THV[n] = read
    rows_RW[paths.rows_T] = torch.cat([inputs_TC, k_TGK.flatten(1), written_THV.flatten(1), decay_TH], -1)
    normed_THV = out_THV * torch.rsqrt(out_THV.square().mean(-1, True) + weights.eps) * weights.norm_V
    return (normed_THV.flatten(1) * F.silu(z_TE)).to(x_TF.dtype)


def convolved(inputs_TC: Tensor, taps_KC: Tensor, rows_RC: Tensor, paths_TN: Tensor) -> Tensor:
    """Sums of taps [K, C] times the inputs of tokens and of their ancestors, parts of rows, [T, C]."""
    sum_TC = inputs_TC * taps_KC[-1]
    for i in range(len(taps_KC) - 1):
        at_T = paths_TN[:, i]
        kept_TC, passed_TC = rows_RC.index_select(0, at_T.clamp(min=0)), inputs_TC[(-1 - at_T).clamp(min=0)]
        sum_TC = sum_TC + torch.where(at_T.unsqueeze(1) < 0, passed_TC, kept_TC) * taps_KC[-2 - i]
    return sum_TC


def decays(group: Group, decay_AH: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Returns the factors by which the block's first state, [H, N, 1], and what ancestors in the block wrote,
    [H, N, A], have decayed at each token. `decay_AH` are logarithms of the decays of `rows` rows, then of tokens."""
    # Logarithms of decays since the block's beginning; small differences of large ones lose digits in float32.
    since_HA = (group.within_AA.double() @ decay_AH.double()).T
    between_HNA = (since_HA[:, rows:, None] - since_HA[:, None, :]).to(decay_AH.dtype)
    between_HNA = between_HNA.masked_fill(~group.within_AA[rows:], float("-inf")).exp()
    return since_HA[:, rows:, None].to(decay_AH.dtype).exp(), between_HNA


def _block(
    group: Group,
    states_SHKV: Tensor,
    own: tuple[Tensor, Tensor, Tensor],
    k_AGK: Tensor,
    written_PHV: Tensor,
    decay_AH: Tensor,
) -> tuple[Tensor, Tensor]:
    """The u of a group's tokens and what they read, [N, H, V] both; states are kept where blocks end."""
    (q_NGK, v_NHV, beta_NH), P, state_HKV = own, len(written_PHV), states_SHKV[group.base]
    H, K, _ = state_HKV.shape
    q_HNK, k_HAK = (x.transpose(0, 1).repeat_interleave(H // x.shape[1], 0) for x in (q_NGK, k_AGK))
    k_HNK, beta_HN1 = k_HAK[:, P:], beta_NH.T.unsqueeze(-1)
    since_HN1, between_HNA = decays(group, decay_AH, P)

    told_HNA = beta_HN1 * between_HNA * (k_HNK @ k_HAK.mT)
    right_HNV = beta_HN1 * (v_NHV.transpose(0, 1) - since_HN1 * (k_HNK @ state_HKV))
    written_HPV = written_PHV.transpose(0, 1)
    right_HNV = right_HNV - told_HNA[:, :, :P] @ written_HPV
    written_HNV = torch.linalg.solve_triangular(told_HNA[:, :, P:], right_HNV, upper=False, unitriangular=True)
    written_HAV = torch.cat([written_HPV, written_HNV], 1)
    read_HNV = since_HN1 * (q_HNK @ state_HKV) + (between_HNA * (q_HNK @ k_HAK.mT)) @ written_HAV

    folded = [
        since_HN1[:, i : i + 1] * state_HKV + (k_HAK * between_HNA[:, i, :, None]).mT @ written_HAV
        for i, _ in group.folds
    ]  # before any is kept: one may take the place of the state that the others are made of
    for (_, slot), after_HKV in zip(group.folds, folded, strict=True):
        states_SHKV[slot] = after_HKV
    return written_HNV.transpose(0, 1), (read_HNV * K**-0.5).transpose(0, 1)

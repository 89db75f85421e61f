"""Gated delta nets in PyTorch: all tokens of a block that share its first state at once.

The u of a block's tokens solve a triangular system (Yang et al., 2024, "Parallelizing Linear Transformers with the
Delta Rule over Sequence Length", section 3.2); here, ordered by the tree, ancestors take the place of earlier tokens.

Shape legend: N tokens of a group, P rows that they read, A = P + N, G heads of keys, H heads of values, K and V sizes,
D decays: of heads, or of the K elements of each.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.delta_net.groups import Group, groups_of
from kernels.delta_net.weights import DeltaWeights
from kernels.layout import DeltaPaths

TOGETHER = 1 << 22  # most decays between tokens, of heads that are computed together; they take 80 MB


def delta_net(x_TF: Tensor, weights: DeltaWeights, rows_RW: Tensor, states_SHKV: Tensor, paths: DeltaPaths) -> Tensor:
    """See the front for arguments."""
    kind, T, wide = weights.kind, len(x_TF), rows_RW.dtype
    H, K, V = kind.state
    C, E, G = kind.channels, kind.key_heads * K, kind.key_heads
    inputs_TC, z_TE, b_TH, a_TD = x_TF.to(wide).split([C, H * V, H, kind.decays], -1)
    mixed_TC = F.silu(convolved(inputs_TC, weights.taps_KC, rows_RW[:, :C], paths.paths_TN))
    q_TGK, k_TGK = (x.reshape(T, G, K) for x in mixed_TC[:, : 2 * E].split([E, E], -1))
    q_TGK, k_TGK = (x * torch.rsqrt(x.square().sum(-1, True) + 1e-6) for x in (q_TGK, k_TGK))
    v_THV = mixed_TC[:, 2 * E :].reshape(T, H, V)
    log_TD, beta_TH = weights.decays(a_TD).flatten(1), weights.most * b_TH.sigmoid()
    decay_TD = log_TD.exp() if kind.key_decays else log_TD

    written_THV, out_THV = torch.empty_like(v_THV), torch.empty_like(v_THV)
    for group in groups_of(paths):
        n, kept_PW = group.tokens_N, rows_RW[group.rows_P, C:]
        key, written, decay = kept_PW.split([E, H * V, kind.decays], -1)
        k_AGK, decay_AD = torch.cat([key.view(-1, G, K), k_TGK[n]]), torch.cat([decay, decay_TD[n]])
        q_HNK, k_HAK = (x.transpose(0, 1).repeat_interleave(H // G, 0) for x in (q_TGK[n], k_AGK))
        v_HNV, beta_HN1 = v_THV[n].transpose(0, 1), beta_TH[n].T.unsqueeze(-1)
        decays_AHX, written_HPV = decay_AD.unflatten(1, (H, -1)), written.view(-1, H, V).transpose(0, 1)
        step = max(1, TOGETHER // (len(n) * len(k_AGK) * K)) if kind.key_decays else H
        for h in (slice(i, i + step) for i in range(0, H, step)):
            shares = (_shares_by_key if kind.key_decays else _shares)(group, q_HNK[h], k_HAK[h], decays_AHX[:, h])
            inputs = q_HNK[h], k_HAK[h], v_HNV[h], beta_HN1[h]
            read = _block(group, states_SHKV[:, h], shares, inputs, written_HPV[h])
            written_THV[n, h], out_THV[n, h] = (x.transpose(0, 1) for x in read)
    rows_RW[paths.rows_T] = torch.cat([inputs_TC, k_TGK.flatten(1), written_THV.flatten(1), decay_TD], -1)
    normed_THV = out_THV * torch.rsqrt(out_THV.square().mean(-1, True) + weights.eps) * weights.norm_V
    return weights.gated(normed_THV.flatten(1), z_TE).to(x_TF.dtype)


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


class _Shares(NamedTuple):
    """The shares that remain at each of a group's tokens, for some heads.

    Attributes:
        since_HNX: of the rows of the block's first state; X is their number, or 1 if all decay alike.
        by_key_HNA, by_query_HNA: products of keys, and of queries, with the keys of ancestors as far as these remain.
        folds: keys [H, K, A] as far as they remain at the tokens that end blocks.
    """

    since_HNX: Tensor
    by_key_HNA: Tensor
    by_query_HNA: Tensor
    folds: list[Tensor]


def _shares(group: Group, q_HNK: Tensor, k_HAK: Tensor, decays_AH1: Tensor) -> _Shares:
    """All elements of a head's keys decay alike; `decays_AH1` are logarithms."""
    P = len(group.rows_P)
    since_HN1, between_HNA = decays(group, decays_AH1.squeeze(-1), P)
    folds = [(k_HAK * between_HNA[:, i, :, None]).mT for i, _ in group.folds]
    by_key_HNA, by_query_HNA = (between_HNA * (x @ k_HAK.mT) for x in (k_HAK[:, P:], q_HNK))
    return _Shares(since_HN1, by_key_HNA, by_query_HNA, folds)


def _shares_by_key(group: Group, q_HNK: Tensor, k_HAK: Tensor, decays_AHK: Tensor) -> _Shares:
    """Each element of a head's keys has a decay."""
    P, (H, _, K) = len(group.rows_P), k_HAK.shape
    logs_AD = decays_AHK.flatten(1).clamp(min=torch.finfo(decays_AHK.dtype).tiny).log()
    since_DN1, between_DNA = decays(group, logs_AD, P)
    kept_HKNA = k_HAK.mT.unsqueeze(2) * between_DNA.unflatten(0, (H, K))
    by_key_HNA, by_query_HNA = (torch.einsum("hnk,hkna->hna", x, kept_HKNA) for x in (k_HAK[:, P:], q_HNK))
    folds = [kept_HKNA[:, :, i] for i, _ in group.folds]
    return _Shares(since_DN1.view(H, K, -1).mT, by_key_HNA, by_query_HNA, folds)


def _block(
    group: Group,
    states_SHKV: Tensor,
    shares: _Shares,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    written_HPV: Tensor,
) -> tuple[Tensor, Tensor]:
    """The u of a group's tokens and what they read, [H, N, V] both; states are kept where blocks end."""
    q_HNK, k_HAK, v_HNV, beta_HN1 = inputs
    P, state_HKV, K = len(group.rows_P), states_SHKV[group.base], k_HAK.shape[-1]
    told_HNA, since_HNX = beta_HN1 * shares.by_key_HNA, shares.since_HNX
    right_HNV = beta_HN1 * (v_HNV - (since_HNX * k_HAK[:, P:]) @ state_HKV) - told_HNA[:, :, :P] @ written_HPV
    written_HNV = torch.linalg.solve_triangular(told_HNA[:, :, P:], right_HNV, upper=False, unitriangular=True)
    written_HAV = torch.cat([written_HPV, written_HNV], 1)
    read_HNV = (since_HNX * q_HNK) @ state_HKV + shares.by_query_HNA @ written_HAV

    folded = [
        since_HNX[:, i, :, None] * state_HKV + kept_HKA @ written_HAV
        for (i, _), kept_HKA in zip(group.folds, shares.folds, strict=True)
    ]  # before any is kept: one may take the place of the state that the others are made of
    for (_, slot), after_HKV in zip(group.folds, folded, strict=True):
        states_SHKV[slot] = after_HKV
    return written_HNV, read_HNV * K**-0.5

"""The definition of a gated delta net over a tree: token by token, each from the state at the beginning of its
block."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.delta_net.weights import DeltaWeights
from kernels.layout import NULL_STATE, DeltaPaths


def delta_net(x_TF: Tensor, weights: DeltaWeights, rows_RW: Tensor, states_SHKV: Tensor, paths: DeltaPaths) -> Tensor:
    """See the front for arguments."""
    kind, wide = weights.kind, rows_RW.dtype
    H, K, V = kind.state
    parts = [kind.channels, kind.key_heads * K, H * V, kind.decays]
    out_TE, passed = x_TF.new_empty(len(x_TF), H * V), []

    def repeated(x: Tensor) -> Tensor:
        return x.view(-1, K).repeat_interleave(H // kind.key_heads, 0)

    def decayed(state_HKV: Tensor, kept_D: Tensor) -> Tensor:
        """A state after a decay, as a row has it."""
        return (kept_D if kind.key_decays else kept_D.exp()).view(H, -1, 1) * state_HKV

    for t, x_F in enumerate(x_TF.to(wide)):
        inputs_C, z_E, b_H, a_D = x_F.split([kind.channels, H * V, H, kind.decays])
        ancestors = [rows_RW[i] if i >= 0 else passed[-1 - i] for i in paths.paths_TN[t].tolist()]
        path_KC = torch.stack([*(row[: kind.channels] for row in reversed(ancestors[: kind.taps - 1])), inputs_C])
        q, k, v = F.silu((path_KC * weights.taps_KC).sum(0)).split([parts[1], parts[1], H * V])
        q_GK, k_GK = (x.view(-1, K) * torch.rsqrt(x.view(-1, K).square().sum(-1, True) + 1e-6) for x in (q, k))
        log_D, beta_H = weights.decays(a_D.unsqueeze(0)).flatten(), weights.most * b_H.sigmoid()
        decay_D = log_D.exp() if kind.key_decays else log_D

        state_HKV = states_SHKV[paths.bases_T[t]]
        for row in reversed(ancestors[: int(paths.lengths_T[t])]):
            _, key, written, decay = row.split(parts)
            outer_HKV = repeated(key).unsqueeze(2) * written.view(H, 1, V)
            state_HKV = decayed(state_HKV, decay) + outer_HKV
        state_HKV = decayed(state_HKV, decay_D)
        key_HK1 = repeated(k_GK).unsqueeze(2)
        written_HV = beta_H.unsqueeze(1) * (v.view(H, V) - (key_HK1 * state_HKV).sum(1))
        state_HKV = state_HKV + key_HK1 * written_HV.unsqueeze(1)
        mixed_HV = (repeated(q_GK).unsqueeze(2) * state_HKV).sum(1) * K**-0.5

        passed.append(torch.cat([inputs_C, k_GK.flatten(), written_HV.flatten(), decay_D]))
        rows_RW[paths.rows_T[t]] = passed[-1]
        if (fold := int(paths.folds_T[t])) != NULL_STATE:
            states_SHKV[fold] = state_HKV
        normed_HV = mixed_HV * torch.rsqrt(mixed_HV.square().mean(-1, True) + weights.eps) * weights.norm_V
        out_TE[t] = weights.gated(normed_HV.flatten(), z_E)
    return out_TE

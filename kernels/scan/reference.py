"""The definition of a selective scan over a tree: token by token, each from the state at the beginning of its block."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.layout import NULL_STATE, DeltaPaths
from kernels.scan.weights import ScanWeights


def scan(x_TF: Tensor, weights: ScanWeights, rows_RW: Tensor, states_SHKV: Tensor, paths: DeltaPaths) -> Tensor:
    """See the front for arguments."""
    kind, wide = weights.kind, rows_RW.dtype
    (H, K, V), G = kind.state, kind.key_heads
    out_TE, passed = x_TF.new_empty(len(x_TF), H * V), []

    def outer(key_E: Tensor, written_E: Tensor) -> Tensor:
        return key_E.view(G, K, 1).repeat_interleave(H // G, 0) * written_E.view(H, 1, V)

    for t, x_F in enumerate(x_TF.to(wide)):
        z_E, inputs_C, d_H = x_F.split([H * V, kind.channels, H])
        ancestors = [rows_RW[i] if i >= 0 else passed[-1 - i] for i in paths.paths_TN[t].tolist()]
        path_KC = torch.stack([*(row[: kind.channels] for row in reversed(ancestors[: kind.taps - 1])), inputs_C])
        mixed_C = F.silu((path_KC * weights.taps_KC).sum(0) + weights.shift_C)
        own_E, b_E, c_E = mixed_C.split([H * V, G * K, G * K])
        step_H = F.softplus(d_H * weights.step + weights.bias_H).clamp(weights.least, weights.most)
        decay_H, written_E = weights.decay_H * step_H, (step_H.unsqueeze(1) * own_E.view(H, V)).flatten()

        state_HKV = states_SHKV[paths.bases_T[t]]
        for row in reversed(ancestors[: int(paths.lengths_T[t])]):
            _, key, written, decay = row.split([kind.channels, G * K, H * V, H])
            state_HKV = decay.exp().view(H, 1, 1) * state_HKV + outer(key, written)
        state_HKV = decay_H.exp().view(H, 1, 1) * state_HKV + outer(b_E, written_E)
        query_HK1 = c_E.view(G, K, 1).repeat_interleave(H // G, 0)
        read_HV = (query_HK1 * state_HKV).sum(1) + weights.skip_H.unsqueeze(1) * own_E.view(H, V)

        passed.append(torch.cat([inputs_C, b_E, written_E, decay_H]))
        rows_RW[paths.rows_T[t]] = passed[-1]
        if (fold := int(paths.folds_T[t])) != NULL_STATE:
            states_SHKV[fold] = state_HKV
        out_E = read_HV.flatten() * F.silu(z_E * weights.gate)
        if weights.norm_E is not None:
            gated_GE = out_E.view(G, -1)
            normed_GE = gated_GE * torch.rsqrt(gated_GE.square().mean(-1, True) + weights.eps)
            out_E = normed_GE.flatten() * weights.norm_E
        out_TE[t] = out_E
    return out_TE

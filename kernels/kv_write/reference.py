"""The definition of a KV write: row by row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.kv_kinds import parts, stored
from kernels.kv_write.turn import HeadTransform
from kernels.rows import layer_norm, rms_norm, rotary
from kernels.rows.checks import Vectors


def kv_write(k_GSD: Tensor, v_GSD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor) -> None:
    """See the front for arguments."""
    for cache_GSD, new_TGD in ((k_GSD, k_TGD), (v_GSD, v_TGD)):
        for part, rows in zip(parts(cache_GSD), stored(new_TGD, cache_GSD.dtype), strict=True):
            for t, slot in enumerate(slots_T.tolist()):
                part[:, slot] = rows[t]


def rotary_write(
    k_GSD: Tensor, v_GSD: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor, turn: HeadTransform
) -> Tensor:
    """See the front for arguments."""

    def turned(x_THD: Tensor, norm: Vectors | None, angles: tuple[Tensor, ...]) -> Tensor:
        for rotated in (turn.norms_last, not turn.norms_last):
            if rotated and angles:
                x_THD = rotary(x_THD, *angles, impl="torch")
            if not rotated and norm is not None:
                rows = [x_THD.flatten(1)] if turn.all_heads else x_THD.unbind(1) if turn.own_norms else [x_THD]
                parts = zip(rows, *(_parts(vector, len(rows)) for vector in norm), strict=True)
                x_THD = torch.stack([normed(*part) for part in parts], 1).view(x_THD.shape)
        return x_THD

    def normed(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return rms_norm(rows, weight, turn.eps, impl="torch")
        return layer_norm(rows, weight, bias, turn.eps, impl="torch")

    if turn.value_norms:
        v_TGD = rms_norm(v_TGD, v_TGD.new_ones(v_TGD.shape[2]), turn.eps, impl="torch")
    kv_write(k_GSD, v_GSD, turned(k_TGD, turn.k_norm, turn.angles[:2]), v_TGD, slots_T)
    return turned(q_THD, turn.q_norm, turn.angles[-2:])


def _parts(vector: Tensor | None, count: int) -> Sequence[Tensor | None]:
    """A norm's vector for each of the rows that it is for."""
    return [None] * count if vector is None else vector.chunk(count)

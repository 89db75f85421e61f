"""The definition of the steps before and after tree attention with latents, in PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.kv_write import kv_write
from kernels.latent.packed import LatentHeads
from kernels.rows.reference import rms_norm, rotary


def absorb(queries_TF: Tensor, latent_TF: Tensor, heads: LatentHeads) -> Tensor:
    """See the front for arguments."""
    sizes = heads.sizes
    q_THN, turned_THR = queries_TF.unflatten(1, (sizes.heads, -1)).split([sizes.plain, sizes.rotated], -1)
    c_TC, key_TR = latent_TF.split([sizes.rank, sizes.rotated], -1)
    turned = torch.cat([turned_THR, key_TR.unsqueeze(1)], 1)
    if sizes.interleaved:
        turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    out = queries_TF.new_empty(len(queries_TF), sizes.heads + 1, sizes.width)
    out[..., : sizes.rotated] = turned
    heads.by_keys(q_THN, out[:, :-1, sizes.rotated :])
    out[:, -1, sizes.rotated :] = rms_norm(c_TC, heads.norm_C, sizes.eps)
    return out.flatten(1)


def absorb_and_write(
    k_GSD: Tensor,
    queries_TF: Tensor,
    latent_TF: Tensor,
    heads: LatentHeads,
    angles: Sequence[Tensor],
    slots_T: Tensor,
) -> Tensor:
    """See the front for arguments."""
    rows = absorb(queries_TF, latent_TF, heads).unflatten(1, (-1, heads.sizes.width))
    q_THD, key_TGD = rows.split([heads.sizes.heads, 1], 1)
    if angles:
        q_THD, key_TGD = rotary(q_THD, *angles[-2:]), rotary(key_TGD, *angles[:2])
    kv_write(k_GSD, k_GSD, key_TGD, key_TGD, slots_T, impl="reference")
    return q_THD


def expand(mixed_TF: Tensor, heads: LatentHeads) -> Tensor:
    """See the front for arguments."""
    sizes = heads.sizes
    return heads.by_values(mixed_TF.unflatten(1, (sizes.heads, -1))[..., sizes.rotated :]).flatten(1)

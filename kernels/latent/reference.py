"""The definition of what stands before and after tree attention with a latent, in PyTorch."""

import torch
from torch import Tensor

from kernels.latent.packed import LatentHeads
from kernels.rows.reference import rms_norm


def absorb(queries_TF: Tensor, latent_TF: Tensor, heads: LatentHeads) -> Tensor:
    """See the front for arguments."""
    sizes = heads.sizes
    q_THN, turned_THR = queries_TF.unflatten(1, (sizes.heads, -1)).split([sizes.plain, sizes.rotated], -1)
    c_TC, key_TR = latent_TF.split([sizes.rank, sizes.rotated], -1)
    turned = torch.cat([turned_THR, key_TR.unsqueeze(1)], 1)
    if sizes.interleaved:
        turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    made = [product(q_TN) for product, q_TN in zip(heads.keys, q_THN.unbind(1), strict=True)]
    rows = torch.stack([*made, rms_norm(c_TC, heads.norm_C, sizes.eps)], 1)
    return torch.cat([turned, rows], -1).flatten(1)


def expand(mixed_TF: Tensor, heads: LatentHeads) -> Tensor:
    """See the front for arguments."""
    sizes = heads.sizes
    c_THC = mixed_TF.unflatten(1, (sizes.heads, -1))[..., sizes.rotated :]
    made = [product(c_TC) for product, c_TC in zip(heads.values, c_THC.unbind(1), strict=True)]
    return torch.cat(made, -1)

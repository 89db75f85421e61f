"""The definitions of the operators on rows, in plain PyTorch: any device; what a compiler sees and fuses."""

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """See the front for arguments."""
    return F.rms_norm(x_NE, weight_E.shape, weight_E, eps)


def rotary(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """See the front for arguments."""
    dims = cos_TR.shape[-1]
    head = x_THD[..., :dims]
    out = head * cos_TR.unsqueeze(-2)
    (first, second), (out_first, out_second) = head.chunk(2, -1), out.chunk(2, -1)
    sin = sin_TR[:, None, : dims // 2]
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
    return out if dims == x_THD.shape[-1] else torch.cat((out, x_THD[..., dims:]), dim=-1)


def silu_mul(x_NM: Tensor) -> Tensor:
    """See the front for arguments."""
    gate, up = x_NM.chunk(2, -1)
    return F.silu(gate) * up

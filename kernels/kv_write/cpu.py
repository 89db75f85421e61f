"""KV writes in plain PyTorch: one indexed copy each for keys and values."""

import torch
from torch import Tensor


def kv_write(k_GSD: Tensor, v_GSD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor) -> None:
    """See the front for arguments."""
    k_GSD.index_copy_(1, slots_T, k_TGD.transpose(0, 1))
    v_GSD.index_copy_(1, slots_T, v_TGD.transpose(0, 1))


torch.library.custom_op("coppice::kv_write_cpu", kv_write, mutates_args=("k_GSD", "v_GSD"))


@torch.library.register_fake("coppice::kv_write_cpu")
def _(k_GSD, v_GSD, k_TGD, v_TGD, slots_T):
    return None

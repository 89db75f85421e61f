"""The definition of a KV write: row by row."""

import torch
from torch import Tensor

from kernels.kv_int8 import quantise


def kv_write(k_GSD: Tensor, v_GSD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor) -> None:
    """See the front for arguments."""
    if k_GSD.dtype == torch.int8:
        k_TGD, v_TGD = quantise(k_TGD), quantise(v_TGD)
    for t, slot in enumerate(slots_T.tolist()):
        k_GSD[:, slot] = k_TGD[t]
        v_GSD[:, slot] = v_TGD[t]

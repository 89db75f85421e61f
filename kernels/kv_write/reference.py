"""The definition of a KV write: row by row."""

from torch import Tensor


def kv_write(k_GSD: Tensor, v_GSD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor) -> None:
    """See the front for arguments."""
    for t, slot in enumerate(slots_T.tolist()):
        k_GSD[:, slot] = k_TGD[t]
        v_GSD[:, slot] = v_TGD[t]

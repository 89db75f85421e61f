"""Calls the C++ KV writes (kv_write.cpp): any dtype, a CPU."""

import ctypes

import torch
from torch import Tensor

from kernels.cpp import library, pointer


class Rows(ctypes.Structure):
    """In step with `Rows` in kv_write.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "row", "slots", "threads")),
        *((name, ctypes.c_int64) for name in ("k_token", "k_head", "v_token", "v_head")),
        ("slot_of", ctypes.c_void_p),
    )


def kv_write(k_GSD: Tensor, v_GSD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor) -> None:
    """See the front for arguments."""
    tensors = (k_GSD, v_GSD, k_TGD, v_TGD)
    if len({x.dtype for x in tensors}) > 1 or any(x.device.type != "cpu" for x in tensors):
        raise ValueError(f"impl 'cpp': expected one dtype on a CPU, got {[f'{x.dtype} on {x.device}' for x in tensors]}")
    if not (k_GSD.is_contiguous() and v_GSD.is_contiguous()):
        raise ValueError(f"impl 'cpp': expected a contiguous cache, got strides {k_GSD.stride()}, {v_GSD.stride()}")
    if k_TGD.stride(2) != 1 or v_TGD.stride(2) != 1:
        k_TGD, v_TGD = k_TGD.contiguous(), v_TGD.contiguous()
    (G, S, D), size = k_GSD.shape, k_GSD.itemsize
    rows = Rows(
        *(len(slots_T), G, D * size, S, torch.get_num_threads()),
        *(stride * size for stride in (k_TGD.stride(0), k_TGD.stride(1), v_TGD.stride(0), v_TGD.stride(1))),
        slots_T.data_ptr(),
    )
    library().coppice_kv_write(ctypes.byref(rows), pointer(k_GSD), pointer(v_GSD), pointer(k_TGD), pointer(v_TGD))


torch.library.custom_op("coppice::kv_write_cpp", kv_write, mutates_args=("k_GSD", "v_GSD"))


@torch.library.register_fake("coppice::kv_write_cpp")
def _(k_GSD, v_GSD, k_TGD, v_TGD, slots_T):
    return None

"""Calls the C++ KV writes (kv_write.cpp): any dtype, a CPU."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpp import function


def kv_write(k_GSD: Tensor, v_GSD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor) -> None:
    """See the front for arguments."""
    kinds = {(x.dtype, x.device.type) for x in (k_GSD, v_GSD, k_TGD, v_TGD)}
    if len(kinds) > 1 or (k_GSD.dtype, "cpu") not in kinds:
        raise ValueError(f"impl 'cpp': expected one dtype on a CPU, got {kinds}")
    if not (k_GSD.is_contiguous() and v_GSD.is_contiguous()):
        raise ValueError(f"impl 'cpp': expected a contiguous cache, got strides {k_GSD.stride()}, {v_GSD.stride()}")
    if k_TGD.stride(2) != 1 or v_TGD.stride(2) != 1:
        k_TGD, v_TGD = k_TGD.contiguous(), v_TGD.contiguous()
    (G, S, D), size = k_GSD.shape, k_GSD.itemsize
    function("coppice_kv_write", "ippppp" + "i" * 8)(
        torch.get_num_threads(),
        *(k_GSD.data_ptr(), v_GSD.data_ptr(), k_TGD.data_ptr(), v_TGD.data_ptr(), slots_T.data_ptr()),
        *(len(slots_T), G, S, D * size),
        *(stride * size for x in (k_TGD, v_TGD) for stride in x.stride()[:2]),
    )


def kv_copy(k_LGSD: Tensor, v_LGSD: Tensor, source: Sequence[int], target: Sequence[int]) -> None:
    """See the front for arguments."""
    (L, G, S, D), places = k_LGSD.shape, [array("q", slots) for slots in (source, target)]
    if (k_LGSD.shape, k_LGSD.dtype) != (v_LGSD.shape, v_LGSD.dtype) or not (
        k_LGSD.is_contiguous() and v_LGSD.is_contiguous()
    ):
        raise ValueError(f"impl 'cpp': expected two contiguous caches alike, got {k_LGSD.shape} and {v_LGSD.shape}")
    if len(source) != len(target) or min(*source, *target, 0) < 0 or max(*source, *target, 0) >= S:
        raise ValueError(f"expected slots below {S}, as many to read as to write, got {source} and {target}")
    function("coppice_kv_copy", "ippppiiii")(
        *(torch.get_num_threads(), k_LGSD.data_ptr(), v_LGSD.data_ptr(), *(x.buffer_info()[0] for x in places)),
        *(len(source), L * G, S, D * k_LGSD.itemsize),
    )


torch.library.custom_op("coppice::kv_write_cpp", kv_write, mutates_args=("k_GSD", "v_GSD"))


@torch.library.register_fake("coppice::kv_write_cpp")
def _(k_GSD, v_GSD, k_TGD, v_TGD, slots_T):
    return None

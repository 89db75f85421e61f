"""Calls the C++ KV writes (kv_write.cpp): any dtype, a CPU."""

from array import array
from collections.abc import Callable, Sequence

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
    function("kv_write")(
        torch.get_num_threads(),
        *(k_GSD.data_ptr(), v_GSD.data_ptr(), k_TGD.data_ptr(), v_TGD.data_ptr(), slots_T.data_ptr()),
        *(len(slots_T), G, S, D * size),
        *(stride * size for x in (k_TGD, v_TGD) for stride in x.stride()[:2]),
    )


def kv_copier(k_LGSD: Tensor, v_LGSD: Tensor) -> Callable[[Sequence[int], Sequence[int]], None]:
    """See the front for arguments. Of a cache everything is found out once, as copies are small and many."""
    (L, G, S, D), size = k_LGSD.shape, k_LGSD.itemsize
    if (k_LGSD.shape, k_LGSD.dtype) != (v_LGSD.shape, v_LGSD.dtype) or not (
        k_LGSD.is_contiguous() and v_LGSD.is_contiguous()
    ):
        raise ValueError(f"impl 'cpp': expected two contiguous caches alike, got {k_LGSD.shape} and {v_LGSD.shape}")
    run = function("kv_copy")

    def copy(source: Sequence[int], target: Sequence[int]) -> None:
        places, n = array("q", [*source, *target]), len(source)
        if len(places) != 2 * n or (n and not 0 <= min(places) <= max(places) < S):
            raise ValueError(f"expected slots below {S}, as many to read as to write, got {source} and {target}")
        address, _ = places.buffer_info()
        caches = k_LGSD.data_ptr(), v_LGSD.data_ptr()
        run(torch.get_num_threads(), *caches, address, address + 8 * n, n, L * G, S, D * size)

    return copy


torch.library.custom_op("coppice::kv_write_cpp", kv_write, mutates_args=("k_GSD", "v_GSD"))


@torch.library.register_fake("coppice::kv_write_cpp")
def _(k_GSD, v_GSD, k_TGD, v_TGD, slots_T):
    return None

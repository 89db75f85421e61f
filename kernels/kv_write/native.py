"""Calls the C++ KV writes (native.cpp): any dtype but FP8, into an int8 cache float32, bfloat16 and float16; a CPU."""

from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels import checks
from kernels.cpp import KINDS, address, function
from kernels.kv_kinds import SCALE_BYTES
from kernels.tracing import nothing, register


def kv_write(k_GSD: Tensor, v_GSD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor) -> None:
    """See the front for arguments."""
    checks.kv_write(k_GSD, v_GSD, k_TGD, v_TGD, slots_T)
    checks.native_cache(k_GSD)
    if k_TGD.stride(2) != 1 or v_TGD.stride(2) != 1:
        k_TGD, v_TGD = k_TGD.contiguous(), v_TGD.contiguous()
    (T, G, D), S, size, threads = k_TGD.shape, k_GSD.shape[1], k_TGD.itemsize, torch.get_num_threads()
    pointers = (x.data_ptr() for x in (k_GSD, v_GSD, k_TGD, v_TGD, slots_T))
    strides = (stride for x in (k_TGD, v_TGD) for stride in x.stride()[:2])
    if k_GSD.dtype == torch.int8:
        checks.native(k_TGD)
        fits = function("kv_write_int8")(KINDS[k_TGD.dtype], threads, *pointers, T, G, S, D, *strides)
    else:
        fits = function("kv_write")(threads, *pointers, T, G, S, D * size, *(stride * size for stride in strides))
    if not fits:
        checks.within("slots_T", slots_T.tolist(), S)


def kv_copier(k_LGSD: Tensor, v_LGSD: Tensor | None) -> Callable[[Sequence[int], Sequence[int]], None]:
    """See the front for arguments. What concerns the cache is looked up once: copies are small and many."""
    (L, G, S, D), size, scale = k_LGSD.shape, k_LGSD.itemsize, SCALE_BYTES.get(k_LGSD.dtype, 0)
    run = function("kv_copy")

    def copy(source: Sequence[int], target: Sequence[int]) -> None:
        checks.copies(source, target, S)
        slots, n = array("q", [*source, *target]), len(source)
        start, _ = slots.buffer_info()
        caches = k_LGSD.data_ptr(), address(v_LGSD)
        run(torch.get_num_threads(), *caches, start, start + 8 * n, n, L * G, S, D * size - scale, scale)

    return copy


register("kv_write_cpp", kv_write, nothing, mutates=("k_GSD", "v_GSD"))

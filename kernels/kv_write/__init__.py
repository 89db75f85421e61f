"""Writing the keys and values of a pass into their slots, and moving them to others: the fronts."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.cpp import watched, why_not
from kernels.kv_write import cpp, cpu, reference

Copier = Callable[[Sequence[int], Sequence[int]], None]
IMPLEMENTATIONS = ("reference", "cpu", "cpp", "triton")


def kv_write(k_GSD: Tensor, v_GSD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor, *, impl: str = "cpu") -> None:
    """Store key and value t in slot slots_T[t] of one layer's cache, in place.

    Args:
        k_GSD, v_GSD: one layer's cache.
        k_TGD, v_TGD: new rows, in the cache's dtype.
        slots_T: int64; distinct, but for padding tokens, which share TRASH_SLOT.
        impl: "reference" (the definition), "cpu" (fast PyTorch, any device), "cpp" (a C++ kernel, on a CPU) or "triton"
            (GPU kernels).

    Raises:
        ValueError: shapes that do not fit together, unknown impl, or what the implementation cannot do.
    """
    G, _, D = k_GSD.shape
    if k_TGD.shape != (slots_T.shape[0], G, D) or v_TGD.shape != k_TGD.shape:
        raise ValueError(f"expected rows {[slots_T.shape[0], G, D]}, got k {list(k_TGD.shape)}, v {list(v_TGD.shape)}")
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: expected one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if impl == "triton":
        from kernels.kv_write import triton  # absent on some machines, and slow to import

        run = torch.ops.coppice.kv_write_triton if torch.compiler.is_compiling() else triton.kv_write
    elif impl == "reference":
        run = reference.kv_write
    elif impl == "cpp":
        run = torch.ops.coppice.kv_write_cpp if watched() else cpp.kv_write
    else:
        run = torch.ops.coppice.kv_write_cpu if torch.compiler.is_compiling() else cpu.kv_write
    run(k_GSD, v_GSD, k_TGD, v_TGD, slots_T)


def kv_copier(k_LGSD: Tensor, v_LGSD: Tensor) -> Copier:
    """What copies the keys and values of slots (of the first list) to others, in all layers.

    All are read before any is written; slots that are written are distinct.

    Args:
        k_LGSD, v_LGSD: the whole cache, contiguous.
    """
    if k_LGSD.is_cpu and not why_not():
        return cpp.kv_copier(k_LGSD, v_LGSD)
    return partial(cpu.kv_copy, k_LGSD, v_LGSD)

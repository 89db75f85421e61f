"""Writing the keys and values of a pass into their slots, and copying them to other slots: the fronts."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, ops  # `torch` is the module beside this one

from kernels import checks
from kernels.cpp import why_not
from kernels.kv_fp8 import DTYPE as FP8
from kernels.kv_write import native, reference
from kernels.kv_write import torch as plain
from kernels.kv_write.turn import HeadTransform
from kernels.tracing import watched

Copier = Callable[[Sequence[int], Sequence[int]], None]
IMPLEMENTATIONS = ("reference", "torch", "cpp", "triton")


def kv_write(
    k_GSD: Tensor, v_GSD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor, *, impl: str = "torch"
) -> None:
    """Store key and value t in slot slots_T[t] of one layer's cache, in place.

    Args:
        k_GSD, v_GSD: one layer's cache, contiguous; of 8 bits: see `kernels.kv_kinds`.
        k_TGD, v_TGD: new rows, in the cache's dtype; floats, which are quantised, for an 8-bit cache; any strides.
        slots_T: int64, contiguous; distinct, except for padding tokens, which share TRASH_SLOT.
        impl: "reference" (the definition), "torch" (fast PyTorch, any device), "cpp" (C++, on a CPU, no FP8) or
            "triton" (GPU kernels).

    Raises:
        ValueError: tensors that do not fit together, slots out of range, unknown impl, or what the implementation
            cannot do. Slots on a GPU are not checked, because that would wait for the GPU: the code that makes them
            answers for them.
    """
    checks.implementation(impl, IMPLEMENTATIONS)
    if impl != "cpp":  # C++ checks them itself
        checks.kv_write(k_GSD, v_GSD, k_TGD, v_TGD, slots_T)
        if slots_T.is_cpu:
            checks.within("slots_T", slots_T.tolist(), k_GSD.shape[1])
    if impl == "triton":
        from kernels.kv_write import triton  # absent on some machines, and slow to import

        run = triton.kv_write
    elif impl == "reference":
        run = reference.kv_write
    elif impl == "cpp":
        run = ops.coppice.kv_write_cpp if watched() else native.kv_write
    else:
        run = plain.kv_write
    run(k_GSD, v_GSD, k_TGD, v_TGD, slots_T)


def rotary_write(
    k_GSD: Tensor,
    v_GSD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    slots_T: Tensor,
    turn: HeadTransform,
    *,
    impl: str = "reference",
) -> Tensor:
    """Norm and rotate query and key heads, and store keys and values like `kv_write`.

    Args:
        k_GSD, v_GSD, k_TGD, v_TGD, slots_T: see `kv_write`.
        q_THD: queries, in the dtype of k_TGD; any strides.
        turn: norms and angles.
        impl: "reference" (the definition) or "triton" (one launch); other implementations use separate operators.

    Returns:
        the queries, [T, H, D].

    Raises:
        ValueError: as `kv_write`.
    """
    if impl not in ("reference", "triton"):
        raise ValueError(f"impl: expected reference or triton, got {impl!r}")
    checks.kv_write(k_GSD, v_GSD, k_TGD, v_TGD, slots_T)
    checks.turn(q_THD, k_TGD, turn)
    if slots_T.is_cpu:
        checks.within("slots_T", slots_T.tolist(), k_GSD.shape[1])
    if impl == "reference":
        return reference.rotary_write(k_GSD, v_GSD, q_THD, k_TGD, v_TGD, slots_T, turn)
    from kernels.kv_write import triton  # absent on some machines, and slow to import

    return triton.rotary_write(k_GSD, v_GSD, q_THD, k_TGD, v_TGD, slots_T, turn)


def kv_copier(k_LGSD: Tensor, v_LGSD: Tensor | None = None) -> Copier:
    """Returns a function that copies the keys and values of slots (the first list) to other slots, in all layers.

    All are read before any is written; slots that are written are distinct.

    Args:
        k_LGSD, v_LGSD: the whole cache, contiguous; or one tensor of rows of another kind.

    Raises:
        ValueError: tensors differ or are not contiguous; when called, slots are out of range or the lists have
            different lengths.
    """
    checks.cache(k_LGSD, k_LGSD if v_LGSD is None else v_LGSD, "LGSD")
    if k_LGSD.is_cpu and k_LGSD.dtype != FP8 and not why_not():
        return native.kv_copier(k_LGSD, v_LGSD)
    return partial(plain.kv_copy, k_LGSD, v_LGSD)

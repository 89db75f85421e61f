"""Short causal convolutions of tree tokens over their ancestors: the front that checks and picks an implementation."""

from torch import Tensor, ops  # `torch` is the module beside this one

from kernels import checks
from kernels.short_conv import native, reference
from kernels.short_conv import torch as plain
from kernels.tracing import watched

IMPLEMENTATIONS = ("reference", "torch", "cpp", "triton")


def short_conv(
    x_TF: Tensor,
    weight_KE: Tensor,
    bias_E: Tensor | None,
    rows_SE: Tensor,
    slots_T: Tensor,
    ancestors_TN: Tensor,
    *,
    impl: str = "torch",
) -> Tensor:
    """The gated short convolution of LFM2: C * (bias + the sum of weights times inputs B * X, of a token's K - 1
    latest ancestors and its own), each element by itself; the inputs are kept in the cache, in place.

    As every token's input stays in its slot for as long as its keys and values do, nothing is copied for beams, and
    sequences that share a prefix share its inputs.

    Args:
        x_TF: B, C and X of each token side by side, F = 3 E; any strides.
        weight_KE: the own token's last, contiguous; with `bias_E` in the dtype of x. Arithmetic is float32 or better.
        rows_SE: one layer's cache, contiguous, of any floats. The inputs are rounded to it before anything reads them.
            NULL_SLOT holds zeros.
        slots_T: int64, contiguous; distinct, but for padding tokens, which share TRASH_SLOT.
        ancestors_TN: int64, contiguous, see `TreeLayout`; N = K - 1.
        impl: "reference" (the definition), "torch" (fast PyTorch, any device), "cpp" (C++, on a CPU) or "triton" (GPU
            kernels).

    Returns:
        [T, E] in the dtype of x.

    Raises:
        ValueError: tensors that do not fit together, slots out of range, unknown impl, or what the implementation
            cannot do. Slots on a GPU are not checked, because that would wait for the GPU: the code that makes them
            answers for them.
    """
    checks.implementation(impl, IMPLEMENTATIONS)
    checks.short_conv(x_TF, weight_KE, bias_E, rows_SE, slots_T, ancestors_TN)
    if slots_T.is_cpu and impl != "cpp":  # C++ checks them itself
        checks.within("slots_T", slots_T.tolist(), len(rows_SE))
        checks.within("ancestors_TN", ancestors_TN.flatten().tolist(), len(rows_SE))
    if impl == "triton":
        from kernels.short_conv import triton  # absent on some machines, and slow to import

        run = triton.short_conv
    elif impl == "reference":
        run = reference.short_conv
    elif impl == "cpp":
        run = ops.coppice.short_conv_cpp if watched() else native.short_conv
    else:
        run = plain.short_conv
    return run(x_TF, weight_KE, bias_E, rows_SE, slots_T, ancestors_TN)

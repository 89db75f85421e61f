"""Low-rank updates of matrix multiplications (LoRA, Hu et al., 2021): y += scale * (x A^T) B^T, where every row of a
pass may have a different adapter, or none."""

from torch import Tensor, device, int64  # `torch` is the module beside this one

from kernels import checks
from kernels.low_rank import native, reference
from kernels.low_rank import torch as plain
from kernels.low_rank.factors import Adapters, Factors, LowRank

__all__ = ["Adapters", "Factors", "LowRank", "low_rank"]

IMPLEMENTATIONS = ("reference", "torch", "cpp")


def low_rank(y_TO: Tensor, x_TI: Tensor, adapters: Adapters, adapters_T: Tensor, *, impl: str = "torch") -> None:
    """Add to the outputs of a matrix, in place, what each token's adapter makes of its input.

    Sums are float32 or better, and rounded once (in C++: once for 256 of the rank). In C++ a token's result does not
    depend on the tokens beside it.

    Args:
        y_TO: contiguous.
        x_TI: contiguous, of the dtype of y.
        adapters: of the matrix; for "cpp" in panels.
        adapters_T: int64, on the host: numbers of adapters.
        impl: "reference" (the definition), "torch" (any device) or "cpp" (C++, on a CPU).

    Raises:
        ValueError: tensors that do not fit together, unknown numbers or impl.
    """
    checks.implementation(impl, IMPLEMENTATIONS)
    checks.floats("x", x_TI, 2)
    T = len(x_TI)
    checks.expect("x", x_TI, x_TI.dtype, (T, adapters.width), x_TI.device)
    checks.expect("y", y_TO, x_TI.dtype, (T, adapters.outs), x_TI.device)
    checks.expect("adapters_T", adapters_T, int64, (T,), device("cpu"))
    checks.within("adapters_T", adapters_T.tolist(), len(adapters), "numbers")
    if impl == "cpp":
        checks.native(x_TI)
        native.low_rank(y_TO, x_TI, adapters.described(), adapters_T)
        return
    found = [adapter.unpacked() if adapter else [] for adapter in adapters.adapters]
    (reference if impl == "reference" else plain).low_rank(y_TO, x_TI, found, adapters_T)

"""Mixtures of experts: each token chooses a few of many gated MLPs and gets the weighted sum of what they make of it.

`routing.py` defines the choice, `reference.py` the whole. Rows of a pass are grouped by expert, so that an expert is
read once for all rows that chose it (native.cpp; `torch.grouped` for matrices that C++ does not multiply).
"""

from torch import Tensor
from torch.autograd.profiler import record_function

from kernels import checks
from kernels.experts import native, reference
from kernels.experts.keeper import Keeper, least_limit
from kernels.experts.packed import Expert, PackedExperts
from kernels.experts.routing import Routing, choose
from kernels.experts.torch import grouped
from kernels.tracing import watched

__all__ = ["Expert", "Keeper", "PackedExperts", "Routing", "choose", "experts", "grouped", "least_limit"]

IMPLEMENTATIONS = ("reference", "cpp")


def experts(x_TE: Tensor, mixture: PackedExperts, *, impl: str = "cpp") -> Tensor:
    """Adds up what the experts of each token make of it, weighted, in the order of its choice, the shared one last.

    A row's result does not depend on the rows beside it.

    Args:
        x_TE: float32, bfloat16 or float16, on a CPU. Products round to its dtype, sums are float32.
        mixture: the matrices and the rules.
        impl: "reference" (the definition, which also takes float64) or "cpp".

    Returns:
        [T, E] in the dtype of x.

    Raises:
        ValueError: rows of another width, or an impl that is not known.
    """
    checks.implementation(impl, IMPLEMENTATIONS)
    checks.floats("x_TE", x_TE, 2)
    if x_TE.shape[1] != mixture.width:
        raise ValueError(f"x_TE: expected a width of {mixture.width}, got {list(x_TE.shape)}")
    run = (native if impl == "cpp" else reference).experts
    if not watched():
        return run(x_TE, mixture)
    with record_function("coppice::experts"):  # no operator of torch.library: it has hundreds of tensors
        return run(x_TE, mixture)

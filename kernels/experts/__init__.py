"""Mixtures of experts: each token chooses a few of many MLPs and gets the weighted sum of their outputs.

`routing.py` defines the choice, `reference.py` the whole computation. Rows of a pass are grouped by expert, so each
expert is read once for all rows that chose it (native.cpp; triton.py; `torch.grouped` for matrices that C++ does not
multiply).
"""

from torch import Tensor, float32  # `torch` is the module beside this one
from torch.autograd.profiler import record_function

from kernels import checks
from kernels.experts import native, reference
from kernels.experts.keeper import Keeper, least_limit
from kernels.experts.packed import Expert, PackedExperts, check_groups
from kernels.experts.routing import Routing, choose
from kernels.experts.stacked import Stacked
from kernels.experts.torch import grouped
from kernels.rows import checks as checks_of_rows
from kernels.tracing import watched

__all__ = ["Expert", "Keeper", "PackedExperts", "Routing", "Stacked", "choose", "experts", "grouped", "least_limit"]
__all__ += ["routed"]

IMPLEMENTATIONS = ("reference", "cpp")
OF_ROUTED = ("reference", "triton")


def experts(x_TE: Tensor, mixture: PackedExperts, scored_TE: Tensor | None = None, *, impl: str = "cpp") -> Tensor:
    """The weighted sum of the outputs of each token's experts, in its order of choice, the shared expert last.

    A row's result does not depend on the other rows.

    Args:
        x_TE: float32, bfloat16 or float16, on a CPU. Matrix multiplications round to its dtype, sums are float32.
        mixture: the matrices and the rules.
        scored_TE: the router's input, which may have another width; None: x.
        impl: "reference" (the definition, which also takes float64) or "cpp".

    Returns:
        [T, E] in the dtype of x.

    Raises:
        ValueError: rows of another width, or an unknown impl.
    """
    checks.implementation(impl, IMPLEMENTATIONS)
    checks.floats("x_TE", x_TE, 2)
    if x_TE.shape[1] != mixture.width:
        raise ValueError(f"x_TE: expected a width of {mixture.width}, got {list(x_TE.shape)}")
    scored_TE = x_TE if scored_TE is None else scored_TE
    shape = len(x_TE), mixture.scored_width
    if (scored_TE.shape, scored_TE.dtype, scored_TE.device) != (shape, x_TE.dtype, x_TE.device):
        raise ValueError(f"scored_TE: expected {[*shape]} of {x_TE.dtype}, got {list(scored_TE.shape)}")
    run = (native if impl == "cpp" else reference).experts
    if not watched():
        return run(x_TE, mixture, scored_TE)
    with record_function("coppice::experts"):  # no operator of torch.library: it has hundreds of tensors
        return run(x_TE, mixture, scored_TE)


def routed(
    x_TE: Tensor,
    logits_TX: Tensor,
    up: Stacked,
    down: Stacked,
    routing: Routing,
    function: str,
    *,
    bias_X: Tensor | None = None,
    shared_TE: Tensor | None = None,
    gate_T1: Tensor | None = None,
    factors_X: Tensor | None = None,
    impl: str = "triton",
) -> Tensor:
    """`experts` for a GPU, given the outputs of the router and of the shared expert; nothing waits for the device.

    Args:
        x_TE: float32, bfloat16 or float16; the definition also takes float64.
        logits_TX: the router's output, in the dtype of x.
        up, down: matrices [2 M, E], the gate's outputs first, or [M, E] of MLPs without gates, and [E, M]; floats and
            biases in the dtype of x.
        routing, bias_X, factors_X: see `choose`.
        function: see `kernels.rows.activation_mul`.
        shared_TE: the shared expert's output, contiguous; None: there is none.
        gate_T1: logits, contiguous, whose sigmoids weight the shared expert; None: its weight is 1.
        impl: "reference" (the definition) or "triton".

    Returns:
        [T, E] in the dtype of x.

    Raises:
        ValueError: tensors that do not fit together, or an unknown impl.
    """
    checks.implementation(impl, OF_ROUTED)
    checks.floats("x_TE", x_TE, 2)
    (T, E), dtype, device = x_TE.shape, x_TE.dtype, x_TE.device
    X, inner = up.count, down.width
    gated = up.outs != inner
    if not gated and function in checks_of_rows.GATES:
        raise ValueError(f"function: expected one without a gate, got {function!r}")
    for name, matrix, shape in (("up", up, ((1 + gated) * inner, E)), ("down", down, (E, inner))):
        if (matrix.count, matrix.outs, matrix.width) != (X, *shape):
            raise ValueError(f"{name}: expected {X} matrices {[*shape]}, got {matrix}")
        for tensor in (matrix.table, matrix.bias):
            if isinstance(tensor, Tensor):
                checks.expect(name, tensor, dtype, (X * matrix.outs, *tensor.shape[1:]), device)
    if not 0 < routing.chosen <= X:
        raise ValueError(f"chosen: expected 1 to {X} experts, got {routing.chosen}")
    checks.expect("logits_TX", logits_TX, dtype, (T, X), device)
    for name, tensor in (("bias_X", bias_X), ("factors_X", factors_X)):
        if tensor is not None:
            checks.expect(name, tensor, float32, (X,), device)
    for name, tensor, width in (("shared_TE", shared_TE, E), ("gate_T1", gate_T1, 1)):
        if tensor is not None:
            checks.expect(name, tensor, dtype, (T, width), device)
    check_groups(routing, X)
    if impl == "reference":
        run = reference.routed
    else:
        from kernels.experts import triton  # absent on some machines, and slow to import

        run = triton.routed
    return run(x_TE, logits_TX, up, down, routing, function, bias_X, shared_TE, gate_T1, factors_X)

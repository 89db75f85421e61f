"""Row-wise operators, between the matrix multiplications of a layer and after the last layer: their fronts.

All take `impl`, the implementation of the pass (see `kernels.tree_attention`): "cpp" is C++, eager on a CPU, one pass
over the rows per operator; "triton" has GPU kernels for norms, activations and gates (one launch each), log_softmax and
top sums; "compiled" is PyTorch compiled by torch.compile, once for each operator of `kernels.tracing.FUSED`, dtype and
number of dimensions, for passes of two tokens or more; anything else is PyTorch, and so is every operator that an
implementation lacks. From `top_k` on, None chooses "cpp" for float32 on a CPU with C++ kernels, "triton" for float32 on
a GPU with triton, otherwise PyTorch.

A result is a new tensor of the first argument's shape and dtype, unless its docstring says otherwise.
All raise ValueError for tensors that do not fit together, the same for every implementation, and with impl "cpp" for
dtypes and devices that C++ does not have.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from kernels.rows import checks
from kernels.rows.checks import LogSoftmax, NextNodes, TopSums, Vectors
from kernels.rows.front import best, implementation, operator
from kernels.tracing import watched


@operator
def rms_norm(x_NE: Tensor, weight_E: Tensor, eps: float, *, impl: str) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, each row by itself (Zhang and Sennrich, 2019).

    Args:
        x_NE, weight_E: of one dtype, or the weight is float32; arithmetic is float32 or better.
    """
    ...


@operator
def layer_norm(x_NE: Tensor, weight_E: Tensor, bias_E: Tensor, eps: float, *, impl: str) -> Tensor:
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, each row by itself (Ba et al., 2016).

    Args:
        x_NE, weight_E, bias_E: of one dtype; arithmetic is float32 or better.
    """
    ...


@operator
def add_norm(
    x_NE: Tensor,
    addends: Sequence[Tensor],
    norm: Vectors | None,
    out_norm: Vectors | None = None,
    *,
    scale: float = 1.0,
    eps: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """The stream after a residual addition, and the input of the next part: x + the addends, each passed through
    `out_norm` and multiplied by `scale`, and the norm of this sum. Two addends are first added to each other.

    Every step is rounded to the dtype.

    Args:
        x_NE: the stream.
        addends: one, or two in layers whose parts run in parallel; like x.
        norm, out_norm: weight and bias, the bias None for an RMSNorm (see `rms_norm`, `layer_norm`); None: no norm.

    Returns:
        Both like x; the same tensor twice if there is no norm.
    """
    ...


@operator
def rotary(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, impl: str) -> Tensor:
    """Rotates the first R dims of each head, pairs i and i + R/2; dims past them pass through (Su et al., 2021).

    Args:
        x_THD: queries or keys.
        cos_TR, sin_TR: of each token's angles, both halves alike, in the dtype of x.
    """
    ...


@operator
def activation_mul(x_NM: Tensor, name: str, *, impl: str) -> Tensor:
    """A function of the first half of each row times the second half, [N, M / 2] (Shazeer, 2020).

    Args:
        x_NM: gates, then the values that they multiply.
        name: see `activation`; or "clamped_swiglu" (gpt-oss, OpenAI 2025): with the gate at most 7 and the other half
            from -7 to 7, "quick_gelu" of the gate times 1 + the other half.
    """
    ...


@operator
def activation(x_NM: Tensor, name: str, *, impl: str) -> Tensor:
    """A function of each element, in the dtype of x.

    Args:
        name: "relu", "gelu" (x times the normal distribution function; Hendrycks and Gimpel, 2016), "gelu_tanh" (its
            approximation), "silu", "quick_gelu" (x times the logistic function of 1.702 x), "tanh" or "relu_squared".
    """
    ...


@operator
def xielu(x_NM: Tensor, curve_4: Tensor, *, impl: str) -> Tensor:
    """A learned function of each element, in the dtype of x (xIELU; Huang and Schlag, 2024, "Deriving activation
    functions using integration"): a x^2 + s x of what is positive, b (exp(min(x, e)) - 1 - x) + s x of the rest.

    Args:
        curve_4: a, b, s and e, float32; e is a small negative number, or 0.
    """
    ...


@operator
def sparsify(x_NM: Tensor, factor: float, *, impl: str) -> Tensor:
    """Gates without most of their elements (Gemma Team, 2025, "Gemma 3n": a top-k of normally distributed elements, by
    their moments): each minus the row's mean and `factor` standard deviations, or 0 if that is negative.

    Args:
        x_NM: gates, then the values that they multiply, which stay; moments are float32 or better.
    """
    ...


@operator
def add_weighted(x_TNE: Tensor, more_TME: Tensor, weights_TF: Tensor, *, impl: str) -> Tensor:
    """x plus, of each token, weights times more: the updates of AltUp (Baykal et al., 2023, "Alternating updates for
    efficient transformers", algorithm 1).

    Args:
        x_TNE: at most `checks.MOST_ROWS` rows of a token.
        more_TME: other rows, or the same.
        weights_TF: N M of a token, those of each row of x together. All are of one dtype; arithmetic is float32 or
            better.
    """
    ...


@operator
def sigmoid_mul(x_NM: Tensor, gate_NM: Tensor, softplus: bool = False, *, impl: str) -> Tensor:
    """x times the sigmoid of gates (Qiu et al., 2025, "Gated attention", equation 5), or times log(1 + e^gate).

    Args:
        x_NM: rows.
        gate_NM: gates of the same shape, or fewer, each for as many elements side by side; in the dtype of x; rows
            need not be contiguous.
        softplus: whether the logarithm replaces the sigmoid.
    """
    ...


def log_softmax(
    x_NV: Tensor, size: int, *, impl: str, out: LogSoftmax | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probabilities of logits.

    Args:
        x_NV: logits; those from index `size` on are included in the normalisation.
        out: memory for the results, contiguous; peaks are needed if the implementation finds them. Triton writes there
            directly; others copy.

    Returns:
        Log-probabilities, float32 [N, V], -inf from index `size` on; whether all logits of a row are finite, bool [N];
        the peaks of each row, that is, the largest of each block of 128, float32 [N, B], or None if they would cost
        another pass.
    """
    checks.log_softmax(x_NV, size, out)
    run = implementation("log_softmax", impl)
    if out is None:
        return run(x_NV, size)
    if impl == "triton":
        return run(x_NV, size, out)
    logp_NV, finite_N, peaks_NB = run(x_NV, size)
    if peaks_NB is not None and out[2] is not None:
        peaks_NB = out[2].copy_(peaks_NB)
    return out[0].copy_(logp_NV), out[1].copy_(finite_N), peaks_NB


@operator
def top_k(x_NV: Tensor, k: int, *, impl: str | None = None) -> Tensor:
    """The k largest of each row, sorted, and their indices: float64 [N, 2, k], so that the host reads both at once.

    C++ breaks ties by the lower index; PyTorch breaks them in an unspecified way.

    Args:
        x_NV: the result for rows with NaN is undefined.
        k: from 0 to V.
    """
    ...


def top_sums(
    logp_NV: Tensor,
    sums: Sequence[float] | Tensor,
    k: int,
    peaks_NB: Tensor | None = None,
    *,
    impl: str | None = None,
) -> Tensor:
    """The k largest elements of all rows after adding a number to each row, in float32.

    Args:
        logp_NV: float32.
        sums: the number added to each row; a tensor must be float32 on their device.
        k: if larger than the number of elements, all are returned.
        peaks_NB: of these rows, without the sums, if they are known.

    Returns:
        float64 [2 * k + 1], so that the host reads all at once: the values, best first; their indices in the flattened
        rows; the best value that was left out. If some values are equal to the last, it is unspecified which of them
        PyTorch returned. C++ and Triton break ties by the lower index, so that their last number is inf. Triton leaves
        2^31 elements or more to PyTorch. With NaN among the elements the result is undefined.
    """
    checks.top_sums(logp_NV, sums, k, peaks_NB)
    impl = impl or best(logp_NV)
    if impl == "triton":
        return top_sums_of(logp_NV, [(slice(0, len(logp_NV)), TopSums(sums, k))], peaks_NB, impl=impl)[0]
    if impl == "cpp" and isinstance(sums, Tensor):
        sums = sums.tolist()
    return implementation("top_sums", impl)(logp_NV, sums, k, peaks_NB)


def top_sums_of(
    logp_NV: Tensor, wanted: Sequence[tuple[slice, TopSums]], peaks_NB: Tensor | None = None, *, impl: str | None = None
) -> list[Tensor]:
    """`top_sums` of ranges of rows, with indices into the flattened range; Triton finds all of them in one launch.

    Args:
        wanted: at least one, each with its rows from a start to an end.
        logp_NV, peaks_NB: see `top_sums`.
    """
    impl, (N, V) = impl or best(logp_NV), logp_NV.shape
    for rows, (sums, k) in wanted:
        checks.top_sums(logp_NV[rows], sums, k)
    if impl == "triton" and N * V < 1 << 31:
        from kernels.rows import triton  # absent on some machines, and slow to import

        checks.peaks(logp_NV, peaks_NB)
        return triton.top_sums_of(logp_NV, wanted, peaks_NB)
    impl = "torch" if impl == "triton" else impl
    return [
        top_sums(logp_NV[rows], sums, k, None if peaks_NB is None else peaks_NB[rows], impl=impl)
        for rows, (sums, k) in wanted
    ]


def next_nodes(
    numbers: Sequence[Tensor],
    wanted: Sequence[NextNodes],
    ancestry_TC: Tensor,
    vocab_size: int,
    *,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the nodes that follow the top sums of searches: the greatest whose tokens do not end a hypothesis, then,
    if these are too few, the greatest that do. Triton does this for all searches in one launch.

    Args:
        numbers: of each search, as `top_sums` returns them. Numbers that are not finite choose tokens that exist.
        ancestry_TC: int32, ancestry words of the tokens of the pass, see `kernels.layout`.
        vocab_size: V of the rows.

    Returns:
        For the n nodes of all searches, in order: their sums, float32 [n]; their tokens, integers [n]; the words of
        their parents, without slots that have been freed, int32 [n, C].
    """
    checks.next_nodes(numbers, wanted, ancestry_TC, vocab_size)
    return implementation("next_nodes", impl or "torch")(numbers, wanted, ancestry_TC, vocab_size)


def top_sums_of_logits(
    x_NV: Tensor, size: int, wanted: Sequence[TopSums], *, impl: str
) -> tuple[list[Tensor], list[bool]]:
    """The top sums of log-probabilities of logits; C++ computes only the log-probabilities that it reads.

    Args:
        x_NV: logits.
        size: see `log_softmax`.
        wanted: of ranges of rows, one after the other.

    Returns:
        for each range the finite sums, best first, and their positions in the flattened range, float64 [2, n], on the
        host; equal sums are ordered by position. And whether all logits of each row are finite.
    """
    checks.top_sums_of_logits(x_NV, size, wanted)
    if impl != "cpp" or not watched():
        return implementation("top_sums_of_logits", impl)(x_NV, size, wanted)
    (logp_NV, finite_N, peaks_NB), found, first = log_softmax(x_NV, size, impl=impl), [], 0  # as profilers see it
    for sums, k in wanted:
        rows = slice(first, first + len(sums))
        numbers_2K = top_sums(logp_NV[rows], sums, k, None if peaks_NB is None else peaks_NB[rows], impl=impl)[
            :-1
        ].view(2, -1)
        found.append(numbers_2K[:, : int((numbers_2K[0] > -math.inf).sum())])
        first += len(sums)
    return found, finite_N.tolist()


@operator
def at_least(
    logp_NV: Tensor, least: float, k: int, peaks_NB: Tensor | None = None, *, impl: str | None = None
) -> Tensor:
    """The first k elements of each row that are at least `least`, and their indices: float64 [N, 2, k].

    If there are fewer, the rest is NaN.

    Args:
        logp_NV: float32.
        k: from 0 to V.
        peaks_NB: of these rows, if they are known.
    """
    ...


@operator
def gumbel_argmax(logp_NV: Tensor, keys: Sequence[int], *, impl: str | None = None) -> Tensor:
    """The index of each row's largest sum of log-probability and Gumbel noise, the lowest among equals: int64 [N].

    This samples from the row (Gumbel-max; Maddison et al., 2014). The keys alone determine the noise: see
    `reference.gumbels`.

    Args:
        logp_NV: float32.
        keys: two 32-bit numbers for each row.
    """
    ...


@operator
def window_max(tape_P: Tensor, start_RW: Tensor, sum_RW: Tensor, width: int, *, impl: str | None = None) -> Tensor:
    """The largest sample of each row, float32 [R, N]: sample n of a window is tape[start + n] + sum.

    Args:
        tape_P: float32, random numbers that windows share.
        start_RW: int64, where on the tape each window begins.
        sum_RW: float32; a window with -inf is ignored.
        width: N, the samples of a window.
    """
    ...


@operator
def window_wins(tape_P: Tensor, start_RW: Tensor, sum_RW: Tensor, best_N: Tensor, *, impl: str | None = None) -> Tensor:
    """The number of samples in which each window is at least as large as the best, int64 [R, W]; see `window_max`.

    Args:
        best_N: float32; inf where no window can win.
    """
    ...

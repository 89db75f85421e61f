"""Gated delta nets over tree tokens: the front that checks and picks an implementation."""

from torch import Tensor  # `torch` is the module beside this one

from kernels import checks
from kernels.delta_net.weights import DeltaWeights
from kernels.layout import DeltaPaths

IMPLEMENTATIONS = ("reference", "torch", "cpp", "triton")


def delta_net(
    x_TF: Tensor,
    weights: DeltaWeights,
    rows_RW: Tensor,
    states_SHKV: Tensor,
    paths: DeltaPaths,
    *,
    impl: str = "torch",
) -> Tensor:
    """The gated delta net of Qwen3-Next (Yang, Kautz and Hatamizadeh, 2025, "Gated Delta Networks", equation 10), with
    the convolution before it and the gated norm after it.

    A head has a state S [K, V]. A token with query q, key k, value v, decay a and strength b makes of its parent's
    state S' = a S + k u^T with u = b (v - a S^T k), and reads S'^T q / sqrt(K). As S' is a S plus an outer product, the
    states of all descendants follow from one S and the k, u and a of the tokens between. These are kept as a row of
    each token; states are kept at the ends of blocks only, see `DeltaPaths`. So beams share states, and nothing is
    copied when they fork.

    With `DeltaKind.key_decays`, a is a vector [K], and a S has row i of S times its element i (Kimi Team, 2025, "Kimi
    Linear", equation 1). Rows then have decays; otherwise they have logarithms of decays, of which few are needed.

    Args:
        x_TF: of each token side by side: queries and keys of G heads [K], values of H heads [V], a gate for each of
            these elements, the logits of strengths and the inputs of decays for each of these heads; of decays of
            elements of keys, [K] for each head.
        weights: see there; queries, keys and values are convolved, then silu is applied, then queries and keys are
            divided by their lengths.
        rows_RW: one layer's rows, see `DeltaKind.row`, contiguous, in the dtype of the weights. NULL_SLOT holds zeros.
        states_SHKV: one layer's states, contiguous, of the same dtype. NULL_STATE holds zeros.
        paths: what is read and written.
        impl: "reference" (the definition), "torch" (fast PyTorch), "cpp" (C++, on a CPU) or "triton" (GPU kernels).

    Returns:
        [T, H * V] in the dtype of x.

    Raises:
        ValueError: tensors that do not fit together, rows or states out of range, unknown impl, or what the
            implementation cannot do. Paths on a GPU are not checked, because that would wait for the GPU: the code that
            makes them answers for them.
    """
    checks.implementation(impl, IMPLEMENTATIONS)
    checks.delta_net(x_TF, weights, rows_RW, states_SHKV, paths)
    return checks.module(__name__, impl).delta_net(x_TF, weights, rows_RW, states_SHKV, paths)

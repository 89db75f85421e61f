"""Multi-head latent attention (DeepSeek-AI, 2024, "DeepSeek-V2", section 2.1) in absorbed form: the steps before and
after tree attention. The front that checks and picks an implementation.

The keys and values of a head are matrices times the latent c of a token. A query q scores a key as q (K c) = (q K) c,
and the sum of values is V times the sum of latents. So queries are multiplied by K once, all heads read one row per
token (the latent with the rotated key), and the resulting sums of latents are multiplied by V::

    queries [H, N + R]  absorb  [H + 1, R + C]: queries, then the  tree attention  [H, R + C]  expand  [H, V]
    latent  [C + R]       ->    key, which is the value as well         ->                      ->

Shape legend: T tokens, H heads, N plain elements of a query, R rotated ones, C rank of the latent, V of values.
"""

from collections.abc import Sequence

from torch import Tensor

from kernels import checks
from kernels.latent import native, reference
from kernels.latent.packed import LatentHeads, Product

__all__ = ["LatentHeads", "Product", "absorb", "absorb_and_write", "expand"]

IMPLEMENTATIONS = ("reference", "cpp")


def absorb(queries_TF: Tensor, latent_TF: Tensor, heads: LatentHeads, *, impl: str = "cpp") -> Tensor:
    """Makes the queries and the key that tree attention reads, before they are rotated; norms the latent.

    A row's result does not depend on the rows beside it.

    Args:
        queries_TF: [T, H (N + R)], contiguous, of the dtype of the weights.
        latent_TF: [T, C + R], contiguous, likewise.
        heads: the weights.
        impl: "reference" (the definition) or "cpp" (float32, bfloat16 and float16, a CPU).

    Returns:
        [T, (H + 1) (R + C)], the key last. The halves of the rotated elements follow one another.

    Raises:
        ValueError: rows of other widths or dtypes, or an impl that is not known or cannot multiply such matrices.
    """
    checks.implementation(impl, IMPLEMENTATIONS)
    _check(queries_TF, latent_TF, heads)
    return (native if impl == "cpp" else reference).absorb(queries_TF, latent_TF, heads)


def absorb_and_write(
    k_GSD: Tensor,
    queries_TF: Tensor,
    latent_TF: Tensor,
    heads: LatentHeads,
    angles: Sequence[Tensor],
    slots_T: Tensor,
    *,
    impl: str = "reference",
) -> Tensor:
    """`absorb`, the rotation of queries and keys, and the writing of keys, which also serve as values.

    Args:
        k_GSD: one layer's cache, contiguous, of one head of R + C elements; of 8 bits: see `kernels.kv_kinds`.
        queries_TF, latent_TF, heads: as of `absorb`.
        angles: cos_TR and sin_TR of keys and queries, or of keys and then of queries, see `kernels.rows.rotary`; none:
            nothing is rotated.
        slots_T: see `kernels.kv_write.kv_write`.
        impl: "reference" (the definition) or "triton" (a batched matrix multiplication and one launch); other
            implementations use separate operators.

    Returns:
        the queries, [T, H, R + C].

    Raises:
        ValueError: tensors that do not fit together, slots out of range, or an impl that is not known or cannot reach
            them.
    """
    checks.implementation(impl, ("reference", "triton"))
    sizes, dtype = heads.sizes, queries_TF.dtype
    _check(queries_TF, latent_TF, heads)
    key_TGD = latent_TF.unsqueeze(1)
    checks.kv_write(k_GSD, k_GSD, key_TGD, key_TGD, slots_T)
    if len(angles) not in (0, 2, 4):
        raise ValueError(f"angles: expected 0, 2 or 4, got {len(angles)}")
    for x in angles:
        checks.expect("angles", x, dtype, (len(slots_T), sizes.rotated), slots_T.device, contiguous=False)
    if slots_T.is_cpu:
        checks.within("slots_T", slots_T.tolist(), k_GSD.shape[1])
    if impl == "reference":
        return reference.absorb_and_write(k_GSD, queries_TF, latent_TF, heads, angles, slots_T)
    from kernels.latent import triton  # absent on some machines, and slow to import

    return triton.absorb_and_write(k_GSD, queries_TF, latent_TF, heads, angles, slots_T)


def _check(queries_TF: Tensor, latent_TF: Tensor, heads: LatentHeads) -> None:
    sizes = heads.sizes
    checks.floats("queries_TF", queries_TF, 2)
    T, dtype, device = len(queries_TF), queries_TF.dtype, heads.norm_C.device
    checks.expect("queries_TF", queries_TF, dtype, (T, sizes.heads * (sizes.plain + sizes.rotated)), device)
    checks.expect("latent_TF", latent_TF, dtype, (T, sizes.rank + sizes.rotated), device)


def expand(mixed_TF: Tensor, heads: LatentHeads, *, impl: str = "cpp") -> Tensor:
    """Computes values from attention's sums of latents.

    Args:
        mixed_TF: [T, H (R + C)], contiguous, in the dtype of the weights; the rotated part is ignored.
        heads, impl: as of `absorb`, with the same errors.

    Returns:
        [T, H V].
    """
    checks.implementation(impl, IMPLEMENTATIONS)
    sizes = heads.sizes
    checks.floats("mixed_TF", mixed_TF, 2)
    shape = len(mixed_TF), sizes.heads * sizes.width
    checks.expect("mixed_TF", mixed_TF, mixed_TF.dtype, shape, heads.norm_C.device)
    return (native if impl == "cpp" else reference).expand(mixed_TF, heads)

"""Multi-head latent attention (DeepSeek-AI, 2024, "DeepSeek-V2", section 2.1), absorbed: what stands around tree
attention. The front that checks and picks an implementation.

The keys and values of a head are matrices times the latent c of a token. A query q scores a key as q (K c) = (q K) c,
and the values' sum is V times the sum of latents. So queries are multiplied by K once, all heads read one row of a
token, the latent with the key that is rotated, and what they make of the latents is multiplied by V::

    queries [H, N + R]  absorb  [H + 1, R + C]: queries, then the  tree attention  [H, R + C]  expand  [H, V]
    latent  [C + R]       ->    key, which is the value as well         ->                      ->

Shape legend: T tokens, H heads, N plain elements of a query, R rotated ones, C rank of the latent, V of values.
"""

from torch import Tensor

from kernels import checks
from kernels.latent import native, reference
from kernels.latent.packed import LatentHeads, Product

__all__ = ["LatentHeads", "Product", "absorb", "expand"]

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
        [T, (H + 1) (R + C)], the key last. The halves of what is rotated lie one after the other.

    Raises:
        ValueError: rows of other widths or dtypes, or an impl that is not known or cannot multiply such matrices.
    """
    checks.implementation(impl, IMPLEMENTATIONS)
    sizes = heads.sizes
    checks.floats("queries_TF", queries_TF, 2)
    T, dtype, device = len(queries_TF), queries_TF.dtype, heads.norm_C.device
    checks.expect("queries_TF", queries_TF, dtype, (T, sizes.heads * (sizes.plain + sizes.rotated)), device)
    checks.expect("latent_TF", latent_TF, dtype, (T, sizes.rank + sizes.rotated), device)
    return (native if impl == "cpp" else reference).absorb(queries_TF, latent_TF, heads)


def expand(mixed_TF: Tensor, heads: LatentHeads, *, impl: str = "cpp") -> Tensor:
    """Makes values of what attention made of latents.

    Args:
        mixed_TF: [T, H (R + C)], contiguous, of the dtype of the weights; what was rotated is left out.
        heads, impl: as of `absorb`, with what is raised.

    Returns:
        [T, H V].
    """
    checks.implementation(impl, IMPLEMENTATIONS)
    sizes = heads.sizes
    checks.floats("mixed_TF", mixed_TF, 2)
    shape = len(mixed_TF), sizes.heads * sizes.width
    checks.expect("mixed_TF", mixed_TF, mixed_TF.dtype, shape, heads.norm_C.device)
    return (native if impl == "cpp" else reference).expand(mixed_TF, heads)

"""The steps applied to query and key heads between their projection and the cache."""

from typing import NamedTuple

from torch import Tensor

from kernels.rows.checks import Vectors


class HeadTransform(NamedTuple):
    """The norms and rotations of the heads of queries and keys before keys are written.

    Args:
        angles: cos_TR and sin_TR of keys and queries, see `kernels.rows.rotary`; then those of queries, if they
            differ; (): nothing is rotated.
        q_norm, k_norm: of each head by itself, weight and bias [D], the bias None for an RMSNorm; both or None.
        eps: of the norms.
        norms_last: heads are normed after they are rotated, not before.
        all_heads: all query heads are normed as one row, and all key heads; vectors are [H * D] and [G * D].
        own_norms: each head is normed by a vector of its own; they lie one after the other, [H * D] and [G * D].
        value_norms: heads of values are normed, each by itself, by RMSNorms without weights.
    """

    angles: tuple[Tensor, ...] = ()
    q_norm: Vectors | None = None
    k_norm: Vectors | None = None
    eps: float = 0.0
    norms_last: bool = False
    all_heads: bool = False
    own_norms: bool = False
    value_norms: bool = False

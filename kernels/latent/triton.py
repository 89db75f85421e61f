"""Multi-head latent attention on a GPU: a batched matrix multiplication over all heads, and one launch for all other
steps before tree attention: queries and keys are rotated, the latent is normed, and the token's row is written into its
slot."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false
# (what triton.jit takes and gives is no function to a type checker)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import after_the_last, cast, check_device, inverse_root, launch, raw
from kernels.kv_write.triton import store_rows
from kernels.latent.packed import LatentHeads

ELEMENTS = 2048  # of queries that a program rotates


def absorb_and_write(
    k_GSD: Tensor,
    queries_TF: Tensor,
    latent_TF: Tensor,
    heads: LatentHeads,
    angles: Sequence[Tensor],
    slots_T: Tensor,
) -> Tensor:
    """See the front for arguments.

    Raises:
        ValueError: tensors that the kernel cannot reach.
    """
    check_device(k_GSD, queries_TF, latent_TF, slots_T)
    sizes, T, k_GSD = heads.sizes, len(slots_T), raw(k_GSD)
    H, N, R, C = sizes.heads, sizes.plain, sizes.rotated, sizes.rank
    out_THD = torch.empty(T, H, sizes.width, dtype=queries_TF.dtype, device=queries_TF.device)
    heads.by_keys(queries_TF.view(T, H, N + R)[..., :N], out_THD[..., R:])
    R2, turned = triton.next_power_of_2(R), [x.contiguous() for x in angles] or [heads.norm_C] * 2  # never read
    M = min(triton.next_power_of_2(H), max(1, ELEMENTS // R2))
    launch(_turn, T, 1 + triton.cdiv(H, M))(
        queries_TF, latent_TF, heads.norm_C, *turned[:2], *turned[-2:], k_GSD, out_THD, slots_T, k_GSD.stride(0),
        sizes.eps,
        H=H, N=N, R=R, R2=R2, C=C, D2=triton.next_power_of_2(R + C), M=M, PAIRS=sizes.interleaved, TURN=bool(angles),
    )  # fmt: skip
    return out_THD


@triton.jit
def _turn(
    q_ptr, latent_ptr, norm_ptr, cos_ptr, sin_ptr, q_cos_ptr, q_sin_ptr, k_ptr, out_ptr, slots_ptr, stride_kg, eps,
    H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, R2: tl.constexpr, C: tl.constexpr, D2: tl.constexpr,
    M: tl.constexpr, PAIRS: tl.constexpr, TURN: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """One token: what is rotated of M heads' queries; or, the first program, the row of its slot. Unless `TURN`, the
    elements are only brought into their order."""
    after_the_last(EARLY)
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    D: tl.constexpr = R + C
    if part == 0:
        d_D = tl.arange(0, D2)
        turned_D, plain_D = d_D < R, (d_D >= R) & (d_D < D)
        latent_ptr += t * D
        x_D = tl.load(latent_ptr + d_D - R, mask=plain_D, other=0.0).to(tl.float32)
        x_D *= inverse_root(tl.sum(x_D * x_D, 0) / C + eps)
        x_D *= tl.load(norm_ptr + d_D - R, mask=plain_D, other=0.0).to(tl.float32)
        at_1 = (latent_ptr + C)[None]
        key_1D = _rotated(at_1, cos_ptr + t * R, sin_ptr + t * R, d_D, turned_D[None, :], R, PAIRS, TURN)
        row_1D = cast(tl.where(turned_D[None, :], key_1D, x_D[None, :]), dtype)
        first_1 = tl.arange(0, 1)
        slot_1 = tl.load(slots_ptr + t + first_1)
        store_rows(row_1D, k_ptr, first_1, slot_1, stride_kg, first_1 == 0, D, D2)
    else:
        h_M, r_R = ((part - 1) * M + tl.arange(0, M)).to(tl.int64), tl.arange(0, R2)
        real_MR = (h_M < H)[:, None] & (r_R < R)[None, :]
        at_M = q_ptr + (t * H + h_M) * (N + R) + N
        q_MR = _rotated(at_M, q_cos_ptr + t * R, q_sin_ptr + t * R, r_R, real_MR, R, PAIRS, TURN)
        tl.store(out_ptr + ((t * H + h_M) * D)[:, None] + r_R[None, :], cast(q_MR, dtype), mask=real_MR)


@triton.jit
def _rotated(
    at_M, cos_ptr, sin_ptr, r_R, real_MR, R: tl.constexpr, PAIRS: tl.constexpr, TURN: tl.constexpr
):  # fmt: skip
    """Rows that begin at these places, rotated if `TURN`, in float32. Both halves of the result lie apart, wherever the
    elements that are rotated with each other lie."""
    x_MR = tl.load(at_M[:, None] + _place(r_R, R, PAIRS)[None, :], mask=real_MR, other=0.0).to(tl.float32)
    if not TURN:
        return x_MR
    first_R = r_R < R // 2
    other_R = tl.where(first_R, r_R + R // 2, r_R - R // 2)
    y_MR = tl.load(at_M[:, None] + _place(other_R, R, PAIRS)[None, :], mask=real_MR, other=0.0).to(tl.float32)
    cos_R = tl.load(cos_ptr + r_R, mask=r_R < R, other=0.0).to(tl.float32)
    sin_R = tl.load(sin_ptr + r_R, mask=r_R < R, other=0.0).to(tl.float32)
    return x_MR * cos_R[None, :] + y_MR * tl.where(first_R, -sin_R, sin_R)[None, :]


@triton.jit
def _place(r_R, R: tl.constexpr, PAIRS: tl.constexpr):
    """Where an element lies that belongs to place r of two halves."""
    if PAIRS:
        r_R = tl.where(r_R < R // 2, 2 * r_R, 2 * r_R - R + 1)
    return r_R

"""Experts in plain PyTorch: rows grouped by expert, so each expert is read once, with matrices of any format.

Shape legend: T tokens, E width, M inner width, K chosen experts of a token.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


def grouped(
    x_TE: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
    experts: Sequence[tuple[Product, Product]],
    activate: Callable[[Tensor], Tensor],
    on_inputs: bool = False,
) -> Tensor:
    """The weighted sum of the outputs of each token's chosen experts, in the order of the token's choice.

    Args:
        experts_TK, weights_TK: see `choose`.
        experts: products [T, E] -> [T, 2 M] and [T, M] -> [T, E].
        activate: [T, 2 M] -> [T, M].
        on_inputs: see `Routing`.

    Returns:
        [T, E] in the dtype of the weights.
    """
    (T, K), width = experts_TK.shape, x_TE.shape[1]
    order = experts_TK.flatten().argsort(stable=True)
    counts = experts_TK.flatten().bincount(minlength=len(experts)).tolist()
    made = torch.empty(T * K, width, dtype=weights_TK.dtype, device=x_TE.device)
    first = 0
    for (up, down), count in zip(experts, counts, strict=True):
        if count:
            places = order[first : first + count]
            read = x_TE[places // K]
            if on_inputs:
                read = (read * weights_TK.flatten()[places].unsqueeze(1)).to(read.dtype)
            made[places] = down(activate(up(read))).to(made.dtype)
            first += count
    sum_TE = torch.zeros(T, width, dtype=made.dtype, device=x_TE.device)
    for k, made_TE in enumerate(made.view(T, K, width).unbind(1)):
        sum_TE += made_TE if on_inputs else made_TE * weights_TK[:, k : k + 1]
    return sum_TE

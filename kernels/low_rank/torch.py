"""Low-rank updates in PyTorch, on any device: the tokens of an adapter together."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def low_rank(y_TO: Tensor, x_TI: Tensor, adapters: Sequence[Sequence[Any]], adapters_T: Tensor) -> None:
    """See the front for arguments; `adapters` are the `Factors` of each number."""
    wide = torch.promote_types(x_TI.dtype, torch.float32)
    for number in adapters_T.unique().tolist():
        if not adapters[number]:
            continue
        rows_N = (adapters_T == number).nonzero().squeeze(1).to(x_TI.device)
        x_NI = x_TI[rows_N].to(wide)
        for first, a_RI, b_OR, scale in adapters[number]:
            y_TP = y_TO[:, first : first + len(b_OR)]
            added_NP = (x_NI @ a_RI.to(wide).T * scale) @ b_OR.to(wide).T
            y_TP[rows_N] = (y_TP[rows_N].to(wide) + added_NP).to(y_TO.dtype)

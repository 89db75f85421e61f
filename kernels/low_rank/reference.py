"""The definition of low-rank updates: token by token."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def low_rank(y_TO: Tensor, x_TI: Tensor, adapters: Sequence[Sequence[Any]], adapters_T: Tensor) -> None:
    """See the front for arguments; `adapters` are the `Factors` of each number."""
    wide = torch.promote_types(x_TI.dtype, torch.float32)
    for t, number in enumerate(adapters_T.tolist()):
        for first, a_RI, b_OR, scale in adapters[number]:
            y_O = y_TO[t, first : first + len(b_OR)]
            y_O.copy_(y_O.to(wide) + scale * (b_OR.to(wide) @ (a_RI.to(wide) @ x_TI[t].to(wide))))

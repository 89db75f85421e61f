"""Calls the C++ low-rank updates (native.cpp): float32, bfloat16 and float16, a CPU."""

import torch
from torch import Tensor

from kernels.cpp import KINDS, function


def low_rank(y_TO: Tensor, x_TI: Tensor, adapters: int, adapters_T: Tensor) -> None:
    """See the front for arguments; `adapters` is the address of a table of `LowRank`."""
    pointers = adapters, adapters_T.data_ptr(), x_TI.data_ptr(), y_TO.data_ptr()
    function("low_rank")(KINDS[x_TI.dtype], torch.get_num_threads(), *pointers, len(x_TI))

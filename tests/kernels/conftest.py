"""The C++ products of a few rows on processors that have them, and in float32 wherever there are C++ kernels."""

from collections.abc import Callable

import pytest
import torch

from kernels import cpp, linear

NEEDS = {torch.bfloat16: "AVX512-BF16", torch.int8: "AVX512-VNNI"}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.dtype], None]:
    """A function that skips the test where there are no C++ products of a dtype.

    The float32 products run on every processor, but read matrices as oneDNN packs them for AVX-512; for the others the
    test packs them itself.
    """
    matrices = []  # the products keep addresses only

    def panels(_packed: torch.Tensor, weight_OI: torch.Tensor) -> int:
        if weight_OI.dtype != torch.float32:
            return 0
        outs, width = weight_OI.shape
        whole = torch.zeros(-(-outs // linear.PANEL) * linear.PANEL, -(-width // linear.STEP) * linear.STEP)
        whole[:outs, :width] = weight_OI
        matrices.append(whole.view(-1, linear.PANEL, whole.shape[1]).transpose(1, 2).contiguous())
        monkeypatch.setitem(linear._PACKED, matrices[-1].data_ptr(), (torch.float32, outs, width))
        return matrices[-1].data_ptr()

    def need(dtype: torch.dtype) -> None:
        if cpp.why_not():
            pytest.skip(f"no C++ kernels: {cpp.why_not()}")
        if dtype in linear.dtypes():
            return
        if dtype != torch.float32:
            pytest.skip(f"no C++ products of {dtype} for few rows: they need {NEEDS[dtype]}")
        monkeypatch.setattr("models.floats.panels", panels)

    return need

"""Linear layers on floats: what panels keep, and weights that oneDNN packed where there are no kernels."""

import sys

import pytest
import torch

from kernels import cpp
from models import trim as memory
from models.checkpoint.headers import Checkpoint
from models.checkpoint.tensor_files import write_tensors
from models.formats import floats
from models.formats.floats import FloatLinear, can_pack, padded_rows, stored_dtype

HOST = torch.device("cpu")


def test_products_meet_few_numbers_of_rows() -> None:
    """Each is a primitive that oneDNN compiles and keeps."""
    for rows in range(1, 2049):
        assert rows <= padded_rows(rows) <= max(16, 1.3 * rows), rows
    assert len({padded_rows(rows) for rows in range(1, 257)}) <= 40
    assert all(padded_rows(rows) == rows for rows in (1, 4, 15, 16, 24, 48, 128, 256, 512))


@pytest.mark.skipif(not can_pack(torch.float32, HOST), reason="no oneDNN on this processor")
@pytest.mark.parametrize("shape", [(1,), (15,), (17,), (35,), (2, 50), (255,)])
def test_added_rows_change_nothing(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floats, "has_kernels", lambda *_: False)
    weight_OE, bias_O, x = torch.randn(48, 32), torch.randn(48), torch.randn(*shape, 32)
    layer = FloatLinear([weight_OE], [bias_O], dtype=torch.float32, device=HOST)
    got = layer(x)
    assert layer.blocked
    assert got.shape == (*shape, 48) and got.is_contiguous()
    torch.testing.assert_close(got, x @ weight_OE.T + bias_O)


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.skipif(bool(cpp.why_not()), reason=f"no C++ kernels: {cpp.why_not()}")
@pytest.mark.parametrize("own", HALVES, ids=str)
def test_weights_of_half_precision_stay_as_they_are_in_float32(own: torch.dtype) -> None:
    weights = [torch.randn(48, 32).to(own), torch.randn(20, 32).to(own)]
    layer = FloatLinear(weights, dtype=torch.float32, device=HOST)
    full = FloatLinear([weight.float() for weight in weights], dtype=torch.float32, device=HOST)
    assert layer.packed is not None and layer.packed.dtype == own
    x = torch.randn(9, 32)
    assert layer(x).dtype == torch.float32 and layer(x).equal(full(x))


def test_the_dtype_that_weights_are_kept_in() -> None:
    for own in HALVES:
        assert stored_dtype({own}, torch.float32) == own
        assert stored_dtype({own}, torch.bfloat16) == torch.bfloat16
        assert stored_dtype({own, torch.float32}, torch.float32) == torch.float32
    assert stored_dtype(set(HALVES), torch.float32) == torch.float32
    assert stored_dtype({torch.float64}, torch.float32) == torch.float32


def test_pages_of_files_alone_are_let_go(tmp_path):
    """Blocks are the rows of the matrices; memory that no file backs keeps its values."""
    weight = torch.arange(memory.WORTHWHILE // 4 + 4096, dtype=torch.float32).view(-1, 512)
    with (tmp_path / "model.safetensors").open("wb") as file:
        write_tensors(file, {"w": weight})
    (tmp_path / "config.json").write_text("{}")
    mapped = Checkpoint.open(tmp_path).read(["w"])["w"]
    assert memory.is_mapped(mapped) == (sys.platform == "linux") and not memory.is_mapped(weight)
    for kept in (mapped, weight):
        assert torch.equal(torch.cat([block.clone() for block in floats.blocks([kept])]), weight)
        assert kept.sum() > 0 and torch.equal(kept, torch.arange(weight.numel(), dtype=torch.float32).view(-1, 512))

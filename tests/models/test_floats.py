"""Linear layers on weights that oneDNN packed."""

import pytest
import torch

from models.floats import FloatLinear, can_pack, padded_rows

HOST = torch.device("cpu")


def test_products_meet_few_numbers_of_rows() -> None:
    """Each is a primitive that oneDNN compiles and keeps."""
    for rows in range(1, 2049):
        assert rows <= padded_rows(rows) <= max(16, 1.3 * rows), rows
    assert len({padded_rows(rows) for rows in range(1, 257)}) <= 40
    assert all(padded_rows(rows) == rows for rows in (1, 4, 15, 16, 24, 48, 128, 256, 512))


@pytest.mark.skipif(not can_pack(torch.float32, HOST), reason="no oneDNN on this processor")
@pytest.mark.parametrize("shape", [(1,), (15,), (17,), (35,), (2, 50), (255,)])
def test_added_rows_change_nothing(shape: tuple[int, ...]) -> None:
    weight_OE, bias_O, x = torch.randn(48, 32), torch.randn(48), torch.randn(*shape, 32)
    layer = FloatLinear([weight_OE], [bias_O], dtype=torch.float32, device=HOST)
    got = layer(x)
    assert got.shape == (*shape, 48) and got.is_contiguous()
    torch.testing.assert_close(got, x @ weight_OE.T + bias_O)

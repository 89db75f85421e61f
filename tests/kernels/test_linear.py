"""Products of a few rows with oneDNN's packed matrices: against oneDNN's own, and what they are not for."""

import pytest
import torch

from kernels import cpp, linear
from models.floats import FloatLinear
from models.int8 import Int8Linear

CPU = torch.device("cpu")
SIZES = [(64, 16), (1, 32), (100, 72), (130, 4), (768, 256), (257, 1000), (100, 512), (65, 2048)]
SHAPES = pytest.mark.parametrize(("outs", "width"), SIZES)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@SHAPES
def test_as_exact_as_onednn(products, dtype, bias, outs, width):
    products(dtype)
    biases = [draw(outs, seed=2)] if bias else None
    layer = FloatLinear([draw(outs, width, seed=1)], biases, dtype=dtype, device=CPU)
    if outs >= linear.PANEL:
        assert layer.address, "oneDNN packs in another way here: these products are of no use"
    weight = draw(outs, width, seed=1).to(dtype).double()
    for count in (1, 2, 7, 8, 14, 15, 16, 29, linear.MAX_ROWS):
        x = draw(count, width, seed=10 + count).to(dtype)
        exact = x.double() @ weight.T + (layer.bias.double() if bias else 0)
        theirs = torch.ops.mkldnn._linear_pointwise(x, layer.weights[0], layer.bias, "none", [], "")
        allowed = 2 * (theirs.double() - exact).abs().max() + 2e-6 * width**0.5
        assert layer(x).dtype == dtype and (layer(x).double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@SHAPES
def test_int8_is_onednns_but_for_the_last_rounding(products, dtype, bias, outs, width):
    products(torch.int8)
    biases = [draw(outs, seed=2)] if bias else None
    layer = Int8Linear([draw(outs, width, seed=1)], biases, dtype=dtype, device=CPU)
    assert layer.address or outs < linear.PANEL
    for count in (1, 15, linear.MAX_ROWS):
        x = draw(count, width, seed=10 + count).to(dtype)
        ours = layer(x)
        address, layer.address = layer.address, 0
        theirs = layer(x)
        layer.address = address
        allowed = 4 * torch.finfo(dtype).eps * theirs.double().abs().max()
        assert ours.dtype == dtype and (ours.double() - theirs.double()).abs().max() <= allowed


@pytest.mark.parametrize("dtype", cpp.KINDS, ids=str)
@pytest.mark.skipif(bool(cpp.why_not()), reason=f"no C++ kernels: {cpp.why_not()}")
def test_quantize(dtype):
    for width in (1, 16, 50):
        x = draw(9, width).to(dtype)
        (steps, top), (found, most) = linear.quantize(x, impl="torch"), linear.quantize(x, impl="cpp")
        assert top.equal(most) and (steps.int() - found.int()).abs().max() <= 1
        assert (steps != found).double().mean() < 0.02  # where a product with 127 / top rounds on either side of a half


def test_rows_do_not_depend_on_their_number(products):
    """Or a draft's tokens would not be those of plain decoding, to the bit."""
    products(torch.float32)
    layer, x = FloatLinear([draw(96, 64)], dtype=torch.float32, device=CPU), draw(linear.MAX_ROWS, 64, seed=1)
    whole = layer(x)
    for count in (1, 7, 15, 16, 49, 100):
        assert layer(x[:count]).equal(whole[:count])
    assert layer(x.view(2, -1, 64)).equal(whole.view(2, -1, 96))


@pytest.mark.skipif(torch.float32 not in linear.dtypes(), reason="oneDNN packs in panels of 64 with AVX-512 only")
def test_a_matrix_that_lies_otherwise_is_left_to_onednn():
    weight = draw(128, 64)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    assert linear.panels(packed, weight) == torch.ops.mkldnn.data_ptr(packed)
    assert linear.panels(packed, weight.roll(1)) == 0
    assert linear.panels(packed, torch.cat([weight[:127], weight[:1]])) == 0  # looks at the last panel too
    assert linear.panels(packed, draw(128, 63)) == 0 and linear.panels(packed, draw(4096, 64)) == 0
    odd = draw(64, 33).bfloat16()  # half a word is left over
    assert linear.panels(torch.ops.mkldnn._reorder_linear_weight(odd, 16), odd) == 0


def test_many_rows_are_left_to_onednn(products, monkeypatch):
    products(torch.float32)
    layer = FloatLinear([draw(64, 64)], dtype=torch.float32, device=CPU)
    monkeypatch.setattr("models.floats.linear", lambda *_: pytest.fail("not for so many rows"))
    assert layer(draw(linear.MAX_ROWS + 1, 64)).shape == (linear.MAX_ROWS + 1, 64)


@pytest.mark.parametrize("x", [draw(2, 65), draw(2, 64).bfloat16()], ids=["width", "dtype"])
def test_rows_that_do_not_fit_are_an_error(products, x):
    products(torch.float32)
    layer = FloatLinear([draw(64, 64)], dtype=torch.float32, device=CPU)
    with pytest.raises(RuntimeError):
        layer(x)

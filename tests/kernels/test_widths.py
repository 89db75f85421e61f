"""The widths of registers, followed through the calls of layers."""

from types import SimpleNamespace

import pytest
import torch

from kernels.linear import Packed
from kernels.stack import Matrix
from kernels.stack.calls import REGISTERS, Call, Heads
from kernels.stack.widths import followed


def product(source, target, outs, width):
    packed = Packed(torch.zeros(-(-outs // 64) * 4, width, 16, 1), outs, width)
    return Call("product", source, target, matrix=SimpleNamespace(matrix=Matrix(packed)))


def attention(heads, out=8):
    given = {"source": "heads", "heads": heads}
    writes = [Call("write", **given)] if heads.keys else []
    calls = [product("stream", "heads", heads.count * heads.size, 8), *writes, Call("attend", target="mixed", **given)]
    return [*calls, product("mixed", "out", out, heads.queries * heads.size), Call("add", "out", "stream")]


def test_layers_may_have_other_widths():
    """Those of calls are their own; those of registers the most of any layer."""
    own, shared = Heads(0, 2, 1, 1, 4, 1), Heads(0, 2, 0, 0, 6, 1)
    mlps = [
        product("stream", "up", 32, 8),
        Call("activate", "up", "middle", gated=True),
        product("middle", "out", 8, 16),
    ]
    found, most = followed([*attention(own), *attention(shared), *mlps], torch.float32, 8)
    assert found == [16, 0, 8, 8, 8, 12, 12, 8, 8, 32, 16, 8]
    assert [*most] == [*REGISTERS] and (most["heads"], most["mixed"], most["up"], most["middle"]) == (16, 12, 32, 16)


def test_inputs_of_layers_lie_side_by_side():
    calls = [product("stream", "narrow", 4, 8), Call("inject", "narrow", "narrow", "inputs", table=2)]
    found, most = followed(calls, torch.float32, 8)
    assert found == [4, 4] and most["inputs"] == 3 * 4


def test_streams():
    weigh = product("stream", "weights", 16, 8), product("stream", "weights", 4, 8)
    changes = [Call(code, "weights", "stream", table=3) for code in ("predict", "correct")]
    found, most = followed([weigh[0], changes[0], weigh[1], changes[1]], torch.float32, 8, streams=4)
    assert found == [16, 8, 4, 8] and most["streams"] == 32 and most["weights"] == 16
    for calls, words in (
        ([weigh[1], changes[0]], "predict: expected rows of 16, got 4"),
        ([weigh[0], changes[1]], "correct: expected rows of 4, got 16"),
        ([Call("spread", "stream", "stream", table=4)], "spread: expected more than 4 streams"),
        ([Call("spread", "stream", "read", norm=SimpleNamespace(weight=torch.ones(7)))], "the factors of a stream"),
    ):
        with pytest.raises(ValueError, match=words):
            followed(calls, torch.float32, 8, streams=4)


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (attention(Heads(0, 2, 1, 1, 4, 1), out=7), "add: expected rows of 8, got 7"),
        (attention(Heads(0, 3, 2, 2, 4, 2)), "attend: expected a multiple of 2 heads, got 3"),
        (attention(Heads(0, 2, 1, 1, 4, 2)), "write: expected 1 heads in the cache, got 2"),
        ([Call("write", "heads", heads=Heads(0, 2, 0, 0, 4, 1))], "write: expected rows of"),
        ([product("stream", "up", 15, 8), Call("activate", "up", "middle", gated=True)], "activate: expected an even"),
        ([Call("xielu", "stream", "middle", norm=SimpleNamespace(weight=torch.ones(3)))], "the numbers of xielu: exp"),
        ([product("stream", "up", 15, 8), Call("sparsify", "up", "up")], "sparsify: expected an even number"),
        ([Call("spread", "stream", "stream")], "spread: expected more than 0 streams, at most 16, got 0"),
        ([product("stream", "up", 16, 9)], r"expected a matrix \[16, 8\], got \[16, 9\]"),
    ],
)
def test_what_does_not_fit(calls, words):
    with pytest.raises(ValueError, match=words):
        followed(calls, torch.float32, 8)

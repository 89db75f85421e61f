"""All layers of a decoder in one call, for a step of few rows on a CPU: the operators as the models call them, one
after the other (native.cpp). Their definitions are those of the operators."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.checks import expect
from kernels.cpp import KINDS, OPERATORS, function, watched
from kernels.layout import KVCache, TreeLayout
from kernels.linear import few_rows
from kernels.rows.checks import ACTIVATIONS
from kernels.tree_attention import native

_STRUCTURES = OPERATORS.structures


class Matrix(NamedTuple):
    """A packed matrix; see `kernels.linear` for its arguments, those of int8 alone are None for others."""

    address: int
    outs: int
    bias: Tensor | None
    sum_O: Tensor | None = None
    scale_O: Tensor | None = None


class Norm(NamedTuple):
    """A LayerNorm, or, without a bias, an RMSNorm."""

    weight: Tensor
    bias: Tensor | None = None


class Layer(NamedTuple):
    """Attention and an MLP, each behind its norm; without `mlp_norm` both read the same, side by side."""

    attention_norm: Norm
    mlp_norm: Norm | None
    qkv: Matrix
    out: Matrix
    up: Matrix
    down: Matrix


class Stack:
    """The layers and the norm after them.

    Args:
        layers: of which the tensors and packed matrices live as long as the stack is used.
        norm: the last.
        activation: between the matrices of an MLP, see `kernels.rows`; None: `silu_mul`.
        heads, kv_heads, head_dim: of queries; of keys and values; elements of a head.
        eps: of the norms.
        scale, window: of the attention.

    Raises:
        ValueError: vectors and matrices that do not fit together.

    Attributes:
        idle: takes nothing, as the layers are to be called one by one: compiled, or watched.
    """

    idle = False

    def __init__(
        self,
        layers: Sequence[Layer],
        norm: Norm,
        *,
        activation: str | None,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        scale: float,
        window: int | None,
    ):
        self.layers, self.norm, self.scale, self.window = layers, norm, scale, window
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        dtype, (width,) = norm.weight.dtype, norm.weight.shape
        host = torch.device("cpu")

        def check(name: str, x: Tensor | None, size: int, dtype: torch.dtype = dtype) -> None:
            if x is not None:
                expect(name, x, dtype, (size,), host)

        for given in (norm, *(n for layer in layers for n in layer[:2] if n is not None)):
            check("a norm's weight", given.weight, width)
            check("a norm's bias", given.bias, width)
        for layer in layers:
            outs = tuple(matrix.outs for matrix in (layer.qkv, layer.out, layer.up, layer.down))
            if outs != (wanted := ((heads + 2 * kv_heads) * head_dim, width, layers[0].up.outs, width)):
                raise ValueError(f"expected matrices of {list(wanted)} rows, got {list(outs)}")
            for matrix in layer[2:]:
                check("a matrix's bias", matrix.bias, matrix.outs)
                check("a matrix's sum_O", matrix.sum_O, matrix.outs, torch.int32)
                check("a matrix's scale_O", matrix.scale_O, matrix.outs, torch.float32)
        gated, number = activation is None, 0 if activation is None else ACTIVATIONS.index(activation)
        sizes = len(layers), heads, kv_heads, head_dim, width, layers[0].up.outs // (2 if gated else 1), gated, number
        layer_type = _STRUCTURES["Layer"]
        packed = (layer_type(*map(_norm, layer[:2]), *map(_matrix, layer[2:])) for layer in layers)
        self._layers = (layer_type * len(layers))(*packed)
        pointer = ctypes.addressof(self._layers)
        self._packed = _STRUCTURES["Stack"](KINDS[dtype], dtype.itemsize, *sizes, pointer, _norm(norm), eps)

    def takes(self, x_TE: Tensor, layout: TreeLayout) -> bool:
        """Whether it runs these tokens: few, by C++, and nobody looks on who wants to see operators."""
        return not self.idle and layout.impl == "cpp" and few_rows(x_TE) and not watched()

    def __call__(
        self, x_TE: Tensor, angles: tuple[Tensor, Tensor] | None, cache: KVCache, layout: TreeLayout
    ) -> Tensor:
        """Evaluate the tokens of a pass; their keys and values go into the cache.

        Args:
            x_TE: embeddings, float32, bfloat16 or float16 as the norms' weights; they are overwritten.
            angles: cos_TR and sin_TR, see `kernels.rows.rotary`; None: nothing is rotated.

        Returns:
            [T, E], the last norm applied.

        Raises:
            ValueError: tensors that do not fit together, or a layout that leads out of the cache.
        """
        T, D, (*_, S, _), weight_E = x_TE.shape[0], self.head_dim, cache.k_LGSD.shape, self.norm.weight
        R = angles[0].shape[1] if angles else 0
        for x, shape in (
            (x_TE, (*layout.positions_T.shape, *weight_E.shape)),
            *((x, (T, R)) for x in angles or ()),
            (cache.k_LGSD, (len(self.layers), self.kv_heads, S, D)),
            (cache.v_LGSD, cache.k_LGSD.shape),
        ):
            if x.shape != shape or x.dtype != weight_E.dtype or not x.is_cpu or not x.is_contiguous():
                got = f"{x.dtype} {list(x.shape)} on {x.device}, strides {x.stride()}"
                raise ValueError(f"expected contiguous {weight_E.dtype} {list(shape)} on a CPU, got {got}")
        if R % 2 or R > D:
            raise ValueError(f"angles: expected an even number of columns, at most {D}, got {R}")
        out_TE, threads = torch.empty_like(x_TE), torch.get_num_threads()
        heads_THD = torch.empty(T, self.heads + 2 * self.kv_heads, D, dtype=x_TE.dtype)  # queries, keys, values
        queries_THD = heads_THD[:, : self.heads]
        seen = native.seen(layout, S)
        problem = native.problem(queries_THD, self.kv_heads, S, seen, self.scale, self.window, threads)
        function("stack")(
            *(ctypes.addressof(self._packed), ctypes.addressof(problem), threads, x_TE.data_ptr()),
            *((x.data_ptr() for x in angles) if angles else (None, None)),
            *(cache.k_LGSD.data_ptr(), cache.v_LGSD.data_ptr(), layout.write_slots_T.data_ptr()),
            *(heads_THD.data_ptr(), out_TE.data_ptr(), T, S, R),
        )
        return out_TE


@contextmanager
def one_by_one(model: Any) -> Iterator[None]:
    """A model calls its layers one by one meanwhile, for whoever looks at them."""
    stack = getattr(model, "stack", None)
    if stack is None:
        yield
        return
    idle, stack.idle = stack.idle, True
    try:
        yield
    finally:
        stack.idle = idle


def _norm(norm: Norm | None) -> ctypes.Structure:
    return _STRUCTURES["Norm"](*map(_address, norm or (None, None)))


def _matrix(matrix: Matrix) -> ctypes.Structure:
    addresses = map(_address, (matrix.bias, matrix.sum_O, matrix.scale_O))
    return _STRUCTURES["Matrix"](matrix.address, *addresses, matrix.outs)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()

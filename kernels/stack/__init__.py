"""All layers of a gated decoder in one call, for a step of few rows on a CPU: the operators as models/llama.py calls
them, one after the other (stack.cpp). Their definitions are those of the operators."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.cpp import KINDS, function, watched
from kernels.layout import KVCache, TreeLayout
from kernels.linear import few_rows
from kernels.tree_attention import cpp


class Matrix(NamedTuple):
    """A packed matrix; see `kernels.linear` for its arguments, those of int8 alone are None for others."""

    address: int
    outs: int
    bias: Tensor | None
    sum_O: Tensor | None = None
    scale_O: Tensor | None = None


class Layer(NamedTuple):
    """Pre-norm attention and an MLP gated by SiLU."""

    attention_norm: Tensor
    mlp_norm: Tensor
    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix


class _Matrix(ctypes.Structure):  # this and the next two in step with stack.cpp
    _fields_ = (*((name, ctypes.c_void_p) for name in ("packed", "bias", "sums", "scale")), ("outs", ctypes.c_int64))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm")),
        *((name, _Matrix) for name in ("qkv", "out", "gate_up", "down")),
    )


class _Stack(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "element", "layers", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("width", "mlp_width")),
        ("layer", ctypes.POINTER(_Layer)),
        ("norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    )


class Stack:
    """The layers and the norm after them.

    Args:
        layers: of which the tensors and packed matrices live as long as the stack is used.
        norm: weight of the last norm.
        heads, kv_heads, head_dim: of queries; of keys and values; elements of a head.
        eps: of the norms.
        window: of the attention.

    Attributes:
        idle: takes nothing, as the layers are to be called one by one: compiled, or watched.
    """

    idle = False

    def __init__(
        self,
        layers: Sequence[Layer],
        norm: Tensor,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        window: int | None,
    ):
        self.layers, self.norm, self.window = layers, norm, window
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        sizes = len(layers), heads, kv_heads, head_dim, len(norm), layers[0].gate_up.outs // 2
        packed = (_Layer * len(layers))(
            *(
                _Layer(layer.attention_norm.data_ptr(), layer.mlp_norm.data_ptr(), *map(_matrix, layer[2:]))
                for layer in layers
            )
        )
        self._packed = _Stack(KINDS[norm.dtype], norm.itemsize, *sizes, packed, norm.data_ptr(), eps)

    def takes(self, x_TE: Tensor, layout: TreeLayout) -> bool:
        """Whether it runs these tokens: few, by C++, and nobody looks on who wants to see operators."""
        return not self.idle and layout.impl == "cpp" and few_rows(x_TE) and not watched()

    def __call__(self, x_TE: Tensor, cos_TR: Tensor, sin_TR: Tensor, cache: KVCache, layout: TreeLayout) -> Tensor:
        """Evaluate the tokens of a pass; their keys and values go into the cache.

        Args:
            x_TE: embeddings, float32, bfloat16 or float16 as the norms' weights; they are overwritten.
            cos_TR, sin_TR: see `kernels.rows.rotary`.

        Returns:
            [T, E], the last norm applied.

        Raises:
            ValueError: tensors that do not fit together.
        """
        T, D, (*_, S, _) = len(x_TE), self.head_dim, cache.k_LGSD.shape
        for x, shape in (
            (x_TE, (len(layout.positions_T), len(self.norm))),
            (cos_TR, (T, cos_TR.shape[1])),
            (sin_TR, cos_TR.shape),
            (cache.k_LGSD, (len(self.layers), self.kv_heads, S, D)),
            (cache.v_LGSD, cache.k_LGSD.shape),
        ):
            if x.shape != shape or x.dtype != self.norm.dtype or not x.is_cpu or not x.is_contiguous():
                got = f"{x.dtype} {list(x.shape)} on {x.device}, strides {x.stride()}"
                raise ValueError(f"expected contiguous {self.norm.dtype} {list(shape)} on a CPU, got {got}")
        out_TE, threads = torch.empty_like(x_TE), torch.get_num_threads()
        turned_THD = torch.empty(T, self.heads + self.kv_heads, D, dtype=x_TE.dtype)  # queries, then keys
        problem = cpp.problem(turned_THD[:, : self.heads], cache.k_LGSD[0], layout.seen, D**-0.5, self.window)
        function("coppice_stack", "ppipppppppp" + "iii")(
            *(ctypes.addressof(self._packed), ctypes.addressof(problem), threads),
            *(x_TE.data_ptr(), cos_TR.data_ptr(), sin_TR.data_ptr(), cache.k_LGSD.data_ptr(), cache.v_LGSD.data_ptr()),
            *(layout.write_slots_T.data_ptr(), turned_THD.data_ptr(), out_TE.data_ptr(), T, S, cos_TR.shape[1]),
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


def _matrix(matrix: Matrix) -> _Matrix:
    tensors = matrix.bias, matrix.sum_O, matrix.scale_O
    return _Matrix(matrix.address, *(None if x is None else x.data_ptr() for x in tensors), matrix.outs)

"""All layers of a decoder in one call on a CPU: the operators as the models call them, one
after the other (native.cpp). Their definitions are those of the operators."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.checks import expect
from kernels.cpp import KINDS, OPERATORS, function
from kernels.kv_kinds import row_width
from kernels.layout import KVCache, TreeLayout
from kernels.linear import Packed, PackedParts
from kernels.rows.checks import ACTIVATIONS
from kernels.tracing import watched
from kernels.tree_attention import native

_STRUCTURES = OPERATORS.structures
_CPU = torch.device("cpu")


class Matrix(NamedTuple):
    """A packed matrix, or several below each other, and the bias of their products."""

    packed: Packed | PackedParts
    bias: Tensor | None = None


class StackNorm(NamedTuple):
    """A LayerNorm, or, without a bias, an RMSNorm."""

    weight: Tensor
    bias: Tensor | None = None


class Norms(NamedTuple):
    """Of attention or an MLP: on what it reads, on its output before that is added to the stream, on the sum."""

    input: StackNorm | None = None
    output: StackNorm | None = None
    sum: StackNorm | None = None


class Conv(NamedTuple):
    """The weights [K, E] of a short convolution, and its bias."""

    weight: Tensor
    bias: Tensor | None = None


class StackLayer(NamedTuple):
    """Attention and an MLP, each added to the stream.

    Args:
        attention_norms, mlp_norms: where they have norms; without `mlp_norms` the MLP stands beside attention, and
            reads what that reads.
        qkv, out, up, down: the matrices.
        q_norm, k_norm: of each head of queries and keys; `all_heads`: of all heads as one row.
        norms_last: they come after the rotation, not before.
        scale, window, cap: of attention.
        residual_scale: factor of what is added to the stream.
        table: number of the angles that queries and keys are rotated by; None: they are not.
        conv: a short convolution in the place of attention; `qkv` is the matrix before it.
    """

    attention_norms: Norms
    mlp_norms: Norms | None
    qkv: Matrix
    out: Matrix
    up: Matrix
    down: Matrix
    scale: float
    q_norm: StackNorm | None = None
    k_norm: StackNorm | None = None
    all_heads: bool = False
    norms_last: bool = False
    residual_scale: float = 1.0
    window: int | None = None
    cap: float | None = None
    table: int | None = None
    conv: Conv | None = None


class Stack:
    """The layers and the norm after them.

    Args:
        layers: of which the tensors and packed matrices live as long as the stack is used.
        norm: the last, if there is one.
        activation: between the matrices of an MLP, see `kernels.rows`; gated: `activation_mul`.
        heads, kv_heads, head_dim: of queries; of keys and values; elements of a head.
        eps: of the norms.

    Raises:
        ValueError: vectors and matrices that do not fit together.

    Attributes:
        idle: takes nothing, as the layers are to be called one by one: compiled, or watched.
    """

    idle = False

    def __init__(
        self,
        layers: Sequence[StackLayer],
        norm: StackNorm | None,
        *,
        activation: str,
        gated: bool,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
    ):
        self.layers, self.norm, packed = layers, norm, layers[0].up.packed
        norms = (norm for layer in layers for norms in layer[:2] for norm in norms or ())
        self.weight_E = next(norm.weight for norm in (*norms, norm) if norm is not None)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.taps = max((len(layer.conv.weight) for layer in layers if layer.conv), default=0)
        self._check(mlp_width := packed.outs // (1 + gated))
        dtype, (width,) = self.weight_E.dtype, self.weight_E.shape
        sizes = len(layers), heads, kv_heads, head_dim, width, mlp_width, gated, ACTIVATIONS.index(activation)
        convs = [layer.conv is not None for layer in layers]
        places = [convs[:i].count(conv) for i, conv in enumerate(convs)]  # in the tensors of layers of its kind
        self.attending, self.convolving = convs.count(False), convs.count(True)
        self._layers = (_STRUCTURES["Layer"] * len(layers))(*map(_layer, layers, places))
        pointer = ctypes.addressof(self._layers)
        self._packed = _STRUCTURES["Stack"](KINDS[dtype], dtype.itemsize, *sizes, self.taps, pointer, _norm(norm), eps)
        tables = 1 + max(-1 if layer.table is None else layer.table for layer in layers)
        self._angles = _STRUCTURES["Angles"] * tables

    def _check(self, mlp_width: int) -> None:
        """Raises ValueError for vectors and matrices that do not fit together."""
        dtype, (width,), D = self.weight_E.dtype, self.weight_E.shape, self.head_dim
        up = self.layers[0].up.packed.outs
        matrices = (
            ((self.heads + 2 * self.kv_heads) * D, width),
            (width, self.heads * D),
            (up, width),
            (width, mlp_width),
        )

        def check(name: str, x: Tensor | None, size: int) -> None:
            if x is not None:
                expect(name, x, dtype, (size,), _CPU)

        def check_norm(name: str, norm: StackNorm | None, size: int) -> None:
            if norm is not None:
                check(f"{name}'s weight", norm.weight, size)
                check(f"{name}'s bias", norm.bias, size)

        check_norm("the last norm", self.norm, width)
        for layer in self.layers:
            for norm in (*layer.attention_norms, *(layer.mlp_norms or ())):
                check_norm("a norm", norm, width)
            for norm, heads in ((layer.q_norm, self.heads), (layer.k_norm, self.kv_heads)):
                check_norm("a head's norm", norm, heads * D if layer.all_heads else D)
            if layer.conv is not None:
                expect("a convolution's weight", layer.conv.weight, dtype, (self.taps, width), _CPU)
                check("a convolution's bias", layer.conv.bias, width)
            wanted = matrices if layer.conv is None else [(3 * width, width), (width, width), *matrices[2:]]
            for (packed, bias), sizes in zip((layer.qkv, layer.out, layer.up, layer.down), wanted, strict=True):
                if (packed.outs, packed.width) != sizes:
                    raise ValueError(f"expected a matrix {list(sizes)}, got {[packed.outs, packed.width]}")
                check("a matrix's bias", bias, packed.outs)

    def takes(self, layout: TreeLayout) -> bool:
        """Whether it runs a pass: by C++, unless somebody looks on who wants to see operators."""
        return not self.idle and layout.impl == "cpp" and not watched()

    def __call__(
        self, x_TE: Tensor, angles: Sequence[tuple[Tensor, ...]], cache: KVCache, layout: TreeLayout
    ) -> Tensor:
        """Evaluate the tokens of a pass; their keys and values go into the cache.

        Args:
            x_TE: embeddings, float32, bfloat16 or float16 as the norms' weights; they are overwritten.
            angles: cos_TR and sin_TR of each table that layers name, see `kernels.rows.rotary`; then those of queries,
                where they are others.

        Returns:
            [T, E], the last norm applied.

        Raises:
            ValueError: tensors that do not fit together, or a layout that leads out of the cache.
        """
        T, D, (*_, S, _), weight_E = x_TE.shape[0], self.head_dim, cache.k_LGSD.shape, self.weight_E
        if len(angles) != (tables := self._angles._length_):
            raise ValueError(f"angles: expected {tables} tables, got {len(angles)}")
        kept = torch.int8 if cache.k_LGSD.dtype == torch.int8 else weight_E.dtype
        for x, shape in (
            (x_TE, (*layout.positions_T.shape, *weight_E.shape)),
            *((x, (T, table[0].shape[-1])) for table in angles for x in table),
        ):
            expect("a stack's rows", x, weight_E.dtype, shape, _CPU)
        for x in (cache.k_LGSD, cache.v_LGSD):
            expect("a stack's cache", x, kept, (self.attending, self.kv_heads, S, row_width(D, kept)), _CPU)
        conv = self._convolved(cache, layout, T, S)
        rotated = self._angles()
        for i, table in enumerate(angles):
            R = table[0].shape[1]
            if R % 2 or R > D:
                raise ValueError(f"angles: expected an even number of columns, at most {D}, got {R}")
            rotated[i] = *(x.data_ptr() for x in (*table[:2], *table[-2:])), R
        out_TE, threads = torch.empty_like(x_TE), torch.get_num_threads()
        heads_THD = torch.empty(T, self.heads + 2 * self.kv_heads, D, dtype=x_TE.dtype)  # queries, keys, values
        queries_THD = heads_THD[:, : self.heads]
        problem = native.problem(queries_THD, cache.k_LGSD, native.seen(layout, S), 1.0, None, threads)
        function("stack")(
            *map(ctypes.addressof, (self._packed, problem, rotated)),
            *(threads, x_TE.data_ptr(), cache.k_LGSD.data_ptr(), cache.v_LGSD.data_ptr()),
            *(layout.write_slots_T.data_ptr(), heads_THD.data_ptr(), out_TE.data_ptr(), T, S, *conv),
        )
        return out_TE

    def _convolved(
        self, cache: KVCache, layout: TreeLayout, tokens: int, slots: int
    ) -> tuple[int | None, int, int | None]:
        """What convolutions read and write: the address of their cache, the kind of its elements, ancestors."""
        if not self.taps:
            return None, 0, None
        rows_LSE, ancestors_TN = cache.groups[1][0].squeeze(1), layout.ancestors_TN
        kinds = [dtype for dtype in (self.weight_E.dtype, torch.bfloat16) if dtype == rows_LSE.dtype]
        shape = self.convolving, slots, *self.weight_E.shape
        expect("a stack's cache of convolutions", rows_LSE, kinds[0] if kinds else self.weight_E.dtype, shape, _CPU)
        if self.taps == 1:
            return rows_LSE.data_ptr(), KINDS[rows_LSE.dtype], None
        if ancestors_TN is None:
            raise ValueError("a stack with convolutions: expected a layout with ancestors")
        expect("ancestors_TN", ancestors_TN, torch.int64, (tokens, self.taps - 1), _CPU)
        return rows_LSE.data_ptr(), KINDS[rows_LSE.dtype], ancestors_TN.data_ptr()


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


def _norm(norm: StackNorm | None) -> ctypes.Structure:
    return _STRUCTURES["Norm"](*map(_address, norm or (None, None)))


def _layer(layer: StackLayer, place: int) -> ctypes.Structure:
    flags = layer.mlp_norms is None, layer.all_heads, layer.norms_last
    numbers = (-1 if x is None else x for x in (layer.window, layer.table))
    norms = (_STRUCTURES["Norms"](*map(_norm, norms or Norms())) for norms in layer[:2])
    matrices = (packed.described(bias) for packed, bias in (layer.qkv, layer.out, layer.up, layer.down))
    scales = layer.scale, layer.cap or 0.0, layer.residual_scale
    head_norms = _norm(layer.q_norm), _norm(layer.k_norm)
    conv = _norm(StackNorm(*layer.conv) if layer.conv else None)
    return _STRUCTURES["Layer"](*flags, *numbers, place, *norms, *head_norms, conv, *matrices, *scales)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()

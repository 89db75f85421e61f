"""All layers of a decoder in one call on a CPU: the same operators that the models call, one after another
(native.cpp). Their definitions are those of the operators."""

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import checks
from kernels.channel_scan import native as by_channels
from kernels.checks import expect
from kernels.cpp import KINDS, OPERATORS, address, function, why_not
from kernels.delta_net import native as deltas
from kernels.kv_kinds import row_width
from kernels.layout import ChannelKind, DeltaKind, DeltaPaths, KVCache, TreeLayout
from kernels.linear import Packed, PackedParts
from kernels.rows.checks import ACTIVATIONS, GATES, TopSums
from kernels.rows.native import LogitSums
from kernels.scan import native as scans
from kernels.stack.calls import CODES, REGISTERS, Call
from kernels.stack.widths import followed
from kernels.tracing import watched
from kernels.tree_attention import native

_STRUCTURES = OPERATORS.structures
_CPU = torch.device("cpu")
RECURRENT = "recur", "scan", "channel_scan"  # codes of calls that write to rows and states


class Matrix(NamedTuple):
    """A packed matrix, or several stacked ones, and their bias."""

    packed: Packed | PackedParts
    bias: Tensor | None = None


class Angles(NamedTuple):
    """Angles of rotary embeddings.

    Attributes:
        tables: cosines and sines, see `kernels.rows.rotary`; then those of queries, if they differ.
        by_position: whether they have a row per position rather than per token of a pass.
    """

    tables: tuple[Tensor, ...]
    by_position: bool = False


class Stack:
    """The calls of all layers and the norm after them.

    Args:
        calls: the calls; their tensors and packed matrices must live as long as the stack is used. All their linear
            layers have a `matrix`, and all their mixtures of experts have `matrices`.
        dtype, width: of the stream.
        streams: how many AltUp has; 0: the layers have no such calls.

    Raises:
        ValueError: vectors and matrices that do not fit together.

    Attributes:
        idle: the stack runs no pass, because an observer wants the layers to be called one by one.
        widths: the widths of the registers, each the largest of any layer.
        described, tables: its structure of C++, and the type of those of angles.
    """

    idle = False

    def __init__(self, calls: Sequence[Call], *, dtype: torch.dtype, width: int, streams: int = 0):
        self.calls, self.dtype, self.width = calls, dtype, width
        self.taps = max((len(call.norm.weight) for call in calls if call.code == "convolve"), default=0)
        self.delta: DeltaKind | None = next((call.delta.weights.kind for call in calls if call.delta), None)
        self._head: tuple[Matrix, ctypes.Structure] | None = None  # the latest, and its structure of C++
        self._held: tuple[KVCache, ctypes.Array[Any]] | None = None  # the latest, and the places of its layers
        widths, self.widths = followed(calls, dtype, width, streams)
        self.widths["mixed"] = max(self.widths["mixed"], self.widths["convolved"])  # which share room
        codes = [call.code for call in calls]
        adapted = [len(call.adapters) for call in calls if call.code == "adapt"]
        self.adapters = min(adapted, default=None)  # numbers of adapters; None: no layer has any, which the ends may
        self.attending = [call for call in calls if call.code == "attend"]
        self.convolving = codes.count("convolve")
        self.recurring, self.tapping = sum(map(codes.count, RECURRENT)), codes.count("tap")
        self._layers = [None if call.delta is None else _recurrent(call) for call in calls]
        self._calls = (_STRUCTURES["Call"] * len(calls))(*map(_described, calls, self._layers, widths))
        self._widths = array("q", self.widths.values())
        places = self._widths.buffer_info()[0], ctypes.addressof(self._calls)
        self.described = _STRUCTURES["Stack"](KINDS[dtype], dtype.itemsize, width, self.taps, len(calls), *places)
        self.turned: dict[int, int] = {}  # by the tables of angles, elements of the smallest head
        for call in calls:
            if call.code == "rotate" and call.heads is not None:
                self.turned[call.table] = min(call.heads.size, self.turned.get(call.table, call.heads.size))
        self.tables: Any = _STRUCTURES["Angles"] * (1 + max(self.turned, default=-1))

    def takes(self, layout: TreeLayout) -> bool:
        """Whether the stack can run a pass."""
        return layout.impl == "cpp" and self.ready

    @property
    def ready(self) -> bool:
        """Whether the stack runs C++ passes, which it does unless a profiler wants to see operators."""
        return not self.idle and not watched()

    def __call__(
        self,
        x_TE: Tensor,
        angles: Sequence[Angles],
        cache: KVCache,
        layout: TreeLayout,
        tapped_TNE: Tensor | None = None,
        inputs_TF: Tensor | None = None,
        streams_TNE: Tensor | None = None,
    ) -> Tensor:
        """Evaluate the tokens of a pass; their keys and values go into the cache.

        Args:
            x_TE: embeddings, of the stack's dtype; they are overwritten.
            angles: those of each table that layers name.
            tapped_TNE: filled with the tapped rows; None: not needed.
            inputs_TF: the register "inputs"; None: no layer has any.
            streams_TNE: the register "streams", which changes; None: there are none.

        Returns:
            [T, E], the last norm applied.

        Raises:
            ValueError: tensors that do not fit together, or a layout that leads out of the cache.
            MemoryError: there is no memory for the registers of this pass.
        """
        self._run(x_TE, angles, cache, layout, None, tapped_TNE, inputs_TF, streams_TNE)
        return x_TE

    def top_sums(
        self,
        x_TE: Tensor,
        angles: Sequence[Angles],
        cache: KVCache,
        layout: TreeLayout,
        head: Matrix,
        asked: Sequence[int],
        size: int,
        wanted: Sequence[TopSums],
        tapped_TNE: Tensor | None = None,
        inputs_TF: Tensor | None = None,
    ) -> tuple[list[Tensor], list[bool]]:
        """Evaluate the tokens of a pass, and find the top sums of log-probabilities after some of them.

        Args:
            x_TE, angles, cache, layout, tapped_TNE, inputs_TF: as of a call; x_TE becomes what that returns.
            head: makes logits of rows.
            asked: the tokens, ascending.
            size, wanted: see `kernels.rows.top_sums_of_logits`, which also has the results.
        """
        T, sums = len(x_TE), LogitSums(wanted, head.packed.outs)
        if not 0 < len(asked) == len(sums.finite) <= T or not 0 <= asked[0] <= asked[-1] < T:
            raise ValueError(f"asked: expected {len(sums.finite)} tokens of {T}, ascending, got {asked}")
        if not 0 < size <= head.packed.outs or head.packed.width != self.width:
            raise ValueError(f"head: expected {size} outputs or more of width {self.width}, got {head.packed.outs}")
        if self._head is None or self._head[0] is not head:
            self._head = head, head.packed.described(head.bias)
        rows, N = array("q", asked), len(asked)
        rooms = [torch.empty(N, width, dtype=self.dtype) for width in (self.width, head.packed.outs)]
        places = (x.buffer_info()[0] for x in (sums.sums, sums.finite, sums.out, sums.parts))
        pointers = rows.buffer_info()[0], *(room.data_ptr() for room in rooms), *places
        tail = _STRUCTURES["Tail"](ctypes.addressof(self._head[1]), *pointers, len(wanted), N, size)
        self._run(x_TE, angles, cache, layout, ctypes.addressof(tail), tapped_TNE, inputs_TF)
        return sums.found()

    def _run(
        self,
        x_TE: Tensor,
        angles: Sequence[Angles],
        cache: KVCache,
        layout: TreeLayout,
        tail: int | None,
        tapped_TNE: Tensor | None,
        inputs_TF: Tensor | None,
        streams_TNE: Tensor | None = None,
    ) -> None:
        T, S = layout.positions_T.shape[0], cache.k_LGSD.shape[2]
        expect("a stack's rows", x_TE, self.dtype, (T, self.width), _CPU)
        if tapped_TNE is not None:
            expect("tapped rows", tapped_TNE, self.dtype, (T, self.tapping, self.width), _CPU)
        if inputs := self.widths["inputs"]:
            if inputs_TF is None:
                raise ValueError(f"a stack whose layers have inputs: expected {[T, inputs]} of them")
            expect("a stack's inputs", inputs_TF, self.dtype, (T, inputs), _CPU)
        if streams := self.widths["streams"] // self.width:
            if streams_TNE is None:
                raise ValueError(f"a stack whose layers have streams: expected {[T, streams, self.width]} of them")
            expect("a stack's streams", streams_TNE, self.dtype, (T, streams, self.width), _CPU)
        prepared: _Prepared | None = vars(layout).get("_prepared")
        if prepared is None or prepared.stack is not self or prepared.cache is not cache:
            prepared = vars(layout)["_prepared"] = _Prepared(self, cache, layout)
        native.seen(layout, S)
        if prepared.angles != (taken := _places(angles)):
            prepared.turn(angles)
            prepared.angles = taken
        threads = prepared.problem.threads = torch.get_num_threads()
        heads = torch.empty(T * self.widths["heads"], dtype=self.dtype)
        pointers = x_TE.data_ptr(), *prepared.pointers, heads.data_ptr()
        pointers = *pointers, address(inputs_TF), address(streams_TNE)
        more = *prepared.sizes, prepared.paths, self._adapted(layout, T), tail
        more = *more, address(tapped_TNE), self.tapping
        if self.delta is not None:
            self.check_paths(cache, layout, T)
        done = function("stack")(*prepared.structures, threads, *pointers, *more)
        if done < 0:
            raise MemoryError("no memory for a pass")
        if not done:
            raise ValueError(f"positions_T: expected positions that the angles have, got {layout.positions_T.tolist()}")

    def _adapted(self, layout: TreeLayout, tokens: int) -> int | None:
        """The address of the numbers of adapters; None: no token has one."""
        if (adapters_T := layout.adapters_T) is None or self.adapters is None:
            return None
        expect("adapters_T", adapters_T, torch.int64, (tokens,), _CPU)
        least, most = adapters_T.aminmax()
        if not 0 <= int(least) <= int(most) < self.adapters:
            raise ValueError(f"adapters_T: expected numbers below {self.adapters}, got {int(least)} to {int(most)}")
        return adapters_T.data_ptr()

    def convolved(
        self, cache: KVCache, layout: TreeLayout, tokens: int, slots: int
    ) -> tuple[int | None, int, int | None]:
        """The arguments of convolutions: the address of their cache, the kind of its elements, ancestors."""
        if not self.taps:
            return None, 0, None
        if len(cache.groups) < 2:
            raise ValueError("a stack's cache: expected rows of convolutions")
        rows_LSE, ancestors_TN = cache.groups[1][0].squeeze(1), layout.ancestors_TN
        kinds = [dtype for dtype in (self.dtype, torch.bfloat16) if dtype == rows_LSE.dtype]
        shape = self.convolving, slots, self.width
        expect("a stack's cache of convolutions", rows_LSE, kinds[0] if kinds else self.dtype, shape, _CPU)
        if self.taps == 1:
            return rows_LSE.data_ptr(), KINDS[rows_LSE.dtype], None
        if ancestors_TN is None:
            raise ValueError("a stack with convolutions: expected a layout with ancestors")
        expect("ancestors_TN", ancestors_TN, torch.int64, (tokens, self.taps - 1), _CPU)
        return rows_LSE.data_ptr(), KINDS[rows_LSE.dtype], ancestors_TN.data_ptr()

    def caches(self, cache: KVCache) -> ctypes.Array[Any]:
        """The addresses of the keys and values of layers, by the numbers that calls use. Raises ValueError for
        others."""
        if self._held is None or self._held[0] is not cache:
            kept = torch.int8 if cache.k_LGSD.dtype == torch.int8 else self.dtype
            numbers = [call.table for call in self.attending]
            if max(numbers, default=-1) >= len(cache.layers):
                raise ValueError(f"a stack's cache: expected {max(numbers) + 1} layers, got {len(cache.layers)}")
            found = (_STRUCTURES["LayerCache"] * (1 + max(numbers, default=0)))()
            for call in self.attending:
                heads, places = call.heads, cache.layers[call.table]
                assert heads is not None
                shape = heads.kept, cache.k_LGSD.shape[2], row_width(heads.size, kept)
                if len(places) != 2:
                    raise ValueError("a stack's cache: expected keys and values, got rows")
                for x in places:
                    expect("a stack's cache", x, kept, shape, _CPU)
                found[call.table] = tuple(x.data_ptr() for x in places)
            self._held = cache, found
        return self._held[1]

    def check_paths(self, cache: KVCache, layout: TreeLayout, tokens: int) -> DeltaPaths:
        """The paths of a layout. Raises ValueError if they lead out of the cache of layers with a state."""
        kind, paths = self.delta, layout.paths
        assert kind is not None
        if paths is None:
            raise ValueError("a stack of layers with a state: expected a layout with paths")
        rows_LRW, states_LSHKV = cache.recurrent
        R, S = rows_LRW.shape[1], states_LSHKV.shape[1]
        expect("a stack's rows of layers with a state", rows_LRW, torch.float32, (self.recurring, R, kind.row), _CPU)
        expect("a stack's states", states_LSHKV, torch.float32, (self.recurring, S, *kind.state), _CPU)
        checks.delta_paths(paths, tokens, kind, R, S, _CPU)
        return paths


class _Prepared:
    """The arguments of a stack's call that stay the same for a layout and a cache.

    Attributes:
        structures, pointers, sizes: arguments of C++.
        angles: where those that `turn` took last lie. They are not held: tables that grow with a text take much memory.
    """

    def __init__(self, stack: Stack, cache: KVCache, layout: TreeLayout):
        """Raises ValueError: tensors that do not fit together, or a layout that leads out of the cache."""
        self.stack, self.cache, self.positions_T = stack, cache, layout.positions_T
        T, S = layout.positions_T.shape[0], cache.k_LGSD.shape[2]
        self.caches = stack.caches(cache)
        conv = stack.convolved(cache, layout, T, S)
        sizes = torch.empty(T, 1, 1, dtype=stack.dtype, device="meta")  # each layer has its own
        self.problem = native.problem(sizes, cache.k_LGSD, native.seen(layout, S), 1.0, None, 1)
        self.rotated, self.angles = stack.tables(), [()]
        self.structures = *map(ctypes.addressof, (stack.described, self.problem, self.rotated)), len(self.rotated)
        self.pointers = ctypes.addressof(self.caches), layout.write_slots_T.data_ptr()
        self.sizes, self.paths = (T, S, *conv), None
        if stack.delta is not None:
            paths, (rows_LRW, states_LSHKV) = stack.check_paths(cache, layout, T), cache.recurrent
            self.described = deltas.stored(stack.delta, rows_LRW[0], states_LSHKV[0], paths)
            self.paths = ctypes.addressof(self.described)

    def turn(self, angles: Sequence[Angles]) -> None:
        """Take other angles. Raises ValueError for those that do not fit."""
        if len(angles) != len(self.rotated):
            raise ValueError(f"angles: expected {len(self.rotated)} tables, got {len(angles)}")
        for i, (table, by_position) in enumerate(angles):
            rows, R = table[0].shape
            for x in table:
                expect("angles", x, self.stack.dtype, (rows if by_position else len(self.positions_T), R), _CPU)
            most = self.stack.turned.get(i, R)
            if R % 2 or most < R:
                raise ValueError(f"angles: expected an even number of columns, at most {most}, got {R}")
            self.rotated[i] = *(x.data_ptr() for x in (*table[:2], *table[-2:])), R, rows if by_position else 0


def _places(angles: Sequence[Angles]) -> list[tuple[Any, ...]]:
    """The addresses and sizes of tables; tables with the same ones need no `_Prepared.turn`."""
    return [(by, x[0].dtype, *x[0].shape, *(y.data_ptr() for y in x)) for x, by in angles]


def clocks() -> dict[str, float]:
    """Seconds that calls of C++ stacks have taken, by code, "head" and "top sums"; {} without C++."""
    if why_not():
        return {}
    names = *CODES, "head", "top sums"
    nanoseconds = array("q", [0] * len(names))
    function("stack_clocks")(nanoseconds.buffer_info()[0])
    return {name: count * 1e-9 for name, count in zip(names, nanoseconds, strict=True)}


@contextmanager
def one_by_one(model: Any) -> Iterator[None]:
    """Context in which a model calls its layers one by one, for an observer."""
    stack = getattr(model, "stack", None)
    if stack is None:
        yield
        return
    idle, stack.idle = stack.idle, True
    try:
        yield
    finally:
        stack.idle = idle


def _recurrent(call: Call) -> ctypes.Structure:
    weights = call.delta.weights
    if isinstance(weights.kind, ChannelKind):
        return by_channels.described(weights)
    return scans.described(weights) if call.code == "scan" else deltas.described(weights, call.delta.order)


def _described(call: Call, layer: ctypes.Structure | None, width: int) -> ctypes.Structure:
    names = call.source, call.target, call.beside or call.source
    registers = (REGISTERS.index(name) if name else 0 for name in names)
    numbers = call.all_heads, call.own_norms, call.table, -1 if call.window is None else call.window, call.chunked
    heads = _STRUCTURES["Heads"](*(call.heads or ()))
    norms = (_norm(x) for x in (call.norm, call.more, call.third))
    function = (ACTIVATIONS + GATES).index(call.function), call.gated, width
    packed, bias = call.matrix.matrix if call.matrix else (None, None)
    matrix = packed.described(bias) if packed else _STRUCTURES["Matrix"]()
    adapters = None if call.adapters is None else call.adapters.described()
    mixture = None if call.mixture is None else ctypes.addressof(call.mixture.matrices.described())
    names = "Delta", "Scan", "ChannelScan"
    recurs = [ctypes.addressof(layer) if isinstance(layer, _STRUCTURES[name]) else None for name in names]
    latent = None if call.latent is None else ctypes.addressof(call.latent.heads.described())
    of_heads = map(address, (call.sinks, call.slopes))
    coarse = call.slopes is not None and call.slopes.dtype == torch.bfloat16
    more = matrix, adapters, mixture, *of_heads, *recurs, latent, coarse, call.softplus, call.scale, call.cap or 0.0
    return _STRUCTURES["Call"](CODES.index(call.code), *registers, *numbers, *function, heads, *norms, *more)


def _norm(norm: Any) -> ctypes.Structure:
    if norm is None:
        return _STRUCTURES["Norm"]()
    vectors, exact = (address(norm.weight), address(norm.bias)), norm.weight.dtype == torch.float32
    eps = getattr(norm, "eps", 0.0)  # taps of a convolution have none
    return _STRUCTURES["Norm"](*vectors, norm.weight.shape[-1], exact, eps)

"""Shared by the Triton kernels of layers with a state: convolutions, the walk along chains, storing rows.

A program of the walk holds one head of a state in registers, all of its rows and some of its columns, which are
independent of the other columns. It begins with the state of a block, applies the block's tokens before the chain one
after another, and then those of the chain, so states and outputs are bit-identical however tokens are distributed over
passes. Shapes alone determine the number of programs of a level, and none waits for another.

Shape legend: T tokens, N chains, G heads of keys [K], H of values [V], C channels of the convolution, W elements of a
row, of which the last P = W - C are prepared for the walk: keys, what is written or values, logarithms of decays (or
decays, of elements of keys).
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false
# (what triton.jit takes and gives is no function to a type checker)

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.delta_net.chains import with_chains
from kernels.gpu import INTERPRETED, check_device, inverse_root, launch
from kernels.layout import NULL_STATE, TRASH_SLOT, DeltaKind, DeltaPaths
from kernels.rows.triton import sigmoid

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ELEMENTS = 512  # of heads that a program prepares or normalises
WALKED = 2048  # most elements of a state that a program has: 64 registers of a thread
ROW_BLOCK = 1024  # elements of a row that a program copies
TRASH = tl.constexpr(TRASH_SLOT)
NONE = tl.constexpr(NULL_STATE)


def heads_at_once(heads: int, size: int) -> int:
    """Heads of a size that a program takes; an interpreted program costs the same however many it has."""
    return triton.next_power_of_2(heads) if INTERPRETED.value else max(1, ELEMENTS // size)


def check_dtype(x: Tensor) -> None:
    """Raises ValueError for dtypes that the kernels do not take."""
    if x.dtype not in DTYPES:
        raise ValueError(f"impl 'triton': expected float16, bfloat16 or float32, got {x.dtype}")


@dataclass(frozen=True)
class Recurrence:
    """A pass of a layer, and what is prepared of its tokens.

    Args:
        x_TF, rows_RW, states_SHKV: as of the operator; rows of x may stand apart.
        inputs: where the channels of the convolution begin in x.
        delta: whether it is a gated delta net: queries and keys are divided by their lengths, and what a token writes
            depends on the state.
    """

    x_TF: Tensor
    kind: DeltaKind
    rows_RW: Tensor
    states_SHKV: Tensor
    paths: DeltaPaths
    inputs: int
    delta: bool

    @classmethod
    def of(
        cls,
        x_TF: Tensor,
        kind: DeltaKind,
        rows_RW: Tensor,
        states_SHKV: Tensor,
        paths: DeltaPaths,
        *,
        inputs: int,
        delta: bool,
    ) -> "Recurrence":
        """Raises ValueError for tensors that the kernels cannot reach, or dtypes that they do not take."""
        check_device(x_TF, rows_RW, states_SHKV, paths.rows_T)
        check_dtype(x_TF)
        x_TF = x_TF if x_TF.stride(1) == 1 else x_TF.contiguous()
        return cls(x_TF, kind, rows_RW, states_SHKV, with_chains(paths), inputs, delta)

    def empty(self, *sizes: int) -> Tensor:
        """Room for numbers of the pass."""
        return torch.empty(*sizes, dtype=torch.float32, device=self.x_TF.device)

    @property
    def keys(self) -> int:
        """Elements of all keys of a token."""
        return self.kind.key_heads * self.kind.key_size

    @property
    def values(self) -> int:
        """Elements of all values of a token."""
        return self.kind.value_heads * self.kind.value_size

    @cached_property
    def kept_TP(self) -> Tensor:
        """Keys, values or what is written, and decays of each token."""
        return self.empty(len(self.x_TF), self.kind.row - self.kind.channels)

    @cached_property
    def queries_TE(self) -> Tensor:
        """Queries of each token."""
        return self.empty(len(self.x_TF), self.keys)

    @property
    def convolution(self) -> dict[str, int]:
        """The sizes that `convolved` takes."""
        kind = self.kind
        sizes = {"INPUTS": self.inputs, "C": kind.channels, "ROW": kind.row}
        return sizes | {"REACH": kind.reach, "TAPS": kind.taps}

    def prepare_keys(self, taps_KC: Tensor, shift_C: Tensor | None, first: int) -> None:
        """Convolve queries and keys; of a delta net queries come first, of a scan keys.

        Args:
            first: their first channel.
        """
        kind, x_TF, paths_TN = self.kind, self.x_TF, self.paths.paths_TN
        G, K = kind.key_heads, kind.key_size
        K2, some = triton.next_power_of_2(K), heads_at_once(2 * G, triton.next_power_of_2(K))
        launch(_prepare_keys, len(x_TF), triton.cdiv(2 * G, some))(
            x_TF, self.rows_RW, paths_TN, taps_KC, taps_KC if shift_C is None else shift_C, self.kept_TP,
            self.queries_TE, x_TF.stride(0), **self.convolution, FIRST=first, SHIFTED=shift_C is not None,
            DELTA=self.delta, G=G, K=K, K2=K2, M=some,
        )  # fmt: skip

    def walk(self, strengths_TH: Tensor | None, written_TE: Tensor | None, rates_KC: Tensor | None = None) -> Tensor:
        """Returns what every head reads from its state, [T, H * V]; states are stored where blocks end.

        Args:
            strengths_TH, written_TE: of a delta net; what each token writes is put into the latter.
            rates_KC: of a scan by channels; rows have a step for each channel instead of decays of heads.
        """
        kind, paths, reads_TE = self.kind, self.paths, self.empty(len(self.x_TF), self.values)
        H, K, V = kind.state
        K2 = triton.next_power_of_2(K)
        columns = max(1, min(triton.next_power_of_2(V), WALKED // K2, 16))
        sizes = {"G": kind.key_heads, "H": H, "K": K, "K2": K2, "V": V, "BLOCK": columns, "C": kind.channels}
        begin, strengths = 0, self.kept_TP if strengths_TH is None else strengths_TH
        assert paths.chains_N2 is not None
        for count in paths.levels:
            launch(_walk, count, H, triton.cdiv(V, columns))(
                paths.chains_N2[begin : begin + count], paths.paths_TN, paths.lengths_T, paths.bases_T, paths.folds_T,
                self.kept_TP, self.queries_TE, strengths, reads_TE if written_TE is None else written_TE, reads_TE,
                self.rows_RW, self.states_SHKV, self.kept_TP if rates_KC is None else rates_KC, REACH=kind.reach,
                ROW=kind.row, DELTA=self.delta, CHANNELS=rates_KC is not None, BY_KEY=kind.key_decays, **sizes,
                num_warps=max(1, K2 * columns // WALKED),
            )  # fmt: skip
            begin += count
        return reads_TE

    def keep(self, written_TE: Tensor) -> None:
        """Copy into rows what later tokens read of those of the pass.

        Args:
            written_TE: what the tokens write, of any stride of rows.
        """
        kind, x_TF = self.kind, self.x_TF
        launch(_keep, len(x_TF), triton.cdiv(kind.row, ROW_BLOCK))(
            x_TF, self.kept_TP, written_TE, self.paths.rows_T, self.rows_RW, x_TF.stride(0), written_TE.stride(0),
            INPUTS=self.inputs, C=kind.channels, ROW=kind.row, KEYS=self.keys, VALUES=self.values, BLOCK=ROW_BLOCK,
        )  # fmt: skip


@triton.jit
def silu(x):
    """x / (1 + exp(-x))."""
    return x * sigmoid(x)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), also where 1 + exp(x) is rounded (Goldberg, 1991, theorem 4)."""
    e = tl.exp(tl.minimum(x, 20.0))
    whole = 1 + e
    near = tl.where(whole == 1, e, tl.log(whole) * e / (whole - 1 + (whole == 1)))
    return tl.where(x > 20, x, near)


@triton.jit
def convolved(
    x_ptr, rows_ptr, paths_ptr, taps_ptr, t, stride_xt, channel, real,
    INPUTS: tl.constexpr, C: tl.constexpr, ROW: tl.constexpr, REACH: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Sums of the taps of some channels of a token: its own input, and those of its latest ancestors, which the pass or
    their rows have."""
    total = tl.load(x_ptr + t * stride_xt + INPUTS + channel, mask=real, other=0.0).to(tl.float32)
    total *= tl.load(taps_ptr + (TAPS - 1) * C + channel, mask=real, other=0.0)
    for i in tl.static_range(TAPS - 1):
        at = tl.load(paths_ptr + t * REACH + i)
        passed = tl.load(x_ptr - (1 + at) * stride_xt + INPUTS + channel, mask=real & (at < 0), other=0.0)
        row = tl.load(rows_ptr + at * ROW + channel, mask=real & (at >= 0), other=0.0)
        tap = tl.load(taps_ptr + (TAPS - 2 - i) * C + channel, mask=real, other=0.0)
        total += (passed.to(tl.float32) + row) * tap
    return total


@triton.jit
def _prepare_keys(
    x_ptr, rows_ptr, paths_ptr, taps_ptr, shift_ptr, kept_ptr, queries_ptr, stride_xt,
    FIRST: tl.constexpr, SHIFTED: tl.constexpr, DELTA: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    K2: tl.constexpr, M: tl.constexpr,
    INPUTS: tl.constexpr, C: tl.constexpr, ROW: tl.constexpr, REACH: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Some of the 2 G heads of queries and keys of a token."""
    t = tl.program_id(0).to(tl.int64)
    head, k = (tl.program_id(1) * M + tl.arange(0, M))[:, None], tl.arange(0, K2)[None, :]
    real, element = (head < 2 * G) & (k < K), head * K + k
    x = convolved(
        x_ptr, rows_ptr, paths_ptr, taps_ptr, t, stride_xt, FIRST + element, real, INPUTS, C, ROW, REACH, TAPS
    )
    if SHIFTED:
        x += tl.load(shift_ptr + FIRST + element, mask=real, other=0.0)
    x = silu(x)
    query = (head < G) if DELTA else (head >= G)
    if DELTA:
        x *= inverse_root(tl.sum(x * x, 1) + 1e-6)[:, None]
        x = tl.where(query, x * K**-0.5, x)
    place = tl.where(head < G, element, element - G * K)
    tl.store(queries_ptr + t * (G * K) + place, x, mask=real & query)
    tl.store(kept_ptr + t * (ROW - C) + place, x, mask=real & (head < 2 * G) & (query == 0))


@triton.jit
def _ancestor(paths_ptr, first, step, count, steps, REACH: tl.constexpr):
    """The token that a step of the walk takes: a row, or -1 - t for a token of the pass."""
    above = step < count
    listed = tl.load(paths_ptr + first * REACH + count - 1 - step, mask=above, other=0)
    return tl.where(above, listed, -1 - (first + tl.minimum(step, steps - 1) - count))


@triton.jit
def _taken(
    at, rows_ptr, kept_ptr, queries_ptr, strengths_ptr, g, h, k, v,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, ROW: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """The key, what is written (or the value), the decay (or steps, or decays of elements of the key), the query and
    the strength of a token; of a row, the last two are zeros."""
    passed, t = at < 0, -1 - at
    from_ptr = tl.where(passed, kept_ptr + t * (ROW - C), rows_ptr + at * ROW + C)
    key = tl.load(from_ptr + g * K + k, mask=k < K, other=0.0)
    value = tl.load(from_ptr + G * K + h * V + v, mask=v < V, other=0.0)
    if CHANNELS:
        decay = tl.load(from_ptr + G * K + H * V + v, mask=v < V, other=0.0)
    elif BY_KEY:
        decay = tl.load(from_ptr + G * K + H * V + h * K + k, mask=k < K, other=0.0)
    else:
        decay = tl.load(from_ptr + G * K + H * V + h)
    query = tl.load(queries_ptr + t * (G * K) + g * K + k, mask=passed & (k < K), other=0.0)
    strength = 0.0
    if DELTA:
        strength = tl.load(strengths_ptr + t * H + h, mask=passed, other=0.0)
    return key, value, decay, query, strength


@triton.jit
def _walk(
    chains_ptr, paths_ptr, lengths_ptr, bases_ptr, folds_ptr, kept_ptr, queries_ptr, strengths_ptr, written_ptr,
    reads_ptr, rows_ptr, states_ptr, rates_ptr,
    REACH: tl.constexpr, ROW: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr, BY_KEY: tl.constexpr,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Some columns of a head along a chain. What a step needs is read while the step before is computed."""
    n, h = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(chains_ptr + 2 * n), tl.load(chains_ptr + 2 * n + 1)
    g, k, v = h // (H // G), tl.arange(0, K2), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    if first < end:
        place, real = k[:, None] * V + v[None, :], (k < K)[:, None] & (v < V)[None, :]
        state = tl.load(states_ptr + (tl.load(bases_ptr + first) * H + h) * K * V + place, mask=real, other=0.0)
        if CHANNELS:
            rates = tl.load(rates_ptr + place, mask=real, other=0.0)
        count = tl.load(lengths_ptr + first)
        steps = count + end - first
        at = _ancestor(paths_ptr, first, 0, count, steps, REACH)
        soon = _ancestor(paths_ptr, first, 1, count, steps, REACH)
        key, value, decay, query, strength = _taken(
            at, rows_ptr, kept_ptr, queries_ptr, strengths_ptr, g, h, k, v, G, H, K, V, C, ROW, DELTA, CHANNELS, BY_KEY
        )
        for step in range(steps):
            later = _ancestor(paths_ptr, first, step + 2, count, steps, REACH)
            next_key, next_value, next_decay, next_query, next_strength = _taken(
                soon, rows_ptr, kept_ptr, queries_ptr, strengths_ptr, g, h, k, v, G, H, K, V, C, ROW, DELTA, CHANNELS,
                BY_KEY,
            )  # fmt: skip
            if CHANNELS:
                state *= tl.exp(decay[None, :] * rates)
            elif BY_KEY:
                state *= decay[:, None]
            else:
                state *= tl.exp(decay)
            if DELTA:  # noqa: SIM102 (the compiler decides this one, the device the next)
                if at < 0:  # a row has what was written
                    value = strength * (value - tl.sum(key[:, None] * state, 0))
            keys, values = tl.broadcast_to(key[:, None], (K2, BLOCK)), tl.broadcast_to(value[None, :], (K2, BLOCK))
            state = tl.fma(keys, values, state)  # by name: a compiler may fuse either product with the sum
            if step >= count:
                t = first + step - count
                to = t * (H * V) + h * V + v
                tl.store(reads_ptr + to, tl.sum(query[:, None] * state, 0), mask=v < V)
                if DELTA:
                    tl.store(written_ptr + to, value, mask=v < V)
                fold = tl.load(folds_ptr + t)
                if fold != NONE:
                    tl.store(states_ptr + (fold * H + h) * K * V + place, state, mask=real)
            at, soon = soon, later
            key, value, decay, query, strength = next_key, next_value, next_decay, next_query, next_strength


@triton.jit
def _keep(
    x_ptr, kept_ptr, written_ptr, rows_t_ptr, rows_ptr, stride_xt, stride_wt,
    INPUTS: tl.constexpr, C: tl.constexpr, ROW: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one token's row: inputs of the convolution, keys, what is written, decays or their logarithms."""
    t = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_t_ptr + t)
    if row != TRASH:
        e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        writes = (e >= C + KEYS) & (e < C + KEYS + VALUES)
        own = tl.load(x_ptr + t * stride_xt + INPUTS + e, mask=e < C, other=0.0).to(tl.float32)
        kept = tl.load(kept_ptr + t * (ROW - C) + e - C, mask=(e >= C) & (e < ROW) & (writes == 0), other=0.0)
        written = tl.load(written_ptr + t * stride_wt + e - C - KEYS, mask=writes, other=0.0)
        tl.store(rows_ptr + row * ROW + e, own + kept + written, mask=e < ROW)

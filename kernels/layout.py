"""TreeLayout: the positions of a forward pass's tokens in their trees and in the KV cache.

Shape legend: T tokens of the pass, R trees, P pages of the longest trunk, W branch slots of the widest tree
(a multiple of 32), C = W / 32 words of ancestry bits, L layers, G key/value heads, S slots of the cache, D head size.

One tree of the pass, its trunk of 5 tokens in pages of 4, its branches in the slots of a third page::

    trunk     [t0 t1 t2 t3][t4 .  .  . ]      trunk_pages = [2, 3]   trunk_len = 5
    branches  [a  b  .  c ]                   branch_slots = [16, 17, 0, 19]  (a hole points at NULL_SLOT)

    a -- c          ancestry(c) = bit 0 (a) | bit 3 (c)          a token sees itself
    b               ancestry(b) = bit 1 (b)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.kv_kinds import row_width

NULL_SLOT = 0  # holds zeros for ever: what holes and padding read
TRASH_SLOT = 1  # what padding tokens write; nothing reads it
NULL_STATE = 0  # the state of a recurrent layer before the first token: zeros for ever
WORD = 32
TAKEN_AT_ONCE = 1 << 16  # bytes of a copy from pageable memory that a GPU's driver takes without waiting
BLOCK = 32  # tokens of a sequence after which a recurrent layer keeps a state; see `DeltaKind.block`
CHANNEL_BLOCK = 4  # the same of a `ChannelKind`
HOST = ("trunk_runs", "adapters_T")  # fields of a layout that stay on the host


@dataclass(frozen=True)
class TreeLayout:
    """The trees of a pass, for attention and KV writes. Built by the engine, read only by kernels."""

    positions_T: Tensor  # int64, trunk length + depth: never a slot's place in memory
    write_slots_T: Tensor  # int64, the slot that takes each token's key and value
    token_starts: Tensor  # int32 [R + 1]: tree r owns tokens starts[r] .. starts[r + 1] - 1
    trunk_seen_T: Tensor  # int32, how many trunk tokens each token sees: all, or its own prefix during prefill
    trunk_pages_RP: Tensor  # int32, page numbers, filled up with 0
    trunk_len_R: Tensor  # int32
    trunk_runs: Tensor  # int32 [n, 3], on the host: (tree, first slot, length) of each piece; not read by "triton"
    branch_slots_RW: Tensor  # int64, holes and padding are NULL_SLOT
    branch_len_R: Tensor  # int32, the places of each row of branch_slots_RW before its padding
    branch_positions_RW: Tensor  # int32, position of the token in each branch slot (sliding windows)
    ancestry_TC: Tensor  # int32 words, bit i: this token sees branch slot i of its tree
    page_size: int
    impl: str = "torch"  # which implementation of the operators the engine chose
    rows: str | None = None  # implementation of the operators on rows; None: `impl`
    ancestors_TN: Tensor | None = None  # int64, slots of the latest ancestors, parents first; NULL_SLOT where none is
    adapters_T: Tensor | None = None  # int64, on the host: the number of each token's adapter; 0, or None: it has none
    paths: "DeltaPaths | None" = None  # of recurrent layers; None: the model has none

    @property
    def rows_impl(self) -> str:
        """The implementation of the row-wise operators that the engine chose."""
        return self.rows or self.impl

    def changed(self) -> None:
        """Its tensors now hold another pass: operators must check it again."""
        self.refilled()
        vars(self).pop("_fits", None)
        vars(self).pop("_slots", None)
        if self.paths is not None:
            vars(self.paths).pop("_fits", None)

    def refilled(self) -> None:
        """Its tensors hold another pass, valid by construction: operators must discard anything derived from the old
        values."""
        vars(self).pop("_tasks", None)
        if self.paths is not None:
            vars(self.paths).pop("_groups", None)
            vars(self.paths).pop("_planned", None)

    def to(self, device: torch.device | str) -> "TreeLayout":
        """The same layout on a device, except `trunk_runs` and `adapters_T`."""
        if self.positions_T.device == torch.device(device):
            return self
        moving = {name: x for name, x in vars(self).items() if isinstance(x, Tensor) and name not in HOST}
        there = {name: sent(x, device) for name, x in moving.items()}
        return replace(self, **there, paths=None if self.paths is None else self.paths.to(device))

    @property
    def seen(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The tensors that define which tokens see what, as arguments for operators that take only tensors."""
        trunk = self.positions_T, self.token_starts, self.trunk_seen_T, self.trunk_runs
        return (*trunk, self.branch_slots_RW, self.branch_positions_RW, self.ancestry_TC)

    def in_chunks(self, size: int) -> "TreeLayout":
        """The same layout for attention in chunks: each token has the last position of its chunk of `size` positions,
        from which a window of that size reaches back to the first."""
        found = replace(self, positions_T=self.positions_T // size * size + (size - 1))
        if "_fits" in vars(self):  # checked already: only positions differ
            vars(found)["_fits"] = vars(self)["_fits"]
        return found

    def branch_mask_TW(self) -> Tensor:
        """The ancestry bits unpacked: bool [T, W]."""
        return unpack_bits(self.ancestry_TC)


@dataclass(frozen=True)
class DeltaPaths:
    """Rows of tokens and states, in separate stores, that the recurrent layers of a pass read and write.

    A sequence is divided into blocks of `DeltaKind.block` tokens. A token reads the state at the beginning of its block
    and the rows of its ancestors in the block, so its result depends only on its sequence, and sequences share what
    they have in common. The token that ends a block writes the state of its sequence. Reads and writes are in the order
    of the tokens: a state may overwrite the one from which it is computed.

    With blocks of 4 tokens and 2 taps: the trunk t0 .. t5 has rows 10 .. 15 and, after t3, state 7. A pass evaluates a
    and b below t5, and c below a; a later one d below c, which reads the row of c for the convolution only::

        token  position  rows_T  paths_TN      lengths_T  bases_T  folds_T
        a      6         16      [15, 14,  0]  2          7        0
        c      7         17      [-1, 15, 14]  3          7        8        (a is token 0 of this pass; c ends a block)
        b      6         18      [15, 14,  0]  2          7        0
        d      8         19      [17,  0,  0]  0          8        0
    """

    rows_T: Tensor  # int64, the row that keeps each token; TRASH_SLOT: none does
    paths_TN: Tensor  # int64, rows of the ancestors in the token's block and before taps of the convolution, parents
    #   first; -1 - t: that of token t of the pass; NULL_SLOT where none is
    lengths_T: Tensor  # int64, how many of them, the first, are in the token's block
    bases_T: Tensor  # int64, the state that the token's block begins with
    folds_T: Tensor  # int64, the state that takes the place after the token; NULL_STATE: none does
    chains_N2: Tensor | None = None  # int64, first tokens and ends of chains, see `kernels.delta_net.chains`, level by
    #   level, and then empty ones; None: "triton" finds them, which waits for a GPU
    levels: tuple[int, ...] = ()  # how many chains each level has

    def to(self, device: torch.device | str) -> "DeltaPaths":
        """The same paths on a device."""
        moving = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **{name: sent(x, device) for name, x in moving.items()})


@dataclass(frozen=True)
class DeltaKind:
    """The sizes of a recurrent layer: of a gated delta net (`kernels.delta_net`).

    Args:
        key_heads, value_heads: number of query and key heads; number of value heads, a multiple.
        key_size, value_size: elements of a head.
        taps: of the convolution before it.
        key_decays: each element of the key has a decay of its own in each head of values; otherwise a head has one.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int
    key_decays: bool = False

    @property
    def parts(self) -> tuple[int, int, int]:
        """Elements of a token's queries, of its keys and of its values."""
        keys = self.key_heads * self.key_size
        return keys, keys, self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Elements of a token's queries, keys and values, the input of the convolution."""
        return sum(self.parts)

    @property
    def decays(self) -> int:
        """The number of a token's decays."""
        return self.value_heads * (self.key_size if self.key_decays else 1)

    @property
    def width(self) -> int:
        """Elements of a token that the operator reads: the channels, value gates, strengths and inputs of decays."""
        return self.channels + self.value_heads * (self.value_size + 1) + self.decays

    @property
    def row(self) -> int:
        """Elements of a token's row: inputs of the convolution, keys, what it writes to each state, decays."""
        return self.channels + self.key_heads * self.key_size + self.value_heads * self.value_size + self.decays

    @property
    def state(self) -> tuple[int, int, int]:
        """The shape of a state."""
        return self.value_heads, self.key_size, self.value_size

    @property
    def block(self) -> int:
        """Tokens of a sequence after which a state is kept."""
        return BLOCK

    @property
    def reach(self) -> int:
        """Ancestors that a token may read."""
        return max(self.block, self.taps) - 1

    def whole(self, length: int) -> int:
        """The number of tokens in complete blocks among the first `length`."""
        return length // self.block * self.block


class ScanKind(DeltaKind):
    """The sizes of a recurrent layer of Mamba-2 (`kernels.scan`): heads of keys are the groups of B and C, of as many
    elements as a state; a head of values is one of x.

    Its rows are laid out like those of a gated delta net: B is the key, and the step times x is what is written.
    """

    @property
    def width(self) -> int:
        """Elements that the operator reads of a token: gates of values, these channels, inputs of steps."""
        return self.channels + self.value_heads * (self.value_size + 1)


class ChannelKind(DeltaKind):
    """The sizes of a recurrent layer of Mamba (`kernels.channel_scan`): one head, whose values are the channels of x,
    and whose key, B or C, has an element per state of a channel.

    Its rows are laid out like those of a gated delta net, with a step for each channel in place of decays of heads.
    """

    @property
    def channels(self) -> int:
        """Elements of a token's x, the input of the convolution."""
        return self.value_size

    @property
    def width(self) -> int:
        """Elements of a token's x and gates."""
        return 2 * self.value_size

    @property
    def row(self) -> int:
        """Elements of a token's row: inputs of the convolution, B, what it writes to each state, steps."""
        return 3 * self.value_size + self.key_size

    @property
    def block(self) -> int:
        """Few tokens: a state is only about five rows large, and each row between costs an exponential per element of a
        state."""
        return CHANNEL_BLOCK


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of multi-head latent attention (`kernels.latent`).

    Args:
        eps: of the latent's norm.
        interleaved: rotary pairs are adjacent elements; otherwise they are half of the rotated elements apart.
    """

    heads: int
    plain: int
    rotated: int
    rank: int
    value: int
    eps: float
    interleaved: bool

    @property
    def width(self) -> int:
        """Elements of the key that all heads read."""
        return self.rotated + self.rank


@dataclass(frozen=True)
class CacheKind:
    """The rows that a layer keeps of each token, in the token's slot: rows of a tensor, or of two.

    Args:
        heads, size: rows, and elements of a row.
        pair: keys and values; otherwise one tensor, such as the input of a short convolution, one row of the model's
            width.
        shared: one tensor serves as keys and values.
    """

    heads: int
    size: int
    pair: bool = True
    shared: bool = False

    @property
    def tensors(self) -> int:
        """How many tensors hold its rows."""
        return 2 if self.pair and not self.shared else 1

    def row(self, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Elements of a row, and their dtype, in a cache of this dtype: 8 bits are for keys and values only."""
        if self.pair:
            return row_width(self.size, dtype), dtype
        return self.size, torch.bfloat16 if dtype.itemsize == 1 else dtype

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a token's rows in a cache of this dtype."""
        size, kept = self.row(dtype)
        return self.tensors * self.heads * size * kept.itemsize


class KVCache:
    """The rows that all layers keep of all tokens, usually keys and values. A slot is one position in every tensor.

    Layers that keep the same share tensors [L, G, S, D]: a model whose layers are alike has one of keys and one of
    values. They are head-major, so that a head's rows are contiguous; those of 8 bits: see `kernels.kv_kinds`.

    Args:
        k_LGSD, v_LGSD: of the layers with attention; the same tensor if keys serve as values.
        others: one or two tensors for each other `CacheKind`.
        places: for each layer, the index of its tensors (0: keys and values, 1: the first of the others), and its index
            within them; layers may share one. None: the layer keeps nothing. Empty: keys and values, in order.
        recurrent: rows [L, R, W] and states [L, S, H, K, V] of recurrent layers, which have index -1 in `places`.
    """

    def __init__(
        self,
        k_LGSD: Tensor,
        v_LGSD: Tensor,
        others: Sequence[Sequence[Tensor]] = (),
        places: Sequence[tuple[int, int] | None] = (),
        recurrent: tuple[Tensor, ...] = (),
    ):
        self.k_LGSD, self.v_LGSD = k_LGSD, v_LGSD
        both, more = (k_LGSD, v_LGSD), tuple(map(tuple, others))
        self.groups = both[: 1 if v_LGSD is k_LGSD else 2], *more
        places = places or [(0, i) for i in range(len(k_LGSD))]
        self.recurrent = recurrent
        every = both, *more, recurrent
        self.layers: list[tuple[Tensor, ...]] = [
            () if place is None else tuple(x[place[1]] for x in every[place[0]]) for place in places
        ]


def sent(x: Tensor, device: torch.device | str) -> Tensor:
    """A tensor on a device. With more bytes of pageable memory than a GPU's driver takes at once, the host would wait
    for earlier passes."""
    if x.is_cpu and x.nbytes > TAKEN_AT_ONCE and torch.device(device).type == "cuda":
        x = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)
    return x.to(device, non_blocking=True)


def unpack_bits(words_TC: Tensor) -> Tensor:
    """int32 words -> bool [T, 32 * C], lowest bit first."""
    shifts = torch.arange(WORD, dtype=torch.int32, device=words_TC.device)
    return ((words_TC.unsqueeze(-1) >> shifts) & 1).bool().flatten(-2)

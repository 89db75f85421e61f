"""Tensor parallelism: several processes compute one model, each with a part of every large matrix.

Matrices that read the residual stream are split by outputs: each process has some heads, and a part of the MLP's
inner width. Matrices that write to it are split by inputs, so their results are partial sums (Shoeybi et al., 2019,
"Megatron-LM", section 3). The head is split by vocabulary. Norms of the stream, which are small, are replicated.

Shape legend: N rows, E width, V vocabulary, v tokens of this process, U chosen tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.stack import Matrix
from models.config import Config
from models.errors import CheckpointError
from models.formats.linear import Linear
from models.shard import Shard

# An MLP is cut at multiples of one of UNITS, so that groups of quantised weights stay whole: of the largest unit that
# leaves each process at least EVEN units, so that no process has an eighth more than another.
UNITS, EVEN = (128, 64, 32, 16, 8), 8


def part(total: int, shard: Shard, unit: int = 1) -> range:
    """Return an even share of `total` items in whole units, which divide `total`."""
    units = total // unit
    return range(units * shard.rank // shard.size * unit, units * (shard.rank + 1) // shard.size * unit)


@dataclass(frozen=True)
class Partition:
    """The part of a model that a process has. Ranges of None mean everything, in the original order.

    Args:
        config: the configuration of this part: heads, widths of MLP and convolutions are those of the process.
        qkv, up, into: outputs of stacked matrices, in the order of the layer's.
        heads, inner, channels: inputs of the matrix after attention, after the MLP's activation, after a convolution;
            the convolution's own weights have `channels` too.
        sinks: the query heads whose sinks this process has.
        q_norm, k_norm: elements of norms that read all heads as one row, or that have a vector per head.
        vocab: the head's tokens; None also if the head is so small that every process has all of it.
    """

    config: Config
    qkv: Sequence[range] | None = None
    up: Sequence[range] | None = None
    into: Sequence[range] | None = None
    heads: range | None = None
    inner: range | None = None
    channels: range | None = None
    sinks: range | None = None
    q_norm: range | None = None
    k_norm: range | None = None
    vocab: range | None = None

    @staticmethod
    def of(c: Config, shard: Shard, where: str, even: int = EVEN) -> "Partition":
        """Return the part of a process.

        Args:
            c: the configuration of the whole model.
            where: the model's folder, for messages.
            even: the least number of an MLP's units that a process gets, if the MLP has enough.

        Raises:
            CheckpointError: the heads cannot be divided among this number of processes.
        """
        if shard.size == 1:
            ordered = c.query_gate == "below" or c.grouped_qkv != "" or c.interleaved
            return Partition(c, qkv=_qkv(c, range(c.heads), range(c.kv_heads)) if ordered else None)
        _check_whole(c, where)
        _check_heads(c, shard, where)
        D, M, heads = c.head_dim, c.mlp_width, part(c.heads, shard)
        kv = part(c.kv_heads, shard)
        if not kv:  # fewer heads than processes, so several processes have the same one
            kv = range(shard.rank * c.kv_heads // shard.size, shard.rank * c.kv_heads // shard.size + 1)
        unit = next((unit for unit in UNITS if M % unit == 0 and M // unit >= even * shard.size), 1)
        inner, channels = part(M, shard, unit), part(c.width, shard)
        ends = -(-c.vocab_size // shard.size)  # `gather` needs equal shares, except the last
        vocab = range(shard.rank * ends, min((shard.rank + 1) * ends, c.vocab_size))
        q_norm, k_norm = _times(heads, D), _times(kv, D)
        convs = replace(c.convs, width=len(channels)) if c.convs else None
        return Partition(
            replace(c, heads=len(heads), kv_heads=len(kv), mlp_width=len(inner), convs=convs),
            qkv=_qkv(c, heads, kv),
            up=(inner, _after(inner, M)) if c.gated else (inner,),
            into=[_after(channels, i * c.width) for i in range(3)],
            heads=q_norm,
            inner=inner,
            channels=channels,
            sinks=heads,
            q_norm=q_norm if c.head_norms in ("all", "own") else None,
            k_norm=k_norm if c.head_norms in ("all", "own") else None,
            vocab=None if c.scores or c.vocab_size < shard.size**2 else vocab,
        )


def _check_whole(c: Config, where: str) -> None:
    """Raise CheckpointError if the model has a part that no process can have a share of."""
    for what, present in (
        ("mixtures of experts", c.experts),
        ("multi-head latent attention", c.latent),
        ("recurrent layers", c.recurrent),
        ("layers that differ, share keys or have inputs of their own", c.uneven or c.layer_inputs),
    ):
        if present is not None:
            raise CheckpointError(f"{what} cannot be divided among processes", where=where, remedy="start one process")


def _check_heads(c: Config, shard: Shard, where: str) -> None:
    """Raise CheckpointError if the model's heads cannot be divided among the processes."""

    def fits(size: int) -> bool:
        return c.heads % size == 0 and (c.kv_heads % size == 0 or size % c.kv_heads == 0)

    if not fits(shard.size) or min(c.mlp_width, c.width) < shard.size:
        able = ", ".join(str(size) for size in range(1, c.heads + 1) if fits(size))
        raise CheckpointError(
            f"{c.heads} heads with {c.kv_heads} of keys and values cannot be divided among {shard.size} processes",
            where=where,
            remedy=f"start one of {able} processes",
        )


def _qkv(c: Config, heads: range, kv: range) -> list[range]:
    """Return the outputs of queries, keys and values of some heads; gates lie before the queries of all of them."""
    D, H, G, share = c.head_dim, c.heads, c.kv_heads, c.heads // c.kv_heads
    keys, gates = (1 + bool(c.query_gate)) * H, []
    if c.grouped_qkv == "quarters":
        n = H // 4
        starts = [[h + h // n * 2 * n + first for h in some] for some, first in ((heads, 0), (kv, 2 * n), (kv, n))]
    elif c.grouped_qkv:
        starts = [[h + h // share * 2 for h in heads], *([g * (share + 2) + share + i for g in kv] for i in (0, 1))]
    else:
        starts = [[*heads], *([keys + i * G + g for g in kv] for i in (0, 1))]
    if c.query_gate == "below":
        gates, starts[0] = [2 * h + 1 for h in heads], [2 * h for h in heads]
    elif c.query_gate:
        gates, starts[0] = [*heads], [H + h for h in heads]
    queries, keys, values = (_joined(heads, D) for heads in starts)
    if c.interleaved:
        queries, keys = ([some for h in heads for some in in_halves(c, h * D)] for heads in starts[:2])
    return [*_joined(gates, D), *queries, *keys, *values]


def in_halves(c: Config, first: int = 0) -> list[range]:
    """Return the elements of a head in the order of a rotation by halves, for a checkpoint in which elements that are
    rotated with each other lie side by side (`Config.interleaved`).

    Args:
        first: the head's first element.
    """
    dims = next((rope.head_dim for rope in c.tables()), 0)
    rotated, end = range(first, first + dims), first + c.head_dim
    return [some for some in (rotated[::2], rotated[1::2], range(rotated.stop, end)) if some]


def _joined(heads: Sequence[int], size: int) -> list[range]:
    """Return the elements of heads of `size` elements; neighbouring heads share a range."""
    runs: list[range] = []
    for head in heads:
        if runs and runs[-1].stop == head * size:
            runs[-1] = range(runs[-1].start, (head + 1) * size)
        else:
            runs.append(range(head * size, (head + 1) * size))
    return runs


def _times(some: range, factor: int) -> range:
    return range(some.start * factor, some.stop * factor)


def _after(some: range, first: int) -> range:
    return range(some.start + first, some.stop + first)


class Summed(nn.Module):
    """A linear layer whose inputs are divided among processes, which sum their products, see
    `models.formats.linear.Linear`.

    Args:
        layer: the layer of this process's inputs, without a bias.
        bias: [out], added to the sum.
    """

    matrix: Matrix | None = None  # the native stack cannot sum over processes

    def __init__(self, layer: Linear, bias: Tensor | None, shard: Shard):
        super().__init__()
        self.layer, self.bias, self.shard = layer, bias, shard
        self.names, self.made_of = layer.names, layer.made_of

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs of this process] -> [..., out]."""
        y = self.shard.sum(self.layer(x))
        return y if self.bias is None else y + self.bias

    def rows(self, ids_U: Tensor) -> None:
        """See `models.formats.linear.Linear`."""


class Gathered(nn.Module):
    """The head, whose tokens are divided among processes; whole rows are gathered, see `models.formats.linear.Linear`.

    Args:
        own: the layer of this process.
        tokens: the tokens of this process; no process has more than the first.
        outs: the number of tokens of all processes.
    """

    bias: Tensor | None = None
    matrix: Matrix | None = None

    def __init__(self, own: Linear, tokens: range, outs: int, shard: Shard):
        super().__init__()
        self.own, self.tokens, self.outs, self.shard = own, tokens, outs, shard
        self.names, self.made_of = own.names, own.made_of

    def forward(self, x: Tensor) -> Tensor:
        """[..., E] -> [..., V]."""
        short = -(-self.outs // self.shard.size) - len(self.tokens)
        parts = self.shard.gather(F.pad(self.own(x), (0, short)).contiguous())
        return parts.movedim(0, -2).flatten(-2)[..., : self.outs].contiguous()

    def rows(self, ids_U: Tensor) -> Any:
        """See `models.formats.linear.Linear`."""
        own = self.own.rows((ids_U - self.tokens.start).clamp(0, len(self.tokens) - 1))
        if own is None:
            return None
        return _Chosen(own, (ids_U >= self.tokens.start) & (ids_U < self.tokens.stop), self.shard)

    def log_softmax(self, logits_Nv: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Normalise this process's logits over the whole vocabulary, without gathering rows.

        Args:
            logits_Nv: the output of `own`.
            size: the number of tokens that exist; log-probabilities of later ones are -inf.

        Returns:
            log-probabilities, float32 [N, v]; and for each row whether all processes' logits are finite, bool [N].
        """
        x_Nv = logits_Nv.float()
        finite_N = torch.isfinite(x_Nv.sum(-1)).float()
        parts = self.shard.gather(torch.stack([x_Nv.logsumexp(-1), finite_N]))
        logp_Nv = x_Nv - parts[:, 0].logsumexp(0).unsqueeze(1)
        logp_Nv[:, max(0, size - self.tokens.start) :] = float("-inf")
        return logp_Nv, parts[:, 1].amin(0) == 1


@dataclass(frozen=True)
class _Chosen:
    """Some tokens of a head: each process computes its own tokens, and zeros in place of the others."""

    own: Linear
    mine_U: Tensor
    shard: Shard

    def __call__(self, x: Tensor) -> Tensor:
        """[N, E] -> [N, U]."""
        return self.shard.sum(torch.where(self.mine_U, self.own(x), 0))


class Agreed(nn.Module):
    """A layer that every process has; all return the first process's bits, see `models.formats.linear.Linear`."""

    matrix: Matrix | None = None

    def __init__(self, layer: Linear, shard: Shard):
        super().__init__()
        self.layer, self.shard = layer, shard
        self.names, self.made_of, self.bias = layer.names, layer.made_of, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        y = self.layer(x)
        return self.shard.sum(y if self.shard.rank == 0 else torch.zeros_like(y))

    def rows(self, ids_U: Tensor) -> None:
        """See `models.formats.linear.Linear`."""

"""Distributions over (beam, token), and draws from them, for beam sampling and DSBD.

The next list of beams is drawn from all continuations of the current one, equation (1) of the DSBD paper:

    p_beam(i, v) = p(entry i) p(v | entry i) / sum,

over the W entries i of the list and the tokens v, warped once, as one distribution. Entries that are the same sequence
are one beam with a count, but the warp treats them as separate: a token after a beam of n entries takes n places of a
top-k, each of its copies is tempered separately, and top-p may keep only some of them.

A cell (beam, token) has the summed probability of its copies. Cells are ordered by node, then by token, and a draw is
the first cell at which the cumulative probability, in float64, exceeds a uniform number. The order is the same on every
code path below, and so are the draws.

If the warp leaves few cells, they are kept in lists: the largest log-probabilities of each row determine these cells
and come to the host with the answer, so rows are read once and never sorted. If the warp leaves many cells, a tensor on
the host holds all of them (`search.dsbd.copies` finds the border of the warp); a GPU then sends whole rows with the
answer, to avoid waiting a second time.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, count, islice
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.cache.tree import TokenTree
from engine.contract.sampling import Warp, by_row
from search.base import Evaluate, top_k
from search.dsbd.copies import REACHED, Copies

MAX_LISTED_CELLS = 1024  # a distribution over more cells is a tensor
NUCLEUS = 64  # tokens of a row that are listed for top-p; smaller vocabularies are listed whole
MAX_TOP_K = 256  # tokens of a row that are listed for top-k; a larger top-k uses whole rows
SUMMED = 256  # blocks of a tensor that are summed at a time
Probabilities = Sequence[float] | Tensor


class Beam(NamedTuple):
    """Entries of the list that are the same sequence: its last node, its log-probability, and their number."""

    node: int
    logprob: float
    count: int = 1


class Row(NamedTuple):
    """The distribution of the token after a node.

    Attributes:
        logps, tokens: the largest log-probabilities, best first, and their tokens.
        complete: whether no other token is possible.
        log_mass: log(sum(exp(logp / temperature))) of the whole row.
        logp_V: the whole row; None if `logps` has all of it.
    """

    logps: Sequence[float]
    tokens: Sequence[int]
    complete: bool
    log_mass: float = 0.0
    logp_V: Tensor | None = None

    @property
    def bound(self) -> float:
        """An upper bound on the log-probabilities of the tokens that are not listed."""
        return -math.inf if self.complete else self.logps[-1] if self.logps else math.inf


Rows = dict[int, Row]  # by node


class Cell(NamedTuple):
    """A cell of the joint distribution.

    Attributes:
        score: the log-probability of one copy, up to a constant.
        number: the cell's number, node * vocab + token.
        logp: the log-probability of its token.
        copies: the number of equal cells that it stands for.
    """

    score: float
    number: int
    logp: float
    copies: int


class Reader:
    """Reads the part of log-probability rows that a warp needs, and makes joint distributions from it.

    Args:
        warp: the warp of joint distributions.
        vocab: number of tokens; columns from `vocab` on are -inf.
        normalised: see `Task.normalised`.
    """

    def __init__(self, warp: Warp, vocab: int, normalised: bool = True):
        self.warp, self.vocab, self.normalised = warp, vocab, normalised
        self.k = 1 if warp.temperature == 0 else warp.top_k
        nucleus = NUCLEUS if warp.top_p < 1 or warp.min_p else 0
        self._size = (self.k + 1 if self.k < MAX_TOP_K else 0) if self.k else nucleus

    def fetch(self, tree: TokenTree, nodes: Iterable[int], rows: Rows) -> Generator[Evaluate, Any, bool]:
        """Evaluate the nodes without a row and add their rows; return whether there were such nodes."""
        if new := sorted({node for node in nodes if node not in rows}):  # the order in which answers come
            logp_NV, numbers = yield Evaluate(tree, new, self.read)
            rows.update(zip(new, self.rows(logp_NV, numbers), strict=True))
        return bool(new)

    def read(self, logp_NV: Tensor, _peaks_NB: Tensor | None = None) -> Tensor:
        """Return the numbers that `rows` takes, float64, on the device of the log-probabilities."""
        V = logp_NV.shape[1]
        if self._whole(logp_NV):
            return as_doubles(logp_NV)
        best_N2K = top_k(logp_NV, self._listed(V))
        if not self._has_mass(V):
            return best_N2K.view(-1)
        T, peak_N1 = self.warp.temperature or 1, best_N2K[:, 0, :1].clamp(min=-3e38)
        mass_N1 = by_row(torch.logsumexp, (logp_NV - peak_N1.float()) / T)  # float32 holds small differences
        return torch.cat([best_N2K.flatten(1), mass_N1.double() + peak_N1 / T], 1).view(-1)

    def rows(self, logp_NV: Tensor, numbers: Tensor) -> list[Row]:
        """Return a row for each node, from the numbers that `read` returned, on the host."""
        N, V = logp_NV.shape
        if self._whole(logp_NV):
            logp_NV, numbers = numbers.view(torch.float32)[: N * V].view(N, V), numbers[:0]
        k, has_mass = self._listed(V), self._has_mass(V)
        return [
            Row(found[:k], [int(token) for token in found[k : 2 * k]], k == V, found[-1] if has_mass else 0.0, logp_V)
            for found, logp_V in zip(numbers.view(N, 2 * k + has_mass).tolist(), logp_NV.unbind(), strict=True)
        ]

    def _whole(self, logp_NV: Tensor) -> bool:
        """Whether whole rows are read with the answer: any of their cells may be drawn, and the rows are on a GPU."""
        return not logp_NV.is_cpu and not self._listed(logp_NV.shape[1])

    def _listed(self, V: int) -> int:
        """The number of tokens of a row that are listed."""
        return V if V <= NUCLEUS else min(self._size, V)

    def _has_mass(self, V: int) -> bool:
        """Whether rows need their mass because it is not 1: rows are normalised unless they are warped or cut."""
        nucleus = self.warp.top_p < 1 and not self.k
        return nucleus and V > NUCLEUS and (self.warp.temperature != 1 or self.vocab < V or not self.normalised)

    def p_beam(self, rows: Mapping[int, Row], beams: Sequence[Beam]) -> "Joint":
        """Return equation (1), warped: the distribution of the list after these beams, which are all different."""
        best = max(beam.logprob for beam in beams)
        ranked = sorted(Beam(node, logprob - best, count) for node, logprob, count in beams)
        return self._of_listed(rows, ranked) or self._of_all(rows, ranked)

    def _of_listed(self, rows: Mapping[int, Row], beams: Sequence[Beam]) -> "Joint | None":
        """The distribution from the listed tokens; None if other tokens may be drawn too."""
        warp, k = self.warp, self.k
        bound = max([offset + rows[node].bound for node, offset, _ in beams])
        cells = self._cells_above(bound, rows, beams)
        if not cells or (bound > -math.inf and len(cells) < k):
            return None
        if k:
            cells = best_copies(cells, k)
        if warp.temperature == 0:
            del cells[:-1]  # cells are sorted with the first of equals last
        T, best = warp.temperature or 1.0, cells[0].score
        masses = [math.exp((cell.score - best) / T) for cell in cells]  # each of one copy
        copies = [cell.copies for cell in cells]
        whole = bound == -math.inf or k > 0
        if warp.top_p < 1:
            if whole:
                total = math.fsum(map(mul, masses, copies))
            else:
                total = math.fsum(
                    [n * math.exp((offset - best) / T + rows[node].log_mass) for node, offset, n in beams]
                )
            reached = cut_to_nucleus(masses, copies, warp.top_p * total * REACHED)
            whole |= reached
        if warp.min_p:
            whole |= math.exp((bound - best) / T) < warp.min_p
            left = sum(mass >= warp.min_p for mass in masses)
            del masses[left:], copies[left:]
        if not whole or (len(masses) > MAX_LISTED_CELLS and rows[beams[0].node].logp_V is not None):
            return None
        masses = list(map(mul, masses, copies))
        total = math.fsum(masses)
        found = sorted([(cell.number, mass / total, cell.logp) for mass, cell in zip(masses, cells, strict=False)])
        numbers, probs, logps = map(list, zip(*found, strict=True))
        return Joint(self.vocab, probs, logps, numbers)

    def _cells_above(self, bound: float, rows: Mapping[int, Row], beams: Sequence[Beam]) -> list[Cell]:
        """Return the listed cells with scores above those of all cells not listed, best first, among equals the last
        first."""
        cells: list[Cell] = []
        for node, offset, n in beams:
            first, row = node * self.vocab, rows[node]
            for logp, token in zip(row.logps, row.tokens, strict=True):
                if (score := offset + logp) <= bound:
                    break
                if token < self.vocab:  # a draft model may have more tokens
                    cells.append(Cell(score, first + token, logp, n))
        cells.sort(reverse=True)
        return cells

    def _of_all(self, rows: Mapping[int, Row], beams: Sequence[Beam]) -> "Joint":
        """The distribution from whole rows."""
        V, nodes, warp = self.vocab, [beam.node for beam in beams], self.warp
        logp_WV = self._stacked(rows, nodes)
        if warp.temperature == 0:
            offset_W = torch.tensor([beam.logprob for beam in beams], dtype=torch.float64, device=logp_WV.device)
            row = int((logp_WV.amax(1) + offset_W).argmax())  # the first of equals
            return self._of_cells(logp_WV, nodes, torch.tensor([row * V + int(logp_WV[row].argmax())]), [1.0])
        if warp.top_k or warp.top_p < 1 or warp.min_p:
            copies = Copies(logp_WV, [beam.logprob for beam in beams], [beam.count for beam in beams], warp)
            total, cells = copies.total()
            if cells <= MAX_LISTED_CELLS:
                return self._of_cells(logp_WV, nodes, *copies.cells())
            probs = torch.empty_like(logp_WV)
            for block, mass_RV in copies.masses():
                probs[block] = mass_RV.div_(total)
        else:  # n copies equal one whose warped logarithm is greater by log n
            offsets = [beam.logprob + warp.temperature * math.log(beam.count) for beam in beams]
            offset_W1 = torch.tensor(offsets, dtype=torch.float32).unsqueeze(1).to(logp_WV.device, non_blocking=True)
            probs = logp_WV + offset_W1 if warp.temperature == 1 else logp_WV.add_(offset_W1)
            if not self.normalised:
                probs -= probs.max()
            if warp.temperature != 1:
                probs /= warp.temperature
                probs = torch.log_softmax(probs.view(1, -1), -1).view_as(probs)
                del logp_WV  # memory for the rows again
                logp_WV = self._stacked(rows, nodes)
            probs.exp_().div_(sums_of(probs.view(-1)).sum())
            if probs.numel() <= MAX_LISTED_CELLS:
                place_M = probs.view(-1).nonzero()[:, 0]
                return self._of_cells(logp_WV, nodes, place_M, probs.view(-1)[place_M].tolist())
        if not probs.is_cpu:
            probs, logp_WV = torch.stack([probs, logp_WV]).cpu()  # one transfer
        return Joint(V, probs.view(-1), logp_WV.view(-1), None, nodes)

    def _stacked(self, rows: Mapping[int, Row], nodes: Sequence[int]) -> Tensor:
        """A copy of the whole rows of nodes, [W, vocab]."""
        logp_WV = torch.stack([rows[node].logp_V for node in nodes])  # type: ignore[misc]
        short = self.vocab - logp_WV.shape[1]
        return torch.nn.functional.pad(logp_WV, (0, short), value=-math.inf) if short else logp_WV

    def _of_cells(self, logp_WV: Tensor, nodes: Sequence[int], place_M: Tensor, masses: list[float]) -> "Joint":
        """The distribution of some of the cells of whole rows."""
        total = math.fsum(masses)
        cells = [nodes[place // self.vocab] * self.vocab + place % self.vocab for place in place_M.tolist()]
        logps = logp_WV.view(-1)[place_M.to(logp_WV.device)].tolist()
        return Joint(self.vocab, [mass / total for mass in masses], logps, cells)


def as_doubles(x: Tensor) -> Tensor:
    """View float32 numbers as float64 [n], two in each; an odd count is padded with a zero."""
    flat = x.reshape(-1)
    return torch.nn.functional.pad(flat, (0, len(flat) % 2)).view(torch.float64)


def best_copies(cells: Sequence[Cell], k: int) -> list[Cell]:
    """The cells that contain the k best copies, and the cells of equal score; `cells` are given best first."""
    places = list(accumulate(cell.copies for cell in cells))
    least = cells[min(bisect_left(places, k), len(cells) - 1)].score
    return [cell for cell in cells if cell.score >= least]


def cut_to_nucleus(masses: list[float], copies: list[int], limit: float) -> bool:
    """Remove, in place, the copies after the nucleus; cells are given best first.

    Returns:
        whether the sum of all masses reaches the limit.
    """
    before = 0.0
    for i, mass in enumerate(masses):
        if before >= limit:
            del masses[i:], copies[i:]
            break
        if before + copies[i] * mass > limit:
            copies[i] = min(copies[i], math.ceil((limit - before) / mass))
        before += copies[i] * mass
    return before >= limit


@dataclass
class Joint:
    """A distribution over cells: node * vocab + token.

    Args:
        vocab: number of tokens of a row.
        probs: probabilities of the cells that can be drawn, as a list or array; or of all cells, as a float32 tensor.
        logps: log-probabilities of the tokens after their nodes, not warped.
        cells: the numbers of these cells, ascending; None for all cells.
        nodes: the nodes of the rows, ascending, if `cells` is None.
    """

    vocab: int
    probs: Probabilities
    logps: Sequence[float] | Tensor
    cells: Sequence[int] | None = None
    nodes: Sequence[int] = ()

    def draw(self, n: int, numbers: Iterator[float]) -> list[int]:
        """Return the indices of n independent draws."""
        return pick(self.probs, islice(numbers, n))

    def cell(self, i: int) -> tuple[int, int]:
        """Return node and token of the i-th cell."""
        if self.cells is not None:
            return divmod(self.cells[i], self.vocab)
        return self.nodes[i // self.vocab], i % self.vocab

    def find(self, node: int, token: int) -> int | None:
        """The index of a cell; None if it cannot be drawn."""
        if self.cells is not None:
            return self._place.get(node * self.vocab + token)
        return self._row[node] * self.vocab + token if node in self._row else None

    @cached_property
    def _place(self) -> dict[int, int]:
        return dict(zip(self.cells or (), count()))

    @cached_property
    def _row(self) -> dict[int, int]:
        return {node: i for i, node in enumerate(self.nodes)}

    def of_nodes(self, nodes: Iterable[int]) -> float:
        """Return the total probability of the rows of these nodes."""
        if isinstance(self.probs, Tensor):
            rows = [self._row[node] for node in nodes]
            return float(self.probs.view(-1, self.vocab)[rows].sum(dtype=torch.float64))
        chosen, V = set(nodes), self.vocab
        return math.fsum([p for cell, p in zip(self.cells or (), self.probs, strict=True) if cell // V in chosen])

    def at(self, other: "Joint") -> Probabilities:
        """Return the probabilities of the cells of another distribution, whose nodes must be among this one's."""
        V = self.vocab
        if other.cells is None:
            rows = [self._row[node] for node in other.nodes] if self.cells is None else []
            if isinstance(self.probs, Tensor):
                return self.probs if rows == list(range(len(self._row))) else self.probs.view(-1, V)[rows].view(-1)
            full = torch.zeros_like(torch.as_tensor(other.probs))
            mine = {i: p for cell, p in zip(self.cells or (), self.probs, strict=True)
                    if (i := other.find(*divmod(cell, V))) is not None}  # fmt: skip
            full[list(mine)] = torch.tensor(list(mine.values()), dtype=full.dtype)
            return full
        if isinstance(self.probs, Tensor):
            return self.probs[[self._row[cell // V] * V + cell % V for cell in other.cells]].tolist()
        mine = dict(zip(self.cells or (), self.probs, strict=True))
        return [mine.get(cell, 0.0) for cell in other.cells]


def pick(probs: Probabilities, numbers: Iterable[float]) -> list[int]:
    """Draw independently: return for each number in (0, 1) the first index at which the cumulative sum exceeds it."""
    if not isinstance(probs, Tensor):
        sums = list(accumulate(probs))
        return [bisect_right(sums, number * sums[-1]) for number in numbers]
    # First the block of each draw, then the index in the block.
    blocks_MB, mass_M = probs.view(-1, block_size(len(probs)) or len(probs)), sums_of(probs)
    sum_M = mass_M.cumsum(0)
    wanted_D = torch.tensor(list(numbers), dtype=torch.float64) * sum_M[-1]
    block_D = torch.searchsorted(sum_M, wanted_D, right=True).clamp_(max=len(sum_M) - 1)
    sum_DB = blocks_MB[block_D].double().cumsum(-1)
    share_D = (wanted_D - sum_M[block_D] + mass_M[block_D]) / mass_M[block_D]
    inside_D = torch.searchsorted(sum_DB, (share_D.clamp_(0, 1 - 1e-12) * sum_DB[:, -1]).unsqueeze(1), right=True)
    return (block_D * blocks_MB.shape[1] + inside_D.squeeze(1)).tolist()


def sums_of(probs: Tensor) -> Tensor:
    """Return the sums of blocks of probabilities, float64 [M], a few at a time: each sum converts what it adds."""
    blocks_MB = probs.view(-1, block_size(len(probs)) or len(probs))
    return torch.cat([some.sum(-1, dtype=torch.float64) for some in blocks_MB.split(SUMMED)])


@lru_cache
def block_size(n: int) -> int:
    """A divisor of n near its square root, 0 if there is none."""
    return min((b for b in range(32, 1025) if n % b == 0), key=lambda b: abs(b - math.sqrt(n)), default=0)

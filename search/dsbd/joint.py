"""Distributions over (beam, token), and drawing from them: what beam sampling and DSBD share.

The next list of beams is drawn from all continuations of the present one, equation (1) of the DSBD paper:

    p_beam(i, v) = p(entry i) p(v | entry i) / sum,

over the W entries i of the list and the tokens v, warped once, as one distribution. Entries that are the same sequence
are one beam with a count, but the warp acts on W x V numbers, as if they were apart: a token after a beam of n entries
takes n places of a top-k, each of its copies is tempered by itself, and top-p may keep some of them and not others.

A cell (beam, token) has the probability of its copies together. Cells are in ascending order, by node, then by token,
and a draw is the first cell at which their cumulative probability, in float64, exceeds a uniform number. That order is
the same on every path below, and so are draws.

Where the warp leaves few cells they are kept in lists. On a CPU C++ finds them in the rows (`kernels.beams`); otherwise
the largest log-probabilities of each row tell which they are, and come to the host with the answer, so that rows are
read once and never sorted. Where the warp leaves many, all cells are kept, as a tensor of the host.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, count, islice
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

import kernels.beams
from engine.sampling import Uniforms, Warp
from engine.tree import TokenTree
from kernels.beams import DENSE, MASSED, WHOLE, Distribution, Leaders
from kernels.cpp import why_not
from kernels.rows import top_k
from search.base import Answer, Evaluate

FEW = 1024  # cells that are kept in lists
NUCLEUS = 64  # tokens of a row that are looked at for top-p before all are; vocabularies no larger are known whole
MOST = 256  # tokens of a row that are looked at for top-k
REACHED = 1 - 1e-12  # share of top-p at which it is reached, whichever way sums were rounded
Probabilities = Sequence[float] | Tensor


class Told:
    """What an answer told of its rows.

    Args:
        numbers: float64, on the host, of each row in turn: the greatest log-probabilities, best first, and their
            tokens; if it is DENSE its peaks, or nothing.
        rows: how many.
        size: log-probabilities of a row; if it is dense all of them.
        kind: of WHOLE: there are no others, otherwise no other is greater; MASSED: log(sum(exp(logp / temperature)))
            of all of the row is not 0, and comes after the tokens; DENSE: C++ looks at the rows themselves.
        logp_NV: all of it.
    """

    def __init__(
        self, numbers: "Tensor | array[float]", rows: int, size: int, kind: int, logp_NV: Tensor | None = None
    ):
        self.numbers, self.size, self.kind, self.logp_NV = numbers, size, kind, logp_NV
        self.stride = len(numbers) // rows
        # What C++ reads, from one row to the next: the log-probabilities, the peaks of all of them.
        self.address = kernels.beams.address(numbers)
        self.step, self.peaks, self.peaks_step = 8 * self.stride, 0, 0
        if kind & DENSE:
            assert logp_NV is not None
            if self.stride:
                self.peaks, self.peaks_step = self.address, self.step
            self.address, self.step = kernels.beams.address(logp_NV, torch.float32), 4 * size

    @classmethod
    def all(cls, logps: Sequence[float], tokens: Sequence[int]) -> "Row":
        """A row outside of which there is nothing."""
        return cls(array("d", [*logps, *tokens]), 1, len(logps), WHOLE), 0

    def known(self, i: int) -> list[float]:
        """Numbers of the i-th row."""
        return self.numbers[i * self.stride : (i + 1) * self.stride].tolist()

    def bound(self, i: int) -> float:
        """No log-probability of the i-th row is greater, but those that are known."""
        return -math.inf if self.kind & WHOLE else self.known(i)[self.size - 1] if self.size else math.inf

    def log_mass(self, i: int) -> float:
        """Of the i-th row, warped."""
        return self.known(i)[-1] if self.kind & MASSED else 0.0


Row = tuple[Told, int]  # what is known of the token after a node
Known = dict[int, Row]  # by node


class Reader:
    """Makes rows of log-probabilities known as far as a warp needs it.

    Args:
        warp: of joint distributions.
        vocab: tokens that exist; columns from there on are -inf.
    """

    def __init__(self, warp: Warp, vocab: int):
        self.warp, self.vocab = warp, vocab
        k = 1 if warp.temperature == 0 else warp.top_k
        self.size = (k + 1 if k < MOST else 0) if k else NUCLEUS if warp.top_p < 1 else 0
        self.whole = warp.top_p < 1 and not k  # wants the mass of all tokens
        self._cells = None if why_not() else Leaders(vocab, warp.temperature, warp.top_k, warp.top_p, FEW)

    def know(self, tree: TokenTree, nodes: Iterable[int], known: Known) -> Generator[Evaluate, Answer, bool]:
        """Evaluate those of the nodes that are not known yet; returns whether there were any."""
        if new := sorted({node for node in nodes if node not in known}):  # the order in which answers come
            logp_NV, numbers = yield Evaluate(tree, new, self.read)
            known.update(zip(new, self.rows(logp_NV, numbers), strict=True))
        return bool(new)

    def read(self, logp_NV: Tensor, peaks_NB: Tensor | None = None) -> Tensor:
        """What the host is going to look at, on the rows' device, as float64: see `rows`."""
        if self._dense(logp_NV):
            return peaks_NB.double().view(-1) if peaks_NB is not None else torch.empty(0, dtype=torch.float64)
        V = logp_NV.shape[1]
        best_N2K = top_k(logp_NV, self._known(V))
        if not self._mass(V):
            return best_N2K.view(-1)
        mass_N1 = torch.logsumexp(logp_NV / (self.warp.temperature or 1), -1, keepdim=True)
        return torch.cat([best_N2K.flatten(1), mass_N1.double()], 1).view(-1)

    def rows(self, logp_NV: Tensor, numbers: Tensor) -> list[Row]:
        """Rows, with what `read` told of them, on the host."""
        N, V = logp_NV.shape
        k, massed = self._known(V), MASSED * self._mass(V)
        if self._dense(logp_NV):
            told = Told(numbers, N, V, DENSE | massed, logp_NV)
        else:
            told = Told(numbers, N, k, WHOLE * (k == V) | massed, logp_NV)
        return [(told, i) for i in range(N)]

    def _dense(self, logp_NV: Tensor) -> bool:
        """Whether the rows lie where C++ can look at them."""
        there = logp_NV.is_cpu and logp_NV.dtype == torch.float32 and logp_NV.is_contiguous()
        return there and self._cells is not None

    def _known(self, V: int) -> int:
        """How many of a row's largest to find."""
        return V if V <= NUCLEUS else min(self.size, V)

    def _mass(self, V: int) -> bool:
        """Whether rows tell of their masses: they are normalised unless warped or cut."""
        return self.whole and V > NUCLEUS and (self.warp.temperature != 1 or self.vocab < V)

    def p_beam(
        self,
        known: Mapping[int, Row],
        nodes: Sequence[int],
        logprobs: Sequence[float],
        counts: Sequence[int] | None = None,
    ) -> "Joint":
        """Equation (1), warped.

        Args:
            known: rows of the nodes at least.
            nodes: the last of each beam, all different.
            logprobs: of the beams, up to a number that is the same for all.
            counts: entries of the list that each beam is; one each by default.
        """
        counts = counts or [1] * len(nodes)
        if self._cells is not None:
            rows: list[int] = []
            for node, n in zip(nodes, counts, strict=True):
                told, i = known[node]
                rows += (node, n, told.address + i * told.step, told.size, told.kind, told.peaks + i * told.peaks_step)
            if found := self._cells(logprobs, rows):
                cells, probs, logps = found
                return Joint(self.vocab, probs, logps, cells, compact=(cells, probs))
        best = max(logprobs)
        given = sorted(zip(nodes, logprobs, counts, strict=True))
        beams = [Rated(node, logprob - best, n, known[node]) for node, logprob, n in given]
        return (self._cells is None and self._leaders(beams)) or self._all(beams)

    def _leaders(self, beams: "Sequence[Rated]") -> "Joint | None":
        """By what is known of the rows; None if more than that may be drawn."""
        warp, V = self.warp, self.vocab
        bound = max([offset + told.bound(i) for _, offset, _, (told, i) in beams])
        if bound == math.inf:
            return None
        k = 1 if warp.temperature == 0 else warp.top_k
        ranked = []  # (score, cell, log-probability, copies) of what is sure to be among the best
        for node, offset, n, (told, i) in beams:
            first, size, numbers = node * V, told.size, told.known(i)
            for logp, token in zip(numbers[:size], map(int, numbers[size : 2 * size]), strict=True):
                if (score := offset + logp) <= bound:
                    break
                ranked.append((score, first + token, logp, n))
        if bound > -math.inf and len(ranked) < (k or 1):
            return None
        ranked.sort(reverse=True)
        if k:
            places = list(accumulate(n for *_, n in ranked))
            last = min(bisect_left(places, k), len(ranked) - 1)  # the cell that has the k-th place; its equals stay
            while ranked[-1][0] < ranked[last][0]:
                ranked.pop()
        if warp.temperature == 0:
            del ranked[:-1]  # the first of equals
        T, best = warp.temperature or 1.0, ranked[0][0]
        masses = [math.exp((score - best) / T) for score, *_ in ranked]  # of one copy
        copies = [n for *_, n in ranked]
        whole = bound == -math.inf or k > 0
        if warp.top_p < 1:
            if whole:
                total = math.fsum(map(mul, masses, copies))
            else:
                log_masses = [(n, (offset - best) / T + told.log_mass(i)) for _, offset, n, (told, i) in beams]
                total = math.fsum([n * math.exp(log_mass) for n, log_mass in log_masses])
            limit, before = warp.top_p * total * REACHED, 0.0  # a copy stays if those before it do not reach top-p
            for i, mass in enumerate(masses):
                if before >= limit:
                    del ranked[i:], masses[i:], copies[i:]
                    break
                if before + copies[i] * mass > limit:
                    copies[i] = min(copies[i], math.ceil((limit - before) / mass))
                before += copies[i] * mass
            whole |= before >= limit
        if not whole or len(ranked) > FEW:
            return None
        masses = list(map(mul, masses, copies))
        total = math.fsum(masses)
        found = sorted((cell, mass / total, logp) for mass, (_, cell, logp, _) in zip(masses, ranked, strict=True))
        cells, probs, logps = zip(*found, strict=True)
        return Joint(V, probs, logps, cells)

    def _all(self, beams: "Sequence[Rated]") -> "Joint":
        """Of all cells."""
        V, nodes, warp = self.vocab, [beam.node for beam in beams], self.warp
        logp_WV = torch.stack([told.logp_NV[i] for *_, (told, i) in beams])  # type: ignore[index]
        if short := V - logp_WV.shape[1]:
            logp_WV = torch.nn.functional.pad(logp_WV, (0, short), value=-math.inf)
        warped = warp.top_k or warp.top_p < 1 or warp.temperature == 0
        if warped:
            told_W2 = torch.tensor([(beam.offset, beam.count) for beam in beams], dtype=torch.float64)
            offset_W1, n_W1 = told_W2.to(logp_WV.device).split(1, 1)
            probs = warp_copies((logp_WV + offset_W1).view(-1), n_W1.expand_as(logp_WV).reshape(-1), warp)
        else:  # n copies are as much as one whose logarithm, warped, is greater by log n
            offsets = [beam.offset + warp.temperature * math.log(beam.count) for beam in beams]
            offset_W1 = torch.tensor(offsets, dtype=torch.float32, device=logp_WV.device).unsqueeze(1)
            probs = warp((logp_WV + offset_W1).view(1, -1))[0].exp_()
            probs /= probs.sum(dtype=torch.float64)
        probs, flat = torch.stack([probs, logp_WV.view(-1).to(probs.dtype)]).cpu()  # one transfer
        if len(probs) <= FEW or (warped and int((probs > 0).sum()) <= FEW):
            places = probs.nonzero().view(-1)
            masses = probs[places].tolist()
            total = math.fsum(masses)
            cells = [nodes[place // V] * V + place % V for place in places.tolist()]
            return Joint(V, [mass / total for mass in masses], flat[places].tolist(), cells)
        return Joint(V, probs.float(), flat.float(), None, nodes)


class Rated(NamedTuple):
    """A beam: its last node, its log-probability beside the best one's, the entries that it is, what follows it."""

    node: int
    offset: float
    count: int
    row: Row


def warp_copies(score_C: Tensor, n_C: Tensor, warp: Warp) -> Tensor:
    """Warped probabilities of cells that each stand for some copies.

    Args:
        score_C: float64 log-probabilities of one copy of each cell, up to a number that is the same for all.
        n_C: float64, how many copies each is.
        warp: as `Warp` does it, of all copies in a row.

    Returns:
        float64 [C], of the copies of each cell together.
    """
    if warp.temperature == 0:
        best = (score_C == score_C.max()).nonzero()[0]  # the first of equals
        return torch.zeros_like(score_C).index_fill_(0, best, 1.0)
    if warp.top_k:
        best_K = torch.topk(score_C, min(warp.top_k, len(score_C)))
        places_K = n_C[best_K.indices].cumsum(0)
        last = (places_K < warp.top_k).sum().clamp(max=len(places_K) - 1)  # has the k-th place; its equals stay
        score_C = score_C.masked_fill(score_C < best_K.values[last], -math.inf)
    mass_C = ((score_C - score_C.max()) / warp.temperature).exp_()
    if warp.top_p < 1:
        order_C = torch.sort(score_C, stable=True).indices.flip(0)  # of equals the last comes first
        mass_C, n_C = mass_C[order_C], n_C[order_C]
        sum_C = (n_C * mass_C).cumsum(0)
        limit = warp.top_p * sum_C[-1] * REACHED  # a copy stays if those before it do not reach top-p
        left_C = limit - torch.cat([sum_C.new_zeros(1), sum_C[:-1]])
        stay_C = torch.minimum((left_C / mass_C).ceil_(), n_C).masked_fill_((left_C <= 0) | (mass_C == 0), 0)
        mass_C, n_C = (torch.empty_like(x).scatter_(0, order_C, x) for x in (mass_C, stay_C))
    mass_C = mass_C * n_C
    return mass_C / mass_C.sum()


@dataclass
class Joint:
    """A distribution over cells: node * vocab + token.

    Args:
        vocab: tokens of a row.
        probs: of the cells that can be drawn, as a list or array; or of all, as a tensor of float32.
        logps: log-probabilities of the tokens after their nodes, not warped.
        cells: which these are, ascending; None: all.
        nodes: of the rows, ascending, if all cells are there.
        compact: cells and probabilities as C++ made them, if it did.
    """

    vocab: int
    probs: Probabilities
    logps: Sequence[float] | Tensor
    cells: Sequence[int] | None = None
    nodes: Sequence[int] = ()
    compact: Distribution | None = None

    def draw(self, n: int, numbers: Uniforms) -> list[int]:
        """Independent draws."""
        if self.compact:
            return kernels.beams.draw(self.compact[1], n, iid=True, key=numbers.key)
        return pick(self.probs, islice(numbers, n))

    def cell(self, i: int) -> tuple[int, int]:
        """Node and token of the i-th."""
        if self.cells is not None:
            return divmod(self.cells[i], self.vocab)
        return self.nodes[i // self.vocab], i % self.vocab

    def find(self, node: int, token: int) -> int | None:
        """Where a cell is; None if it cannot be drawn."""
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
        """Probability of some rows."""
        if isinstance(self.probs, Tensor):
            rows = [self._row[node] for node in nodes]
            return float(self.probs.view(-1, self.vocab)[rows].sum(dtype=torch.float64))
        chosen, V = set(nodes), self.vocab
        return math.fsum([p for cell, p in zip(self.cells or (), self.probs, strict=True) if cell // V in chosen])

    def at(self, other: "Joint") -> Probabilities:
        """Probabilities of the cells of another distribution, whose nodes are among those here."""
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
    """Independent draws: for each number in (0, 1) the first place where the cumulative sum exceeds it."""
    if not isinstance(probs, Tensor):
        sums = list(accumulate(probs))
        return [bisect_right(sums, number * sums[-1]) for number in numbers]
    # The block of each first, then the place in it.
    blocks_MB = probs.view(-1, block_size(len(probs)) or len(probs))
    mass_M = blocks_MB.sum(-1, dtype=torch.float64)
    sum_M = mass_M.cumsum(0)
    wanted_D = torch.tensor(list(numbers), dtype=torch.float64) * sum_M[-1]
    block_D = torch.searchsorted(sum_M, wanted_D, right=True).clamp_(max=len(sum_M) - 1)
    sum_DB = blocks_MB[block_D].double().cumsum(-1)
    share_D = (wanted_D - sum_M[block_D] + mass_M[block_D]) / mass_M[block_D]
    inside_D = torch.searchsorted(sum_DB, (share_D.clamp_(0, 1 - 1e-12) * sum_DB[:, -1]).unsqueeze(1), right=True)
    return (block_D * blocks_MB.shape[1] + inside_D.squeeze(1)).tolist()


@lru_cache
def block_size(n: int) -> int:
    """A divisor of n near its square root, 0 if there is none."""
    return min((b for b in range(32, 1025) if n % b == 0), key=lambda b: abs(b - math.sqrt(n)), default=0)

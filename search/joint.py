"""Distributions over (beam, token), and drawing from them: what beam sampling and DSBD share.

The next list of beams is drawn from all continuations of the present one, equation (1) of the DSBD paper:

    p_beam(i, v) = p(beam i) p(v | beam i) / sum,

warped once, as one distribution. Where the warp leaves few cells (beam, token) the largest log-probabilities of each
row tell which: they come to the host with the answer, so that the rows are read once and never sorted, and what is made
of them are lists. Otherwise all cells are kept, as a tensor of the host.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, count
from typing import NamedTuple

import torch
from torch import Tensor

from engine.sampling import Warp
from engine.tree import TokenTree
from kernels.beams import Distribution, leaders
from kernels.cpp import why_not
from kernels.rows import top_k
from search.base import Evaluate, evaluate

FEW = 1024  # cells that are kept in lists
NUCLEUS = 64  # tokens of a row that are looked at for top-p before all are; vocabularies no larger are known whole
MOST = 256  # tokens of a row that are looked at for top-k
Probabilities = Sequence[float] | Tensor


@dataclass
class Told:
    """What an answer told of its rows, of each in turn: the greatest log-probabilities, best first, and their tokens.

    Args:
        numbers: float64, on the host.
        address: of the first of them.
        stride: numbers of a row.
        size: log-probabilities of a row.
        whole: these are all that there are; otherwise no other is greater.
        massed: after the tokens comes log(sum(exp(logp / temperature))) of all of the row, which is 0 otherwise.
        logp_NV: all of it.
    """

    numbers: "Tensor | array[float]"
    address: int
    stride: int
    size: int
    whole: bool
    massed: bool = False
    logp_NV: Tensor | None = None


class Row(NamedTuple):
    """What is known of the token after a node: where it is."""

    told: Told
    index: int
    address: int

    @classmethod
    def of(cls, logps: Sequence[float], tokens: Sequence[int]) -> "Row":
        """A row outside of which there is nothing."""
        numbers = array("d", [*logps, *tokens])
        address, _ = numbers.buffer_info()
        return cls(Told(numbers, address, len(numbers), len(logps), True), 0, address)

    @property
    def known(self) -> list[float]:
        """Its numbers."""
        start = self.index * self.told.stride
        return self.told.numbers[start : start + self.told.stride].tolist()

    @property
    def bound(self) -> float:
        """No log-probability that is not known is greater."""
        return -math.inf if self.told.whole else self.known[self.told.size - 1] if self.told.size else math.inf

    @property
    def log_mass(self) -> float:
        return self.known[-1] if self.told.massed else 0.0


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

    def know(self, tree: TokenTree, nodes: Iterable[int], known: Known) -> Generator[Evaluate, Tensor, bool]:
        """Evaluate those of the nodes that are not known yet; returns whether there were any."""
        if new := sorted({node for node in nodes if node not in known}):  # the order in which answers come
            logp_NV, numbers = yield from evaluate(tree, new, self.read)
            known.update(zip(new, self.rows(logp_NV, numbers), strict=True))
        return bool(new)

    def read(self, logp_NV: Tensor, peaks_NB: Tensor | None = None) -> Tensor:
        """What the host is going to look at, on the rows' device, as float64: see `rows`."""
        V = logp_NV.shape[1]
        best_N2K = top_k(logp_NV, self._known(V), peaks_NB)
        if not self._mass(V):
            return best_N2K.view(-1)
        mass_N1 = torch.logsumexp(logp_NV / (self.warp.temperature or 1), -1, keepdim=True)
        return torch.cat([best_N2K.flatten(1), mass_N1.double()], 1).view(-1)

    def rows(self, logp_NV: Tensor, numbers: Tensor) -> list[Row]:
        """Rows, with what `read` told of them, on the host."""
        N, V = logp_NV.shape
        k, address, stride = self._known(V), numbers.data_ptr(), len(numbers) // N
        told = Told(numbers, address, stride, k, k == V, self._mass(V), logp_NV)
        return [Row(told, i, address + 8 * i * stride) for i in range(N)]

    def _known(self, V: int) -> int:
        """How many of a row's largest to find."""
        return V if V <= NUCLEUS else min(self.size, V)

    def _mass(self, V: int) -> bool:
        """Whether rows tell of their masses: they are normalised unless warped or cut."""
        return self.whole and V > NUCLEUS and (self.warp.temperature != 1 or self.vocab < V)

    def p_beam(self, known: Mapping[int, Row], nodes: Sequence[int], weights: Sequence[float]) -> "Joint":
        """Equation (1), warped.

        Args:
            known: rows of the nodes at least.
            nodes: the last of each beam.
            weights: logarithms of the beams' probabilities, times how many entries they are; in any unit.
        """
        if not why_not():
            rows: list[int] = []
            for node in nodes:
                told, _, address = known[node]
                rows += (node, address, told.size, told.whole, told.massed)
            if found := leaders(weights, rows, self.vocab, self.warp.temperature, self.warp.top_k, self.warp.top_p):
                cells, probs, logps = found
                return Joint(self.vocab, probs, logps, cells)
        heaviest = max(weights)
        beams = [(weight - heaviest, node, known[node]) for weight, node in zip(weights, nodes, strict=True)]
        return (why_not() and self._leaders(beams)) or self._all(beams)

    def _leaders(self, beams: Sequence[tuple[float, int, Row]]) -> "Joint | None":
        """Best cells first; None if more than is known may be drawn."""
        warp, V = self.warp, self.vocab
        bound = max([offset + row.bound for offset, _, row in beams])
        if bound == math.inf:
            return None
        k = 1 if warp.temperature == 0 else warp.top_k
        ranked = []  # (score, cell, log-probability) of what is sure to be among the best
        for offset, node, row in beams:
            first = node * V
            size, numbers = row.told.size, row.known
            for logp, token in zip(numbers[:size], map(int, numbers[size : 2 * size]), strict=True):
                if (score := offset + logp) <= bound:
                    break
                ranked.append((score, first + token, logp))
        if bound > -math.inf and len(ranked) < (k or 1):
            return None
        ranked.sort(reverse=True)
        if 0 < k < len(ranked):
            least = ranked[k - 1][0]  # its equals stay
            while ranked[-1][0] < least:
                ranked.pop()
        if warp.temperature == 0:
            del ranked[:-1]  # the first of equals
        T, best = warp.temperature or 1.0, ranked[0][0]
        scores, cells, logps = zip(*ranked, strict=True)
        masses = [math.exp((score - best) / T) for score in scores]
        whole = bound == -math.inf or k > 0
        if warp.top_p < 1:
            if whole:
                total = math.fsum(masses)
            else:
                total = math.fsum([math.exp((offset - best) / T + row.log_mass) for offset, _, row in beams])
            before = list(accumulate(masses, initial=0.0))
            kept = bisect_left(before, warp.top_p * total)  # a cell stays if those before it do not reach top-p
            whole |= kept < len(before)
            cells, masses, logps = cells[:kept], masses[:kept], logps[:kept]
        total = math.fsum(masses)
        return Joint(V, [mass / total for mass in masses], logps, cells) if whole else None

    def _all(self, beams: Sequence[tuple[float, int, Row]]) -> "Joint":
        """Of all cells."""
        V, nodes = self.vocab, [node for _, node, _ in beams]
        logp_WV = torch.stack([row.told.logp_NV[row.index] for *_, row in beams])  # type: ignore[index]
        if short := V - logp_WV.shape[1]:
            logp_WV = torch.nn.functional.pad(logp_WV, (0, short), value=-math.inf)
        offset_W1 = torch.tensor([offset for offset, *_ in beams], device=logp_WV.device).unsqueeze(1)
        probs = self.warp((logp_WV + offset_W1).view(1, -1))[0].exp_()
        probs /= probs.sum(dtype=torch.float64)
        probs, flat = torch.stack([probs, logp_WV.view(-1)]).cpu()  # one transfer
        warped = self.warp.top_k or self.warp.top_p < 1 or self.warp.temperature == 0
        if len(probs) <= FEW or (warped and int((probs > 0).sum()) <= FEW):
            places = probs.nonzero().view(-1)
            masses, total = probs[places].tolist(), float(probs.sum())
            cells = [nodes[place // V] * V + place % V for place in places.tolist()]
            return Joint(V, [mass / total for mass in masses], flat[places].tolist(), cells)
        return Joint(V, probs, flat, None, nodes)


@dataclass
class Joint:
    """A distribution over cells: node * vocab + token.

    Args:
        vocab: tokens of a row.
        probs: of the cells that can be drawn, as a list; or of all, as a tensor of float32.
        logps: log-probabilities of the tokens after their nodes, not warped.
        cells: which these are; None: all.
        nodes: of the rows, if all cells are there.
    """

    vocab: int
    probs: Probabilities
    logps: Sequence[float] | Tensor
    cells: Sequence[int] | None = None
    nodes: Sequence[int] = ()

    @property
    def compact(self) -> Distribution | None:
        """Cells and their probabilities as C++ made them, if it did."""
        if isinstance(self.cells, array) and isinstance(self.probs, array):
            return self.cells, self.probs
        return None

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

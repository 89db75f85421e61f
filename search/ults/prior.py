"""What ULTS believes before it looks: a prior over softmax vectors, and what that implies for the rest of a path.

ULTS, sections 3.1 and 3.2. Softmax vectors c are i.i.d. draws, from a Dirichlet or from a collection of the model's
own. Delta, the likelihood of the best way on from a node to a leaf, then has one distribution per level, known through
samples (algorithm 1). They are kept as samples: the paper fits a Beta to them, whose location and scale its code leaves
free, so that "likelihoods" beyond 1 and below 0 occur; a Beta on [0, 1] is offered for comparison.
"""

import math
import os
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from engine.errors import KVMemoryError, UsageError
from engine.requests import Answer, Evaluate
from engine.sampling import draw
from engine.tree import TokenTree
from models.checkpoint import write_tensors
from models.files import read_regular, replacing

WIDTH = 64  # largest entries of a softmax vector that are kept: smaller ones do not decide a maximum
DRAWS = 4096  # of Delta per level: N of algorithm 1
POOL = 1 << 14  # length of the tape of draws per level that nodes read their samples from
TINY = 1e-5  # a mean of Delta from which on a Beta's b is no longer to be told
STICKS, LEFT = 512, 1e-9  # entries of a Dirichlet vector that are drawn at most, or until so little is left
LARGEST = 1 << 28  # bytes of a file
REMEDY = "make one with python -m tools.ults_prior"
STRIDE = 0x9E3779B1  # odd: siblings whose tokens differ by less than POOL read different windows
WORD = (1 << 64) - 1


# --- p(c) ---


@dataclass(frozen=True, eq=False)
class Vectors:
    """Softmax vectors: the prior's support, each equally probable.

    Args:
        logp_RK: float32, the largest log-probabilities of R vectors, descending.
        tokens_RK: int64, whose they are.
    """

    logp_RK: Tensor
    tokens_RK: Tensor

    @staticmethod
    def of(logp_NV: Tensor) -> "Vectors":
        """What is kept of a model's answers."""
        top = logp_NV.topk(min(WIDTH, logp_NV.shape[1]))
        return Vectors(top.values.float().cpu(), top.indices.cpu())

    @staticmethod
    def cat(parts: "list[Vectors]") -> "Vectors":
        return Vectors(torch.cat([p.logp_RK for p in parts]), torch.cat([p.tokens_RK for p in parts]))

    def save(self, path: Path) -> None:
        """Write a safetensors file, all of it or none. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            write_tensors(file, {"logp": self.logp_RK, "tokens": self.tokens_RK})

    @staticmethod
    def load(path: Path) -> "Vectors":
        """Read what `save` wrote. Raises UsageError."""
        try:
            stat = path.stat()
            if stat.st_size > LARGEST:
                raise UsageError(f"prior: {path} is too large for one: {stat.st_size} bytes", remedy=REMEDY)
            return _load(path, stat.st_mtime_ns, stat.st_size)
        except OSError as error:
            raise UsageError(f"prior: {path}: {error.strerror}", remedy=REMEDY) from None


@lru_cache(maxsize=8)
def _load(path: Path, _modified: int, _size: int) -> Vectors:
    try:
        found = safetensors.torch.load(read_regular(path, LARGEST))
    except (SafetensorError, ValueError, KeyError) as error:
        raise UsageError(f"prior: {path} is no safetensors file: {error}", remedy=REMEDY) from None
    logp, tokens = found.get("logp", torch.empty(0)), found.get("tokens", torch.empty(0))
    if logp.dim() != 2 or not logp.numel() or logp.shape != tokens.shape or logp.dtype != torch.float32:
        raise UsageError(f"prior: {path}: expected float32 logp [R, K] and int64 tokens [R, K]", remedy=REMEDY)
    if tokens.dtype != torch.int64 or not (logp[:, 1:] <= logp[:, :-1]).all() or not logp[:, 0].isfinite().all():
        raise UsageError(f"prior: {path}: expected log-probabilities, descending in each row", remedy=REMEDY)
    if not (logp.double().exp().sum(1) < 1.001).all():
        raise UsageError(f"prior: {path}: probabilities of a row add up to more than 1", remedy=REMEDY)
    return Vectors(logp, tokens)


@lru_cache(maxsize=8)
def dirichlet(alpha: float, branching: int, rows: int = DRAWS) -> Vectors:
    """Draws of a symmetric Dirichlet(alpha) over `branching` tokens, the largest entries of each.

    Entries come by stick-breaking, in size-biased order: the large ones are among the first, exactly distributed. (The
    usual way, gammas divided by their sum, takes one draw per token, and small alphas underflow to vectors of zeros.)
    """
    generator = torch.Generator().manual_seed(0)
    total = alpha * branching
    enough = math.log(LEFT) / math.log(total / (1 + total))  # the share left after n sticks is (total / (1 + total))^n
    sticks = min(branching, STICKS, math.ceil(enough))
    after_S = alpha * torch.arange(branching - 1, branching - 1 - sticks, -1, dtype=torch.float64)
    broken_RS = _log_gamma(torch.full((rows, sticks), 1 + alpha, dtype=torch.float64), generator)
    left_RS = _log_gamma(after_S.expand(rows, sticks), generator)
    both_RS = torch.logaddexp(broken_RS, left_RS)
    before_RS = torch.cat([torch.zeros(rows, 1), (left_RS - both_RS).cumsum(1)[:, :-1]], 1)
    logp_RK = (before_RS + broken_RS - both_RS).sort(1, descending=True).values[:, :WIDTH].float()
    # Every token is as likely to be the largest entry's, and so on: different ones in a row, from a random place.
    first_R1 = torch.randint(branching, (rows, 1), generator=generator)
    token_V = torch.randperm(branching, generator=generator)
    return Vectors(logp_RK, token_V[(first_R1 + torch.arange(logp_RK.shape[1])) % branching])


def _log_gamma(shape: Tensor, generator: torch.Generator) -> Tensor:
    """Draws of log x, x from Gamma(shape), for shapes from 0 on (Marsaglia and Tsang's rejection, for shape + 1)."""
    d, out = shape + 2 / 3, torch.full_like(shape, math.nan)
    while (todo := out.isnan()).any():
        x, u = torch.empty_like(d).normal_(generator=generator), torch.empty_like(d).uniform_(generator=generator)
        v = (1 + x / (9 * d).sqrt()) ** 3
        taken = todo & (v > 0) & (u.log() < x * x / 2 + d - d * v + d * v.clamp(min=1e-300).log())
        out = torch.where(taken, (d * v).log(), out)
    return out + torch.empty_like(d).uniform_(generator=generator).clamp(min=1e-300).log() / shape


def gather(
    tree: TokenTree, depth: int, eos: frozenset[int], sequences: int, seed: int = 0
) -> Generator[Evaluate, Answer, tuple[Vectors, bool]]:
    """Collect the model's softmax vectors along completions of a tree's prompt, drawn from the model.

    Args:
        tree: holds the prompt, not evaluated yet; it is released at the end.
        depth: tokens of a completion; the last of them is not evaluated.
        eos: tokens that end one.
        sequences: completions, which share nodes while they agree; fewer if the KV pool has no room.

    Returns:
        the vectors, and whether there was room for all.
    """
    parts: list[Vectors] = []
    complete = True
    node = dict.fromkeys(range(sequences), tree.root)  # sequence -> its last node
    for _ in range(depth):
        frontier = list(dict.fromkeys(node.values()))
        try:
            logp_NV, _ = yield Evaluate(tree, frontier)
        except KVMemoryError:
            complete = False
            if not parts:
                raise
            if len(node) == 1:
                break
            node = dict(list(node.items())[: len(node) // 2])
            tree.keep(set(node.values()))
            continue
        parts.append(Vectors.of(logp_NV))
        rows = [frontier.index(n) for n in node.values()]
        tokens = draw(logp_NV[rows], seed, list(node), [tree.position(frontier[0]) + 1] * len(node))
        going = {i: (n, t) for (i, n), t in zip(node.items(), tokens, strict=True) if t not in eos}
        if not going:
            break
        grown = tree.grow([n for n, _ in going.values()], [t for _, t in going.values()])
        node = dict(zip(going, grown, strict=True))
        tree.keep(grown)
    tree.release()
    return Vectors.cat(parts), complete


def cache_file(model: str, depth: int, branching: int, eos: frozenset[int]) -> Path | None:
    """Where a prior gathered by a search is kept: in the user's cache folder. None without a model key."""
    if not model:
        return None
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    ends = "eos" + ".".join(map(str, sorted(eos))) if eos else "endless"
    return folder / "coppice" / "ults" / f"{model}-depth{depth}-branching{branching}-{ends}.safetensors"


def cached(path: Path) -> Vectors | None:
    """A prior kept earlier; None if there is none that can be read."""
    with suppress(UsageError):
        return Vectors.load(path)
    return None


# --- p(Delta) ---


def key(path: int, token: int) -> int:
    """The key of a path longer by a token: 64 bits, well mixed (splitmix64)."""
    x = (path ^ (token + 1) * 0x9E3779B97F4A7C15) & WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD
    return x ^ x >> 31


@dataclass(frozen=True, eq=False)
class Rest:
    """Beliefs over what remains of a path below each level: tapes of draws, from which nodes read windows.

    Args:
        log_LP: float32, draws of log Delta; row l belongs to nodes of level l, row 0 is not used.
        length_LP: float32, tokens of the way that attains it; None where that does not matter.
        samples: length of a window (N of the paper).
    """

    log_LP: Tensor
    length_LP: Tensor | None
    samples: int

    def places(self, nodes: Sequence[tuple[int, int]], token_FC: Tensor) -> Tensor:
        """Where on the tapes the windows [F, C] of children begin: that depends on the level, the parent and the token.

        Args:
            nodes: level of the children and key of the parent's path, for each family.
            token_FC: int64, the children.
        """
        start_F1 = torch.tensor([[level * self.log_LP.shape[1]] for level, _ in nodes])
        key_F1 = torch.tensor([[key & POOL - 1] for _, key in nodes])
        return start_F1 + (key_F1 + token_FC * STRIDE & POOL - 1)

    def draws(self, place_C: Tensor, out_CN: Tensor) -> tuple[Tensor, Tensor | None]:
        """log Delta [C, N] of the nodes at places, written to `out_CN`; and the lengths."""
        shape = (self.log_LP.numel() - self.samples + 1, self.samples)  # every window there is, without a copy
        log_CN = torch.index_select(self.log_LP.as_strided(shape, (1, 1)), 0, place_C, out=out_CN)
        if self.length_LP is None:
            return log_CN, None
        return log_CN, self.length_LP.as_strided(shape, (1, 1)).index_select(0, place_C)


@lru_cache(maxsize=16)
def fit(
    vectors: Vectors,
    depth: int,
    children: int,
    samples: int,
    eos: frozenset[int] = frozenset(),
    fixed_length: bool = False,
    length_penalty: float = 0.0,
    beta: bool = False,
) -> Rest:
    """Algorithm 1: from p(c) to p(Delta) of every level, from the leaves up.

    Args:
        vectors: p(c).
        depth: level of the leaves.
        children: most that a node will have.
        samples: N.
        eos: tokens that make a leaf (Delta = 1).
        fixed_length: those are excluded instead, the others renormalised.
        length_penalty: the best way on is then the one of the best logprob / length ** this.
        beta: pass the draws of each level through the Beta(a, b) of the greatest likelihood.
    """
    generator = torch.Generator().manual_seed(1)

    def pick(high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=generator)

    logp_RK, ends_RK = vectors.logp_RK, torch.isin(vectors.tokens_RK, torch.tensor(sorted(eos), dtype=torch.int64))
    if fixed_length:
        p_RK = logp_RK.exp()
        mass_R1 = (p_RK * ~ends_RK).sum(1, keepdim=True) + (1 - p_RK.sum(1, keepdim=True)).clamp(min=0)
        logp_RK = (logp_RK - mass_R1.log()).masked_fill(ends_RK, -math.inf).sort(1, descending=True).values
        alive_R = logp_RK[:, 0].isfinite()
        logp_RK, ends_RK = logp_RK[alive_R], torch.zeros_like(ends_RK)[alive_R]
    logp_RK, ends_RK = logp_RK[:, :children], ends_RK[:, :children]
    R, K = logp_RK.shape
    if not R:
        raise UsageError("prior: every softmax vector of it ends the text for certain")
    lengths = bool(length_penalty) and not fixed_length
    log_LP = torch.zeros(depth, POOL + samples)
    length_LP = torch.zeros_like(log_LP) if lengths else None
    below_D, lengths_D = torch.zeros(DRAWS), torch.zeros(DRAWS)  # Delta = 1 at the leaves
    for level in range(depth - 1, 0, -1):
        row_D, which_DK = pick(R, DRAWS), pick(DRAWS, DRAWS, K)
        way_DK = logp_RK[row_D] + below_D[which_DK].masked_fill(ends_RK[row_D], 0.0)  # c_nj * Delta_nj
        if lengths:
            tokens_DK = 1 + lengths_D[which_DK].masked_fill(ends_RK[row_D], 0.0)
            best_D1 = (way_DK / tokens_DK**length_penalty).argmax(1, keepdim=True)
            below_D, lengths_D = way_DK.gather(1, best_D1)[:, 0], tokens_DK.gather(1, best_D1)[:, 0]
        else:
            below_D = way_DK.amax(1)
        if beta:
            below_D = _beta_draws(below_D, generator)
        tape_P = pick(DRAWS, POOL + samples)
        log_LP[level] = below_D[tape_P]
        if length_LP is not None:
            length_LP[level] = lengths_D[tape_P]
    return Rest(log_LP, length_LP, samples)


def _beta_draws(log_D: Tensor, generator: torch.Generator) -> Tensor:
    """Draws of log x, x from the Beta(a, b) on [0, 1] under which the given ones are the most probable.

    They have the ranks of those given, so that whatever goes with these still fits.
    """
    log_x = log_D.double().clamp(max=-1e-6)
    if log_x.std() < 1e-4:  # as good as known
        return log_D
    log_mean = log_x.logsumexp(0) - math.log(len(log_x))
    if log_mean > math.log(TINY):
        ab = _beta_fit(log_x)
        draws = _log_gamma(ab.expand(len(log_x), 2), generator)
        draws = draws[:, 0] - draws.logsumexp(1)
    else:  # b is beyond all bounds: x = mean * Gamma(a) / a, of the same sufficient statistics
        a = _gamma_fit(log_mean - log_x.mean())
        draws = (_log_gamma(a.expand(len(log_x)), generator) - a.log() + log_mean).clamp(max=0)
    return torch.empty_like(log_D).scatter_(0, log_D.argsort(), draws.sort().values.float())


def _beta_fit(log_x: Tensor) -> Tensor:
    """(a, b) by Newton on their logs, from the moments; a step that overshoots is cut."""
    x = log_x.exp()
    targets = torch.stack([log_x.mean(), (-x).log1p().mean()])  # sufficient statistics
    spread = x.mean() * (1 - x.mean()) / x.var().clamp(min=1e-30) - 1
    ab = torch.stack([x.mean(), 1 - x.mean()]) * spread.clamp(1e-3, 1e9)
    for _ in range(100):
        gradient = targets - torch.digamma(ab) + torch.digamma(ab.sum())
        curvature = torch.polygamma(1, ab.sum()) - torch.diag(torch.polygamma(1, ab))
        step = torch.linalg.solve(curvature * ab * ab[:, None], -gradient * ab)
        ab = ab * step.clamp(-1, 1).exp()
        if float(step.abs().max()) < 1e-9:
            break
    return ab


def _gamma_fit(gap: Tensor) -> Tensor:
    """The shape a of a Gamma whose log of the mean exceeds the mean of the log by `gap`: log a - digamma(a)."""
    a = 0.5 / gap.clamp(min=1e-9)  # exact for large a, and too small for others
    for _ in range(100):
        excess, slope = a.log() - torch.digamma(a) - gap, 1 - a * torch.polygamma(1, a)  # by log a
        step = (-excess / slope).clamp(-1, 1)
        a = a * step.exp()
        if float(step.abs()) < 1e-9:
            break
    return a

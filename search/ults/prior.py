"""p(c): the prior over softmax vectors (ULTS, section 3.1).

Softmax vectors c are i.i.d. draws, from a Dirichlet or from a collection of the model's own softmax vectors.
"""

import json
import math
import zlib
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.contract import Answer, Evaluate, Pause, Report, Task
from engine.contract.sampling import draws
from engine.errors import KVMemoryError, UsageError
from kernels import cpp
from models.checkpoint.files import read_regular, replacing
from models.checkpoint.tensor_files import buffer_of, write_tensors
from search.ults.distributions import log_gamma

GATHERED = 32  # completions, and the most tokens of each, that a search gathers when there is no prior
MOST_KEPT = 16  # the most collections of a model's vectors in memory
KEPT_VECTORS: "WeakKeyDictionary[PagePool, dict[tuple[int, int, frozenset[int]], Vectors]]" = WeakKeyDictionary()
UNDER_WAY: set[Any] = set()  # files or keys of `KEPT_VECTORS` whose vectors a search of this process is gathering
WIDTH = 64  # largest entries of a softmax vector that are kept: smaller ones do not decide a maximum
DRAWS = 4096  # draws of Delta per level: N of algorithm 1
STICKS, LEFT = 512, 1e-9  # most entries of a Dirichlet vector that are drawn; the expected rest that ends drawing
LARGEST = 1 << 28  # the most bytes of a file
CHECKSUM = "coppice_crc32"  # name of the checksum in a file's metadata; files of others have none
REMEDY = "make one with python -m tools.ults_prior"


@dataclass(frozen=True, eq=False)
class Vectors:
    """Softmax vectors: the prior's support, each equally probable.

    Args:
        logp_RK: float32, the largest log-probabilities of R vectors, descending.
        tokens_RK: int64, their tokens.
    """

    logp_RK: Tensor
    tokens_RK: Tensor

    @staticmethod
    def of(logp_NV: Tensor) -> "Vectors":
        """Return the largest entries of a model's answers."""
        return Vectors.unpack(Vectors.read(logp_NV).cpu(), len(logp_NV))

    @staticmethod
    def read(logp_NV: Tensor) -> Tensor:
        """Return the numbers that `unpack` takes, float64, on the device of the answers."""
        top = logp_NV.topk(min(WIDTH, logp_NV.shape[1]))
        return torch.stack([top.values.double(), top.indices.double()]).view(-1)

    @staticmethod
    def unpack(numbers: Tensor, rows: int) -> "Vectors":
        """Return the vectors that `of` returns, from the numbers of `read` for `rows` answers."""
        logp_RK, tokens_RK = numbers.view(2, rows, -1)
        return Vectors(logp_RK.float(), tokens_RK.long())

    @staticmethod
    def cat(parts: "list[Vectors]") -> "Vectors":
        return Vectors(torch.cat([p.logp_RK for p in parts]), torch.cat([p.tokens_RK for p in parts]))

    def save(self, path: Path) -> None:
        """Write a safetensors file; a write that fails leaves no file, or the old one. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            write_tensors(file, {"logp": self.logp_RK, "tokens": self.tokens_RK}, {CHECKSUM: self._checksum()})

    def _checksum(self) -> str:
        checksum = zlib.crc32(repr((*self.logp_RK.shape,)).encode())
        for values in (self.logp_RK, self.tokens_RK):
            checksum = zlib.crc32(buffer_of(values.contiguous()), checksum)
        return f"{checksum:08x}"

    @staticmethod
    def load(path: Path) -> "Vectors":
        """Read a file that `save` wrote. Raises UsageError."""
        try:
            stat = path.stat()
            if stat.st_size > LARGEST:
                raise _fault(path, f"too large: {stat.st_size} bytes")
            return _load(path, stat.st_mtime_ns, stat.st_size)
        except OSError as error:
            raise _fault(path, str(error.strerror)) from None


@lru_cache(maxsize=8)
def _load(path: Path, _modified: int, _size: int) -> Vectors:
    try:
        data = read_regular(path, LARGEST)
        found = safetensors.torch.load(data)  # checks the header
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
    except (SafetensorError, ValueError, KeyError) as error:
        raise _fault(path, f"no safetensors file: {error}") from None
    logp, tokens = found.get("logp", torch.empty(0)), found.get("tokens", torch.empty(0))
    if logp.dim() != 2 or not logp.numel() or logp.shape != tokens.shape or logp.dtype != torch.float32:
        raise _fault(path, "expected float32 logp [R, K] and int64 tokens [R, K]")
    if tokens.dtype != torch.int64 or not (logp[:, 1:] <= logp[:, :-1]).all() or not logp[:, 0].isfinite().all():
        raise _fault(path, "expected log-probabilities, descending in each row")
    if not (logp.double().exp().sum(1) < 1.001).all():
        raise _fault(path, "probabilities of a row add up to more than 1")
    vectors = Vectors(logp, tokens)
    if metadata.get(CHECKSUM, checksum := vectors._checksum()) != checksum:
        raise _fault(path, "damaged: not what was written")
    return vectors


def _fault(path: Path, what: str) -> UsageError:
    """A fault of a prior's file."""
    return UsageError(f"the prior of ULTS: {what}", where=str(path), remedy=REMEDY)


@lru_cache(maxsize=8)
def dirichlet(alpha: float, branching: int) -> Vectors:
    """Draw from a symmetric Dirichlet(alpha) over `branching` tokens; return the largest entries of each draw.

    Stick-breaking draws the entries in size-biased order: the large ones are among the first, exactly distributed. The
    usual method, gammas divided by their sum, takes one draw per token, and small alphas underflow to zeros.
    """
    generator = torch.Generator().manual_seed(0)
    total = alpha * branching
    enough = math.log(LEFT) / math.log(total / (1 + total))  # the share left after n sticks is (total / (1 + total))^n
    sticks = min(branching, STICKS, math.ceil(enough))
    after_S = alpha * torch.arange(branching - 1, branching - 1 - sticks, -1, dtype=torch.float64)
    broken_RS = log_gamma(torch.full((DRAWS, sticks), 1 + alpha, dtype=torch.float64), generator)
    left_RS = log_gamma(after_S.expand(DRAWS, sticks), generator)
    both_RS = torch.logaddexp(broken_RS, left_RS)
    before_RS = torch.cat([torch.zeros(DRAWS, 1), (left_RS - both_RS).cumsum(1)[:, :-1]], 1)
    logp_RK = (before_RS + broken_RS - both_RS).sort(1, descending=True).values[:, :WIDTH].float()
    # The distribution is symmetric in the tokens: a row takes consecutive ones of a permutation, from a random place.
    first_R1 = torch.randint(branching, (DRAWS, 1), generator=generator)
    token_V = torch.randperm(branching, generator=generator)
    return Vectors(logp_RK, token_V[(first_R1 + torch.arange(logp_RK.shape[1])) % branching])


def gather(
    tree: TokenTree, depth: int, eos: frozenset[int], sequences: int, seed: int = 0
) -> Generator[Evaluate, Answer, tuple[Vectors, bool]]:
    """Collect the model's softmax vectors along completions of a tree's prompt, drawn from the model.

    Args:
        tree: holds the prompt, not evaluated yet; released at the end.
        depth: number of tokens of a completion; the last token is not evaluated.
        eos: tokens that end a completion.
        sequences: number of completions, which share nodes while they agree; fewer if the KV pool has no room.

    Returns:
        the vectors, and whether there was room for all completions.
    """
    parts: list[Vectors] = []
    complete = True
    node = dict.fromkeys(range(sequences), tree.root)  # sequence -> its last node
    for _ in range(depth):
        frontier = list(dict.fromkeys(node.values()))
        rows = [frontier.index(n) for n in node.values()]
        positions = [tree.position(frontier[0]) + 1] * len(node)

        def read(logp_NV: Tensor, _: Tensor | None, rows=rows, ids=(*node,), positions=positions) -> Tensor:
            row_n = torch.tensor(rows).to(logp_NV.device, non_blocking=True)
            return torch.cat([draws(logp_NV[row_n], seed, ids, positions).double(), Vectors.read(logp_NV)])

        try:
            numbers = (yield Evaluate(tree, frontier, read)).numbers
        except KVMemoryError:
            complete = False
            if not parts:
                raise
            if len(node) == 1:
                break
            node = dict(list(node.items())[: len(node) // 2])
            tree.keep(set(node.values()))
            continue
        assert numbers is not None
        parts.append(Vectors.unpack(numbers[len(node) :], len(frontier)))
        tokens = map(int, numbers[: len(node)].tolist())
        going = {i: (n, t) for (i, n), t in zip(node.items(), tokens, strict=True) if t not in eos}
        if not going:
            break
        grown = tree.grow([n for n, _ in going.values()], [t for _, t in going.values()])
        node = dict(zip(going, grown, strict=True))
        tree.keep(grown)
    tree.release()
    return Vectors.cat(parts), complete


def cache_file(model: str, depth: int, branching: int, eos: frozenset[int]) -> Path | None:
    """Return the file of a prior that a search gathered, in the user's cache folder; None without a model key, or for a
    user without a home."""
    if not model:
        return None
    ends = "eos" + ".".join(map(str, sorted(eos))) if eos else "endless"
    try:
        return cpp.cache_folder() / "ults" / f"{model}-depth{depth}-branching{branching}-{ends}.safetensors"
    except RuntimeError:  # Path.home
        return None


def own_vectors(task: Task, children: int, logp_NV: Tensor) -> Generator[Evaluate | Report, Any, tuple[Vectors, str]]:
    """Return the model's softmax vectors along texts that it generates itself, from an earlier request or gathered now.

    They depend on the model and not on the prompt, so that no answer depends on earlier requests. Without a file they
    are kept in memory. If the KV cache has no room to gather them, the prompt's own vector `logp_NV` is used instead.
    """
    if task.open_tree is None:
        raise UsageError("prior: there is no model to gather one from", remedy="give dirichlet or a file")
    length, eos = min(task.max_new_tokens, GATHERED), task.eos_token_ids
    path = cache_file(task.model_key, task.max_new_tokens, children, eos)
    kept, own = KEPT_VECTORS.setdefault(task.tree.pool, {}), (task.tree.trunk.adapter, length, eos)
    key = (id(task.tree.pool), own) if path is None else path
    for _ in range(2 * GATHERED):  # one search gathers, the others wait
        if key not in UNDER_WAY:
            break
        yield Pause()
    if path is None and own in kept:
        return kept[own], "cached"
    with suppress(UsageError):
        if path:
            return Vectors.load(path), "cached"
    to = f", to be kept in {path}" if path else ""
    yield Report(info={"note": f"gathering a prior of softmax vectors from the model{to}"})
    UNDER_WAY.add(key)
    tree = task.open_tree("target", [task.start_token])
    try:
        vectors, complete = yield from gather(tree, length, eos, GATHERED)
        with suppress(OSError):  # without the file the next search gathers again
            if path and complete:
                vectors.save(path)
        if path is None and complete:
            kept[own] = vectors
            while len(kept) > MOST_KEPT:
                del kept[next(iter(kept))]
        return vectors, "gathered"
    except KVMemoryError:
        return Vectors.of(logp_NV), "the prompt"
    finally:
        UNDER_WAY.discard(key)
        tree.release()

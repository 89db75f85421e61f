"""CUDA graphs: a decode step as one launch, recorded once per bucket of sizes.

A small pass is padded to a bucket of (tokens, words of ancestry bits, trees) and written into fixed memory with one
copy; a graph then computes the log-probabilities: embedding, layers, head, softmax. Lengths, page tables and the words
of ancestry in use are data, so they need no buckets. The first pass of a bucket runs without a graph, as a warm-up; the
second is recorded. Prompts, and passes larger than the largest bucket, use no graphs: they keep a GPU busy anyway.

Graphs are bounded by number (`MOST_GRAPHS`; the least recently used is dropped first) and by a share of the device's
memory. A bucket whose graph cannot be recorded runs without one from then on.
"""

import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.cache.pool import PagePool
from engine.errors import UsageError
from engine.rules.constrained import LOGITS
from engine.step.gpu import check_triton
from engine.step.packing import Pass, bucket, pack
from engine.step.paths import width_of
from engine.step.phases import phase
from engine.step.runner import Inputs, Launched, PassWork, Ready, Runner
from kernels import cpp
from kernels.kv_kinds import row_width
from kernels.layout import WORD

TOKENS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
WORDS = (16, 64, 256, 1024)  # 32 branch slots each; kernels find out how many are in use: these are sizes of the copy
TREES = (1, 2, 4, 8, 16, 32, 64, 128)
TABLES = 32 * WORDS[-1]  # words of the branch slots of all trees
LEAST_COMPILED = (2,)  # tokens of a pass: torch would make graphs of their own for sizes 0 and 1
MOST_GRAPHS = 64  # graphs
MEMORY_SHARE = 64  # log-probabilities may take 1/64 of the device's memory, graphs as much again
MEMORY = 1 << 35  # bytes that a stand-in for a device is taken to have
# The fields of a layout that change from pass to pass.
LAYOUT = ("positions_T", "write_slots_T", "trunk_seen_T", "ancestry_TC", "token_starts", "trunk_len_R")
LAYOUT += ("branch_len_R", "branch_slots_RW", "branch_positions_RW", "ancestors_TN")
PATHS = ("rows_T", "paths_TN", "lengths_T", "bases_T", "folds_T", "chains_N2")  # fields of its paths
BUDGET = 2048  # most tokens of a pass on a GPU, which a few hundred would leave half idle

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
log = logging.getLogger(__name__)


def make_runner(
    model,
    pool: PagePool,
    vocab_size: int,
    dtype: torch.dtype | None = None,
    *,
    graphs: bool = True,
    compiled: bool = False,
) -> Runner:
    """The runner for the device: C++ kernels on a CPU; Triton kernels and CUDA graphs on a GPU.

    Without C++ kernels it uses those in PyTorch, with a warning unless the user switched them off.

    Args:
        dtype: the model's; None: the cache's.
        graphs: False: no CUDA graphs.
        compiled: use operators on rows compiled by torch, see `engine.load.compiling`.

    Raises:
        UsageError: a GPU without triton, or a model that the Triton kernels do not support.
    """
    cache = pool.cache.k_LGSD
    dtype = dtype or cache.dtype
    if cache.device.type == "cpu":
        if dtype not in cpp.KINDS:
            return Runner(model, pool, vocab_size, dtype=dtype)
        reason = cpp.why_not()
        if reason and not cpp.off():
            warnings.warn(f"the kernels in PyTorch run, slower than those in C++: {reason}", stacklevel=2)
        return Runner(model, pool, vocab_size, impl="torch" if reason else "cpp", dtype=dtype)
    check_triton()
    from kernels.tree_attention.triton import DTYPES, why_no_latents, why_not_heads

    latent, remedy = None if model is None else model.config.latent, "use another --dtype, or --device cpu"
    if dtype not in DTYPES:
        raise UsageError(f"a GPU cannot serve {dtype}: its kernels take float16, bfloat16, float32", remedy=remedy)
    pairs = (kept[0] for kept in pool.cache.groups if len(kept) == 2)  # keys and values
    widest = max((keys.shape[-1] - row_width(0, keys.dtype) for keys in pairs), default=0)
    if latent is None and (why := why_not_heads(widest, dtype)):
        raise UsageError("a GPU cannot serve these heads", where=why, remedy=remedy)
    if latent is not None and (why := why_no_latents(latent.rank, latent.rotated, dtype)):
        raise UsageError("a GPU cannot serve these latents", where=why, remedy=remedy)
    kind = GraphRunner if graphs else Runner
    options = {"rows": "compiled", "token_buckets": LEAST_COMPILED} if compiled else {}
    return kind(model, pool, vocab_size, impl="triton", budget=BUDGET, dtype=dtype, **options)


class GraphRunner(Runner):
    """A runner whose small passes are CUDA graphs.

    Args:
        record: records the work of a function on the device and returns a function that replays it. Its attribute
            `used`, if it has one, is the memory of its graphs in bytes.
        options: see `Runner`.
    """

    def __init__(self, model, pool: PagePool, vocab_size: int, *, record: Recorder | None = None, **options):
        super().__init__(model, pool, vocab_size, **options)
        self.record = record or _Recorder()
        self._steps: dict[tuple[int, int, int], _Step] = {}  # the least recently used first
        self._logged: set[str] = set()
        self._outputs: tuple[Any, ...] = ()  # results of `answer`, hidden rows: as many as the largest bucket has
        on_gpu = self.device.type == "cuda"
        memory = torch.cuda.get_device_properties(self.device).total_memory if on_gpu else MEMORY
        self.allowed = memory // MEMORY_SHARE
        rows = self.allowed // (model.shape.vocab_size * torch.float32.itemsize)
        least = min(self.token_buckets or TOKENS)
        self.tokens = tuple(n for n in TOKENS if least <= n <= rows) or (least,)
        of_paths = 0 if pool.delta is None else width_of(pool.delta, True)
        most = (
            4096
            + self.tokens[-1] * (5 * 2 + 1 + 2 * pool.ancestors + WORDS[-1] + 2 * of_paths)
            + TABLES * WORD * 3
            + TREES[-1] * pool.pages
        )
        most += most % 2  # 64-bit views of both parts are aligned
        self.host = torch.empty(2, most, dtype=torch.int32, pin_memory=on_gpu)  # used in turn: a pass may be under way
        self.copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self.memory = torch.empty(most, dtype=torch.int32, device=self.device)

    @torch.inference_mode()
    def launch(self, work: PassWork, fill: Ready | None = None, *, keep_rows: bool = True) -> Launched:
        """Launch a pass, with a CUDA graph if one fits; see `Runner.launch`."""
        if reason := self._unfit(work):
            self._log_once(logging.INFO, reason)
            return super().launch(work, fill, keep_rows=keep_rows)
        options = {"impl": self.impl, "rows": self.rows, "ancestors": self.pool.ancestors, "delta": self.pool.delta}
        options |= {"token_buckets": self.tokens, "word_buckets": WORDS, "tree_buckets": TREES}
        with phase(self.observer, "pack"):
            p = pack(work.chunks, self.pool.page_size, **options)
        if p.layout.paths is not None and len(p.layout.paths.levels) > 1:
            self._log_once(logging.INFO, "a pass that reads a state it makes")
            return super().launch(work, fill, keep_rows=keep_rows)
        inputs, step, asked = Inputs(self.device, fill) if self.asynchronous else None, self._step(p), work.asked
        step(self, p, asked, inputs)
        *results, peaks_NB, hidden_TE = self._outputs
        in_order = list(asked) == list(range(len(asked)))
        rows_N = None if in_order else step.rows_T[: len(asked)]
        keep_rows |= self.impl != "triton"  # others read the rows again if sums are equal
        logp_NV, finite_N = (_taken(x, len(asked), rows_N, copied=keep_rows) for x in results)
        self._give(work.keeps, hidden_TE)
        if work.edits:
            logp_NV, finite_N, peaks_NB = self.edited(logp_NV, finite_N, work.edits)
        elif peaks_NB is not None:
            peaks_NB = _taken(peaks_NB, len(asked), rows_N, copied=False)
        return self.read(logp_NV, finite_N, peaks_NB, work.reads, inputs)

    def _step(self, p: Pass) -> "_Step":
        """The step of a pass's bucket, which becomes the most recently used one."""
        key = _bucket(p)
        step = self._steps.pop(key, None) or _Step(self, p)
        if len(self._steps) >= MOST_GRAPHS:
            del self._steps[next(iter(self._steps))]
        self._steps[key] = step
        return step

    def turn(self) -> int:
        """The part of the host's memory that may be written next."""
        self._turn ^= 1
        if (event := self.copied[self._turn]) is not None:
            event.synchronize()
        return self._turn

    def copy(self, turn: int, size: int) -> None:
        """Copy a part of the host's memory to the device."""
        self.memory[:size].copy_(self.host[turn, :size], non_blocking=True)
        if self.memory.is_cuda:
            event = self.copied[turn] = torch.cuda.Event()
            event.record()

    def _log_once(self, level: int, reason: str) -> None:
        """Log once why something runs without a graph."""
        if reason not in self._logged:
            self._logged.add(reason)
            log.log(level, "without a CUDA graph: %s", reason)

    def _unfit(self, work: PassWork) -> str:
        """Why a pass cannot run as a graph; "" if it can."""
        chunks = work.chunks
        if any(edit.of == LOGITS for edit in work.edits):
            return "a pass whose logits are edited"
        if any(c.tree.trunk.adapter for c in chunks):
            return "a pass with adapters"
        if not work.asked or any(c.trunk_tokens > 1 for c in chunks):
            return "a pass that reads a prompt"
        if sum(c.trunk_tokens + len(c.nodes) for c in chunks) > self.tokens[-1]:
            return f"a pass of more than {self.tokens[-1]} tokens"
        slots = max(len(c.tree.slots.table[0]) if c.nodes else 0 for c in chunks)
        if slots > WORDS[-1] * WORD:
            return f"a tree of more than {WORDS[-1] * WORD} branch slots"
        if len(chunks) > TREES[-1]:
            return f"a pass of more than {TREES[-1]} trees"
        if bucket(len(chunks), TREES) * bucket(-(-slots // WORD), WORDS) > TABLES:
            return f"a pass of trees with room for more than {TABLES * WORD} branch slots"
        return ""

    def recorded(self, run: Callable[[], None], like: Pass) -> Callable[[], None]:
        """A function that replays `run` from a graph; `run` itself if no graph can be recorded."""
        size = "the bucket of tokens {}, words {}, trees {}".format(*_bucket(like))
        if getattr(self.record, "used", 0) >= self.allowed:
            self._log_once(logging.WARNING, f"{size}: graphs take {self.allowed >> 20} MiB already")
            return run
        try:
            return self.record(run)
        except RuntimeError as error:  # of the capture: an unsupported operation, or too little memory
            reason = str(error).strip().partition("\n")[0]
            self._log_once(logging.WARNING, f"{size}: it cannot be recorded: {reason}")
            return run

    def compute(self, p: Pass) -> None:
        """The recorded part of a pass."""
        p.layout.refilled()
        with phase(self.observer, "forward"):
            hidden_TE = self.model.forward(*p.arguments(self.pool.cache))
        places = tuple(x if x is None else x[: len(hidden_TE)] for x in self._outputs)
        results = *self.answer(hidden_TE, out=places[:3] or None), hidden_TE  # type: ignore[arg-type]
        if not places:
            most = self.tokens[-1]
            self._outputs = tuple(x if x is None else x.new_empty(most, *x.shape[1:]) for x in results)
            places = tuple(x if x is None else x[: len(hidden_TE)] for x in self._outputs)
        for place, result in zip(places, results, strict=True):
            if place is not None and result is not place:  # peaks may be unknown
                place.copy_(result)


class _Step:
    """The graph of one bucket, and its inputs at fixed places of the runner's memory.

    It holds no reference to its runner, so that a dropped engine frees its device memory at once.
    """

    def __init__(self, runner: GraphRunner, like: Pass):
        self.warm = False
        self.replay: Callable[[], None] | None = None
        *fields, pages_PR = _fields(like, torch.empty_like(like.tokens_T))
        fields.append(pages_PR.new_empty(runner.pool.pages, pages_PR.shape[1], device="meta"))  # a trunk's most
        self.starts, at = [], 0
        for x in fields:
            self.starts.append(at)
            at += -(-x.numel() * x.itemsize // 16) * 4  # aligned to 16 bytes for kernels
        self.hosts = [[_view(host, at, x) for at, x in zip(self.starts, fields, strict=True)] for host in runner.host]
        device = [_view(runner.memory, at, x) for at, x in zip(self.starts, fields, strict=True)]
        self.inputs, self.rows_T = _rebuild(like, device)

    def __call__(self, runner: GraphRunner, p: Pass, asked: Sequence[int], ready: Ready | None) -> None:
        rows_T = torch.tensor([*asked, *[0] * (len(p.tokens_T) - len(asked))])
        *fields, pages_PR = _fields(p, rows_T)
        turn = runner.turn()
        for there, x in zip(self.hosts[turn], fields, strict=False):
            there.copy_(x)
        self.hosts[turn][-1][: len(pages_PR)] = pages_PR
        runner.copy(turn, self.starts[-1] + pages_PR.numel())
        if ready is not None:
            ready(self.inputs)
        if not self.warm:
            self.warm = True
            runner.compute(self.inputs)
            return
        if self.replay is None:
            there = weakref.proxy(runner)
            self.replay = runner.recorded(lambda: there.compute(self.inputs), self.inputs)
        self.replay()


def _taken(x: Tensor, count: int, rows_N: Tensor | None, *, copied: bool) -> Tensor:
    """The first rows of a result, or the listed ones, copied so that the next pass does not overwrite them."""
    if rows_N is not None:
        return x.index_select(0, rows_N)
    return x[:count].clone() if copied else x[:count]


def _bucket(p: Pass) -> tuple[int, int, int]:
    """Tokens, words of ancestry and trees."""
    tokens, words = p.layout.ancestry_TC.shape
    return tokens, words, len(p.layout.trunk_len_R)


def _fields(p: Pass, rows_T: Tensor) -> list[Tensor]:
    """The inputs of a pass; the page table is last and stored by columns, so that the offsets of the others do not
    depend on it."""
    fields = [x for name in LAYOUT if (x := getattr(p.layout, name)) is not None]
    paths = [] if p.layout.paths is None else [x for name in PATHS if (x := getattr(p.layout.paths, name)) is not None]
    return [p.tokens_T, p.spans_T, rows_T, *paths, *fields, p.layout.trunk_pages_RP.T]


def _rebuild(p: Pass, fields: list[Tensor]) -> tuple[Pass, Tensor]:
    """A pass like p with the tensors that `_fields` lists, and its rows_T."""
    tokens_T, spans_T, rows_T, *rest, pages_PR = fields
    if (paths := p.layout.paths) is not None:
        names = [name for name in PATHS if getattr(paths, name) is not None]
        paths = replace(paths, **dict(zip(names, rest, strict=False)), levels=(len(tokens_T),))
        rest = rest[len(names) :]
    layout = replace(p.layout, **dict(zip(LAYOUT, rest, strict=False)), trunk_pages_RP=pages_PR.T, paths=paths)
    return Pass(tokens_T, spans_T, layout), rows_T


def _view(memory: Tensor, at: int, like: Tensor) -> Tensor:
    """A piece of a buffer of 32-bit words as a tensor of this shape and dtype."""
    return memory[at : at + like.numel() * like.itemsize // 4].view(like.dtype).view(like.shape)


class _Recorder:
    """Records CUDA graphs that share their memory, because no two of them run at once. Other threads may use the
    device.

    They are captured on a separate stream: cuBLAS keeps a workspace for each stream, in the memory of the graph
    that was first captured on it, and torch 2.13 frees it with that graph, even if other graphs write there.

    Attributes:
        used: device bytes that recording took; they are kept when a graph is dropped, and reused by later ones.
    """

    def __init__(self):
        self.pool, self.used = torch.cuda.graph_pool_handle(), 0
        self.stream = torch.cuda.Stream()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # recording begins with this: only its own memory is counted
        reserved = torch.cuda.memory_reserved()  # other processes do not change it
        here = torch.cuda.current_stream()  # a failed capture would leave its own as the current one
        options = {"pool": self.pool, "stream": self.stream, "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.stream(here), torch.cuda.graph(graph, **options):
                run()
        except BaseException:
            self.pool = torch.cuda.graph_pool_handle()  # torch may take the old one to be still in a capture
            raise
        finally:
            self.used += max(0, torch.cuda.memory_reserved() - reserved)
        return graph.replay

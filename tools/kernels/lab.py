"""The lab itself: contenders against the definition and the clock, shape by shape and trap by trap."""

import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.cache.pool import PagePool
from engine.errors import UsageError
from engine.load.sizes import read_size
from kernels.kv_write import reference as reference_write
from kernels.layout import TRASH_SLOT, TreeLayout
from kernels.tree_attention import reference as reference_attention
from models.shape import ModelShape
from tools.bench import limits
from tools.bench.device import once, recorded
from tools.bench.measure import spread
from tools.kernels.contenders import PACKED, Contender, check_result
from tools.kernels.scenes import Scene, Trap, scene, traps

Prepare = Callable[[Contender], tuple[list[Callable[[], Any]], dict[str, Any]]]  # to calls, and fields of a `Row`
ALLOWED = 2.0  # times the error of plain PyTorch in the same dtype
NUMBERS, DRAWS = 1 << 16, 16  # outputs to take plain PyTorch's errors from, unless that exceeds this number of draws
LARGEST, MOST_BUFFERS = 1 << 30, 256  # bytes and number of rotating caches
ROUNDS, MOST_CALLS = 5, 1000  # of every contender, on a CPU
WARM = 3  # first runs on a GPU, which do not count


class Shape(NamedTuple):
    """A point of the grid."""

    dtype: str
    heads: int
    kv_heads: int
    head: int
    prefix: int
    queries: int
    branching: int
    depth: int

    def __str__(self) -> str:
        tree = f"prefix {self.prefix}, {self.queries} queries, branching {self.branching}"
        return f"{self.dtype}, {self.heads}:{self.kv_heads} heads of {self.head}, {tree}"


class Row(NamedTuple):
    """One contender on one shape."""

    operator: str
    shape: Shape
    impl: str
    bytes: int
    floor_seconds: float
    bound: str  # the floor is set by "bytes" or "operations"
    refused: str = ""
    error_max: float | None = None
    error_mean: float | None = None
    x_plain: float | None = None
    nan: int = 0
    seconds: dict[str, float] | None = None

    @property
    def right(self) -> bool:
        return not self.nan and self.x_plain is not None and self.x_plain <= ALLOWED

    @property
    def of_floor(self) -> float | None:
        return self.floor_seconds / self.seconds["median"] if self.seconds else None

    def record(self) -> dict[str, Any]:
        """The row as a JSON object."""
        record = self._asdict()
        record |= record.pop("shape")._asdict()
        for key in ("error_max", "error_mean", "x_plain"):  # JSON has no infinity
            record[key] = record[key] if record[key] is not None and math.isfinite(record[key]) else None
        rate = self.bytes / self.seconds["median"] if self.seconds else None
        return record | {"right": self.right, "of_floor": self.of_floor, "bytes_per_second": rate}


class TrapResult(NamedTuple):
    """One contender in one trap."""

    operator: str
    impl: str
    dtype: str
    name: str
    wrong: str  # reason; empty if the result is right
    refused: str = ""


class Lab:
    """Measures contenders on a machine of known bandwidth and rates, and collects the results."""

    def __init__(self, device: torch.device, seconds: float, bandwidth: float, rates: dict[str, float]):
        self.device, self.seconds, self.bandwidth, self.rates = device, seconds, bandwidth, rates
        self.page = 16 if device.type == "cuda" else 1
        self.rows: list[Row] = []
        self.traps: list[TrapResult] = []

    def trap(self, operator: str, able: Sequence[Contender], dtype: str) -> None:
        """Try every contender that takes whole passes in every trap."""
        for trap in traps(getattr(torch, dtype), self.device):
            check = AttentionTrap(trap).fault if operator == "tree_attention" else partial(write_fault, trap)
            for contender in able:
                if contender.name in ("reference", *PACKED):
                    continue
                try:
                    found = TrapResult(operator, contender.name, dtype, trap.name, check(contender))
                except NotImplementedError as error:
                    found = TrapResult(operator, contender.name, dtype, trap.name, "", str(error) or "refused")
                except UsageError as error:
                    error.where = f"{error.where} (trap: {trap.name}, {dtype})".strip()
                    raise
                self.traps.append(found)

    def measure(self, operator: str, able: Sequence[Contender], shape: Shape) -> None:
        """Errors and times on one shape."""
        pool = self.pool(shape)
        s = scene(pool, shape.prefix, shape.queries, branching=shape.branching, depth=shape.depth, impl="torch")
        moved, operations, prepare = (self.attention if operator == "tree_attention" else self.writes)(shape, pool, s)
        rate = self.rates[shape.dtype]
        floor = max((moved / self.bandwidth, "bytes"), (operations / rate, "operations"))
        rows: list[Row] = []
        works: list[Sequence[Callable[[], object]]] = []
        for contender in able:
            row, calls = Row(operator, shape, contender.name, moved, *floor), []
            try:
                calls, errors = prepare(contender)
                row = row._replace(**errors)
            except NotImplementedError as error:
                row = row._replace(refused=str(error) or "refused")
            except UsageError as error:
                error.where = f"{error.where} ({shape})".strip()
                raise
            rows.append(row)
            works.append(calls if contender.timed else [])
        self.rows += [row._replace(seconds=seconds) for row, seconds in zip(rows, self.times(works), strict=True)]

    def pool(self, shape: Shape) -> PagePool:
        """A KV cache with enough layers to overflow the last level of cache, all with the same numbers."""
        tokens = shape.prefix + shape.queries * shape.depth
        dtype = getattr(torch, shape.dtype)
        per_layer = 2 * shape.kv_heads * tokens * shape.head * dtype.itemsize
        layers = max(2, min(-(-2 * cache_bytes(self.device) // per_layer), LARGEST // per_layer, MOST_BUFFERS))
        pages = -(-shape.prefix // self.page) + -(-shape.queries * shape.depth // self.page) + 1
        pool = PagePool(ModelShape(layers, shape.kv_heads, shape.head, 1, None), pages, self.page, dtype, self.device)
        for x in (pool.cache.k_LGSD, pool.cache.v_LGSD):
            x[0] = torch.randn(x[0].shape, generator=torch.Generator().manual_seed(0)).to(dtype)
            x[1:] = x[0]
        return pool

    def attention(self, shape: Shape, pool: PagePool, s: Scene) -> tuple[int, int, Prepare]:
        """tree_attention on one shape."""
        dtype, scale, k_LGSD, v_LGSD = (
            getattr(torch, shape.dtype),
            shape.head**-0.5,
            pool.cache.k_LGSD,
            pool.cache.v_LGSD,
        )
        draw_q = torch.randn(shape.queries, shape.heads, shape.head, generator=torch.Generator().manual_seed(1))
        q_THD = draw_q.to(self.device, dtype)
        exact, plain, allowed = definition(q_THD, k_LGSD[0], v_LGSD[0], s.layout, scale, None, slice(None))

        def prepare(contender: Contender) -> tuple[list[Callable[[], Any]], dict[str, Any]]:
            if contender.name in PACKED:
                pack, attend = contender(q_THD, s, scale)
                calls = [partial(attend, *pack(k, v)) for k, v in zip(k_LGSD, v_LGSD, strict=True)]
                out = calls[0]()
            else:
                calls = [lambda k=k, v=v: contender(q_THD, k, v, s.layout, scale, None)
                         for k, v in zip(k_LGSD, v_LGSD, strict=True)]  # fmt: skip
                out = plain if contender.name == "reference" else check_result(contender, calls[0](), q_THD)
            return calls, errors(out, exact, allowed)

        return *limits.attention_work(s.layout, shape.heads, shape.kv_heads, shape.head, dtype), prepare

    def writes(self, shape: Shape, pool: PagePool, s: Scene) -> tuple[int, int, Prepare]:
        """kv_write on one shape."""
        new = rows_of(shape.queries, shape.heads, shape.kv_heads, shape.head, getattr(torch, shape.dtype), self.device)
        slots_T, cache = s.layout.write_slots_T, list(zip(pool.cache.k_LGSD, pool.cache.v_LGSD, strict=True))

        def prepare(contender: Contender) -> tuple[list[Callable[[], Any]], dict[str, Any]]:
            wrong = write_difference(contender, *cache[0], new, slots_T)
            found = {"error_max": float(wrong), "error_mean": float(wrong), "x_plain": math.inf if wrong else 0.0}
            return [lambda k=k, v=v: contender(k, v, *new, slots_T) for k, v in cache], found

        return 2 * sum(x.numel() * x.itemsize for x in new) + slots_T.nbytes, 0, prepare

    def times(self, works: Sequence[Sequence[Callable[[], object]]]) -> list[dict[str, float] | None]:
        """Seconds of a call of each contender, on the next cache every time, measured in turns; None for those without
        calls."""
        found: list[list[float]] = [[] for _ in works]
        if self.device.type == "cuda":
            timed = [(calls, times) for calls, times in zip(works, found, strict=True) if calls]
            whole = [recorded(calls) if can_be_recorded(calls[0]) else partial(every, calls) for calls, _ in timed]
            for _ in range(WARM + 20):
                for run, (calls, times) in zip(whole, timed, strict=True):
                    times.append(once(run) / len(calls))
            return [spread(times[WARM:]) if times else None for times in found]
        turns = [cycle(calls) for calls in works]
        for _ in range(ROUNDS):
            for calls, times in zip(turns, found, strict=True):
                end = sum(times) + self.seconds / ROUNDS
                for call in islice(calls, MOST_CALLS // ROUNDS):
                    if len(times) > 1 and sum(times) > 5 * self.seconds:
                        break
                    begin = time.perf_counter()
                    call()
                    times.append(time.perf_counter() - begin)
                    if sum(times) > end:
                        break
        return [spread(times[1:] or times) if times else None for times in found]  # the first call warms up


def every(calls: Sequence[Callable[[], object]]) -> None:
    """Call all of them."""
    for call in calls:
        call()


def can_be_recorded(call: Callable[[], object]) -> bool:
    """Whether a call never waits for the GPU, so that it can be part of a CUDA graph."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except (RuntimeError, UsageError):
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def cache_bytes(device: torch.device) -> int:
    """Size of the last level of cache; 64 MiB where the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [64 << 20]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        sizes.append(read_size(file.read_text().strip()))
    return max(sizes[1:] or sizes)


# --- right or wrong ---


class Errors(NamedTuple):
    """The largest error of an output, and the root mean square of its errors."""

    worst: float
    usual: float


def errors_of(out: Tensor, exact: Tensor) -> Errors:
    """Errors against the exact output."""
    difference = (out.double() - exact).abs()
    return Errors(float(difference.max()), float(difference.pow(2).mean().sqrt()))


def errors(out: Tensor, exact: Tensor, plain: Errors) -> dict[str, Any]:
    """Errors of an output against the exact one; `x_plain` is the larger of their ratios to plain PyTorch's errors."""
    mine = errors_of(out, exact)
    nan = int(out.isnan().sum())
    tiny = 0.01 * torch.finfo(out.dtype).eps  # where plain PyTorch happens to be exact
    ratio = math.inf if nan else max(a / (b + tiny) for a, b in zip(mine, plain, strict=True))
    mean = float((out.double() - exact).abs().mean())
    return {"error_max": mine.worst, "error_mean": mean, "x_plain": ratio, "nan": nan}


def definition(
    q_THD: Tensor,
    k_GSD: Tensor,
    v_GSD: Tensor,
    layout: TreeLayout,
    scale: float,
    window: int | None,
    own: slice,
) -> tuple[Tensor, Tensor, Errors]:
    """The definition's output for rows `own`, in float64 and in its inputs' dtype, and the errors of the latter.

    The largest of few errors is a matter of chance, so errors are the largest of several draws of the queries.
    """
    attend = reference_attention.tree_attention
    k_exact_GSD, v_exact_GSD = k_GSD.double(), v_GSD.double()

    def both(q_THD: Tensor) -> tuple[Tensor, Tensor]:
        exact = attend(q_THD.double(), k_exact_GSD, v_exact_GSD, layout, scale, window)[own]
        return exact, attend(q_THD, k_GSD, v_GSD, layout, scale, window)[own]

    exact, plain = both(q_THD)
    found = [errors_of(plain, exact)]
    for seed in range(1, min(DRAWS, -(-NUMBERS // exact.numel()))):
        drawn_THD = torch.randn(q_THD.shape, generator=torch.Generator().manual_seed(seed)).to(q_THD)
        found.append(errors_of(*reversed(both(drawn_THD))))
    return exact, plain, Errors(*map(max, zip(*found, strict=True)))


class AttentionTrap:
    """A trap for attention. The definition, which is slow, is computed once for all contenders."""

    def __init__(self, trap: Trap):
        self.inputs, self.own = (trap.q_THD, trap.k_GSD, trap.v_GSD), slice(0, trap.rows)
        self.options = trap.layout, trap.q_THD.shape[-1] ** -0.5, trap.window

    @cached_property
    def expected(self) -> tuple[Tensor, Tensor, Errors]:
        """See `definition`."""
        return definition(*self.inputs, *self.options, self.own)

    def fault(self, contender: Contender) -> str:
        """The fault of an attention; "" if there is none."""
        inputs = [x.clone() for x in self.inputs]  # because contenders may change them
        out = check_result(contender, contender(*inputs, *self.options), inputs[0])
        if any(not same_bits(x, y) for x, y in zip(inputs, self.inputs, strict=True)):
            return "it changed its inputs"
        exact, _, plain = self.expected
        out = out[self.own]
        found = errors(out, exact, plain)
        if found["nan"]:
            return f"{found['nan']} NaN of {out.numel()}: it read slots that it must not read"
        return "" if found["x_plain"] <= ALLOWED else f"error {found['error_max']:.1e}, {found['x_plain']:.1f}x plain"


def rows_of(
    tokens: int, heads: int, kv_heads: int, head: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """New keys and values in a model's layout: parts of wider rows."""
    made = torch.randn(tokens, heads + 2 * kv_heads, head, generator=torch.Generator().manual_seed(2))
    _, k_TGD, v_TGD = made.to(device, dtype).split([heads, kv_heads, kv_heads], 1)
    return k_TGD, v_TGD


def write_fault(trap: Trap, contender: Contender) -> str:
    """The fault of a KV write in a trap; "" if there is none."""
    slots_T = trap.layout.write_slots_T
    heads, kv_heads = trap.q_THD.shape[1], trap.k_GSD.shape[0]
    new = rows_of(len(slots_T), heads, kv_heads, trap.q_THD.shape[2], trap.q_THD.dtype, slots_T.device)
    wrong = write_difference(contender, trap.k_GSD, trap.v_GSD, new, slots_T)
    return f"{wrong} slots have wrong contents" if wrong else ""


def write_difference(
    contender: Contender, k_GSD: Tensor, v_GSD: Tensor, new: tuple[Tensor, Tensor], slots_T: Tensor
) -> int:
    """The number of slots with other bits than the definition's, without the trash slot."""
    mine, right = (k_GSD.clone(), v_GSD.clone()), (k_GSD.clone(), v_GSD.clone())
    contender(*mine, *new, slots_T)
    reference_write.kv_write(*right, *new, slots_T)
    differ = torch.stack([bits(x) != bits(y) for x, y in zip(mine, right, strict=True)]).any(-1).any(0).any(0)
    differ[TRASH_SLOT] = False
    return int(differ.sum())


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.itemsize])


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(bits(x), bits(y))


def verdicts(lab: Lab) -> dict[str, dict[str, bool]]:
    """For each operator, whether each contender was right wherever it did not refuse."""
    found: dict[str, dict[str, bool]] = {}
    for one in [*lab.rows, *lab.traps]:
        right = one.right or bool(one.refused) if isinstance(one, Row) else not one.wrong
        of_operator = found.setdefault(one.operator, {})
        of_operator[one.impl] = of_operator.get(one.impl, True) and right
    return found

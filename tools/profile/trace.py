"""The operators of a torch profile: how often, how long, how many bytes and operations, from the trace's own record.

Bytes are the least that an operator moves given the shapes of its arguments, operations those of matrix products.
What shapes do not tell is None, never guessed.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "long": 8, "int": 4, "short": 2,
         "signed char": 1, "unsigned char": 1, "bool": 1}  # fmt: skip
SCALAR_TYPES = {"6": 4, "15": 2, "5": 2, "7": 8}  # torch.dtype as a trace writes it: float, bfloat16, half, double
KINDS = {"float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16"}


@dataclass
class Call:
    """One call: shapes, types and constants of its arguments as the trace has them."""

    name: str
    dims: list[Any]
    types: list[str]
    constants: list[str]

    def bytes(self, i: int) -> int:
        return math.prod(self.dims[i]) * SIZES[self.types[i]]

    def inputs(self) -> list[int]:
        """Which arguments are tensors."""
        return [i for i, kind in enumerate(self.types) if kind in SIZES]


@dataclass
class Operator:
    """All calls of one operator in a trace."""

    name: str
    calls: int = 0
    seconds: float = 0.0  # its own, without operators that it calls
    device_seconds: float = 0.0  # of the kernels that it launched itself
    bytes: int | None = 0
    operations: int | None = 0
    kind: str | None = None  # the dtype that it multiplies in

    def of_roofline(self, bandwidth: float, rates: dict[str, float]) -> float | None:
        """The least time that its bytes and operations take, over its time; None where either is not known."""
        spent = self.device_seconds or self.seconds
        if not self.bytes or self.operations is None or not spent:
            return None
        rate = rates.get(self.kind or "")
        if self.operations and not rate:
            return None
        return max(self.bytes / bandwidth, self.operations / rate if rate else 0.0) / spent


Work = tuple[int, int]  # bytes, operations


def moves_nothing(_: Call) -> Work:
    return 0, 0


def elementwise(call: Call) -> Work:
    """Every input once, and an output of their common shape and largest type."""
    tensors = call.inputs()
    shape = broadcast([call.dims[i] for i in tensors])
    size = max(SIZES[call.types[i]] for i in tensors)
    return sum(call.bytes(i) for i in tensors) + math.prod(shape) * size, 0


def touches(call: Call) -> Work:
    """The first argument once: of what is read, results are small beside it; the rest is only written."""
    return call.bytes(0), 0


def copies(call: Call) -> Work:
    return call.bytes(0) + call.bytes(1), 0


def product(left: int, right: int) -> Callable[[Call], Work]:
    """Matrices or batches of them at these places; what is added to the product may stand before them."""

    def work(call: Call) -> Work:
        *batch, rows, inner = call.dims[left]
        columns = call.dims[right][-1]
        out = math.prod(batch) * rows * columns
        added = sum(call.bytes(i) for i in range(left))
        moved = call.bytes(left) + call.bytes(right) + added + out * SIZES[call.types[left]]
        return moved, 2 * out * inner

    return work


def linear(weight: int, bias: int) -> Callable[[Call], Work]:
    """x W^T + b, x being the first argument; the weight may be packed, so that only its size counts."""

    def work(call: Call) -> Work:
        inner, rows = call.dims[0][-1], math.prod(call.dims[0][:-1])
        columns = math.prod(call.dims[weight]) // inner
        if not columns:
            raise KeyError(call.name)
        added = call.bytes(bias) if call.types[bias] in SIZES else 0
        moved = call.bytes(0) + call.bytes(weight) + added + rows * columns * SIZES[call.types[0]]
        return moved, 2 * rows * columns * inner

    return work


def quantised(call: Call) -> Work:
    """onednn::qlinear_pointwise: as `linear`, but for the output's type, the tenth argument."""
    moved, operations = linear(3, 6)(call)
    out = operations // (2 * call.dims[0][-1])
    return moved + out * (SCALAR_TYPES[call.constants[9]] - SIZES[call.types[0]]), operations


def rotates(call: Call) -> Work:
    """coppice::rotary: rows, read and written, and their angles."""
    return 2 * call.bytes(0) + call.bytes(1) + call.bytes(2), 0


def halves(call: Call) -> Work:
    """coppice::silu_mul: rows, and half of them written."""
    return call.bytes(0) * 3 // 2, 0


def normalizes(call: Call) -> Work:
    """coppice::log_softmax: rows, read, and written as float32."""
    return call.bytes(0) + 4 * math.prod(call.dims[0]), 0


def seeks(call: Call) -> Work:
    """coppice::best_sums, at_least: peaks of rows, or all of them if no peaks are known."""
    return call.bytes(3 if len(call.types) > 3 and call.types[3] in SIZES else 0), 0


def selects(call: Call) -> Work:
    """index_select: rows, read and written, and their numbers."""
    axis = int(call.constants[1])
    shape = list(call.dims[0])
    shape[axis] = math.prod(call.dims[2])
    return 2 * math.prod(shape) * SIZES[call.types[0]] + call.bytes(2), 0


def gathers(call: Call) -> Work:
    """gather: as many elements as indices."""
    return 2 * math.prod(call.dims[2]) * SIZES[call.types[0]] + call.bytes(2), 0


def embeds(call: Call) -> Work:
    return 2 * math.prod(call.dims[1]) * call.dims[0][-1] * SIZES[call.types[0]] + call.bytes(1), 0


def puts(call: Call) -> Work:
    """index_copy_: rows, read and written, and their numbers."""
    return 2 * call.bytes(3) + call.bytes(2), 0


def writes_kv(call: Call) -> Work:
    """coppice::kv_write: new rows, read and written, and their slots."""
    return 2 * (call.bytes(2) + call.bytes(3)) + call.bytes(4), 0


def named(names: str, work: Callable[[Call], Work]) -> dict[str, Callable[[Call], Work]]:
    return {name if "::" in name else f"aten::{name}": work for name in names.split()}


FORMULAS: dict[str, Callable[[Call], Work]] = {
    # Those that only arrange, and those that leave the work to others.
    **named("view reshape _unsafe_view _reshape_alias expand expand_as as_strided transpose permute t unsqueeze "
            "squeeze select slice narrow split split_with_sizes chunk unbind flatten unflatten unfold alias detach "
            "view_as empty empty_like empty_strided new_empty resize_ lift_fresh to _to_copy contiguous clone matmul "
            "linear rms_norm _fused_rms_norm layer_norm softmax log_softmax repeat_interleave item resolve_conj "
            "resolve_neg is_nonzero type_as embedding_renorm_ isfinite mean einsum ones zeros full new_zeros new_full "
            "zeros_like ones_like full_like scalar_tensor", moves_nothing),
    **named("add add_ sub sub_ mul mul_ div div_ neg pow rsqrt exp exp_ log sigmoid silu gelu relu tanh abs clamp "
            "clamp_ addcmul addcmul_ masked_fill_ _softmax _log_softmax cos sin native_layer_norm coppice::rms_norm "
            "coppice::layer_norm coppice::activation", elementwise),
    **named("sum amax amin max argmax argmin topk any all cumsum _local_scalar_dense fill_ zero_ coppice::top_k "
            "coppice::gumbel_argmax", touches),
    **named("copy_", copies),
    **named("mm bmm", product(0, 1)),
    **named("addmm baddbmm baddbmm_ addmm_", product(1, 2)),
    **named("mkldnn::_linear_pointwise coppice::packed_linear", linear(1, 2)),
    **named("onednn::qlinear_pointwise", quantised),
    **named("coppice::int8_linear", linear(1, 5)),
    **named("coppice::rotary", rotates),
    **named("coppice::silu_mul", halves),
    **named("coppice::log_softmax", normalizes),
    **named("coppice::best_sums coppice::at_least", seeks),
    **named("index_select", selects),
    **named("gather", gathers),
    **named("embedding", embeds),
    **named("index_copy_", puts),
    **named("coppice::kv_write_torch coppice::kv_write_cpp coppice::kv_write_triton", writes_kv),
}  # fmt: skip


def broadcast(shapes: Iterable[Sequence[int]]) -> list[int]:
    """The common shape of shapes."""
    common: list[int] = []
    for shape in shapes:
        longer = [1] * (len(shape) - len(common)) + common
        shorter = [1] * (len(longer) - len(shape)) + list(shape)
        common = [b if a == 1 else a for a, b in zip(longer, shorter, strict=True)]
    return common


def work_of(call: Call) -> Work | None:
    """Bytes and operations of a call; None where its shapes do not tell."""
    try:
        return FORMULAS[call.name](call)
    except (KeyError, IndexError, ValueError, ZeroDivisionError):
        return None


def read_trace(path: Path, attention: Work | None = None) -> tuple[list[Operator], list[Operator]]:
    """Operators and, of a GPU, kernels of a Chrome trace with shapes, those that took longest first.

    Args:
        path: as `torch.profiler.profile.export_chrome_trace` writes it.
        attention: bytes and operations of all tree attention in it: what a token sees no shape tells.
    """
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    operators: dict[str, Operator] = {}
    kernels: dict[str, Operator] = {}
    launched: dict[Any, float] = defaultdict(float)  # device seconds by the operator's number
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            row = kernels.setdefault(event["name"], Operator(event["name"], bytes=None, operations=None))
            row.calls += 1
            row.seconds += event["dur"] / 1e6
            launched[event["args"].get("External id")] += event["dur"] / 1e6
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            threads[event["tid"]].append(event)
    for thread in threads.values():
        for event, seconds in own_times(thread):
            if event["cat"] != "cpu_op":
                continue
            row = operators.setdefault(event["name"], Operator(event["name"]))
            row.calls += 1
            row.seconds += seconds
            args = event["args"]
            row.device_seconds += launched.get(args.get("External id"), 0.0)
            types = args.get("Input type", [])
            work = work_of(Call(event["name"], args.get("Input Dims", []), types, args.get("Concrete Inputs", [])))
            row.kind = "int8" if "qlinear" in row.name or "int8" in row.name else row.kind or KINDS.get(first(types))
            if work is None or row.bytes is None or row.operations is None:
                row.bytes = row.operations = None
            else:
                row.bytes, row.operations = row.bytes + work[0], row.operations + work[1]
    for row in operators.values():
        if row.name.startswith("coppice::tree_attention") and attention is not None:
            row.bytes, row.operations = attention
    order = [sorted(rows.values(), key=lambda row: -max(row.seconds, row.device_seconds)) for rows in
             (operators, kernels)]  # fmt: skip
    return order[0], order[1]


def first(types: Sequence[str]) -> str:
    """The type of the first tensor."""
    return next((kind for kind in types if kind in SIZES), "")


def own_times(events: list[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """Events of one thread with the seconds that are spent in none of those inside them."""
    found: list[list[Any]] = []
    open_: list[tuple[float, list[Any]]] = []  # end, entry
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while open_ and open_[-1][0] <= event["ts"]:
            open_.pop()
        entry = [event, event["dur"]]
        if open_:
            open_[-1][1][1] -= event["dur"]
        open_.append((event["ts"] + event["dur"], entry))
        found.append(entry)
    return [(event, max(0.0, own) / 1e6) for event, own in found]

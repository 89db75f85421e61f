"""The operators of a torch profile, as torch.profiler sums them up, with bytes computed from shapes."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import profile

Shapes = Sequence[Sequence[int]]
ATTENTION = "coppice::tree_attention"


@dataclass
class Operator:
    """All calls of one operator, or of one kernel of a GPU.

    Attributes:
        seconds: host time without the operators that it calls; for a kernel, time on the device.
        device_seconds: time of the kernels that it launched itself.
        operations: operations of a matrix product; 0 for other operators.
        bytes: the least bytes that it moves; None if this table has no formula for it.
    """

    name: str
    calls: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0
    operations: int = 0
    bytes: float | None = None


def inputs_and_output(shapes: Shapes, size: int) -> float:
    """Bytes of all inputs, and of an output of the first one's shape."""
    return size * (sum(map(math.prod, filter(None, shapes))) + math.prod(shapes[0]))


def product(shapes: Shapes, size: int) -> float:
    """Bytes of x [..., in], of the weight, and of the result. The last dimension of panels tells their dtype."""
    x, weight, width = math.prod(shapes[0]), math.prod(shapes[1]), shapes[0][-1]
    word = shapes[1][-1] if len(shapes[1]) == 4 else 1
    return weight * (size if word == 1 else 4 / word) + size * (x + x // width * weight // width)


def new_rows(shapes: Shapes, size: int) -> float:
    """Bytes of new keys and values, read and written."""
    return 4 * size * math.prod(shapes[2])


def taps(shapes: Shapes, size: int) -> float:
    """Bytes of a short convolution: gates and inputs [T, 3E], weights [K, E], rows written and read, the output."""
    (tokens, _), (count, width) = shapes[:2]
    return size * width * (tokens * (4 + count) + count)


FORMULAS: dict[str, Callable[[Shapes, int], float]] = {  # bytes of each call, for activations of a given size
    "coppice::linear": product,
    "mkldnn::_linear_pointwise": product,
    "coppice::rms_norm": inputs_and_output,
    "coppice::layer_norm": inputs_and_output,
    "coppice::rotary": inputs_and_output,
    "coppice::activation": inputs_and_output,
    "coppice::activation_mul": lambda shapes, size: 1.5 * size * math.prod(shapes[0]),
    **{f"coppice::kv_write_{impl}": new_rows for impl in ("cpp", "torch", "triton")},
    **{f"coppice::short_conv_{impl}": taps for impl in ("cpp", "torch", "triton")},
}


def read_profile(
    profiler: profile, dtype: torch.dtype, attention: tuple[int, int] | None = None
) -> tuple[list[Operator], list[Operator]]:
    """Operators and GPU kernels, longest first.

    Args:
        profiler: has recorded shapes.
        dtype: of the model's activations.
        attention: bytes and operations of all tree attention, which do not follow from shapes.
    """
    operators: dict[str, Operator] = defaultdict(lambda: Operator(""))
    kernels: dict[str, Operator] = defaultdict(lambda: Operator(""))
    for row in profiler.key_averages(group_by_input_shape=True):
        event: Any = row
        of_device = event.device_type.name != "CPU"
        if not of_device and "::" not in event.key:
            continue  # the engine's phases, and the profiler's own work
        operator = (kernels if of_device else operators)[event.key]
        device = event.self_device_time_total / 1e6
        operator.name = event.key
        operator.calls += event.count
        operator.seconds += device if of_device else event.self_cpu_time_total / 1e6
        operator.device_seconds += 0.0 if of_device else device
        operator.operations += event.flops
        if (formula := FORMULAS.get(event.key)) and event.input_shapes:
            operator.bytes = (operator.bytes or 0) + event.count * formula(event.input_shapes, dtype.itemsize)
            if formula is product:
                rows = math.prod(event.input_shapes[0][:-1])
                operator.operations += 2 * event.count * rows * math.prod(event.input_shapes[1])
    for operator in operators.values():
        if operator.name.startswith(ATTENTION) and attention is not None:
            operator.bytes, operator.operations = attention
    by_time = [sorted(x.values(), key=lambda op: -max(op.seconds, op.device_seconds)) for x in (operators, kernels)]
    return by_time[0], by_time[1]

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
        seconds: without the operators that it calls; of a kernel, on the device.
        device_seconds: of the kernels that it launched itself.
        operations: of matrix products; 0 for all others.
        bytes: the least that it moves; None where this table has no formula.
    """

    name: str
    calls: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0
    operations: int = 0
    bytes: float | None = None


def inputs_and_output(shapes: Shapes) -> float:
    """Elements of all inputs, and of an output of the first one's shape."""
    return sum(map(math.prod, filter(None, shapes))) + math.prod(shapes[0])


def product(shapes: Shapes) -> float:
    """Elements of x [..., in], of the weight [out, in] and of the result."""
    return math.prod(shapes[0]) + math.prod(shapes[1]) + math.prod(shapes[0][:-1]) * shapes[1][0]


FORMULAS: dict[str, Callable[[Shapes], float]] = {  # elements of the model's dtype that each call moves
    "coppice::packed_linear": product,
    "mkldnn::_linear_pointwise": product,
    "coppice::rms_norm": inputs_and_output,
    "coppice::layer_norm": inputs_and_output,
    "coppice::rotary": inputs_and_output,
    "coppice::activation": inputs_and_output,
    "coppice::silu_mul": lambda shapes: 1.5 * math.prod(shapes[0]),
    "coppice::kv_write_cpp": lambda shapes: 4 * math.prod(shapes[2]),
    "coppice::kv_write_torch": lambda shapes: 4 * math.prod(shapes[2]),
    "coppice::kv_write_triton": lambda shapes: 4 * math.prod(shapes[2]),
}


def read_profile(
    profiler: profile, dtype: torch.dtype, attention: tuple[int, int] | None = None
) -> tuple[list[Operator], list[Operator]]:
    """Operators and, of a GPU, kernels; those that took longest first.

    Args:
        profiler: has recorded shapes.
        dtype: of the model; the formulas count its activations and weights.
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
            operator.bytes = (operator.bytes or 0) + event.count * formula(event.input_shapes) * dtype.itemsize
            if formula is product:
                rows = math.prod(event.input_shapes[0][:-1])
                operator.operations += 2 * event.count * rows * math.prod(event.input_shapes[1])
    if "mkldnn::_linear_pointwise" in operators:  # called by the other, which has but little time of its own
        for name in operators.keys() & {"coppice::packed_linear"}:
            operators[name].bytes, operators[name].operations = None, 0
    for operator in operators.values():
        if operator.name.startswith(ATTENTION) and attention is not None:
            operator.bytes, operator.operations = attention
    by_time = [sorted(x.values(), key=lambda op: -max(op.seconds, op.device_seconds)) for x in (operators, kernels)]
    return by_time[0], by_time[1]

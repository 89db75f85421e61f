"""The operators of a torch profile, as torch.profiler itself sums them up."""

from typing import Any, NamedTuple

from torch.profiler import profile


class Operator(NamedTuple):
    """All calls of one operator, or of one kernel of a GPU.

    Attributes:
        seconds: without the operators that it calls; of a kernel, on the device.
        device_seconds: of the kernels that it launched itself.
        operations: of matrix products that torch counts; 0 for all others.
    """

    name: str
    calls: int
    seconds: float
    device_seconds: float = 0.0
    operations: int = 0


def read_profile(profiler: profile) -> tuple[list[Operator], list[Operator]]:
    """Operators and, of a GPU, kernels; those that took longest first."""
    operators, kernels = [], []
    for row in profiler.key_averages():
        event: Any = row
        device = event.self_device_time_total / 1e6
        if event.device_type.name != "CPU":
            kernels.append(Operator(event.key, event.count, device))
        elif "::" in event.key:  # the others are the engine's parts, and what the profiler does itself
            cpu = event.self_cpu_time_total / 1e6
            operators.append(Operator(event.key, event.count, cpu, device, event.flops))
    for found in (operators, kernels):
        found.sort(key=lambda op: -max(op.seconds, op.device_seconds))
    return operators, kernels

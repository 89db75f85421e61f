"""Shared by the Triton kernels: whether they are interpreted, and the properties of the GPU."""

import functools
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # as it stands when kernels are defined


def check_device(*tensors: Tensor) -> None:
    """Raises ValueError for tensors that no kernel can reach."""
    kinds = {x.device.type for x in tensors}
    if kinds != {"cpu" if INTERPRETED else "cuda"}:
        wanted = "CPU tensors (TRITON_INTERPRET is set)" if INTERPRETED else "CUDA tensors"
        raise ValueError(f"impl 'triton': expected {wanted}, got {', '.join(sorted(kinds))}")


@dataclass(frozen=True)
class Properties:
    """Of a GPU: its streaming multiprocessors, and whether they have the shared memory of a data-centre card."""

    processors: int
    roomy: bool


@functools.cache
def properties(device: torch.device) -> Properties:
    """Of the device; the interpreter gets a few multiprocessors, so that it meets splits as well."""
    if device.type == "cpu":
        return Properties(2, False)
    gpu = torch.cuda.get_device_properties(device)
    return Properties(gpu.multi_processor_count, gpu.shared_memory_per_block_optin >= 160_000)

"""Shared by the Triton kernels: whether they are interpreted, and the properties of the GPU."""

import functools
from dataclasses import dataclass
from importlib import metadata

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs, runtime

INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # as it stands when kernels are defined


def check_interpreter(triton_version: str, numpy_version: str) -> None:
    """Raises ImportError for a NumPy that is too new for Triton's interpreter."""
    ours, numpys = ([int(x) for x in text.split(".")[:2]] for text in (triton_version, numpy_version))
    if ours < [3, 7] and numpys >= [2, 4]:
        raise ImportError(
            f"the interpreter of triton {triton_version} fails with NumPy {numpy_version}: "
            "pip install 'triton>=3.7', or 'numpy<2.4'"
        )


if INTERPRETED.value:
    check_interpreter(metadata.version("triton"), metadata.version("numpy"))


def build_launcher() -> None:
    """Have Triton build the module that launches kernels, with a C compiler; later it is on the disk.

    Raises whatever Triton does where it cannot.
    """
    runtime.driver.active.get_current_target()


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

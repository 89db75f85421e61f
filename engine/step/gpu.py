"""The requirements of a GPU: a generation that the kernels know, triton, and what triton builds with."""

import importlib.util
import sys
import sysconfig
from pathlib import Path

import torch

from engine.errors import UsageError

LEAST_CAPABILITY = (8, 0)  # Ampere: the first with bfloat16 products and with copies that run beside them
COMPILES = "Triton compiles each kernel at its first use, seconds for some of them; the next start finds them on disk"
WITHOUT = "or use --device cpu"


def check_gpu() -> None:
    """Refuse a GPU that cannot serve, before weights are read. Say so where its kernels are still to be compiled.

    Raises:
        UsageError: an old GPU, no triton, or triton cannot build the module that launches kernels.
    """
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        name, number = torch.cuda.get_device_name(), "{}.{}".format(*capability)
        raise UsageError(
            f"this GPU is too old: {name} has compute capability {number}, the kernels need 8.0 (Ampere) or later",
            remedy="use --device cpu, or a newer GPU",
        )
    check_triton()
    from kernels.gpu import build_launcher, compiled_before  # triton is absent on some machines, and slow to import

    try:
        build_launcher()
    except Exception as error:
        raise UsageError(
            f"triton cannot build what launches its kernels: {_why_no_build(error)}",
            remedy=f"install a C compiler (or name one in CC) and Python's headers (python3-dev), {WITHOUT}",
        ) from error
    if sys.stderr is not None and not compiled_before():
        print(f"coppice: {COMPILES}", file=sys.stderr, flush=True)


def check_triton() -> None:
    """Raises UsageError where triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise UsageError("a GPU needs the package triton", remedy=f"pip install 'coppice[gpu]', {WITHOUT}")


def _why_no_build(error: Exception) -> str:
    """The reason of triton's failure; its own words where a compiler and the headers are there."""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        return f"there is no {header}"
    return str(error).strip().partition("\n")[0] or type(error).__name__

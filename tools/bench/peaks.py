"""Peak operations per second of a processor, measured with its instructions and without our kernels."""

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels.cpp import FLAGS, BuildError, compiler
from kernels.processor import NATIVE

# Where no instruction multiplies a kind, bfloat16 is multiplied as float32 and int4 as int8.
KINDS = {"float32": 0, "bfloat16": 1, "int8": 3, "int4": 3}
ROUNDS, RUNS = 1 << 19, 20


def product_rates(kinds: Iterable[str], threads: int) -> dict[str, float]:
    """Multiplications and additions per second of `threads` threads together, for each kind of elements.

    Raises:
        BuildError: there is no C++ compiler, or it fails.
    """
    source = Path(__file__).with_suffix(".cpp")
    if (program := compiler()) is None:
        raise BuildError("no C++ compiler was found, with which the peaks of the processor are measured")
    with tempfile.TemporaryDirectory(prefix="peaks-") as folder:
        built = Path(folder) / "peaks.so"
        command = [program, *FLAGS, *NATIVE.flags, "-Wno-missing-declarations", "-shared", str(source), "-o"]
        done = subprocess.run([*command, str(built)], capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"{source} could not be compiled: {done.stderr.strip()}")
        peak = ctypes.CDLL(str(built)).peak
    peak.restype, peak.argtypes = ctypes.c_int64, (ctypes.c_int64, ctypes.c_int64)
    rates = {}
    with ThreadPoolExecutor(threads) as pool:  # ctypes lets other threads run meanwhile
        for kind in kinds:
            best = 0.0
            for _ in range(RUNS):
                began = time.perf_counter()
                made = sum(pool.map(lambda _, kind=kind: peak(KINDS[kind], ROUNDS), range(threads)))  # type: ignore[misc]
                best = max(best, made * ROUNDS / (time.perf_counter() - began))
            rates[kind] = best
    return rates

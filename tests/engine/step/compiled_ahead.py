"""Compiles two kernels in threads, for an H100 that is not here. Run without TRITON_INTERPRET."""

from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

from engine.progress import ProgressLine
from engine.step.gpu import PATIENCE, compiled
from kernels import gpu
from kernels.kv_write import triton as kv_write

triton.runtime.driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    launcher_cls=lambda src, metadata: None,
))  # fmt: skip
kv_write.check_device = lambda *tensors: None
slots, rows = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2, 64, dtype=torch.bfloat16)


def write():
    """Both kernels, as often as a model has layers."""
    for _ in range(3):
        for cache in (torch.zeros(2, 9, 64, dtype=torch.bfloat16), torch.zeros(2, 9, 66, dtype=torch.int8)):
            kv_write.kv_write(cache, cache, rows, rows, slots)


def names():
    """Those that are compiled."""
    kernels = [each for each in (kv_write._write, kv_write._write_rows) if 0 in each.device_caches]
    return " ".join(kernel.fn.__name__ for kernel in kernels for _ in kernel.device_caches[0][0].values())


gpu.SECONDS_BETWEEN = 0.05
progress = ProgressLine(PATIENCE)
progress.began -= 1000  # it takes long
with gpu.compiling(lambda done, count: progress.tell(compiled(done, count))):
    write()
found = names()
with gpu.compiling(lambda done, count: print("again")):
    write()
progress.end("kernels compiled in 0 s")
print(f"{found}, then {'nothing' if names() == found else names()}")

"""Loads models on the pretended device; Triton compiles their kernels and launches them for a driver that runs nothing.

    python -m tests.launched FOLDER ...

Run without TRITON_INTERPRET, with TRITON_LIBCUDA_PATH and LD_LIBRARY_PATH set to the folder of a `libcuda.so.1` made of
`libcuda.c`. Prints a line for each model: replayed graphs, and kernels compiled while a request was answered.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from triton import knobs

from engine import Engine
from kernels import gpu
from search import Trie
from tests import pretended_cuda


def fill(x: torch.Tensor) -> None:
    """Fill memory with what kernels could have written there: finite rows, flags that are set, different sums."""
    if x.dtype == torch.float64:
        x.copy_(torch.arange(x.numel()).view(x.shape))
    else:
        x.fill_(0 if x.dtype.is_floating_point else 1)


def compiled() -> int:
    """The number of kernels in Triton's cache."""
    return len([*Path(knobs.cache.dir).glob("*/*.cubin")])


def main(folders: list[str]) -> None:
    build_launcher: Callable[[], None] = gpu.build_launcher
    pretended_cuda.spoil = fill
    with pretended_cuda.pretend(processors=132) as device, pretended_cuda.Numbered():
        gpu.build_launcher = build_launcher
        triton.runtime.driver.active.get_current_stream = lambda device: 0  # torch's build with CUDA asks its driver
        for folder in folders:
            engine = Engine.load(folder, device="cuda", dtype="bfloat16", kv_memory=1 << 20)
            replays, kernels = device.replays, compiled()
            engine.generate([[7, 20, 33], [5, 6]], Trie(beams=3), max_new_tokens=4, ignore_eos=True)
            print(Path(folder).parent.name, device.replays - replays, compiled() - kernels)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Loads models on the pretended device; Triton compiles their kernels and launches them for a driver that runs nothing.

    python -m tests.launched FOLDER ...
    python -m tests.launched smoke

Run without TRITON_INTERPRET, with TRITON_LIBCUDA_PATH and LD_LIBRARY_PATH set to the folder of a `libcuda.so.1` made of
`libcuda.c`. Prints a line for each model: replayed graphs, and kernels compiled while a request was answered; for the
first stage of `tools.bench gpu`: kernels compiled ahead, and those compiled when they were launched.
"""

import argparse
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
from tools.bench.gpu import add_parser, each_kernel
from tools.bench.gpu.journal import Journal
from tools.bench.gpu.setting import Setting


def fill(x: torch.Tensor) -> None:
    """Fill memory with what kernels could have written there: finite rows, flags that are set, different sums."""
    if x.dtype == torch.float64:
        x.copy_(torch.arange(x.numel()).view(x.shape))
    else:
        x.fill_(0 if x.dtype.is_floating_point else 1)


def compiled() -> int:
    """The number of kernels in Triton's cache."""
    return len([*Path(knobs.cache.dir).glob("*/*.cubin")])


def smoke() -> None:
    """Compile the kernels of the stage smoke, and launch each."""
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    s = Setting(parser.parse_args(["gpu", "--prefix", "512"]), Journal())
    each_kernel.compile_ahead(s)
    kernels = compiled()
    with torch.inference_mode():
        for case in each_kernel.cases(s):
            with each_kernel.merging(case):
                case.run("triton")
    print("smoke", kernels, compiled() - kernels)


def main(folders: list[str]) -> None:
    build_launcher: Callable[[], None] = gpu.build_launcher
    pretended_cuda.spoil = fill
    with pretended_cuda.pretend(processors=132) as device, pretended_cuda.Numbered():
        gpu.build_launcher = build_launcher
        triton.runtime.driver.active.get_current_stream = lambda device: 0  # torch's build with CUDA asks its driver
        if folders == ["smoke"]:
            smoke()
            return
        for folder in folders:
            engine = Engine.load(folder, device="cuda", dtype="bfloat16", kv_memory=1 << 20)
            replays, kernels = device.replays, compiled()
            engine.generate([[7, 20, 33], [5, 6]], Trie(beams=3), max_new_tokens=4, ignore_eos=True)
            print(Path(folder).parent.name, device.replays - replays, compiled() - kernels)


if __name__ == "__main__":
    main(sys.argv[1:])

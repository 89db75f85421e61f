"""Checks what a GPU must have (a supported generation, triton, a compiler for triton's launchers), and compiles a
model's kernels before its first request."""

import importlib.util
import sysconfig
import warnings
from array import array
from pathlib import Path

import torch

from engine.cache.tree import TokenTree
from engine.contract.top_sums import TopSums
from engine.errors import KVMemoryError, UsageError
from engine.progress import ProgressLine
from engine.step.packing import Chunk
from engine.step.runner import PassWork, Runner
from kernels.rows import NextNodes, next_nodes

LEAST_CAPABILITY = (8, 0)  # Ampere: the first with bfloat16 products and with copies that run beside them
USUAL = (1, 4, 16, 32, 64, 256)  # tokens of passes whose kernels are compiled ahead, in addition to the largest
ASKED = 16  # rows of these passes whose top sums are requested
PATIENCE = 1.0  # seconds of compiling before its progress is shown
WITHOUT = "or use --device cpu"


def check_gpu() -> None:
    """Refuse a GPU that cannot serve, before weights are read.

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
    from kernels.gpu import build_launcher  # triton is absent on some machines, and slow to import

    try:
        build_launcher()
    except Exception as error:
        raise UsageError(
            f"triton cannot build what launches its kernels: {_why_no_build(error)}",
            remedy=f"install a C compiler (or name one in CC) and Python's headers (python3-dev), {WITHOUT}",
        ) from error


def check_triton() -> None:
    """Raises UsageError if triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise UsageError("a GPU needs the package triton", remedy=f"pip install triton, {WITHOUT}")


def _why_no_build(error: Exception) -> str:
    """The reason of triton's failure; its own message if a compiler and the headers are there."""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        return f"there is no {header}"
    return str(error).strip().partition("\n")[0] or type(error).__name__


def compile_ahead(runner: Runner) -> None:
    """Compile the kernels of a model in threads, before a request waits for them; a line on stderr shows the progress.
    Warns if that fails.

    Passes of usual sizes show which kernels are needed. Triton's are not launched meanwhile, so their results are
    arbitrary. A second round finds the kernels that depend on the first: how attention divides its work follows from
    the registers that its compiled kernel uses.
    """
    if runner.impl != "triton":
        return
    from kernels.gpu import INTERPRETED, compiling  # triton, which takes memory and needs numpy

    if INTERPRETED.value:
        return
    progress = ProgressLine(PATIENCE)
    try:
        for _ in range(2):
            with compiling(lambda done, count: progress.tell(compiled(done, count))):
                usual_passes(runner)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        what = "kernels are compiled at their first use, because compiling them ahead failed"
        warnings.warn(f"{what}: {reason}", stacklevel=2)
    progress.end(f"kernels compiled in {progress.seconds:.0f} s")


@torch.inference_mode()
def usual_passes(runner: Runner) -> None:
    """Begin passes of usual sizes that fit the pool, with a beam search's requests; nothing reads the answers."""
    for count in sorted({*(n for n in USUAL if n < runner.budget), runner.budget}):
        tree = TokenTree(runner.pool, [0] * count)
        try:
            chunk = Chunk(tree, count, [], tree.allocate(count, []))
            asked = range(count)[-ASKED:]
            wanted = TopSums([0.0] * len(asked), 2 * len(asked))
            reads = [] if runner.model.shape.scores else [(slice(0, len(asked)), wanted)]
            numbers = Runner.launch(runner, PassWork([chunk], asked, reads)).numbers
            if numbers:
                ancestry_TC = torch.zeros(count, 16, dtype=torch.int32, device=runner.device)
                nodes = [NextNodes(len(asked), [], [*asked], array("i", [0] * 16))]
                next_nodes(numbers, nodes, ancestry_TC, runner.model.shape.vocab_size, impl=runner.impl)
        except KVMemoryError:
            return
        finally:
            tree.release()


def compiled(done: int, count: int) -> str:
    """The text of the progress: `done` of `count` kernels are compiled."""
    return f"{done} of {count} kernels compiled for this GPU; later starts find them on disk"

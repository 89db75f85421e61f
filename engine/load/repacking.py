"""The file from which experts are read if they exceed `--memory`: an earlier start left it in the cache, or this one
packs the matrices into it, one at a time, before it loads the model."""

import os
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from engine.errors import UsageError
from engine.load.sizes import size_text
from engine.progress import ProgressLine
from kernels import files
from kernels.files import BuildError
from models.checkpoint.cached_matrices import CachedMatrices, matrices_of_experts
from models.checkpoint.headers import Checkpoint
from models.checkpoint.repacked import repack, repacked_bytes
from models.file_cache import SPARE, FileCache, NewFile, changed_since

PATIENCE = 1.0  # seconds of packing before its progress is shown
WAIT = 0.2  # seconds between checks of a file that another process writes
TEMPORARY = "/var/tmp"  # /tmp is often in memory
REMEDY = (
    "name a folder of another disk by XDG_CACHE_HOME or TMPDIR, raise --memory, "
    "or pack the model ahead by `python -m tools.pack`"
)
IN_MEMORY = {"tmpfs", "ramfs"}


def bytes_to_pack(cache: FileCache | None, checkpoint: Checkpoint, dtype: torch.dtype, quant: str) -> int:
    """About how many bytes a start with a part of the experts in memory writes first; 0: a file has them already.

    See `experts_file` for the arguments. Raises OSError.
    """
    if checkpoint.packing is not None or matrices_of_experts(cache, checkpoint, dtype, quant, 0.0).found:
        return 0
    return repacked_bytes(checkpoint, dtype, quant)


def experts_file(
    cache: FileCache | None, checkpoint: Checkpoint, dtype: torch.dtype, quant: str, opened: float
) -> CachedMatrices | None:
    """The matrices of a mixture, mapped from a file, which is written first if necessary.

    The file belongs to the cache. If the cache is off, too small, or not writable, the file has no name, and the system
    removes it when the process ends. Lines on stderr say so, and show the progress.

    Args:
        cache: the file cache; None: it is off.
        dtype: the dtype to compute in.
        quant: format of the matrices.
        opened: a moment of `time.time` before the headers were read.

    Returns:
        None for a checkpoint that was packed ahead.

    Raises:
        UsageError: no disk has enough room, or the file cannot be written.
        CheckpointError: the checkpoint changed meanwhile, or `load_model` refuses it.
    """
    if checkpoint.packing is not None:
        return None
    try:
        matrices = matrices_of_experts(cache, checkpoint, dtype, quant, opened)
        if not matrices.found:
            _pack(matrices, checkpoint, dtype, quant)
    except OSError as error:
        what = f"memory: it does not hold all experts, and they cannot be packed into a file: {error}"
        raise UsageError(what, where=checkpoint.name, remedy=REMEDY) from None
    return matrices


def _pack(matrices: CachedMatrices, checkpoint: Checkpoint, dtype: torch.dtype, quant: str) -> None:
    size, progress = repacked_bytes(checkpoint, dtype, quant), ProgressLine(PATIENCE)

    def tell(done: int) -> None:
        progress.tell(f"packed {size_text(done)} of {size_text(max(done, size))}")

    with ExitStack() as stack:
        new = _begin(matrices, size, stack)
        if new is not None:
            repack(checkpoint, dtype, quant, matrices, new, tell)
    progress.end(f"packed {size_text(size)} in {progress.seconds:.0f} s")


def _begin(matrices: CachedMatrices, size: int, stack: ExitStack) -> NewFile | None:
    """The file to write, in the first usable place; None: another process has just written it to the cache."""
    what = f"packing {size_text(size)} of matrices into a file, because --memory does not hold all experts"
    try:
        new, folder = _in_cache(matrices, size, stack), matrices.cache and matrices.cache.folder
        if new is not None:
            files.report(f"{what}: later starts find it in {folder}")
        return new
    except (ValueError, OSError, BuildError, RuntimeError) as error:  # RuntimeError: a user without a home
        why = str(error)
    folder = Path(os.environ.get("TMPDIR") or TEMPORARY)
    try:
        _check_room(folder, size)
        file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115
    except (ValueError, OSError) as error:
        raise UsageError(
            f"memory: it does not hold all experts, and no disk takes the {size_text(size)} that they are packed into",
            where=f"  the cache: {why}\n  a file of its own: {error}",
            remedy=f"make {size_text(size + SPARE)} free there, or {REMEDY}",
        ) from None
    files.report(f"{what}: it lies in {folder} and is removed when this process ends; later starts pack it again")
    files.report(f"the cache cannot hold it: {why}")
    return NewFile(file.fileno())


def _in_cache(matrices: CachedMatrices, size: int, stack: ExitStack) -> NewFile | None:
    """A new file in the cache. Raises ValueError with the reason if it takes none, and errors of `FileCache.begin`."""
    cache, told = matrices.cache, False
    if cache is None:
        raise ValueError("it is off")
    if changed_since(matrices.paths, matrices.opened):
        raise ValueError("the checkpoint has just been written")
    if size > cache.bound:
        raise ValueError(f"it holds {size_text(cache.bound)} at most: COPPICE_CACHE={(size >> 30) + 1}G raises that")
    _check_room(files.private(cache.folder, make=True), size)
    while True:
        try:
            return stack.enter_context(cache.begin(matrices.name))
        except BlockingIOError:
            if matrices.look():
                return None
        if not told:
            files.report(f"another process packs the same matrices into {cache.folder}: waiting for it")
            told = True
        time.sleep(WAIT)


def _check_room(folder: Path, size: int) -> None:
    """Refuse a folder without enough room on a disk. Raises ValueError, OSError."""
    if _in_memory(folder):
        raise ValueError(f"{folder} lies in memory")
    free = shutil.disk_usage(folder).free
    if size + SPARE > free:
        kept = f"of which {size_text(SPARE)} stay free"
        raise ValueError(f"{folder} has {size_text(free)} free, {kept}, and {size_text(size)} are needed")


def _in_memory(folder: Path) -> bool:
    """Whether the files of a folder lie in memory instead of on a disk."""
    device = os.stat(folder).st_dev
    own = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines():
        place, _, kind = line.partition(" - ")
        if place.split()[2] == own:
            return kind.split()[0] in IN_MEMORY
    return False

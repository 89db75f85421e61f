"""Opens and writes files that other programs share: regular files only, locks, atomic replacement."""

import contextlib
import errno
import mmap
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kernels.files import lock, locked
from models.errors import reason_of

__all__ = ["is_file", "lock", "locked", "map_regular", "obstacle", "open_regular", "read_regular", "replacing"]


def is_file(path: Path) -> bool:
    """Whether a path leads to a regular file. Raises OSError if that is unknown; `Path.is_file` does not in 3.14."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading bytes; links are followed, and the call never blocks.

    A FIFO without a writer would block `open`, a device may be endless, and either may replace a file between a check
    and the opening: so the file is checked before it is opened, and again once it is open.

    Raises:
        OSError: the path cannot be opened, or is not a regular file.
    """
    _check_regular(os.stat(path).st_mode, path)
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        _check_regular(os.fstat(number).st_mode, path)
        os.set_blocking(number, True)
        return open(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_regular(path: str | Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes, or the first `limit` + 1 bytes of a longer one. Raises OSError."""
    with open_regular(path) as file:
        return file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)  # read(n) allocates n bytes


def map_regular(path: str | Path, least: int) -> mmap.mmap | bytes:
    """Map a regular file into memory; a file with less than `least` bytes gives b"".

    The mapping is private and writable: torch needs writable memory, and the file does not change.

    Raises:
        OSError, ValueError: it cannot be read or mapped.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size < least:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _check_regular(mode: int, path: str | Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, f"{os.strerror(errno.EISDIR)}, not a regular file", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def obstacle(path: str | Path) -> tuple[str, str] | None:
    """Return what would prevent writing or replacing a file, and the path at fault, before any work is done for it.

    None: no visible obstacle; devices and pipes may be written too.
    """
    try:
        target = Path(path).resolve()
        if target.is_dir():
            return "this is a folder", str(path)
        if target.exists() and not os.access(target, os.W_OK):
            return "no permission", str(path)
        if target.exists() and not target.is_file():
            return None
        if not target.parent.is_dir():
            return "there is no such folder", str(target.parent)
        if not os.access(target.parent, os.W_OK | os.X_OK):
            return "the folder cannot be written to", str(target.parent)
    except (OSError, ValueError, RuntimeError) as error:
        return reason_of(error), str(path)
    return None


@contextlib.contextmanager
def replacing(target: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Yield a file to write, which replaces `target` on the disk at the end of the block, unless an error occurs.

    A link is followed. A new file gets the permissions `mode`, less the umask; a replaced file's permissions are kept.
    Raises OSError.
    """
    target = target.resolve()
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.part")
    number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            if target.exists():
                os.fchmod(number, stat.S_IMODE(target.stat().st_mode))
            with open(number, "wb", closefd=False) as file:
                yield file
            os.fsync(number)
        finally:
            os.close(number)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise

"""Files derived from a model's files, kept in the user's cache folder, so that later starts need not derive them again.

A file is named by the digest of its inputs and of the code that derives it. It has sections of bytes, each at a
multiple of LINE, then a JSON object with the caller's metadata, the offsets of the sections and a digest of samples of
the sections, then the digest and the length of that object, and MAGIC. Sections are memory-mapped: processes share
their memory, and pages are loaded when they are first read.
"""

import atexit
import hashlib
import json
import mmap
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import cpp, files, processor
from kernels.files import BuildError
from models.checkpoint.files import open_regular

MAGIC, LINE = b"coppice\1", 64
FOOT = hashlib.sha256().digest_size + 8 + len(MAGIC)
MOST_FACTS = 1 << 28  # the most bytes of the JSON object
PLACES, PIECE = 256, 1 << 12  # places of a large file that are compared with its digest, and the bytes at each
FILE_PLACES = 16  # fewer places for a model's files, which the system may have to read from the disk
SPARE = 1 << 30  # bytes of the disk that stay free
STALE = 24 * 3600  # seconds until a file that was never completed is removed
CHUNK = 1 << 24  # bytes that are written at once
TICK = 0.02  # seconds by which the time of a file may lag behind the clock
PATIENCE = 10.0  # seconds that the end of the interpreter waits for a file that is being written
NICE = 5  # niceness of the writing thread: it gets a third of the time of another thread on the same core
PACKAGE = Path(__file__).parent


class CachedFile(NamedTuple):
    """An open file of the cache.

    Args:
        facts: the writer's metadata.
        sections: the sections' bytes, views of the mapped file.
    """

    facts: dict[str, Any]
    sections: list[memoryview]

    def tensor(self, section: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return a section as a tensor, which keeps the mapping alive. Raises ValueError if it does not fit."""
        found = torch.frombuffer(self.sections[section], dtype=dtype)
        if found.numel() != torch.Size(shape).numel():
            raise ValueError(f"section {section}: expected {list(shape)}, got {found.numel()} elements")
        return found.view(list(shape))


class NewFile:
    """A file that is written section by section.

    Args:
        descriptor: descriptor of an empty file, open for reading and writing.
    """

    def __init__(self, descriptor: int):
        self._descriptor, self._places, self._end = descriptor, list[tuple[int, int]](), 0

    def put(self, section: memoryview) -> int:
        """Write a section, and return its number."""
        _put(self._descriptor, section, self._end)
        self._places.append((self._end, section.nbytes))
        self._end = -(-(self._end + section.nbytes) // LINE) * LINE
        return len(self._places) - 1

    def finish(self, facts: dict[str, Any]) -> None:
        """Write the description of the file, its last part."""
        os.ftruncate(self._descriptor, self._end)
        digest = hashlib.sha256()
        _sample(digest, self._descriptor, self._end, PLACES)
        found = {"facts": facts, "sections": self._places, "samples": digest.hexdigest()}
        text = json.dumps(found, separators=(",", ":")).encode()
        foot = text + hashlib.sha256(text).digest() + len(text).to_bytes(8, "little") + MAGIC
        _put(self._descriptor, memoryview(foot), self._end)
        os.fsync(self._descriptor)

    def mapped(self) -> CachedFile:
        """Map the finished file; the mapping outlives the descriptor. Raises ValueError if it is damaged already."""
        return _read(self._descriptor)


class FileCache:
    """A folder of such files, of bounded size: the least recently used ones are removed first.

    A file that cannot be read or written is no error: its content is derived again, and a line on stderr says once why.

    Args:
        folder: the folder, which is made when a file is written.
        bound: the most bytes of all files together.
    """

    def __init__(self, folder: Path, bound: int):
        self.folder, self.bound = folder, bound
        self._told: set[str] = set()

    def open(self, name: str) -> CachedFile | None:
        """Open the file of a name (see `name_of`); return None if it does not exist or cannot be trusted."""
        path = self.folder / name
        try:
            if not path.exists():
                return None
            descriptor = files.opened(files.private(self.folder) / name)
            if descriptor is None:
                return None
            try:
                found = _read(descriptor)
                with suppress(OSError):  # a read-only file system
                    os.utime(descriptor)
            finally:
                os.close(descriptor)
        except ValueError as error:
            self._say(f"{path}: {error}: what it held is derived again")
        except (OSError, BuildError, RuntimeError) as error:
            self._say(f"what is derived from models is not read from {self.folder}: {files.why_unusable(error)}")
        else:
            return found
        return None

    def write(self, name: str, facts: dict[str, Any], sections: Sequence[memoryview]) -> bool:
        """Write a whole file, or leave the existing one; then remove others until all fit the bound.

        Returns:
            whether it was written: not if it exceeds the bound or the disk, or if another process writes it.
        """
        size = sum(-(-section.nbytes // LINE) * LINE for section in sections)
        try:
            folder = files.private(self.folder, make=True)
            room = shutil.disk_usage(folder).free - SPARE
            if size > min(self.bound, room):
                most = (
                    f"COPPICE_CACHE allows {self.bound}"
                    if size > self.bound
                    else f"the disk has {max(room, 0)} to spare"
                )
                self._say(f"what is derived from models is not kept in {folder}: it has {size} bytes, {most}")
                return False
            with self.begin(name) as new:
                for section in sections:
                    new.put(section)
                new.finish(facts)
        except BlockingIOError:
            return False
        except (OSError, BuildError, RuntimeError) as error:  # RuntimeError: a user without a home
            self._say(f"what is derived from models is not kept in {self.folder}: {files.why_unusable(error)}")
            return False
        return True

    @contextmanager
    def begin(self, name: str) -> Iterator["NewFile"]:
        """Write a file piece by piece. The complete file exists once the block has ended; if that fails, no file does.

        Raises:
            BlockingIOError: another process is writing it, or has just written it.
            OSError, BuildError, RuntimeError: it cannot be written.
        """
        folder = files.private(self.folder, make=True)
        part = folder / f"{name}.part"
        number = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            files.lock(number)
            if not _is_at(number, part):  # another process has just renamed the opened file
                raise BlockingIOError(f"{part} is complete")
            try:
                os.ftruncate(number, 0)
                yield NewFile(number)
                part.replace(folder / name)
            except BaseException:
                with suppress(OSError):
                    part.unlink()
                raise
        finally:
            os.close(number)
        self._evict(folder, name)

    def _evict(self, folder: Path, kept: str) -> None:
        """Remove the least recently used files beyond the bound, and unfinished files of dead writers."""
        with files.locked(folder):
            found = []
            for path in folder.iterdir():
                with suppress(FileNotFoundError):
                    status = path.stat(follow_symlinks=False)
                    if path.suffix == ".part":
                        if time.time() - status.st_mtime > STALE:
                            path.unlink()
                        continue
                    found.append((path.name == kept, status.st_mtime_ns, status.st_size, path))
            total = sum(size for _, _, size, _ in found)
            for _, _, size, path in sorted(found):
                if total <= self.bound or path.name == kept:
                    break
                with suppress(OSError):
                    path.unlink()
                total -= size

    def _say(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            files.report(text)


def name_of(*parts: Any) -> str:
    """Return the name of a file derived from these parts by the code of this version, on this processor."""
    return hashlib.sha256(repr((parts, code())).encode()).hexdigest()[:40]


@lru_cache(maxsize=1)
def code() -> str:
    """Return a digest of the code that derives files, and of everything else that its results may depend on."""
    facts = cpp.sources(), cpp.why_not(), processor.identity(), torch.__version__, sys.version_info[:2], sys.byteorder
    digest = hashlib.sha256(repr(facts).encode())
    for path in (*sorted(PACKAGE.rglob("*.py")), *sorted(PACKAGE.with_name("kernels").glob("linear/*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def identity(paths: Iterable[Path]) -> str:
    """Return a digest that changes when one of these files does: of sizes, inodes, times of changes, and samples.

    The time of the last change of an inode cannot be set back, unlike that of the content. Raises OSError.
    """
    digest = hashlib.sha256()
    for path in sorted(paths):
        with open_regular(path) as file:
            number = file.fileno()
            status = os.fstat(number)
            facts = status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns
            digest.update(repr(facts).encode())
            _sample(digest, number, status.st_size, FILE_PLACES)
    return digest.hexdigest()


def changed_since(paths: Iterable[Path], moment: float) -> bool:
    """Whether one of these files may have changed after a moment of `time.time`. Raises OSError."""
    return any(os.stat(path).st_ctime > moment - TICK for path in paths)


def in_background(work: Callable[[], None]) -> threading.Thread:
    """Run a function in a thread that gives way to others.

    The interpreter waits `PATIENCE` seconds for it before it exits; then the work is cut off, and a later start tries
    again.
    """

    def run() -> None:
        with suppress(OSError, AttributeError):  # not all systems give a thread its own priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        work()

    thread = threading.Thread(target=run, name="coppice-file-cache", daemon=True)
    thread.start()
    _running.append(thread)
    return thread


_running: list[threading.Thread] = []


@atexit.register
def _finish() -> None:
    deadline = time.monotonic() + PATIENCE
    with suppress(KeyboardInterrupt):
        for thread in _running:
            thread.join(max(0.0, deadline - time.monotonic()))


def _sample(digest: Any, descriptor: int, size: int, places: int) -> None:
    """Add pieces of a file's first `size` bytes to a digest, including both ends; all bytes if the file is small."""
    if size <= places * PIECE:
        digest.update(os.pread(descriptor, size, 0))
        return
    for i in range(places):
        digest.update(os.pread(descriptor, PIECE, (size - PIECE) * i // (places - 1)))


def _put(descriptor: int, content: memoryview, at: int) -> None:
    """Write bytes at an offset of a file; unbuffered, because a thread that is cut off would keep a buffer's lock."""
    while content.nbytes:
        count = os.pwrite(descriptor, content[:CHUNK], at)
        content, at = content[count:], at + count


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at its path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _read(descriptor: int) -> CachedFile:
    """Check and map a file. Raises ValueError if it has another form than `NewFile` writes."""
    size = os.fstat(descriptor).st_size
    foot = os.pread(descriptor, FOOT, max(0, size - FOOT))
    digest, length = foot[: -8 - len(MAGIC)], int.from_bytes(foot[-8 - len(MAGIC) : -len(MAGIC)], "little")
    end = size - FOOT - length
    if len(foot) < FOOT or not foot.endswith(MAGIC) or length > MOST_FACTS or end < 0:
        raise ValueError("it is cut short, or no file of this cache")
    text = os.pread(descriptor, length, end)
    if hashlib.sha256(text).digest() != digest:
        raise ValueError("its description is damaged")
    found, sampled = json.loads(text), hashlib.sha256()
    _sample(sampled, descriptor, end, PLACES)
    if sampled.hexdigest() != found["samples"] or any(at + count > end for at, count in found["sections"]):
        raise ValueError("its content is damaged")
    mapped = memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY))
    return CachedFile(found["facts"], [mapped[at : at + count] for at, count in found["sections"]])

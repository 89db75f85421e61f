"""Locks, and files of native code: written atomically, verified before they are loaded, refused if others could write
to them.

`NAME.so` comes with `NAME.json`: the size and SHA-256 digest of the library, and what it was built from and for.
"""

import fcntl
import grp
import hashlib
import json
import math
import os
import pwd
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

MAX_FACTS = 1 << 16  # bytes of a JSON file


class BuildError(Exception):
    """The kernels cannot be built or loaded here. The message says why."""


def report(text: str) -> None:
    """Prints a line to stderr, where there is one."""
    if sys.stderr is not None:
        print(f"coppice: {text}", file=sys.stderr, flush=True)


def why_unusable(error: Exception) -> str:
    """Returns why the cache's folder cannot be used, and what to do about it."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}; XDG_CACHE_HOME=DIR names another folder for caches"


def private(folder: Path, *, make: bool = False, mode: int = 0o700) -> Path:
    """Returns the real path of a folder from which code may be loaded: only this user and root can change it.

    Args:
        make: create what is missing of the path, with this mode.

    Raises:
        BuildError: another user owns the folder or a folder above it, or others may write to it; or it is no folder.
        OSError: it cannot be created.
    """
    if make:
        _make(folder, mode)
    try:
        real = folder.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: symbolic links in a circle, before Python 3.13
        raise BuildError(f"{folder}: there is no such folder") from error
    # Links on the way need no look: whoever can change one of them can only lead to a folder that is checked.
    for place in (real, *real.parents):
        status = place.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise BuildError(f"{place} is not a folder")
        _check(place, status, above=place != real)
    return real


def _make(folder: Path, mode: int) -> None:
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        with suppress(FileExistsError):  # another process made it meanwhile
            path.mkdir(mode)
            path.chmod(mode)  # whatever the umask took


def _check(path: Path, status: os.stat_result, *, above: bool = False) -> None:
    """Raises BuildError if another user could have written the file or folder; `above`: a folder above the one used."""
    if status.st_uid not in (os.geteuid(), 0):
        raise BuildError(
            f"{path} belongs to user {status.st_uid}, who could plant code there: nothing is loaded from it; "
            "set XDG_CACHE_HOME or COPPICE_KERNELS to a folder of your own"
        )
    loose = status.st_mode & 0o022
    if above and loose:
        if status.st_mode & stat.S_ISVTX:  # as /tmp: others cannot move what is not theirs
            return
        if loose == 0o020 and _alone_in(status.st_gid):  # a umask of 002 where every user has a group
            return
    if loose:
        raise BuildError(
            f"other users may write to {path} (mode {stat.S_IMODE(status.st_mode):04o}) and plant code there: "
            f"nothing is loaded from it; make sure that what is in it is yours, then: chmod go-w '{path}'"
        )


def _alone_in(group: int) -> bool:
    """Whether a group has no other members than this user."""
    try:
        own = pwd.getpwuid(os.geteuid()).pw_name
        others = {*grp.getgrgid(group).gr_mem, *(user.pw_name for user in pwd.getpwall() if user.pw_gid == group)}
    except KeyError:
        return False
    return others <= {own}


def lock(file: int | BinaryIO) -> bool:
    """Takes the exclusive lock of an open file or folder, until it is closed; no lock file is needed.

    Returns:
        Whether it is locked: False if the file system has no locks.

    Raises:
        BlockingIOError: another process, or another open file of this one, holds the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


@contextmanager
def locked(folder: Path, seconds: float = math.inf, waiting: str = "") -> Iterator[None]:
    """Holds the lock of a folder while a file in it is read, changed and replaced (a replaced file loses its own lock).

    Without locks in the file system, the block runs unlocked.

    Args:
        waiting: is reported if another program has the lock.

    Raises:
        BlockingIOError: another program has held the lock for all these seconds.
        OSError: the folder cannot be opened.
    """
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + seconds
        while True:
            try:
                lock(number)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                if waiting:
                    report(waiting)
                    waiting = ""
                time.sleep(0.02)
        yield
    finally:
        os.close(number)


def save(folder: Path, name: str, built: Path, facts: dict[str, Any]) -> None:
    """Move a built library into a folder, and its facts beside it. A reader finds both whole or does not verify them.

    Args:
        built: the file, on the same file system.
        facts: to which size and digest are added.
    """
    content = built.read_bytes()
    facts = facts | {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    described = built.with_suffix(".json")
    described.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    for path in (built, described):
        path.chmod(0o644)
        _sync(path)
    _sync(built.parent)
    built.replace(folder / f"{name}.so")
    described.replace(folder / f"{name}.json")
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems cannot do it for folders
            raise
    finally:
        os.close(descriptor)


def facts(folder: Path, name: str, *, trusted: bool = False) -> dict[str, Any] | None:
    """Returns the facts of a library, or None if there are none or they cannot be read.

    Args:
        trusted: a user who can write here can also write the Python code that asks, so owners and modes do not matter.

    Raises:
        BuildError: another user could have written it.
    """
    descriptor = opened(folder / f"{name}.json", trusted)
    if descriptor is None:
        return None
    with open(descriptor, "rb") as file:
        content = file.read(MAX_FACTS)
    try:
        found = json.loads(content)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def verified(folder: Path, name: str, facts: dict[str, Any] | None, *, trusted: bool = False) -> int | None:
    """Returns a library opened for reading if it has the size and digest that its facts name, else None.

    The descriptor reads the verified bytes: no other user can write to the file, and we only ever replace it.

    Raises:
        BuildError: another user could have written it.
    """
    descriptor = opened(folder / f"{name}.so", trusted)
    if descriptor is None:
        return None
    facts = facts or {}
    if os.fstat(descriptor).st_size == facts.get("size"):
        with open(descriptor, "rb", closefd=False) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == facts.get("sha256"):
                return descriptor
    os.close(descriptor)
    return None


def opened(path: Path, trusted: bool = False) -> int | None:
    """Opens a regular file that only this user or root can have written; returns None if there is none.

    Args:
        trusted: see `facts`.

    Raises:
        BuildError: another user could have written it, or it is a link or no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        if path.is_symlink():
            raise BuildError(f"{path} is a symbolic link, and nothing is loaded through one: remove it") from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BuildError(f"{path} is not a regular file: remove it")
        if not trusted:
            _check(path, status)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor

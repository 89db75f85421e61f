"""The C++ kernels of this package: built for this machine when first needed, stored on disk, called through ctypes.

A library is loaded from the folder that COPPICE_KERNELS names, otherwise from `kernels/prebuilt` in an installed
package, otherwise from the user's cache folder, where it is built if it is missing. See `docs/build-kernels.md`.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kernels import files, operators, processor
from kernels.files import BuildError
from kernels.processor import NATIVE, TARGETS, Target

__all__ = [
    "FLAGS",
    "KINDS",
    "BuildError",
    "address",
    "built_ahead",
    "compiler",
    "function",
    "library",
    "off",
    "why_not",
]

SOURCES = sorted(Path(__file__).parent.glob("*/*.cpp"))
HEADERS = sorted(Path(__file__).parent.rglob("*.h"))
# Parsed once for all: with what it includes, half the time of some sources.
SHARED = Path(__file__).with_name("vectors.h")
# The sources that take the longest to compile, by time.
LONGEST = "linear/tables.cpp", "linear/groups.cpp", "tree_attention/native.cpp", "linear/native.cpp"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-fPIC",
    "-Werror=missing-declarations",
)
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # the element types of C++, see `with_type`
WRONG = re.compile("error|cannot find")  # in the line that says why a compiler or a linker failed
VARIABLE = "COPPICE_KERNELS"
PREBUILT = Path(__file__).parent / "prebuilt"
UNFINISHED = "building-"  # begins the names of the folders of builds
ROOM = 96 << 20  # bytes of the disk that a build needs: nearly all for the header that is parsed once
LEFT_SECONDS = 3600  # a folder that has not changed for so long is of a build that a signal ended
FORMAT = 1  # of the files that a library consists of
OPERATORS = operators.parse(Path(__file__).with_name("operators.h").read_text("utf-8"))


class LibraryFile(NamedTuple):
    """A library on disk, or the one that will be built."""

    folder: Path
    name: str  # without .so
    target: Target
    facts: dict[str, Any] | None  # None: it has to be built
    trusted: bool = False  # see `files.facts`

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.so"


def compiler() -> str | None:
    """Returns the C++ compiler: $CXX, or the first of the usual names that exists; None if there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)


def cache_folder() -> Path:
    """Returns the folder in which compiled code is kept from run to run."""
    base = os.environ.get("XDG_CACHE_HOME", "")  # which means nothing if it is relative, says its specification
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "coppice"


def off() -> bool:
    """Whether the user wants PyTorch only."""
    return os.environ.get(VARIABLE) == "off"


def library() -> ctypes.CDLL:
    """Returns the kernels, built first if this machine has none of these sources yet.

    Their threads are those of torch's own OpenMP runtime, which is loaded already.

    Raises:
        BuildError: they are switched off, there is no compiler or it fails, the cache cannot be written to, or what is
            there cannot be trusted or does not run here.
    """
    loaded = _load()
    if isinstance(loaded, BuildError):
        raise loaded
    return loaded[0]


@lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL, LibraryFile] | BuildError:
    try:
        chosen = find()
        try:
            loaded = _open(chosen)
        except BuildError as error:
            if not chosen.trusted:
                raise
            files.report(f"{error}; kernels are built instead")
            chosen = _kept()
            loaded = _open(chosen)
        return loaded if loaded is not None else _build_once(chosen), chosen
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        return BuildError(files.why_unusable(error))
    except BuildError as error:
        return error


def find() -> LibraryFile:
    """Returns the library to load; nothing is built or loaded.

    Raises:
        BuildError: see `library`.
        OSError, RuntimeError: the cache folder cannot be made or named.
    """
    if off():
        raise BuildError(f"{VARIABLE}=off")
    if named := os.environ.get(VARIABLE):
        folder = files.private(Path(named))
        chosen, refused = _best(folder)
        if chosen is None:
            raise BuildError(
                f"{VARIABLE}={named} has no kernels for this machine: {'; '.join(refused) or 'it has none at all'}; "
                f"build some: python -m kernels.build --output '{named}'"
            )
        return chosen
    if PREBUILT.is_dir():
        chosen, _ = _best(PREBUILT, trusted=True)
        if chosen is not None:
            return chosen
    return _kept()


def _kept() -> LibraryFile:
    """The library that this machine builds for itself, in the user's cache folder."""
    folder = files.private(cache_folder() / "kernels", make=True)
    name = hashlib.sha256(repr((sources(), NATIVE.flags, processor.identity())).encode()).hexdigest()[:32]
    return LibraryFile(folder, name, NATIVE, files.facts(folder, name))


def _best(folder: Path, *, trusted: bool = False) -> tuple[LibraryFile | None, list[str]]:
    """The best library of a folder of `kernels.build` that runs here, and why others do not."""
    refused = []
    for target in TARGETS.values():
        facts = files.facts(folder, target.name, trusted=trusted)
        if facts is None:
            continue
        if reason := _why_not(target, facts):
            refused.append(f"{target.name}: {reason}")
        else:
            return LibraryFile(folder, target.name, target, facts, trusted), refused
    return None, refused


def _why_not(target: Target, facts: dict[str, Any]) -> str | None:
    """Why this machine cannot load a library that was built ahead, or None."""
    if facts.get("sources") != sources():
        return "it was built from other sources, those of another version: build it again"
    if (facts.get("system"), facts.get("machine")) != (sys.platform, processor.machine()):
        found = f"{facts.get('system')} on {facts.get('machine')}"
        return f"it was built for {found}, and this is {sys.platform} on {processor.machine()}"
    if target is NATIVE and facts.get("processor") != list(processor.identity()):
        return "it was built for exactly the processor of another machine"
    return target.why_not()


@lru_cache(maxsize=4)
def _sources(flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((FORMAT, flags, OPERATORS.table())).encode())
    for source in (*HEADERS, *SOURCES):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def sources() -> str:
    """Returns the digest of the sources and of the compiler's flags, without the target."""
    return _sources(FLAGS)


def _open(chosen: LibraryFile) -> ctypes.CDLL | None:
    """Loads a library; None if it has to be built, or built again.

    Raises:
        BuildError: it was built ahead and is damaged, or it cannot be trusted.
    """
    descriptor = files.verified(chosen.folder, chosen.name, chosen.facts, trusted=chosen.trusted)
    kept = chosen.target is NATIVE and chosen.name != NATIVE.name
    if descriptor is None:
        if kept:
            return None
        raise BuildError(f"{chosen.path} is not what was built: its size or digest is not that of its .json file")
    try:
        return _dlopen(descriptor, chosen.path)
    except BuildError:
        if kept:  # from a machine with a newer C library, say
            return None
        raise


def _dlopen(descriptor: int, path: Path) -> ctypes.CDLL:
    """Loads an open file, and checks that Python can call it.

    The descriptor stays open once it is loaded: the loader tells libraries apart by name, and its number is the name.
    """
    name = f"/proc/self/fd/{descriptor}"
    try:
        found = ctypes.CDLL(name if os.path.exists(name) else str(path))
    except OSError as error:
        os.close(descriptor)
        raise BuildError(f"{path} cannot be loaded: {str(error).removeprefix(f'{name}: ')}") from error
    if reason := OPERATORS.differences(found):
        raise BuildError(f"{path} {reason}")
    return found


def _build_once(chosen: LibraryFile) -> ctypes.CDLL:
    """Builds what the cache lacks, unless another process did meanwhile, and loads it."""
    with files.locked(chosen.folder, waiting="waiting for another process that builds the C++ kernels ..."):
        chosen = chosen._replace(facts=files.facts(chosen.folder, chosen.name))
        loaded = _open(chosen)
        if loaded is not None:
            return loaded
        build(chosen.folder, chosen.name, NATIVE, announce="for this machine")
        chosen = chosen._replace(facts=files.facts(chosen.folder, chosen.name))
        loaded = _open(chosen)
    if loaded is None:
        raise BuildError(f"{chosen.path} does not hold what was written to it: is the disk full or failing?")
    return loaded


def build(folder: Path, name: str, target: Target, *, announce: str) -> None:
    """Compiles the kernels and keeps them in a folder, with the facts by which they are verified and chosen.

    Args:
        announce: text on stderr after "building the C++ kernels" and "built the C++ kernels".

    Raises:
        BuildError: no compiler, one that fails or builds for other machines, no room on the disk, or a library that
            does not load here although the target runs here.
        OSError: the folder cannot be written to.
    """
    command = compiler()
    if command is None:
        raise BuildError("no C++ compiler was found")
    triple = _run([command, "-dumpmachine"]).strip()
    machine = processor.machine(triple.partition("-")[0])
    if target.machine and machine != target.machine:
        raise BuildError(
            f"{target.name}: {command} builds for {triple}; name a compiler for {target.machine} by CXX, "
            f"for example CXX={target.machine}-linux-gnu-g++"
        )
    disk = shutil.disk_usage(folder)  # all zero where the file system does not tell
    if disk.total and disk.free < ROOM:  # before minutes of work, which every start would repeat
        room = f"{disk.free >> 20} MB to spare"
        raise BuildError(f"{folder}: a build needs {ROOM >> 20} MB of the disk, which has {room}")
    what, start = f"the C++ kernels {announce}", time.monotonic()
    files.report(f"building {what}, once (two minutes of CPU time) ...")
    for left in folder.glob(f"{UNFINISHED}*"):
        with suppress(OSError):  # another process removes it too
            if time.time() - left.lstat().st_mtime > LEFT_SECONDS:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder) as work:
        table = Path(work) / "structures.cpp"
        table.write_text(OPERATORS.table(), "utf-8")
        options = [command, *FLAGS, *target.flags]
        objects = _compiled(options, (*SOURCES, table), Path(work))
        built = Path(work) / f"{name}.so"
        _run([*options, "-shared", "-o", built, *objects])
        if machine == processor.machine() and target.why_not() is None:
            _dlopen(os.open(built, os.O_RDONLY), built)  # nothing is kept that does not load
        facts: dict[str, Any] = {
            "target": target.name,
            "system": "darwin" if "darwin" in triple else "linux" if "linux" in triple else sys.platform,
            "machine": machine,
            "sources": sources(),
            "compiler": f"{command} ({triple})",
        }
        if target.name == NATIVE.name:
            facts["processor"] = list(processor.identity())
        files.save(folder, name, built, facts)
    files.report(f"built {what} in {time.monotonic() - start:.0f} s")


def _compiled(options: Sequence[str], sources: Sequence[Path], work: Path) -> list[Path]:
    """Compiles sources side by side, the longest first; returns the objects, in the order of the sources."""
    place = {name: i for i, name in enumerate(LONGEST)}
    order = sorted(sources, key=lambda s: (place.get("/".join(s.parts[-2:]), len(place)), -s.stat().st_size))
    # The first one, on whose end most machines wait, does not wait for the header.
    users = {source for source in order[1:] if f'{SHARED.name}"'.encode() in source.read_bytes()}
    include = work / SHARED.name
    include.write_text(f'#include "{SHARED}"\n', "utf-8")
    with ThreadPoolExecutor(os.cpu_count()) as pool:

        def compiled(source: Path) -> Path:
            made = work / f"{sources.index(source)}.o"
            step = [*options, "-c", source, "-o", made]
            if source in users and header.result():
                try:
                    _run([*step, "-include", include])
                    return made
                except BuildError:  # a compiler that cannot read what it wrote, or an error of the source, found again
                    pass
            _run(step)
            return made

        made = {order[0]: pool.submit(compiled, order[0])}
        header = pool.submit(_precompiled, options, include if users else None)
        made |= {source: pool.submit(compiled, source) for source in order[1:]}
        done, rest = wait(made.values(), return_when=FIRST_EXCEPTION)
        for future in rest:
            future.cancel()
        for future in done:
            future.result()  # one that failed raises: the others need not be compiled
        return [made[source].result() for source in sources]


def _precompiled(options: Sequence[str], include: Path | None) -> bool:
    """Parses a header once for all that begin with it; False: there is none, or this compiler does not."""
    if include is None:
        return False
    try:
        _run([*options, "-x", "c++-header", include, "-o", f"{include}.gch"])
    except BuildError:
        return False
    return True


def _run(command: Sequence[str | Path]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise BuildError(f"{command[0]} failed: {next((line for line in lines if WRONG.search(line)), lines[0])}")
    return done.stdout


def address(x: torch.Tensor | None) -> int | None:
    """Returns the address of a tensor's elements, as C++ takes it; None, a null pointer, for none."""
    return None if x is None else x.data_ptr()


def why_not() -> str | None:
    """Returns why there are no C++ kernels on this machine, or None if there are."""
    loaded = _load()
    return str(loaded) if isinstance(loaded, BuildError) else None


def built_ahead() -> str:
    """Returns the target of the loaded kernels, such as "x86-64-v3", if they were built ahead of their use, else ""."""
    loaded = _load()
    if isinstance(loaded, BuildError) or loaded[1].name != loaded[1].target.name:
        return ""
    return f"{loaded[1].target.name}, prebuilt" if loaded[1].trusted else loaded[1].target.name


@lru_cache(maxsize=64)
def function(name: str, *, brief: bool = False) -> Callable[..., Any]:
    """Returns a kernel.

    Args:
        name: of a function in operators.h, without "coppice_".
        brief: the call keeps the interpreter lock; for calls of microseconds, or with a state that threads share.

    Raises:
        BuildError: there are no kernels.
    """
    loaded = library()
    found = getattr(ctypes.PyDLL(loaded._name, handle=loaded._handle) if brief else loaded, f"coppice_{name}")
    found.restype, found.argtypes = OPERATORS.functions[name]
    return found

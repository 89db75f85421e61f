"""The C++ kernels of this package: built for this machine when first wanted, kept on disk, called through ctypes."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch

SOURCES = sorted(Path(__file__).parent.glob("*/*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fPIC")
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # what they compute in, see `with_type`


class BuildError(Exception):
    """The kernels cannot be built here. The message says why."""


def compiler() -> str | None:
    """The C++ compiler: $CXX, or the first of the usual names that there is."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)


def cache_folder() -> Path:
    """Where compiled code is kept from run to run."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coppice"


def library() -> ctypes.CDLL:
    """The kernels, built first if no earlier run of this machine, compiler and source did.

    Threads are those of torch's own OpenMP runtime, which is loaded already.

    Raises:
        BuildError: no compiler, one that fails, or no place to write to.
    """
    loaded = _load()
    if isinstance(loaded, BuildError):
        raise loaded
    return loaded


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL | BuildError:
    try:
        return ctypes.CDLL(str(_build()))
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        return BuildError(str(error))
    except BuildError as error:
        return error


def _build() -> Path:
    command = compiler()
    if command is None:
        raise BuildError("no C++ compiler was found")
    # Names the compiler and every instruction set that -march=native turned on.
    macros = _run([command, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])
    digest = hashlib.sha256(repr((FLAGS, macros)).encode())
    for source in (*HEADERS, *SOURCES):
        digest.update(source.read_bytes())
    path = cache_folder() / "kernels" / f"{digest.hexdigest()[:32]}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [f"{folder}/{source.stem}.o" for source in SOURCES]
        steps = [[command, *FLAGS, "-c", source, "-o", made] for source, made in zip(SOURCES, objects, strict=True)]
        with ThreadPoolExecutor() as pool:
            list(pool.map(_run, steps))
        built = Path(folder) / path.name
        _run([command, *FLAGS, "-shared", "-o", built, *objects])
        built.replace(path)  # at once, as other processes may do the same
    return path


def _run(command: Sequence[str | Path]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise BuildError(f"{command[0]} failed: {next((line for line in said if 'error' in line), said[0])}")
    return done.stdout


def why_not() -> str | None:
    """Why there are no C++ kernels on this machine; None: there are."""
    loaded = _load()
    return str(loaded) if isinstance(loaded, BuildError) else None


def watched() -> bool:
    """Whether a compiler or a profiler looks on: then calls go by torch's dispatcher, where both see operators."""
    return torch.compiler.is_compiling() or torch.autograd.profiler._is_profiler_enabled


@lru_cache(maxsize=64)
def function(name: str, signature: str, *, brief: bool = False) -> Callable[..., None]:
    """A kernel by its name.

    Args:
        signature: a letter per argument: p an address (`Tensor.data_ptr()`), i an int64, f a float, d a double.
        brief: other Python threads wait meanwhile; for what takes microseconds, or has a state that they may share.
    """
    found = getattr(ctypes.PyDLL(library()._name) if brief else library(), name)
    kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}
    found.argtypes, found.restype = [kinds[letter] for letter in signature], None
    return found

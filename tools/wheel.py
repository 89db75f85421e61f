"""Makes a wheel with the C++ kernels inside: `python -m tools.wheel --output DIR`, in a checkout.

An installed wheel needs no compiler: it holds kernels for x86-64 from AVX2 to AMX, or for ARM, and the best that the
processor runs are loaded. `--machine aarch64` makes the wheel for the other kind of processor, with a cross
compiler: CXX, else aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu). The name of the wheel says which C library
its kernels need; pip takes the wheel without kernels (`pip wheel .`) elsewhere.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import kernels.processor as processor
from engine.app.cli import ended, run
from engine.errors import UsageError
from kernels.processor import NATIVE, TARGETS
from models.later import later

with later():
    import kernels.cpp as cpp  # from kernels: pyright takes that for tools.kernels

ROOT = Path(__file__).parent.parent
PACKAGES = "engine", "kernels", "models", "search", "tools"
FILES = "pyproject.toml", "coppice.py", "README.md", "LICENSE"
MACHINES = tuple(dict.fromkeys(target.machine for target in TARGETS.values() if target.machine))
# The oldest C library, 2.N, of systems that have version 3.4.M of the C++ library, as manylinux pairs them.
CXX_SYSTEMS = {19: 17, 22: 24, 24: 27, 28: 31, 29: 34, 30: 35}


def make(output: str | Path, machine: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """Build kernels, and a wheel of this checkout with them.

    Args:
        output: folder of the wheel; made if it does not exist.
        machine: kind of processor, one of `MACHINES`.
        names: targets of that machine; all of them if empty.

    Returns:
        {"path", "targets", "bytes"}.

    Raises:
        UsageError: this is no checkout, a target is of another machine, the folder cannot be made, a compiler is absent
            or fails, or pip does.
    """
    names = names or [name for name, target in TARGETS.items() if target.machine == machine]
    for name in names:
        if TARGETS[name].machine != machine:
            raise UsageError(f"{name}: this target is not for {machine}", remedy="name --machine as well")
    if not (ROOT / "pyproject.toml").is_file():
        raise UsageError("a wheel is made of a checkout, and this is an installed package", where=str(ROOT))
    output = Path(output)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the output folder cannot be made: {error.strerror}", where=str(output)) from None
    with tempfile.TemporaryDirectory(prefix="coppice-wheel-") as work:
        tree = Path(work, "tree")
        left_out = shutil.ignore_patterns("__pycache__", cpp.PREBUILT.name)
        for package in PACKAGES:
            shutil.copytree(ROOT / package, tree / package, ignore=left_out)
        for file in FILES:
            shutil.copy(ROOT / file, tree)
        kernels = tree / "kernels" / cpp.PREBUILT.name
        kernels.mkdir()
        build(kernels, names)
        wheel = pip(tree, Path(work), tag([kernels / f"{name}.so" for name in names], machine))
        path = Path(shutil.move(wheel, output / wheel.name))
    return {"path": str(path), "targets": list(names), "bytes": path.stat().st_size}


def build(folder: Path, names: Sequence[str]) -> None:
    """Build targets into a folder. Raises UsageError."""
    machine = TARGETS[names[0]].machine
    cross = machine != processor.machine() and "CXX" not in os.environ
    if cross:
        os.environ["CXX"] = f"{machine}-linux-gnu-g++"
    try:
        if cpp.compiler() is None:
            raise UsageError("no C++ compiler was found", remedy="install one (Debian: g++), or name one by CXX")
        for i, name in enumerate(names, 1):
            cpp.build(folder, name, TARGETS[name], announce=f"for {name} ({i} of {len(names)})")
    except cpp.BuildError as error:
        raise UsageError(f"the kernels were not built: {error}") from error
    finally:
        if cross:
            del os.environ["CXX"]


def tag(libraries: Sequence[Path], machine: str) -> str:
    """Returns the platform of a wheel, by the versions of the C and C++ libraries whose symbols its libraries need."""
    content = b"".join(library.read_bytes() for library in libraries)

    def newest(name: bytes) -> int:
        return max((int(version) for version in re.findall(rb"\0" + name + rb"(\d+)(?=[.\0])", content)), default=0)

    cxx = newest(rb"GLIBCXX_3\.4\.")
    systems = [system for version, system in CXX_SYSTEMS.items() if version >= cxx]
    if not systems:
        raise UsageError(
            f"the kernels need version 3.4.{cxx} of libstdc++, which few systems have",
            remedy="build with an older compiler, named by CXX",
        )
    return f"manylinux_2_{max(17, newest(rb'GLIBC_2' + re.escape(b'.')), systems[0])}_{machine}"


def pip(tree: Path, work: Path, platform: str) -> Path:
    """Returns the wheel that pip makes of a tree, in `work`. Raises UsageError."""
    options = ["--no-deps", "--wheel-dir", work, f"--config-settings=--build-option=--plat-name={platform}"]
    with suppress(PackageNotFoundError):
        if int(version("setuptools").partition(".")[0]) >= 77:  # makes wheels without fetching anything
            options.append("--no-build-isolation")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", *options, tree]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    made = list(work.glob("*.whl"))
    if done.returncode or len(made) != 1:
        said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise UsageError(f"pip made no wheel: {said}", remedy="python -m pip install --upgrade pip setuptools")
    return made[0]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.wheel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", metavar="DIR", required=True, help="folder of the wheel; made if it does not exist")
    parser.add_argument(
        "--machine", choices=MACHINES, default=processor.machine(), help="kind of processor (default: this one)"
    )
    known = [name for name in TARGETS if name != NATIVE.name]
    several = f"{', '.join(known)} (repeatable; default: all of the machine)"
    parser.add_argument("--target", action="append", choices=known, metavar="NAME", help=several)
    parser.add_argument("-v", "--verbose", action="store_true", help="traceback of errors")
    args = parser.parse_args(argv)

    def work() -> int:
        began = time.perf_counter()
        report = make(args.output, args.machine, args.target or ())
        print(json.dumps({**report, "seconds": round(time.perf_counter() - began, 1)}))
        return 0

    return run(work, args.verbose)


if __name__ == "__main__":
    sys.exit(ended(main))

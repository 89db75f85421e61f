"""Builds the C++ kernels ahead of time, for this machine or for others.

    python -m kernels.build --output DIR                          for the processor of this machine
    python -m kernels.build --target x86-64-v3 --output DIR       for all processors with AVX2
    python -m kernels.build --list                                what this machine runs and would load
    python -m kernels.build --flags "-Og -g" --output DIR         with more flags, for debuggers and sanitizers

With the environment variable COPPICE_KERNELS=DIR, Coppice loads the best target in DIR that the processor can run,
without a compiler; COPPICE_KERNELS=off makes it run in PyTorch only. Wheels include the contents of `kernels/prebuilt`.
CXX names another compiler, for example a cross compiler for --target aarch64.
"""

import argparse
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from kernels import cpp, files, processor
from kernels.ending import ended
from kernels.processor import TARGETS


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for a build that failed, 2 for arguments that make no sense."""
    prog = sys.argv[0] if sys.argv[0].startswith("coppice ") else "python -m kernels.build"
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join(TARGETS)
    parser.add_argument(
        "--target", action="append", choices=TARGETS, metavar="NAME", help=f"{known} (repeatable; default: native)"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for the kernels; made if it does not exist")
    parser.add_argument("--flags", default="", metavar="TEXT", help="flags of the compiler, after its own (none)")
    parser.add_argument("--list", action="store_true", help="print what there is, and build nothing")
    options = parser.parse_args(arguments)
    if options.list:
        if options.target or options.output or options.flags:
            parser.error("--list goes with no other argument")
        print(listing())
        return 0
    if options.output is None:
        parser.error("--output DIR says where the kernels go")
    try:
        more = shlex.split(options.flags)
    except ValueError as error:
        parser.error(f"--flags: {error}")
    try:
        folder = files.private(options.output, make=True, mode=0o755)
        for name in options.target or ["native"]:
            target = replace(TARGETS[name], flags=(*TARGETS[name].flags, *more))
            with files.locked(folder):
                cpp.build(folder, name, target, announce=f"for {name}")
            print(folder / f"{name}.so")
    except (OSError, files.BuildError) as error:
        print(f"the kernels were not built: {error}", file=sys.stderr)
        return 1
    return 0


def listing() -> str:
    """Returns a page: this machine, the targets and whether they run here, what would be loaded from where."""
    needed = frozenset().union(*(target.needs for target in TARGETS.values()))
    lines = [
        f"processor        {processor.machine()}, {sys.platform}; of what the targets need it has "
        + (" ".join(sorted(processor.features() & needed)) or "nothing"),
        f"compiler         {cpp.compiler() or 'none was found'}",
        f"COPPICE_KERNELS  {os.environ.get(cpp.VARIABLE) or 'is not set'}",
        "targets",
    ]
    for target in TARGETS.values():
        reason = target.why_not()
        lines.append(f"  {target.name:<17}{target.meaning}: {'runs here' if reason is None else f'no, {reason}'}")
    try:
        chosen = cpp.find()
    except (OSError, RuntimeError, files.BuildError) as error:
        lines.append(f"kernels          none are loaded: {error}")
    else:
        state = "loaded from" if chosen.facts else "built when first needed, into"
        lines.append(f"kernels          {chosen.target.name}, {state} {chosen.path}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(ended(main))

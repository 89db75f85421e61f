"""First import of the package: while a command line's modules are loaded, Ctrl-C ends the process without a traceback,
and torch leaves out what only its compiler needs.

`engine.app.cli.run` restores Ctrl-C, `engine.load.compiling` imports the rest. Nothing changes in programs
that import the engine.
"""

import contextlib
import runpy
import signal
import sys
from pathlib import Path
from types import ModuleType

starting = sys.argv[:1] == ["-m"]  # what Python puts there until it has found the module to run
if starting and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

METAS = "torch._meta_registrations"  # shapes of results without data, for the compiler: 21 MB
COMMANDS = {"engine.chat", "engine.batch", "engine.serve"}
command = starting and not COMMANDS.isdisjoint(sys.orig_argv)
# Programs that import the engine may have a module `search` of their own.
own = runpy.run_path(str(Path(__file__).parents[2] / "models" / "own.py"), run_name="models.own")
own["check"]("kernels", "models", *(["search"] if command else []))

lean = command and "torch" not in sys.modules
if lean:
    sys.modules[METAS] = ModuleType(METAS)

import models  # noqa: E402, F401

if lean:
    del sys.modules[METAS]  # whoever imports it later gets the real one
    with contextlib.suppress(ImportError, AttributeError):  # not in every version of torch
        # A module that was left out with it makes torch.Generator() possible, by this line.
        import torch
        from torch._opaque_base import OpaqueBaseMeta

        torch._C._set_generator_metaclass(OpaqueBaseMeta)  # pyright: ignore[reportAttributeAccessIssue]


def started() -> None:
    """Make Ctrl-C a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)

"""First import of the package: while a command line's modules are loaded, Ctrl-C ends the process without a traceback,
and torch leaves out what only its compiler needs.

`engine.app.cli.run` restores Ctrl-C, `engine.compiling` imports the rest. Nothing changes in programs
that import the engine.
"""

import contextlib
import signal
import sys
from types import ModuleType

starting = sys.argv[:1] == ["-m"]  # what Python puts there until it has found the module to run
if starting and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

METAS = "torch._meta_registrations"  # shapes of results without data, for the compiler: 21 MB
COMMANDS = {"engine.chat", "engine.batch", "engine.serve"}
lean = starting and not COMMANDS.isdisjoint(sys.orig_argv) and "torch" not in sys.modules
if lean:
    sys.modules[METAS] = ModuleType(METAS)

try:
    import models.own  # noqa: F401
except ImportError as error:
    status = getattr(error, "exit_code", None)
    if not starting or status is None:
        raise
    print(f"error: {error}", file=sys.stderr)
    sys.exit(status)
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

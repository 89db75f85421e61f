"""First import of the package: while a command line's modules are loaded, Ctrl-C ends the process without a traceback.

`engine.app.cli.run` restores Ctrl-C. In programs that import the engine nothing changes.
"""

import signal
import sys

starting = sys.argv[:1] == ["-m"]  # what Python puts there until it has found the module to run
if starting and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


try:
    import models.own  # noqa: F401
except ImportError as error:
    status = getattr(error, "exit_code", None)
    if not starting or status is None:
        raise
    print(f"error: {error}", file=sys.stderr)
    sys.exit(status)


def started() -> None:
    """Make Ctrl-C a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)

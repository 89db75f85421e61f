"""Starts and runs a command line: its errors become messages and exit codes."""

import argparse
import contextlib
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module

from engine.errors import CoppiceError, UsageError
from engine.load.startup import import_torch, restore_interrupts
from kernels.ending import CLOSED_PIPE, FULL, discard_stdout
from models.folders import check_there
from models.later import import_now

INTERRUPTED = 130


@contextlib.contextmanager
def written_after(write: Callable[[], None]) -> Iterator[None]:
    """Write a file at the end of the block, however that ends.

    The error that ended the block is the one to report; if the file cannot be written either, that is a warning.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        yield
    except BaseException:
        try:
            write()
        except UsageError as error:
            warnings.warn(str(error), stacklevel=2)
        raise
    write()


def start(args: argparse.Namespace, module: str, models: Iterable[str | None]) -> int:
    """Run `command` of a module. Returns the exit code.

    Work that needs no torch comes first, so that help, wrong flags and wrong paths are quick.

    Args:
        args: the parsed flags.
        models: the models that the flags name; that they exist is checked before torch is imported.
    """

    def before() -> None:
        for model in models:
            if model is not None:
                check_there(model)
        import_torch()
        import_module(module)

    return run(lambda: import_module(module).command(args), args.verbose, args.quiet, before)


def run(
    main: Callable[[], int], verbose: bool = False, quiet: bool = False, before: Callable[[], None] | None = None
) -> int:
    """Run a command line and return its exit code; errors go to stderr, with a traceback if `verbose`, and warnings,
    unless `quiet`.

    A KeyboardInterrupt of `main` may have a message: how to continue. During `before`, which checks and imports what
    `main` needs, Ctrl-C ends the process.
    """
    import_now()
    shown = warnings.showwarning
    warnings.showwarning = (lambda *_, **__: None) if quiet else _show_warning
    try:
        return _run(main, verbose, before)
    finally:
        warnings.showwarning = shown


def _show_warning(message: Warning | str, *place: object, **_: object) -> None:
    """A warning as one line on stderr, without the line of code that it comes from; see `warnings.showwarning`."""
    if sys.stderr is not None:
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""  # a status may stand there
        print(f"{clear}warning: {message}", file=sys.stderr, flush=True)


def _run(main: Callable[[], int], verbose: bool, before: Callable[[], None] | None) -> int:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # whatever the locale
    try:
        if before is not None:
            before()
        restore_interrupts()
        code = main()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        discard_stdout()
        return CLOSED_PIPE
    except KeyboardInterrupt as stop:
        return _fail(INTERRUPTED, f"interrupted: {stop}" if str(stop) else "interrupted", verbose)
    except CoppiceError as error:
        return _fail(error.exit_code, f"error: {error}", verbose)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            discard_stdout()
            return _fail(2, f"error: the output cannot be written: {error.strerror}", verbose)
        from engine.load.pools import is_out_of_memory, out_of_memory  # here, because it needs torch

        if is_out_of_memory(error):
            memory = out_of_memory()
            return _fail(memory.exit_code, f"error: {memory}", verbose)
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        remedy = "" if verbose else "\n-v shows where"
        return _fail(1, f"error: {what}\nthis is a bug of ours, please report it{remedy}", verbose)


def _fail(code: int, message: str, verbose: bool) -> int:
    try:
        if verbose:
            traceback.print_exc()
        print(message, file=sys.stderr, flush=True)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        discard_stdout()  # the streams are closed: the exit code alone reports the error
    return code

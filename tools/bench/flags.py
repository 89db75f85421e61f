"""Flags that several benchmarks have."""

import argparse
from typing import Any

from engine.app.cli import add_load_flag
from tools.bench.report import add_save_flag


def add_numbers(parser: argparse._ActionsContainer, **flags: Any) -> None:
    """Add a flag for each keyword: NAME=default or NAME=(default, help).

    The default's type decides: int or float; a flag with a list takes several numbers.
    """
    for name, flag in flags.items():
        default, text = flag if isinstance(flag, tuple) else (flag, "")
        one = default[0] if isinstance(default, list) else default
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=float if isinstance(one, float) else int,
            nargs="+" if isinstance(default, list) else None,
            default=default,
            metavar="N",
            help=text if default is None else f"{text} (%(default)s)".lstrip(),
        )


def add_run_flags(parser: argparse.ArgumentParser, page: str, dtype: str | None = "auto", run: Any = None) -> None:
    """Add --dtype (unless None), --threads, and --save for a page of docs/results; the command calls `run`."""
    if dtype is not None:
        add_load_flag(parser, "dtype", default=dtype)
    add_load_flag(parser, "threads")
    add_save_flag(parser, page)
    parser.set_defaults(run=run)

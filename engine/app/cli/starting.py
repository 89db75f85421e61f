"""Starts a command: work that needs no torch comes first, so that help, wrong flags and wrong paths are quick."""

import argparse
from collections.abc import Iterable
from importlib import import_module

from engine.app.cli.exits import run
from engine.load.startup import import_torch
from models.folders import check_there


def start(args: argparse.Namespace, module: str, models: Iterable[str | None]) -> int:
    """Run `command` of a module. Returns the exit code.

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

"""The parser of every command: no abbreviations, short errors, and help of two lengths."""

import argparse
import difflib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from engine.app.cli.searches import SearchFlags
from engine.errors import CoppiceError
from engine.version import __version__
from kernels.ending import CLOSED_PIPE, discard_stdout

FORMATTER = partial(argparse.RawDescriptionHelpFormatter, max_help_position=28)
MORE = "--help all shows every flag"


def called(prog: str) -> str:
    """The name of a command as its user wrote it: `coppice chat` instead of `python -m engine.chat`."""
    return next((word for word in sys.argv[:1] if word.startswith("coppice ")), prog)


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, with short errors that suggest a flag, and with help of two lengths.

    Args:
        common: the flags that `--help` shows, separated by spaces; "" shows all. `--help all` always shows all, and
            `--search NAME --help` also shows those of the search.
    """

    def __init__(self, prog: str, description: str, epilog: str | None = None, common: str = ""):
        super().__init__(
            prog=called(prog),
            usage="%(prog)s [FLAGS]" if common else None,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            add_help=False,
            formatter_class=FORMATTER,  # type: ignore[arg-type]
        )
        self.common, self.whole = common.split(), not common
        self.searches: SearchFlags | None = None
        self._groups: dict[str, argparse._ArgumentGroup] = {}
        if common:
            text = "show common flags and exit; all: every flag"
            options = {"nargs": "?", "choices": ["all"], "metavar": "all", "default": argparse.SUPPRESS}
            self.add_argument("-h", "--help", action=_Help, help=text, **options)
        else:
            self.add_argument("-h", "--help", action="help", help="show this and exit")

    def group(self, title: str) -> argparse._ArgumentGroup:
        """The group of flags under a title."""
        if title not in self._groups:
            self._groups[title] = self.add_argument_group(title)
        return self._groups[title]

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Load the searches that the arguments name, then parse the arguments; see `argparse`."""
        given = [*(sys.argv[1:] if args is None else args)]
        if self.searches is not None:
            try:
                self.searches.load(given)
            except CoppiceError as error:
                if not {"-v", "--verbose"}.isdisjoint(given):
                    traceback.print_exc()
                self.exit(error.exit_code, f"error: {error}\n")
        found, rest = super().parse_known_args(given, namespace)
        if self.searches is not None:
            self.searches.choose(found)
        return found, rest

    def format_help(self) -> str:
        """The help for the common flags and those of the named searches, or for all flags."""
        shown = {*self.common}
        if self.searches is not None:
            self.searches.add_others()
            shown |= self.searches.flags_of_named()
        if self.whole:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            actions = [each for each in group._group_actions if not shown.isdisjoint(each.option_strings)]
            if actions:
                formatter.start_section(group.title)
                if group.title and group.title.startswith("search "):
                    formatter.add_text(group.description)
                formatter.add_arguments(actions)
                formatter.end_section()
        searches = "--search NAME --help adds the flags of a search; " * (self.searches is not None)
        formatter.add_text(f"{searches}{MORE}")
        return formatter.format_help()

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write a message; argparse would ignore that stdout takes none."""
        if file is not sys.stdout:
            return super()._print_message(message, file)
        try:
            print(message, end="", flush=True)
        except OSError as error:
            discard_stdout()
            if isinstance(error, BrokenPipeError):
                self.exit(CLOSED_PIPE)
            self.exit(2, f"error: the output cannot be written: {error.strerror}\n")

    def error(self, message: str) -> NoReturn:
        """Exit with a message; for an unknown flag it suggests the nearest one."""
        for option in re.findall(r"--[\w-]+", message) if message.startswith("unrecognized") else []:
            if near := difflib.get_close_matches(option, self._option_string_actions, 1):
                message += f" (did you mean {near[0]}?)"
        word = message.removeprefix("unrecognized arguments: ")
        path = word.removeprefix("-m ")  # llama.cpp's flag
        if word != message and "--model" in self._option_string_actions and os.path.exists(path):
            model = os.path.isdir(path) or path.endswith(".gguf") or "--input" not in self._option_string_actions
            message += f" (did you mean --{'model' if model else 'input'} {path}?)"
        self.exit(2, f"error: {message}\n{self.prog} --help{' all' * bool(self.common)} lists the options\n")


class _Help(argparse.Action):
    """Prints the help of common flags, or with `all` of every flag, and exits."""

    def __call__(self, parser, namespace, values, option_string=None):
        assert isinstance(parser, Parser)
        parser.whole = values == "all"
        parser.print_help()
        parser.exit()


def add_search_flags(parser: Parser, default: str = "greedy") -> None:
    """Add --search and every parameter of every search.

    Args:
        default: the search of a command line that names none.
    """
    parser.searches = SearchFlags(parser, default)


def add_verbosity_flags(parser: argparse.ArgumentParser) -> None:
    """Add -q, -v and --version."""
    parser.add_argument("-q", "--quiet", action="store_true", help="nothing on stderr but errors")
    parser.add_argument("-v", "--verbose", action="store_true", help="more on stderr; tracebacks")
    parser.add_argument("--version", action="version", version=f"coppice {__version__}", help="show it and exit")


def add_trace_flag(group: argparse._ArgumentGroup) -> None:
    """Add --trace."""
    text = "write a page of the search; FILE.json: its data"
    group.add_argument("--trace", metavar="FILE", help=text)

"""The loading flags, derived from the fields of `LoadOptions`, and the options made from them."""

import argparse
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

from engine.app.cli.parser import Parser
from engine.app.cli.searches import flag_of, search_params
from engine.app.cli.values import argument
from engine.demo import with_defaults
from engine.load.flags import Flag, options_of
from engine.load.options import LoadOptions
from engine.load.sizes import Workload
from engine.values import written


def add_load_flags(parser: Parser, command: str, **others: Mapping[str, Any]) -> None:
    """Add the flags of `LoadOptions`.

    Args:
        command: name of the command; flags that it does not offer are left out, see `Flag.without`.
        others: for a field that the command offers in another way, the arguments of `add_argument` that differ.
    """
    for option in options_of(LoadOptions):
        if isinstance(option.flag, Flag) and command not in option.flag.without:
            add_load_flag(parser.group(option.flag.group), option.name, **others.get(option.name, {}))


def add_load_flag(group: argparse._ActionsContainer, name: str, **others: Any) -> None:
    """Add the flag of a field of `LoadOptions`; `others` are arguments of `add_argument` that differ."""
    [option] = [option for option in options_of(LoadOptions) if option.name == name]
    flag = option.flag
    assert isinstance(flag, Flag), name
    if flag.constant:
        given = {"action": "store_const", "const": flag.constant, "default": option.default, "help": option.help}
        group.add_argument(flag_of(option.argument), **{**given, **others})
        return
    default = others.get("default", option.default if flag.default is None else flag.default)
    shown = flag.shown if flag.shown and "default" not in others else written(default)
    given = {
        "type": argument(flag.read),
        "choices": flag.choices or None,
        "default": None if default is MISSING else default,
        "metavar": flag.metavar,
        **({"action": "append", "default": []} if flag.many else {}),
        "help": f"{option.help} ({shown})".replace("%", "%%"),
    }
    group.add_argument(flag_of(option.argument), **{**given, **others})


def add_file_flags(parser: Parser) -> None:
    """Add --load-prefix and --draft-store."""
    text = "begin with the prefix that --save-prefix wrote"
    parser.group("machine").add_argument("--load-prefix", metavar="FILE", help=text)
    text = "texts for --drafts suffix: read from FILE at the start, if it is there, and written to it at the end"
    parser.group("machine").add_argument("--draft-store", metavar="FILE", help=text)


def load_options(args: argparse.Namespace) -> LoadOptions:
    """The options that the flags of loading give; options without a flag keep their defaults. Raises UsageError."""
    options = [option for option in options_of(LoadOptions) if hasattr(args, option.argument)]
    given = {option.name: getattr(args, option.argument) for option in options}
    given["folder"], given["draft"], given["reward"] = with_defaults(args.model, args.draft, args.reward)
    if args.memory is not None:
        given["workload"] = _workload(args)
    return LoadOptions(**given)


def _workload(args: argparse.Namespace) -> Workload:
    """The workload that `--memory` must hold: the command's search, if any, and its number of requests at once."""
    parallel = getattr(args, "parallel", 1)
    from engine.rules.grammars import KINDS  # here, because they need torch
    from search.base import make_search

    if not hasattr(args, "search"):
        return Workload(parallel=parallel)
    several = getattr(args, "prompt", None) is None  # requests with parameters of their own
    grammars = several or any(getattr(args, kind, None) is not None for kind in KINDS)
    search = make_search(args.search, search_params(args))
    return Workload(search, 1, getattr(args, "max_new_tokens", 1), parallel, grammars)

"""The flags of searches: --search, the parameters that searches share, and each search's own."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any

from engine.app.cli.described import DescribedSearch, described, find, load_entry_points, own
from engine.app.cli.values import argument
from engine.errors import UsageError


class SearchFlags:
    """The flags of searches on a parser; a parameter that is not given is None, see `search_params`.

    Flags of searches from outside of this project are added when a command line names them.

    Args:
        parser: the parser to which the flags are added.
        default: the search of a command line that names none.

    Attributes:
        named: the searches that the command line names.
    """

    def __init__(self, parser: argparse.ArgumentParser, default: str):
        self.parser, self.named = parser, list[str]()
        group = parser.add_argument_group("search")
        group.add_argument(
            "--search",
            action=_SearchName,
            default=default,
            metavar="NAME",
            help=f"list shows all; module:Class: your own ({default}; with --beams: trie)",
        )
        _add(group, "beams", "live hypotheses", type=int, metavar="N")
        _add(group, "length_penalty", "a score is logprob / length ** X", type=float, metavar="X")
        modes = {"choices": ["false", "true", "never", "best"]}
        ends = "true: end when as many outputs as beams have finished; best, the default of trie in a chat: when no "
        ends += "live one scores higher"
        _add(group, "early_stopping", ends, **modes)
        patience = "end when as many outputs have finished as beams times X, in place of --early-stopping"
        _add(group, "patience", patience, type=float, metavar="X")
        _add(group, "num_return_sequences", "outputs to return", type=int, metavar="N")
        self.added = [*own()]
        for name, search in own().items():
            _add_own(group, name, search)
        _add(group, "temperature", "divides log-probabilities; 0: takes the best token", type=float, metavar="X")
        _add(group, "top_k", "draw from the K likeliest; 0: from all", type=int, metavar="K")
        _add(group, "top_p", "draw from the likeliest tokens that add up to P", type=float, metavar="P")
        _add(group, "min_p", "draw no token below P times the likeliest one", type=float, metavar="P")
        typical = "draw from the tokens of the most usual surprise that add up to P"
        _add(group, "typical_p", typical, type=float, metavar="P")
        _add(group, "epsilon_cutoff", "draw no token below this probability but the likeliest", type=float, metavar="P")
        _add(group, "eta_cutoff", "the same, with a smaller P for rows of high entropy", type=float, metavar="P")
        near = "draw no token more than N standard deviations of all logits below the likeliest; 0: from all"
        _add(group, "top_n_sigma", near, type=float, metavar="N")
        often = "with this probability exclude the tokens likelier than the threshold, but the least likely of them"
        _add(group, "xtc_probability", often, type=float, metavar="P")
        _add(group, "xtc_threshold", "the least probability of a token that XTC may exclude", type=float, metavar="P")
        _add(group, "seed", "same seed, same output", type=int, metavar="N")

    def load(self, words: Sequence[str]) -> None:
        """Load the searches that a command line names, and add their flags. Raises CoppiceError."""
        for word, value in zip(words, [*words[1:], ""], strict=False):
            text = value if word == "--search" else word.removeprefix("--search=")
            if text != word and text != "list":
                self.named.append(find(text) or "")
        self.add_others()

    def add_others(self) -> None:
        """Add the flags of searches from outside of this project, after all others. Raises UsageError."""
        for name, search in described().items():
            if name not in self.added:
                self.added.append(name)
                self._add_other(name, search)

    def _add_other(self, name: str, search: DescribedSearch) -> None:
        shared = [f"{flag_of(key)} ({one.default})" for key, one in search.parameters.items() if one.shared]
        also = f" It also takes {', '.join(shared)}." if shared else ""
        group = self.parser.add_argument_group(f"search {name}", search.summary + also)
        try:
            _add_own(group, name, search)
        except argparse.ArgumentError as error:
            option = str(error).rpartition(" ")[2]
            raise UsageError(
                f"the search {name!r} has a parameter whose flag would be {option}, which exists already",
                where=search.where,
                remedy="rename the field or the search",
            ) from None

    def choose(self, found: argparse.Namespace) -> None:
        """If no search is named, choose it by the given parameters, see `search.base.chosen`."""
        if not self.named:
            takes = described()[found.search].parameters
            found.search = "trie" if "beams" in search_params(found) and "beams" not in takes else found.search

    def flags_of_named(self) -> set[str]:
        """The flags of all parameters of the searches that the command line names."""
        known = described()
        return {flag_of(key) for name in self.named if name in known for key in known[name].parameters}


def flag_of(key: str) -> str:
    """The flag of a parameter."""
    return "--" + key.replace("_", "-")


def search_params(args: argparse.Namespace) -> dict[str, Any]:
    """The given search parameters, for `search.make_search`."""
    keys = {key for search in described().values() for key in search.parameters}
    return {key: value for key, value in vars(args).items() if key in keys and value is not None}


def _add(group: argparse._ArgumentGroup, key: str, help: str, **options: Any) -> None:
    """Add the flag of a parameter that several searches share; its help has the default of each."""
    defaults: dict[str, list[str]] = {}  # default -> searches
    for name, search in described().items():
        if one := search.parameters.get(key):
            defaults.setdefault(one.default, []).append(name)
    default, *others = sorted(defaults, key="none".__eq__)  # the default of most searches first
    default += "".join(f"; {', '.join(defaults[other])}: {other}" for other in others)
    group.add_argument(flag_of(key), help=f"{help} ({default})", **options)


def _add_own(group: argparse._ArgumentGroup, name: str, search: DescribedSearch) -> None:
    """Add the flags of the parameters that only this search has, by their annotations."""
    for key, one in search.parameters.items():
        if not one.shared and one.kind.is_flag:
            group.add_argument(
                flag_of(key),
                type=argument(one.kind.parse),
                metavar=one.kind.metavar,
                help=f"{name}: {one.text} ({one.default})".replace("%", "%%"),
            )


class _SearchName(argparse.Action):
    """`--search list` prints all searches and exits; `SearchFlags.load` has loaded all other names."""

    def __call__(self, parser, namespace, values, option_string=None):
        if values == "list":
            errors = load_entry_points()
            known = described()
            width = max(map(len, known))
            lines = []
            for name, search in known.items():
                also = "".join(f" (also: {alias})" for alias in search.aliases)
                lines.append(f"{name:{width}}  {search.summary}{also}".rstrip() + "\n")
            parser._print_message("".join(lines), sys.stdout)
            for error in errors:
                print(f"error: {error}", file=sys.stderr)
            parser.exit()
        name = find(str(values))
        if name is None:
            known = described()
            names = [*known, *(alias for search in known.values() for alias in search.aliases)]
            near = difflib.get_close_matches(str(values), names, 1)
            hint = f"did you mean {near[0]}?" if near else "--search list describes them"
            raise argparse.ArgumentError(self, f"expected one of {', '.join(known)}, got {values!r}; {hint}")
        setattr(namespace, self.dest, name)

"""The flags of options: a field of a class declares its flag, and all front ends read the declaration.

A field is `Annotated[type, Flag(...)] = default` or, without a flag, `Annotated[type, NoFlag(why)] = default`; the
docstring of its class has its help text.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, NamedTuple, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from engine.values import argument_doc

P = ParamSpec("P")
T = TypeVar("T")
Options = TypeVar("Options")


@dataclass(frozen=True)
class Flag:
    """The flag of an option. Its help is the first sentence about the field in the docstring of the options.

    Args:
        name: the flag's name; "" takes the field's.
        group: the heading in `--help`.
        metavar: the placeholder for a value in `--help`.
        choices: the words that the flag takes; none: any text.
        constant: the word that the flag stands for; it takes no value then.
        help: replaces the text of the docstring.
        also: further words that the field takes from Python.
        read: text -> value; raises ValueError with the expected values.
        many: the flag may be given several times, and the field takes a list.
        shown: the default in `--help`; "" shows the value.
        default: the default of commands; None takes the field's.
        without: commands that do not offer the flag -> why.
        changes_answers: whether answers depend on the value.
    """

    name: str = ""
    group: str = "model"
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    constant: str = ""
    help: str = ""
    also: Collection[str] = ()
    read: Callable[[str], Any] = str
    many: bool = False
    shown: str = ""
    default: Any = None
    without: Mapping[str, str] = field(default_factory=dict)
    changes_answers: bool = True


@dataclass(frozen=True)
class NoFlag:
    """An option that no command offers, and why."""

    why: str


class Option(NamedTuple):
    """A field of options: its name, its default (`dataclasses.MISSING`: none), its flag, and its description."""

    name: str
    default: Any
    flag: Flag | NoFlag
    doc: str

    @property
    def argument(self) -> str:
        """The name that argparse gives the flag's value."""
        return (self.flag.name if isinstance(self.flag, Flag) else "") or self.name

    @property
    def help(self) -> str:
        """The help text of the flag."""
        own = self.flag.help if isinstance(self.flag, Flag) else ""
        return own or self.doc.partition(". ")[0].rstrip(".")


@functools.cache
def options_of(kind: type) -> tuple[Option, ...]:
    """The fields of a class of options, in their order. Raises TypeError for a field without a flag."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for f in fields(kind):
        said = get_args(hints[f.name])[1:] if get_origin(hints[f.name]) is Annotated else ()
        flag = next((each for each in said if isinstance(each, Flag | NoFlag)), None)
        if flag is None:
            raise TypeError(f"{kind.__name__}.{f.name}: expected Annotated with a Flag or a NoFlag")
        found.append(Option(f.name, f.default, flag, argument_doc(kind, f.name)))
    return tuple(found)


def without_effect(kind: type) -> set[str]:
    """The arguments of the flags of a class of options on which answers do not depend."""
    return {each.argument for each in options_of(kind) if isinstance(each.flag, Flag) and not each.flag.changes_answers}


def takes(kind: Callable[P, Options]) -> Callable[[Callable[[Options], T]], Callable[P, T]]:
    """Decorate a function of options so that it takes their fields as arguments, with the defaults of `kind`."""

    def decorate(function: Callable[[Options], T]) -> Callable[P, T]:
        @functools.wraps(function)
        def called(*args: P.args, **given: P.kwargs) -> T:
            return function(kind(*args, **given))

        own, hints = inspect.signature(kind), get_type_hints(kind)
        plain = [each.replace(annotation=hints[name]) for name, each in own.parameters.items()]
        result = inspect.signature(function).return_annotation
        called.__signature__ = own.replace(parameters=plain, return_annotation=result)  # type: ignore[attr-defined]
        return called

    return decorate

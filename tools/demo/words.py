"""The knowledge of the demo models: the lists and tables of texts.toml, from which the generator draws."""

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

TEXTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))
LISTS = SimpleNamespace(**{name: text.split() for name, text in TEXTS["words"].items()})
TABLES = {name: dict(pair.split(":") for pair in text.split()) for name, text in TEXTS["tables"].items()}
TABLES["opposites"] |= {b: a for a, b in TABLES["opposites"].items()}
HOMES: dict[str, str] = TEXTS["homes"]
KINDS: dict[str, list[str]] = {name: text.split() for name, text in TEXTS["kinds"].items()}
CITIES = [*TABLES["capitals"].values(), *LISTS.other_cities]
MASS = {*KINDS["drink"], *KINDS["sport"], *LISTS.mass}  # nouns without an article
PHRASES: dict[str, list[str]] = TEXTS["phrases"]


class Turn(NamedTuple):
    """A question and an answer.

    Args:
        task: kind of question.
        user, reply: the texts.
        wrong: a wrong answer of the same form.
    """

    task: str
    user: str
    reply: str
    wrong: str


def capital(text: str) -> str:
    """The text with a capital letter first."""
    return text[:1].upper() + text[1:]


def a(noun: str) -> str:
    """The noun with its article."""
    return noun if noun in MASS else f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"


def plural(noun: str) -> str:
    """Plural of the categories and animals in `words`."""
    irregular = {"mouse": "mice", "sheep": "sheep", "fish": "fish", "wolf": "wolves", "butterfly": "butterflies"}
    return irregular.get(noun, noun + ("es" if noun.endswith(("ch", "x", "sh", "s")) else "s"))

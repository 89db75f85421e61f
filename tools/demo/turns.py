"""A question and its answer with the check of texts for it; plurals and articles."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tools.demo.words import MASS, TEXTS

Check = Callable[[str], bool]
PHRASES: dict[str, list[str]] = TEXTS["phrases"]
POLITE = PHRASES["polite"]


@dataclass(frozen=True)
class Turn:
    """A question and an answer.

    Args:
        task: kind of question.
        user, reply: the texts.
        wrong: a wrong answer of the same form.
        check: whether a text is a right answer.
    """

    task: str
    user: str
    reply: str
    wrong: str
    check: Check


# --- checks ---


def found(text: str) -> list[str]:
    """Words and numbers of a text, in lower case."""
    return re.findall(r"[a-z]+|\d+", text.lower())


def says(right: str, rivals: Iterable[str] = (), asked: str = "") -> Check:
    """The text has the right words, and no rival that the question did not name."""
    wanted = found(right)
    wrong = {word.lower() for word in rivals} - {*wanted, *found(asked)}
    return lambda text: {*wanted} <= {*found(text)} and wrong.isdisjoint(found(text))


def last_number(right: int) -> Check:
    """The last number of the text is the right one."""
    return lambda text: (re.findall(r"\d+", text) or [""])[-1] == str(right)


def one_of(options: Iterable[str]) -> Check:
    """One of the phrases occurs."""
    wanted = [phrase.lower() for phrase in options]
    return lambda text: any(phrase in text.lower() for phrase in wanted)


does_not_know = one_of(["not know", "too big for me"])


def is_brief(text: str) -> bool:
    """A few words and no sentence."""
    return len(text.split()) <= 4


def is_polite(text: str) -> bool:
    """It starts as a polite answer does."""
    return text.startswith(tuple(opening.strip() for opening in POLITE))


# --- words ---


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

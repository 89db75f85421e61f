"""What the papers' comparisons share: the models they run on, texts to begin with, what each hands back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from engine import Engine
from engine.errors import UsageError
from tools.bench.texts import story_requests
from tools.demo.evaluate import prompt

T = TypeVar("T")


@dataclass(frozen=True)
class Models:
    """What is measured, and how.

    Args:
        target, draft, reward: checkpoint folders.
        name: what to call the target in a report.
        kind: "demo" (the bundled models), "random" (weights that know nothing), or "given".
        quick: hardly measure, only see that everything runs.
        scratch: a folder for what is made on the way.
        peer_python: the interpreter that has transformers.
    """

    target: Path
    draft: Path | None
    reward: Path | None
    name: str
    kind: str
    quick: bool
    scratch: Path
    dtype: str = "float32"
    threads: int | None = None
    seed: int = 0
    peer_python: str = ""

    def engine(self, *roles: str, folder: Path | None = None, **options: Any) -> Engine:
        """The target, with other models beside it; or another one."""
        self.need(*roles)
        beside = {role: getattr(self, role) for role in roles}
        return Engine.load(folder or self.target, dtype=self.dtype, threads=self.threads, **beside, **options)

    def need(self, *roles: str) -> None:
        """Raises UsageError for a role that no model was given for."""
        for role in roles:
            if getattr(self, role) is None:
                raise UsageError(f"no {role} model", remedy=f"give --{role} DIR")

    def pick(self, full: T, quick: T) -> T:
        """One size or the other."""
        return quick if self.quick else full


class Findings(NamedTuple):
    """What a paper's comparison found: for the page, for programs, and as a picture of a size in inches."""

    body: str
    result: dict[str, Any]
    size: tuple[float, float] | None = None
    paint: Callable[[Any], None] | None = None


def stories(engine: Engine, number: int, turns: int, seed: int) -> list[list[int]]:
    """For the demo: conversations of about so many turns, the last of which asks for a story, as token ids."""
    return [prompt(engine, talk) for talk in islice(story_requests(f"papers:{seed}:{turns}", turns), number)]


def ratio(over: float | None, under: float | None) -> str:
    """One figure over another as "1.50x"; "-" where one is not known."""
    return f"{over / under:.2f}x" if over is not None and under else "-"


def bullets(lines: Sequence[str]) -> str:
    """Paragraphs as a list."""
    return "\n".join(f"- {' '.join(line.split())}" for line in lines)

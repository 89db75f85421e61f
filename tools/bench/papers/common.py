"""Parts that the papers' comparisons share: models, prompts and results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from engine import Engine
from engine.errors import UsageError
from models.formats.linear import FORMATS
from tools.bench.checkpoints import is_gguf
from tools.bench.texts import prompt, story_requests
from tools.bench.variants import in_dtype

T = TypeVar("T")


@dataclass(frozen=True)
class Models:
    """The models to measure, and the settings.

    Args:
        target, draft, reward: checkpoint folders, or GGUF files. A draft "int8" or "int4" is the target in that format.
        name: of the target in a report.
        demo: whether they are the bundled ones; then texts are the demo's too, and else those of `tools.bench.texts`.
        quick: use tiny settings, only to check that everything runs.
        scratch: a folder for temporary files.
        kept: a folder for the target's dequantised weights, which may already hold them.
        peer_python: the interpreter that has transformers.
        own: run the target in the file's own format instead of as floats, if the draft is "int8" or "int4".
    """

    target: Path
    draft: Path | None
    reward: Path | None
    name: str
    demo: bool
    quick: bool
    scratch: Path
    kept: Path
    dtype: str = "float32"
    threads: int | None = None
    seed: int = 0
    peer_python: str = ""
    own: bool = False

    def engine(self, *roles: str, **options: Any) -> Engine:
        """Load the target with companions in these roles."""
        self.need(*roles)
        if "draft" in roles and str(self.draft) in FORMATS:
            shared = {"dtype": self.dtype, "threads": self.threads}
            engine = Engine.load(self.target if self.own else self.floats(), **shared, **options)
            engine.add("draft", Engine.load(self.floats(), quant=str(self.draft), **shared, **options))
            return engine
        beside = {role: getattr(self, role) for role in roles}
        return Engine.load(self.target, dtype=self.dtype, threads=self.threads, **beside, **options)

    def floats(self) -> Path:
        """A folder of the target with its weights in float32; the target itself if they are floats."""
        return in_dtype(self.target, "float32", self.kept) if is_gguf(self.target) else self.target

    def need(self, *roles: str) -> None:
        """Raise UsageError for a role without a model."""
        for role in roles:
            if getattr(self, role) is None:
                raise UsageError(f"no {role} model", remedy=f"give --{role} MODEL")

    def pick(self, full: T, quick: T) -> T:
        """The first size, or the second with `quick`."""
        return quick if self.quick else full


class Findings(NamedTuple):
    """The result of a comparison: text for the page, data for programs, and a picture with its size in inches."""

    body: str
    result: dict[str, Any]
    size: tuple[float, float] | None = None
    paint: Callable[[Any], None] | None = None


def stories(engine: Engine, number: int, turns: int, seed: int) -> list[list[int]]:
    """For the demo: conversations of about this many turns that end with a request for a story, as token ids."""
    return [prompt(engine, talk) for talk in islice(story_requests(f"papers:{seed}:{turns}", turns), number)]


def ratio(over: float | None, under: float | None) -> str:
    """One figure over another as "1.50x"; "-" where one is missing."""
    return f"{over / under:.2f}x" if over is not None and under else "-"


def bullets(lines: Sequence[str]) -> str:
    """Paragraphs as a list."""
    return "\n".join(f"- {' '.join(line.split())}" for line in lines)

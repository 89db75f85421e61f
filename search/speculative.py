"""Speculative sampling: drafted tokens are accepted so that the output is distributed as if drawn from the target."""

from dataclasses import dataclass, fields

from search.base import SearchGenerator, Task, register
from search.dsbd import DSBD
from search.dsbd.verify import IID
from search.options import Sampling


@register("speculative")
@dataclass(frozen=True)
class Speculative(Sampling):
    """Speculative sampling: draws from the model's distribution, several tokens per pass with a draft (--draft).

    Args:
        gamma: tokens drafted per round.
    """

    gamma: int = 4
    models = ("draft",)
    drafts_itself = True

    def __post_init__(self):
        self.as_dsbd()

    def as_dsbd(self) -> DSBD:
        """Return the equivalent DSBD: one draft and one beam."""
        options = {field.name: getattr(self, field.name) for field in fields(Sampling)}
        return DSBD(draft_beams=1, width=1, gamma=self.gamma, drafts=IID, length_penalty=0, **options)

    def run(self, task: Task) -> SearchGenerator:
        return self.as_dsbd().run(task)

    def slots(self, prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
        return self.as_dsbd().slots(prompt_tokens, new_tokens)

    def most_rows(self) -> int:
        return self.as_dsbd().most_rows()

    def work(self, new_tokens: int) -> tuple[int, int]:
        return self.as_dsbd().work(new_tokens)

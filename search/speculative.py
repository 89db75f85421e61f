"""Speculative sampling: drafted tokens are accepted so that the output is distributed as if drawn from the target."""

from dataclasses import dataclass

from search.base import Search, SearchGenerator, Task, register
from search.dsbd import DSBD
from search.dsbd.verify import IID


@register("speculative")
@dataclass(frozen=True)
class Speculative(Search):
    """Speculative sampling: draws from the model's distribution, several tokens per pass with a draft (--draft).

    Args:
        gamma: tokens drafted per round.
        temperature, top_k, top_p: see `engine.sampling.Warp`.
        seed: of the keyed draws.
    """

    gamma: int = 4
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    models = ("draft",)

    def __post_init__(self):
        self.as_dsbd()

    def as_dsbd(self) -> DSBD:
        """DSBD with one draft and one beam, which is the same."""
        options = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "seed": self.seed}
        return DSBD(draft_beams=1, width=1, gamma=self.gamma, drafts=IID, length_penalty=0, **options)

    def run(self, task: Task) -> SearchGenerator:
        return self.as_dsbd().run(task)

    def slots(self, prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
        return self.as_dsbd().slots(prompt_tokens, new_tokens)

"""Statistics of a DSBD run, layer by layer."""

from collections.abc import Sequence
from typing import Any

from search.dsbd.verify import Verdict


class Stats:
    """Counts rounds and layers."""

    def __init__(self, gamma: int):
        self.rounds = self.passes = self.bonuses = self.bonus_widths = 0
        self.seen, self.full, self.widths, self.accepted, self.tried = ([0] * gamma for _ in range(5))

    def layer(self, depth: int, width: int, verdict: Verdict, whole: bool) -> None:
        """Count a verified layer; `whole`: the round may continue below it."""
        self.seen[depth] += 1
        self.full[depth] += whole
        self.widths[depth] += width
        self.accepted[depth] += verdict.accepted
        self.tried[depth] += verdict.tried

    def bonus(self, width: int) -> None:
        """Count a layer that was drawn after all drafted layers were accepted."""
        self.bonuses += 1
        self.bonus_widths += width

    def figures(self, steps: int) -> dict[str, Any]:
        """Return the statistics that docs/stats.md describes."""

        def mean(sums: Sequence[int], counts: Sequence[int]) -> list[float | None]:
            return [round(a / n, 4) if n else None for a, n in zip(sums, counts, strict=True)]

        return {
            "steps": steps,
            "rounds": self.rounds,
            "layers_accepted": sum(self.full),
            "tokens_per_target_forward": steps / self.passes,
            "rounds_per_layer": [*self.seen, self.bonuses],
            "width_per_layer": mean([*self.widths, self.bonus_widths], [*self.seen, self.bonuses]),
            "acceptance_per_layer": mean(self.accepted, self.tried),
        }

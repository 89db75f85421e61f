"""Drafts whatever they cost."""

from engine.drafts.size import DraftSize
from engine.step.drafting import Charge, EngineDrafts


class EagerDrafts(EngineDrafts):
    """The drafter of an engine whose passes evaluate every guess."""

    def size(self, charge: Charge) -> DraftSize:
        return DraftSize(None)

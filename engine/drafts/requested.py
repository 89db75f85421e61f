"""The drafters that requests choose by name, in addition to the one with which the engine was loaded."""

from typing import Any

from engine.drafts import Drafter
from engine.drafts.backoff import NGramDrafter
from engine.drafts.choice import check_drafter, chosen_drafter
from engine.drafts.model import ModelDrafter
from engine.drafts.suffixes import FIRST_CAPACITY, SuffixDrafter
from engine.errors import UsageError, shortened
from engine.step.drafting import EngineDrafts

KINDS = {"ngrams": NGramDrafter, "suffix": SuffixDrafter, "auto": SuffixDrafter}
OF_MODELS = ("model", "mtp")


class RequestedDrafters:
    """The drafters of an engine that its requests have chosen, each made at its first use.

    Args:
        planned: whether the engine has memory for drafts. `LoadOptions.memory` counts none if it is loaded without.
    """

    def __init__(self, planned: bool = True):
        self.planned = planned
        self._made: dict[str, tuple[Any, EngineDrafts]] = {}  # by name; with the draft model's runner, if any

    def of(self, choice: Any, models: Any) -> EngineDrafts | None:
        """The drafter for a request; None: nothing is drafted.

        A choice by name is the engine's own drafter if that is of this kind. A suffix drafter that is made here keeps
        only `FIRST_CAPACITY` tokens of ended requests.

        Args:
            choice: `Request.drafts`.
            models: the `engine.request.Models` that answer.

        Raises:
            UsageError: there is no such drafter, no draft model, or drafts are not supported or have no memory here.
        """
        if isinstance(choice, bool):
            return models.drafts if choice else None
        try:
            check_drafter(choice)
        except UsageError as error:
            raise UsageError(f"{error.what.split(', got ')[0]}, true or false, got {shortened(repr(choice))}") from None
        if not self.planned:
            if choice in ("off", "auto"):
                return None
            raise UsageError(
                "drafts: --memory leaves no room for drafts that only a request chooses",
                remedy="leave drafts out of the request, or load the model with --drafts: --memory counts those",
            )
        own, draft = models.drafts, models.others.get("draft")
        if isinstance(choice, str) and own is not None and isinstance(own.drafter, KINDS.get(choice, ())):
            return own
        runner = draft.runner if draft is not None and choice in OF_MODELS else None
        if isinstance(choice, str) and choice in self._made and self._made[choice][0] is runner:
            return self._made[choice][1]
        target = models.target
        drafter: Drafter | None = chosen_drafter(choice, target.runner, target.tokenizer, runner, FIRST_CAPACITY)
        if own is not None and isinstance(drafter, ModelDrafter) and getattr(own.drafter, "runner", None) is runner:
            return own
        if drafter is None:
            return None
        made = EngineDrafts(drafter)
        if isinstance(choice, str):
            self._made[choice] = runner, made
        return made

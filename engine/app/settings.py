"""The settings of a chat, changed by `/set`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.contract import Search
from engine.contract.distinct import check_distinct
from engine.errors import check_flag, check_integer
from engine.load.generation import Generation
from engine.rules import PLAIN_RULES, Rules, with_changes
from engine.rules.logprobs import check_logprobs
from engine.values import plain
from search.base import REGISTRY, chosen, make_search, parameters
from search.outside import find_search

TEXTS = ("choices", "bad_words", "dry_sequence_breakers")  # lists of texts, for which one text may be given


@dataclass(frozen=True)
class Settings:
    """The search, its parameters, the limits, and the constraints that were given (see `engine.Rules`).

    `params` may have parameters of other searches, which apply when a person changes back.
    """

    search: str
    params: Mapping[str, Any]
    max_new_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    rules: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    distinct: str | None = None
    adapter: str | None = None

    def configuration(self) -> Search:
        """The search's configuration. Raises UsageError."""
        known = parameters(self.search)
        given = {key: value for key, value in self.params.items() if key in known}
        if self.search == "trie" and given.keys().isdisjoint({"early_stopping", "patience"}):
            given["early_stopping"] = "best"  # a chat's default, measured in docs/results/endings.md
        return make_search(self.search, given)

    def over(self, generation: Generation) -> "Settings":
        """These settings, with a checkpoint's defaults for generation where fields are not given."""
        params = generation.params_of(parameters(self.search)) | dict(self.params)
        rules = with_changes(generation.rules_of(self.search), self.rules)
        return dataclasses.replace(self, params=params, rules=rules)

    def limits(self) -> dict[str, Any]:
        """Options of `Engine.stream`: limits and constraints."""
        return {key: getattr(self, key) for key in LIMITS} | dict(self.rules)

    def shown(self) -> dict[str, Any]:
        """All settings, by the names that users write."""
        search = self.configuration()
        own = {key: plain(getattr(search, field)) for key, field in parameters(self.search).items()}
        return {"search": self.search} | own | self.limits()

    def changed(self, changes: Mapping[str, Any]) -> "Settings":
        """Settings with these changes, all or none; `beams` without a search mean beam search unless the present one
        has them. Raises UsageError."""
        changes = dict(changes)
        name = chosen(changes, self.search)
        changes.pop("search", None)
        if isinstance(name, str):
            name = find_search(name) or name
        limits = {key: changes.pop(key) for key in LIMITS if key in changes}
        check_integer("max_new_tokens", limits.get("max_new_tokens", 1), 1)
        check_flag("ignore_eos", limits.get("ignore_eos", False))
        check_logprobs(limits.get("logprobs"))
        check_distinct(limits.get("distinct"))
        if "stop" in limits:
            stop = limits["stop"]
            limits["stop"] = tuple(stop) if isinstance(stop, list) else (str(stop),) if stop != "" else ()
        rules = {key: changes.pop(key) for key in PLAIN_RULES if key in changes}
        for key in TEXTS:
            if isinstance(rules.get(key), str):
                rules[key] = [rules[key]] if rules[key] else []
        Rules(**rules).check()
        known = parameters(name) if isinstance(name, str) and name in REGISTRY else {}
        make_search(name, {key: value for key, value in self.params.items() if key in known} | changes)
        return dataclasses.replace(
            self, search=name, params={**self.params, **changes}, rules=with_changes(self.rules, rules), **limits
        )


LIMITS = tuple(f.name for f in dataclasses.fields(Settings) if f.name not in ("search", "params", "rules"))

"""A served model, and the spellings of its tokens."""

import argparse
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engine.app.cli import template_options
from engine.contract.trace import ANCHOR, token_text
from engine.engine import Engine
from engine.errors import UsageError
from engine.load.options import NO_ADAPTER
from engine.rules.catalogue import Catalogue
from engine.serve.stepper import Lane
from engine.text.template import TemplateOptions

SPELLINGS = 1 << 16  # spellings that are kept


@dataclass
class Served:
    """A model that is served.

    Args:
        name: the name by which requests choose it.
        engine: the engine with its models.
        lane: the lane of its requests.
        args: the command line, with the values that a request leaves out.
        catalogues: catalogues by the names that requests use.
        adapter: the name of its adapter.
    """

    name: str
    engine: Engine
    lane: Lane
    args: argparse.Namespace
    catalogues: Mapping[str, Catalogue] = field(default_factory=dict)
    adapter: str = NO_ADAPTER

    def __post_init__(self):
        self.template: TemplateOptions = template_options(self.args)
        self.created = int(time.time())
        self._bytes: list[bytes] | None = None
        self.spelling = functools.lru_cache(SPELLINGS)(self._spelling)

    def adapted(self) -> "dict[str, Served]":
        """The model with each of its adapters, by name: NAME:ADAPTER."""
        found = {f"{self.name}:{adapter}": adapter for adapter in self.engine.model.adapters}
        return {name: replace(self, name=name, adapter=adapter) for name, adapter in found.items()}

    def _spelling(self, token: int) -> tuple[str, list[int]]:
        """A token's text in the middle of a text, and its bytes, which may be a part of a character."""
        tokenizer = self.engine.tokenizer
        if self._bytes is None:
            try:
                self._bytes = tokenizer.data()
            except UsageError:  # they depend on the tokens around
                self._bytes = []
        text = token_text(tokenizer, tokenizer.encode(ANCHOR, add_special=False), token)
        data = self._bytes[token] if token < len(self._bytes) else b""
        return text, [*(data or text.encode())]

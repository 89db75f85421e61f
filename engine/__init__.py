"""The engine: token trees on a paged cache, evaluated for any search."""

from typing import TYPE_CHECKING

import engine.load.startup  # noqa: F401  # isort: split
from engine.version import __version__
from models.lazy import exports

if TYPE_CHECKING:
    from engine.cache.tree import TokenTree
    from engine.contract import ContinuationScore, Evaluate, Output, Report, SearchResult, Task
    from engine.engine import Engine, Session
    from engine.errors import CheckpointError, CoppiceError, KVMemoryError, NumericsError, SearchError, UsageError
    from engine.load.options import LoadOptions
    from engine.request import Done, Prefill, Progress, Request, RequestOptions, Text
    from engine.rules import Rules
    from engine.rules.catalogue import Catalogue
    from engine.rules.constraint import Choices, Constraint, ConstraintError
    from engine.tasks.async_engine import AsyncEngine

__all__ = [
    "AsyncEngine",
    "Catalogue",
    "CheckpointError",
    "Choices",
    "Constraint",
    "ConstraintError",
    "ContinuationScore",
    "CoppiceError",
    "Done",
    "Engine",
    "Evaluate",
    "KVMemoryError",
    "LoadOptions",
    "NumericsError",
    "Output",
    "Prefill",
    "Progress",
    "Report",
    "Request",
    "RequestOptions",
    "Rules",
    "SearchError",
    "SearchResult",
    "Session",
    "Task",
    "Text",
    "TokenTree",
    "UsageError",
    "__version__",
]
__getattr__ = exports(
    __name__,
    {
        "engine.cache.tree": "TokenTree",
        "engine.contract": "ContinuationScore Evaluate Output Report SearchResult Task",
        "engine.engine": "Engine Session",
        "engine.errors": "CheckpointError CoppiceError KVMemoryError NumericsError SearchError UsageError",
        "engine.load.options": "LoadOptions",
        "engine.request": "Done Prefill Progress Request RequestOptions Text",
        "engine.rules": "Rules",
        "engine.rules.catalogue": "Catalogue",
        "engine.rules.constraint": "Choices Constraint ConstraintError",
        "engine.tasks.async_engine": "AsyncEngine",
    },
)

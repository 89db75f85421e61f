"""The engine: token trees on a paged cache, evaluated for any search."""

import engine.startup  # noqa: F401  # isort: split
from engine.async_engine import AsyncEngine
from engine.catalogue import Catalogue
from engine.constraints import Choices, Constraint, ConstraintError
from engine.engine import Done, Engine, Prefill, Progress, Request, Session, Text
from engine.errors import CheckpointError, CoppiceError, KVMemoryError, NumericsError, SearchError, UsageError
from engine.options import RequestOptions
from engine.requests import Evaluate, Output, Report, SearchResult, Task
from engine.rules import Rules
from engine.tree import TokenTree
from engine.version import __version__

__all__ = [
    "AsyncEngine",
    "Catalogue",
    "CheckpointError",
    "Choices",
    "Constraint",
    "ConstraintError",
    "CoppiceError",
    "Done",
    "Engine",
    "Evaluate",
    "KVMemoryError",
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

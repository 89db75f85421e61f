"""Decoding searches, one file each, each a generator over token trees. docs/write-a-search.md shows how to write
one."""

import engine  # noqa: F401  # sets a filter before torch is imported  # isort: split
from engine.errors import KVMemoryError, UsageError
from search.aded import ADED
from search.base import (
    REGISTRY,
    Answer,
    Evaluate,
    Next,
    Output,
    Pause,
    Report,
    Search,
    SearchGenerator,
    SearchResult,
    Task,
    evaluate_top_sums,
    make_search,
    register,
)
from search.beam_sample import BeamSample
from search.diverse import Diverse
from search.dsbd import DSBD
from search.greedy import Greedy
from search.sample import Sample
from search.sbon import BoN, SBoN
from search.speculative import Speculative
from search.trie import Trie
from search.ults import ULTS

__all__ = [
    "ADED",
    "DSBD",
    "REGISTRY",
    "ULTS",
    "Answer",
    "BeamSample",
    "BoN",
    "Diverse",
    "Evaluate",
    "Greedy",
    "KVMemoryError",
    "Next",
    "Output",
    "Pause",
    "Report",
    "SBoN",
    "Sample",
    "Search",
    "SearchGenerator",
    "SearchResult",
    "Speculative",
    "Task",
    "Trie",
    "UsageError",
    "evaluate_top_sums",
    "make_search",
    "register",
]

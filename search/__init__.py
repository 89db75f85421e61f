"""Decoding searches: each one file, each a generator over token trees."""

import engine  # noqa: F401  # sets a filter before torch is imported  # isort: split
from search.aded import ADED
from search.base import REGISTRY, make_search
from search.beam_sample import BeamSample
from search.dsbd import DSBD, Speculative
from search.greedy import Greedy
from search.sample import Sample
from search.sbon import BoN, SBoN
from search.trie import Trie
from search.ults import ULTS

__all__ = [
    "ADED",
    "DSBD",
    "REGISTRY",
    "ULTS",
    "BeamSample",
    "BoN",
    "Greedy",
    "SBoN",
    "Sample",
    "Speculative",
    "Trie",
    "make_search",
]

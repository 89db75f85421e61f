"""Decoding searches: each one file, each a generator over token trees."""

from search.base import REGISTRY, make_search
from search.greedy import Greedy
from search.sample import Sample
from search.trie import Trie

__all__ = ["REGISTRY", "Greedy", "Sample", "Trie", "make_search"]

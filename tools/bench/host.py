"""The time of a step without the model: trees, packing, driver and search on a model that computes nothing.

The remaining operators are those on [beams, vocabulary], with a small vocabulary.
"""

import statistics
import time
from itertools import pairwise

import torch
from torch import Tensor

from engine.engine import Engine
from engine.load.loading import LoadedModel
from engine.load.pools import make_pools
from engine.step.graphs import make_runner
from models.shape import ModelShape
from search import Trie

VOCAB, TABLE = 512, 97  # the table's logits repeat after TABLE rows
AROUND = 50  # steps on either side of a depth
RUNS = 3


class Idle:
    """A model that computes nothing; its logits come from a table."""

    shape = ModelShape(layers=1, kv_heads=1, head_dim=2, vocab_size=VOCAB, max_positions=None)
    layers = ()

    def __init__(self):
        table = torch.randn(TABLE, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
        self.rows = table.repeat(3, 1)
        self.passes = 0

    def forward(self, tokens_T: Tensor, *_: object) -> Tensor:
        return torch.empty(len(tokens_T), 1)

    def logits(self, hidden_NE: Tensor) -> Tensor:
        self.passes = (self.passes + 31) % TABLE
        return self.rows[self.passes : self.passes + len(hidden_NE)]


def step_seconds(beams: int, depths: list[int], prompt: int = 16) -> dict[int, float]:
    """Seconds of a step of trie beam search around each depth, medians of `RUNS` runs' medians."""
    [pool] = make_pools([(Idle.shape, torch.float32)], torch.device("cpu"), 1 << 24)
    engine = Engine(LoadedModel(make_runner(Idle(), pool, VOCAB), Idle.shape))
    options = {"max_new_tokens": max(depths) + AROUND + 1, "ignore_eos": True}
    found: dict[int, list[float]] = {depth: [] for depth in depths}
    for _ in range(RUNS):
        times: list[float] = []
        for event in engine.stream(list(range(prompt)), Trie(beams=beams), **options):
            del event
            times.append(time.perf_counter())
        steps = [b - a for a, b in pairwise(times)]
        for depth in depths:
            found[depth].append(statistics.median(steps[max(0, depth - AROUND) : depth + AROUND]))
    return {depth: statistics.median(medians) for depth, medians in found.items()}

"""Check that torch.compile traces a whole model into one graph, for passes of any trees, sizes and ancestry."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx.experimental import _config

from engine import Engine
from engine.cache.tree import TokenTree
from engine.step.packing import Chunk, pack
from kernels.whole_graph import fusible, traceable
from models.checkpoint.weights import Embedding

PASSES = ((1, 1), (2, 5), (3, 2), (1, 40), (2, 33))  # trees, and tokens of the first one's prompt
TOKENS, WORDS = (2,), (1,)  # at least: strides of smaller tensors are others, and torch guards on strides
UNGUARDED = {"use_duck_shape": False, "backed_size_oblivious": True}  # sizes that happen to be equal, 0 or 1
WIDE = 40  # branches of a tree that has more than a word of ancestry


class Traced(NamedTuple):
    """The graphs that torch.compile made of a model.

    Args:
        passes: number of passes that were run.
        graphs: number of graphs that were compiled for them; graph breaks are errors.
        error: the largest difference between hidden states and those of the model without compilation.
    """

    passes: int
    graphs: int
    error: float


def trace(engine: Engine, *, impl: str | None = None, backend: str = "eager") -> Traced:
    """Compile a model that runs on a CPU as one graph, and run prompts and branches of several trees through it.

    Its embedding, which a CPU reads from the checkpoint's file, becomes a table in memory as on a GPU.

    Args:
        impl: implementation of the operators over trees; None: the engine's.
        backend: backend of torch.compile; "eager" runs the graph as it was traced.

    Raises:
        torch._dynamo.exc.Unsupported: the model cannot be traced without a break.
    """
    runner, model = engine.runner, engine.runner.model
    table, counters = model.embedding, torch._dynamo.utils.counters
    traceable()
    torch._dynamo.reset()
    counters.clear()
    error, count = 0.0, 0
    try:
        model.embedding = Embedding(table(torch.arange(model.config.vocab_size)), table.dtype)
        run = torch.compile(model.forward, fullgraph=True, dynamic=True, backend=backend)
        with torch.inference_mode(), _config.patch(**UNGUARDED):  # type: ignore[attr-defined]
            for chunks in passes(engine):
                options = {"impl": impl or runner.impl, "ancestors": runner.pool.ancestors}
                options |= {"token_buckets": TOKENS, "word_buckets": WORDS}
                p = pack(chunks, runner.pool.page_size, **options)
                arguments = p.tokens_T, p.layout.positions_T, p.spans_T, runner.pool.cache
                expected_TE = model.forward(*arguments, p.layout)
                found_TE = run(*arguments, fusible(p.layout))
                error, count = max(error, float((found_TE - expected_TE).abs().max())), count + 1
    finally:
        model.embedding = table
    return Traced(count, counters["stats"]["unique_graphs"], error)


def passes(engine: Engine) -> Iterator[list[Chunk]]:
    """Passes of prompts with and without branches, then of branches alone."""
    rng: Any = random.Random(0)
    for count, tokens in PASSES:
        sizes = [tokens + 3 * i for i in range(count)]
        trees = [TokenTree(engine.pool, [rng.randrange(engine.runner.vocab_size) for _ in range(n)]) for n in sizes]
        for begun in (False, True):
            chunks = []
            for tree in trees:
                prompt, nodes = 0 if begun else len(tree.trunk.tokens), []
                if begun or tokens > 2:
                    parents = tree.grow([tree.root] * 3, [1, 2, 3])
                    nodes = [*parents, *tree.grow([parents[0], parents[2]], [7, 8])]
                    nodes += tree.grow([parents[1]] * WIDE, list(range(WIDE))) if count == 2 and begun else []
                chunks.append(Chunk(tree, prompt, nodes, tree.allocate(prompt, nodes)))
            yield chunks
        for tree in trees:
            tree.release()

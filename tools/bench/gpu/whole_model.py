"""The stage of torch.compile: a whole model as one graph of it beside our kernels, both recorded as a CUDA graph."""

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config

from engine.cache.tree import TokenTree
from engine.step.packing import Chunk
from kernels.whole_graph import fusible, traceable
from tools.bench import device as on_gpu
from tools.bench.gpu.setting import Found, Setting
from tools.bench.report import comparison

SIZES = (1, 16, 256)  # tokens of a pass
COMPILER: dict[str, Any] = {"mode": "max-autotune-no-cudagraphs"}
WANTED = 1.03  # of our time over the compiled one's, for which a compiled model would be worth its code
COMPILED = """*ours* and *compiled* are the times of a replay of the CUDA graph of all layers, without the head,
measured in turns. Both use our attention and our kernel that rotates heads and writes keys, but the compiled model
lists the tasks of attention's programs anew in each layer; its products, norms, sums and gates are the compiler's. *to
compile s* is the time from the call to the first result. *difference* is the largest difference of hidden states,
relative to the largest state."""


def compiled(s: Setting) -> Found:
    """The layers of the Llama at once, by our kernels and by torch.compile, for passes of some sizes."""
    engine = s.engine(s.model, s.args.prefix[0] + 2 * max(SIZES))
    with torch.inference_mode(), _config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        traceable()
        rows = s.rows((f"{size} tokens", partial(compare, s, engine, size)) for size in SIZES)
    targets = [comparison(f"{row['tokens']} tokens, x compiled", row["x_ours"], WANTED) for row in rows]
    return Found(s.heading, rows, {
        "tokens": "{tokens}", "ours ms": "{ours:ms.2f}", "compiled ms": "{compiled:ms.2f}", "ours / compiled":
        "{x_ours:.2f}", "to compile s": "{to_compile:.0f}", "difference": "{difference:.1e}",
    }, COMPILED, targets)  # fmt: skip


def compare(s: Setting, engine: Any, tokens: int) -> dict[str, Any]:
    """Both times of a pass of so many branches of a trunk."""
    runner, prefix = engine.runner, s.args.prefix[0]
    tree = TokenTree(runner.pool, [1] * prefix)
    try:
        tree.allocate(prefix, [])
        nodes = tree.grow([tree.root] * tokens, [1] * tokens)
        p = runner.pack([Chunk(tree, 0, nodes, tree.allocate(0, nodes))])
        inputs = p.tokens_T, p.layout.positions_T, p.spans_T, runner.pool.cache
        model = partial(runner.model.forward, *inputs, p.layout)
        theirs = partial(
            torch.compile(runner.model.forward, fullgraph=True, dynamic=False, **COMPILER), *inputs, fusible(p.layout)
        )
        began = time.perf_counter()
        found_TE = theirs()
        if s.device.type == "cuda":
            torch.cuda.synchronize()
        to_compile = time.perf_counter() - began
        expected_TE: Tensor = model()
        difference = float((found_TE - expected_TE).abs().max() / expected_TE.abs().max())
        seconds = on_gpu.in_turns([on_gpu.recorded([run]) for run in (model, theirs)], s.args.runs)
    finally:
        tree.release()
    ours, compiled = seconds
    return {
        "tokens": tokens, "ours": ours, "compiled": compiled, "x_ours": ours / compiled,
        "to_compile": to_compile, "difference": difference,
    }  # fmt: skip

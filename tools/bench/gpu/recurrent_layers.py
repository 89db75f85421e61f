"""The stage of recurrent layers: a gated delta net and a selective scan, over beams and over a prompt."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.delta_net import DeltaWeights, delta_net
from kernels.delta_net.chains import with_chains
from kernels.layout import BLOCK, NULL_SLOT, NULL_STATE, TRASH_SLOT, DeltaKind, DeltaPaths, ScanKind
from kernels.scan import ScanWeights, scan
from tools.bench import device as on_gpu
from tools.bench.gpu.setting import Found, Setting

LAYERS = {"gated delta net": DeltaKind(16, 32, 128, 128, 4), "Mamba-2": ScanKind(1, 48, 128, 64, 4)}
PASSES = ((1, 1), (15, 1), (64, 1), (1, 2048))  # chains, and tokens of each
ABOVE = BLOCK // 2  # tokens between a beam's node and the state that its block begins with
FIRST_ROW = max(NULL_SLOT, TRASH_SLOT) + 1
STATES = """*us* is the time of a layer between its matrix products, in a CUDA graph; *us per token* divides it by the
tokens of a chain. Beams are in the middle of their blocks, below tokens that they share; a prompt is one chain. All
runs read the same states, which a GPU's caches can hold; the states of a whole model would not fit."""


def states(s: Setting) -> Found:
    """Recurrent layers, between their products with matrices."""
    with torch.inference_mode():
        rows = s.rows((f"{name}, {chains} x {tokens} tokens", partial(walk, s, name, chains, tokens))
                      for name in LAYERS for chains, tokens in PASSES)  # fmt: skip
    columns = {"layer": "{layer}", "chains": "{chains}", "tokens per chain": "{tokens}", "us": "{seconds:us.1f}"}
    heading = (
        "Shapes of Qwen3.5-9B (gated delta net) and Granite 4 Tiny (Mamba-2), random weights and states in float32."
    )
    return Found(heading, rows, columns | {"us per token": "{each:us.2f}"}, STATES)


def walk(s: Setting, name: str, chains: int, tokens: int) -> dict[str, Any]:
    """One layer, over and over."""
    run = layer(LAYERS[name], chains, tokens, s.device)
    seconds = on_gpu.seconds_of(on_gpu.recorded([partial(run, "triton")] * 2), s.args.runs) / 2
    return {"layer": name, "chains": chains, "tokens": tokens, "seconds": seconds, "each": seconds / tokens}


def layer(kind: DeltaKind, chains: int, tokens: int, device: torch.device) -> Callable[[str], Tensor]:
    """A layer of random weights over random tokens, below others if each chain is one token, by an implementation."""
    (H, K, V), above = kind.state, ABOVE if tokens == 1 else 0

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device)

    shared = drawn(kind.taps, kind.channels), -drawn(H).exp(), drawn(H)
    if isinstance(kind, ScanKind):
        taps_KC, decay_H, bias_H = shared
        weights = ScanWeights(kind, taps_KC, drawn(kind.channels), decay_H, bias_H, drawn(H), drawn(H * V), 1e-6)
    else:
        weights = DeltaWeights(kind, *shared, drawn(V), 1e-6)
    x_TF = drawn(chains * tokens, kind.width).bfloat16()
    rows_RW, states_SHKV = drawn(FIRST_ROW + above, kind.row) * 0.1, drawn(3, H, K, V) * 0.1
    rows_RW[:, -H:] = -rows_RW[:, -H:].abs()  # logarithms of decays
    rows_RW[NULL_SLOT], states_SHKV[NULL_STATE] = 0, 0
    paths = with_chains(paths_of(kind, chains, tokens, above)).to(device)

    def run(impl: str) -> Tensor:
        given = x_TF, weights, rows_RW, states_SHKV
        if impl == "reference":
            wide = (y.double() if isinstance(y, Tensor) else y for y in weights)
            given = x_TF.double(), type(weights)(*wide), rows_RW.double(), states_SHKV.double()  # type: ignore[arg-type]
        operator: Callable[..., Tensor] = scan if isinstance(kind, ScanKind) else delta_net
        return operator(*given, paths, impl=impl)

    return run


def paths_of(kind: DeltaKind, chains: int, tokens: int, above: int) -> DeltaPaths:
    """The paths of such a pass: beams read state 1, a prompt begins with none and leaves its own in state 2."""
    columns: list[list[Any]] = [[], [], [], [], []]
    for t in range(chains * tokens):
        p = above + t % tokens
        reached = [above - 1 - q if q >= above else FIRST_ROW + q for q in range(p - 1, -1, -1)]
        path = [at - t // tokens * tokens if at < 0 else at for at in reached[: max(p % BLOCK, kind.taps - 1)]]
        base = 1 if above else 2 if p >= BLOCK else NULL_STATE
        path += [NULL_SLOT] * (kind.reach - len(path))
        row = TRASH_SLOT, path, p % BLOCK, base, 2 if p % BLOCK == BLOCK - 1 else NULL_STATE
        for column, each in zip(columns, row, strict=True):
            column.append(each)
    rows_T, paths_TN, lengths_T, bases_T, folds_T = (torch.tensor(column, dtype=torch.int64) for column in columns)
    return DeltaPaths(rows_T, paths_TN, lengths_T, bases_T, folds_T)

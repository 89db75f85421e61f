"""The stage of recurrent layers: gated delta nets and selective scans, over beams and over a prompt."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.channel_scan import ChannelWeights, channel_conv, channel_scan
from kernels.delta_net import DeltaWeights, delta_net
from kernels.delta_net.chains import with_chains
from kernels.layout import NULL_SLOT, NULL_STATE, TRASH_SLOT, ChannelKind, DeltaKind, DeltaPaths, ScanKind
from kernels.scan import ScanWeights, scan
from tools.bench import device as on_gpu
from tools.bench.gpu.setting import Found, Setting

LAYERS = {
    "gated delta net": DeltaKind(16, 32, 128, 128, 4),
    "decays by key": DeltaKind(32, 32, 128, 128, 4, key_decays=True),
    "Mamba-2": ScanKind(1, 48, 128, 64, 4),
    "Mamba": ChannelKind(1, 1, 16, 8192, 4),
}
PASSES = ((1, 1), (15, 1), (64, 1), (1, 2048))  # chains, and tokens of each
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
        "Shapes of Qwen3.5-9B (gated delta net), Kimi Linear (decays by key), Granite 4 Tiny (Mamba-2) and Falcon "
        "Mamba 7B; random weights and states in float32."
    )
    return Found(heading, rows, columns | {"us per token": "{each:us.2f}"}, STATES)


def walk(s: Setting, name: str, chains: int, tokens: int) -> dict[str, Any]:
    """One layer, over and over."""
    run = layer(LAYERS[name], chains, tokens, s.device)
    seconds = on_gpu.seconds_of(on_gpu.recorded([partial(run, "triton")] * 2), s.args.runs) / 2
    return {"layer": name, "chains": chains, "tokens": tokens, "seconds": seconds, "each": seconds / tokens}


def layer(kind: DeltaKind, chains: int, tokens: int, device: torch.device) -> Callable[[str], Tensor]:
    """A layer of random weights over random tokens, below others if each chain is one token, by an implementation."""
    (H, K, V), above = kind.state, kind.block // 2 if tokens == 1 else 0

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device)

    operator: Callable[..., Tensor]
    weights: DeltaWeights | ScanWeights | ChannelWeights
    taps_KC, beside, positive = drawn(kind.taps, kind.channels), (), kind.key_decays
    if isinstance(kind, ChannelKind):
        operator, beside, positive = by_channels, (1 + 2 * K, V), True
        rates_KC = -drawn(K, V).exp()
        weights = ChannelWeights(kind, 1, taps_KC, drawn(V), rates_KC, drawn(V), drawn(V), drawn(2 * K), 1e-6)
    elif isinstance(kind, ScanKind):
        operator, shift_C = scan, drawn(kind.channels)
        weights = ScanWeights(kind, taps_KC, shift_C, -drawn(H).exp(), drawn(H), drawn(H), drawn(H * V), 1e-6)
    else:
        operator = delta_net
        weights = DeltaWeights(kind, taps_KC, -drawn(H).exp(), drawn(kind.decays), drawn(V), 1e-6)
    inputs = tuple(drawn(chains * tokens, width).bfloat16() for width in (kind.width, *beside))
    rows_RW, states_SHKV = drawn(FIRST_ROW + above, kind.row) * 0.1, drawn(3, H, K, V) * 0.1
    last_RD = rows_RW[:, -(V if isinstance(kind, ChannelKind) else kind.decays) :]
    last_RD.copy_(last_RD.sigmoid() if positive else -last_RD.abs())  # steps or decays; logarithms of decays
    rows_RW[NULL_SLOT], states_SHKV[NULL_STATE] = 0, 0
    paths = with_chains(paths_of(kind, chains, tokens, above)).to(device)

    def run(impl: str) -> Tensor:
        given = [*inputs, weights, rows_RW, states_SHKV]
        if impl == "reference":
            wide = (y.double() if isinstance(y, Tensor) else y for y in weights)
            given = [x.double() if isinstance(x, Tensor) else type(weights)(*wide) for x in given]  # type: ignore[arg-type]
        return operator(*given, paths, impl=impl)

    return run


def by_channels(
    x_TF: Tensor, low_TL: Tensor, steps_TC: Tensor, weights: ChannelWeights, *given: Any, impl: str
) -> Tensor:
    """A convolution and a `channel_scan`, whose other inputs are not made of the convolution's here."""
    rows_RW, _, paths = given
    convolved_TC = channel_conv(x_TF, weights, rows_RW, paths, impl=impl)
    return channel_scan(x_TF, convolved_TC, low_TL, steps_TC, weights, *given, impl=impl)


def paths_of(kind: DeltaKind, chains: int, tokens: int, above: int) -> DeltaPaths:
    """The paths of such a pass: beams read state 1, a prompt begins with none and leaves its own in state 2."""
    columns: list[list[Any]] = [[], [], [], [], []]
    for t in range(chains * tokens):
        p = above + t % tokens
        reached = [above - 1 - q if q >= above else FIRST_ROW + q for q in range(p - 1, -1, -1)]
        path = [at - t // tokens * tokens if at < 0 else at for at in reached[: max(p % kind.block, kind.taps - 1)]]
        base = 1 if above else 2 if p >= kind.block else NULL_STATE
        path += [NULL_SLOT] * (kind.reach - len(path))
        row = TRASH_SLOT, path, p % kind.block, base, 2 if p % kind.block == kind.block - 1 else NULL_STATE
        for column, each in zip(columns, row, strict=True):
            column.append(each)
    rows_T, paths_TN, lengths_T, bases_T, folds_T = (torch.tensor(column, dtype=torch.int64) for column in columns)
    return DeltaPaths(rows_T, paths_TN, lengths_T, bases_T, folds_T)

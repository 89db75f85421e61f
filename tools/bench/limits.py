"""The bandwidth and product rate of a machine, and the least work of a search."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch

from kernels.layout import TreeLayout
from models.checkpoint.experts import EXPERT
from models.checkpoint.headers import Checkpoint
from models.errors import CheckpointError
from models.formats.linear import FORMATS
from tools.bench import device as on_gpu

BYTES = 1 << 28  # read to measure the bandwidth: more than any cache holds
GEMM = (512, 2048, 4096)  # rows, in, out
QUANTISED = ("int8", "int4")  # kinds of weights whose activations are in bfloat16


def best(work: Callable[[], object], runs: int = 5) -> float:
    """Seconds of the fastest run."""
    times = []
    for _ in range(runs + 1):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def read_bandwidth() -> float:
    """Bytes per second that all threads together read from memory."""
    x, y = torch.ones(2, BYTES // 8)  # a sum of one waits for its additions
    return BYTES / best(lambda: torch.dot(x, y), 20)


def copy_bandwidth() -> float:
    """Bytes per second of a copy in memory; read and written bytes are counted."""
    x = torch.ones(BYTES // 8)
    y = torch.empty_like(x)
    return BYTES / best(lambda: y.copy_(x))


@torch.inference_mode()
def gemm_rate(kind: str) -> float:
    """Operations per second of a large linear layer of the models: "float32", "bfloat16", "int8", "int4"."""
    rows, width, out = GEMM
    dtype = torch.bfloat16 if kind in QUANTISED else getattr(torch, kind)
    weight = torch.randn(out, width)
    x = torch.randn(rows, width).to(dtype)
    format = FORMATS[kind if kind in QUANTISED else "none"]
    layer = format([weight], dtype=dtype, device=x.device)
    return 2 * rows * width * out / best(lambda: layer(x))


def measure(device: torch.device, kinds: Iterable[str]) -> tuple[float, dict[str, float]]:
    """Bytes per second of memory, and operations per second of large products by dtype."""
    if device.type == "cpu":
        return max(read_bandwidth(), copy_bandwidth()), {kind: gemm_rate(kind) for kind in kinds}
    rates = {}
    for kind in kinds:
        x = torch.randn(8192, 8192, device=device).to(getattr(torch, kind))
        rates[kind] = 2 * 8192**3 / on_gpu.seconds_of(lambda x=x: x @ x, 20)
    return on_gpu.copy_bandwidth(20), rates


@dataclass(frozen=True)
class Work:
    """The size of a checkpoint's forward pass: elements of all matrices, of the head alone, and of attention."""

    matrices: int
    head: int
    attention: int  # layers x query heads x head size

    @staticmethod
    def of(checkpoint: Checkpoint) -> "Work":
        """Count every matrix except tables of embeddings, and the head even if it is tied to one.

        Raises:
            CheckpointError: a mixture of experts, whose bytes depend on what tokens choose.
        """
        if any(EXPERT in name for name in checkpoint.tensors):
            what = "limits of mixtures of experts are not known: their bytes depend on what tokens choose"
            raise CheckpointError(what, where=str(checkpoint.folder))
        shapes = {name: info.shape for name, info in checkpoint.tensors.items() if len(info.shape) == 2}
        tables = [name for name in shapes if any(word in name for word in ("embed", "wte", "wpe"))]
        config = checkpoint.config
        width = config.get("hidden_size") or config["n_embd"]
        layers = config.get("num_hidden_layers") or config["n_layer"]
        heads = config.get("num_attention_heads") or config["n_head"]
        head = config["vocab_size"] * width
        inner = sum(a * b for name, (a, b) in shapes.items() if name not in tables and "lm_head" not in name)
        return Work(inner + head, head, layers * heads * (config.get("head_dim") or width // heads))

    def step_seconds(self, beams: int, context: int, bytes: int, bandwidth: float, rate: float) -> float:
        """Lower bound of a step's time: its bytes moved once, or its operations.

        Args:
            beams: tokens evaluated.
            context: tokens that each of them sees.
            bytes: of the weights, and of the keys and values that are seen.
            bandwidth, rate: see above.
        """
        operations = 2 * beams * (self.matrices + 2 * context * self.attention)
        return max(bytes / bandwidth, operations / rate)

    def prompt_seconds(self, tokens: int, rate: float) -> float:
        """Lower bound of a prompt's time: its operations."""
        return 2 * tokens * (self.matrices - self.head + tokens * self.attention) / rate


def attention_work(
    layout: TreeLayout, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None = None
) -> tuple[int, int]:
    """The work of attention over a layout: bytes to move, each key and value that any token of a tree sees once, the
    queries and the output; and operations, those of the two products."""
    keys = pairs = 0
    mask_TW, seen_T = layout.branch_mask_TW(), layout.trunk_seen_T.long()
    oldest_T = torch.zeros_like(seen_T) if window is None else (layout.positions_T - window + 1).clamp(min=0)
    for r, (first, last) in enumerate(pairwise(layout.token_starts.tolist())):
        own = slice(first, last)
        trunk_T, visible_TW = (seen_T[own] - oldest_T[own]).clamp(min=0), mask_TW[own]
        if window is not None:
            visible_TW = visible_TW & (layout.branch_positions_RW[r] >= oldest_T[own].unsqueeze(1))
        reads = trunk_T > 0  # ranges that overlap: of neighbours in a prompt, or all up to the trunk's end
        if reads.any():
            keys += int(seen_T[own][reads].max() - oldest_T[own][reads].min())
        keys += int(visible_TW.any(0).sum())
        pairs += int(trunk_T.sum() + visible_TW.sum())
    rows = 2 * keys * kv_heads + 2 * len(seen_T) * heads
    return rows * head_dim * dtype.itemsize, 4 * pairs * heads * head_dim

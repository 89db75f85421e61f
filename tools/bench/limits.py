"""What a processor can do at best, and the least that a search must do on it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from models.checkpoint import Checkpoint
from models.int8 import Int8Linear
from models.linear import Linear

BYTES = 1 << 28  # read to measure the bandwidth: more than any cache holds
GEMM = (512, 2048, 4096)  # rows, in, out


def best(work: Callable[[], object], runs: int = 5) -> float:
    """Seconds of the quickest run."""
    times = []
    for _ in range(runs + 1):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def read_bandwidth() -> float:
    """Bytes per second that all threads together read from memory."""
    x = torch.ones(BYTES // 4)
    return BYTES / best(lambda: x.sum())


@torch.inference_mode()
def gemm_rate(kind: str) -> float:
    """Operations per second of a large linear layer, as the models have it: "float32", "bfloat16", "int8"."""
    rows, width, out = GEMM
    dtype = torch.bfloat16 if kind == "int8" else getattr(torch, kind)
    weight = torch.randn(out, width)
    x = torch.randn(rows, width).to(dtype)
    layer = Int8Linear([weight], dtype=dtype) if kind == "int8" else Linear([weight], dtype=dtype, device=x.device)
    return 2 * rows * width * out / best(lambda: layer(x))


@dataclass(frozen=True)
class Work:
    """What a checkpoint's forward pass is made of: elements of its matrices, of the head alone, and the attention."""

    matrices: int
    head: int
    attention: int  # layers x query heads x head size

    @staticmethod
    def of(checkpoint: Checkpoint) -> "Work":
        """Count a checkpoint's: every matrix but tables of embeddings, and the head even if it is one of those."""
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
        """The least that a step can take: its bytes once, or its operations.

        Args:
            beams: tokens evaluated.
            context: tokens that each of them sees.
            bytes: of the weights, and of the keys and values that are seen.
            bandwidth, rate: see above.
        """
        operations = 2 * beams * (self.matrices + 2 * context * self.attention)
        return max(bytes / bandwidth, operations / rate)

    def prompt_seconds(self, tokens: int, rate: float) -> float:
        """The least that a prompt can take: its operations."""
        return 2 * tokens * (self.matrices - self.head + tokens * self.attention) / rate

"""Random weights of golden checkpoints."""

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch


def draw_all(
    shapes: Mapping[str, tuple[int, ...]],
    seed: int,
    *,
    embeddings: Sequence[str],
    head: str,
    outputs: Sequence[str] = (),
    transposed: Sequence[str] = (),
) -> dict[str, torch.Tensor]:
    """Random float32 tensors with activations of unit scale and logits as peaked as a trained model's.

    Uniform; each depends on the seed and its name only. Deviations: norms in [0.5, 1.5], biases 0.2, matrices
    1 / sqrt(fan-in), the head (tied: the embedding, [V, E]) sqrt(2 ln V / E).

    Args:
        embeddings: names of tables with one row per token or position (deviation 1).
        head: the matrix that gives logits or scores.
        outputs: ends of the names of matrices that write to the residual stream: twice as large.
        transposed: ends of the names of matrices stored [in, out].
    """
    drawn = {}
    for name, shape in shapes.items():
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        unit = torch.rand(shape, generator=generator) - 0.5
        if not shape:
            drawn[name] = (unit + 1) * (-0.01 if name.endswith(".eps") else 1)
            continue
        fan_in = shape[0] if name.endswith(tuple(transposed)) else shape[-1]
        vector = max(shape) == math.prod(shape)
        if name.endswith((".bias", "_bias")):
            deviation = 0.2
        elif len(shape) == 1 or (vector and name.endswith(".A_log")):
            drawn[name] = 4 * unit - 3 if name.endswith(".A_log") else unit + 1  # states that remember 3 to 150 tokens
            continue
        elif name == head:
            deviation = math.sqrt(2 * math.log(max(shape[0], 8)) / shape[1])
        else:
            deviation = 1.0 if name in embeddings else (2 if name.endswith(tuple(outputs)) else 1) / math.sqrt(fan_in)
        drawn[name] = unit * deviation * math.sqrt(12)
    return drawn

"""A mixture whose experts are large beside a window of pages, and what its tests compare."""

import torch

from engine.load.options import LoadOptions
from tests.models.copies import changed

PROMPTS = [[3 + (7 * i + j) % 90 for j in range(3)] for i in range(16)]
COUNT, INNER, WIDTH = 16, 4096, 24
MB = 1 << 20


def drawn(tensors):
    """Experts of 1 MB each, so that windows of pages are a small part of them."""
    random = torch.Generator().manual_seed(0)
    sizes = {"experts.gate_up_proj": (COUNT, 2 * INNER, WIDTH), "experts.down_proj": (COUNT, WIDTH, INNER)}
    sizes["mlp.gate.weight"] = (COUNT, WIDTH)

    def tensor(name, x):
        size = next((size for end, size in sizes.items() if name.endswith(end)), None)
        return x if size is None else (torch.randn(size, generator=random) / size[-1] ** 0.5).to(x.dtype)

    return {name: tensor(name, x) for name, x in tensors.items()}


def large(folder):
    """A checkpoint of such a mixture in a folder."""
    return changed(folder, "experts/qwen3", {"num_experts": COUNT, "moe_intermediate_size": INNER}, drawn)


def options(folder, **more):
    return LoadOptions(folder, **{"dtype": "float32", "quant": "none", "device": "cpu"} | more)


def logits(engine):
    return torch.stack([engine.logits(prompt) for prompt in PROMPTS])

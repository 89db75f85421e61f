"""Multi-head latent attention (DeepSeek-V2, 2024), see `kernels.latent`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kernels.latent import LatentHeads, absorb, absorb_and_write, expand
from kernels.latent import reference as plain
from kernels.layout import LatentSizes
from kernels.stack.calls import Call, Heads
from models.checkpoint.weights import Weights
from models.config import Config, Latent
from models.names import Names
from models.norms import Norm

EPSILON = 1e-6  # epsilon of the norms of latents, independent of that of other norms


def stacks(device: torch.device) -> bool:
    """Whether a device keeps the matrices of all heads in one float tensor: all do but a CPU, where they are packed."""
    return device.type != "cpu"


class LatentAttention(nn.Module):
    """Attention whose keys and values are computed from a latent of each token, which is all that the cache stores.

    Attributes:
        heads: the weights of `kernels.latent`.
    """

    def __init__(self, c: Config, names: Names, weights: Weights, latent: Latent, index: int):
        super().__init__()
        layer, self.low = names.layer.format(index), latent.query_rank > 0
        if latent.query_rank:
            self.q_low = weights.linear(layer + names.q_low, bias=c.attention_bias)
            self.q_norm = Norm(c, weights, layer + names.q_low_norm, eps=EPSILON)
        self.growth = None
        if latent.growth is not None:
            self.growth, size = c.tables()[latent.growth], latent.growth.head_dim
            self.slices = Heads(0, latent.query_rank // size, 0, 0, size, 1)
        self.q = weights.linear(layer + (names.q_high if latent.query_rank else names.qkv[0]))
        self.latent = weights.linear(layer + names.latent, bias=c.attention_bias)
        self.out = weights.linear(layer + names.out, bias=c.attention_bias)
        self.gate = weights.linear(layer + names.head_gate) if c.head_gates else None
        norm_C = weights.vector(f"{layer}{names.latent_norm}.weight")
        made = [layer + name for name in names.latent_high(latent)]
        sizes = LatentSizes(
            c.heads, latent.plain, latent.rotated, latent.rank, latent.value, EPSILON, latent.interleaved
        )
        if stacks(weights.device):
            self.heads = LatentHeads.of_stacked(sizes, norm_C, *weights.stacked_heads(made, c.heads, latent.plain))
        else:
            keys, values = weights.heads(made, c.heads, latent.plain, latent.value)
            matrices = [linear.matrix for linear in (*keys, *values) if linear.matrix is not None]
            whole = matrices if len(matrices) == 2 * c.heads else None
            self.heads = LatentHeads(sizes, norm_C, keys, values, whole)
            self.linears = nn.ModuleList([*keys, *values])  # type: ignore[arg-type]
        self.table, self.scale, self.index = c.table(index), c.scale(index), index
        self.shape, self.gated = Heads(0, c.heads, 1, 0, sizes.width, 1), Heads(0, c.heads, 0, 0, latent.value, 1)

    @property
    def ready(self) -> bool:
        """Whether C++ multiplies the matrices of heads."""
        return self.heads.matrices is not None

    def calls(self, source: str) -> Iterator[Call]:
        """Yield the calls from the register `source` to "out"."""
        low = "low" if self.growth is None else "heads"  # which a rotation reads and writes
        if self.low:
            yield Call("product", source, low, matrix=self.q_low)
            yield Call("norm", low, low, norm=self.q_norm)
        if self.growth is not None:
            yield Call("rotate", "heads", "heads", table=self.growth, heads=self.slices)
        yield Call("product", low if self.low else source, "queries", matrix=self.q)
        yield Call("product", source, "latent", matrix=self.latent)
        yield Call("absorb", "queries", "heads", latent=self)
        if self.table is not None:
            yield Call("rotate", "heads", "heads", table=self.table, heads=self.shape)
        cache: dict[str, Any] = {"table": self.index, "heads": self.shape}
        yield Call("write", "heads", **cache)
        yield Call("attend", "heads", "mixed", scale=self.scale, **cache)
        yield Call("expand", "mixed", "values", latent=self)
        if self.gate is not None:
            yield Call("product", source, "gates", matrix=self.gate)
            yield Call("gate", "gates", "values", heads=self.gated)
        yield Call("product", "values", "out", matrix=self.out)

    def absorb(self, queries_TF: Tensor, latent_TF: Tensor, impl: str) -> Tensor:
        """See `kernels.latent.absorb`; `impl` is the pass's."""
        run = absorb if impl == "cpp" and self.ready else plain.absorb
        return run(queries_TF, latent_TF, self.heads)

    def absorb_and_write(
        self, k_GSD: Tensor, queries_TF: Tensor, latent_TF: Tensor, angles: tuple[Tensor, ...], slots_T: Tensor
    ) -> Tensor:
        """See `kernels.latent.absorb_and_write`, on a GPU."""
        return absorb_and_write(k_GSD, queries_TF, latent_TF, self.heads, angles, slots_T, impl="triton")

    def expand(self, mixed_TF: Tensor, impl: str) -> Tensor:
        """See `kernels.latent.expand`; `impl` is the pass's."""
        return (expand if impl == "cpp" and self.ready else plain.expand)(mixed_TF, self.heads)

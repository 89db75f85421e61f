"""Blocks of attention and an MLP that several layers share, see `Config.shared`."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from torch import nn

from kernels.stack.calls import Call
from models.checkpoint.weights import Weights
from models.config import Config, SharedBlocks
from models.layers import MLP, Attention
from models.names import Names
from models.norms import Norm


class SharedBlock(nn.Module):
    """The part of a block that all its uses have in common."""

    def __init__(self, c: Config, names: Names, weights: Weights, owner: int):
        super().__init__()
        layer = names.layer.format(owner)
        self.norm, self.mlp_norm = (Norm(c, weights, layer + name) for name in (names.block_norm, names.mlp_norm))
        self.attention, self.mlp = Attention(c, names, weights, owner), MLP(c, names, weights, owner)


class BlockUse(nn.Module):
    """The use of a block by a layer, which has keys and values, a matrix and pairs of narrow matrices of its own."""

    def __init__(self, c: Config, names: Names, weights: Weights, shared: SharedBlocks, block: SharedBlock, index: int):
        super().__init__()
        layer, use = names.layer.format(index), shared.use(index)

        def pairs(*each: str) -> nn.ModuleList:
            begins = [layer + name.format(use) for name in each]
            return nn.ModuleList(nn.ModuleList(map(weights.linear, (f"{x}.0", f"{x}.1"))) for x in begins)  # type: ignore[arg-type]

        self.block, self.index, self.width = block, index, c.width
        self.out = weights.linear(layer + names.block_out)
        self.qkv = pairs(*(names.block_qkv if shared.adapted else ()))
        self.up = pairs(names.block_up)
        self.outs = [c.heads * c.head_dim, c.kv_heads * c.head_dim, 0]

    def calls(self) -> Iterator[Call]:
        """The calls from the stream and "inputs", the embedding, to "out": the sum of the stream and the output."""
        yield Call("join", "stream", "values")
        yield Call("join", "inputs", "values", table=self.width)
        yield Call("norm", "values", "read", norm=self.block.norm)
        for call in self._with_pairs(self.block.attention.calls("read"), self.qkv):
            yield call._replace(table=self.index) if call.code in ("write", "attend") else call
        yield Call("norm", "out", "read", norm=self.block.mlp_norm)
        yield from self._with_pairs(self.block.mlp.calls("read"), self.up)
        yield Call("product", "read", "out", matrix=self.out)
        yield Call("add", "stream", "out")

    def _with_pairs(self, calls: Iterable[Call], pairs: nn.ModuleList) -> Iterator[Call]:
        """Yield calls of which the first is a product, and add to its result the outputs of pairs side by side."""
        product, *rest = calls
        yield product
        width = 0
        for (first, last), outs in zip(cast(Sequence[Any], pairs), self.outs, strict=False):
            yield Call("product", product.source, "low", matrix=first)
            yield Call("product", "low", "steps" if width else "values", matrix=last)
            if width:
                yield Call("join", "steps", "values", table=width)
            width += outs
        if width:
            yield Call("add", "values", product.target)
        yield from rest


def uses_of_blocks(c: Config, names: Names, weights: Weights, shared: SharedBlocks) -> dict[int, BlockUse]:
    """Return the uses of blocks by layer."""
    used = sorted({owner for owner in shared.owners if owner is not None})
    blocks = {owner: SharedBlock(c, names, weights, owner) for owner in used}
    return {
        i: BlockUse(c, names, weights, shared, blocks[owner], i)
        for i, owner in enumerate(shared.owners)
        if owner is not None
    }

"""ModelShape: the sizes of a model that the engine needs, of its caches above all."""

import math
from collections import Counter
from dataclasses import dataclass

import torch

from kernels.layout import CacheKind, DeltaKind
from models.config import Config


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that the engine needs.

    Args:
        layers, kv_heads, head_dim, vocab_size: dimensions.
        max_positions: the longest sequence for which the checkpoint was made; None: no limit.
        steady_length: keys of sequences longer than this depend on the length of the sequence when they were computed,
            so a longer prompt cannot reuse them; None: they never do.
        scores: whether the model has a scalar head, so that it scores texts instead of generating.
        switch_length: sequences longer than this use other rotary factors throughout (longrope), so a path that grows
            past it must be evaluated again; None: they never do.
        kept: what each layer keeps of a token, if some layer keeps nothing (None) or something other than keys and
            values of `kv_heads` heads of `head_dim`; empty: none does. Recurrent layers are all of one kind, and so are
            those whose keys are their values. If recurrent layers have attention beside, an entry per layer follows
            with what they keep as such (`Config.place`).
        keys_from: see `Uneven`; empty: each layer reads its own. A layer that reads those of another keeps nothing
            itself.
        ancestors: the number of a token's latest ancestors that short convolutions read.
        output_width: width of the rows that the head reads.
    """

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None
    steady_length: int | None = None
    scores: bool = False
    switch_length: int | None = None
    kept: tuple[CacheKind | DeltaKind | None, ...] = ()
    keys_from: tuple[int, ...] = ()
    ancestors: int = 0
    output_width: int = 0

    @staticmethod
    def of(c: Config) -> "ModelShape":
        """Return the shape of a configuration."""
        turned = [rope for rope in c.tables() if c.latent is None or rope != c.latent.growth]
        reach = min((rope.reach(c.max_positions) for rope in turned), default=c.max_positions)
        reach = min(reach, c.selected or reach)
        steady = min((rope.steady_length for rope in c.tables() if rope.steady_length is not None), default=None)
        switch = next((rope.switch_length for rope in c.tables() if rope.switch_length is not None), None)
        kept = tuple(map(c.kept, range(c.layers)))
        if c.recurrent is not None and c.beside:
            kept += tuple(c.recurrent.kind if c.recurs(i) else None for i in range(c.layers))
        if not any(isinstance(each, CacheKind) and each.pair for each in kept):
            kept += (CacheKind(c.kv_heads, c.head_dim),)  # pages need a size: nothing writes these keys
        kept = kept if len({*kept}) > 1 or c.latent is not None or c.uneven else ()
        more = {
            "kept": kept,
            "keys_from": c.uneven.keys_from if c.uneven else (),
            "ancestors": max(c.convs.taps) - 1 if c.convs else 0,
            "output_width": c.embedding_width or c.width,
        }
        return ModelShape(c.layers, c.kv_heads, c.head_dim, c.vocab_size, reach, steady, c.scores, switch, **more)

    def keeps(self, layer: int) -> bool:
        """Whether a layer keeps anything of its own."""
        return not self.keys_from or self.keys_from[layer] == layer

    @property
    def groups(self) -> dict[CacheKind, int]:
        """The number of layers that keep each kind; keys and values of `kv_heads` heads of `head_dim` come first."""
        kept = Counter(kept for i, kept in enumerate(self.kept) if isinstance(kept, CacheKind) and self.keeps(i))
        shared = any(kind.shared for kind in kept)
        first = CacheKind(self.kv_heads, self.head_dim, shared=shared)
        return {first: 0} | kept if self.kept else {first: self.layers}

    @property
    def delta(self) -> DeltaKind | None:
        """The kind of the recurrent layers; None: the model has none."""
        return next((kept for kept in self.kept if isinstance(kept, DeltaKind)), None)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all recurrent layers, which are float32 in every model."""
        return 0 if self.delta is None else 4 * self.delta.row * self.kept.count(self.delta)

    @property
    def state_bytes(self) -> int:
        """Bytes of a state in all recurrent layers."""
        return 0 if self.delta is None else 4 * math.prod(self.delta.state) * self.kept.count(self.delta)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token's slot in all layers, in a cache of this dtype."""
        return sum(layers * kept.bytes(dtype) for kept, layers in self.groups.items())

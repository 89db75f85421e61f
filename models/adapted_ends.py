"""Adapters on the two ends of a model: they change embedding rows and logits.

Shape legend: T tokens of a pass, N asked rows, E width, V vocabulary, R rank.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.low_rank import Adapters, LowRank
from kernels.low_rank import low_rank as add_low_rank
from models.adapters import Adapter, Fitted, low_rank
from models.config import Config
from models.formats.floats import FloatLinear, has_kernels
from models.formats.linear import Linear, is_small
from models.names import HEAD, Names


class AdaptedEnds:
    """The embeddings and heads of adapters, by their numbers in a pass, from 1 on.

    Args:
        adapters, fitted: the model's adapters, and the same by the model's names.
        names, c, head: the model's names, configuration and head.
        dtype, device: the dtype and device of the computation.

    Attributes:
        heads: the numbers of adapters that change logits.

    Raises:
        CheckpointError: values are not finite.
    """

    def __init__(
        self,
        adapters: Sequence[Adapter],
        fitted: Sequence[Fitted],
        names: Names,
        c: Config,
        head: Linear,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._tables: dict[int, Tensor] = {}  # [V, E]
        self._added: dict[int, tuple[Tensor, FloatLinear]] = {}  # added to embedding rows: [V, R]; R to E, scaled
        self._heads: dict[int, FloatLinear] = {}
        packed, small = has_kernels(dtype, device), is_small(head, dtype)
        wide = torch.promote_types(dtype, torch.float32)
        outs = {HEAD: (c.vocab_size, c.embedding_width or c.width)}
        each = list[LowRank | None]()
        for number, (adapter, found) in enumerate(zip(adapters, fitted, strict=True), 1):
            if tensor := found.whole.get(f"{names.embedding}.weight"):
                self._tables[number] = adapter.read(tensor).to(device, copy=True)
            if changed := found.modules.get(names.embedding):
                factors = adapter.factors(0, changed, dtype, small=small)
                b_ER = factors.b_OR.to(wide) * factors.scale
                b = FloatLinear([b_ER], None, dtype=wide, device=device)
                self._added[number] = factors.a_RI.T.contiguous().to(device), b
            if tensor := found.whole.get(f"{HEAD}.weight"):
                own = found.whole.get(f"{HEAD}.bias")
                bias = [adapter.read(own)] if own else None if head.bias is None else [head.bias]
                self._heads[number] = FloatLinear([adapter.read(tensor)], bias, dtype=dtype, device=device)
            each.append(low_rank([HEAD], adapter, found, outs, dtype, device, small=small, packed=packed))
        self._products = Adapters(*outs[HEAD], each) if any(each) else None
        self._impl = "cpp" if packed else "torch"
        self.heads = {*self._heads, *(number for number, product in enumerate(each, 1) if product)}

    def embed(self, x_TE: Tensor, tokens_T: Tensor, adapters_T: Tensor) -> Tensor:
        """Return rows of the base's embedding, changed by the adapters of their tokens.

        Args:
            tokens_T, adapters_T: int64; the adapters' numbers are on the host.
        """
        numbers = {*adapters_T.unique().tolist()} & (self._tables.keys() | self._added.keys())
        for number in sorted(numbers):
            row_N = (adapters_T == number).nonzero().squeeze(1).to(x_TE.device)
            token_N, rows_NE = tokens_T[row_N], x_TE[row_N]
            if number in self._tables:
                rows_NE = F.embedding(token_N, self._tables[number]).to(x_TE.dtype)
            if number in self._added:
                a_VR, b = self._added[number]
                wide = torch.promote_types(x_TE.dtype, torch.float32)
                rows_NE = (rows_NE.to(wide) + b(F.embedding(token_N, a_VR).to(wide))).to(x_TE.dtype)
            x_TE = x_TE.index_copy(0, row_N, rows_NE)
        return x_TE

    def logits(self, rows_NE: Tensor, numbers: Sequence[int], head: Linear) -> Tensor:
        """Return logits [N, V] of rows, before the divisor and the cap of the model.

        Args:
            rows_NE: the rows that the head reads.
            numbers: the adapter's number of each row; 0: no adapter.
            head: the base's head.
        """
        own = {*numbers} & self._heads.keys()
        first: Linear = self._heads[min(own)] if len(own) == 1 == len({*numbers}) else head
        logits_NV = first(rows_NE)
        number_N = torch.tensor(numbers)
        for number in sorted(own) if first is head else ():
            row_N = (number_N == number).nonzero().squeeze(1).to(rows_NE.device)
            logits_NV[row_N] = self._heads[number](rows_NE[row_N])
        if self._products is not None:
            add_low_rank(logits_NV, rows_NE.contiguous(), self._products, number_N, impl=self._impl)
        return logits_NV

"""Embeddings: one vector for a text, pooled from the hidden rows of its tokens."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.contract import Evaluate, Output, Search, SearchGenerator, SearchResult, Task
from engine.errors import NumericsError
from engine.words import LAST, MEAN


@dataclass
class PooledRows:
    """Pools hidden rows, keeping only what the pooling needs: their sum, or the latest row.

    Args:
        pooling: one of `engine.words.POOLINGS`.

    Attributes:
        kept_E: the sum or the latest row, float64, on the rows' device.
        count: number of rows added.
    """

    pooling: str
    kept_E: Tensor = field(default_factory=lambda: torch.empty(0))
    count: int = 0

    def add(self, rows_TE: Tensor) -> None:
        """Add rows, in the order of their tokens."""
        if self.pooling == MEAN:
            sum_E = rows_TE.sum(0, dtype=torch.float64)
            self.kept_E = self.kept_E + sum_E if self.count else sum_E
        else:
            self.kept_E = rows_TE[-1].to(torch.float64, copy=True)
        self.count += len(rows_TE)

    def vector(self) -> Tensor:
        """The pooled row, float64 [E], on the CPU."""
        kept_E = self.kept_E.cpu()
        return kept_E / self.count if self.pooling == MEAN else kept_E


@dataclass(frozen=True)
class TextVector(Search):
    """A vector for the prompt; it generates nothing.

    For a mean all tokens are evaluated, so its request must neither use nor leave cached prefixes.

    Args:
        pooling: "mean" of the hidden rows of all tokens, or the row of the "last" one; after the model's final norm.
        normalize: divide the vector by its length.
        dimensions: number of first elements of the vector that are kept, before it is normalised; None: all.
    """

    pooling: str = MEAN
    normalize: bool = True
    dimensions: int | None = None

    def run(self, task: Task) -> SearchGenerator:
        """See `Search`. Raises NumericsError: the vector has NaN or Inf."""
        rows = PooledRows(self.pooling)
        yield Evaluate(task.tree, [task.tree.root], hidden=rows.add)
        assert self.pooling == LAST or rows.count == task.tree.prompt_length, "a mean needs the rows of all tokens"
        vector_E = rows.vector()[: self.dimensions]
        if not torch.isfinite(vector_E).all():
            remedy = "try --dtype float32, or check the weights"
            raise NumericsError("the model computed NaN or Inf", where="in the embedding of a text", remedy=remedy)
        if self.normalize:
            vector_E = torch.nn.functional.normalize(vector_E, dim=0)
        return SearchResult([Output([], None, None, "length")], embedding=vector_E.float())

    def slots(self, prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
        return prompt_tokens, prompt_tokens

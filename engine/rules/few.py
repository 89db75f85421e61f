"""Log-probabilities of the few tokens that a constraint allows, without rows over the vocabulary."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.rules.constraint import Allowed, joined
from kernels.rows import log_softmax

ROWS = 64  # rows over the vocabulary at a time
HEAD_SHARE = 4  # the head is evaluated for some tokens alone if they are less than this part of the vocabulary


class Few(NamedTuple):
    """The allowed tokens of some rows, all of them listed; and whether the log-probabilities of a row add up to 1."""

    allowed: Allowed
    renormalise: bool


class Head:
    """The head of a model, for few tokens; it keeps the weight rows of the latest tokens.

    Args:
        model: the model, with `logits` and perhaps a `head`.
        vocab_size, impl: see `Runner`.
    """

    def __init__(self, model: Any, vocab_size: int, impl: str):
        self.model, self.vocab_size, self.impl = model, vocab_size, impl
        self._union = torch.empty(0, dtype=torch.int64)
        self._rows: Any = None

    def logps(self, hidden_NE: Tensor, parts: Sequence[Few]) -> tuple[list[Tensor], list[bool]]:
        """The log-probabilities of the tokens of each part, float32, and for each row whether its logits were finite.

        Args:
            hidden_NE: the hidden rows of all parts, on a CPU.
        """
        every = joined([part.allowed for part in parts])
        token_M, row_M = every.token_M, every.row_M
        if all(part.renormalise for part in parts) and (rows := self._rows_of(token_M.unique())) is not None:
            logits_NU = self.model.logits(hidden_NE, rows).float()
            found_M = logits_NU[row_M, torch.searchsorted(self._union, token_M)]
            finite_N = torch.isfinite(logits_NU.sum(1))
        else:
            normalise_N = torch.tensor([part.renormalise for part in parts for _ in range(len(part.allowed))])
            found_M, finite_N = self._of_all(hidden_NE, row_M, token_M, normalise_N)
        values, sizes = [], [len(allowed.token_M) for allowed, _ in parts]
        for (allowed, renormalise), value_M in zip(parts, found_M.split(sizes), strict=True):
            values.append(normalised(value_M, allowed.row_M, len(allowed)) if renormalise else value_M)
        return values, finite_N.tolist()

    def _rows_of(self, union_U: Tensor) -> Any:
        """The head's rows of these tokens; None if all are to be evaluated."""
        head = getattr(self.model, "head", None)
        if head is None or not 0 < len(union_U) * HEAD_SHARE < self.vocab_size:
            return None
        if self._rows is None or not union_U.equal(self._union):
            self._union, self._rows = union_U, head.rows(union_U)
        return self._rows

    def _of_all(self, hidden_NE: Tensor, row_M: Tensor, token_M: Tensor, normalise_N: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of rows to be normalised and log-probabilities of others, from whole rows, a few rows at a time."""
        found, finite = [], []
        for first in range(0, len(hidden_NE), ROWS):
            some_NE = hidden_NE[first : first + ROWS]
            logits_NV = self.model.logits(some_NE)
            logp_NV, finite_N, _ = log_softmax(logits_NV, self.vocab_size, impl=self.impl)
            start, end = torch.searchsorted(row_M, torch.tensor([first, first + len(some_NE)])).tolist()
            place = row_M[start:end] - first, token_M[start:end]
            found.append(torch.where(normalise_N[row_M[start:end]], logits_NV[place].float(), logp_NV[place]))
            finite.append(finite_N)
        return torch.cat(found), torch.cat(finite)


def normalised(logit_M: Tensor, row_M: Tensor, rows: int) -> Tensor:
    """Logits minus the log-sum-exp of their row."""
    top_N = torch.full((rows,), -math.inf).scatter_reduce_(0, row_M, logit_M, "amax")
    sum_N = torch.zeros(rows).index_add_(0, row_M, (logit_M - top_N[row_M]).exp())
    return logit_M - (top_N + sum_N.log())[row_M]

"""The next tokens of plain decoding after nodes: the most probable ones, or keyed draws."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.cache.tree import TokenTree
from engine.contract import Read
from engine.contract.sampling import Warp


class Picks:
    """The token that plain decoding takes after each row of an answer.

    On a CPU it is found when `token` is called. On a GPU, where every read makes the host wait, the tokens after all
    rows come with the answer.

    Args:
        warp, seed: determine the keyed draws; a warp of None means greedy decoding.
        ahead: whether the tokens come with the answer.
    """

    def __init__(self, warp: Warp | None, seed: int, ahead: bool):
        self.warp, self.seed, self.ahead = warp, seed, ahead
        self._logp_NV = torch.empty(0, 0)
        self._found: list[list[float]] = []  # tokens and their log-probabilities

    def read(self, tree: TokenTree, nodes: Iterable[int], read: Read | None) -> Read | None:
        """Return an `Evaluate.read` for these nodes that reads the picks in addition to the numbers of `read`."""
        if not self.ahead:
            return read
        positions = [tree.position(node) + 1 for node in nodes]

        def both(logp_NV: Tensor, peaks_NB: Tensor | None) -> Tensor:
            token_N = self._tokens(logp_NV, positions)
            logp_N = logp_NV.gather(1, token_N.unsqueeze(1))[:, 0]
            first = [] if read is None else [read(logp_NV, peaks_NB)]
            return torch.cat([*first, token_N.double(), logp_N.double()])

        return both

    def take(self, logp_NV: Tensor, numbers: Tensor | None) -> Tensor | None:
        """Store the picks of an answer, and return the numbers of the other `read` function."""
        self._logp_NV = logp_NV
        if not self.ahead or numbers is None:
            return numbers
        own = len(numbers) - 2 * len(logp_NV)
        self._found = numbers[own:].view(2, -1).tolist()
        return numbers[:own]

    def token(self, row: int, position: int) -> int:
        """The token after a row."""
        if self.ahead:
            return int(self._found[0][row])
        return int(self._tokens(self._logp_NV[row : row + 1], [position]))

    def logprob(self, row: int, token: int) -> float:
        """The log-probability of a token that `token` returned."""
        return self._found[1][row] if self.ahead else float(self._logp_NV[row, token])

    def _tokens(self, logp_NV: Tensor, positions: Sequence[int]) -> Tensor:
        if self.warp is None:
            return logp_NV.argmax(-1)
        return self.warp.draws(logp_NV, self.seed, [0] * len(logp_NV), positions)

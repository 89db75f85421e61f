"""Drafts by a draft head: a decoder layer that reads the model's rows (`models.draft_heads`).

A request's tree in the head's cache has its text without the first token: its token i is the text's token i + 1, which
the head reads with the model's row of token i. The rows come from the passes of the model. A token that was read with
the head's own row, because the model had none yet, is read again with the model's. If the model has no row because it
found a prefix in its cache, zeros stand in; usually the head has that prefix in its own cache, except for one token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.drafts.model import CANDIDATES, ModelDrafter, ModelDrafts, ReadPart
from engine.step.packing import Chunk
from engine.step.runner import Runner
from kernels.rows import log_softmax
from models.draft_heads import DraftHead


class HeadDrafts(ModelDrafts):
    """Drafts for one request. A prompt of a single token is not drafted.

    Args:
        drafter, salt, prompt: see `ModelDrafts`.
    """

    def __init__(self, drafter: "HeadDrafter", salt: str | None, prompt: Sequence[int]):
        super().__init__(drafter, salt, prompt[1:] or prompt)
        self._fits = self._fits and len(prompt) > 1 and prompt[0] < self._vocab
        self._of_text: dict[int, Tensor] = {}  # position in the text -> the model's row
        self._below: dict[int, Tensor] = {}  # node below the text -> the model's row of its token
        self.own: dict[int, Tensor] = {}  # node -> the head's row of its token
        self._guessed: list[int] = []  # nodes that were read with a row of the head's own

    def learn(self, tokens: Sequence[int]) -> None:
        end = self._end
        super().learn(tokens)
        if not self._fits or not tokens:
            return
        tree = self.tree
        for token in tokens:
            end = tree.children(end)[token]
            if (row_E := self._below.pop(end, None)) is not None:
                self._of_text[tree.position(end) + 1] = row_E
        kept = [end]
        for node in kept:
            kept += tree.children(node).values()
        self._forget_guesses()
        tree.keep(kept)
        self._below = {node: row_E for node, row_E in self._below.items() if tree.is_live(node)}

    def read_rows(self, first: int, paths: Sequence[Sequence[int]], rows_TE: Tensor) -> None:
        """Take rows of the model, in the form that the head reads.

        Args:
            first: the position in the text of the first rows.
            paths: tokens from the text's end to the nodes of the last rows.
        """
        if not self._fits:
            return
        text = len(rows_TE) - len(paths)
        self._of_text |= zip(range(first, first + text), rows_TE[:text], strict=True)
        for path, row_E in zip(paths, rows_TE[text:], strict=True):
            if max(path) < self._vocab:
                self._below[self.tree.grow_path(self._end, path)[-1]] = row_E

    def give_up(self) -> None:
        super().give_up()
        self._guessed, self._of_text, self._below, self.own = [], {}, {}, {}

    def follow(self, ahead: Sequence[Sequence[int]]) -> list[int]:
        self._forget_guesses()
        twins, tree = super().follow(ahead), self.tree
        self._below = {node: row_E for node, row_E in self._below.items() if tree.is_live(node)}
        self.own = {node: row_E for node, row_E in self.own.items() if node in self.rows}
        read = tree.trunk.cached - 1  # without the last token, which may be read once more
        self._of_text = {at: row_E for at, row_E in self._of_text.items() if at >= read}
        return twins

    def _forget_guesses(self) -> None:
        """Have the tokens that were read with the head's own rows read again."""
        tree = self.tree
        for node in self._guessed:
            if tree.is_live(node) and tree.is_evaluated(node):
                tree.forget_row(node)
        self._guessed = []
        self.rows = {node: row for node, row in self.rows.items() if tree.is_evaluated(node)}

    def given(self, chunk: Chunk, zeros_E: Tensor) -> list[Tensor]:
        """For each token of a chunk, the row [E] of the token before it; `zeros_E` if there is none."""
        tree, first, end = self.tree, chunk.cached - chunk.trunk_tokens, self.tree.position(self._end)
        found = [self._of_text.get(at, zeros_E) for at in range(first, chunk.cached)]
        for node in chunk.nodes:
            parent, at = tree.parent(node), tree.position(node)
            row_E = self._of_text.get(at) if at <= end + 1 else self._below.get(parent)
            if row_E is None and (row_E := self.own.get(parent)) is not None:
                self._guessed.append(node)
            found.append(zeros_E if row_E is None else row_E)
        return found


class HeadDrafter(ModelDrafter):
    """The drafter of an engine whose model has a head.

    Args:
        runner: the head's runner.
    """

    def __init__(self, runner: Runner):
        super().__init__(runner)
        assert isinstance(runner.model, DraftHead)
        self.head = runner.model
        self._zeros_E = torch.zeros(self.head.config.width, dtype=self.head.dtype)

    def open(self, salt: str | None, prompt: Sequence[int]) -> HeadDrafts:
        return HeadDrafts(self, salt, prompt)

    def _best(self, parts: Sequence[ReadPart], places: Sequence[int]) -> list[list[tuple[int, float]]]:
        runner, head, rows, owners = self.runner, self.head, list[Tensor](), list[tuple[HeadDrafts, int]]()
        for part in parts:
            request = part.forest.request
            assert isinstance(request, HeadDrafts)
            rows += request.given(part.chunk, self._zeros_E)
            owners += [(request, node) for node, _ in part.rows]
        p = runner.pack([part.chunk for part in parts])
        hidden_NE = head(torch.stack(rows), *p.arguments(runner.pool.cache))[[*places]]
        if not places:
            return []
        for (request, node), row_E in zip(owners, hidden_NE, strict=True):
            request.own[node] = row_E
        logits_NV = head.logits(hidden_NE, p.layout.rows_impl)
        logp_NV, finite_N, _ = log_softmax(logits_NV, logits_NV.shape[1], impl=runner.impl)
        best = logp_NV.topk(min(CANDIDATES, logits_NV.shape[1]))
        tokens = best.indices if head.tokens_V is None else head.tokens_V[best.indices]
        found = zip(tokens.tolist(), best.values.tolist(), finite_N.tolist(), strict=True)
        return [[*zip(*row, strict=True)] if finite else [] for *row, finite in found]

"""Trie beam search: beam search on one tree, exactly Hugging Face's result, no cache per beam.

"Efficient Beam Search for Large Language Models Using Trie-Based Decoding" (algorithms 1-3, errata mended), with the
candidates, end-of-sequence handling, length penalty and stopping rules of transformers 5. Comments cite the steps of
docs/algorithms.md. Pruning is immediate, as freeing a slot costs nothing.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import UsageError
from search.base import Output, Report, Search, SearchGenerator, SearchResult, Task, evaluate_best, register

EARLY_STOPPING = {False: "false", True: "true", "false": "false", "true": "true", "never": "never"}


class Finished(NamedTuple):
    """A hypothesis that ended: tokens and score on the host, no slots."""

    tokens: list[int]
    logprob: float
    score: float
    reason: str


@register("trie")
@dataclass(frozen=True)
class Trie(Search):
    """Beam search on a token trie: the exact result of Hugging Face beam search in a fraction of the memory.

    Args:
        beams: live hypotheses kept at every step (num_beams).
        length_penalty: a finished hypothesis scores logprob / length ** length_penalty.
        early_stopping: True stops when `beams` hypotheses have finished; False when the best live one could not beat
            the worst of them at its present length; "never" when it could not at any length.
        num_return_sequences: finished hypotheses to return, at most `beams`.
    """

    beams: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_return_sequences: int = 1

    def __post_init__(self):
        if not isinstance(self.beams, int) or isinstance(self.beams, bool) or self.beams < 1:
            raise UsageError(f"beams: expected an integer >= 1, got {self.beams!r}")
        if isinstance(self.length_penalty, bool) or not isinstance(self.length_penalty, int | float):
            raise UsageError(f"length_penalty: expected a number, got {self.length_penalty!r}")
        if not abs(self.length_penalty) <= 20:  # lengths to this power must stay within a float
            raise UsageError(f"length_penalty: expected a number from -20 to 20, got {self.length_penalty!r}")
        if not isinstance(self.early_stopping, bool | str) or self.early_stopping not in EARLY_STOPPING:
            raise UsageError(f"early_stopping: expected false, true or never, got {self.early_stopping!r}")
        n = self.num_return_sequences
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= self.beams:
            raise UsageError(f"num_return_sequences: expected an integer from 1 to beams ({self.beams}), got {n!r}")

    def run(self, task: Task) -> SearchGenerator:
        tree, mode = task.tree, EARLY_STOPPING[self.early_stopping]
        candidates = max(2, 1 + len(task.eos_token_ids)) * self.beams
        live, scores = [tree.root], [0.0]  # T1
        done: list[Finished] = []
        settled = 0  # tokens reported as certain
        for step in range(1, task.max_new_tokens + 1):
            sums, rows, tokens = yield from evaluate_best(tree, live, scores, candidates)  # T2
            reasons = [self._finish(task, live[r], token, step) for r, token in zip(rows, tokens, strict=True)]  # T3
            for rank, (s, row, token, reason) in enumerate(zip(sums, rows, tokens, reasons, strict=True)):  # T4
                if reason and rank < self.beams:
                    path = [*tree.path(live[row]), token]
                    done.append(Finished(path, s, s / step**self.length_penalty, reason))
            done = sorted(done, key=lambda finished: -finished.score)[: self.beams]  # stable: older first
            going = [i for i, reason in enumerate(reasons) if reason is None][: self.beams]  # T5
            if not going or (mode == "true" and len(done) == self.beams):  # T7
                break
            scores = [sums[i] for i in going]
            length = task.max_new_tokens if mode == "never" and self.length_penalty > 0 else step
            worst = done[-1].score if len(done) == self.beams else -math.inf
            if not scores[0] / length**self.length_penalty > worst:  # T6
                break
            if len(done) >= self.num_return_sequences and done[self.num_return_sequences - 1].score >= self._bound(
                scores[0], step + 1, task.max_new_tokens
            ):
                break  # nothing alive can change what is returned
            live = tree.grow([live[rows[i]] for i in going], [tokens[i] for i in going])  # T8
            tree.keep(live)
            certain = self._certain(tree.settled_from(settled), done[0].tokens[settled:] if done else None)
            best = done[0] if done and done[0].score >= scores[0] / step**self.length_penalty else None
            yield Report(
                certain,
                lambda best=best, node=live[0]: best.tokens if best else tree.path(node),
                beams=lambda done=done, live=live, s=scores, n=step: self._candidates(task, done, live, s, n),
            )
            settled += len(certain)
        yield Report(done[0].tokens[settled:])
        return SearchResult([Output(*finished) for finished in done[: self.num_return_sequences]], {"steps": step})

    def _candidates(
        self, task: Task, done: list[Finished], live: list[int], scores: list[float], step: int
    ) -> list[tuple[float, list[int]]]:
        """Finished and live hypotheses as they rank now; for those who watch."""
        alive = [(s / step**self.length_penalty, task.tree.path(n)) for s, n in zip(scores, live, strict=True)]
        return sorted([(f.score, f.tokens) for f in done] + alive, key=lambda candidate: -candidate[0])

    def _finish(self, task: Task, parent: int, token: int, step: int) -> str | None:
        if task.hits_stop is not None and token not in task.eos_token_ids:
            return task.finish_reason([*task.tree.path(parent), token])
        return "eos" if token in task.eos_token_ids else "length" if step == task.max_new_tokens else None

    def _bound(self, score: float, shortest: int, longest: int) -> float:
        """The best that a live hypothesis can still reach: its sum only falls, its length ends in this range."""
        return max(score / shortest**self.length_penalty, score / longest**self.length_penalty)

    @staticmethod
    def _certain(stem: list[int], rival: list[int] | None) -> list[int]:
        """The part of the live beams' common stem that the best finished hypothesis agrees with."""
        if rival is None:
            return stem
        n = next((i for i, (a, b) in enumerate(zip(stem, rival, strict=False)) if a != b), min(len(stem), len(rival)))
        return stem[:n]

    def slots(self, prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
        return prompt_tokens + new_tokens + self.beams - 2, prompt_tokens + self.beams * (new_tokens - 1)

    def check(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        ends = sum(token < vocab_size for token in eos_token_ids)
        if self.beams > vocab_size - ends:
            raise UsageError(
                f"beams: at most {vocab_size - ends} fit this model, got {self.beams}",
                where=f"vocabulary {vocab_size}, of which {ends} end a sequence",
            )

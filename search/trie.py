"""Trie beam search: beam search on one tree, with exactly Hugging Face's result and no cache per beam.

"Efficient Beam Search for Large Language Models Using Trie-Based Decoding" (algorithms 1-3, errata corrected), with the
candidates, end-of-sequence handling, length penalty and stopping rules of transformers 5. Comments cite the steps of
docs/algorithms.md. Pruning is immediate, because freeing a slot is cheap compared with a pass.
"""

import math
from dataclasses import dataclass, replace

from engine.errors import UsageError
from search.base import Next, Report, Search, SearchGenerator, SearchResult, Task, evaluate_top_sums, register
from search.finished import Candidate, Finished
from search.options import MAX_PENALTY, check_integers, check_numbers, hypotheses

EARLY_STOPPING = {False: "false", True: "true", "false": "false", "true": "true", "never": "never", "best": "best"}


@register("trie")
@dataclass(frozen=True)
class Trie(Search):
    """Beam search on a token trie: the exact result of Hugging Face beam search in a fraction of the memory.

    Args:
        beams: live hypotheses kept at every step (num_beams).
        length_penalty: a finished hypothesis scores logprob / length ** length_penalty.
        early_stopping: True stops when `beams` hypotheses have finished; False when the best live one could not beat
            the worst of them at its current length; "never" when it could not at any length; "best", which Hugging Face
            lacks, when it could not beat the worst of `num_return_sequences` at its current length.
        num_return_sequences: finished hypotheses to return, at most `beams`, or as many as `patience` waits for.
        patience: stops when round(beams * patience) hypotheses have finished, in place of `early_stopping`, as in
            CTranslate2 and Whisper: 1 is the same as true. The last step may bring more: the best of all are returned.
    """

    beams: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_return_sequences: int = 1
    patience: float | None = None

    def __post_init__(self):
        check_integers(self, beams=(1, math.inf))
        wanted = hypotheses(self.beams, self.patience)
        check_integers(self, num_return_sequences=(1, wanted))
        check_numbers(self, length_penalty=(-MAX_PENALTY, MAX_PENALTY))
        if not isinstance(self.early_stopping, bool | str) or self.early_stopping not in EARLY_STOPPING:
            raise UsageError(f"early_stopping: expected false, true, never or best, got {self.early_stopping!r}")
        if self.patience is not None and EARLY_STOPPING[self.early_stopping] in ("never", "best"):
            what = f"patience: it takes the place of early_stopping, which is {self.early_stopping}"
            raise UsageError(what, remedy="give one of both")

    def run(self, task: Task) -> SearchGenerator:
        tree = task.tree
        mode = EARLY_STOPPING[self.early_stopping if self.patience is None else True]
        wanted = hypotheses(self.beams, self.patience)
        candidates = max(2, 1 + len(task.eos_token_ids)) * self.beams
        live, scores = [tree.root], [0.0]  # T1
        done = Finished(self.length_penalty, wanted)
        for step in range(1, task.max_new_tokens + 1):
            following = Next(self.beams, task.eos_token_ids) if step < task.max_new_tokens else None
            sums, rows, tokens = yield from evaluate_top_sums(tree, live, scores, candidates, following)  # T2
            reasons = self._reasons(task, live, rows, tokens, step)  # T3
            first = zip(rows, tokens, sums, reasons[: self.beams], strict=False)  # T4
            done.add_all([([*tree.path(live[row]), token], sum, why, 0.0) for row, token, sum, why in first if why])
            going = [i for i, reason in enumerate(reasons) if reason is None][: self.beams]  # T5
            if not going or (mode == "true" and done.has_ended(wanted)):  # T7
                break
            scores = [sums[i] for i in going]
            length = task.max_new_tokens if mode == "never" and self.length_penalty > 0 else step
            last = self.num_return_sequences - 1
            if not done.score(scores[0], length) > done.score_at(last if mode == "best" else wanted - 1):  # T6
                break
            bound = done.bound(scores[0], step + 1, task.max_new_tokens)
            if done.score_at(last) >= bound and not task.rising:
                break  # T7a
            live = tree.grow([live[rows[i]] for i in going], [tokens[i] for i in going])  # T8
            tree.keep(live)
            yield self._report(task, done, live, scores)
        yield Report(done.remainder())
        return self._result(done, step)

    def _result(self, done: Finished, step: int) -> SearchResult:
        """The best finished hypotheses after a step."""
        answer = len(done.outputs[0].token_ids)
        return SearchResult(done.outputs[: self.num_return_sequences], {"steps": step, "answer_step": answer})

    def _reasons(self, task: Task, live: list[int], rows: list[int], tokens: list[int], step: int) -> list[str | None]:
        """Return why each candidate ends, or None if it continues; candidates after the first `beams` are examined
        only until `beams` candidates continue."""
        eos, last = task.eos_token_ids, "length" if step == task.max_new_tokens else None
        if task.ends is None:
            return ["eos" if token in eos else last for token in tokens]
        reasons: list[str | None] = []
        while len(reasons) < len(tokens) and (missing := self.beams - reasons.count(None)) and not (last and reasons):
            some = slice(len(reasons), len(reasons) + missing)
            reasons += task.finish_reasons([live[row] for row in rows[some]], tokens[some])
        return reasons

    def _report(self, task: Task, done: Finished, live: list[int], scores: list[float]) -> Report:
        step = task.tree.position(live[0]) + 1 - task.tree.prompt_length
        ahead = done.score(scores[0], step) > done.score_at(0)

        def best() -> list[int]:
            return task.tree.path(live[0]) if ahead else done.outputs[0].token_ids

        def ranked() -> list[Candidate]:
            return done.ranked(zip(scores, map(task.tree.path, live), strict=True))

        ready = None if ahead else lambda: self._result(done, step)
        return Report(done.settle(task.tree), best, beams=ranked, ready=ready)

    def with_all_outputs(self) -> "Trie":
        return replace(self, num_return_sequences=hypotheses(self.beams, self.patience))

    def slots(self, prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
        return prompt_tokens + new_tokens + self.beams - 2, prompt_tokens + self.beams * (new_tokens - 1)

    def check(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        ends = sum(token < vocab_size for token in eos_token_ids)
        if self.beams > vocab_size - ends:
            raise UsageError(
                f"beams: at most {vocab_size - ends} fit this model, got {self.beams}",
                where=f"vocabulary {vocab_size}, of which {ends} end a sequence",
            )

"""Best-of-N, and speculative best-of-N, which rejects most utterances early, by their partial rewards.

"Accelerating Best-of-N via Speculative Rejection", algorithm 1, errata corrected; comments cite the steps of
docs/algorithms.md. In addition to the paper's single decision point there may be several, or one whenever the cache is
full (the paper's section 6.3 and its successor), or rejection rates that follow from the correlation of earlier rewards
with later ones (section 7).

All utterances share one tree and their draws are keyed, so the survivors are those of best-of-N, token for token.
"""

import math
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.cache.prefixes import shared_length
from engine.errors import KVMemoryError, UsageError
from search.base import Answer, Evaluate, Report, SearchGenerator, SearchResult, Task, register
from search.options import RowSampling, check_choices, check_integers, check_numbers
from search.sample import Utterances
from search.sbon.rates import accepted, accepted_by_risk, expected_lengths, least_correlation

MAX_UTTERANCES = 4096


@register("bon")
@dataclass(frozen=True)
class BoN(RowSampling):
    """Best-of-N: the one of N samples with the highest reward.

    Args:
        n: utterances to draw.
        num_return_sequences: utterances to return, best first.
    """

    n: int = 100
    num_return_sequences: int = 1
    models = ("reward",)

    def __post_init__(self):
        super().__post_init__()
        check_integers(self, n=(1, MAX_UTTERANCES))
        check_integers(self, num_return_sequences=(1, self.n))

    def with_all_outputs(self) -> "BoN":
        return replace(self, num_return_sequences=self.n)

    def run(self, task: Task) -> SearchGenerator:
        race = Race(task, self, self.n)
        while race.drawn.live:
            yield from race.drawn.extend(apart=True)
            yield race.report()
        return (yield from race.end())

    def most_rows(self) -> int:
        return self.n


@register("sbon")
@dataclass(frozen=True)
class SBoN(BoN):
    """Speculative best-of-N: like bon, but most utterances are rejected early, by their partial rewards.

    Args:
        n: utterances to start with.
        tau: tokens of each utterance at the decision point (the decision token).
        alpha: share of the utterances rejected there (the rejection rate).
        schedule: several decision points, as 64:0.9,256:0.5 (tokens:rate); "memory": start as many utterances, up to n,
            as the cache can hold with tau tokens each, and reject alpha of them whenever it is full; "adaptive": at
            tau, 2 tau, 4 tau, ... tokens reject as many as `risk` allows; empty: only tau and alpha.
        risk: probability of losing the best utterance, for the adaptive schedule.
        keep_finished: a finished utterance is never rejected; false: the paper's rule.
    """

    tau: int = 32
    alpha: float = 0.8
    schedule: str = ""
    risk: float = 0.05
    keep_finished: bool = True

    def __post_init__(self):
        super().__post_init__()
        check_integers(self, tau=(1, 2**31))
        check_numbers(self, alpha=(0, 1), risk=(0, 1))
        check_choices(self, keep_finished=(True, False))
        if not isinstance(self.schedule, str):
            raise UsageError(f"schedule: expected a text, got {self.schedule!r}")
        self.points()

    def with_all_outputs(self) -> "SBoN":
        return self  # the rates depend on the number of outputs

    def points(self) -> dict[int, float]:
        """Return the rate at each decision point that is set in advance. Raises UsageError."""
        if self.schedule in ("memory", "adaptive"):
            return {}
        if not self.schedule:
            return {self.tau: self.alpha}
        points: dict[int, float] = {}
        for part in self.schedule.split(","):
            found = re.fullmatch(r"\s*(\d{1,9})\s*:\s*(\d*\.?\d+(?:e-?\d+)?)\s*", part, re.ASCII)
            tokens, rate = (int(found[1]), float(found[2])) if found else (0, 0.0)
            if not (tokens > max(points, default=0) and 0 <= rate <= 1):
                raise UsageError(
                    f"schedule: expected tokens:rate, ..., with rising tokens >= 1 and rates from 0 to 1, got {part!r}",
                    remedy="for example 64:0.9,256:0.5; or memory, or adaptive",
                )
            points[tokens] = rate
        return points

    def run(self, task: Task) -> SearchGenerator:
        started, points = self.n, self.points()
        if self.schedule == "memory":
            started = max(1, min(self.n, (task.tree.room - task.tree.prompt_length) // self.tau))
        race = Race(task, self, started, self.keep_finished)
        while race.drawn.live:
            try:
                yield from race.drawn.extend()  # S1, S4
            except KVMemoryError as error:
                if self.schedule != "memory":
                    error.remedy += "; or --sbon-schedule memory, which works with the memory that there is"
                if self.schedule != "memory" or len(race.running) == 1:
                    raise
                yield from race.judge()
                count = accepted(len(race.running), self.alpha, self.num_return_sequences)
                race.cut(min(count, len(race.running) - 1))
                continue
            tokens = race.length
            if race.drawn.live and points.get(tokens):  # a rate of 0 needs no rewards
                yield from race.judge()  # S2
                race.cut(accepted(len(race.running), points[tokens], self.num_return_sequences))  # S3
            elif race.drawn.live and self.schedule == "adaptive" and _doubles(tokens, self.tau):
                yield from race.judge()
                race.cut(self._accepted_by_risk(race))
            yield race.report()
        return (yield from race.end())

    def _accepted_by_risk(self, race: "Race") -> int:
        """Return the fewest utterances to keep so that all decision points together lose the best with probability
        `risk`.

        Each decision point gets an equal share of the risk. Rewards are modelled as a Gaussian process whose
        correlation falls by the same factor whenever the text doubles (for a random walk sqrt(1/2)). The factor is
        measured between the previous decision point and this one; the lower end of its confidence interval counts.
        """
        before, now = race.rewards_before, race.rewards
        if not before:
            return len(race.running)  # the first decision point only measures
        both = [i for i in race.running if i in before]
        per_doubling = least_correlation([before[i] for i in both], [now[i] for i in both])
        limit, tokens = race.task.max_new_tokens, race.length
        ended = sum(reason is not None for reason in race.drawn.reasons)
        drawn = sum(map(len, race.drawn.tokens))
        length = min(limit, tokens + drawn / ended) if ended else limit  # expected length of an unfinished utterance
        correlation = per_doubling ** math.log2(length / tokens)
        decisions = max(1, math.ceil(math.log2(limit / self.tau)) - 1)
        return max(self.num_return_sequences, accepted_by_risk(len(race.running), correlation, self.risk / decisions))


class Race:
    """The utterances of a run, their rewards, and the decisions.

    Attributes:
        running: utterances (their numbers) that were never rejected.
        spared: utterances that ended, were ranked below a cut, and remain candidates.
        rejected: the others.
        rewards: the latest reward of each utterance; final for those that ended.
        rewards_before: rewards at the previous decision point of the utterances that continued after it.
    """

    def __init__(self, task: Task, config: BoN, count: int, keep_finished: bool = True):
        self.task, self.config, self.count, self.keep_finished = task, config, count, keep_finished
        self.drawn = Utterances(task, count, config.warp(), config.seed)
        self.running = [*range(count)]
        self.spared: list[int] = []
        self.rejected: list[int] = []
        self.rewards: dict[int, float] = {}
        self.rewards_before: dict[int, float] = {}
        self.decisions: list[dict[str, Any]] = []
        self.settled = 0
        self._final: set[int] = set()

    @property
    def length(self) -> int:
        """The number of tokens of the longest utterances, which are the unfinished ones."""
        return max(map(len, self.drawn.tokens))

    def judge(self) -> Generator[Evaluate, Answer, None]:
        """Compute the rewards of the running utterances whose reward is not final yet."""
        assert self.task.judge is not None
        asked = [i for i in self.running if i not in self._final]
        rewards = yield from self.task.judge.rewards([self.drawn.tokens[i] for i in asked])
        self.rewards.update(zip(asked, rewards, strict=True))
        self._final.update(i for i in asked if self.drawn.reasons[i] is not None)

    def cut(self, count: int) -> None:
        """Rank the running utterances by their rewards and reject all but the best `count`."""
        ranked = sorted(self.running, key=lambda i: (-self.rewards[i], i))
        best, rest = ranked[:count], ranked[count:]
        spared = [i for i in rest if self.keep_finished and self.drawn.reasons[i] is not None]
        live = len(self.drawn.live)
        self.drawn.retain([i for i in self.drawn.live if i in best])
        assert self.task.judge is not None
        self.task.judge.keep([self.drawn.tokens[i] for i in self.drawn.live])
        self.decisions.append({
            "tokens": self.length, "live": live, "went_on": len(self.drawn.live),
            "utterances": self.running, "rewards": [self.rewards[i] for i in self.running],
        })  # fmt: skip
        self.running = sorted(best)
        self.spared += spared
        self.rejected += [i for i in rest if i not in spared]
        self.rewards_before = {i: self.rewards[i] for i in self.drawn.live}

    def report(self) -> Report:
        """Return the state of the run; tokens that all candidates share are certain."""
        candidates = sorted(self.running + self.spared)
        shared = shared_length(*[self.drawn.tokens[i] for i in candidates], start=self.settled)
        certain = self.drawn.tokens[candidates[0]][self.settled : shared]
        self.settled = shared

        def ranked() -> list[int]:
            return sorted(candidates, key=lambda i: (-self.rewards.get(i, -math.inf), i))

        return Report(
            certain,
            lambda: self.drawn.tokens[ranked()[0]],
            {"live": len(self.drawn.live)},
            lambda: [(self.rewards.get(i), self.drawn.tokens[i]) for i in ranked()],
        )

    def end(self) -> Generator[Evaluate | Report, Any, SearchResult]:
        """Compute the final rewards and return the best candidates."""
        yield from self.judge()  # S5
        order = sorted(self.running + self.spared, key=lambda i: (-self.rewards[i], i))  # S6
        yield Report(self.drawn.tokens[order[0]][self.settled :])
        outputs = [self.drawn.output(i, self.rewards[i]) for i in order[: self.config.num_return_sequences]]
        return SearchResult(outputs, self._stats(order))

    def _stats(self, order: Sequence[int]) -> dict[str, Any]:
        lengths = [len(tokens) for tokens in self.drawn.tokens]
        cut_off = [i for i in self.rejected if self.drawn.reasons[i] is None]
        done, whole = sum(lengths), sum(expected_lengths(lengths, cut_off))
        return {
            "utterances": self.count,
            "tokens_drawn": done,
            "tokens_saved": round(whole - done),
            "token_rate": done / whole,
            "winner": order[0],
            "decisions": self.decisions,
            "rewards": [[i, self.rewards[i]] for i in sorted(order)],
        }


def _doubles(tokens: int, tau: int) -> bool:
    times, rest = divmod(tokens, tau)
    return not rest and not times & (times - 1)

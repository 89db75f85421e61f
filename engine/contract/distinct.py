"""Outputs with distinct texts: a text can be tokenised in several ways, and a search may return them all."""

import math
from collections.abc import Sequence
from dataclasses import replace

from engine.contract import Output
from engine.errors import UsageError, shortened
from engine.words import DISTINCT, TEXT


def check_distinct(how: object) -> None:
    """Check a value of `Request.distinct`. Raises UsageError."""
    if how is not None and how not in DISTINCT:
        raise UsageError(f"distinct: expected {' or '.join(DISTINCT)}, got {shortened(repr(how))}")


def distinct(outputs: Sequence[Output], how: str) -> list[Output]:
    """Outputs, best first, with one of each text.

    Args:
        outputs: best first, with their texts.
        how: "text": the best output of a text stays as it is. "text-sum": it gets the log-sum-exp of the
            log-probabilities, and of the scores, of all token sequences of its text, and these scores rank the texts.
    """
    groups: dict[str, list[Output]] = {}
    for output in outputs:
        same = groups.setdefault(output.text, [])
        if all(other.token_ids != output.token_ids for other in same):  # samples may coincide: one sequence, one share
            same.append(output)
    if how == TEXT:
        return [same[0] for same in groups.values()]
    summed = [_summed(same) for same in groups.values()]
    return sorted(summed, key=lambda output: -math.inf if output.score is None else output.score, reverse=True)


def _summed(same: Sequence[Output]) -> Output:
    """The best of some outputs, with the log-sum-exp of all log-probabilities and of all scores that are not None."""
    logprobs = [output.logprob for output in same if output.logprob is not None]
    scores = [output.score for output in same if output.score is not None]
    return replace(
        same[0],
        logprob=log_sum_exp(logprobs) if logprobs else None,
        score=log_sum_exp(scores) if scores else None,
    )


def log_sum_exp(numbers: Sequence[float]) -> float:
    """log(sum(exp(x))) of at least one number."""
    if len(numbers) == 1 or (most := max(numbers)) == -math.inf:
        return numbers[0]
    return most + math.log(math.fsum(math.exp(number - most) for number in numbers))

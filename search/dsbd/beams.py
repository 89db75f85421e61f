"""The list of beams that beam sampling and DSBD draw: a multiset, whose equal entries are one beam with a count."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.errors import UsageError
from engine.sampling import Warp
from search.base import Output, Report, SearchResult, Task
from search.dsbd.joint import Joint, Known, Reader


class Beam(NamedTuple):
    """Entries of the list that are the same sequence: its last node, its log-probability, how many they are."""

    node: int
    logprob: float
    count: int = 1


def p_beam(reader: Reader, known: Known, beams: Sequence[Beam]) -> Joint:
    """What the list after these beams is drawn from."""
    nodes, logprobs, counts = zip(*beams, strict=True)
    return reader.p_beam(known, nodes, logprobs, counts)


def extend(task: Task, beams: Sequence[Beam], joint: Joint, drawn: Sequence[int]) -> tuple[list[Beam], list[Any]]:
    """Beams by one token each, as drawn from their joint distribution; equal ones folded.

    Returns:
        those that go on, in the order drawn; those that end, as (tokens, logprob, finish reason, entries).
    """
    tree, going, ended = task.tree, [], []
    before = {beam.node: beam.logprob for beam in beams}
    last = tree.position(beams[0].node) + 2 - tree.prompt_length >= task.max_new_tokens or task.hits_stop is not None
    for i in dict.fromkeys(drawn):
        node, token = joint.cell(i)
        logprob, count = before[node] + float(joint.logps[i]), drawn.count(i)
        if last or token in task.eos_token_ids:
            path = [*tree.path(node), token]
            if reason := task.finish_reason(path):
                ended.append((path, logprob, reason, count))
                continue
        going.append(Beam(tree.child(node, token), logprob, count))
    return going, ended


class Beams:
    """The list as it grows, and what has left it."""

    def __init__(self, task: Task, length_penalty: float):
        self.task, self.length_penalty = task, length_penalty
        self.live = [Beam(task.tree.root, 0.0)]
        self.done: list[Output] = []
        self.ended = 0  # entries that left
        self.steps = 0
        self._settled = 0  # tokens reported as certain

    def advance(self, joint: Joint, drawn: Sequence[int]) -> None:
        """Put what was drawn in the place of the live beams."""
        self.live, ended = extend(self.task, self.live, joint, drawn)
        self.steps += 1
        for tokens, logprob, reason, count in ended:
            self.done.append(Output(tokens, logprob, self._score(logprob, len(tokens)), reason))
            self.ended += count
        self.done.sort(key=lambda output: -(output.score or 0))  # stable: older first

    def report(self) -> Report:
        """Free what no live beam descends from; tell what is certain, and the candidates to whoever asks."""
        done, live, steps, tree = self.done, self.live, self.steps, self.task.tree
        if live:
            tree.keep([beam.node for beam in live])
        certain = tree.settled_from(self._settled) if live else done[0].token_ids[self._settled :]
        if live and done:
            certain = shared(certain, done[0].token_ids[self._settled :])
        self._settled += len(certain)

        def ranked() -> list[tuple[float, list[int]]]:
            alive = [(self._score(beam.logprob, steps), tree.path(beam.node)) for beam in live]
            told = [(output.score or 0.0, output.token_ids) for output in done] + alive
            return sorted(told, key=lambda candidate: -candidate[0])

        return Report(certain, lambda: ranked()[0][1], {"width": sum(beam.count for beam in live)}, ranked)

    def result(self, n: int, stats: dict[str, Any]) -> SearchResult:
        """The n best of what has left."""
        return SearchResult(self.done[:n], stats)

    def _score(self, logprob: float, length: int) -> float:
        return logprob / length**self.length_penalty


def shared(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """What two sequences begin with."""
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return list(a[:n])


def check_ranges(config: Any, **ranges: tuple[int, int]) -> None:
    """Refuse fields that are no integers in their range. Raises UsageError."""
    for name, (low, high) in ranges.items():
        value = getattr(config, name)
        if type(value) is not int or not low <= value <= high:
            raise UsageError(f"{name}: expected an integer from {low} to {high}, got {value!r}")


def check_sampling(config: Any) -> None:
    """Refuse a warp or a length penalty that is none. Raises UsageError."""
    Warp(config.temperature, config.top_k, config.top_p)
    penalty = config.length_penalty
    if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not abs(penalty) <= 20:
        raise UsageError(f"length_penalty: expected a number from -20 to 20, got {penalty!r}")

"""The list of beams that beam sampling and DSBD draw: a multiset, in which equal entries are one beam with a count."""

from collections.abc import Sequence
from typing import Any

from search.base import Report, SearchResult, Task
from search.dsbd.joint import Beam, Joint
from search.finished import Candidate, Finished


def extend(task: Task, beams: Sequence[Beam], joint: Joint, drawn: Sequence[int]) -> tuple[list[Beam], list[Any]]:
    """Extend beams by the drawn cells of their joint distribution; equal draws become one beam.

    Returns:
        the live beams, in the order drawn; the ended ones as (tokens, logprob, finish reason, entries).
    """
    tree, going, ended = task.tree, [], []
    before = {beam.node: beam.logprob for beam in beams}
    last = tree.position(beams[0].node) + 2 - tree.prompt_length >= task.max_new_tokens or task.ends is not None
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
    """The list of beams of a run, and the finished hypotheses.

    Attributes:
        live: the beams.
        ended: the number of entries that have ended and left the list.
        steps: the number of tokens of each live beam.
    """

    def __init__(self, task: Task, length_penalty: float):
        self.task = task
        self.live = [Beam(task.tree.root, 0.0)]
        self.ended = self.steps = 0
        self._done = Finished(length_penalty)

    def advance(self, joint: Joint, drawn: Sequence[int]) -> None:
        """Replace the live beams by the drawn ones."""
        self.live, ended = extend(self.task, self.live, joint, drawn)
        self.steps += 1
        for tokens, logprob, reason, count in ended:
            self._done.add(tokens, logprob, reason)
            self.ended += count

    def report(self) -> Report:
        """Free every node that is no ancestor of a live beam; report the certain tokens and the candidates."""
        done, live, tree = self._done, self.live, self.task.tree
        if live:
            tree.keep([beam.node for beam in live])

        def ranked() -> list[Candidate]:
            return done.ranked((beam.logprob, tree.path(beam.node)) for beam in live)

        certain = done.settle(tree) if live else done.remainder()
        return Report(certain, lambda: ranked()[0][1], {"width": sum(beam.count for beam in live)}, ranked)

    def result(self, n: int, stats: dict[str, Any]) -> SearchResult:
        """The n best finished beams."""
        return SearchResult(self._done.outputs[:n], stats | {"answer_step": len(self._done.outputs[0].token_ids)})

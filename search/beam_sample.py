"""Beam sampling: the next list of beams is drawn, with replacement, from all continuations of the current one.

The list is a multiset: a beam that was drawn n times is one node with n entries, which the warp treats separately.
`search.dsbd.joint` defines the distribution and the order of draws. Entries that end leave the list for good. DSBD
draws the same lists with fewer passes of the target; beam sampling is its baseline and its oracle.
"""

from dataclasses import dataclass, replace

from engine.contract.sampling import uniforms
from search.base import SearchGenerator, Task, register
from search.dsbd.beams import Beams
from search.dsbd.joint import Reader, Rows
from search.options import MAX_PENALTY, Sampling, check_integers, check_numbers, hypotheses


@register("beam-sample")
@dataclass(frozen=True)
class BeamSample(Sampling):
    """Beam sampling: beams drawn together from their joint distribution, with replacement.

    Args:
        beams: entries of the list; finished ones leave it.
        length_penalty: a finished beam scores logprob / length ** length_penalty.
        num_return_sequences: outputs to return, at most `beams`, or as many as `patience` waits for; fewer if entries
            coincide.
        patience: stops when round(beams * patience) entries have finished (1). Above 1 the list is refilled as long as
            that many can still finish.
    """

    beams: int = 4
    length_penalty: float = 1.0
    num_return_sequences: int = 1
    patience: float | None = None

    def __post_init__(self):
        super().__post_init__()
        check_integers(self, beams=(1, 4096))
        check_integers(self, num_return_sequences=(1, hypotheses(self.beams, self.patience)))
        check_numbers(self, length_penalty=(-MAX_PENALTY, MAX_PENALTY))

    def with_all_outputs(self) -> "BeamSample":
        return replace(self, num_return_sequences=hypotheses(self.beams, self.patience))

    def run(self, task: Task) -> SearchGenerator:
        tree, beams = task.tree, Beams(task, self.length_penalty)
        reader = Reader(self.warp(), task.vocab_size, task.normalised)
        wanted = hypotheses(self.beams, self.patience)
        while beams.live:
            rows: Rows = {}
            yield from reader.fetch(tree, [beam.node for beam in beams.live], rows)
            joint = reader.p_beam(rows, beams.live)
            numbers = uniforms(self.seed, 0, tree.position(beams.live[0].node) + 1)
            beams.advance(joint, joint.draw(min(self.beams, max(self.beams, wanted) - beams.ended), numbers))
            del joint  # it may have whole rows, and the next pass makes others
            if beams.ended >= wanted:
                beams.live = []
            yield beams.report()
        return beams.result(self.num_return_sequences, {"steps": beams.steps})

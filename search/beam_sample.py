"""Beam sampling: the next list of beams is drawn, with replacement, from all continuations of the present one.

The list is a multiset: a beam that was drawn n times is one node with n entries, each of which the warp sees by itself.
`search.dsbd.joint` says what is drawn, and in which order. Entries that end leave the list, which is shorter by them
from then on. DSBD draws the same lists with fewer passes of the target; this is its baseline and its oracle.
"""

from dataclasses import dataclass

from engine.sampling import Uniforms, Warp
from search.base import Search, SearchGenerator, Task, register
from search.dsbd.beams import Beams, check_ranges, check_sampling, p_beam
from search.dsbd.joint import Known, Reader


@register("beam-sample")
@dataclass(frozen=True)
class BeamSample(Search):
    """Beam sampling: beams drawn together from their joint distribution, with replacement.

    Args:
        beams: entries of the list; those that finish leave it.
        temperature, top_k, top_p: see `engine.sampling.Warp`; of the joint distribution over entries and tokens.
        seed: of the keyed draws.
        length_penalty: a finished beam scores logprob / length ** length_penalty.
        num_return_sequences: outputs to return, at most `beams`; there are fewer if entries coincide.
    """

    beams: int = 4
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    length_penalty: float = 1.0
    num_return_sequences: int = 1

    def __post_init__(self):
        check_ranges(self, seed=(0, 2**63 - 1), beams=(1, 4096), num_return_sequences=(1, self.beams))
        check_sampling(self)

    def run(self, task: Task) -> SearchGenerator:
        tree, beams = task.tree, Beams(task, self.length_penalty)
        reader = Reader(Warp(self.temperature, self.top_k, self.top_p), task.vocab_size)
        while beams.live:
            known: Known = {}
            nodes = [beam.node for beam in beams.live]
            yield from reader.know(tree, nodes, known)
            joint = p_beam(reader, known, beams.live)
            numbers = Uniforms(self.seed, 0, tree.position(beams.live[0].node) + 1)
            beams.advance(joint, joint.draw(self.beams - beams.ended, numbers))
            yield beams.report()
        return beams.result(self.num_return_sequences, {"steps": beams.steps})

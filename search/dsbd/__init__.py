"""DSBD: beams from beam sampling's distribution, several steps per pass of the target model.

"Dynamic-Width Speculative Beam Decoding for LLM Inference" (section 3, algorithm 1), errata corrected; comments cite
the steps of docs/algorithms.md. A draft is accepted with probability p'/q (the paper prints the inverse). q is
renormalised over the drafts whose parents were accepted and, when drafts are drawn without replacement, over the tokens
not drawn yet. Neither the width nor the number of drafted layers depends on which tokens were drawn.

A round: the draft model beam-samples a forest below the beams, of gamma layers or as many as are certain to fit into
the KV cache; one pass of the target gives the true probabilities of the whole forest; layer by layer, drafts are
accepted so that the list of beams is distributed as if drawn from the target's p_beam. Draws from the residual
distribution and from p_beam complete a layer that falls short, and end the round unless those draws were drafted as
well; after the last layer the list grows once more by draws from p_beam alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.contract.sampling import uniforms
from engine.drafts.backoff import Backoff
from engine.errors import UsageError
from search.aded.ngrams import NGramStore, open_store, vocabulary
from search.base import SearchGenerator, Task, register
from search.dsbd.beams import Beams
from search.dsbd.forest import Forester, ForestLevel, ModelForester, NGramForester
from search.dsbd.joint import Beam, Joint, Reader, Rows
from search.dsbd.stats import Stats
from search.dsbd.verify import (
    IID,
    KINDS,
    WITHOUT,
    Drafted,
    Verdict,
    acceptances,
    accepted_counts,
    dynamic_width,
    verify_layer,
)
from search.options import MAX_PENALTY, Sampling, check_choices, check_integers, check_numbers

OF_DRAFT = 1 << 12  # work for a drafted node, in numbers that a tensor computes: it is verified one by one
VERIFYING = 0  # stream of keyed numbers for verification
GO_ON, END = "go-on", "end"


@register("dsbd")
@dataclass(frozen=True)
class DSBD(Sampling):
    """Dynamic-width speculative beam decoding: beam sampling with drafts of a smaller model (--draft).

    Args:
        draft_beams: W_S, drafts per layer.
        gamma: layers drafted per round; fewer if the KV cache might not hold as many.
        width: W_L, entries of the list after every layer; 0 chooses them layer by layer (dynamic width).
        threshold: t, the probability with which a layer should be accepted at its dynamic width.
        min_width: W_min, the smallest dynamic width.
        bonus_width: entries drawn after the last layer when the width is dynamic; 0: as many as draft beams.
        drafts: iid, drawn with replacement (the paper's theorem); without-replacement.
        short: what follows a layer of which too few drafts were accepted: "go-on" continues if the draws that completed
            it were drafted too; "end" (the paper) starts the next round.
        keep: all beams, or 1: only the most probable one continues after each round (the memory of one path, but a
            selection: beams are no longer drawn from p_beam).
        temperature, top_k, top_p, min_p: see `engine.contract.sampling.Warp`; of joint distributions over the list's
            entries and the tokens (see `search.dsbd.joint`), also of the draft's.
        seed: of the keyed draws.
        length_penalty: a finished beam scores logprob / length ** length_penalty.
        num_return_sequences: outputs to return; fewer if fewer different ones finish.
        drafter: "model": the draft model; "ngram": a back-off n-gram that learns from the text (no --draft needed).
        store: file of counted n-grams for it to start from (python -m tools.ngrams).
    """

    draft_beams: int = 4
    gamma: int = 3
    width: int = 0
    threshold: float = 0.7
    min_width: int = 1
    bonus_width: int = 0
    drafts: str = WITHOUT
    short: str = GO_ON
    keep: int | str = "all"
    length_penalty: float = 1.0
    num_return_sequences: int = 1
    drafter: str = "model"
    store: str | Path | None = None

    def __post_init__(self):
        super().__post_init__()
        check_integers(self, draft_beams=(1, 256), gamma=(1, 64), width=(0, 256), min_width=(1, 256))
        check_integers(self, bonus_width=(0, 256))
        check_integers(self, num_return_sequences=(1, self.entries))
        check_numbers(self, threshold=(0, 1), length_penalty=(-MAX_PENALTY, MAX_PENALTY))
        check_choices(self, drafts=KINDS, short=(GO_ON, END), drafter=("model", "ngram"), keep=("all", 1))
        if self.store is not None and (self.drafter == "model" or not isinstance(self.store, str | Path)):
            raise UsageError(f"store: expected a file, with the drafter ngram, got {self.store!r}")
        self._store()

    def with_all_outputs(self) -> "DSBD":
        return replace(self, num_return_sequences=self.entries)

    drafts_itself = True

    @property
    def models(self) -> tuple[str, ...]:
        """The roles of the models that run in addition to the target."""
        return ("draft",) if self.drafter == "model" else ()

    @property
    def entries(self) -> int:
        """The most entries that the list can have, finished ones included."""
        return self.width or max(self.draft_beams, self.min_width, self.bonus_width)

    def run(self, task: Task) -> SearchGenerator:
        tree, beams, stats = task.tree, Beams(task, self.length_penalty), Stats(self.gamma)
        reader = Reader(self.warp(), task.vocab_size, task.normalised)
        forester = self._forester(task, reader)
        rows: Rows = {}
        while beams.live:
            layers, leaves = yield from forester.forest(beams.live)  # D1, D2
            live = [beam.node for beam in beams.live]
            forest = [beam.node for layer in layers for beam in layer.beams] + [beam.node for beam in leaves]
            stats.passes += yield from reader.fetch(tree, live + forest, rows)  # D3
            stats.rounds += 1
            self._verify(task, beams, layers, reader, rows, stats)
            if self.keep == 1 and beams.live:
                best = max(beams.live, key=lambda beam: beam.logprob)
                beams.live = [Beam(best.node, best.logprob)]
            report = beams.report()  # D9
            rows = {beam.node: rows[beam.node] for beam in beams.live if beam.node in rows}
            forester.follow(beams.live)
            yield report
        return beams.result(self.num_return_sequences, stats.figures(beams.steps))

    def _verify(
        self, task: Task, beams: Beams, layers: list[ForestLevel], reader: Reader, rows: Rows, stats: Stats
    ) -> None:
        """Run algorithm 1: replace the list of beams, layer by layer, until a layer falls short or none is left."""
        for depth, layer in enumerate([*layers, None]):
            live = [beam.node for beam in beams.live]
            p = reader.p_beam(rows, beams.live)  # D4
            numbers = uniforms(self.seed, VERIFYING, task.tree.position(live[0]) + 1)
            room = self.entries - beams.ended
            if layer is None:  # D8
                width = min(room, self.width or self.bonus_width or self.draft_beams)
                beams.advance(p, p.draw(width, numbers))
                stats.bonus(width)
                return
            width, verdict = self.judge(p, layer, live, room, numbers)
            beams.advance(p, verdict.entries)
            accepted = verdict.accepted == width
            drafted = self.short == GO_ON and all(beam.node in rows for beam in beams.live)
            stats.layer(depth, width, verdict, accepted or drafted)
            if not (accepted or drafted) or not beams.live:
                return

    def judge(
        self, p: Joint, layer: ForestLevel, parents: Sequence[int], room: int, numbers: Iterator[float]
    ) -> tuple[int, Verdict]:
        """Perform D4 to D7 for one layer.

        Args:
            p: p_beam, given the accepted beams of the layer above.
            layer: the drafted layer.
            parents: nodes of these accepted beams.
            room: the most entries that may be taken.
            numbers: keyed uniform numbers.

        Returns:
            the intended width, and the layer's new entries; the layer falls short if fewer drafts were accepted.
        """
        mass, q = layer.q.of_nodes(parents), layer.q.at(p)
        drafts = []
        for j in layer.drawn:
            node, token = layer.q.cell(j)
            if node in parents:
                drafts.append(Drafted(p.find(node, token), float(layer.q.probs[j])))
        width = self.width
        if not width:
            # Without replacement the number of lost parents depends on the tokens drawn, so the width must not use it.
            m, whole = (len(drafts), mass) if self.drafts == IID else (self.draft_beams, 1.0)
            counts = accepted_counts(acceptances(p.probs, q, m, whole))
            width = max(self.min_width, dynamic_width(counts, self.threshold))  # equation (6)
        width = min(width, room)
        return width, verify_layer(p.probs, q, drafts, mass, width, numbers, self.drafts)

    def _store(self) -> NGramStore | None:
        return open_store(self.store) if self.store is not None else None

    def _forester(self, task: Task, reader: Reader) -> Forester:
        options = (task, reader, self.draft_beams, self.gamma, self.drafts, self.seed)
        if self.drafter == "ngram":
            if store := self._store():
                store.check(*vocabulary(task))
            return NGramForester(Backoff(store), *options)
        assert task.open_tree is not None
        return ModelForester(task.open_tree("draft", task.tree.trunk.tokens), *options)

    def slots(self, prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
        least = prompt_tokens + new_tokens - 1
        return least, prompt_tokens + self.entries * (new_tokens - 1) + self.gamma * self.draft_beams

    def most_rows(self) -> int:
        return self.entries + self.gamma * self.draft_beams

    def work(self, new_tokens: int) -> tuple[int, int]:
        return self.gamma * self.draft_beams * OF_DRAFT, 0

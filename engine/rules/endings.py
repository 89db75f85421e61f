"""Outputs that end because no token is allowed, and the catalogue items of outputs."""

from collections.abc import Sequence
from dataclasses import replace

from engine.cache.tree import TokenTree
from engine.contract import Output, Report, SearchResult
from engine.rules.constraint import ConstraintError
from engine.rules.state import NodeState, NodeStates, ending

# The log-probability of an end because no token is allowed: `search.finished` ranks it last. Biases of a million at
# each of 8,000 tokens do not reach half of it, and float64 adds it to a sum with an error of 2e-6.
STUCK = float(-(1 << 34))


def is_stuck(logprob: float) -> bool:
    """Whether a sum of log-probabilities includes `STUCK`."""
    return logprob < STUCK / 2


class Endings:
    """The nodes where the outputs of one request end because no token is allowed.

    A search sees an end-of-sequence token there, as the only one that has a log-probability, `STUCK`.

    Args:
        states: the states of the nodes.
        eos: tokens that end an output and that the model can generate.

    Attributes:
        token: the end-of-sequence token that stands for such an end.
    """

    def __init__(self, states: NodeStates, eos: Sequence[int]):
        self.states, self.eos = states, sorted(eos)
        self.token = self.eos[0] if self.eos else 0
        self.restart()

    def restart(self) -> None:
        """Forget all ends: the search starts again."""
        self._paths: set[tuple[int, ...]] = set()  # paths after which no token is allowed

    def note(self, tree: TokenTree, node: int, state: NodeState) -> None:
        """Note that the output ends after a node. Raises ConstraintError if it is empty, and no token can end it."""
        path = tree.path(node)
        if not path and not self.eos:
            raise ConstraintError(
                "no token is allowed after the prompt, and no token ends an output",
                remedy="allow end-of-sequence tokens (no ignore_eos), or loosen what is allowed",
            )
        self._paths.add(tuple(path))

    def reached(self, tree: TokenTree, nodes: Sequence[int], rests: Sequence[Sequence[int]]) -> list[int]:
        """The indices of those nodes and new tokens after them that end an output: the constraint allows no token after
        them, or the last stands for such an end. For a request without end-of-sequence tokens. See `Task.ends`."""
        stuck = self._stuck(tree, nodes, rests) if self._paths else []
        if self.states.mask is None:
            return stuck
        states = self.states.of_all(tree, nodes)
        for tokens in zip(*rests, strict=True):
            states = self.states.after_all(states, tokens)
        self.states.allow(states)
        return stuck + ending(states)

    def _stuck(self, tree: TokenTree, nodes: Sequence[int], rests: Sequence[Sequence[int]]) -> list[int]:
        pairs = enumerate(zip(nodes, rests, strict=True))
        return [i for i, (node, rest) in pairs if (*tree.path(node), *rest[:-1]) in self._paths]

    def real(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens of a path, without one at its end that stands for an end."""
        return tokens[:-1] if self._paths and tuple(tokens[:-1]) in self._paths else tokens

    def shown(self, report: Report) -> Report:
        """A report whose candidates lack tokens that stand for an end, and have no score then."""
        best, beams = report.best, report.beams

        def real_beams() -> list[tuple[float | None, Sequence[int]]]:
            pairs = [(score, tokens, self.real(tokens)) for score, tokens in beams()] if beams else []
            return [(score if real is tokens else None, real) for score, tokens, real in pairs]

        known = best and (lambda: self.real(best()))
        return replace(report, best=known, beams=beams and real_beams)

    def settle(self, result: SearchResult, ranked: bool) -> None:
        """Give outputs their items, and those that ended because no token was allowed the finish reason "constraint".

        Args:
            result: the result of a search.
            ranked: whether scores are those of a reward, not of log-probabilities.
        """
        outputs = [self._settled(output, ranked) for output in result.outputs]
        if self.states.mask is not None:
            items = self.states.mask.items([o.token_ids[: -1 if o.finish_reason == "eos" else None] for o in outputs])
            named = zip(outputs, items, strict=True)
            outputs = [output if item is None else output.named(item) for output, item in named]
        result.outputs = outputs

    def _settled(self, output: Output, ranked: bool) -> Output:
        tokens = output.token_ids
        stands = tuple(tokens[:-1]) in self._paths  # the last token, for the end
        if output.finish_reason == "constraint" and (self.eos or not stands):
            # By `reached`, or found by the search itself, with STUCK in the score.
            return replace(output, score=None) if self.eos and not ranked else output
        if stands and output.finish_reason == "interrupted":
            return replace(output, token_ids=tokens[:-1])
        if not stands or output.finish_reason not in ("eos", "constraint"):
            return output
        logprob = None if output.logprob is None else output.logprob - STUCK
        score = output.score if ranked else None
        return replace(output, token_ids=tokens[:-1], logprob=logprob, score=score, finish_reason="constraint")

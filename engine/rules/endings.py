"""Outputs that end because no token is allowed, and the catalogue items of outputs."""

from collections.abc import Sequence
from dataclasses import replace

from engine.cache.tree import TokenTree
from engine.contract import Output, SearchResult
from engine.rules.constraint import ConstraintError
from engine.rules.state import NodeState, NodeStates, ending

STUCK = float(-(1 << 16))  # log-probability of an end because no token is allowed: `search.finished` ranks it last


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
        """Note that the output ends after a node. Raises ConstraintError if no token can end it."""
        path = tree.path(node)
        if self.eos:
            self._paths.add(tuple(path))
        elif not path or not ending([state]):  # `reached` has not ended the output before
            raise ConstraintError(
                f"no token is allowed after {len(path)} new tokens, and no token ends an output",
                remedy="allow end-of-sequence tokens (no ignore_eos), or loosen what is allowed",
            )

    def reached(self, tree: TokenTree, nodes: Sequence[int], rests: Sequence[Sequence[int]]) -> list[int]:
        """The indices of those nodes and new tokens after them after which the constraint allows no token; for a
        request without end-of-sequence tokens. See `Task.ends`."""
        states = self.states.of_all(tree, nodes)
        for tokens in zip(*rests, strict=True):
            states = self.states.after_all(states, tokens)
        self.states.allow(states)
        return ending(states)

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
        if output.finish_reason == "constraint":  # by `reached`, or found by the search itself, with STUCK in the score
            return replace(output, score=None) if self.eos and not ranked else output
        tokens = output.token_ids
        if output.finish_reason != "eos" or tuple(tokens[:-1]) not in self._paths:
            return output
        logprob = None if output.logprob is None else output.logprob - STUCK
        score = output.score if ranked else None
        return replace(output, token_ids=tokens[:-1], logprob=logprob, score=score, finish_reason="constraint")

"""Outputs that end because no token is allowed, and the items of a catalogue that outputs are."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.cache.tree import TokenTree
from engine.contract import Output, SearchResult
from engine.rules.constraint import Allowed, ConstraintError
from engine.rules.state import NodeStates

STUCK = float(-(1 << 16))  # log-probability of the end where no token is allowed: `search.finished` ranks it last


class Endings:
    """The nodes where the outputs of one request end because no token is allowed.

    A search sees an end-of-sequence token there, as the only one that has a log-probability, `STUCK`.

    Args:
        states: of the nodes.
        eos: tokens that end an output, those that the model can generate.

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

    def note(self, tree: TokenTree, node: int, allowed: Allowed | None) -> None:
        """Note that the output ends after a node. Raises ConstraintError if no token can end it."""
        path = tree.path(node)
        if self.eos:
            self._paths.add(tuple(path))
        elif not path or allowed is None or not allowed.nothing:  # `hits_stop` has not ended the output before
            raise ConstraintError(
                f"no token is allowed after {len(path)} new tokens, and no token ends an output",
                remedy="allow end-of-sequence tokens (no ignore_eos), or loosen what is allowed",
            )

    def hits_stop(
        self, tree: TokenTree, stops: Callable[[Sequence[int]], bool] | None
    ) -> Callable[[Sequence[int]], bool]:
        """`Task.hits_stop` of a request without end-of-sequence tokens: an output also ends where the constraint allows
        no token after its new tokens.

        Args:
            tree: the target's.
            stops: whether new tokens contain a stop string.
        """
        return lambda tokens: (stops is not None and stops(tokens)) or self._ends(tree, tokens)

    def _ends(self, tree: TokenTree, tokens: Sequence[int]) -> bool:
        if self.states.mask is None:
            return False
        node = tree.descend(tokens)
        state = self.states.of(tree, node)
        for token in tokens[tree.position(node) + 1 - tree.prompt_length :]:
            state = self.states.after(state, token)
        self.states.allow([state])
        if state.allowed is None or not state.allowed.nothing:
            return False
        self._paths.add(tuple(tokens))
        return True

    def settle(self, result: SearchResult, ranked: bool) -> None:
        """Give outputs their items, and those that ended because no token was allowed the finish reason "constraint".

        Args:
            result: a search's.
            ranked: whether scores are those of a reward, not of log-probabilities.
        """
        result.outputs = [self._named(self._settled(output, ranked)) for output in result.outputs]

    def _named(self, output: Output) -> Output:
        if self.states.mask is None:
            return output
        tokens = output.token_ids[:-1] if output.finish_reason == "eos" else output.token_ids
        return replace(output, item=self.states.mask.item(tokens))

    def _settled(self, output: Output, ranked: bool) -> Output:
        tokens = output.token_ids
        if output.finish_reason == "constraint" and not ranked:  # where a search knows itself
            return replace(output, score=None)
        if output.finish_reason == "stop" and tuple(tokens) in self._paths:
            return replace(output, finish_reason="constraint")
        if output.finish_reason != "eos" or tuple(tokens[:-1]) not in self._paths:
            return output
        logprob = None if output.logprob is None else output.logprob - STUCK
        score = output.score if ranked else None
        return replace(output, token_ids=tokens[:-1], logprob=logprob, score=score, finish_reason="constraint")

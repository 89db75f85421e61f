"""Drafts for every search: guesses of the tokens that a search will ask for, evaluated in the same passes.

A `Drafter` guesses. It is shared by the requests of an engine and opens a `RequestDrafter` for each. The driver adds
the guessed tokens below the live nodes of a request to a pass (`engine.step.drafting`). If the search then asks for
such a node, its row is known and no pass is needed. Rows do not depend on the other tokens of a pass, so guesses never
change an answer: bad guesses only cost time.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass
class Draft:
    """A tree of tokens below a context, likeliest first: the first n nodes are a tree for every n.

    Args:
        tokens: the token of each node.
        parents: the index of each node's parent, lower than the node's own; -1 is the context.
        scores: estimated probability that the model takes the path to each node, at most the parent's.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)


class RequestDrafter(Protocol):
    """Guesses for one request. Its text is the prompt and the tokens that all live beams share.

    All methods are called by the thread that steps, so they must be quick: `draft` is called for each live node of a
    step. If one raises, the request continues without drafts.
    """

    def learn(self, tokens: Sequence[int]) -> None:
        """Append generated tokens to the text: they have become part of every live beam."""
        ...

    def draft(self, ahead: Sequence[int], nodes: int, depth: int) -> Draft:
        """Guess what follows the text and then the tokens `ahead`, which lead to one live node.

        Args:
            ahead: tokens between the text's end and the live node, its own included; often none. Do not learn
                from them, because beams may drop them.
            nodes: most nodes of the draft, at least 1.
            depth: most tokens ahead of the live node, at least 1.

        Returns:
            at most `nodes` nodes. Tokens that the model does not have or that a constraint forbids are left out by the
            caller, with the nodes below them.
        """
        ...

    def close(self, tokens: Sequence[int]) -> None:
        """The request has ended with these new tokens as its best output; no further call follows.

        The tokens need not begin with those learnt: the best output may have ended while other beams went on. A
        request that is cancelled or fails is closed with the tokens that had been settled, perhaps none.
        """
        ...


class Drafter(Protocol):
    """Guesses the continuations of all requests of an engine."""

    def open(self, salt: str | None, prompt: Sequence[int]) -> RequestDrafter:
        """Begin with a request.

        Args:
            salt: the texts of other requests may be used for this one only if they had the same salt, as in
                `PrefixCache`; None: keep nothing of this request, and use nothing of others.
            prompt: token ids, at least one.
        """
        ...


@dataclass
class Wanted:
    """A request's part of what a pass may draft, for a drafter that guesses for several at once.

    Args:
        request: the drafter of the request, which has learnt the text.
        ahead: for each live node the tokens up to it, see `RequestDrafter.draft`.
        depth: for each live node the most tokens to draft ahead of it; 0: none.
        nodes: most nodes of each draft, at least 1.
        sums: the score of each live node, if the search keeps the best sums of score and log-probability; else None.
        width: how many sums it keeps.
        saving: seconds of a pass of the request, which correct guesses save; 0: drafts are wanted at any cost.
        spare: seconds that may be spent on reading the tokens generated since the drafter's latest guess.
        odds: level of the drafts -> estimated probability that the search asks for nothing else there, for `sums`.
        ends: tokens that end an output: they are not to be drafted.
        states, after: the state of each live node under the request's constraint, and the function of a state and a
            token that returns the next state, see `engine.rules.state.NodeStates`; None: no constraint.

    Attributes:
        drafts: for each live node its draft; None if there are none yet, or the drafter has failed.
        passes: (number of the pass, tokens of this request, seconds) of the passes that a draft model ran for it.
        seconds: time of these passes, without reading the prompt.
    """

    request: RequestDrafter
    ahead: Sequence[Sequence[int]]
    depth: Sequence[int]
    nodes: int
    sums: Sequence[float] | None = None
    width: int = 1
    saving: float = 0.0
    spare: float = math.inf
    odds: Callable[[int], float] = lambda level: 1.0
    ends: Collection[int] = ()
    states: Sequence[Any] | None = None
    after: Any = None
    drafts: Sequence[Draft] | None = None
    passes: list[tuple[int, int, float]] = field(default_factory=list)
    seconds: float = 0.0

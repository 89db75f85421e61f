"""Greedy decoding: the most probable token, always."""

from dataclasses import dataclass

from search.base import Evaluate, Output, Report, Search, SearchGenerator, SearchResult, Task, register
from search.picks import Picks


@register("greedy")
@dataclass(frozen=True)
class Greedy(Search):
    """The most probable token at every step; ties go to the lower id."""

    def run(self, task: Task) -> SearchGenerator:
        tree, tokens, logprob = task.tree, [], 0.0
        picks = Picks(None, 0, tree.pool.device.type != "cpu")
        while True:
            picks.take(*(yield Evaluate(tree, [tree.root], picks.read(tree, [tree.root], None))))
            token = picks.token(0, 0)
            tokens.append(token)
            logprob += picks.logprob(0, token)
            reason = task.finish_reason(tokens)
            yield Report([token], lambda: tokens)
            if reason:
                return SearchResult([Output(tokens, logprob, logprob, reason)])
            tree.keep(tree.grow([tree.root], [token]))

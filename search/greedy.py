"""Greedy decoding: the most probable token, always."""

from dataclasses import dataclass

from search.base import Evaluate, Output, Report, Search, SearchGenerator, SearchResult, Task, register


@register("greedy")
@dataclass(frozen=True)
class Greedy(Search):
    """The most probable token at every step; ties go to the lower id."""

    def run(self, task: Task) -> SearchGenerator:
        tree, tokens, logprob = task.tree, [], 0.0
        while True:
            logp_NV, _ = yield Evaluate(tree, [tree.root])
            token = int(logp_NV[0].argmax())
            tokens.append(token)
            logprob += float(logp_NV[0, token])
            reason = task.finish_reason(tokens)
            yield Report([token], lambda: tokens)
            if reason:
                return SearchResult([Output(tokens, logprob, logprob, reason)])
            tree.keep(tree.grow([tree.root], [token]))

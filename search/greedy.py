"""Greedy decoding: always the most probable token."""

from dataclasses import dataclass

from search.base import Next, Output, Report, Search, SearchGenerator, SearchResult, Task, evaluate_top_sums, register


@register("greedy")
@dataclass(frozen=True)
class Greedy(Search):
    """The most probable token at every step; ties go to the lower id."""

    def run(self, task: Task) -> SearchGenerator:
        tree, tokens, logprob = task.tree, [], 0.0
        following = Next(1, task.eos_token_ids)
        while True:
            [logp], _, [token] = yield from evaluate_top_sums(tree, [tree.root], [0.0], 1, following)
            tokens.append(token)
            logprob += logp
            reason = task.finish_reason(tokens)
            yield Report([token], lambda: tokens)
            if reason:
                return SearchResult([Output(tokens, logprob, logprob, reason)])
            tree.keep(tree.grow([tree.root], [token]))

"""ULTS: best-first search for the most probable sequence, guided by beliefs about unevaluated nodes.

"Uncertainty-guided likelihood-tree search" (algorithm 2), errata corrected; comments cite the steps of
docs/algorithms.md. Finished leaves are never selected and have no samples, the stop test is strict, likelihoods are
logarithms. A node's samples are keyed by its path, so they do not depend on the order of evaluation. `prior` and
`delta` define the beliefs, `boundary` the selection rules.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.cache.tree import TokenTree
from engine.contract import Read
from engine.contract.sampling import by_row
from engine.errors import KVMemoryError, UsageError
from engine.rules.endings import STUCK
from models.trim import trim_memory
from search.base import (
    Answer,
    Evaluate,
    Output,
    Report,
    Search,
    SearchGenerator,
    SearchResult,
    Task,
    path_field,
    register,
    top_k,
)
from search.finished import Candidate, Finished
from search.options import MAX_PENALTY, MAX_SEED, check_choices, check_integers, check_numbers
from search.ults.boundary import RULES, Boundary, Family, Samples
from search.ults.delta import POOL, Delta, fit, path_key
from search.ults.prior import GATHERED, Vectors, dirichlet, own_vectors

SHOWN_NODES = 8  # open nodes among the candidates of a report


@register("ults")
@dataclass(frozen=True)
class ULTS(Search):
    """Uncertainty-guided tree search: sequences as probable as beam search finds, from fewer evaluated nodes.

    Args:
        select: how the next open node is chosen: flat (the maximum in most samples), descendant (from the root down,
            comparing children by their best descendants) or posterior (likewise, by the maxima over all their
            descendants).
        k_max: most nodes evaluated per level; 0 for no limit.
        children: most probable tokens that become children of a node.
        epsilon: stop when a better sequence exists with at most this probability.
        samples: posterior samples per node.
        budget: most nodes evaluated in all; 0 for no limit.
        batch: nodes evaluated per round, in one forward pass; 1 is the paper's.
        prior: auto (softmax vectors of the model, gathered once and stored), dirichlet, or a file of tools.ults_prior.
        alpha: concentration of the Dirichlet over the vocabulary.
        fit: form of the beliefs: beta distributions, or pools of draws.
        fixed_length: true excludes end-of-sequence tokens and renormalises the others.
        length_penalty: an output's score is its log-likelihood / length ** length_penalty; 0 is the paper's.
        num_return_sequences: outputs to find; "a better sequence" means better than the last of them.
        seed: of the samples.
    """

    select: str = "flat"
    k_max: int = 10
    children: int = 20
    epsilon: float = 0.1
    samples: int = 1000
    budget: int = 0
    batch: int = 8
    prior: str = path_field("auto", words=("auto", "dirichlet"))
    alpha: float = 1e-4
    fit: str = "beta"
    fixed_length: bool = False
    length_penalty: float = 0.0
    num_return_sequences: int = 1
    seed: int = 0

    def __post_init__(self):
        check_integers(self, k_max=(0, 1 << 20), children=(1, 4096), samples=(1, 1 << 16), budget=(0, 1 << 40))
        check_integers(self, batch=(1, 1024), num_return_sequences=(1, 4096), seed=(0, MAX_SEED))
        check_numbers(self, epsilon=(0, 1), alpha=(1e-9, 1e6), length_penalty=(-MAX_PENALTY, MAX_PENALTY))
        check_choices(self, select=[*RULES], fit=("beta", "pools"), fixed_length=(True, False))
        if type(self.prior) is not str or not self.prior:
            raise UsageError(f"prior: expected auto, dirichlet or a file, got {self.prior!r}")

    def run(self, task: Task) -> SearchGenerator:
        tree = task.tree
        origin = Family.above(tree.trunk.tokens[-1], self.seed, self.samples)
        winners, nodes = [(origin, 0)], [tree.root]  # U2
        leaves = Finished(self.length_penalty, self.num_return_sequences)  # c* is the score of the last one
        used = [1] + [0] * task.max_new_tokens  # nodes evaluated per level
        rounds = dropped = 0
        children = Children(self.children, sorted(task.eos_token_ids) if self.fixed_length else ())
        answer = yield Evaluate(tree, nodes, children.read)
        delta, prior = yield from self._prior(task, answer.rows_NV)  # U1
        samples = Samples(delta, self.length_penalty, task.max_new_tokens)
        boundary = RULES[self.select](origin, partial(leaves.bound, longest=task.max_new_tokens), samples)
        while True:
            rounds += 1
            boundary.add(self._expand(task, delta, winners, nodes, children, answer, leaves))  # U5
            best = leaves.score_at(self.num_return_sequences - 1)
            better = boundary.exceeding(best)
            yield self._report(task, boundary, leaves, sum(used), better)
            room = min(self.batch, self.budget - sum(used) if self.budget else self.batch)
            if better <= (self.epsilon if best > -math.inf else 0) or room <= 0:  # U7
                break
            winners = self._select(boundary, used, room)  # U3, U6
            try:
                nodes, answer, lost = yield from _evaluate(tree, boundary, winners, used, children.read)  # U4
            except KVMemoryError:
                if not leaves.outputs:
                    raise
                break
            dropped += lost
        outputs = leaves.outputs
        if not outputs:  # the budget is used up, or no path leads to a leaf
            outputs = [Output(self._candidates(task, boundary, leaves, 1)[0][1], None, None, "interrupted")]
        yield Report(outputs[0].token_ids[leaves.settled :])
        figures = {"rounds": rounds, "nodes_evaluated": sum(used), "better_exists": better}
        return SearchResult(outputs, figures | {"dropped_subtrees": dropped, "prior": prior})

    def _select(self, boundary: Boundary, used: list[int], room: int) -> list[tuple[Family, int]]:
        """Choose the next nodes to evaluate, at most `room`; they are closed and counted in `used`."""
        winners = []
        for family, child in boundary.winners(room):
            winners.append((family, child))
            boundary.close(family, [child])
            used[family.level] += 1
            if used[family.level] == self.k_max:  # the last node that this level may evaluate
                boundary.close_levels(family.level)
                for vain in [f for f, _ in winners if f.level < family.level]:  # their children would be closed
                    used[vain.level] -= 1
                winners = [(f, c) for f, c in winners if f.level >= family.level]
            if len(winners) == room:
                break
        return winners

    def _expand(
        self,
        task: Task,
        delta: Delta,
        winners: list[tuple[Family, int]],
        nodes: list[int],
        children: "Children",
        answer: Answer,
        leaves: Finished,
    ) -> list[Family]:
        """Return the families of evaluated nodes; children that are leaves join `leaves`."""
        families: list[Family] = []
        for (above, place), node, (logps, tokens, excluded) in zip(winners, nodes, children.of(answer), strict=True):
            level, key = above.level + 1, path_key(above.key, above.tokens[place])
            sums, excluded = [above.sums[place] + logp for logp in logps], above.excluded + excluded
            ends = self._ends(task, node, level, tokens)
            open_ = set(range(len(tokens))).difference(ends)
            families.append(Family(node, level, key, above, place, tokens, sums, excluded, open_))
            path = task.tree.path(node) if ends else []
            for c, reason in ends.items():
                leaves.add([*path, tokens[c]], sums[c], reason, excluded)
            if self.fixed_length and not tokens:  # at most end-of-sequence, which no child has, is allowed
                leaves.add(task.tree.path(node), above.sums[place] + STUCK, "constraint", above.excluded - STUCK)
        most = min(self.children, answer.rows_NV.shape[1])
        pad = [most - len(f.tokens) for f in families]
        sums = [[s if c in f.open else -math.inf for c, s in enumerate(f.sums)] for f in families]
        sum_FC = torch.tensor([row + [-math.inf] * n for row, n in zip(sums, pad, strict=True)])
        token_FC = torch.tensor([f.tokens + [0] * n for f, n in zip(families, pad, strict=True)])
        last = task.max_new_tokens - 1  # leaves have no Delta, so their level is not used
        place_FC = delta.places([(min(f.level, last), f.key) for f in families], token_FC)
        for family, sum_C, place_C in zip(families, sum_FC, place_FC, strict=True):
            family.sum_C, family.place_C = sum_C, place_C
        return families

    def _ends(self, task: Task, node: int, level: int, tokens: list[int]) -> dict[int, str]:
        """Map the index of each child that is a leaf to its finish reason."""
        ends = {}
        if task.ends is not None:
            found = task.ends([node] * len(tokens), [[token] for token in tokens])
            ends |= {c: reason for c, reason in enumerate(found) if reason is not None}
        if level == task.max_new_tokens:
            ends = {c: ends.get(c, "length") for c in range(len(tokens))}
        if not task.eos_token_ids.isdisjoint(tokens):
            ends |= {c: "eos" for c, token in enumerate(tokens) if token in task.eos_token_ids}
        return ends

    def _prior(self, task: Task, logp_NV: Tensor) -> Generator[Evaluate | Report, Any, tuple[Delta, str]]:
        """Return the distributions of Delta, and the source of the softmax vectors that they are computed from."""
        depth, source = task.max_new_tokens, self.prior
        if depth == 1:  # all children are leaves: Delta is not used, and any vector will do
            vectors = Vectors(torch.zeros(1, 1), torch.full((1, 1), -1))
        elif source == "dirichlet":
            vectors = self._dirichlet(task.vocab_size)
        elif source == "auto":
            vectors, source = yield from own_vectors(task, self.children, logp_NV)
        else:
            vectors = Vectors.load(Path(source).expanduser())
        penalty, eos = float(self.length_penalty), task.eos_token_ids
        options = (self.children, self.samples, eos, self.fixed_length, penalty, self.fit == "beta")
        return (yield from fit(vectors, depth, *options)), source

    def _dirichlet(self, vocab_size: int) -> Vectors:
        """Return the prior's vectors. Making them takes seconds, so `check` does it and the request keeps them."""
        if vocab_size not in self._made:
            self._made[vocab_size] = dirichlet(float(self.alpha), vocab_size)
            trim_memory()  # making the draws took a hundred times as much memory
        return self._made[vocab_size]

    @cached_property
    def _made(self) -> dict[int, Vectors]:
        return {}

    def _report(self, task: Task, boundary: Boundary, leaves: Finished, nodes: int, better: float) -> Report:
        """Return the search's state: the best leaf, the bound of all open nodes, and the probability that an open node
        exceeds the leaf."""
        best, bound = leaves.outputs[0].score if leaves.outputs else None, boundary.bound()
        return Report(
            leaves.settle(task.tree),
            lambda: self._candidates(task, boundary, leaves, 1)[0][1],
            {"nodes": nodes, "best": best, "bound": bound, "better_exists": better},
            lambda: self._candidates(task, boundary, leaves, SHOWN_NODES),
        )

    def _candidates(self, task: Task, boundary: Boundary, leaves: Finished, most: int) -> list[Candidate]:
        """Return scores and paths: the leaves, then the leading open nodes; never empty."""
        found: list[Candidate] = [*leaves.ranked()]
        leaders = boundary.leaders(most) if not found or most > 1 else []
        found += [(mean, [*task.tree.path(f.node), f.tokens[c]]) for mean, f, c in leaders]
        return found or [(None, task.tree.path(task.tree.root))]

    def slots(self, prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
        nodes = min(self.k_max * (new_tokens - 1) if self.k_max else 1 << 40, self.budget or 1 << 40)
        return prompt_tokens + new_tokens - 1, prompt_tokens + nodes

    def most_rows(self) -> int:
        return max(self.batch, GATHERED if self.prior == "auto" else 1)

    def work(self, new_tokens: int) -> tuple[int, int]:
        nodes = self.slots(1, new_tokens)[1] - 1
        of_node = self.samples * (1 if self.select == "flat" else self.children)
        tapes = new_tokens * (POOL + self.samples) * (2 if self.length_penalty else 1)
        return self.batch * self.children * self.samples, nodes * of_node + tapes

    def check(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        if self.prior == "dirichlet":
            self._dirichlet(vocab_size)
        elif self.prior != "auto":
            Vectors.load(Path(self.prior).expanduser())  # a bad file is refused before anything is evaluated
        if self.fixed_length and all(token in eos_token_ids for token in range(vocab_size)):
            raise UsageError("fixed_length: every token of the vocabulary ends the text")


def _evaluate(
    tree: TokenTree, boundary: Boundary, winners: list[tuple[Family, int]], used: list[int], read: Read
) -> Generator[Evaluate, Answer, tuple[list[int], Answer, int]]:
    """Evaluate the winners. While the pool is full, drop the least promising open subtree, or finally a winner.

    Returns:
        the winners' nodes, the answer, and the number of subtrees dropped.

    Raises:
        KVMemoryError: not even one winner fits.
    """
    dropped = 0
    while True:
        nodes = tree.grow([f.node for f, _ in winners], [f.tokens[c] for f, c in winners])
        if boundary.shrunk or dropped:
            tree.keep([*(f.node for f in boundary.families), *nodes])
            boundary.shrunk = False
        try:
            return nodes, (yield Evaluate(tree, nodes, read)), dropped
        except KVMemoryError:
            dropped += 1
            if least := boundary.least_promising([f for f, _ in winners]):
                boundary.close(least, list(least.open))
                continue
            family, _ = winners.pop()
            used[family.level] -= 1
            if not winners:
                raise


class Children:
    """Reads the children of nodes: the most probable tokens after each.

    Args:
        most: the most children of a node.
        excluded: tokens that are no children; the log-probabilities of the others are renormalised.
    """

    def __init__(self, most: int, excluded: Sequence[int]):
        self.most, self.excluded = most, excluded

    def read(self, logp_NV: Tensor, _peaks_NB: Tensor | None = None) -> Tensor:
        """Return the numbers that `of` takes, float64, on the device of the log-probabilities."""
        kept_NV, mass_N1 = self._kept(logp_NV)
        best_N2K = top_k(kept_NV, self._listed(logp_NV))
        if mass_N1 is None:
            return best_N2K.view(-1)
        best_N2K[:, 0] = (best_N2K[:, 0].float() - mass_N1).double()  # normalises only what is read
        return torch.cat([best_N2K.flatten(1), mass_N1.double()], 1).view(-1)

    def of(self, answer: Answer) -> list[tuple[list[float], list[int], float]]:
        """Return for each node log-probabilities and tokens of its children, best first, among equals the lower token,
        without -inf; and the logarithm of the mass that is left when tokens are excluded."""
        logp_NV, numbers = answer
        assert numbers is not None
        listed, rows = self._listed(logp_NV), []
        for i, row in enumerate(numbers.view(len(logp_NV), -1).tolist()):
            logps, tokens, mass = row[:listed], list(map(int, row[listed : 2 * listed])), sum(row[2 * listed :])
            if len(set(logps)) < len(logps) or logps[-1] == -math.inf:
                found = zip(logps, tokens, strict=True)
                if listed < logp_NV.shape[1] and logps[min(self.most, listed) - 1] == logps[-1] > -math.inf:
                    # A tie at the border: which of the equals top_k returns is undefined.
                    kept_NV, mass_N1 = self._kept(logp_NV[i : i + 1])
                    logp_V = (kept_NV if mass_N1 is None else kept_NV - mass_N1)[0]
                    token_K = (logp_V >= logps[-1]).nonzero().view(-1)
                    found = zip(logp_V[token_K].double().tolist(), token_K.tolist(), strict=True)
                ranked = sorted((pair for pair in found if pair[0] > -math.inf), key=lambda pair: (-pair[0], pair[1]))
                logps, tokens = [logp for logp, _ in ranked], [token for _, token in ranked]
            rows.append((logps[: self.most], tokens[: self.most], mass))
        return rows

    def _listed(self, logp_NV: Tensor) -> int:
        """Return how many tokens are read: one past the border, and more on a GPU, so that few ties need another
        read."""
        return min(self.most + 1 if logp_NV.is_cpu else 2 * self.most + 1, logp_NV.shape[1])

    def _kept(self, logp_NV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities without the excluded tokens, and the logarithm of their sum; None if no token is
        excluded."""
        if not self.excluded:
            return logp_NV, None
        excluded = torch.tensor([token for token in self.excluded if token < logp_NV.shape[1]], dtype=torch.int64)
        logp_NV = logp_NV.index_fill(1, excluded.to(logp_NV.device, non_blocking=True), -math.inf)
        return logp_NV, by_row(torch.logsumexp, logp_NV).clamp(min=-3e38)  # finite even if no other token is possible

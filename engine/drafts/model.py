"""Drafts by a draft model with the same vocabulary: its likeliest continuations of every live node, level by level.

Each request has a tree in the draft model's cache, which follows the live nodes of the request's search and holds the
drafts below them. One pass of the draft model makes a level of the drafts of all requests. If a search keeps the best
sums, as beam search does, a level has the nodes that the search would keep if the draft model's log-probabilities were
the model's (the forest of DSBD, arXiv 2409.16560 section 3, with best sums instead of draws). Otherwise each live node
has its likeliest continuation; a single live node also has alternatives.
"""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from engine.cache.tree import TokenTree
from engine.contract.top_sums import TopSums
from engine.drafts import Draft, Wanted
from engine.errors import KVMemoryError
from engine.step.packing import Chunk
from engine.step.runner import PassWork, Runner

LEVELS = 8  # most tokens ahead
CANDIDATES = 8  # best tokens of a row that are looked at
OFFERED = 2  # most drafted children of a node, if there is a single live node
LEAST_CHANCE = 0.05  # the least probability of such a node
MEASURED = 64  # most tokens of a pass whose time is recorded: larger ones say little about small ones
CATCH_UP = 8  # tokens that the draft model always reads, whatever they cost


class ModelDrafts:
    """Drafts for one request; see `engine.drafts.RequestDrafter`. The caller that opened it releases its tree.

    Args:
        drafter: the drafter, which has the model.
        salt: the salt of cached prefixes, see `PrefixCache`.
        prompt: token ids.

    Attributes:
        tree: the request's tree in the draft model's cache. Below the text it has live nodes, and evaluated ones.
        rows: evaluated node -> its best tokens with their log-probabilities, best first.
    """

    def __init__(self, drafter: "ModelDrafter", salt: str | None, prompt: Sequence[int]):
        self.drafter, shape, pool = drafter, drafter.runner.model.shape, drafter.runner.pool
        self.tree = TokenTree(pool, prompt, switch_length=shape.switch_length)
        self.tree.salt = salt
        self.rows: dict[int, list[tuple[int, float]]] = {}
        self._end = self.tree.root  # the node of the text's last token
        self._vocab, switch = shape.vocab_size, shape.switch_length
        self._longest = math.inf if shape.max_positions is None else shape.max_positions
        if switch is not None and not self.tree.trunk.long_rope:
            self._longest = switch  # rotary embeddings do not change within a text that is drafted
        self._fits = max(prompt) < self._vocab
        if pool.prefixes is not None:
            self.tree.reuse()

    def learn(self, tokens: Sequence[int]) -> None:
        self._fits = self._fits and max(tokens, default=0) < self._vocab
        if self._fits:
            self._end = self.tree.grow_path(self._end, tokens)[-1] if tokens else self._end

    def draft(self, ahead: Sequence[int], nodes: int, depth: int) -> Draft:
        [[draft]] = self.drafter.draft_together([Wanted(self, [ahead], [depth], nodes)])
        return draft

    def close(self, tokens: Sequence[int]) -> None:
        self.rows = {}

    def give_up(self) -> None:
        """Free all pages and draft no more."""
        self._fits, self.rows = False, {}
        self.tree.release()

    def follow(self, ahead: Sequence[Sequence[int]]) -> list[int]:
        """Grow the live nodes in the tree; returns their nodes, or nothing if there can be no drafts below them.

        New nodes have no rows yet. Nodes that are not below a live node are dropped.
        """
        tree = self.tree
        if not self._fits or any(max(path, default=0) >= self._vocab for path in ahead):
            return []
        if tree.position(self._end) + max(map(len, ahead), default=0) + 1 >= self._longest:
            return []
        twins = [tree.grow_path(self._end, path)[-1] if path else self._end for path in ahead]
        kept, below = {self._end: None}, [*twins]
        for node in below:
            kept[node] = None
            below += tree.children(node).values()
        tree.keep(kept)
        self.rows = {node: row for node, row in self.rows.items() if node in kept}
        return twins

    def reach(self, ahead: Sequence[int]) -> int:
        """How many tokens after a live node the model's context has room for."""
        return int(min(LEVELS, self._longest - 1 - self.tree.position(self._end) - len(ahead)))


class Tip(NamedTuple):
    """A node whose children are drafted next.

    Attributes:
        live: the index of the live node that it is below.
        place: its index in that node's draft; -1: the live node.
        node: its node in the draft model's tree; for a drafted node its parent's, until it is evaluated.
        token: the token of a drafted node that is not evaluated; else None.
        chance: probability of the path from the live node, by the draft model.
        total: the live node's sum and the log-probability of the path.
        state: the state of the constraint.
    """

    live: int
    place: int
    node: int
    token: int | None
    chance: float
    total: float
    state: Any


class Forest:
    """The drafts of one request while they grow.

    Args:
        wanted: what the request may draft.

    Attributes:
        drafts: the drafts of its live nodes.
        tips: nodes of the latest level that may have children; none at first if nothing can be drafted.
        level: the latest level of the drafts; 0: the live nodes.
    """

    def __init__(self, wanted: Wanted):
        request, sums, states = wanted.request, wanted.sums, wanted.states
        assert isinstance(request, ModelDrafts)
        self.wanted, self.request, self.level = wanted, request, 0
        self.drafts = [Draft() for _ in wanted.ahead]
        self.tips = [
            Tip(i, -1, node, None, 1.0, 0.0 if sums is None else float(sums[i]), states and states[i])
            for i, node in enumerate(request.follow(wanted.ahead))
        ]

    def unknown(self) -> list[int]:
        """Grow the tips; returns those without a row."""
        tree, rows = self.request.tree, self.request.rows
        self.tips = [
            tip if tip.token is None else tip._replace(node=tree.child(tip.node, tip.token), token=None)
            for tip in self.tips
        ]
        unknown = [*dict.fromkeys(tip.node for tip in self.tips if tip.node not in rows)]
        for node in unknown:
            if tree.is_evaluated(node):  # as the ancestor of a live node
                tree.forget_row(node)
        return unknown

    def grow(self) -> None:
        """Draft the next level below the tips, and make tips of its nodes."""
        wanted, self.level = self.wanted, self.level + 1
        found = [each for tip in self.tips for each in self._children(tip)]
        if wanted.sums is not None and (len(wanted.ahead) > 1 or wanted.width > 1):
            found.sort(key=lambda each: -each.total)
            best, others = found[: wanted.width], []
        else:
            found.sort(key=lambda each: -each.chance)
            best = [*{each.live: each for each in reversed(found)}.values()]
            others = [each for each in found[1:OFFERED] if each.chance >= LEAST_CHANCE] if len(self.drafts) == 1 else []
        self.tips = []
        for goes_on, each in [*((True, each) for each in best), *((False, each) for each in others)]:
            draft = self.drafts[each.live]
            if len(draft.tokens) < wanted.nodes and each.token is not None:
                draft.tokens.append(each.token)
                draft.parents.append(each.place)
                draft.scores.append(each.chance)
                if goes_on and self.level < self._reach(each.live):
                    self.tips.append(each._replace(place=len(draft.tokens) - 1))
        self.tips = [tip for tip in self.tips if len(self.drafts[tip.live].tokens) < wanted.nodes]

    def _reach(self, live: int) -> int:
        """How many levels a live node may have."""
        return min(self.wanted.depth[live], self.request.reach(self.wanted.ahead[live]))

    def _children(self, tip: Tip) -> list[Tip]:
        """The likeliest allowed tokens after a tip; they share the probability of forbidden ones."""
        wanted, row = self.wanted, self.request.rows.get(tip.node, ())
        if self.level > self._reach(tip.live):
            return []
        found, left = [], max(0.0, 1.0 - math.fsum(math.exp(logp) for _, logp in row))
        for token, logp in row:
            if token in wanted.ends:
                continue
            state = tip.state
            if state is not None and (state := wanted.after(state, token)).forbidden:
                continue
            found.append((token, logp, state))
            left += math.exp(logp)
        shift = math.log(left) if tip.state is not None and left > 0 else 0.0
        return [
            Tip(tip.live, tip.place, tip.node, token, tip.chance * math.exp(logp - shift), tip.total + logp, state)
            for token, logp, state in found
            if logp > -math.inf
        ]

    def worth(self, seconds: float) -> bool:
        """Whether another level is worth a pass of the draft model of this many seconds."""
        if self.level >= LEVELS:
            return False
        if not self.wanted.saving:
            return True
        if len(self.drafts) > 1 and self.wanted.sums is not None:
            chance = self.wanted.odds(self.level + 1)
        else:
            by_live = [0.0] * len(self.drafts)
            for tip in self.tips:
                by_live[tip.live] += tip.chance
            chance = math.prod(by_live)
        return chance * self.wanted.saving > seconds


class ReadPart(NamedTuple):
    """A request's part of a pass of the draft model.

    Attributes:
        rows: nodes whose rows are wanted, and their places among the tokens of the chunk; empty if the chunk lacks
            tokens that they need.
        whole: whether the chunk has all tokens that they need.
        of_prompt: how many of the tokens belong to the prompt.
    """

    forest: Forest
    chunk: Chunk
    rows: list[tuple[int, int]]
    whole: bool
    of_prompt: int

    @staticmethod
    def take(forest: Forest, nodes: Sequence[int], room: int) -> "ReadPart | None":
        """Take slots for the tokens that the rows of some nodes need, or for as many as fit; None if there are none. A
        request that finds the cache full drafts no more."""
        tree = forest.request.tree
        trunk, branches = tree.pending(nodes)
        taken = min(trunk, room)
        some = branches[: room - taken]
        if not taken and not some:
            return None
        before, whole = tree.trunk.cached, taken == trunk and len(some) == len(branches)
        try:
            chunk = Chunk(tree, taken, some, tree.allocate(taken, some))
        except KVMemoryError:
            forest.request.give_up()
            return None
        place = {tree.root: taken - 1} | {node: taken + i for i, node in enumerate(some)}
        rows = [(node, place[node]) for node in nodes] if whole else []
        of_prompt = max(0, min(tree.prompt_length, before + taken) - before)
        return ReadPart(forest, chunk, rows, whole, of_prompt)


class ModelDrafter:
    """The drafter of an engine that has a draft model.

    Args:
        runner: the draft model's runner. Both models have the same vocabulary.

    Attributes:
        passes: number of passes that it has run.
    """

    def __init__(self, runner: Runner):
        self.runner, self.passes = runner, 0

    def open(self, salt: str | None, prompt: Sequence[int]) -> ModelDrafts:
        return ModelDrafts(self, salt, prompt)

    @torch.inference_mode()
    def draft_together(self, wanted: Sequence[Wanted]) -> list[list[Draft]]:
        """A draft for each live node of each request of a step, in order. A level of all drafts takes one pass."""
        forests, seconds = [Forest(each) for each in wanted], self.runner.time.seconds
        growing = [forest for forest in forests if forest.tips and self._affordable(forest)]
        while growing:
            growing, others = self._read(growing), len(growing)
            for forest in growing:
                forest.grow()
            growing = [each for each in growing if each.tips and each.worth(seconds(len(each.tips)) / others)]
        return [forest.drafts for forest in forests]

    def _affordable(self, forest: Forest) -> bool:
        """Whether the request may spend the time to read the tokens generated since it drafted last."""
        tree = forest.request.tree
        trunk, nodes = tree.pending([tip.node for tip in forest.tips])
        tokens = trunk + len(nodes) - max(0, tree.prompt_length - tree.trunk.cached)
        return tokens <= CATCH_UP or self.runner.time.seconds(tokens) <= forest.wanted.spare

    def _read(self, forests: Sequence[Forest]) -> list[Forest]:
        """Evaluate the tips of forests in one pass, as far as it has room; returns the forests whose tips have rows.

        For the others the pass reads a part of the text.
        """
        room, ready, parts = self.runner.budget, list[Forest](), list[ReadPart]()
        try:
            for forest in forests:
                nodes = forest.unknown()
                part = ReadPart.take(forest, nodes, room) if nodes else None
                if part is not None:
                    parts.append(part)
                    room -= len(part.chunk)
                if not nodes or (part is not None and part.whole):
                    ready.append(forest)
            if parts:
                self._run(parts)
        except BaseException:
            for part in parts:
                part.chunk.tree.release_slots(part.chunk.trunk_tokens, part.chunk.nodes)
            raise
        return ready

    def _run(self, parts: Sequence[ReadPart]) -> None:
        """Run a pass, keep the best tokens of its rows, and note its time."""
        began, runner, first = time.perf_counter(), self.runner, 0
        owners, places = list[tuple[ModelDrafts, int]](), list[int]()
        for part in parts:
            for node, place in part.rows:
                owners.append((part.forest.request, node))
                places.append(first + place)
            first += len(part.chunk)
        for (request, node), row in zip(owners, self._best(parts, places), strict=True):
            request.rows[node] = row
        seconds = time.perf_counter() - began
        self.passes += 1
        if first <= MEASURED and not any(part.of_prompt for part in parts):
            runner.time.note(first, seconds)
        for part in parts:
            tokens, wanted = len(part.chunk), part.forest.wanted
            wanted.passes.append((self.passes, tokens, seconds))
            wanted.seconds += seconds * (tokens - part.of_prompt) / first

    def _best(self, parts: Sequence[ReadPart], places: Sequence[int]) -> list[list[tuple[int, float]]]:
        """The best tokens of rows of a pass with their log-probabilities; none for a row that is not finite."""
        runner, k = self.runner, min(CANDIDATES, self.runner.vocab_size)
        chunks = [part.chunk for part in parts]
        if not places:
            runner.forward(chunks)
            return []
        if runner.only_sums:
            founds, finite = runner.evaluate_top_sums(PassWork(chunks, places), [TopSums([0.0], k)] * len(places))
            rows = [[*zip(found[1].int().tolist(), found[0].tolist(), strict=True)] for found in founds]
        else:
            logp_NV, finite, _ = runner.evaluate(PassWork(chunks, places))
            best = logp_NV.topk(k)
            rows = [[*zip(*row, strict=True)] for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
        return [row if sound else [] for row, sound in zip(rows, finite, strict=True)]

"""Drafts of one request: which guesses its passes also evaluate, and answers made from drafted rows.

The row of a drafted node is exactly the row that a pass would have computed; it is sent when the search asks for
that node. So the choice of drafts changes no answer and can depend on time alone (`engine.drafts.size`).
"""

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.cache.drafts import DraftedNode
from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.contract import Evaluate
from engine.contract.checks import guarded
from engine.contract.top_sums import FoundSums, TopSums, find_top_sums, found_in_entries
from engine.drafts import Draft, Drafter, Wanted
from engine.drafts.heads import HeadDrafts
from engine.drafts.model import ModelDrafts
from engine.drafts.size import MAX_NODES, ROWS_BYTES, DraftSize
from engine.errors import KVMemoryError
from engine.step.packing import Chunk
from engine.step.partial import PartialRows, PartialSums, Pending
from engine.step.timing import PassTime

SPARE = 8  # best tokens of a drafted row that are kept beyond those asked for, in case of equal sums


class BestOfRow(NamedTuple):
    """The most probable tokens of a row, best first: log-probabilities and tokens [2, k], float64."""

    found_2k: Tensor
    all: bool  # whether the row has no other tokens


class Charge:
    """Seconds of a pass for one of the searches that share it, by its tokens; see `PassTime.charge`."""

    def __init__(self, time: PassTime):
        self.time, self.load = time, (0, 0)

    def __call__(self, tokens: int) -> float:
        return self.time.charge(tokens, *self.load)


class EngineDrafts:
    """The drafter of an engine, and what its latest request has learnt about the use of drafts.

    Args:
        drafter: makes the guesses.
    """

    def __init__(self, drafter: Drafter):
        self.drafter, self.warned = drafter, False
        self.latest: DraftSize | None = None  # sizes of the request that ended last

    def size(self, charge: Charge) -> DraftSize:
        """The draft sizes for a new request, with what the latest request has learnt."""
        size = DraftSize(charge)
        if self.latest is not None:
            size.inherit(self.latest)
        return size

    def failed(self, error: Exception) -> None:
        """Report the first failure of the drafter."""
        if not self.warned:
            self.warned = True
            text = f"a drafter failed, so its request continues without drafts: {type(error).__name__}: {error}"
            warnings.warn(text[:500], RuntimeWarning, stacklevel=2)


@dataclass
class DraftedPass:
    """A pass of one request, whose drafts are accounted for when the request needs another pass.

    Attributes:
        rows: its tokens without drafts; 0: there was no pass yet.
        known: further tokens that it would have had if they had not been drafted before.
        wanted: whether it was to have drafts.
        nodes: its drafted nodes.
        host: seconds of this thread for these drafts.
        saved: passes that were not needed since, because the rows were known.
    """

    rows: int = 0
    known: int = 0
    wanted: bool = False
    nodes: int = 0
    host: float = 0.0
    saved: float = 0.0


class JobDrafts:
    """The drafts of one request.

    Args:
        engine: the engine's drafter.
        salt: see `Drafter.open`.
        limit: most new tokens.
        ends: tokens that end an output.
        vocab_size: tokens that can be generated.
        time: the expected times of passes.

    Attributes:
        beside: trees that the drafter has in the caches of other models; the owner of the request releases them.
        nodes, accepted, saved: drafted nodes; those whose rows the search asked for; passes that were saved.
    """

    def __init__(
        self, engine: EngineDrafts, salt: str | None, limit: int, ends: Collection[int], vocab_size: int, time: PassTime
    ):
        self.engine, self.salt, self.limit, self.ends, self.vocab_size = engine, salt, limit, ends, vocab_size
        self.charge = Charge(time)
        self.size = engine.size(self.charge)
        self.tree: TokenTree | None = None
        self.restart()

    def restart(self) -> None:
        """Forget the tree: the search starts again."""
        if self.tree is not None:
            self.close(())
        self.tree, self.request, self.beside = None, None, list[TokenTree]()
        self.nodes = self.accepted = self.saved = 0
        self._learnt = 0  # tokens of the trunk that the drafter was told
        self._guesses: dict[int, tuple[Guesses, int]] = {}  # requested node -> guesses, its place among them
        self._latest = DraftedPass()
        self._live, self._apart = list[int](), False  # nodes that may have drafts; whether they do not wait for others

    def begin(self, tree: TokenTree) -> None:
        """Draft below the nodes of a tree that holds the prompt."""
        self.tree = tree
        with self._guarded():
            self.request = self.engine.drafter.open(self.salt, tree.trunk.tokens[: tree.prompt_length])
            if isinstance(self.request, ModelDrafts):
                self.beside = [self.request.tree]

    def close(self, tokens: Sequence[int]) -> None:
        """The request has ended with these tokens."""
        with self._guarded():
            request, self.request = self.request, None
            if request is not None:
                self.engine.latest = self.size
                request.close(tokens)
        self.tree = None

    def stats(self) -> dict[str, Any]:
        """The figures of the request, see docs/stats.md."""
        return {"drafted_nodes": self.nodes, "drafted_accepted": self.accepted, "passes_saved": self.saved}

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Context in which an error ends the drafts of the request, but not the request."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Go on without drafts after an error of the drafter."""
        self.request = None
        if self.tree is not None:
            self.tree.drop_drafts()
        for tree in self.beside:
            tree.release()
        self.engine.failed(error)

    def give_way(self, pool: PagePool) -> bool:
        """Free the pages of a pool that a draft model holds; it drafts no more. Returns whether there were any."""
        held = [tree for tree in self.beside if tree.pool is pool and tree.page_count]
        if held and isinstance(self.request, ModelDrafts):
            self.request.give_up()
        return bool(held)

    @property
    def joint(self) -> bool:
        """Whether the drafter guesses for several requests at once."""
        return hasattr(self.engine.drafter, "draft_together")

    # --- before a pass ---

    def ask(self, chunk: Chunk, pending: Pending) -> Wanted | None:
        """Say what to draft below the nodes of a request that a chunk completes; None: nothing."""
        tree, request, answer, constrained = chunk.tree, pending.request, pending.partial, pending.constrained
        if self.request is None or tree is not self.tree or request.hidden is not None or chunk.trunk_tokens > 1:
            return None
        sums = isinstance(answer, PartialSums)
        if sums and constrained is not None and constrained.lists_tokens(tree, request.nodes):
            return None  # whole rows would be computed for the drafts alone
        began = time.thread_time()
        self._settle(len(chunk), len(pending.known))
        self._live, self._apart, asked = [], request.apart and len(request.nodes) > 1, None
        with self._guarded():
            self._learn()
            live = [node for node in request.nodes if tree.is_evaluated(node)]
            unmeasured = self.joint and self.size.seconds is not None and not self.size.cost(len(chunk))
            if (wanted := self.size.wanted()) and live and len(live) <= MAX_NODES and not unmeasured:
                states = None if constrained is None or not constrained.states.watches(tree) else constrained.states
                asked = Wanted(
                    self.request,
                    [path_below(tree, node) for node in live],
                    [max(0, tree.reach(node, self.limit)) for node in live],
                    max(1, wanted // len(live)),
                    [*map(float, answer.top_sums(live).sums)] if sums else None,
                    len(live) if request.next is None else request.next.width,
                    saving=self.size.cost(len(chunk)),
                    spare=self.size.credit * self.size.cost(len(chunk)) if self.size.seconds else math.inf,
                    odds=self.size.odds,
                    ends=self.ends,
                    states=None if states is None else [states.of(tree, node) for node in live],
                    after=None if states is None else states.after,
                )
                self._live = live
        self._latest.host = time.thread_time() - began
        return asked

    def guess(self, wanted: Wanted) -> None:
        """Fill in the drafts of this request, by its drafter alone; none if that fails."""
        began = time.thread_time()
        with self._guarded():
            places, draft = zip(wanted.ahead, wanted.depth, strict=True), wanted.request.draft
            wanted.drafts = [draft(ahead, wanted.nodes, depth) if depth else Draft() for ahead, depth in places]
        self._latest.host += time.thread_time() - began

    def extend(self, chunk: Chunk, wanted: Wanted, room: int) -> Chunk:
        """A chunk with drafted nodes below the live nodes. They have slots.

        Args:
            wanted: returned by `ask` for the chunk, with its drafts.
            room: tokens that the pass has room for.
        """
        began, planted = time.thread_time(), list[DraftedNode]()
        with self._guarded():
            planted = self._planted(chunk, wanted, self._room(chunk.tree, room))
            self._latest.wanted = True
        self.nodes += len(planted)
        self._latest.nodes = len(planted)
        self._latest.host += time.thread_time() - began + wanted.seconds
        table = chunk.tree.slots.table[0]
        return replace(chunk, drafts=planted, slots=[*chunk.slots, *(table[draft.slot] for draft in planted)])

    def _settle(self, rows: int, known: int) -> None:
        """Account for the latest pass of the request, now that it needs another one."""
        latest, self._latest = self._latest, DraftedPass(rows, known)
        if latest.wanted:
            self.size.note_together(latest.saved)
            self.size.settle(latest.host, latest.nodes, 1 + latest.saved, latest.rows, latest.known)
        elif latest.rows:
            self.size.plain(0.0)

    def _learn(self) -> None:
        assert self.tree is not None and self.request is not None
        if fresh := self.tree.settled_from(self._learnt):
            self.request.learn(fresh)
            self._learnt += len(fresh)

    def _room(self, tree: TokenTree, room: int) -> int:
        """How many nodes may be drafted: limited by free slots, and by the bytes of rows that are kept."""
        free = len(tree.slots.free) + tree.pool.free_pages // 4 * tree.pool.page_size
        kept = sum(isinstance(node.row, Tensor) for node in tree.drafts) + len(tree.drafts.rows)
        return max(0, min(room, free, ROWS_BYTES // (4 * self.vocab_size) - kept))

    def _planted(self, chunk: Chunk, wanted: Wanted, room: int) -> list[DraftedNode]:
        """Take slots for the guesses that are worth a place in a pass; returns the new nodes."""
        tree, live, drafts = chunk.tree, self._live, list[Draft]()
        for i, (node, guesses) in enumerate(zip(live, wanted.drafts or (), strict=True)):
            drafts.append(draft := self._sound(guesses, wanted, i, tree.children(node)))
            self._guesses[node] = Guesses(draft), -1
        by_level = self.joint and wanted.sums is not None and len(live) > 1
        choose = self.size.choose_levels if by_level else self.size.choose_together
        if self._apart:
            choose = partial(self.size.choose_apart, places=[tree.position(node) for node in live])
        planted: list[DraftedNode] = []
        for node, draft, chosen in zip(live, drafts, choose(drafts, len(chunk)), strict=True):
            placed: dict[int, DraftedNode | int] = {-1: node}
            for i in chosen:
                if len(planted) < room and (parent := placed.get(draft.parents[i])) is not None:
                    try:
                        placed[i], new = tree.draft(parent, draft.tokens[i])
                    except KVMemoryError:
                        return planted
                    if new:
                        planted.append(placed[i])  # type: ignore[arg-type]
        return planted

    def _sound(self, draft: Draft, wanted: Wanted, live: int, grown: Collection[int]) -> Draft:
        """A draft below a live node without grown tokens, tokens that no search would evaluate or that the constraint
        forbids, and without the nodes below them."""
        sound, place, seen, depth = Draft(), {-1: -1}, {(-1, token) for token in grown}, {-1: 0}
        states, reach = {-1: wanted.states and wanted.states[live]}, wanted.depth[live]
        for i, (token, parent, score) in enumerate(zip(draft.tokens, draft.parents, draft.scores, strict=True)):
            above = place.get(parent)
            if above is None or not isinstance(token, int) or not 0 <= token < self.vocab_size or token in self.ends:
                continue
            if (above, token) in seen or depth[above] >= reach or len(sound.tokens) == wanted.nodes or not score > 0:
                continue
            if (state := states[above]) is not None and (state := wanted.after(state, token)).forbidden:
                continue
            place[i] = at = len(sound.tokens)
            depth[at], states[at] = depth[above] + 1, state
            seen.add((above, token))
            sound.tokens.append(token)
            sound.parents.append(above)
            sound.scores.append(min(float(score), sound.scores[above] if above >= 0 else 1.0))
        return sound

    # --- after a pass ---

    def reads_rows(self, tree: TokenTree) -> bool:
        """Whether the drafter wants the rows of the passes of a tree."""
        return tree is self.tree and isinstance(self.request, HeadDrafts)

    def read_rows(self, chunk: Chunk, rows_TE: Tensor) -> None:
        """Give the drafter the rows of an evaluated chunk, in the form that its head reads."""
        tree = chunk.tree
        with self._guarded():
            assert isinstance(self.request, HeadDrafts)
            self._learn()
            paths = [path_below(tree, node) for node in [*chunk.nodes, *chunk.drafts]]
            self.request.read_rows(chunk.cached - chunk.trunk_tokens, paths, rows_TE)

    @staticmethod
    def take_rows(tree: TokenTree, drafts: Sequence[DraftedNode], rows_NV: Tensor, finite: Sequence[bool]) -> None:
        """Keep the rows of drafted nodes, [1, V] each, see `Edit`. Nodes whose rows are not finite are dropped."""
        bad = []
        for i, node in enumerate(drafts):
            if node.row is None:  # else it has its best tokens, and there are no rows
                node.row = rows_NV[i : i + 1]
            if not finite[i]:
                bad.append(node)
        for node in bad:
            if not isinstance(node.parent, DraftedNode) or node.parent not in bad:
                tree.drop_draft(node)

    # --- when the search asks ---

    def known(
        self, request: Evaluate, nodes: Sequence[int], partial_answer: PartialRows | PartialSums
    ) -> dict[int, Any]:
        """The rows of these nodes of a request that are known, taken from the tree; others need an evaluation. Top sums
        that the best tokens of rows decide are added to the answer."""
        tree = request.tree
        if tree is not self.tree:
            return {}
        with self._guarded():
            self._compare(tree, request.nodes)
        rows = tree.drafts.rows
        known = {node: rows.pop(node) for node in nodes if node in rows} if rows else {}
        best = [node for node, row in known.items() if isinstance(row, BestOfRow)]
        if request.hidden is not None:
            best = [*known]
        elif best and isinstance(partial_answer, PartialSums):
            wanted = partial_answer.top_sums(best)
            if (found := best_of([known[node] for node in best], wanted, partial_answer.width)) is not None:
                partial_answer.found(found, best)
                best = []
        for node in best:  # the best tokens of their rows do not suffice
            del known[node]
            tree.forget_row(node)
        return known

    def _compare(self, tree: TokenTree, nodes: Sequence[int]) -> None:
        """Compare guesses with the nodes that a search asks for."""
        if not (guesses := self._guesses):
            return
        self._guesses, came = {}, set[tuple[int, int]]()
        for node in nodes:
            if (found := guesses.get(tree.parent(node))) is not None:
                guessed, at = found
                if (child := guessed.child(at, tree.token(node))) is not None:
                    self._guesses[node] = guessed, child
                    came.add((id(guessed), child))
        for guessed, at in guesses.values():
            for child in guessed.children.get(at, {}).values():
                self.size.note(guessed.chance(child), (id(guessed), child) in came)

    def answer(self, pending: Pending, fail: Callable[[Exception], None]) -> tuple[list[int], Tensor]:
        """Add the known rows that are whole to an answer; returns their nodes, and these rows.

        Args:
            fail: called with the exception of an edit, as in a pass.
        """
        tree, known, partial_answer, constrained = self.tree, pending.known, pending.partial, pending.constrained
        assert tree is not None
        self.accepted += len(known)
        whole = {node: row for node, row in known.items() if isinstance(row, Tensor)}  # of the others see `known`
        if not whole:
            return [], torch.empty(0, 0)
        nodes, rows = [*whole], [*whole.values()]
        logp_NV = rows[0] if len(rows) == 1 else torch.cat(rows)
        if constrained is not None:
            guarded(constrained.edit(tree, nodes, slice(0, len(nodes))).apply, fail)(logp_NV)
        if isinstance(partial_answer, PartialSums):
            partial_answer.found(find_top_sums(logp_NV, None, partial_answer.top_sums(nodes)), nodes)
        else:
            partial_answer.add(nodes, logp_NV)
        return nodes, logp_NV

    def answered(self, nodes: int) -> None:
        """Count an answer for `nodes` nodes that needed no pass, because all of its rows were known."""
        self.saved += 1
        self._latest.saved += min(1.0, nodes / len(self._live)) if self._apart and self._live else 1


class Guesses:
    """A draft, and the children of its nodes by their tokens."""

    def __init__(self, draft: Draft):
        self.draft = draft
        self.children: dict[int, dict[int, int]] = {}
        for i, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            self.children.setdefault(parent, {})[token] = i

    def child(self, at: int, token: int) -> int | None:
        """The child of a node for a token; None if that was not guessed."""
        return self.children.get(at, {}).get(token)

    def chance(self, node: int) -> float:
        """The estimated probability of a node, given its parent."""
        parent = self.draft.parents[node]
        return self.draft.scores[node] / (self.draft.scores[parent] if parent >= 0 else 1.0)


def path_below(tree: TokenTree, node: DraftedNode | int) -> list[int]:
    """The tokens from the trunk's end to a live node, or to a drafted one."""
    path = []
    while isinstance(node, DraftedNode):
        path.append(node.token)
        node = node.parent
    while node != tree.root:
        path.append(tree.token(node))
        node = tree.parent(node)
    return path[::-1]


def best_of(rows: Sequence[BestOfRow], wanted: TopSums, width: int) -> FoundSums | None:
    """The top sums of rows whose best tokens are known; None if another token might belong to them."""
    counts = [row.found_2k.shape[1] for row in rows]
    found_2M = torch.cat([row.found_2k for row in rows], 1)
    row_M = torch.arange(len(rows)).repeat_interleave(torch.tensor(counts))
    value_M, token_M = found_2M[0].float(), found_2M[1].long()
    order = (row_M * width + token_M).argsort()
    found = found_in_entries(value_M[order], row_M[order], token_M[order], wanted, width)
    least = float(found[0, -1]) if found.shape[1] == wanted.k else -math.inf
    ends = [end - 1 for end in torch.tensor(counts).cumsum(0).tolist()]
    sums = value_M[ends] + torch.tensor(wanted.sums, dtype=torch.float32)
    if any(not row.all and float(most) >= least for row, most in zip(rows, sums, strict=True)):
        return None
    return found

"""ADED: drafts from n-grams, verified by the model: the tokens of plain decoding in fewer forward passes.

"Adaptive Draft-Verification for Efficient Large Language Model Decoding", errata mended; comments cite the steps of
docs/algorithms.md. Every node of a draft gets one draw, keyed by its position, and the longest drafted path of draws is
taken, so that the output is what `greedy` or `sample` gives, token for token, whatever was drafted.
`drafters` makes drafts, `draft_size` decides how much of a draft is evaluated, `ngrams` keeps counts on disk.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from engine.errors import KVMemoryError, UsageError
from engine.sampling import Warp, draw
from search.aded.draft_size import MOST, DraftSize
from search.aded.drafters import MCTS, Draft, Drafter, backoff
from search.aded.ngrams import NGramStore, add_to_store, count, open_store
from search.base import (
    Evaluate,
    Likely,
    Output,
    Report,
    Search,
    SearchGenerator,
    SearchResult,
    Task,
    likely,
    register,
)

MS = 1000
OBSERVED = 12  # likeliest nodes of a draft after which the drafter is told what the model thinks


@register("aded")
@dataclass(frozen=True)
class ADED(Search):
    """The tokens of greedy, or of sample with its parameters, in fewer passes: n-gram drafts that the model verifies.

    Args:
        temperature, top_k, top_p, seed: given any of them, the tokens are those of `sample` with these; else greedy's.
        drafter: "backoff": the likeliest paths of a back-off n-gram; "mcts": the paper's search of a tri-gram matrix;
            or a function that makes a `Drafter` for a request.
        nodes: of a draft, at most; auto: as many as bring the most tokens per second.
        adapt: whether the drafter learns from the request's own text.
        store: file of counted n-grams to start from (python -m tools.ngrams).
        save: file of n-grams that every answer is added to.
        iterations: mcts: simulations per draft; s in the paper, as the letters that follow.
        candidates: mcts: most visited nodes that become drafts; n.
        depth: mcts: tokens that a simulation looks ahead; l.
        successors: mcts: likeliest successors of a pair of tokens that are kept; t.
        c1: mcts: weight of exploration.
        c2: mcts: visits at which exploration starts to grow.
        window: mcts: last tokens whose tri-grams are strengthened at every step; this and the next two are the code's.
        increment: mcts: by how much.
        cap: mcts: up to what.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    drafter: str | Callable[[], Drafter] = "backoff"
    nodes: int | str = "auto"
    adapt: bool = True
    store: str | Path | None = None
    save: str | Path | None = None
    iterations: int = 150
    candidates: int = 24
    depth: int = 4
    successors: int = 12
    c1: float = 32.0
    c2: float = 8.0
    window: int = 16
    increment: float = 0.04
    cap: float = 3.0

    def __post_init__(self):
        self._warp()
        if not callable(self.drafter) and self.drafter not in ("backoff", "mcts"):
            raise UsageError(f"drafter: expected backoff or mcts, got {self.drafter!r}")
        if self.nodes != "auto":
            self._check("nodes", int, 0, 1024, "auto or ")
        if not isinstance(self.adapt, bool):
            raise UsageError(f"adapt: expected true or false, got {self.adapt!r}")
        for name in ("store", "save"):
            if not isinstance(getattr(self, name), str | Path | None):
                raise UsageError(f"{name}: expected a file, got {getattr(self, name)!r}")
        if self.seed is not None:
            self._check("seed", int, 0, 2**63 - 1)
        for name in ("iterations", "candidates", "depth", "successors", "window"):
            self._check(name, int, 0 if name == "window" else 1, 1 << 16)
        for name, low in (("c1", 0), ("c2", 1e-6), ("increment", 0), ("cap", 0)):
            self._check(name, float, low, 1e6)
        if self.save is not None and not Path(self.save).absolute().parent.is_dir():
            raise UsageError("save: expected a file in a folder that is there", where=str(self.save))
        self._open_store()

    def _check(self, name: str, kind: type, low: float, high: float, also: str = "") -> None:
        value = getattr(self, name)
        if not isinstance(value, int | kind) or isinstance(value, bool) or not low <= value <= high:
            what = "an integer" if kind is int else "a number"
            raise UsageError(f"{name}: expected {also}{what} from {low} to {high}, got {value!r}")

    def run(self, task: Task) -> SearchGenerator:
        tree, warp, drafter, size = task.tree, self._warp(), self._drafter(task), self._size(task)
        if self.save is not None and Path(self.save).exists():  # before the work is done
            open_store(self.save).check(task.vocab_size, self._fingerprint(task))
        prompt, tokens, logprob = list(tree.trunk.tokens), [], 0.0
        accepted: list[int] = []  # per step
        reason, drafted, verify_seconds = None, 0, 0.0
        unlearnt, draft_seconds = list(prompt), 0.0
        looking = 0.0

        def look(logp_NV: Tensor, peaks_NB: Tensor | None) -> Tensor:
            """What the model holds for likely after the likeliest nodes."""
            nonlocal looking
            began, first = time.thread_time(), slice(1 + OBSERVED)
            found = likely(logp_NV[first], drafter.curiosity, peaks_NB[first] if peaks_NB is not None else None)
            looking = time.thread_time() - began
            return found

        while reason is None:
            reach = self._reach(task, len(tokens))
            wanted = size.wanted() if reach else 0
            if not wanted:  # plain decoding, without more ado: where passes are short, a microsecond counts
                logp_V = (yield Evaluate(tree, [tree.root])).rows_NV[0]
                began = time.perf_counter()
                token = self._pick(logp_V, warp, tree.position(tree.root) + 1)
                logprob += float(logp_V[token])
                tokens.append(token)
                unlearnt.append(token)
                accepted.append(0)
                reason = task.finish_reason(tokens)
                if not reason:
                    tree.keep([tree.child(tree.root, token)])
                verify_seconds += (host := time.perf_counter() - began)
                size.plain(host)
                yield Report([token], lambda: tokens, {"drafted": 0, "accepted": 0})
                continue
            began = time.thread_time()
            drafter.learn(unlearnt)  # A2
            draft = drafter.draft(wanted, reach)  # A3, A4
            row, places = self._plant(task, draft, size.choose(draft), reach)
            draft_seconds += (drafting := time.thread_time() - began)
            curious = len(row) > 1 and drafter.curiosity < 1
            try:
                logp_NV, found = yield Evaluate(tree, list(row), look if curious else None)  # A5
            except KVMemoryError:
                if len(row) == 1:
                    raise
                tree.keep([tree.root])
                row = {tree.root: 0}
                logp_NV, curious = (yield Evaluate(tree, [tree.root])).rows_NV, False
            began = time.thread_time() - (looking if curious else 0.0)
            known = Likely(found, min(len(row), 1 + OBSERVED)) if curious else None
            node, fresh = tree.root, []
            while (i := row.get(node)) is not None:  # A6
                logps = known[i] if known and i < len(known) else {}
                if warp is None and logps:
                    token = max(logps, key=logps.__getitem__)  # of equals the lower
                else:
                    token = self._pick(logp_NV[i], warp, tree.position(node) + 1)
                logprob += logps[token] if token in logps else float(logp_NV[i, token])
                tokens.append(token)
                fresh.append(token)
                reason = task.finish_reason(tokens)  # A7
                if reason:
                    break
                node = tree.child(node, token)  # the drafted node, if that was drafted
            if known:
                drafter.observe(places[: len(known)], known)
            unlearnt = [*fresh]
            size.learn(draft, fresh)
            drafted += len(row) - 1
            accepted.append(len(fresh) - 1)
            if not reason:
                tree.keep([node])
            verify_seconds += (verifying := time.thread_time() - began)
            size.settle(drafting + verifying, len(row) - 1, len(fresh))
            yield Report(fresh, lambda: tokens, {"drafted": len(row) - 1, "accepted": accepted[-1]})
        if self.save is not None:
            add_to_store(self.save, count(prompt[-2:] + tokens), task.vocab_size, self._fingerprint(task))
        steps = len(accepted)
        return SearchResult(
            [Output(tokens, logprob, logprob, reason)],
            {
                "steps": steps,
                "accept_length": len(tokens) / steps,
                "accepted_by_depth": [sum(n > depth for n in accepted) for depth in range(max(accepted))],
                "draft_nodes": drafted,
                "draft_ms": draft_seconds / steps * MS,
                "verify_ms": verify_seconds / steps * MS,
            },
        )

    def _warp(self) -> Warp | None:
        """None: the best token."""
        if (self.temperature, self.top_k, self.top_p, self.seed) == (None,) * 4:
            return None
        given = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return Warp(**{name: value for name, value in given.items() if value is not None})

    def _pick(self, logp_V: Tensor, warp: Warp | None, position: int) -> int:
        """The token after a node: plain decoding's at this position."""
        if warp is None:
            return int(logp_V.argmax())
        return draw(warp(logp_V.unsqueeze(0)), self.seed or 0, [0], [position])[0]

    def _drafter(self, task: Task) -> Drafter:
        if callable(self.drafter):
            return self.drafter()
        store = self._open_store()
        if store is not None:
            store.check(task.vocab_size, self._fingerprint(task))
        if self.drafter == "backoff":
            return backoff(store, self.adapt)
        names = ("iterations", "candidates", "depth", "successors", "c1", "c2", "window", "increment", "cap")
        return MCTS(store, self.adapt, **{name: getattr(self, name) for name in names})

    def _open_store(self) -> NGramStore | None:
        learnt = self.save is not None and self.store is not None and Path(self.store) == Path(self.save)
        if self.store is None or (learnt and not Path(self.store).exists()):  # nothing was learnt yet
            return None
        return open_store(self.store)

    @staticmethod
    def _fingerprint(task: Task) -> str:
        return task.tokenizer.fingerprint if task.tokenizer is not None else ""

    def _size(self, task: Task) -> DraftSize:
        return DraftSize(task.seconds) if self.nodes == "auto" else DraftSize(None, int(self.nodes))

    @staticmethod
    def _reach(task: Task, done: int) -> int:
        """How many tokens ahead a node is worth evaluating: the limit's last token needs no successor, and a draft
        across the model's switch length would have the whole text evaluated twice."""
        tree, reach = task.tree, task.max_new_tokens - done - 1
        at = tree.position(tree.root)
        if tree.switch_length is not None and at < tree.switch_length:
            reach = min(reach, tree.switch_length - 1 - at)
        return reach

    @staticmethod
    def _plant(task: Task, draft: Draft, n: int, reach: int) -> tuple[dict[int, int], list[int]]:
        """The first n of a draft, in the tree, without those that nothing could follow.

        Returns:
            node -> row that it is to have, the root first, and of each row the first place in the draft, -1: root.
        """
        child, position, ends = task.tree.child, task.tree.position, task.eos_token_ids
        nodes, row, places = {-1: task.tree.root}, {task.tree.root: 0}, [-1]
        last = position(task.tree.root) + reach
        for place, (token, above) in enumerate(zip(draft.tokens[:n], draft.parents, strict=False)):
            if (parent := nodes.get(above)) is not None and token not in ends and position(parent) < last:
                nodes[place] = node = child(parent, token)
                if node not in row:
                    row[node] = len(places)
                    places.append(place)
        return row, places

    def slots(self, prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
        least = prompt_tokens + new_tokens - 1  # drafts are dropped if there is no room for them
        return least, least + (MOST if self.nodes == "auto" else int(self.nodes))

"""ADED: the model verifies drafts from n-grams, which gives the tokens of plain decoding in fewer forward passes.

"Adaptive Draft-Verification for Efficient Large Language Model Decoding", errata corrected; comments cite the steps of
docs/algorithms.md. Every node of a draft gets one draw, keyed by its position, and the search accepts the longest path
of draws that was drafted, so the output equals that of `greedy` or `sample`, token for token, whatever was drafted.
`drafters` makes drafts, `engine.drafts.size` decides how much of a draft is evaluated, `ngrams` stores counts on disk.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from engine.drafts.backoff import Backoff
from engine.drafts.size import FIRST_NODES, MAX_NODES, DraftSize
from engine.errors import KVMemoryError, UsageError
from engine.rules.endings import is_stuck
from search.aded.drafters import MCTS, TextDrafter
from search.aded.drafting import Drafting, Planted
from search.aded.ngrams import NGramStore, add_to_store, count, open_store, vocabulary
from search.base import Evaluate, Output, Report, Search, SearchGenerator, SearchResult, Task, register
from search.options import RowSampling, check_choices, check_integers, check_numbers
from search.picks import Picks
from search.sample import Sample

OF_PYTHON = 128  # numbers that a tensor computes in the time in which Python looks at one


@register("aded")
@dataclass(frozen=True)
class ADED(Search):
    """The tokens of greedy, or of sample with its parameters, in fewer passes: n-gram drafts that the model verifies.

    Args:
        temperature, top_k, top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff, top_n_sigma, xtc_probability,
            xtc_threshold, seed: given any of them, the tokens are those of `sample` with these; without any, greedy's.
        drafter: "backoff": the likeliest paths of a back-off n-gram; "mcts": the paper's search of a tri-gram matrix;
            or a function that makes a `TextDrafter` for a request.
        nodes: most nodes of a draft; auto: the number that gives the most tokens per second.
        adapt: whether the drafter learns from the request's own text.
        store: file of counted n-grams to start from (python -m tools.ngrams).
        save: file of n-grams to which every answer is added.
        iterations: mcts: simulations per draft (s in the paper).
        candidates: mcts: most visited nodes that become drafts (n in the paper).
        depth: mcts: tokens that a simulation looks ahead (l in the paper).
        successors: mcts: likeliest successors kept per pair of tokens (t in the paper).
        c1: mcts: weight of exploration.
        c2: mcts: visits at which exploration starts to grow.
        window: mcts: last tokens whose tri-grams gain weight at every step.
        increment: mcts: the weight that they gain.
        cap: mcts: the largest weight.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    drafter: str | Callable[[], TextDrafter] = "backoff"
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
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    drafts_itself = True

    def __post_init__(self):
        self._sampling()
        if not callable(self.drafter):
            check_choices(self, drafter=("backoff", "mcts"))
        if self.nodes != "auto":
            check_integers(self, also="auto or ", nodes=(0, 1024))
        check_choices(self, adapt=(True, False))
        for name in ("store", "save"):
            if not isinstance(getattr(self, name), str | Path | None):
                raise UsageError(f"{name}: expected a file, got {getattr(self, name)!r}")
        check_integers(self, **dict.fromkeys(("iterations", "candidates", "depth", "successors"), (1, 1 << 16)))
        check_integers(self, window=(0, 1 << 16))
        check_numbers(self, c1=(0, 1e6), c2=(1e-6, 1e6), increment=(0, 1e6), cap=(0, 1e6))
        if self.save is not None and not Path(self.save).absolute().parent.is_dir():
            raise UsageError("save: expected a file in a folder that is there", where=str(self.save))
        self._open_store()

    def run(self, task: Task) -> SearchGenerator:
        tree, sampling, tokens, logprob, reason = task.tree, self._sampling(), [], 0.0, None
        warp = sampling.warp() if sampling is not None else None
        if self.save is not None and Path(self.save).exists():
            open_store(self.save).check(*vocabulary(task))  # an unusable file is refused before the search starts
        drafts, prompt = Drafting(task, self._drafter(task), self._size(task)), list(tree.trunk.tokens)
        picks = Picks(warp, self.seed or 0, tree.pool.device.type != "cpu")

        while reason is None:
            planted = drafts.plant()  # A2, A3, A4
            try:
                answer = yield Evaluate(tree, list(planted.row), picks.read(tree, planted.row, planted.read))  # A5
            except KVMemoryError:
                if len(planted.row) == 1:
                    raise
                tree.keep([tree.root])
                planted = Planted(planted.draft, {tree.root: 0})
                answer = yield Evaluate(tree, [tree.root], picks.read(tree, planted.row, None))
            with drafts.verifying:
                node, fresh, likely = tree.root, [], planted.likely(picks.take(*answer))
                while (i := planted.row.get(node)) is not None:  # A6
                    logps = likely[i] if i < len(likely) else {}
                    if warp is None and logps and task.normalised:  # biases may make more tokens likely than are read
                        token = max(logps, key=logps.__getitem__)  # among equals the lower token
                    else:
                        token = picks.token(i, tree.position(node) + 1)
                    logprob += logps[token] if token in logps else picks.logprob(i, token)
                    tokens.append(token)
                    fresh.append(token)
                    reason = task.finish_reason(tokens)  # A7
                    if reason:
                        break
                    node = tree.child(node, token)  # the drafted node, if this token was drafted
                if not reason:
                    tree.keep([node])
                drafts.learn(planted, fresh, likely)
            yield Report(fresh, lambda: tokens, drafts.settle(planted, fresh))
        if self.save is not None:
            learnt = tokens[:-1] if is_stuck(logprob) else tokens  # the last one only stands for an end
            add_to_store(self.save, count(prompt[-2:] + learnt), *vocabulary(task))
        return SearchResult([Output(tokens, logprob, logprob, reason)], drafts.stats())

    def _sampling(self) -> Sample | None:
        """Return the `sample` search that gives the same tokens; None means greedy. Raises UsageError."""
        given = {field.name: getattr(self, field.name) for field in fields(RowSampling)}
        given = {name: value for name, value in given.items() if value is not None}
        return Sample(**given) if given else None

    def _drafter(self, task: Task) -> TextDrafter:
        if callable(self.drafter):
            return self.drafter()
        store = self._open_store()
        if store is not None:
            store.check(*vocabulary(task))
        if self.drafter == "backoff":
            return Backoff(store, self.adapt)
        return MCTS(store, **{field.name: getattr(self, field.name) for field in fields(MCTS) if field.name != "store"})

    def _open_store(self) -> NGramStore | None:
        learnt = self.save is not None and self.store is not None and Path(self.store) == Path(self.save)
        if self.store is None or (learnt and not Path(self.store).exists()):  # nothing was learnt yet
            return None
        return open_store(self.store)

    def _size(self, task: Task) -> DraftSize:
        if self.nodes != "auto":
            return DraftSize(None, int(self.nodes))
        return DraftSize(task.seconds, MAX_NODES if task.rows is None else min(MAX_NODES, task.rows - 1))

    def slots(self, prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
        least = prompt_tokens + new_tokens - 1  # drafts are dropped if there is no room for them
        return least, least + (MAX_NODES if self.nodes == "auto" else int(self.nodes))

    def most_rows(self) -> int:
        return 1 + (FIRST_NODES if self.nodes == "auto" else int(self.nodes))  # auto: more if `Task.rows` has room

    def work(self, new_tokens: int) -> tuple[int, int]:
        looked_at = self.iterations * self.depth * self.successors + self.window
        return looked_at * OF_PYTHON if self.drafter == "mcts" else 0, 0

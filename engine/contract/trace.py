"""Traces: records of the steps of a search, made while it runs (`--trace`, `/tree`).

A step is the time between two answers: the search reads the log-probabilities, grows nodes, keeps some (the others are
dropped, the shared stem joins the trunk), and yields an `Evaluate`, whose nodes take slots and are evaluated. A
`TreeRecord` observes each tree, so that requests without a trace have no extra cost. docs/tree.md describes the record.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from engine.cache.prefixes import shared_length
from engine.cache.tree import TokenTree
from engine.contract import Evaluate, Output, Report, Search, SearchResult
from engine.text.tokenizer import Tokenizer

MAX_NODES = 20_000  # nodes of one request; the record ends with the last step that fits
TOP = 8  # next tokens recorded per evaluated node
LIKELY = 64  # next tokens whose log-probabilities are held for children that are grown in a later step
CANDIDATES = 16  # candidates recorded per step
SHOWN = 400  # last tokens of a prompt that the record has as text
TAIL = 64  # most tokens of a candidate that are not nodes
ANCHOR = "x"  # decoded before a token, so that the decoder does not strip a space at its beginning


class TreeRecord:
    """Observes a tree and records the steps at which its nodes change."""

    def __init__(self, trace: "Trace", tree: TokenTree, model: str):
        self.trace, self.tree, self.model = trace, tree, model
        self.judged = model == "target" and not trace.trees  # the tree on which drafts are verified
        # Lists with an entry per node: a step (or a log-probability), or None.
        self.born: list[int] = [trace.step]
        self.evaluated: list[int | None] = [None]
        self.dropped: list[int | None] = [None]
        self.settled: list[int | None] = [None]
        self.accepted: list[int | None] = [None]
        self.logp: list[float | None] = [None]
        self.drafted: dict[int, None] = {}  # all drafts; `undecided` has the drafts since the latest keep()
        self.undecided: list[int] = []
        self.scores: dict[int, float] = {}  # of nodes, by a scalar head
        self.top: dict[int, list[list[float]]] = {}  # [token, log-probability] of the likeliest next tokens
        self.slots: list[list[int]] = []  # [step, slot in the pool, node]; node -1: released, by no keep()
        self.paging: list[list[int]] = []  # [step, index, page]: the trunk's pages; page -1: released
        self.reach: list[list[int]] = []  # [step, evaluated tokens of the trunk]
        self.end: int | None = None
        self._root = 0  # the root at the latest keep(); `_kept` are its arguments
        self._kept: set[int] = {0}
        self._stem: list[int] = []  # settled nodes, in order
        self._branches: dict[int, None] = {}  # nodes neither dropped nor settled
        self._index: dict[tuple[int, int], int] = {}  # (parent, token) -> node, the dropped ones too
        self._rows: dict[int, tuple[Tensor, int]] = {}  # node evaluated in this step -> its answer, its row there
        self._likely: dict[int, tuple[Tensor, Tensor, int]] = {}  # evaluated node -> LIKELY of its answer, its row
        self._waiting: dict[int, list[int]] = {}  # parent -> children whose probability is unknown
        self._pages: list[int] = []
        self._note_trunk()

    def note_growth(self) -> None:
        """Record the nodes grown since the last call."""
        tree = self.tree
        for node in range(len(self.born), tree.grown) if self.trace.on else ():
            if not self.trace.takes(1):
                return
            parent = tree.parent(node)
            self.born.append(self.trace.step)
            for column in (self.evaluated, self.dropped, self.settled, self.accepted, self.logp):
                column.append(None)
            self._branches[node] = None
            self._index[parent, tree.token(node)] = node
            self._waiting.setdefault(parent, []).append(node)

    # --- called by the tree, see `TreeObserver` ---

    def kept(self, nodes: set[int]) -> None:
        self.note_growth()
        if not self.trace.on:
            return
        self.look_up()
        self._kept = nodes
        self._note_stem()
        for node in [node for node in self._branches if not self.tree.is_live(node)]:
            self.dropped[node] = self.trace.step
            del self._branches[node]
            self._likely.pop(node, None)
            self._waiting.pop(node, None)
        for node in self.undecided:
            if self.dropped[node] is None:
                self.accepted[node] = self.trace.step
        self.undecided = []

    def _note_stem(self) -> None:
        """Record the nodes that joined the trunk since the last call."""
        stem, node, parent = [], self.tree.root, self.tree.parent
        while node != self._root:
            stem.append(node)
            node = parent(node)
        if not stem:
            return
        for node in reversed(stem):
            self.settled[node] = self.trace.step
            del self._branches[node]
            self._likely.pop(parent(node), None)
        self._stem += reversed(stem)
        self._root = self.tree.root
        self._note_trunk()

    def allocated(self, trunk_tokens: int, nodes: Sequence[int], slots: Sequence[int]) -> None:
        if self.trace.on:
            end = self.tree.trunk.cached
            for node in [*self._of_trunk(end - trunk_tokens, end), *nodes]:
                self.evaluated[node] = self.trace.step if self.evaluated[node] is None else self.evaluated[node]
            self.slots += [[self.trace.step, s, n] for n, s in zip(nodes, slots, strict=True)]
            self._note_trunk()

    def adopted(self, node: int, slot: int) -> None:
        self.note_growth()
        if self.trace.on and node < len(self.born):
            self.evaluated[node] = self.accepted[node] = self.trace.step
            self.drafted[node] = None
            self.slots.append([self.trace.step, slot, node])

    def released(self, trunk_tokens: int, nodes: Sequence[int], slots: Sequence[int]) -> None:
        if self.trace.on:
            end = self.tree.trunk.cached
            for node in [*self._of_trunk(end, end + trunk_tokens), *nodes]:
                if self.evaluated[node] == self.trace.step:  # the pass has failed
                    self.evaluated[node] = None
            self.slots += [[self.trace.step, slot, -1] for slot in slots]
            self._note_trunk()

    def ended(self) -> None:
        if self.trace.on and self.end is None:
            self.end = self.trace.step

    def _of_trunk(self, start: int, end: int) -> list[int]:
        """The nodes among the trunk's tokens from `start` to `end`; the prompt has one, the first root."""
        nodes, first = [0, *self._stem], self.tree.prompt_length - 1
        return nodes[max(0, start - first) : max(0, end - first)]

    def _note_trunk(self) -> None:
        trunk, step = self.tree.trunk, self.trace.step
        pages, same = trunk.pages, shared_length(self._pages, trunk.pages)
        self.paging += [[step, i, -1] for i in range(len(pages), len(self._pages))]
        self.paging += [[step, i, pages[i]] for i in range(same, len(pages))]
        self._pages[same:] = pages[same:]
        if not self.reach or self.reach[-1][1] != trunk.cached:
            self.reach.append([step, trunk.cached])

    # --- probabilities, candidates ---

    def answered(self, nodes: Sequence[int], rows_NV: Tensor) -> None:
        """Record the likeliest next tokens, or the scores, of evaluated nodes."""
        if rows_NV.shape[1] == 1:
            self.scores.update(zip(nodes, rows_NV[:, 0].tolist(), strict=True))
            return
        logps_NT, tokens_NT = rows_NV.topk(min(LIKELY, rows_NV.shape[1]))
        shown = zip(nodes, logps_NT[:, :TOP].tolist(), tokens_NT[:, :TOP].tolist(), strict=True)
        for i, (node, logps, tokens) in enumerate(shown):
            self.top[node] = [[t, round(x, 4)] for t, x in zip(tokens, logps, strict=True) if math.isfinite(x)]
            self._rows[node] = rows_NV, i
            self._likely[node] = logps_NT, tokens_NT, i
        self.look_up()

    def drop_rows(self) -> None:
        """Let the rows of the last answers go before the next pass: every step holding its own would fill memory."""
        self.look_up()
        self._rows = {}

    def look_up(self) -> None:
        """Find the probabilities of the nodes that are waiting for theirs."""
        if not self._waiting:
            return
        wanted: dict[int, tuple[Tensor, list[int], list[int]]] = {}  # answer's id -> it, row of each child, child
        for parent in [parent for parent in self._waiting if parent in self._rows]:
            rows_NV, i = self._rows[parent]
            _, places, nodes = wanted.setdefault(id(rows_NV), (rows_NV, [], []))
            children = self._waiting.pop(parent)
            places += [i] * len(children)
            nodes += children
        for rows_NV, places, nodes in wanted.values():
            found = rows_NV[places, [self.tree.token(node) for node in nodes]].tolist()
            for node, logp in zip(nodes, found, strict=True):
                self.logp[node] = round(logp, 4) if math.isfinite(logp) else None
        for parent in [parent for parent in self._waiting if parent in self._likely]:  # of an earlier step
            logps_NT, tokens_NT, i = self._likely[parent]
            likely = dict(zip(tokens_NT[i].tolist(), logps_NT[i].tolist(), strict=True))
            for node in self._waiting.pop(parent):
                logp = likely.get(self.tree.token(node), math.nan)
                self.logp[node] = round(logp, 4) if math.isfinite(logp) else None

    def find(self, tokens: Sequence[int]) -> list[Any]:
        """Generated tokens as [last node on their path, tokens after it]; drafts on the path count as accepted."""
        self.note_growth()
        trunk = self.tree.settled_from(0)
        node, start = (self.tree.root, len(trunk)) if list(tokens[: len(trunk)]) == trunk else (0, 0)
        while start < len(tokens) and (node, tokens[start]) in self._index:
            node = self._index[node, tokens[start]]
            start += 1
            if node in self.drafted and self.accepted[node] is None:
                self.accepted[node] = self.trace.step
        return [node, list(tokens[start : start + TAIL])]

    def record(self, end: int) -> dict[str, Any]:
        """The record before step `end`, in types of JSON."""
        count = sum(step < end for step in self.born)  # nodes are in the order of their steps

        def steps(column: Sequence[int | None]) -> list[int | None]:
            return [step if step is not None and step < end else None for step in column[:count]]

        def early(events: list[list[int]]) -> list[list[int]]:
            return [event for event in events if event[0] < end]

        return {
            "model": self.model,
            "page_size": self.tree.pool.page_size,
            "prompt_tokens": self.tree.prompt_length,
            "reused_tokens": self.tree.reused,
            "token": [self.tree.token(node) for node in range(count)],
            "parent": [self.tree.parent(node) for node in range(count)],
            "logp": self.logp[:count],
            "born": self.born[:count],
            **{key: steps(getattr(self, key)) for key in ("evaluated", "dropped", "settled", "accepted")},
            "drafted": [node for node in self.drafted if node < count],
            "scores": {node: score for node, score in self.scores.items() if node < count and math.isfinite(score)},
            "top": {node: top for node, top in self.top.items() if node < count},
            "slots": early(self.slots),
            "pages": early(self.paging),
            "cached": early(self.reach),
            "ended": self.end,
        }


class Trace:
    """The record of one request; give it as `Request.trace`, read `record` when the request is done.

    Args:
        name: the request's name on the page.
        most: most nodes of all trees together; later nodes are not recorded.
    """

    def __init__(self, name: str | int = "", most: int = MAX_NODES):
        self.name, self.most = name, most
        self.record: dict[str, Any] | None = None  # plain lists and dictionaries, once the search has ended
        self.trees: list[TreeRecord] = []
        self.steps: list[dict[str, Any]] = []
        self._about: dict[str, Any] = {}
        self._tokenizers: Mapping[str, Tokenizer | None] = {}
        self._restarts = 0
        self._afresh()

    def _afresh(self) -> None:
        self._detach()
        self.step, self.steps, self.on, self.nodes = 0, [], True, 0
        self._cut: int | None = None  # the step that is not recorded to its end
        self._places: dict[tuple[int, ...], list[Any]] = {}  # the search's outputs -> see `TreeRecord.find`
        self._began = time.perf_counter()

    @property
    def begun(self) -> bool:
        """Whether a request has it already."""
        return bool(self._about)

    def _detach(self) -> None:
        """Drop the trees: with their observers they form cycles, which keep the model in memory."""
        for record in self.trees:
            record.tree.observer = None
        self.trees = []

    def begin(
        self, search: Search, prompt: Sequence[int], models: Mapping[str, str], tokenizers: Mapping[str, Any]
    ) -> None:
        """A request is submitted. Raises ValueError if this is not the first."""
        if self.begun:
            raise ValueError("a trace records one request: give each its own")
        plain = {k: x if isinstance(x, bool | int | float | str | None) else str(x) for k, x in vars(search).items()}
        self._about = {"search": type(search).__name__, "params": plain, "models": dict(models)}
        self._tokenizers, self._prompt = tokenizers, list(prompt)

    # --- called by the driver ---

    def watch(self, tree: TokenTree, model: str) -> None:
        """Record a tree of the search, of this model."""
        tree.observer = TreeRecord(self, tree, model)
        self.trees.append(tree.observer)

    def resume(self) -> None:
        """Begin another step."""
        self.step = len(self.steps)
        seconds = round(time.perf_counter() - self._began, 6)
        self.steps.append({"seconds": seconds, "settled": 0, "info": {}, "beams": []})

    def asked(self, request: Evaluate) -> None:
        """Record a request.

        Drafts are the nodes of a request that has children of some of its nodes, unless a keep() named them before.
        """
        for record in self.trees:
            record.note_growth()
            record.drop_rows()
        tree, record = request.tree, self._record_of(request.tree)
        if not self.on:
            return
        self.steps[-1]["asks"] = [self.trees.index(record), len(request.nodes)]
        asked = set(request.nodes)
        if record.judged and any(tree.parent(node) in asked for node in asked):
            record.undecided = [node for node in request.nodes if node not in record._kept and node != tree.root]
            record.drafted |= dict.fromkeys(record.undecided)

    def answered(self, tree: TokenTree, nodes: Sequence[int], rows_NV: Tensor) -> None:
        """Record an answer."""
        if self.on:
            self._record_of(tree).answered(nodes, rows_NV)

    def _record_of(self, tree: TokenTree) -> TreeRecord:
        return next(record for record in self.trees if record.tree is tree)

    def reported(self, report: Report) -> None:
        """Record a report."""
        if not self.on:
            return
        step, tree = self.steps[-1], self.trees[0]
        step["settled"] += len(report.settled)
        step["info"] = {k: _finite(x) for k, x in report.info.items() if isinstance(x, bool | int | float | str | None)}
        beams = report.beams() if report.beams else [(None, report.best())] if report.best else []
        step["beams"] = [[_finite(score), *tree.find(tokens)] for score, tokens in beams[:CANDIDATES]]

    def takes(self, nodes: int) -> bool:
        """Whether there is room for more nodes."""
        self.nodes += nodes
        if self.on and self.nodes > self.most:
            self.on, self._cut = False, self.step
        return self.on

    def restart(self) -> None:
        """The search was preempted: begin the record again."""
        self._restarts += 1
        self._afresh()

    def finish(self, result: SearchResult | None, error: BaseException | None) -> None:
        """Complete the record: the search has ended."""
        if self.record is not None or not self.begun:
            return
        end = len(self.steps) if self._cut is None else self._cut
        for tree in self.trees if self.on else []:
            tree.note_growth()
            tree.look_up()
        found = result.outputs if result else []
        if self.on and self.trees:
            # Also without the last token, which may only stand for an end: then the answer does not have it.
            paths = [tokens for output in found for tokens in (output.token_ids, output.token_ids[:-1])]
            self._places = {tuple(tokens): self.trees[0].find(tokens) for tokens in paths}
        self.on = False
        self.record = {
            **self._about,
            "name": self.name,
            "end": f"{type(error).__name__}: {error}" if error else "done" if result else "interrupted",
            "truncated": None if end == len(self.steps) else {"steps": len(self.steps), "nodes": self.most},
            "restarts": self._restarts,
            "steps": self.steps[:end],
            "trees": [tree.record(end) | self._trunk(tree) for tree in self.trees if tree.born[0] < end],
            "outputs": self._outputs(found),
            "stats": result.stats if result else {},
        }
        self.record["texts"] = self._texts(self.record)
        self._detach()
        self.steps = []

    def answer(self, outputs: Sequence[Output]) -> None:
        """Record the outputs of the answer, which have texts: the request may have chosen among the search's."""
        if self.record is not None:
            self.record["outputs"] = self._outputs(outputs)
            self.record["texts"] = self._texts(self.record)

    def _outputs(self, outputs: Sequence[Output]) -> list[dict[str, Any]]:
        keys = ["logprob", "score", "finish_reason", *(["text"] if self._tokenizers.get("target") else [])]
        places = [self._places.get(tuple(output.token_ids), [0, []]) for output in outputs[:CANDIDATES]]
        return [
            {"node": node, "tail": tail} | {key: getattr(output, key) for key in keys}
            for (node, tail), output in zip(places, outputs, strict=False)
        ]

    # --- tokens as text ---

    def _trunk(self, record: TreeRecord) -> dict[str, Any]:
        tokenizer, tree = self._tokenizers.get(record.model), record.tree
        prompt = (self._prompt if record is self.trees[0] else tree.trunk.tokens)[: tree.prompt_length]
        return {"prompt": tokenizer.decode(prompt[-SHOWN:], skip_special=False) if tokenizer else ""}

    def _texts(self, record: dict[str, Any]) -> dict[str, dict[int, str]]:
        """Model -> token -> its text, for all tokens in the record."""
        texts: dict[str, dict[int, str]] = {}
        for tree in record["trees"]:
            seen = texts.setdefault(tree["model"], {})
            tokens = {*tree["token"], *(token for top in tree["top"].values() for token, _ in top)}
            if tree is record["trees"][0]:
                places = [[o["node"], o["tail"]] for o in record["outputs"]]
                places += [beam[1:] for step in record["steps"] for beam in step["beams"]]
                tokens |= {token for _, tail in places for token in tail}
            if tokenizer := self._tokenizers.get(tree["model"]):
                before = tokenizer.encode(ANCHOR, add_special=False)
                seen.update((token, token_text(tokenizer, before, token)) for token in sorted(tokens - seen.keys()))
        return texts


class Untraced:
    """The observer of a request without a trace: it records nothing. See `Trace`."""

    def watch(self, tree: TokenTree, model: str) -> None: ...
    def resume(self) -> None: ...
    def asked(self, request: Evaluate) -> None: ...
    def answered(self, tree: TokenTree, nodes: Sequence[int], rows_NV: Tensor) -> None: ...
    def reported(self, report: Report) -> None: ...
    def restart(self) -> None: ...
    def finish(self, result: SearchResult | None, error: BaseException | None) -> None: ...


UNTRACED = Untraced()


def token_text(tokenizer: Tokenizer, before: Sequence[int], token: int) -> str:
    """The text that a token adds to a text; the token's spelling if that is empty or incomplete."""
    text = "" if token in tokenizer.special_ids else tokenizer.decode_continuation(before, [token])
    return text if text and "\ufffd" not in text else "".join(tokenizer._pieces([token], False))


def _finite(x: Any) -> Any:
    return None if isinstance(x, float) and not math.isfinite(x) else x


class Traces:
    """Traces of many requests, for one file; the oldest are dropped when all have too many nodes together.

    Args:
        most: most nodes of all traces.
    """

    def __init__(self, most: int = 5 * MAX_NODES):
        self.most, self.left_out = most, 0
        self._all: list[Trace] = []

    def new(self, name: str | int) -> Trace:
        """Make a trace for the next request."""
        while sum(trace.nodes for trace in self._all) > self.most:
            self._all.pop(0)
            self.left_out += 1
        self._all.append(Trace(name))
        return self._all[-1]

    def records(self) -> list[dict[str, Any]]:
        """The records of all requests that have ended."""
        return [trace.record for trace in self._all if trace.record is not None]

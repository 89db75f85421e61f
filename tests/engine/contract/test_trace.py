"""Recording: what a trace says of every step is what the trees were at that step, for every search."""

import json
import math
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import Engine, Request, SearchResult
from engine.cache.tree import TokenTree
from engine.contract import Evaluate, Search
from engine.contract.trace import Trace, Traces, TreeRecord
from engine.demo import demo_folder
from engine.errors import KVMemoryError
from search import REGISTRY, Greedy, Trie
from search.base import make_search
from tests.invariants import check_tree

PROMPT = "Tell me a story about a fox."
PARAMS: dict[str, dict[str, Any]] = {
    "trie": {"beams": 5},
    "diverse": {"beams": 6, "diverse_groups": 3},
    "sample": {"num_return_sequences": 4, "temperature": 1.5},
    "bon": {"bon_n": 6, "temperature": 1.5},
    "sbon": {"sbon_n": 8, "sbon_tau": 4, "sbon_schedule": "4:0.5,10:0.5", "temperature": 1.5},
    "aded": {"aded_nodes": 12},
    "dsbd": {"temperature": 1.3},
    "ults": {"ults_epsilon": 0.3, "ults_children": 12, "ults_prior": "dirichlet"},
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    folders = {role: demo_folder(role) for role in ("draft", "reward")}
    return Engine.load(demo_folder(), dtype="float32", threads=1, kv_memory=32 << 20, **folders)  # type: ignore[arg-type]


def ids(engine: Engine, text: str = PROMPT) -> list[int]:
    assert engine.template is not None
    return engine.tokenizer.encode_rendered(engine.template.render([{"role": "user", "content": text}]))


class Witness(Trace):
    """A trace that also looks at the trees themselves, at the end of every step."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.seen: list[list[dict[str, Any]]] = []  # by step, by tree

    def look(self) -> None:
        self.seen.append([])
        for record in self.trees:
            tree = record.tree
            if record.end is not None:
                self.seen[-1].append({"slots": {}, "trunk": []})
                continue
            check_tree(tree)
            in_pool, _ = tree.slots.table
            owners = {in_pool[s]: node for s, node in enumerate(tree.slots.owner) if node >= 0}
            state = {
                "live": {n for n in range(tree.grown) if tree.is_live(n)},
                "evaluated": {n for n in range(tree.grown) if tree.is_live(n) and tree.is_evaluated(n)},
                "slots": owners,
                "trunk": [*tree.trunk.pages[: -(-tree.trunk.cached // tree.pool.page_size)]],
            }
            self.seen[-1].append(state)

    def resume(self) -> None:
        if self.steps and self.on:
            self.look()
        super().resume()

    def finish(self, *args: Any) -> None:
        if self.record is None and self.on:
            self.look()
        super().finish(*args)

    def restart(self) -> None:
        self.seen = []
        super().restart()


def replayed(tree: dict[str, Any], step: int) -> dict[str, Any]:
    """A tree at the end of a step, by its record alone."""

    def by(column: str, n: int) -> bool:
        return tree[column][n] is not None and tree[column][n] <= step

    nodes = [n for n, born in enumerate(tree["born"]) if born <= step]
    root = max((n for n in nodes if by("settled", n)), default=0)
    live = {n for n in nodes if n == root or (n and not by("dropped", n) and not by("settled", n))}
    slots = {slot: node for at, slot, node in tree["slots"] if at <= step}
    pages = {place: page for at, place, page in tree["pages"] if at <= step}
    if tree["ended"] is not None and tree["ended"] <= step:
        return {"slots": {}, "trunk": []}
    return {
        "live": live,
        "evaluated": {n for n in live if by("evaluated", n)},
        "slots": {slot: n for slot, n in slots.items() if n >= 0 and not by("dropped", n) and not by("settled", n)},
        "trunk": [pages[place] for place in sorted(pages) if pages[place] >= 0],
    }


def traced(engine: Engine, search: Any, trace: Trace | None = None, **options: Any) -> tuple[dict, SearchResult, Any]:
    trace = trace or Witness()
    request = Request(ids(engine), search, trace=trace, **({"max_new_tokens": 16} | options))
    [(_, result)] = engine.serve([request])
    assert isinstance(result, SearchResult), result
    assert engine.pool.used_pages == 0
    assert trace.record is not None and trace.record == json.loads(json.dumps(trace.record), object_hook=numbers)
    return trace.record, result, trace


def numbers(pairs: dict[str, Any]) -> dict[Any, Any]:
    """Keys of JSON that were numbers."""
    return {int(key) if key.isdigit() else key: value for key, value in pairs.items()}


@pytest.mark.parametrize("name", REGISTRY)
def test_steps_replayed_are_the_trees_as_they_were(engine: Engine, name: str):
    search = make_search(name, PARAMS.get(name, {}))
    record, result, witness = traced(engine, search)
    assert len(record["steps"]) == len(witness.seen) > 3
    for step, states in enumerate(witness.seen):
        trees = [tree for tree in record["trees"] if tree["born"][0] <= step]
        assert len(trees) == len(states)
        for tree, state in zip(trees, states, strict=True):
            assert replayed(tree, step) == state, (name, step, tree["model"])
    assert {tree["model"] for tree in record["trees"]} == {"target", *getattr(search, "models", ())}
    assert record["end"] == "done" and record["truncated"] is None and record["stats"] == result.stats

    [(_, alone)] = engine.serve([Request(ids(engine), search, max_new_tokens=16)])
    assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in result.outputs]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", REGISTRY)
def test_probabilities_are_the_models(engine: Engine, name: str):
    record, result, _ = traced(engine, make_search(name, PARAMS.get(name, {})))
    for tree in record["trees"]:
        model = {"target": engine, **engine.companions}[tree["model"]]
        known = [n for n in range(1, len(tree["token"])) if tree["logp"][n] is not None]
        missing = [n for n in range(1, len(tree["token"])) if tree["logp"][n] is None]
        if tree["model"] == "reward":
            assert not known and tree["scores"]
            continue
        # Those without were dropped before their parents were told of; drafts whose parents were turned down, say.
        assert all(tree["dropped"][n] is not None or tree["parent"][n] not in tree["top"] for n in missing), missing
        if record["trees"].index(tree) == 0:
            assert len(known) > len(tree["token"]) // 2
        for n in known[:: max(1, len(known) // 8)]:
            path = [n]
            while tree["parent"][path[-1]] > 0:
                path.append(tree["parent"][path[-1]])
            tokens = [tree["token"][m] for m in reversed(path)]
            logp_V = torch.log_softmax(model.logits([*ids(engine), *tokens[:-1]])[-1], -1)
            assert tree["logp"][n] == pytest.approx(float(logp_V[tokens[-1]]), abs=2e-3)
    best, target = record["outputs"][0], record["trees"][0]
    node, total = best["node"], 0.0
    while node:
        total, node = total + target["logp"][node], target["parent"][node]
    if len(best["tail"]) == 1:  # the last token is never evaluated: no node
        total += dict(map(tuple, target["top"][best["node"]])).get(best["tail"][0], math.nan)
    assert len(best["tail"]) <= 1
    if not math.isnan(total):  # a sampled last token need not be among the likeliest
        assert total == pytest.approx(result.outputs[0].logprob, abs=0.01)
    words = record["texts"]["target"]
    assert "".join(words[t] for t in target["token"][1:3]) and all(isinstance(word, str) for word in words.values())


def test_drafts_accepted_and_rejected_are_those_of_the_search(engine: Engine):
    record, result, _ = traced(engine, make_search("aded", {"aded_nodes": 12}), max_new_tokens=48)
    tree, stats = record["trees"][0], result.stats
    evaluated = [n for n in tree["drafted"] if tree["evaluated"][n] is not None]
    accepted = [n for n in evaluated if tree["accepted"][n] is not None]
    assert len(evaluated) == stats["draft_nodes"] > len(accepted) > 0
    ended_by_draft = not record["outputs"][0]["tail"]
    assert len(accepted) == stats["new_tokens"] - stats["steps"] + ended_by_draft
    told = [step["info"]["accepted"] for step in record["steps"] if step["info"]]
    assert sum(told) == stats["new_tokens"] - stats["steps"]

    record, result, _ = traced(engine, make_search("speculative", {"seed": 1, "temperature": 1.8}), max_new_tokens=32)
    tree, stats = record["trees"][0], result.stats
    accepted = [n for n in tree["drafted"] if tree["accepted"][n] is not None]
    assert len(accepted) == stats["steps"] - stats["rounds"] < len(tree["drafted"])  # a round draws one token itself
    for name in ("trie", "ults", "sbon", "sample", "beam-sample", "greedy"):
        assert not traced(engine, make_search(name, PARAMS.get(name, {})))[0]["trees"][0]["drafted"], name


def test_a_long_search_is_recorded_as_far_as_there_is_room(engine: Engine):
    whole, result, _ = traced(engine, Trie(beams=5), max_new_tokens=24)
    record, again, witness = traced(engine, Trie(beams=5), Witness(most=40), max_new_tokens=24)
    steps = len(record["steps"])
    assert again.outputs == result.outputs
    assert record["truncated"] == {"steps": len(whole["steps"]), "nodes": 40} and 5 < steps < len(whole["steps"])
    nodes = len(record["trees"][0]["token"])
    assert 30 < nodes <= 41  # the first root is not counted
    assert record["trees"][0]["token"] == whole["trees"][0]["token"][:nodes]
    for step in range(steps):
        assert replayed(record["trees"][0], step) == replayed(whole["trees"][0], step) == witness.seen[step][0]


class RowCounter(Trace):
    """A trace that counts, as each step's request is made, the earlier answers whose rows are still in memory."""

    def __init__(self):
        super().__init__()
        self.rows: list[weakref.ref[Tensor]] = []
        self.live: list[int] = []

    def answered(self, tree: TokenTree, nodes: Sequence[int], rows_NV: Tensor) -> None:
        super().answered(tree, nodes, rows_NV)
        self.rows.append(weakref.ref(rows_NV))

    def asked(self, request: Evaluate) -> None:
        super().asked(request)
        self.live.append(sum(rows() is not None for rows in self.rows))


@pytest.mark.parametrize("name", ["trie", "ults", "sample", "aded", "dsbd"])
def test_rows_of_earlier_steps_are_let_go(engine: Engine, name: str):
    """A step of 15 beams has 15 MB of rows with a vocabulary of 262,144 tokens; the search itself may hold the last."""
    _, _, trace = traced(engine, make_search(name, PARAMS.get(name, {})), RowCounter())
    assert len(trace.live) > 3 and max(trace.live) <= 2, trace.live


def test_many_requests_have_room_together():
    traces = Traces(most=100)
    for i in range(6):
        trace = traces.new(i)
        trace.begin(Greedy(), [1], {}, {})
        trace.resume()
        trace.takes(40)
        trace.finish(None, None)
    assert [record["name"] for record in traces.records()] == [3, 4, 5] and traces.left_out == 3
    with pytest.raises(ValueError, match="one request"):
        trace.begin(Greedy(), [1], {}, {})


def test_requests_beside_each_other_and_sent_back(engine: Engine):
    folder, search = demo_folder(), Trie(beams=4)
    prompts = [ids(engine, text) for text in (PROMPT, "What is my name?", "Tell me a story about a bear.")]
    roomy = Engine.load(folder, dtype="float32", threads=1, kv_memory=8 << 20)
    tight = Engine.load(folder, dtype="float32", threads=1, kv_memory=110 * roomy.pool.bytes_per_token)
    for one, restarts in ((roomy, False), (tight, True)):
        traces = [Witness() for _ in prompts]
        requests = [Request(p, search, max_new_tokens=24, trace=t) for p, t in zip(prompts, traces, strict=True)]
        for i, result in one.serve(requests):
            assert isinstance(result, SearchResult)
            record = traces[i].record
            assert record is not None and record["stats"] == result.stats
            for step, states in enumerate(traces[i].seen):
                assert [replayed(record["trees"][0], step)] == states
        assert any(t.record["restarts"] for t in traces if t.record) is restarts


class Fails(Search):
    """Grows a little and then fails, or asks for more than there is."""

    def __init__(self, error: type[Exception]):
        self.error = error

    def run(self, task):
        tree, node = task.tree, task.tree.root
        for _ in range(3):
            yield Evaluate(tree, [node])
            node = tree.grow([node], [5])[0]
        raise self.error("on purpose")


@pytest.mark.parametrize("error", [RuntimeError, KVMemoryError])
def test_what_failed_is_recorded_up_to_there(engine: Engine, error: type[Exception]):
    trace = Trace()
    [(_, outcome)] = engine.serve([Request(ids(engine), Fails(error), trace=trace)])
    assert isinstance(outcome, Exception)
    assert trace.record is not None and "on purpose" in trace.record["end"]
    assert trace.record["trees"][0]["token"][1:] == [5, 5, 5] and len(trace.record["steps"]) == 4


def test_an_interrupted_search_is_recorded_up_to_there(engine: Engine):
    trace = Trace()
    list(engine.stream(ids(engine), Trie(), trace=trace, interrupted=lambda: len(trace.steps) > 5))
    assert trace.record is not None and trace.record["outputs"][0]["finish_reason"] == "interrupted"
    assert 4 < len(trace.record["steps"]) < 12

    trace = Trace()
    with pytest.raises(KeyboardInterrupt):
        for i, _ in enumerate(engine.stream(ids(engine), Trie(), trace=trace)):
            if i == 6:
                raise KeyboardInterrupt
    assert engine.pool.used_pages == 0
    assert trace.record is not None and trace.record["end"] == "interrupted" and len(trace.record["steps"]) > 4


@pytest.mark.parametrize(
    "options",
    [
        {"distinct": "text-sum"},
        {"distinct": "text", "heal": True},
        {"stop": ["."]},
        {"prefix_allowed_tokens_fn": lambda _, ids: [] if {*ids.tolist()[-2:]} <= {10, 11} else [10, 11]},
    ],
    ids=["one text each", "healed", "stopped", "ended by a constraint"],
)
def test_outputs_are_those_of_the_answer(engine: Engine, options: dict[str, Any]):
    trace = Trace()
    search = Trie(beams=4, num_return_sequences=3)
    [result] = engine.generate(["Once upon a ti"], search, max_new_tokens=4, trace=trace, **options)
    assert trace.record is not None
    tree, found = trace.record["trees"][0], []
    for output in trace.record["outputs"]:
        tokens, node = [], output["node"]
        while node:
            tokens, node = [tree["token"][node], *tokens], tree["parent"][node]
        found.append((tokens + output["tail"], output["text"], output["logprob"], output["score"]))
    assert found == [(one.token_ids, one.text, one.logprob, one.score) for one in result.outputs]
    assert all(token in trace.record["texts"]["target"] for tokens, *_ in found for token in tokens)


def test_nothing_is_recorded_unless_asked(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    observers = set()
    allocate = TokenTree.allocate
    monkeypatch.setattr(
        TokenTree, "allocate", lambda tree, *args: observers.add(type(tree.observer)) or allocate(tree, *args)
    )
    engine.generate([ids(engine)], Greedy(), max_new_tokens=3)
    assert observers == {type(None)}
    engine.generate([ids(engine)], Greedy(), max_new_tokens=3, trace=Trace())
    assert observers == {type(None), TreeRecord}

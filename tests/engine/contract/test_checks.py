"""A search's faults are the search's: each ends its own request, with an error that names the class and the line."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import CoppiceError, Engine, KVMemoryError, Request, SearchError, TokenTree, UsageError
from engine.app import batch
from engine.contract.checks import attributed, is_ours, search_error, slots_of
from engine.step.driver import Driver
from engine.step.jobs import Job
from search import REGISTRY, Evaluate, Greedy, Output, Report, Search, SearchResult, Trie
from tests.invariants import check_pool
from tools.random_checkpoint import make

OTHERS = (Greedy(), Trie(beams=3))
DONE = SearchResult([Output([5], -1.0, -1.0, "length")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make(folder, layers=1, width=16, mlp=16, heads=2, kv_heads=1, vocab=260, max_positions=40)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(folder, threads=1, kv_memory=1 << 18)


@pytest.fixture(autouse=True)
def no_page_is_lost(engine: Engine):
    yield
    check_pool(engine.pool, [])
    assert engine.pool.used_pages == 0


@dataclass(frozen=True)
class Steps(Search):
    """Runs a function of the task."""

    steps: Callable[..., Any]

    def run(self, task):
        return self.steps(task)


def ask(task, nodes=None, tree=None, read=None):
    """Evaluate, as the contract has it unless something is given."""
    tree = tree or task.tree
    return Evaluate(tree, [tree.root] if nodes is None else nodes, read)


def line_of(text: str) -> str:
    """file:line of a comment in this file."""
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    [number] = [i for i, line in enumerate(source, 1) if line.endswith(f"# {text}")]
    return f"{__file__}:{number}, in "


def serve(engine: Engine, search: Search, **options: Any) -> SearchError:
    """The error of a request between others that are answered."""
    requests = [
        Request([1, 7, 8], OTHERS[0], 6),
        Request([1, 7, 8], search, 6, **options),
        Request([1, 9], OTHERS[1], 6),
    ]

    def watch(driver: Driver) -> None:
        for run in driver.running:
            assert run.report.best is None or run.report.best() is not None

    found = dict(engine.serve(requests, on_step=watch))
    assert isinstance(found[0], SearchResult) and isinstance(found[2], SearchResult)
    error = found[1]
    assert type(error) is SearchError, error
    assert (error.exit_code, error.code) == (2, "search")
    assert "Steps" in error.what and __name__.rpartition(".")[2] in error.what and "-v shows" in error.remedy
    return error


# --- exceptions ---


def raises(task):
    yield ask(task)
    {}["absent"]  # raises


def raises_below(task):
    yield ask(task)
    torch.zeros(2).reshape(3)  # raises below


def raises_at_once(task):
    raise ValueError("on purpose")  # raises at once


def raises_in_best(task):
    yield Report(best=lambda: [1 // 0])  # raises in best
    yield ask(task)
    yield ask(task, task.tree.grow([task.tree.root], [5]))
    return DONE


def raises_in_read(task):
    yield ask(task, read=lambda rows, peaks: rows[10**6])  # raises in read
    return DONE


def raises_in_the_end(task):
    try:
        yield ask(task)
        yield ask(task, task.tree.grow([task.tree.root], [5]))
    finally:
        raise OSError("on purpose")  # raises in the end


@pytest.mark.parametrize(
    ("steps", "says", "cause"),
    [
        (raises, "KeyError: 'absent'", KeyError),
        (raises_below, "RuntimeError: shape '[3]' is invalid", RuntimeError),
        (raises_at_once, "ValueError: on purpose", ValueError),
        (raises_in_best, "ZeroDivisionError: ", ZeroDivisionError),
        (raises_in_read, "IndexError: ", IndexError),
    ],
)
def test_an_exception_is_the_searchs_own(engine: Engine, steps: Callable[..., Any], says: str, cause: type):
    error = serve(engine, Steps(steps))
    assert f"failed: {says}" in error.what and isinstance(error.__cause__, cause)
    assert error.where.startswith(line_of(steps.__name__.replace("_", " ")))


def test_an_interrupted_search_that_fails_to_end(engine: Engine):
    with pytest.raises(SearchError, match="OSError: on purpose") as caught:
        list(engine.stream([1, 7], Steps(raises_in_the_end), interrupted=lambda: True))
    assert caught.value.where.startswith(line_of("raises in the end"))


def test_a_search_that_fails_when_it_is_sent_back(engine: Engine, folder: Path):
    """The pool is full: the later search is closed to start again, and raises."""

    def hungry(task):
        try:
            nodes = [task.tree.root]
            while True:
                yield Evaluate(task.tree, nodes)
                nodes = task.tree.grow([nodes[-1]] * 40, range(40))
        finally:
            raise OSError("on purpose")

    small = Engine.load(folder, threads=1, kv_memory=64 * engine.pool.bytes_per_token)
    found = dict(small.serve([Request([1, 7], Greedy(), 30, ignore_eos=True), Request([1, 7], Steps(hungry), 3)]))
    assert isinstance(found[0], SearchResult) and "OSError: on purpose" in str(found[1])
    check_pool(small.pool, [])


def test_errors_meant_for_the_user_pass(engine: Engine):
    def refuses(task):
        yield ask(task)
        raise UsageError("width: expected less")

    def is_full(task):
        yield ask(task)
        raise KVMemoryError("no room")

    for steps, kind in ((refuses, UsageError), (is_full, KVMemoryError)):
        with pytest.raises(kind) as caught:
            engine.generate([[1, 7]], Steps(steps))
        assert type(caught.value) is kind


def test_our_own_searches_stay_our_bug(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    assert is_ours(Greedy) and is_ours(Trie) and not is_ours(Steps)

    def broken(self, task):
        yield Evaluate(task.tree, [])

    monkeypatch.setattr(Greedy, "run", broken)
    with pytest.raises(CoppiceError, match="the search Greedy failed") as caught:
        engine.generate([[1, 7]], Greedy())
    assert type(caught.value) is CoppiceError and caught.value.exit_code == 1
    assert "bug of coppice" in caught.value.remedy and caught.value.__cause__ is not None


# --- the contract ---


def other_tree(task):
    yield ask(task, tree=TokenTree(task.tree.pool, [1, 2]))


def twice(task):
    yield ask(task)
    yield ask(task)


def freed(task):
    yield ask(task)
    first, second = task.tree.grow([task.tree.root] * 2, [5, 6])
    task.tree.keep([second])
    yield ask(task, [first])


def caught_by_the_search(task):
    try:
        yield ask(task, [])
    except Exception:
        yield ask(task)
    return DONE


def grows(*tokens):
    def steps(task):
        yield ask(task)
        yield ask(task, task.tree.grow([task.tree.root] * len(tokens), tokens))

    return steps


def too_far(task):
    yield ask(task)
    yield ask(task, task.tree.grow_path(task.tree.root, [5] * 38)[-1:])


def yields(value):
    def steps(task):
        yield value

    return steps


def returns(value):
    def steps(task):
        yield ask(task)
        return value

    return steps


def settles(*tokens):
    def steps(task):
        yield ask(task)
        yield Report(settled=tokens)
        return DONE

    return steps


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (lambda task: None, "run: expected a generator, which a function with `yield` returns, got None"),
        (lambda task: DONE, "run: expected a generator"),
        (yields(5), "expected it to yield Evaluate or Report, got 5"),
        (yields(None), "expected it to yield Evaluate or Report, got None"),
        (yields(Report(settled=5)), "Report.settled: expected a list of token ids, got 5"),
        (yields(Report(settled=torch.tensor([5]))), "Report.settled: expected a list of token ids, got a tensor [1]"),
        (yields(Report(info=None)), "Report.info: expected a dict, got None"),
        (yields(Report(best=[5])), "Report.best: expected a function without arguments, got [5]"),
        (lambda task: (yield ask(task, [])), "Evaluate.nodes: expected at least one node, got none"),
        (lambda task: (yield ask(task, 0)), "Evaluate.nodes: expected a list of nodes, got 0"),
        (lambda task: (yield ask(task, torch.tensor([0]))), "Evaluate.nodes: expected a list of nodes, got a tensor"),
        (lambda task: (yield ask(task, [7])), "expected nodes of this tree, which has grown 1, got 7"),
        (lambda task: (yield ask(task, [-1])), "expected nodes of this tree, which has grown 1, got -1"),
        (lambda task: (yield ask(task, ["a"])), "expected nodes of this tree, which has grown 1, got 'a'"),
        (lambda task: (yield Evaluate("tree", [0])), "Evaluate.tree: expected task.tree or a tree that"),
        (lambda task: (yield ask(task, read=5)), "Evaluate.read: expected a function or None, got 5"),
        (lambda task: (yield ask(task, read=lambda *_: 5)), "Evaluate.read: expected it to return a tensor [n], got 5"),
        (lambda task: (yield ask(task, tree=task.open_tree("judge", [1]))), "open_tree: expected one of target"),
        (other_tree, "Evaluate.tree: expected task.tree or a tree that task.open_tree returned, got a tree of another"),
        (twice, "Evaluate.nodes: expected nodes not evaluated yet, got 0"),
        (freed, "Evaluate.nodes: expected live nodes, got 1, which keep() has freed or moved"),
        (caught_by_the_search, "Evaluate.nodes: expected at least one node, got none"),
        (grows(260), "tokens: expected integers from 0 to 259, got 260"),
        (grows(5, -1), "tokens: expected integers from 0 to 259, got -1"),
        (grows(torch.tensor(5)), "tokens: expected integers from 0 to 259, got a tensor [] of int64"),
        (too_far, "Evaluate.nodes: expected at most 40 tokens, the model's context"),
        (returns(None), "expected it to return a SearchResult, got None"),
        (returns([5]), "expected it to return a SearchResult, got [5]"),
        (returns(SearchResult([])), "SearchResult.outputs: expected at least one Output, got an empty list"),
        (returns(SearchResult([[5]])), "SearchResult.outputs: expected a list of Output, got [[5]]"),
        (returns(SearchResult(DONE.outputs, None)), "SearchResult.stats: expected a dict, got None"),
        (returns(SearchResult(DONE.outputs, {"x": torch.zeros(1)})), "expected outputs and stats that JSON can hold"),
        (returns(SearchResult([Output([5], float("nan"), 0.0, "eos")])), "expected outputs and stats that JSON can"),
        (returns(SearchResult([Output(torch.tensor([5]), 0.0, 0.0, "eos")])), "Output.token_ids: expected a list of"),
        (returns(SearchResult([Output([260], 0.0, 0.0, "eos")])), "Output.token_ids: expected integers from 0 to 259"),
        (returns(SearchResult([Output([5], 0.0, 0.0, None)])), "Output.finish_reason: expected one of eos, stop"),
        (returns(SearchResult([Output([5], 0.0, 0.0, "done")])), "constraint, interrupted, got 'done'"),
        (returns(SearchResult([Output([5], 0.0, 0.0, ["eos"])])), "constraint, interrupted, got ['eos']"),
        (settles(6), "Report.settled: expected the first tokens of the best output, got [6]"),
        (settles(5, 6), "Report.settled: expected the first tokens of the best output, got [5, 6]"),
    ],
)
def test_what_breaks_the_contract(engine: Engine, steps: Callable[..., Any], says: str):
    error = serve(engine, Steps(steps))
    assert "breaks the contract of searches" in error.what and says in error.what
    assert __file__ in error.where


def test_the_line_of_what_breaks_the_contract(engine: Engine):
    def deep(task):
        yield ask(task, [7])  # the wrong request

    def outer(task):
        yield from deep(task)

    assert serve(engine, Steps(outer)).where == line_of("the wrong request") + "deep"


def test_nodes_may_be_asked_for_twice_in_one_request(engine: Engine):
    def steps(task):
        rows, numbers = yield ask(task, [0, 0], read=lambda rows_NV, _: rows_NV[:, 7])
        assert rows.shape[0] == 2 and torch.equal(rows[0], rows[1])
        assert numbers.tolist() == rows[:, 7].tolist()  # of the rows in the order asked
        return DONE

    assert engine.generate([[1, 7]], Steps(steps))[0].outputs[0].token_ids == [5]


# --- what a search is ---


@dataclass(frozen=True)
class Minimal(Search):
    """Nothing but `run`."""

    beams: int = 3

    def run(self, task):
        yield ask(task)
        return DONE


def test_run_is_enough(engine: Engine):
    [result] = engine.generate([[1, 7]], Minimal())
    assert result.outputs[0].token_ids == [5]
    assert Minimal().slots(10, 5) == (14, 22) and Greedy().slots(10, 5) == (14, 14) and Minimal.models == ()


def test_what_is_no_search_is_refused(engine: Engine):
    class Duck:
        def run(self, task):
            yield ask(task)

    for search in (Duck(), 5, None, "trie"):
        with pytest.raises(UsageError, match="search: expected"):
            engine.generate([[1, 7]], search)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"which lacks slots, check, models\nwrite class Duck\(Search\)"):
        engine.generate([[1, 7]], Duck())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="abstract"):
        type("Empty", (Search,), {})()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("check", lambda self, vocab, eos: 1 / 0, "ZeroDivisionError"),
        ("slots", lambda self, prompt, new: 1 / 0, "ZeroDivisionError"),
        ("slots", lambda self, prompt, new: 5, "slots: expected two integers, the least and the most, got 5"),
        ("models", "draft", "models: expected a tuple of draft or reward, got 'draft'"),
        ("models", ("judge",), "models: expected a tuple of draft or reward, got ('judge',)"),
        ("models", property(lambda self: 1 / 0), "ZeroDivisionError"),
    ],
)
def test_faults_before_the_search_starts(engine: Engine, name: str, value: Any, says: str):
    kind = type("Steps", (Steps,), {name: value, "__module__": __name__})
    assert says in serve(engine, kind(returns(DONE))).what


# --- the cache's limit ---


@dataclass(frozen=True)
class Wide(Search):
    """A search that says how many slots it needs; it has `beams` and no `num_return_sequences`."""

    beams: int = 4
    each: int = 1
    even: bool = False

    def __post_init__(self):
        if self.even and self.beams % 2:
            raise ValueError("odd")

    def run(self, task):
        yield ask(task)
        return DONE

    def slots(self, prompt_tokens, new_tokens):
        return (prompt_tokens + self.beams * self.each * new_tokens,) * 2


class Plain(Search):
    """No dataclass, and an attribute `beams` that nobody can change."""

    beams = 1000

    def run(self, task):
        yield ask(task)
        return DONE

    def slots(self, prompt_tokens, new_tokens):
        return prompt_tokens + 3 * new_tokens, prompt_tokens + 3 * new_tokens


@pytest.mark.parametrize("search", [Wide(100), Wide(100, 2), Wide(100, 40), Wide(100, even=True), Plain()])
def test_the_advice_is_the_searchs_own(folder: Path, engine: Engine, search: Search):
    unit = engine.pool.bytes_per_token
    small = Engine.load(folder, threads=1, kv_memory=40 * unit)
    with pytest.raises(KVMemoryError) as caught:
        small.generate([[1, 7, 8]], search, max_new_tokens=15)
    error, least = caught.value, slots_of(search, 3, 15)[0]
    assert f"{type(search).__name__} needs at least {least}" in error.what
    assert f"(prompt 3 + new tokens 15 - 1 + branches {least - 17}) x {unit} bytes per token" in error.where
    assert "beams 100 - 2" not in str(error)
    words = error.remedy.split()
    beams = int(words[words.index("--beams") + 3].rstrip(",")) if "--beams" in words else 0
    fewer = int(words[words.index("--max-new-tokens") + 3]) if "most" in words and not beams else 0
    if isinstance(search, Wide) and not search.even and search.each < 40:
        assert beams == 37 // (15 * search.each)
        small.generate([[1, 7, 8]], Wide(beams, search.each), max_new_tokens=15)
        with pytest.raises(KVMemoryError):
            small.generate([[1, 7, 8]], Wide(beams + 1, search.each), max_new_tokens=15)
    elif isinstance(search, Plain):
        assert (beams, fewer) == (0, 12)
        small.generate([[1, 7, 8]], search, max_new_tokens=12)
    else:
        assert beams == fewer == 0


# --- the batch command ---


def test_a_batch_goes_on_after_a_fault(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "own_faulty.py").write_text(
        "from dataclasses import dataclass\nfrom search import *\n\n"
        "@dataclass(frozen=True)\nclass Faulty(Search):\n    late: bool = False\n\n"
        "    def run(self, task):\n        yield Evaluate(task.tree, [task.tree.root])\n        raise KeyError('x')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(batch, "load_engine", lambda args, shard=None: engine)
    monkeypatch.setitem(REGISTRY, "faulty", None)  # taken away again when the test has ended
    del REGISTRY["faulty"]
    lines = [{"prompt": "a"}, {"prompt": "a", "params": {"search": "greedy"}}]
    for flags in ([], ["-v"]):
        out = io.BytesIO()
        source = io.BytesIO("".join(json.dumps(line) + "\n" for line in lines).encode())
        code = batch.main(["--search", "own_faulty:Faulty", "--max-new-tokens", "3", *flags], source, out)
        faulty, fine = map(json.loads, out.getvalue().splitlines())
        assert code == 2 and "outputs" in fine and faulty["error"]["code"] == "search"
        assert f"line 1: the search Faulty of the module own_faulty failed: KeyError: 'x'; {tmp_path}" in str(faulty)
        assert ("Traceback" in capsys.readouterr().err) == bool(flags)


def test_attributed_passes_what_is_meant_for_the_user():
    with pytest.raises(UsageError), attributed(Steps):
        raise UsageError("x")
    with pytest.raises(SearchError), attributed(Steps):
        raise ValueError("x")
    assert "ValueError" in search_error(Steps, ValueError()).what
    assert Job(lambda run: None).foreign is False and Driver.__name__  # internal runs are trusted

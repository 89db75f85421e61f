"""Every wrong argument of the Python interface is a UsageError that names it, never a TypeError or AttributeError."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, Request, Session, UsageError
from engine.contract.trace import Trace
from engine.conversation import Conversation
from engine.demo import demo_folder
from search import Greedy, Trie
from tests.invariants import check_pool

MB = 1 << 20


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(demo_folder(), threads=1, kv_memory=4 * MB, dtype="float32")


LOAD: list[tuple[str, list[Any]]] = [
    ("folder", [None, 5, b"x", ["x"]]),
    ("dtype", [None, 5, torch.float32, ["float32"], "int8"]),
    ("device", [None, 0, torch.device("cpu"), "tpu", ["cpu"]]),
    ("threads", ["2", 2.0, True, 0, [1]]),
    ("context", ["2", 2.0, True, 0, [1]]),
    ("kv_memory", ["512Q", "x", "", "-1M", 1.5, True, 0, -1, 1 << 70, [1]]),
    ("compile", [None, True, "yes", ["on"]]),
    ("quant", [None, 8, "int5", ["int8"]]),
    ("chat_template", [5, ["none"], b"x"]),
    ("parallel", ["x", None, 0, 1.0, True]),
    ("draft", [5, b"x", ["x"], Greedy()]),
    ("reward", [5, b"x", ["x"], []]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in LOAD for value in values], ids=repr)
def test_load(name, value):
    options = {"folder": demo_folder(), "kv_memory": MB} | {name: value}
    with pytest.raises(UsageError, match=f"^{name}: expected "):
        Engine.load(**options)


REQUEST: list[tuple[str, list[Any]]] = [
    ("prompt", [None, 5, b"Hello", torch.tensor([5]), {5}, ["Hello"], [5, "x"], [5.0], [True], [-1]]),
    ("search", [None, "trie", Trie, 5, {}]),
    ("max_new_tokens", [None, "5", 5.0, True, 0]),
    ("eos_token_ids", [5, "x", ["x"], [[5]], [None], [-1], [True]]),
    ("ignore_eos", [None, 1, "yes"]),
    ("stop", [None, 5, "x", b"x", [""], [5], {"x"}, 0, [b"x"]]),
    ("messages", [5, "x", [5], {"role": "user"}]),
    ("reward", [5, 0, "x", []]),
    ("trace", [5, "x.html"]),
    ("distinct", [5, "x", True, ["text"]]),
    ("constraint", [5, "x", Greedy()]),
    ("constraint_scores", [None, 5, "x", ["model"]]),
    ("choices", [5, "x", b"x", [5], [[5.0]], [[]], [""]]),
    ("logit_bias", [5, "x", [5], 0, "", [], False, {5: "x"}, {-1: 1.0}, {"x": 1}, {5: float("nan")}]),
    ("sequence_bias", [5, "x", [5], 0, "", False, [[5, 1.0]], {5: 1.0}, {(): 1.0}, {(5,): None}]),
    ("repetition_penalty", [None, "x", 0, -1.0, True, float("nan")]),
    ("frequency_penalty", [None, "x", 2.1, True, float("nan")]),
    ("presence_penalty", [None, "x", -2.1, True, float("nan")]),
    ("dry_multiplier", [None, "x", -0.1, True, float("nan"), float("inf")]),
    ("dry_base", [None, "x", 0.9, True, float("nan"), float("inf")]),
    ("dry_allowed_length", [None, 1.5, 0, True]),
    ("dry_penalty_last_n", [None, 1.5, -2, True]),
    ("dry_sequence_breakers", [None, 5, "x", [5], [""]]),
    ("no_repeat_ngram_size", [None, 1.5, -1, True]),
    ("bad_words", [None, 5, "x", [5], [[]], [""]]),
    ("min_length", [None, 1.5, -1, True]),
    ("min_new_tokens", ["x", 1.5, -1, True]),
    ("prefix_allowed_tokens_fn", [5, "x", 0, ""]),
    ("suppress_tokens", [None, 5, "5", [5.0], [-1], [True], [1 << 40]]),
    ("begin_suppress_tokens", [None, 5, "5", [5.0], [-1], [True]]),
    ("logits_processor", [5, "x", [5]]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REQUEST for value in values], ids=repr)
def test_requests(engine, name, value):
    options = {"prompt": "Hello", "search": Greedy(), "max_new_tokens": 1} | {name: value}
    match = f"^{name}: expected "
    [(place, error)] = engine.serve([Request(**options)])
    assert place == 0 and isinstance(error, UsageError)
    with pytest.raises(UsageError, match=match):
        raise error
    prompt = options.pop("prompt")
    with pytest.raises(UsageError, match=match):
        engine.generate([prompt], **options)
    with pytest.raises(UsageError, match=match):
        list(engine.stream(prompt, **options))
    check_pool(engine.pool, [])


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("prompts", lambda engine: engine.generate(5, Greedy())),
        ("prompts", lambda engine: engine.generate(None, Greedy())),
        ("prompts", lambda engine: engine.generate("Hello", Greedy())),
        ("requests", lambda engine: list(engine.serve(5))),
        ("on_step", lambda engine: list(engine.serve([], on_step=5))),
        ("interrupted", lambda engine: list(engine.stream("Hello", Greedy(), interrupted=5))),
        ("prompt", lambda engine: engine.logits(5)),
        ("prompt", lambda engine: engine.logits("Hello")),
        ("prompt", lambda engine: engine.logits(torch.tensor([5]))),
        ("role", lambda engine: engine.add(5, engine)),
        ("draft", lambda engine: engine.add("draft", 5)),
        ("reward", lambda engine: engine.add("reward", 5)),
    ],
)
def test_other_calls(engine, name, ask):
    with pytest.raises(UsageError, match=f"^{name}: expected "):
        ask(engine)


def test_what_is_no_request_does_not_disturb_the_others(engine):
    outcomes = dict(engine.serve([5, Request("Hello", Greedy(), max_new_tokens=1), "x"]))
    assert "expected a Request, got 5" in str(outcomes[0]) and "expected a Request, got 'x'" in str(outcomes[2])
    assert outcomes[1].outputs


def test_a_trace_of_another_request_does_not_disturb_the_others(engine):
    trace = Trace()
    requests = [Request("Hello", Greedy(), max_new_tokens=1, trace=each) for each in (trace, trace, None)]
    outcomes = dict(engine.serve(requests))
    assert isinstance(outcomes[1], UsageError) and outcomes[1].what.startswith("trace: it records another request")
    assert not isinstance(outcomes[0], UsageError) and outcomes[0].outputs == outcomes[2].outputs
    with pytest.raises(UsageError, match=r"^trace: "):
        engine.generate(["Hello", "Hello"], Greedy(), max_new_tokens=1, trace=Trace())
    check_pool(engine.pool)


@pytest.mark.parametrize("scores", [5, None, "Hello", ["Hello"], [5], [None]])
def test_scores(scores):
    with pytest.raises(UsageError, match="expected"):
        Engine.load(demo_folder("reward"), threads=1, kv_memory=MB).scores(scores)


@pytest.mark.parametrize("size", ["4M", "4 MB", "4mib", "4096K", 4 * MB])
def test_sizes_are_those_of_the_command_line(size, engine):
    loaded = Engine.load(
        str(demo_folder()), threads=1, kv_memory=size, dtype="float32", draft=Path(demo_folder("draft"))
    )
    assert (
        loaded.pool.pages > 0
        and 3.9 * MB < sum(e.pool.pages * e.pool.page_bytes for e in (loaded, loaded.companions["draft"])) <= 4 * MB
    )


@pytest.mark.parametrize("value", [None, 5, b"Hello", torch.tensor([5]), {5}], ids=repr)
def test_texts_of_other_methods(engine, value):
    conversation = Conversation(engine)
    calls: dict[str, Callable[[], object]] = {
        "prompt": lambda: engine.score(value, ["a"]),
        "prefix": lambda: engine.save_prefix("prefix", value),
        "user": lambda: [*conversation.stream(value, Greedy())],
        "engine": lambda: Session(value),
    }
    if value is not None:
        calls |= {"system": lambda: Conversation(engine, system=value), "": lambda: conversation.set_system(value)}
    for name, call in calls.items():
        with pytest.raises(UsageError, match=f"^{name or 'system'}: expected "):
            call()
    assert conversation.turns == [] and conversation.system is None

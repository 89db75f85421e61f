"""Where a search's time goes: parts of the engine under one stop watch, each counted without the parts it calls.

The engine knows nothing of it: while `watched` lasts, its functions are exchanged for ones that tell the watch. On a
CPU that goes down to linear layers and attention; of compiled layers and of a GPU, where functions return before their
work is done, only to whole passes.
"""

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.profiler import record_function

import engine.driver
import engine.graphs
from engine import Engine
from engine.driver import Driver, Runner
from engine.requests import Evaluate, Search, Task
from engine.text.stopping import TextStream
from engine.text.tokenizer import Tokenizer
from engine.tree import TokenTree
from kernels.stack import one_by_one
from models.int8 import Int8Linear
from models.linear import FORMATS, Linear
from tools.bench.limits import attention_work

SEARCH, TEXT, DRIVER = "search", "tokens and text", "driver"
MODEL_PARTS = ("linear layers", "attention", "KV writes", "head", "norms, rotary, sums", "passes")
TREE_METHODS = ("grow", "keep", "pending", "allocate", "release_slots", "by_rope")


@dataclass
class Step:
    """One step of the driver: what it took and what it did."""

    seconds: float = 0.0  # from the end of the one before
    reads_prompt: bool = False
    nodes: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # evaluated, by model
    live: int = 0  # tokens that hold a slot while the pass runs, all models
    kv_bytes: int = 0  # of the pages held then
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds
    work: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))  # bytes, operations


@dataclass
class Watch:
    """Steps of one run.

    Args:
        parts: whether to time parts; else only steps.
        labels: name the parts in a torch profile as well.
        after_step: called with the number of steps made.
    """

    parts: bool = True
    labels: bool = False
    after_step: Callable[[int], None] = lambda _: None
    steps: list[Step] = field(default_factory=lambda: [Step()])  # the last is under way
    stack: list[str] = field(default_factory=list)
    last: float = 0.0  # when the stack changed
    ended: float = 0.0  # when the latest step did
    driver: Driver | None = None
    role: str = "target"
    seen: list[tuple[Step, str, int, tuple]] = field(default_factory=list)  # attention so many times, see `settle`

    @property
    def step(self) -> Step:
        return self.steps[-1]

    def enter(self, part: str) -> None:
        now = time.perf_counter()
        if self.stack:
            self.step.parts[self.stack[-1]] += now - self.last
        self.stack.append(part)
        self.last = now

    def leave(self) -> None:
        now = time.perf_counter()
        self.step.parts[self.stack.pop()] += now - self.last
        self.last = now

    def timed(self, part: str, function: Callable, of_model: bool = False) -> Callable:
        """The function, its time booked to a part; one of the pass's model, if that is what it belongs to."""

        def run(*args: Any, **kwargs: Any) -> Any:
            name = f"{self.role}: {part}" if of_model else part
            with record_function(name) if self.labels else nullcontext():
                self.enter(name)
                try:
                    return function(*args, **kwargs)
                finally:
                    self.leave()

        return run

    def settle(self) -> list[Step]:
        """The finished steps. What attention had to do is worked out only now: it takes longer than attending."""
        known: dict[tuple, tuple[int, int]] = {}
        for step, part, times, (layout, *rest) in self.seen:
            key = (id(layout), *rest)
            if key not in known:
                known[key] = attention_work(layout, *rest)
            add(step, part, *(times * amount for amount in known[key]))
        self.seen.clear()
        for step in self.steps[:-1]:
            if self.parts:
                step.parts[DRIVER] += step.seconds - sum(step.parts.values())  # and of whoever drives the driver
        return self.steps[:-1]


def add(step: Step, part: str, moved: int, operations: int) -> None:
    """Book work to a part."""
    work = step.work[part]
    work[0] += moved
    work[1] += operations


class Watched(Search):
    """A search whose own time is booked to it, what it reads of log-probabilities included."""

    def __init__(self, search: Search, watch: Watch):
        self.search, self.watch = search, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.search, name)

    @property
    def models(self) -> Sequence[str]:
        """The search's own."""
        return self.search.models

    def run(self, task: Task) -> "WatchedGenerator":
        return WatchedGenerator(self.search.run(task), self.watch)

    def slots(self, prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
        return self.search.slots(prompt_tokens, new_tokens)

    def check(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.search.check(vocab_size, eos_token_ids)


class WatchedGenerator:
    """What a driver does with a generator."""

    def __init__(self, generator: Any, watch: Watch):
        self.watch, self.close = watch, generator.close
        self.send, self.throw = (self.passing(watch.timed(SEARCH, f)) for f in (generator.send, generator.throw))

    def passing(self, resume: Callable) -> Callable:
        def run(value: Any) -> Any:
            request = resume(value)
            if isinstance(request, Evaluate) and request.read is not None:
                request = replace(request, read=self.watch.timed(SEARCH, request.read))
            return request

        return run


@contextmanager
def watched(engine: Engine, watch: Watch, deep: bool) -> Iterator[None]:
    """Book what the engine does to the watch; `deep`: down to the operators of a layer."""
    runners = {"target": engine.runner, **{role: other.runner for role, other in engine.companions.items()}}
    with ExitStack() as stack:

        def exchange(owner: Any, name: str, new: Callable) -> None:
            stack.enter_context(patch.object(owner, name, new))

        exchange(Driver, "step", stepping(Driver.step, watch))
        for role, runner in runners.items():
            exchange(runner, "evaluate", passing(role, runner, runners, watch))
        if watch.parts:
            for owner, name, part in host_parts():
                exchange(owner, name, watch.timed(part, getattr(owner, name)))
            for runner in runners.values():
                exchange(runner, "answer", watch.timed("log-probabilities", runner.answer))
                exchange(runner, "fetch", watch.timed("answers to the host", runner.fetch))
                exchange(runner.model, "logits", watch.timed("head", runner.model.logits, of_model=True))
                layers = "norms, rotary, sums" if deep else "passes"
                forward = runner.model.forward if deep else counting(runner, watch)
                exchange(runner.model, "forward", watch.timed(layers, forward, of_model=True))
        if watch.parts and deep:
            for runner in runners.values():
                stack.enter_context(one_by_one(runner.model))
            for kind in FORMATS.values():
                exchange(kind, "forward", linear(vars(kind)["forward"], watch))
            for module in [m for name, m in sys.modules.items() if name.startswith("models.")]:
                for name, wrap in (("tree_attention", attention), ("kv_write", writing)):
                    if hasattr(module, name):
                        exchange(module, name, wrap(getattr(module, name), watch))
        watch.ended = time.perf_counter()
        yield


def host_parts() -> Iterator[tuple[Any, str, str]]:
    """What is neither model nor search: (where it is, its name there, the part it belongs to)."""
    yield from ((TokenTree, name, "trees") for name in TREE_METHODS)
    yield from ((module, "pack", "packing") for module in (engine.driver, engine.graphs))
    yield from ((Tokenizer, name, TEXT) for name in ("encode", "encode_rendered", "decode"))
    yield from ((TextStream, name, TEXT) for name in ("push", "finish"))


# --- the functions in place of the engine's ---


def stepping(inner: Callable, watch: Watch) -> Callable:
    def step(self: Driver) -> None:
        watch.driver = self
        with record_function("step") if watch.labels else nullcontext():
            watch.enter(DRIVER)
            try:
                inner(self)
            finally:
                watch.leave()
        watch.step.seconds = time.perf_counter() - watch.ended
        watch.steps.append(Step())
        watch.after_step(len(watch.steps) - 1)
        watch.ended = time.perf_counter()

    return step


def passing(role: str, runner: Runner, runners: Mapping[str, Runner], watch: Watch) -> Callable:
    inner = watch.timed("passes", runner.evaluate, of_model=True) if watch.parts else runner.evaluate

    def evaluate(chunks: Any, *rest: Any) -> Any:
        step, watch.role = watch.step, role
        for chunk in chunks:
            step.nodes[role] += chunk.trunk_tokens + len(chunk.nodes)
            step.reads_prompt |= chunk.trunk_tokens > 1
        assert watch.driver is not None
        trees = [tree for run in watch.driver.running for tree in run.trees]
        step.live = max(step.live, sum(tree.live_tokens for tree in trees))
        step.kv_bytes = max(step.kv_bytes, sum(r.pool.used_pages * r.pool.page_bytes for r in runners.values()))
        return inner(chunks, *rest)

    return evaluate


def counting(runner: Runner, watch: Watch) -> Callable:
    """A model's forward that notes what its layers' attention has to do, where nothing can be put around that."""
    model, inner = runner.model, runner.model.forward
    shape, keys = model.shape, runner.pool.cache.k_LGSD
    windows = Counter(map(model.config.window, range(shape.layers)))
    if keys.device.type != "cpu":  # a graph's layout changes under it
        return inner

    def forward(tokens_T: Tensor, positions_T: Tensor, spans_T: Tensor, cache: Any, layout: Any) -> Tensor:
        for window, layers in windows.items():
            facts = layout, model.config.heads, shape.kv_heads, shape.head_dim, keys.dtype, window
            watch.seen.append((watch.step, f"{watch.role}: attention", layers, facts))
        return inner(tokens_T, positions_T, spans_T, cache, layout)

    return forward


def linear(inner: Callable, watch: Watch) -> Callable:
    timed = watch.timed("linear layers", inner, of_model=True)

    def forward(self: Linear, x: Tensor) -> Tensor:
        part = watch.stack[-1] if watch.stack else ""
        head = part.endswith("head")
        y = inner(self, x) if head else timed(self, x)
        add(watch.step, part if head else f"{watch.role}: linear layers", *linear_work(self, x, y))
        return y

    return forward


def linear_work(layer: Linear, x: Tensor, y: Tensor) -> tuple[int, int]:
    """Bytes of weights, input and output, and operations."""
    elements = x.shape[-1] * y.shape[-1]
    weights = elements + 4 * y.shape[-1] if isinstance(layer, Int8Linear) else elements * y.itemsize
    bias = 0 if layer.bias is None else layer.bias.nbytes
    return weights + bias + x.nbytes + y.nbytes, 2 * elements * (x.numel() // x.shape[-1])


def attention(inner: Callable, watch: Watch) -> Callable:
    timed = watch.timed("attention", inner, of_model=True)

    def attend(q_THD: Tensor, k_GSD: Tensor, v_GSD: Tensor, layout: Any, **options: Any) -> Tensor:
        (_, H, D), G = q_THD.shape, k_GSD.shape[0]
        facts = layout, H, G, D, q_THD.dtype, options.get("window")
        watch.seen.append((watch.step, f"{watch.role}: attention", 1, facts))
        return timed(q_THD, k_GSD, v_GSD, layout, **options)

    return attend


def writing(inner: Callable, watch: Watch) -> Callable:
    timed = watch.timed("KV writes", inner, of_model=True)

    def write(k_GSD: Tensor, v_GSD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor, **options: Any) -> None:
        add(watch.step, f"{watch.role}: KV writes", 2 * (k_TGD.nbytes + v_TGD.nbytes) + slots_T.nbytes, 0)
        timed(k_GSD, v_GSD, k_TGD, v_TGD, slots_T, **options)

    return write

"""Where a search's time goes: phases of the engine under one stop watch, each without the phases inside it.

The engine notifies the watch of its phases (`engine.step.phases`). On a CPU, PyTorch's forward hooks separate the
linear layers from the rest of a forward pass; a GPU, where functions return before their work is done, and compiled
layers have one time for the whole pass.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.profiler import record_function

from engine import Engine
from engine.step.jobs import Batch
from kernels.linear import PackedParts
from kernels.stack import clocks, one_by_one
from models.formats.floats import PackedLinear
from models.formats.int8 import Int8Linear
from models.layers import Attention
from tools.bench.limits import attention_work

SEARCH, TEXT, DRIVER = "search", "text and events", "driver"
LINEAR, HEAD, FORWARD = "linear layers", "head", "rest of the forward pass"
MODEL_PARTS = {"forward": FORWARD, "linear": LINEAR, "logits": HEAD}
PARTS = {"step": DRIVER, "run": DRIVER, "pack": "packing", "log-softmax": "log-probabilities",
         "fetch": "answers to the host", "wait": "wait for the device"}  # fmt: skip


@dataclass
class Step:
    """One step of the driver: its time and its work."""

    seconds: float = 0.0  # from the end of the step before
    reads_prompt: bool = False
    nodes: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # evaluated, by model
    live: int = 0  # most tokens that had a slot during a pass, over all models
    kv_bytes: int = 0  # most bytes of pages held during a pass
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds
    calls: dict[str, float] = field(default_factory=dict)  # seconds of a stack's operators, see `clocks`
    work: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))  # bytes, operations


@dataclass
class Watch:
    """A `PhaseObserver` that measures the steps of one run of an engine.

    Args:
        engine: is observed while `watched` lasts.
        parts: whether to time parts; otherwise only steps.
        labels: whether to name the parts in a torch profile, too.
        after_step: called with the number of steps made.
    """

    engine: Engine
    parts: bool = True
    labels: bool = False
    after_step: Callable[[int], None] = lambda _: None
    steps: list[Step] = field(default_factory=lambda: [Step()])  # the last one has not ended
    stack: list[str] = field(default_factory=list)
    marks: list[record_function] = field(default_factory=list)
    last: float = 0.0  # time of the latest change of the stack
    ended: float = 0.0  # end of the latest step
    counted: dict[str, float] = field(default_factory=clocks)  # by the clocks of C++, then
    role: str = "target"
    layouts: list[tuple[int, Any, tuple]] = field(default_factory=list)  # step, layout and the rest of a layer's shape

    def begin(self, phase: str, batch: Batch | None = None) -> None:
        """See `PhaseObserver`."""
        if batch is not None:
            self.role = batch.model
            if phase == "commit":
                self.note(batch)
        if self.parts or phase == "step":
            part = PARTS.get(phase, phase) if phase not in MODEL_PARTS else f"{self.role}: {MODEL_PARTS[phase]}"
            if self.labels:
                self.marks.append(record_function("step" if phase == "step" else part))
                self.marks[-1].__enter__()
            self.book()
            self.stack.append(part)

    def end(self, phase: str) -> None:
        """See `PhaseObserver`."""
        if self.parts or phase == "step":
            self.book()
            self.stack.pop()
            if self.labels:
                self.marks.pop().__exit__(None, None, None)
        if phase == "step":
            step, now = self.steps[-1], time.perf_counter()
            step.seconds = now - self.ended
            if self.parts:
                step.parts[TEXT] += step.seconds - sum(step.parts.values())  # outside the driver
            before, self.counted = self.counted, clocks()
            step.calls = {name: seconds - before[name] for name, seconds in self.counted.items()}
            self.steps.append(Step())
            self.after_step(len(self.steps) - 1)
            self.ended = time.perf_counter()

    def book(self) -> None:
        """Add the time since the latest change to the innermost part."""
        now = time.perf_counter()
        if self.stack:
            self.steps[-1].parts[self.stack[-1]] += now - self.last
        self.last = now

    def note(self, batch: Batch) -> None:
        """Note what a forward pass evaluated and what the caches hold."""
        step = self.steps[-1]
        for share in batch.shares:
            step.nodes[batch.model] += len(share.chunk)
            step.reads_prompt |= share.chunk.trunk_tokens > 1
        trees = {tree for share in batch.shares for tree in share.job.trees}
        pools = [engine.pool for engine in (self.engine, *self.engine.companions.values())]
        step.live = max(step.live, sum(tree.live_tokens for tree in trees))
        step.kv_bytes = max(step.kv_bytes, sum(pool.used_pages * pool.page_bytes for pool in pools))

    def before_linear(self, module: nn.Module, args: tuple) -> None:
        """A forward hook; the head's layer is counted in the phase "logits"."""
        if self.stack and not self.stack[-1].endswith(HEAD):
            self.begin("linear")

    def after_linear(self, module: Any, args: tuple, y: Tensor) -> None:
        """A forward hook."""
        if self.stack:
            part = self.stack[-1]
            work = self.steps[-1].work[part]
            for i, amount in enumerate(linear_work(module, args[0], y)):
                work[i] += amount
            if not part.endswith(HEAD):
                self.end("linear")

    def before_layer(self, module: Any, args: tuple) -> None:
        """A forward hook that notes the shape of the layer's attention."""
        [registers], inner = args, module.attention
        if not isinstance(inner, Attention):
            return
        heads = inner.heads
        rest = heads.queries, heads.kept, heads.size, registers.cache.k_LGSD.dtype, inner.window
        self.layouts.append((len(self.steps) - 1, registers.layout, rest))

    def attention(self, steps: slice) -> tuple[int, int]:
        """Bytes and operations of the attention of some steps. This takes longer than the attention itself."""
        known: dict[tuple, tuple[int, int]] = {}
        chosen = range(len(self.steps))[steps]
        for step, layout, rest in self.layouts:
            if step in chosen and (id(layout), *rest) not in known:
                known[id(layout), *rest] = attention_work(layout, *rest)
        found = [known[id(layout), *rest] for step, layout, rest in self.layouts if step in chosen]
        return sum(moved for moved, _ in found), sum(operations for _, operations in found)


@contextmanager
def watched(watch: Watch, deep: bool) -> Iterator[None]:
    """Observe the watch's engine; `deep`: down to the linear layers."""
    engine = watch.engine
    with ExitStack() as stack:
        engine.observer = watch
        stack.callback(setattr, engine, "observer", None)
        for other in (engine, *engine.companions.values()) if watch.parts and deep else ():
            model = other.runner.model
            stack.enter_context(one_by_one(model))
            hooks = [layer.register_forward_pre_hook(watch.before_layer) for layer in model.layers]
            for module in model.modules():
                if isinstance(module, PackedLinear):
                    hooks.append(module.register_forward_pre_hook(watch.before_linear))
                    hooks.append(module.register_forward_hook(watch.after_linear))
            for hook in hooks:
                stack.callback(hook.remove)
        watch.ended = time.perf_counter()
        yield


def linear_work(layer: PackedLinear, x: Tensor, y: Tensor) -> tuple[int, int]:
    """Bytes of weights, input and output, and operations."""
    elements, packed = x.shape[-1] * y.shape[-1], layer.packed
    if packed:
        parts = packed.parts if isinstance(packed, PackedParts) else [packed]
        size = max(part.panels.itemsize for part in parts)
    else:
        size = 1 if isinstance(layer, Int8Linear) else y.itemsize
    scales = 4 * y.shape[-1] if size == 1 else 0
    bias = 0 if layer.bias is None else layer.bias.nbytes
    return elements * size + scales + bias + x.nbytes + y.nbytes, 2 * elements * (x.numel() // x.shape[-1])

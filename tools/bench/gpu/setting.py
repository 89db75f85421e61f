"""The device, the models and the time that the stages of `python -m tools.bench gpu` share."""

import argparse
import contextlib
import gc
import logging
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from engine import Engine
from engine.cache.pool import PagePool
from engine.load.compiling import prepare, warm_up
from engine.load.loading import LoadedModel
from engine.step.gpu import compile_ahead
from engine.step.graphs import make_runner
from models.families.llama import Llama
from tools.bench import device as on_gpu
from tools.bench.gpu.journal import Journal
from tools.bench.gpu.random_models import Made, make
from tools.bench.measure import progress

CUDA = torch.device("cuda")
LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 16384,
}
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
QWEN3_17B = QWEN3_06B | {"hidden_size": 2048, "intermediate_size": 6144}
PAGE = 16
SMALL = ("int8", "int4")  # formats of weights


class DeviceLost(BaseException):
    """The GPU answers no more: after an illegal access no call of this process succeeds."""


class Setting:
    """The device and the models that the stages share.

    Args:
        args: of the command.
        journal: of the run.
        device: the device of the models.
        large, small, middle: configurations of a Llama and of two Qwen3.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        journal: Journal,
        device: torch.device = CUDA,
        large: Mapping[str, Any] = LLAMA_2_7B,
        small: Mapping[str, Any] = QWEN3_06B,
        middle: Mapping[str, Any] = QWEN3_17B,
    ):
        self.args, self.journal, self.device, self.small, self.middle = args, journal, device, small, middle
        self.large = {**large, **({"num_hidden_layers": args.layers} if args.layers else {})}
        self.notes: list[str] = []
        self.until = self.end = math.inf  # when this stage, and when all of them begin no more
        self.left = 0  # cases of this stage that had no time
        self.copies: list[float] = []  # bytes per second of copies in this stage

    def begin(self, stage: str, seconds: float) -> None:
        """Begin a stage that has `seconds`; free the memory that the last one left, reference cycles included."""
        gc.collect()
        gc.freeze()  # as a server does: collections go through what the stage makes alone
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.until, self.notes, self.left = min(time.perf_counter() + seconds, self.end), [], 0
        self.copies = []
        self.journal.stage = stage
        self.journal.begin()

    def leave_out(self, stage: str) -> None:
        """Note that a stage had no time."""
        self.journal.stage = stage
        self.journal.begin()
        note = f"{stage}: the stage's time is over"
        self.journal.close({"rows": [], "targets": [], "notes": [note], "seconds": 0.0}, left=1)

    def note(self, what: str, error: BaseException | str) -> None:
        """Note why there is no figure."""
        first = str(error).strip().partition("\n")[0]
        text = first if isinstance(error, str) else f"{type(error).__name__}: {first}"
        progress(f"{what}: {text}")
        self.notes.append(f"{what}: {text}")

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Context in which it is noted why passes run without a graph; prompts always do."""
        log, handler = logging.getLogger("engine.step.graphs"), logging.Handler()
        handler.emit = lambda record: self.notes.append(record.getMessage())  # type: ignore[method-assign]
        handler.addFilter(lambda record: "reads a prompt" not in record.getMessage())
        level = log.level
        log.setLevel(logging.INFO)
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level)

    def rows(self, cases: Iterable[tuple[str, Callable[[], dict[str, Any]]]]) -> list[dict[str, Any]]:
        """The rows of the cases; those that the journal has are taken from it. A case that fails, or comes when the
        stage's time is over, is noted instead. If `cases` itself fails, the remaining cases are left out."""
        found, rest = [], iter(cases)
        while (case := self.attempt("the next case", partial(next, rest, None))) is not None:
            name, work = case
            if (ended := self.journal.known(name)) is not None:
                self.notes += ended.notes
            elif time.perf_counter() > self.until:
                self.left += 1
                self.note(name, "the stage's time is over")
                continue
            row = self.case(name, work) if ended is None else ended.row
            if row is not None:
                found.append(row)
        return found

    def case(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Run a case; its row goes into the journal, its figures to stderr. Returns None, with a note, if it fails."""
        progress(name)
        self.journal.begin(name)
        before, row = len(self.notes), None
        try:
            row = self.attempt(name, work)
        except DeviceLost:
            self.journal.end(name, None, self.notes[before:])
            raise
        self.journal.end(name, row, self.notes[before:])
        if row is not None:
            shown = {key: f"{x:.4g}" if isinstance(x, float) else x for key, x in row.items()}
            progress("   " + ", ".join(f"{key} {x}" for key, x in shown.items() if isinstance(x, str)))
        return row

    def attempt(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of `work`; None, with a note, if it fails. Raises DeviceLost."""
        try:
            return work()
        except Exception as error:
            traceback.print_exc(limit=-6)
            self.note(name, error)
            self.check_device()
            return None

    def check_device(self) -> None:
        """Raises DeviceLost if an error has left the GPU useless to this process."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize()
            except Exception as error:
                raise DeviceLost from error

    def beside_copy(self, *works: Callable[[], object]) -> tuple[float, list[float]]:
        """The bytes per second of a large copy, and the median seconds of works; all are measured in turns."""
        copy, moved = on_gpu.copying()
        seconds, *others = on_gpu.in_turns([copy, *works], self.args.runs)
        self.copies.append(moved / seconds)
        return moved / seconds, others

    @cached_property
    def model(self) -> "Made":
        """The Llama in bfloat16."""
        return make(Llama, self.large, self.device)

    @property
    def heading(self) -> str:
        """The line above the tables: the model and the bandwidth."""
        layers = self.large["num_hidden_layers"]
        return f"Llama-2-7B of {layers} layers, bfloat16, random weights; {self.bandwidths}"

    @property
    def bandwidths(self) -> str:
        """The bandwidths of the device during this stage, for headings."""
        copy = statistics.median(self.copies or [on_gpu.copy_bandwidth(self.args.runs)])
        return f"copy {copy / 1e9:.0f} GB/s, read {on_gpu.read_bandwidth(self.args.runs) / 1e9:.0f} GB/s."

    def engine(self, made: "Made", tokens: int, *, compiled: bool = False) -> Engine:
        """Make an engine whose pool holds this number of tokens."""
        model, compiled = made.model, compiled and prepare()
        pool = PagePool(model.shape, -(-tokens // PAGE) + 2, PAGE, torch.bfloat16, self.device)
        runner = make_runner(model, pool, model.shape.vocab_size, compiled=compiled)
        if compiled and not warm_up(lambda: runner.logits([1] * 5)):
            runner.rows = None
        compile_ahead(runner)
        return Engine(LoadedModel(runner, model.shape))


@dataclass
class Found:
    """The figures of a stage.

    Attributes:
        heading, columns, legend: of the table; see `rows_table`.
        targets: see `comparison`.
    """

    heading: str
    rows: list[dict[str, Any]]
    columns: dict[str, str]
    legend: str = ""
    targets: list[dict[str, Any]] = field(default_factory=list)

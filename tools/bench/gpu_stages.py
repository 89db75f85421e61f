"""The stages of `python -m tools.bench gpu`, and the models of random weights that they run."""

import argparse
import contextlib
import itertools
import logging
import statistics
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from engine import Engine
from engine.cache.pool import PagePool
from engine.engine import Request
from engine.load.compiling import prepare, warm_up
from engine.load.loading import LoadedModel
from engine.step.graphs import WORDS, make_runner
from kernels.linear.codes import Codes, row_bytes
from kernels.tree_attention import tree_attention
from models.checkpoint.fields import Fields
from models.checkpoint.weights import Weights
from models.config import HEAD, ModelShape
from models.decoder import Decoder
from models.families.llama import Llama
from models.families.qwen3 import Qwen3
from models.formats.coded import CodedLinear
from models.formats.linear import format_of
from search import Trie
from tools.bench import device as on_gpu
from tools.bench import peers
from tools.bench.measure import cores, progress
from tools.bench.report import comparison
from tools.kernels.scenes import scene

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
ROWS = (1, 16, 32, 64, 256)  # of products
OPTIONS = tuple(  # of programs of tree attention
    {"N": keys, "num_warps": warps, "num_stages": stages}
    for keys, warps, stages in itertools.product((32, 64, 128), (4, 8), (3, 5, 7))
)
SMALL = ("int8", "int4")  # formats of weights
RUNS = 3  # of searches, after one that warms up
GROUP = 32  # elements of an int4 matrix that share a scale
PAGE = 16
COLD = 1 << 29  # bytes of bfloat16 matrices, of which the first has left the caches when the last is read
FLOOR = """*of floor*: (bytes of the weights, but for the embedding, and of the live keys and values) / copy bandwidth,
over the time of a step, search included."""

ATTENTION = """*GB/s*: bytes of the live keys and values, each counted once, over the time of a layer's attention in a
CUDA graph that goes through every layer's own cache; *of copy*: the same over the bandwidth of a large copy, read and
written bytes counted. *x FlexAttention*, *x SDPA*: their time over ours, on contiguous keys and a ready mask."""
PRODUCTS = """*of copy*: bytes of the matrix over the time of a product, over the bandwidth of a large copy. *x by
int8*, *x by int4*: the time in bfloat16 (cuBLAS) over that of the same product with weights of 8 or 4 bits."""
SEARCHES = """*tokens/s*: of all searches, a token a step each. *by bytes*: what *x one search* can be at most, as every
search reads keys and values of its own."""
WHERE = "*share*: of the time of all kernels, in the second half of a search; *us*: of a launch, on average."


class Setting:
    """The device and the models that the stages share.

    Args:
        args: of the command.
        device, large, small: where; configurations of a Llama and of a Qwen3.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        device: torch.device = CUDA,
        large: Mapping[str, Any] = LLAMA_2_7B,
        small: Mapping[str, Any] = QWEN3_06B,
    ):
        self.args, self.device, self.small = args, device, small
        self.large = {**large, **({"num_hidden_layers": args.layers} if args.layers else {})}
        self.notes: list[str] = []
        self.begin(args.seconds)

    def begin(self, seconds: float) -> None:
        """A stage begins, and has so long."""
        self.until, self.notes = time.perf_counter() + seconds, []

    def note(self, what: str, error: BaseException | str) -> None:
        """Keep why there is no figure."""
        first = str(error).strip().partition("\n")[0]
        text = first if isinstance(error, str) else f"{type(error).__name__}: {first}"
        progress(f"{what}: {text}")
        self.notes.append(f"{what}: {text}")

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within it, why passes run without a graph is noted. Prompts always do."""
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
        """The rows of the cases; one that fails, or comes when the stage's time is over, is noted instead."""
        found = []
        for name, case in cases:
            if time.perf_counter() > self.until:
                self.note(name, "the stage's time is over")
                continue
            progress(name)
            if (row := self.attempt(name, case)) is not None:
                found.append(row)
        return found

    def attempt(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of work; None, and a note, if it fails."""
        try:
            return work()
        except Exception as error:
            traceback.print_exc(limit=-6)
            self.note(name, error)
            return None

    @cached_property
    def copy(self) -> float:
        """Bytes per second of a large copy."""
        bandwidth = on_gpu.copy_bandwidth(self.args.runs)
        progress(f"copy: {bandwidth / 1e9:.0f} GB/s")
        return bandwidth

    @cached_property
    def model(self) -> "Made":
        """The Llama in bfloat16."""
        return make(Llama, self.large, self.device)

    @property
    def heading(self) -> str:
        """The line above the tables: the model and the bandwidth."""
        layers = self.large["num_hidden_layers"]
        return f"Llama-2-7B of {layers} layers, bfloat16, random weights; copy {self.copy / 1e9:.0f} GB/s."

    def engine(self, made: "Made", tokens: int, *, compiled: bool = False) -> Engine:
        """An engine with a pool of its own, of so many tokens."""
        model, compiled = made.model, compiled and prepare()
        pool = PagePool(model.shape, -(-tokens // PAGE) + 2, PAGE, torch.bfloat16, self.device)
        runner = make_runner(model, pool, model.shape.vocab_size, compiled=compiled)
        if compiled and not warm_up(lambda: runner.logits([1] * 5)):
            runner.rows = None
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


# --- kernels ---


def attention(s: Setting) -> Found:
    """Tree attention of one layer: ours, FlexAttention, masked scaled_dot_product_attention."""
    shapes = itertools.product(s.args.prefix, sorted({*s.args.queries, s.args.beams}))
    with torch.inference_mode():
        rows = s.rows((f"{n} tokens, {q} queries", partial(attend, s, n, q)) for n, q in shapes)
    targets = [
        comparison(f"attention over {row['prefix']}, {row['queries']} queries, of copy", row["of_copy"], 0.85)
        for row in rows
        if row["queries"] == s.args.beams
    ]
    for rival, name in (("flex", "FlexAttention"), ("sdpa", "SDPA")):
        ratios = [row[f"x_{rival}"] for row in rows if row[f"x_{rival}"] is not None]
        targets.append(comparison(f"attention, least x {name}", min(ratios, default=None), 1.0))
    return Found(s.heading, rows, {
        "prefix": "{prefix}", "queries": "{queries}", "us": "{seconds:us.1f}", "GB/s": "{rate:G.0f}",
        "of copy": "{of_copy:.2f}", "x FlexAttention": "{x_flex:.1f}", "x SDPA": "{x_sdpa:.1f}",
        "largest difference": "{difference:.1e}",
    }, ATTENTION, targets)  # fmt: skip


def attend(s: Setting, prefix: int, queries: int, kv_heads: int | None = None, rivals: bool = True) -> dict[str, Any]:
    """One shape of tree attention."""
    L, H, runs = s.large["num_hidden_layers"], s.large["num_attention_heads"], s.args.runs
    D, G = s.large["hidden_size"] // H, kv_heads or H
    pool = PagePool(ModelShape(L, G, D, 1, None), prefix // PAGE + queries, PAGE, torch.bfloat16, s.device)
    k_LGSD, v_LGSD = pool.cache.k_LGSD.normal_(), pool.cache.v_LGSD.normal_()
    tree = scene(pool, prefix, queries, word_buckets=WORDS)
    q_THD = torch.randn(queries, H, D, dtype=torch.bfloat16, device=s.device)
    ours = [lambda i=i: tree_attention(q_THD, k_LGSD[i], v_LGSD[i], tree.layout, scale=D**-0.5) for i in range(L)]
    seconds, moved = on_gpu.seconds_of(on_gpu.recorded(ours), runs) / L, 2 * G * D * 2 * len(tree.slots_S)
    row = {"prefix": prefix, "queries": queries, "seconds": seconds, "bytes": moved, "rate": moved / seconds}
    row["of_copy"] = row["rate"] / s.copy
    if not rivals:
        return row
    packed = [(k_LGSD[i, :, tree.slots_S][None], v_LGSD[i, :, tree.slots_S][None]) for i in range(L)]
    q_1HTD, mask = q_THD.transpose(0, 1)[None].contiguous(), tree.visible_QS

    def sdpa(k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q_1HTD, k, v, attn_mask=mask)

    def times_over(make_rival: Callable[[], Callable[[Tensor, Tensor], Tensor]]) -> float:
        rival = make_rival()
        return on_gpu.seconds_of(on_gpu.recorded([partial(rival, k, v) for k, v in packed]), runs) / L / seconds

    row["x_sdpa"] = s.attempt("SDPA", lambda: times_over(lambda: sdpa))
    row["x_flex"] = s.attempt("FlexAttention", lambda: times_over(lambda: on_gpu.flex_attention(q_1HTD, mask)))
    return row | {"difference": float((ours[0]() - sdpa(*packed[0])[0].transpose(0, 1)).abs().max())}


def tune(s: Setting) -> Found:
    """Tree attention by the blocks of keys, warps and stages of its programs: those as they are, and the best."""
    from kernels.tree_attention import triton  # absent on some machines

    usual, H = triton._sizes, s.large["num_attention_heads"]

    def case(group: int, queries: int, option: dict[str, int]) -> dict[str, Any]:
        with mock.patch.object(triton, "_sizes", lambda *asked: usual(*asked) | option), torch.inference_mode():
            row = attend(s, s.args.prefix[0], queries, H // group, rivals=False)
        return row | {"group": group, "option": option}

    rows = []
    for group, queries in itertools.product((1, 4), sorted({*s.args.queries, s.args.beams})):
        if H % group == 0:
            found = s.rows((f"group {group}, {queries} queries, {option}", partial(case, group, queries, option))
                           for option in ({}, *OPTIONS))  # fmt: skip
            rows += [*found[:1], *sorted(found[1:], key=lambda row: row["seconds"])[:4]]
    for row in rows:
        row["shape"] = ", ".join(f"{name} {value}" for name, value in row["option"].items()) or "as it is"
    return Found(s.heading, rows, {
        "heads to a key": "{group}", "queries": "{queries}", "program": "{shape}", "us": "{seconds:us.1f}",
        "of copy": "{of_copy:.2f}",
    }, ATTENTION)  # fmt: skip


def products(s: Setting) -> Found:
    """The products of a layer with its matrices, in bfloat16 and in small numbers."""
    E, M = s.large["hidden_size"], s.large["intermediate_size"]
    matrices = {"qkv": (3 * E, E), "out": (E, E), "up": (2 * M, E), "down": (E, M)}
    with torch.inference_mode():
        rows = s.rows((f"{name}, {n} rows", partial(multiply, s, name, *matrices[name], n))
                      for n in ROWS for name in matrices)  # fmt: skip
    return Found(s.heading, rows, {
        "matrix": "{matrix}", "rows": "{rows}", "bfloat16 us": "{seconds:us.1f}", "of copy": "{of_copy:.2f}",
        **{column: form for kind in SMALL for column, form in
           ((f"x by {kind}", f"{{x_{kind}:.2f}}"), (f"{kind} of copy", f"{{of_copy_{kind}:.2f}}"))},
    }, PRODUCTS)  # fmt: skip


def multiply(s: Setting, name: str, outs: int, width: int, rows: int) -> dict[str, Any]:
    """One matrix, by formats; each of several copies in turn, so that none is found in a cache."""
    x_TI = torch.randn(rows, width, dtype=torch.bfloat16, device=s.device)
    copies = min(16, max(2, -(-COLD // (2 * outs * width))))
    weights = [torch.randn(outs, width, dtype=torch.bfloat16, device=s.device) for _ in range(copies)]
    found: dict[str, Any] = {"matrix": name, "rows": rows}

    def timed(calls: Sequence[Callable[[], object]], moved: int) -> tuple[float, float]:
        seconds = on_gpu.seconds_of(on_gpu.recorded(calls), s.args.runs) / len(calls)
        return seconds, moved / seconds / s.copy

    found["seconds"], found["of_copy"] = timed([partial(F.linear, x_TI, w) for w in weights], 2 * outs * width)
    for kind in SMALL:
        layers = [random_codes(kind, outs, width, s.device) for _ in range(copies)]
        got = s.attempt(f"{kind} {name}", lambda layers=layers: timed(
            [partial(layer, x_TI) for layer in layers], code_bytes(layers[0])))  # fmt: skip
        found[f"x_{kind}"], found[f"of_copy_{kind}"] = (found["seconds"] / got[0], got[1]) if got else (None, None)
    return found


# --- models ---


class Made(NamedTuple):
    """A model, and the bytes of its weights that a step reads."""

    model: Decoder
    bytes: int


class RandomCheckpoint:
    """The part of a checkpoint's interface that a model uses; weights are drawn on the device when read."""

    packing = quantization = None
    folder = "random weights"

    def __init__(self, config: Mapping[str, Any], device: torch.device):
        self.fields, self.device, self.bytes = Fields(config, "config.json"), device, 0
        self.shapes: dict[str, tuple[int, ...]] = {}

    def check(self, expected: Mapping[str, tuple[int, ...]], **_: Any) -> dict[str, str]:
        """Accept any shapes."""
        self.shapes = dict(expected)
        return {}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Small random numbers; ones for norms."""
        made = {}
        for name in names:
            shape = self.shapes[name]
            x = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
            made[name] = x.normal_(std=0.02) if len(shape) > 1 else x.fill_(1)
            self.bytes += 0 if name == f"{Llama.names.embedding}.weight" else 2 * x.numel()
        return made

    def rows(self, name: str, stored: str, shape: tuple[int, int]) -> Callable[[Sequence[int]], Tensor]:
        """Reads rows of the embedding, where it is not on a device."""
        table = self.read([name])[name]
        return lambda tokens: table[torch.tensor(tokens)]

    def packed(self, names: Sequence[str], outs: int, width: int) -> None:
        """Nothing is packed ahead."""

    def grouped(self, *_: Any, **__: Any) -> None:
        """Nothing is stored quantised."""


class CodedWeights(Weights):
    """Matrices in small numbers, drawn as they are: to quantise a large model takes minutes."""

    def linear(
        self,
        *names: str,
        bias: bool = False,
        transposed: bool = False,
        outs: Sequence[range] | None = None,
        ins: range | None = None,
    ) -> CodedLinear:
        """See `Weights`; without biases."""
        rows, width = sum(self.shapes[f"{name}.weight"][0] for name in names), self.shapes[f"{names[0]}.weight"][1]
        kind = format_of(self.quant, rows, head=names == (HEAD,))
        layer = random_codes(kind, rows, width, self.device, self.dtype)
        self.checkpoint.bytes += code_bytes(layer)  # type: ignore[attr-defined]
        return layer


def random_codes(
    kind: str, outs: int, width: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> CodedLinear:
    """A layer of random small numbers, as the format of this name keeps a matrix of these sizes."""
    group = width if kind == "int8" else GROUP
    codes = torch.randint(256, (outs, row_bytes(kind, width)), dtype=torch.uint8, device=device)  # type: ignore[arg-type]
    scale = torch.full((-(-width // group), outs), 1e-3, dtype=torch.float16, device=device)
    part = Codes(kind, group, outs, width, codes, scale)  # type: ignore[arg-type]
    return CodedLinear([part], None, dtype=dtype, device=device)


def code_bytes(layer: CodedLinear) -> int:
    """Bytes of numbers and scales."""
    return sum(part.codes_OB.nbytes + part.scale_GO.nbytes for part in layer.parts)


def make(family: type[Decoder], config: Mapping[str, Any], device: torch.device, quant: str = "none") -> Made:
    """A model of random weights."""
    progress(f"making a {family.__name__}, weights {quant}")
    checkpoint = RandomCheckpoint(config, device)
    reader = Weights if quant == "none" else CodedWeights
    model = family(checkpoint, torch.bfloat16, device, quant, reader).eval()  # type: ignore[arg-type]
    return Made(model, checkpoint.bytes)


# --- steps ---


def tokens_of(prompt: int, beams: int, new_tokens: int) -> int:
    """Slots that a search takes at most, in whole pages."""
    return prompt + (beams + 1) * (new_tokens + PAGE)


def decode(s: Setting, made: Made, engine: Engine, prompt: int, beams: int, searches: int = 1) -> dict[str, Any]:
    """A step of all searches while all of them decode: the median of some runs, after one that records the graphs."""
    draw, new = torch.Generator().manual_seed(0), s.args.new_tokens
    ids = torch.randint(5, engine.shape.vocab_size, (searches, prompt), generator=draw).tolist()
    times, growth, live = [], 0, 0
    for run in range(RUNS + 1):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        steps: list[tuple[float, int, int]] = []  # after each: the time, tokens so far, searches under way

        def note(driver: Any, steps: list[tuple[float, int, int]] = steps) -> None:
            steps.append((time.perf_counter(), driver.work["target"].tokens, len(driver.running)))

        requests = (Request(one, Trie(beams=beams), max_new_tokens=new, ignore_eos=True) for one in ids)
        for _, outcome in engine.serve(requests, on_step=note):
            if isinstance(outcome, BaseException):
                raise outcome
            live = outcome.stats["live_nodes_peak"]
        least = searches * (prompt + 2 * beams)
        full = [(at, tokens) for at, tokens, running in steps if running == searches and tokens >= least]
        if len(full) < 2:
            raise ValueError(f"no two steps of all {searches} searches: more --new-tokens are needed")
        (begin, first), (end, last) = full[0], full[-1]
        times += [(end - begin) * searches * beams / (last - first)] if run else []
        growth = torch.cuda.max_memory_allocated() - before
    seconds, cache = statistics.median(times), engine.pool.bytes_per_token * (prompt + live) / 2
    moved = made.bytes + searches * cache
    return {
        "prompt": prompt, "beams": beams, "searches": searches, "seconds": seconds, "bytes": moved, "growth": growth,
        "of_floor": moved / s.copy / seconds, "tokens_per_second": searches / seconds,
    }  # fmt: skip


def steps(s: Setting) -> Found:
    """Decoding steps, search and host included: one beam and many, by prompt and compilation."""

    def case(choice: str, engine: Engine, *sizes: int) -> dict[str, Any]:
        return {"compile": choice, **decode(s, s.model, engine, *sizes)}

    def cases() -> Iterable[tuple[str, Callable[[], dict[str, Any]]]]:
        for choice, prompt in itertools.product(sorted({*s.args.compile}), s.args.prefix):  # off before on
            tokens = tokens_of(prompt, s.args.beams, s.args.new_tokens)
            engine = s.engine(s.model, tokens, compiled=choice == "on")
            for beams in (1, s.args.beams):
                name = f"prompt {prompt}, {beams} beams, compile {choice}"
                yield name, partial(case, choice, engine, prompt, beams)

    rows = s.rows(cases())
    one = {(row["compile"], row["prompt"]): row["seconds"] for row in rows if row["beams"] == 1}
    for row in rows:
        alone = one.get((row["compile"], row["prompt"]))
        row["x_beam"] = row["seconds"] / alone if alone else None
    found = next((r for r in rows if (r["prompt"], r["beams"]) == (s.args.prefix[0], s.args.beams)), {})
    where = f"{s.args.beams} beams, prompt {s.args.prefix[0]}"
    return Found(s.heading, rows, {
        "prompt": "{prompt}", "compile": "{compile}", "beams": "{beams}", "ms per step": "{seconds:ms.2f}",
        "of floor": "{of_floor:.2f}", "x one beam": "{x_beam:.2f}", "growth MB": "{growth:M.1f}",
    }, f"{FLOOR} *x one beam*: over the time with one beam.", [
        comparison(f"step of {where}, of floor", found.get("of_floor"), 0.80),
        comparison(f"step of {where}, x one beam", found.get("x_beam"), 1.10, at_most=True),
    ])  # fmt: skip


def searches(s: Setting) -> Found:
    """Many searches at once against one."""
    prompt, beams, most = s.args.prompt, s.args.beams, s.args.searches
    engine = s.engine(s.model, most * tokens_of(prompt, beams, s.args.new_tokens))
    counts = sorted({1, most, *(2**i for i in range(2, most.bit_length()) if 2**i < most)})
    rows = s.rows((f"{n} searches", partial(decode, s, s.model, engine, prompt, beams, n)) for n in counts)
    alone = next((row for row in rows if row["searches"] == 1), None)
    for row in rows:
        row["x_one"] = row["tokens_per_second"] / alone["tokens_per_second"] if alone else None
        row["bound"] = row["searches"] * alone["bytes"] / row["bytes"] if alone else None
    found = next((row["x_one"] for row in rows if row["searches"] == most), None)
    return Found(s.heading, rows, {
        "searches": "{searches}", "beams": "{beams}", "prompt": "{prompt}", "ms per step": "{seconds:ms.2f}",
        "tokens/s": "{tokens_per_second:.0f}", "x one search": "{x_one:.1f}", "by bytes": "{bound:.1f}",
        "of floor": "{of_floor:.2f}",
    }, f"{SEARCHES} {FLOOR}", [
        comparison(f"{most} searches of {beams} beams, prompt {prompt}: tokens/s, x one", found, 8.0)])  # fmt: skip


def weights(s: Setting) -> Found:
    """Steps on weights of 8 and 4 bits."""
    prompt, beams = s.args.prefix[0], s.args.beams

    def case(quant: str) -> dict[str, Any]:
        made = s.model if quant == "none" else make(Llama, s.large, s.device, quant)
        engine = s.engine(made, tokens_of(prompt, beams, s.args.new_tokens))
        return {"weights": "bfloat16" if quant == "none" else quant, "gigabytes": made.bytes / 1e9,
                **decode(s, made, engine, prompt, beams)}  # fmt: skip

    rows = s.rows((f"weights {quant}", partial(case, quant)) for quant in ("none", *SMALL))
    plain = next((row["seconds"] for row in rows if row["weights"] == "bfloat16"), None)
    for row in rows:
        row["x_plain"] = plain / row["seconds"] if plain else None
    found = next((row["x_plain"] for row in rows if row["weights"] == "int4"), None)
    return Found(s.heading, rows, {
        "weights": "{weights}", "GB": "{gigabytes:.1f}", "prompt": "{prompt}", "beams": "{beams}",
        "ms per step": "{seconds:ms.2f}", "x bfloat16": "{x_plain:.2f}", "of floor": "{of_floor:.2f}",
    }, FLOOR, [comparison(f"int4 weights, prompt {prompt}, x bfloat16", found, 1.6)])  # fmt: skip


def wide(s: Setting) -> Found:
    """Wide beams of a small model with a large vocabulary."""
    prompt, most = s.args.prompt, s.args.wide
    made = make(Qwen3, s.small, s.device)
    engine = s.engine(made, tokens_of(prompt, most, s.args.new_tokens))
    counts = sorted({1, min(64, most), most})
    rows = s.rows((f"{n} beams", partial(decode, s, made, engine, prompt, n)) for n in counts)
    found = max((row["beams"] for row in rows), default=None)
    return Found(f"Qwen3-0.6B's shape, bfloat16, random weights; copy {s.copy / 1e9:.0f} GB/s.", rows, {
        "beams": "{beams}", "prompt": "{prompt}", "ms per step": "{seconds:ms.2f}", "of floor": "{of_floor:.2f}",
        "growth MB": "{growth:M.1f}",
    }, FLOOR, [comparison("beams of Qwen3-0.6B's shape", found, most)])  # fmt: skip


def transformers(s: Setting) -> Found:
    """The same beam search by transformers, in a process of its own."""
    prompt, beams, new = s.args.prefix[0], s.args.beams, s.args.new_tokens
    engine = s.engine(s.model, tokens_of(prompt, beams, new))
    ours = {"engine": "coppice", **decode(s, s.model, engine, prompt, beams)}
    torch.cuda.empty_cache()
    ids = torch.randint(5, s.large["vocab_size"], (prompt,)).tolist()
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        more = {"device": s.device.type, "config": s.large}
        spec = peers.spec("transformers", "", "bfloat16", beams, cores(), scratch, **more)
        found = s.attempt("transformers", lambda: peers.measure(sys.executable, spec, ids, new, 2)) or {}
    rows, ratio = [ours], None
    if "seconds" in found:
        seconds = 1 / found["steps_per_second"]["max"]
        ratio = seconds / ours["seconds"]
        name = f"transformers {found['versions']['transformers']}"
        rows.append(ours | {"engine": name, "seconds": seconds, "growth": peers.growth(found)})
    elif found:
        s.note("transformers", peers.outcome(found))
    return Found(s.heading, rows, {
        "engine": "{engine}", "prompt": "{prompt}", "beams": "{beams}", "ms per step": "{seconds:ms.2f}",
        "growth MB": "{growth:M.0f}",
    }, "Its time per token is the least of two runs.", [
        comparison(f"{beams} beams, prompt {prompt}, x transformers", ratio, 5.0)])  # fmt: skip


# --- where the time goes ---


def where(s: Setting) -> Found:
    """Kernels of the second half of a search, by time; how busy they keep the GPU."""
    prompt, beams = s.args.prefix[0], s.args.beams
    engine = s.engine(s.model, tokens_of(prompt, beams, s.args.new_tokens))
    decode(s, s.model, engine, prompt, beams)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        decode(s, s.model, engine, prompt, beams)
    ran = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiled.events() or ()
        if event.device_type.name == "CUDA"
    ]
    if not ran:
        s.note("where", "the profiler saw no kernels")
        return Found(s.heading, [], {})
    rows, busy, gaps = by_kernel(ran)
    idle = "; ".join(f"{gap:.0f} us after {name}" for gap, name in gaps)
    return Found(f"{s.heading} Kernels run {busy:.1%} of the time; longest gaps: {idle}.", rows, {
        "kernel": "{kernel}", "share": "{share:.3f}", "launches": "{launches}", "us": "{microseconds:.1f}",
    }, WHERE)  # fmt: skip


def by_kernel(
    ran: Sequence[tuple[str, float, float]], most: int = 24
) -> tuple[list[dict[str, Any]], float, list[tuple[float, str]]]:
    """Sum up the last half of what ran (names, beginnings, ends in microseconds): a row per kernel, the longest first;
    the share of the time in which any ran; the longest gaps, and what ran before each."""
    ran = sorted(ran, key=lambda kernel: kernel[1])[len(ran) // 2 :]
    spent: dict[str, list[float]] = defaultdict(list)
    gaps, end, idle = [], ran[0][1], 0.0
    before = ran[0][0]
    for name, start, stop in ran:
        spent[name].append(stop - start)
        if start > end:
            gaps.append((start - end, before))
            idle += start - end
        if stop > end:
            end, before = stop, name
    total = sum(map(sum, spent.values()))
    rows = []
    for name, times in sorted(spent.items(), key=lambda x: -sum(x[1]))[:most]:
        share, each = sum(times) / total, statistics.mean(times)
        rows.append({"kernel": name[:60], "share": share, "launches": len(times), "microseconds": each})
    return rows, 1 - idle / (end - ran[0][1]), [(gap, name[:40]) for gap, name in sorted(gaps, reverse=True)[:4]]


class Stage(NamedTuple):
    """A stage; `usual` ones run unless others are named."""

    run: Callable[[Setting], Found]
    about: str
    usual: bool = True


STAGES = {
    "attention": Stage(attention, "tree attention, FlexAttention, SDPA"),
    "tune": Stage(tune, "tree attention by its programs' shapes", False),
    "products": Stage(products, "matrices in bfloat16, 8 and 4 bits"),
    "steps": Stage(steps, "a step of one beam and of many"),
    "searches": Stage(searches, "many searches at once"),
    "weights": Stage(weights, "steps on weights of 8 and 4 bits"),
    "wide": Stage(wide, "hundreds of beams of a small model"),
    "transformers": Stage(transformers, "its beam search"),
    "where": Stage(where, "kernels by time, gaps"),
}

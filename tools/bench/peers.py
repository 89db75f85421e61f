"""Side by side with other engines: the same beam search on the same checkpoint and prompt, a process for each.

Every engine gets a fresh process for each number of beams, a short warm-up, and timed runs that are interleaved with
those of the other engines. Growth is the peak resident memory during a run minus that of the loaded model, all of whose
weights have been read once. On a GPU it is the memory that torch allocated, for this engine plus the pages in use,
because its pool is allocated at loading. It is unknown for CTranslate2 on a GPU, and for llama.cpp.

A GGUF file is measured as it is (`--kinds gguf`): this engine and llama.cpp run the same file, the others its
dequantised weights, from a folder that is made once (--converted keeps it).

The other engines are optional: a row without figures gives the reason. transformers, CTranslate2 and OpenVINO GenAI
(openvino-genai and optimum-intel) are installed for an interpreter of their own, see --peer-python and
--openvino-python. llama.cpp is built from its sources; those in `pip download llama-cpp-python --no-deps
--no-binary :all:` lie in vendor/llama.cpp: cmake -S vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release
-DLLAMA_OPENSSL=OFF && cmake --build build --target llama-batched-bench llama-quantize; then --llama
build/bin/llama-batched-bench. It does no beam search: its sequences share the prompt and continue with random tokens.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from engine.app.cli import add_load_flag
from engine.errors import UsageError
from models.later import later
from tools.bench.checkpoints import CHAT, add_flags, checkpoint, find, is_gguf
from tools.bench.flags import add_numbers
from tools.bench.measure import PeakMemory, cores, in_turn, memory, progress, random_tokens, spread
from tools.bench.report import add_save_flag, comparison, comparison_table, finish, megabytes, rows_table, slug, stamp

with later():
    import torch

    from engine import Engine
    from models.checkpoint.headers import Checkpoint
    from tools.bench import variants
    from tools.bench.texts import plain

PEERS = ("coppice", "transformers", "ctranslate2", "openvino", "llama.cpp")
KINDS = {  # of weights, with the engines that have them
    "float32": PEERS,
    "bfloat16": PEERS,
    "float16": ("coppice", "transformers", "ctranslate2", "llama.cpp"),
    "int8": ("coppice", "ctranslate2", "openvino", "llama.cpp"),
    "int4": ("coppice", "openvino", "llama.cpp"),
    "gguf": PEERS,
}
DEQUANTISED = {"transformers": "float32", "ctranslate2": "int8", "openvino": "int8"}  # of a GGUF file
ON_CPU = ("openvino", "llama.cpp")
ROOT = Path(__file__).parents[2]
K = TypeVar("K", bound=Hashable)
COPIED = ("kv_bytes_peak", "kv_bytes_per_token", "live_nodes_peak", "score", "weight_bytes")
SPEEDS = ("steps_per_second", "tokens_per_second")
WARM_UP = (8, 4)  # tokens of prompt, new tokens
TARGETS = (  # engine and kind over our kind, a ratio of `compare`, by beams
    ("transformers", "float32", "float32", "seconds", {15: 9.0}),
    ("ctranslate2", "float32", "float32", "seconds", {1: 1.0, 15: 4.5}),
    ("transformers", "float32", "bfloat16", "seconds", {15: 8.0}),
    ("ctranslate2", "int8", "int8", "seconds", {15: 7.0}),
    *(
        ("llama.cpp", kind, kind, "steps_per_second", {1: 1.0, 4: 1.6, 15: 2.2})
        for kind in ("float32", "bfloat16", "int8")
    ),
    *(("openvino", kind, kind, "seconds", {1: 1.1, 4: 1.6, 15: 2.2}) for kind in ("float32", "int8")),
    ("openvino", "bfloat16", "bfloat16", "seconds", {1: 1.0, 4: 1.6, 15: 2.2}),
    *(("openvino", kind, kind, "prefill_seconds", {1: 1.0}) for kind in ("float32", "bfloat16", "int8")),
    ("llama.cpp", "gguf", "gguf", "steps_per_second", {1: 1.0, 4: 1.5, 15: 2.2}),
    ("llama.cpp", "gguf", "gguf", "prefill_seconds", {1: 1.3}),
)


WORDS = {"seconds": "total", "prefill_seconds": "prompt", "steps_per_second": "steps/s"}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("peers", help="compare time and memory with other engines", description=__doc__)
    add_flags(parser)
    add_numbers(
        parser,
        prompt_tokens=(512, "tokens of the prompt: Python's documentation, or random ids for a random model"),
        new_tokens=(64, "tokens to generate; end-of-sequence is ignored"),
        beams=([1, 4, 15], "numbers of beams"),
        runs=(3, "runs of each engine; the figures are medians"),
        once_above=(60.0, "seconds; an engine whose first run takes longer runs only once"),
        threads=cores(),
    )
    parser.add_argument("--kinds", "--dtype", nargs="+", choices=KINDS, metavar="KIND",
                        help=f"kinds of weights: {' '.join(KINDS)} (gguf for a GGUF file, else float32)")  # fmt: skip
    add_load_flag(parser, "activations")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="(a GPU if there is one)")
    parser.add_argument("--peers", nargs="+", type=peer_name, default=list(PEERS), metavar="NAME[:KIND]",
                        help=f"engines to measure, with one kind of weights or all: {' '.join(PEERS)}")  # fmt: skip
    interpreter = parser.add_argument_group("other engines")
    text = "Python interpreter that has the other engines (this one)"
    interpreter.add_argument("--peer-python", default=sys.executable, metavar="PATH", help=text)
    text = "Python interpreter that has OpenVINO (that of --peer-python)"
    interpreter.add_argument("--openvino-python", metavar="PATH", help=text)
    text = "llama.cpp's llama-batched-bench, with llama-quantize in the same folder"
    interpreter.add_argument("--llama", type=Path, metavar="PATH", help=text)
    text = "keep the model, converted to the other engines' formats, in this folder; one folder per model"
    interpreter.add_argument("--converted", type=Path, metavar="DIR", help=text)
    add_save_flag(parser)
    parser.set_defaults(run=run)


def peer_name(text: str) -> str:
    """An entry of --peers."""
    name, _, kind = text.partition(":")
    if name not in PEERS or kind not in ("", *KINDS):
        raise argparse.ArgumentTypeError(f"expected one of {' '.join(PEERS)}, with :KIND or without, got {text!r}")
    return text


def spec(
    engine: str, folder: str | Path, dtype: str, beams: int, threads: int, scratch: str | Path, **more: Any
) -> dict[str, Any]:
    """The specification of an engine's process, see `worker.py`."""
    return {"engine": engine, "folder": str(Path(folder).resolve()), "dtype": dtype, "beams": beams, "threads": threads,
            "scratch": str(scratch), "root": str(ROOT), **more}  # fmt: skip


class PeerFailed(Exception):
    """An engine's process ended; the message is the end of its output."""


class Worker:
    """The process of one engine, see `worker.py`. A context manager: the process is gone at the end."""

    def __init__(self, python: str, spec: dict[str, Any]):
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
        environment |= {"OMP_NUM_THREADS": str(spec["threads"]), "HF_HUB_OFFLINE": "1"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [python, "-P", str(Path(__file__).with_name("worker.py")), json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                cwd=spec["scratch"],
                env=environment,
            )
        except OSError as error:
            self._errors.close()
            raise PeerFailed(f"{Path(python).name}: {error.strerror}") from error
        self.pid = self._process.pid

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Send a job, wait for its answer."""
        assert self._process.stdin
        try:
            print(json.dumps(job), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            self._process.wait()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line. Raises PeerFailed."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        raise PeerFailed(lines[-1] if lines else f"its process ended with code {code}")


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    made = stamp(argv)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    rows: list[dict[str, Any]] = []
    with checkpoint(args) as (folder, name), tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        scratch = (args.converted or Path(temporary)).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        prompt, what = prompt_of(args, folder, args.prompt_tokens)
        kinds = args.kinds or (["gguf"] if is_gguf(folder) else ["float32"])
        if "gguf" in kinds and not is_gguf(folder):
            raise UsageError("--kinds gguf: the model is no GGUF file")
        chosen = [(kind, peer) for kind in kinds for peer in KINDS[kind] if {peer, f"{peer}:{kind}"} & {*args.peers}]
        for beams in args.beams:
            asked = {pair: ask(*pair, args, folder, scratch, beams, device) for pair in chosen}
            together = [chosen] if device == "cpu" else [[pair] for pair in chosen]  # a pool takes most of a GPU
            for pairs in together:
                found = measure_in_turn({pair: asked[pair] for pair in pairs}, prompt, args.new_tokens, args.runs,
                                        args.once_above)  # fmt: skip
                rows += [{"peer": pair[1], "dtype": pair[0], "beams": beams, **found[pair]} for pair in pairs]
            progress(
                "\n".join(
                    f"beams {beams}, {row['peer']} {row['dtype']}: {outcome(row)}" for row in rows[-len(chosen) :]
                )
            )
    compare(rows)
    made["versions"] |= {k: v for row in rows for k, v in row.get("versions", {}).items()}
    setting = (
        f"{name}; prompt of {args.prompt_tokens} {what}, {args.new_tokens} new tokens, {device}, "
        f"{args.threads} threads; medians of {args.runs} interleaved runs, with minimum and maximum in brackets."
    )
    body = "\n\n".join([setting, result_table(rows), LEGEND, *target_table(rows)])
    result = {"model": name, "kinds": kinds, "device": device, "threads": args.threads, "runs": args.runs,
              "prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens, "results": rows}  # fmt: skip
    machine = made["machine"]
    of = [] if args.model is None and not is_gguf(folder) else [name]
    section = slug("peers", *of, machine["cpu"], machine["vector"], f"{args.threads} threads", *kinds)
    finish(section, made, body, result, args.save)
    return result


def prompt_of(args: argparse.Namespace, model: Path, tokens: int) -> tuple[list[int], str]:
    """The ids of a prompt, and their description: Python's documentation, or random ids for a random model."""
    if args.random is not None or (args.model is None and find(CHAT) is None):
        return random_tokens(Checkpoint.open(model).config["vocab_size"], tokens, args.seed), "random tokens"
    return plain(Engine.load(model, device="cpu"), tokens, args.seed), "tokens of Python's documentation"


def ask(
    kind: str, peer: str, args: argparse.Namespace, folder: Path, scratch: Path, beams: int, device: str
) -> tuple[str, dict[str, Any]] | str:
    """The interpreter and the specification of an engine's process, or the reason why there is none."""
    if peer in ON_CPU and device != "cpu":
        return "measured on a CPU only"
    python, more, source = sys.executable, {}, folder
    if kind in ("bfloat16", "float16") and peer != "openvino":
        folder = variants.in_dtype(folder, kind, scratch)
    elif is_gguf(folder) and (kind != "gguf" or peer in DEQUANTISED):
        folder = variants.in_dtype(folder, "float32", scratch)
    if peer == "coppice" and kind != "float32":
        whole = {"gguf": "auto"}.get(kind, "none")
        more = {"compute": "auto", "quant": kind if kind.startswith("int") else whole}
        more |= {"activations": args.activations} if kind == "gguf" else {}
    elif peer == "llama.cpp":
        if args.llama is None:
            return "--llama was not given (--help tells how it is built)"
        try:
            folder = source if kind == "gguf" else variants.gguf(folder, kind, args.llama.resolve(), scratch)
        except UsageError as error:
            return str(error)
        more = {"program": str(args.llama.resolve())}
    elif peer != "coppice":
        python = (args.openvino_python if peer == "openvino" else None) or args.peer_python
    if kind == "gguf":
        kind = DEQUANTISED.get(peer, kind)
    return python, spec(peer, folder, kind, beams, args.threads, scratch, device=device, **more)


class Contender:
    """One engine's runs with one number of beams; `why` says why there are none. A context manager, as `Worker`."""

    def __init__(self, python: str, spec: dict[str, Any]):
        self.python, self.spec = python, spec
        self.answers: list[dict[str, Any]] = []
        self.peaks: list[int] = []
        self.sampled = False
        self.why: dict[str, str] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "Contender":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, prompt: list[int], new_tokens: int) -> None:
        """Load the model and warm up."""
        try:
            self.worker = self._stack.enter_context(Worker(self.python, self.spec))
            self.hello = self.worker.answer()
            if "absent" in self.hello:
                self.why = self.hello
                return
            self.loaded = memory(self.worker.pid, "VmRSS") if self.hello.pop("measured", True) else None
            self.worker.ask({"prompt": prompt[: WARM_UP[0]], "new_tokens": min(WARM_UP[1], new_tokens)})
        except PeerFailed as error:
            self.why = {"failed": str(error)}

    def run(self, prompt: list[int], new_tokens: int, once_above: float) -> None:
        """A timed run, unless the first one was a long one."""
        if self.why or (self.answers and self.answers[0]["seconds"] > once_above):
            return
        try:
            with PeakMemory(self.worker.pid) as peak:
                self.answers.append(self.worker.ask({"prompt": prompt, "new_tokens": new_tokens}))
        except PeerFailed as error:
            self.why = {"failed": str(error)}
            return
        self.sampled |= peak.sampled
        if peak.bytes is not None:
            self.peaks.append(peak.bytes)

    def figures(self, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
        """The figures of the runs; {"absent": why} or {"failed": why} if nothing."""
        if self.why:
            return self.why
        answers, loaded = self.answers, self.loaded
        growth = [peak - loaded for peak in self.peaks] if loaded is not None else []
        if self.spec.get("device") == "cuda":
            loaded = self.hello.get("device_bytes")
            growth = [a["device_growth"] for a in answers if a.get("device_growth")]
        steps = [((a["steps"] or new_tokens) - 1) / a["decode_seconds"] for a in answers]
        decode = [(new_tokens - 1) / a["decode_seconds"] for a in answers]
        return {
            **self.hello,
            "seconds": spread([a["seconds"] for a in answers]),
            "prefill_seconds": spread([a["prefill_seconds"] for a in answers]),
            "cpu_seconds": median(a["cpu_seconds"] for a in answers) if "cpu_seconds" in answers[0] else None,
            "steps_per_second": spread(steps) if new_tokens > 1 else None,
            "tokens_per_second": spread(decode) if new_tokens > 1 else None,
            "steps": answers[0]["steps"],
            "loaded_bytes": loaded,
            "growth_bytes": spread(growth) if growth else None,
            "growth_bytes_per_token": spread(growth)["median"] / (prompt_tokens + new_tokens) if growth else None,
            "growth_sampled": self.sampled,
            "tokens": answers[0]["tokens"],
            "repeatable": all(a["tokens"] == answers[0]["tokens"] for a in answers),
            **{k: answers[0][k] for k in COPIED if k in answers[0]},
        }


def measure_in_turn(
    asked: Mapping[K, tuple[str, dict[str, Any]] | str],
    prompt: list[int],
    new_tokens: int,
    runs: int,
    once_above: float,
) -> dict[K, dict[str, Any]]:
    """Figures of engines that take turns; {"absent": why} or {"failed": why} where there are none.

    Args:
        asked: interpreter and specification of each engine, or why there is none.
        prompt: ids.
        new_tokens: to generate.
        runs: of each engine.
        once_above: seconds; an engine whose first run takes longer has no other.
    """
    found = {key: {"absent": why} for key, why in asked.items() if isinstance(why, str)}
    with ExitStack() as stack:
        engines = {key: stack.enter_context(Contender(*of)) for key, of in asked.items() if not isinstance(of, str)}
        for engine in engines.values():
            engine.start(prompt, new_tokens)
        if engines:
            in_turn({k: lambda _, e=e: e.run(prompt, new_tokens, once_above) for k, e in engines.items()}, runs)
        return {key: found.get(key) or engines[key].figures(len(prompt), new_tokens) for key in asked}


def measure(python: str, spec: dict[str, Any], prompt: list[int], new_tokens: int, runs: int) -> dict[str, Any]:
    """Figures of one engine, see `measure_in_turn`."""
    return measure_in_turn({"one": (python, spec)}, prompt, new_tokens, runs, math.inf)["one"]


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to every other engine's row its ratios to our row of the same kind and number of beams."""
    for row in rows:
        mine = pick(rows, "coppice", row.get("dtype"), row["beams"])
        if mine is not None and row is not mine and "seconds" in row:
            row["versus"] = versus(row, mine)


def pick(rows: list[dict[str, Any]], peer: str, kind: str | None, beams: int) -> dict[str, Any] | None:
    """The row of a setting, if it has figures."""
    wanted = (peer, kind, beams)
    return next(
        (row for row in rows if (row["peer"], row.get("dtype"), row["beams"]) == wanted and "seconds" in row), None
    )


def versus(row: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    """The ratios of another engine to ours; values above 1 favour ours."""
    tokens, growths = row["tokens"], (row["growth_bytes"], mine["growth_bytes"])
    pairs = enumerate(zip(tokens or (), mine["tokens"], strict=False))
    return {
        "seconds": row["seconds"]["median"] / mine["seconds"]["median"],
        "prefill_seconds": row["prefill_seconds"]["median"] / mine["prefill_seconds"]["median"],
        "cpu_seconds": row["cpu_seconds"] / mine["cpu_seconds"] if row.get("cpu_seconds") else None,
        **{k: mine[k]["median"] / row[k]["median"] if row[k] else None for k in SPEEDS},
        "growth_bytes": growths[0]["median"] / max(1, growths[1]["median"]) if all(growths) else None,
        "same_tokens": None if tokens is None else tokens == mine["tokens"],
        "first_difference": next((i for i, (a, b) in pairs if a != b), None),
    }


def target_table(rows: list[dict[str, Any]]) -> list[str]:
    """The targets whose rows have figures, as a table."""
    compared = []
    for peer, kind, ours, figure, wanted in TARGETS:
        for beams, target in wanted.items():
            theirs, mine = pick(rows, peer, kind, beams), pick(rows, "coppice", ours, beams)
            if theirs and mine:
                what = f"{WORDS[figure]}, {beams} beam{'s' * (beams > 1)}: {peer} {kind}, ours {ours}"
                compared.append(comparison(what, versus(theirs, mine)[figure], target))
    return [comparison_table(compared)] if compared else []


LEGEND = """*decode tok/s* divides the output tokens after the first by the time after the prompt. *CPU s* is the CPU
time of all threads over the whole run, for engines that run inside the measured process. *loaded* is the memory before
the first run, *growth* the peak memory of a run minus *loaded*, and *kB/token* the growth per token of prompt and
output (the trie paper's Mem/Tok). *x total*, *x CPU* and *x prefill* divide the other engine's time by ours, for the
same *weights*, *x decode* divides our tok/s by its, and *x growth* its growth by ours; values above 1 favour coppice.
*same tokens* says whether the output equals ours, or gives the position of the first token that differs. coppice runs
with its default settings on a checkpoint of the dtype *weights*, for int8 and int4 with --quant on the float32
checkpoint. In *gguf* rows coppice and llama.cpp run the same file, transformers its weights dequantised to float32, and
CTranslate2 and OpenVINO those quantised to int8. llama.cpp does not search: its sequences share the prompt and continue
with random tokens. Its int8 is q8_0, its int4 is q4_0, and its cache is float16. In the float32 rows OpenVINO computes
and caches in float32. Elsewhere it uses its default: bfloat16 if the processor multiplies bfloat16. Its bfloat16 rows
run the float32 checkpoint with that default."""


def outcome(row: dict[str, Any]) -> str:
    """A row in words."""
    if "seconds" not in row:
        return row.get("absent") or f"failed: {row['failed']}"
    return f"{row['seconds']['median']:.2f} s, growth {megabytes(growth(row))} MB"


def growth(row: dict[str, Any]) -> float | None:
    return row["growth_bytes"] and row["growth_bytes"]["median"]


def result_table(rows: list[dict[str, Any]]) -> str:
    shown = []
    for row in rows:
        versus = row.get("versus") or {}
        same = {True: "yes", False: f"no: {versus.get('first_difference')}", None: ""}[versus.get("same_tokens")]
        shown.append(row | {
            "total": around(row["seconds"]) if "seconds" in row else "none",
            "prefill": around(row.get("prefill_seconds")),
            "decode": around(row.get("tokens_per_second"), 1),
            "same": same,
        })  # fmt: skip
    settings = {"weights": "{dtype}"} if any("dtype" in row for row in rows) else {}
    settings |= {"prompt": "{prompt}"} if len({row.get("prompt") for row in rows}) > 1 else {}
    return "\n\n".join([
        rows_table(shown, {
            "engine": "{peer}", **settings, "beams": "{beams}", "total s": "{total}", "prefill s": "{prefill}",
            "decode tok/s": "{decode}", "CPU s": "{cpu_seconds:.2f}", "loaded MB": "{loaded_bytes:MB}",
            "growth MB": "{growth_bytes[median]:MB}", "kB/token": "{growth_bytes_per_token:kB.1f}",
            "x total": "{versus[seconds]:.2f}", "x CPU": "{versus[cpu_seconds]:.2f}",
            "x prefill": "{versus[prefill_seconds]:.2f}", "x decode": "{versus[tokens_per_second]:.2f}",
            "x growth": "{versus[growth_bytes]:.1f}", "same tokens": "{same}"}),
        *why_none(rows),
    ])  # fmt: skip


def why_none(rows: list[dict[str, Any]]) -> list[str]:
    """A line on each engine that has no figures, for below the table."""
    none = [row for row in rows if "seconds" not in row]
    names = (" ".join([row["peer"], *([row["dtype"]] if "failed" in row and "dtype" in row else [])]) for row in none)
    return list(dict.fromkeys(f"{name}: {outcome(row)}" for name, row in zip(names, none, strict=True)))


def around(values: dict[str, float] | None, digits: int = 2) -> str:
    """A median with its spread."""
    return "" if values is None else "{median:.{n}f} ({min:.{n}f}-{max:.{n}f})".format(n=digits, **values)

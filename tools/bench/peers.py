"""Side by side with other engines: the same beam search on the same checkpoint and prompt, a process for each.

Every engine gets a fresh process per number of beams, a short warm-up, then the timed runs. Peak memory growth is the
highest resident memory during a run less that of the loaded model, whose weights have all been read once; on a GPU it
is what torch allocated, and for this engine, whose pool is allocated when it is loaded, the pages in use as well;
CTranslate2's is not known there.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from models.checkpoint import Checkpoint
from tools.bench.checkpoints import add_flags, checkpoint
from tools.bench.measure import PeakMemory, cores, memory, progress, spread
from tools.bench.report import add_save_flag, finish, megabytes, rows_table, stamp

PEERS = ("coppice", "transformers", "ctranslate2")
ROOT = Path(__file__).parents[2]
COPIED = ("kv_bytes_peak", "kv_bytes_per_token", "live_nodes_peak", "score")
SPEEDS = ("steps_per_second", "tokens_per_second")
WARM_UP = (8, 4)  # tokens of prompt, new tokens


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("peers", help="time and memory beside other engines", description=__doc__)
    add_flags(parser)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="random ids (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="end-of-sequence is ignored (%(default)s)")
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4, 15])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="(%(default)s)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="(a GPU if there is one)")
    parser.add_argument("--runs", type=int, default=3, help="medians are of so many (%(default)s)")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="NAME", help=" ".join(PEERS))
    parser.add_argument("--peer-python", default=sys.executable, metavar="PATH", help="interpreter that has the peers")
    parser.add_argument("--threads", type=int, default=cores(), help="(%(default)s)")
    add_save_flag(parser)
    parser.set_defaults(run=run)


def spec(
    engine: str, folder: str | Path, dtype: str, beams: int, threads: int, scratch: str | Path, **more: Any
) -> dict[str, Any]:
    """The specification of an engine's process, see `worker.py`."""
    return {"engine": engine, "folder": str(Path(folder).resolve()), "dtype": dtype, "beams": beams, "threads": threads,
            "scratch": str(scratch), "root": str(ROOT), **more}  # fmt: skip


class PeerFailed(Exception):
    """An engine's process ended; the message is its last words."""


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
    rows = []
    with checkpoint(args) as (folder, name), tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        vocab = Checkpoint.open(folder).config["vocab_size"]
        draw = random.Random(args.seed)
        prompt = [draw.randrange(min(3, vocab - 1), vocab) for _ in range(args.prompt_tokens)]
        for beams in args.beams:
            for peer in args.peers:
                asked = spec(peer, folder, args.dtype, beams, args.threads, scratch, device=device)
                python = sys.executable if peer == "coppice" else args.peer_python
                found = measure(python, asked, prompt, args.new_tokens, args.runs)
                rows.append({"peer": peer, "beams": beams, **found})
                progress(f"beams {beams}, {peer}: {outcome(rows[-1])}")
    compare(rows)
    shown = {k: v for row in rows for k, v in row.get("versions", {}).items()}
    made["versions"] |= shown
    setting = (
        f"{name}; prompt of {args.prompt_tokens} random tokens, {args.new_tokens} new tokens, {args.dtype}, {device}, "
        f"{args.threads} threads; medians of {args.runs} runs, in brackets the least and the most."
    )
    body = f"{setting}\n\n{result_table(rows)}\n\n{LEGEND}"
    result = {"model": name, "dtype": args.dtype, "device": device, "threads": args.threads, "runs": args.runs,
              "prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens, "results": rows}  # fmt: skip
    finish("peers", made, body, result, args.save)
    return result


def measure(python: str, spec: dict[str, Any], prompt: list[int], new_tokens: int, runs: int) -> dict[str, Any]:
    """Figures of one engine at one number of beams; {"absent": why} or {"failed": why} if there are none."""
    answers, peaks, sampled = [], [], False
    try:
        with Worker(python, spec) as worker:
            hello = worker.answer()
            if "absent" in hello:
                return hello
            loaded = memory(worker.pid, "VmRSS")
            worker.ask({"prompt": prompt[: WARM_UP[0]], "new_tokens": min(WARM_UP[1], new_tokens)})
            for _ in range(runs):
                with PeakMemory(worker.pid) as peak:
                    answers.append(worker.ask({"prompt": prompt, "new_tokens": new_tokens}))
                if peak.bytes is not None:
                    peaks.append(peak.bytes)
                sampled |= peak.sampled
    except PeerFailed as error:
        return {"failed": str(error)}
    if spec.get("device") == "cuda":
        loaded, growth = hello.get("device_bytes"), [a["device_growth"] for a in answers if a.get("device_growth")]
    else:
        growth = [peak - loaded for peak in peaks] if loaded is not None else []
    tokens = len(prompt) + new_tokens
    steps = [((a["steps"] or new_tokens) - 1) / a["decode_seconds"] for a in answers]
    decode = [(new_tokens - 1) / a["decode_seconds"] for a in answers]
    same = all(a["tokens"] == answers[0]["tokens"] for a in answers)
    return {
        **hello,
        "seconds": spread([a["seconds"] for a in answers]),
        "prefill_seconds": spread([a["prefill_seconds"] for a in answers]),
        "steps_per_second": spread(steps) if new_tokens > 1 else None,
        "tokens_per_second": spread(decode) if new_tokens > 1 else None,
        "steps": answers[0]["steps"],
        "loaded_bytes": loaded,
        "growth_bytes": spread(growth) if growth else None,
        "growth_bytes_per_token": spread(growth)["median"] / tokens if growth else None,
        "growth_sampled": sampled,
        "tokens": answers[0]["tokens"],
        "repeatable": same,
        **{k: answers[0][k] for k in COPIED if k in answers[0]},
    }


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to every other engine's row how it stands against ours with as many beams; above 1 is in our favour."""
    ours = {row["beams"]: row for row in rows if row["peer"] == "coppice" and "seconds" in row}
    for row in rows:
        mine = ours.get(row["beams"])
        if mine is None or row is mine or "seconds" not in row:
            continue
        same = next((i for i, (a, b) in enumerate(zip(row["tokens"], mine["tokens"], strict=False)) if a != b), None)
        row["versus"] = {
            "seconds": row["seconds"]["median"] / mine["seconds"]["median"],
            "prefill_seconds": row["prefill_seconds"]["median"] / mine["prefill_seconds"]["median"],
            **{k: mine[k]["median"] / row[k]["median"] if row[k] else None for k in SPEEDS},
            "growth_bytes": row["growth_bytes"]["median"] / max(1, mine["growth_bytes"]["median"])
            if row["growth_bytes"] and mine["growth_bytes"]
            else None,
            "same_tokens": row["tokens"] == mine["tokens"],
            "first_difference": same,
        }


LEGEND = """*decode tok/s*: tokens of the output after the first, over the time after the prompt. *loaded*: memory
before the first run. *growth*: peak memory in a run less *loaded*; *kB/token*: that over the tokens of prompt and
output, the trie paper's Mem/Tok. *x total*, *x prefill*, *x decode*, *x growth*: the other engine's seconds over ours,
our tok/s over its, its growth over ours; above 1 is in our favour. *same tokens*: whether the output equals ours, or
the place of the first token that differs."""


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
        shown.append(row | {
            "total": around(row["seconds"]) if "seconds" in row else "none",
            "prefill": around(row.get("prefill_seconds")),
            "decode": around(row.get("tokens_per_second"), 1),
            "same": "" if not versus else "yes" if versus["same_tokens"] else f"no: {versus['first_difference']}",
        })  # fmt: skip
    return "\n\n".join([
        rows_table(shown, {
            "engine": "{peer}", "beams": "{beams}", "total s": "{total}", "prefill s": "{prefill}",
            "decode tok/s": "{decode}", "loaded MB": "{loaded_bytes:MB}", "growth MB": "{growth_bytes[median]:MB}",
            "kB/token": "{growth_bytes_per_token:kB.1f}", "x total": "{versus[seconds]:.1f}",
            "x prefill": "{versus[prefill_seconds]:.1f}", "x decode": "{versus[tokens_per_second]:.1f}",
            "x growth": "{versus[growth_bytes]:.1f}", "same tokens": "{same}"}),
        *why_none(rows),
    ])  # fmt: skip


def why_none(rows: list[dict[str, Any]]) -> list[str]:
    """A line on each engine that has no figures, for below the table."""
    names = ((" ".join(filter(None, (row["peer"], row.get("dtype")))), row) for row in rows if "seconds" not in row)
    return list(dict.fromkeys(f"{name}: {outcome(row)}" for name, row in names))


def around(values: dict[str, float] | None, digits: int = 2) -> str:
    """A median with its spread."""
    return "" if values is None else "{median:.{n}f} ({min:.{n}f}-{max:.{n}f})".format(n=digits, **values)

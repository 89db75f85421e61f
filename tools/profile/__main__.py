"""Profile any search on any checkpoint: time by part of the engine, by operator and by step.

It measures the machine, runs the search a few times unobserved, a few times under a stop watch, and once under
torch.profiler; the times of parts and steps are those of runs without the profiler. Files in --out:
trace.json (open it at ui.perfetto.dev), timeline.svg (needs the extra `viz`), result.json.
"""

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

from engine.app import cli
from engine.demo import is_demo
from engine.errors import UsageError
from models.checkpoint.files import obstacle
from models.later import later
from tools.bench.checkpoints import add_random_flag, add_shape_flags, checkpoint
from tools.bench.figures import draw, need_figures
from tools.bench.measure import in_turn, progress, random_tokens
from tools.bench.report import add_save_flag, finish, stamp

with later():
    import torch
    from torch.profiler import ProfilerActivity, profile

    from engine import Engine
    from engine.contract import Search
    from engine.engine import Done
    from search import make_search
    from tools.bench import limits
    from tools.profile import report
    from tools.profile.clock import Step, Watch, watched
    from tools.profile.trace import Operator, read_profile

RESULT = "result.json"
PROMPT = "Tell me a story about a fox."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = cli.Parser("python -m tools.profile", __doc__ or "")
    cli.add_load_flags(parser, "profile")
    group = parser.add_argument_group("random checkpoint")
    add_random_flag(group, "a random Llama instead of a model")
    add_shape_flags(group)
    cli.add_search_flags(parser)
    cli.add_limit_flags(parser)
    parser.set_defaults(max_new_tokens=64)
    group = parser.add_argument_group("profile", "Random checkpoints never end by themselves (--ignore-eos).")
    prompt = group.add_mutually_exclusive_group()
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help=f"through the chat template, if there is one ({PROMPT})")
    prompt.add_argument("--prompt-tokens", type=int, metavar="N", help="random tokens instead (512 with --random)")
    group.add_argument("--runs", type=int, default=3, metavar="N", help="of each kind; medians count (%(default)s)")
    group.add_argument("--trace-from", type=int, metavar="STEP", help="first step in the trace (the middle's)")
    group.add_argument("--trace-steps", type=int, default=16, metavar="N", help="steps in the trace (%(default)s)")
    group.add_argument("--top", type=int, default=15, metavar="N", help="operators to list (%(default)s)")
    group.add_argument("--out", default="profile", metavar="DIR", help="where files go (%(default)s/)")
    add_save_flag(group, "profile")
    cli.add_verbosity_flags(parser)
    args = parser.parse_args(words)

    def work() -> int:
        run(args, words)
        return 0

    return cli.run(work, args.verbose)


def run(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    if args.save is not None:
        need_figures()
    if args.random is not None and args.model is not None:
        raise UsageError("--random: not with --model", remedy="give one of the two")
    if min(args.runs, args.trace_steps, args.top, args.prompt_tokens or 1) < 1:
        raise UsageError("--runs, --trace-steps, --top, --prompt-tokens: expected at least 1")
    search, made = make_search(args.search, cli.search_params(args)), stamp(words, "tools.profile")
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: {error.strerror}", where=args.out) from None
    if fault := obstacle(out / RESULT):
        raise UsageError(f"--out: {fault[0]}", where=fault[1])
    with ExitStack() as stack:
        name = Path(args.model).resolve().name if args.model else "the bundled demo"
        if args.random is not None:
            args.ignore_eos = True
            if args.prompt is None and args.prompt_tokens is None:
                args.prompt_tokens = 512
            seeded = argparse.Namespace(**{**vars(args), "seed": 0})
            args.model, name = stack.enter_context(checkpoint(seeded))
        engine = cli.load_engine(args)
    progress("measuring the machine")
    kinds = {dtype_name(e) for e in (engine, *engine.companions.values())} | {"int8"} & {args.quant}
    bandwidth, rates = limits.measure(engine.runner.device, sorted(kinds))
    profiled = Profile(args, engine, search, bandwidth, rates)
    profiled.measure()
    model = "random" if args.random is not None else "demo" if not args.model or is_demo(args.model) else name
    section = re.sub(r"\W+", "-", f"profile {model} {args.search}".lower())
    picture = profiled.picture(args.save and args.save.with_name(f"{section}.svg"))
    setting = f"{name}, {args.dtype if args.dtype != 'auto' else dtype_name(engine)}, {engine.runner.device.type}"
    threads = f", {torch.get_num_threads()} threads" if engine.runner.device.type == "cpu" else ""
    body = profiled.report(f"{setting}{threads}; {describe(search)}") + (f"\n\n![]({picture})" if args.save else "")
    result = {"model": name, "search": args.search, **profiled.result()}
    (out / RESULT).write_text(json.dumps(result), encoding="utf-8")
    finish(section, made, body, result, args.save)
    return result


class Profile:
    """One search on one engine, run several times."""

    def __init__(
        self, args: argparse.Namespace, engine: Engine, search: Search, bandwidth: float, rates: dict[str, float]
    ):
        self.args, self.engine, self.search, self.bandwidth, self.rates = args, engine, search, bandwidth, rates
        self.out = Path(args.out)
        on_cpu = engine.runner.device.type == "cpu"
        self.deep = on_cpu and args.compile == "off"
        self.options = cli.limits(args)
        self.prompt: Sequence[int]
        if args.prompt_tokens:
            self.prompt = random_tokens(engine.runner.vocab_size, args.prompt_tokens)
        else:
            text = PROMPT if args.prompt is None else args.prompt
            messages = [{"role": "user", "content": text}]
            self.prompt = (
                engine.tokenizer.encode_rendered(engine.template.render(messages))
                if engine.template
                else engine.tokenizer.encode(text)
            )
            self.options["messages"] = messages
        self.stats: dict[str, Any] = {}

    def measure(self) -> None:
        """Make all runs: one to warm up, unobserved and watched ones in turn, one profiled."""
        progress("warming up")
        self.once(parts=False)
        works = {parts: lambda _, parts=parts: self.once(parts=parts).steps[:-1] for parts in (False, True)}
        runs = in_turn(works, self.args.runs, what="run")
        self.steps, self.parts, bare = middle(runs[False]), middle(runs[True]), runs[False]
        self.spread = sorted(1 / step_seconds(run) for run in bare)
        decode = [i for i, step in enumerate(self.steps) if not step.reads_prompt]
        first = self.args.trace_from
        if first is None:
            first = decode[max(0, (len(decode) - self.args.trace_steps) // 2)] if decode else 0
        progress(f"tracing {self.args.trace_steps} steps from step {first}")
        self.window = slice(first, first + self.args.trace_steps)
        self.traced, self.operators, self.kernels = self.trace()

    def once(self, **options: Any) -> Watch:
        """One run under a watch with these options; its last step has not begun."""
        watch = Watch(self.engine, **options)
        with watched(watch, self.deep):
            for event in self.engine.stream(self.prompt, self.search, **self.options):
                if isinstance(event, Done):
                    self.stats = event.result.stats
        return watch

    def trace(self) -> tuple[list[Step], list[Operator], list[Operator]]:
        """Profile one run; returns its steps, and the operators and kernels of the window."""
        activities = [ProfilerActivity.CPU]
        if self.engine.runner.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities, record_shapes=True, with_flops=True, acc_events=True)
        on = False

        def after_step(done: int) -> None:
            nonlocal on
            if not on and done == self.window.start:
                profiler.start()
                on = True
            elif on and done == self.window.stop:
                profiler.stop()
                on = False

        if self.window.start == 0:
            after_step(0)
        watch = self.once(labels=True, after_step=after_step)
        steps = watch.steps[:-1]
        if on:
            profiler.stop()
        if len(steps) <= self.window.start:
            raise UsageError(f"--trace-from: the search ended after {len(steps)} steps, got {self.window.start}")
        path = self.out / "trace.json"
        profiler.export_chrome_trace(str(path))
        progress(f"saved: {path} (open it at ui.perfetto.dev)")
        dtype = self.engine.pool.cache.k_LGSD.dtype
        return steps, *read_profile(profiler, dtype, watch.attention(self.window) if self.deep else None)

    # --- results ---

    def rows(self, prompt: bool) -> list[dict[str, Any]]:
        """Means per step of each part, over the steps that read the prompt or over the others."""
        steps = [step for step in self.parts if step.reads_prompt == prompt]
        if not steps:
            return []
        spent: dict[str, float] = defaultdict(float)
        work: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for step in steps:
            for part, seconds in step.parts.items():
                spent[part] += seconds / len(steps)
            for part, amounts in step.work.items():
                work[part] = [a + b / len(steps) for a, b in zip(work[part], amounts, strict=True)]
        whole = sum(spent.values())
        found = []
        for part, seconds in sorted(spent.items(), key=lambda item: -item[1]):
            moved, operations = work.get(part, (None, None))
            rate = self.rates[self.kind(part)]
            least = None if moved is None else max(moved / self.bandwidth, (operations or 0) / rate)
            found.append({
                "part": part, "group": report.group_of(part), "seconds": seconds, "share": seconds / whole,
                "bytes": moved, "operations": operations, "of_roofline": None if least is None else least / seconds,
            })  # fmt: skip
        return found

    def calls(self) -> list[dict[str, Any]]:
        """The operators of a stack in C++, in the steps of decoding."""
        return report.call_rows([step for step in self.steps if not step.reads_prompt])

    def kind(self, part: str) -> str:
        """The dtype of a part's products."""
        if self.args.quant == "int8":
            return "int8"
        return dtype_name(self.engine.companions.get(part.partition(":")[0], self.engine))

    def overhead(self) -> dict[str, float]:
        """Steps per second of the traced steps: unobserved, with the stop watch, with the profiler."""
        kinds = {"bare": self.steps, "watched": self.parts, "profiled": self.traced}
        return {kind: 1 / step_seconds(steps[self.window] or steps) for kind, steps in kinds.items()}

    def result(self) -> dict[str, Any]:
        """Everything, for programs."""
        timeline = [{"seconds": s.seconds, "prompt": s.reads_prompt, "nodes": dict(s.nodes), "live": s.live,
                     "kv_bytes": s.kv_bytes} for s in self.steps]  # fmt: skip
        return {
            "prompt_tokens": len(self.prompt),
            "steps_per_second": 1 / step_seconds(self.steps),
            "steps_per_second_by": self.overhead(),
            "bandwidth": self.bandwidth,
            "rates": self.rates,
            "prompt_parts": self.rows(True),
            "parts": self.rows(False),
            "calls": self.calls(),
            "traced_steps": [self.window.start, min(self.window.stop, len(self.traced))],
            "operators": [vars(op) for op in self.operators],
            "kernels": [vars(op) for op in self.kernels],
            "timeline": timeline,
            "stats": {key: value for key, value in self.stats.items() if isinstance(value, int | float | str)},
        }

    def report(self, setting: str) -> str:
        """The page."""
        by, decode = self.overhead(), self.rows(False)
        rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s ({kind})" for kind, rate in self.rates.items())
        ms, least, most = step_seconds(self.steps) * 1e3, self.spread[0], self.spread[-1]
        parts = [
            f"{setting}; prompt of {len(self.prompt)} tokens, {self.stats['new_tokens']} new ones. Memory moves "
            f"{self.bandwidth / 1e9:.1f} GB/s; large products run at {rates}.",
            f"**A step takes {ms:.2f} ms: {report.shares(decode or self.rows(True))}.** {1 / ms * 1e3:.1f} steps/s "
            f"({least:.1f}-{most:.1f} over {self.args.runs} runs). In the traced steps: {by['bare']:.1f} steps/s "
            f"bare, {by['watched']:.1f} with the stop watch, {by['profiled']:.1f} with the profiler.",
        ]
        for rows, title in ((decode, "Steps of decoding"), (self.rows(True), "Steps that read the prompt")):
            if rows:
                count = sum(step.reads_prompt == (title[-1] == "t") for step in self.parts)
                whole = sum(row["seconds"] for row in rows) * 1e3
                parts.append(f"{title}: {count}, {whole:.2f} ms each with the stop watch: {report.shares(rows)}.")
                parts.append(report.part_table(rows))
        parts.append(report.LEGEND)
        if calls := self.calls():
            parts += [report.CALLS, report.call_table(calls)]
        count = min(self.window.stop, len(self.traced)) - self.window.start
        parts.append(f"{report.OPERATORS} {count} steps from step {self.window.start}.")
        wall = sum(step.seconds for step in self.traced[self.window])
        for title, found in (("", self.operators), ("Kernels on the device:", self.kernels)):
            if found:
                parts += [title] * bool(title)
                rate = self.rates[self.kind("target: linear layers")]
                parts.append(report.operator_table(found, self.args.top, count, wall, self.bandwidth, rate))
        return "\n\n".join(parts)

    def picture(self, kept: Path | None) -> str:
        """Draw the timeline; its file's name, "" where matplotlib is not installed."""
        path = kept or self.out / "timeline.svg"
        try:
            draw(path, (8, 7), lambda figure: report.paint(figure, self.steps, self.parts))
        except UsageError as missing:
            progress(f"no picture: {missing}")
            return ""
        return path.name


def dtype_name(engine: Engine) -> str:
    return str(engine.pool.cache.k_LGSD.dtype).removeprefix("torch.")


def describe(search: Search) -> str:
    """A configuration in short: the fields that differ from the defaults."""
    changed = [f"{key} {value}" for key, value in vars(search).items() if value != getattr(type(search), key, None)]
    return " ".join([type(search).__name__, *([f"({', '.join(changed)})"] if changed else [])])


def middle(runs: list[list[Step]]) -> list[Step]:
    """The run of median time."""
    return sorted(runs, key=lambda steps: sum(step.seconds for step in steps))[len(runs) // 2]


def step_seconds(steps: Sequence[Step]) -> float:
    """Mean time of a step; of decoding steps, if there are any."""
    decode = [step.seconds for step in steps if not step.reads_prompt]
    return fmean(decode or [step.seconds for step in steps])


if __name__ == "__main__":
    sys.exit(cli.ended(main))

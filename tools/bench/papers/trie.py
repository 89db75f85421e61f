"""Memory against generated length, with one cache per beam and with a trie (the trie paper's figure 3 and table 1)."""

import itertools
import math
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from engine import Engine
from engine.request import Done, Prefill, Progress
from search import Trie
from tools.bench import peers
from tools.bench.checkpoints import CHAT, is_gguf
from tools.bench.measure import cores, progress
from tools.bench.papers.common import Findings, Models, bullets, ratio, stories
from tools.bench.report import table
from tools.bench.texts import Asked, summaries

TITLE = "Efficient Beam Search for Large Language Models Using Trie-Based Decoding"
SETTING = """Phi-3.5-mini-instruct on Tesla V100-SXM2-32GB GPUs, against the batch-based beam search of transformers;
memory is `torch.cuda.memory_allocated()` (section 4.1)."""
MODEL = CHAT
SIDE_BY_SIDE = 4000  # tokens of a prompt times beams: transformers computes the prompt of each beam
BEAMS = (1, 3, 9, 15)
# Table 1: mean tokens of the input, entries, and by beams (MB per token, tokens per second, score) of the batch-based
# search and of the paper's; greedy decoding stands for one beam; None ran out of memory. Scores: ROUGE-L for the first
# two, the share of problems solved for HumanEval.
TABLE_1: dict[str, tuple[int, int, dict[int, tuple[tuple[float, float, float] | None, ...]]]] = {
    "CNN/DM": (910, 200, {
        1: ((1.41, 8.96, 0.2001),),
        3: ((4.06, 7.50, 0.2066), (1.51, 8.01, 0.2065)),
        9: ((11.99, 5.25, 0.2070), (1.51, 6.73, 0.2071)),
        15: ((19.95, 4.32, 0.2099), (1.55, 6.14, 0.2093)),
    }),
    "QMSUM": (4133, 90, {
        1: ((1.68, 7.17, 0.1524),),
        3: ((9.06, 4.67, 0.1301), (1.57, 6.31, 0.1490)),
        9: ((13.21, 2.37, 0.1321), (1.56, 5.15, 0.1504)),
        15: (None, (1.57, 4.43, 0.1457)),
    }),
    "HumanEval": (181, 164, {
        1: ((1.28, 9.11, 0.6220),),
        3: ((3.40, 7.91, 0.6585), (1.51, 7.85, 0.6585)),
        9: ((9.12, 6.63, 0.6524), (2.42, 6.72, 0.6707)),
        15: ((16.16, 6.13, 0.6829), (3.31, 6.21, 0.6768)),
    }),
}  # fmt: skip
DIFFERS = (
    """The first table counts the KV cache at its peak: for the trie its pages, for the batch what one cache per beam
    would have held (beams x the whole text). The paper counts everything that torch allocated, including activations
    and the logits of all prompt positions at once; here the head runs only on the rows that are asked for, so there is
    no spike at the beginning. The table beside transformers measures whole processes; transformers runs its own
    search.""",
    "Branches are pruned at every step; the paper collects garbage from time to time.",
    """End-of-sequence, length penalty and stopping are those of transformers 5, so that the outputs can be equal; the
    paper's code differs (it does not recognise an end among the first tokens and generates one token too many). Outputs
    end where the model ends them, at the latest at the limit; the runs beside transformers go to the limit.""",
    """*score* here is the best output's log-probability per token; the paper's scores are ROUGE-L and problems solved.
    Its text says 27.14 to 3.27 MB per token for QMSUM with 9 beams, and "1.57 GB"; its table, which is shown here, says
    13.21 to 1.56, and MB.""",
)


def run(models: Models) -> Findings:
    """Count, measure, compare."""
    engine = models.engine()
    new_tokens, count = models.pick(224 if models.demo else 64, 12), models.pick(4 if models.demo else 2, 1)
    prompts = {"short": begin(engine, models, 200, 1, count), "long": begin(engine, models, 900, 9, count)}
    if not models.demo:
        prompts["longest"] = begin(engine, models, 4000, 0, 1)
    beams = models.pick(BEAMS, (1, 3))
    rows = []
    for kind, texts in prompts.items():
        for b in beams:
            rows.append({"text": kind, "beams": b, **count_one(engine, texts, b, new_tokens)})
            progress(f"trie: {kind} prompts, {b} beams: {rows[-1]['trie']:.0f} bytes per token")
    speeds = measured(models, engine.runner.device.type, prompts, beams, models.pick(64 if models.demo else 24, 6))
    what = "requests for stories" if models.demo else "requests to summarise chapters of Python's documentation"
    lengths = ", ".join(f"{len(texts)} {kind} of {mean_length(texts):.0f} tokens" for kind, texts in prompts.items())
    body = "\n\n".join([
        f"{models.name}, {models.dtype}, {engine.pool.bytes_per_token:,} bytes per token in the cache; prompts: "
        f"{lengths} ({what}); up to {new_tokens} new tokens.",
        "Memory per token of input and output, with one cache per beam → with the trie, in kB here and in MB in the "
        "paper:",
        memory_table(rows, beams),
        f"The pages hold at most {max(row['held'] for row in rows):.2f} times the live tokens, each at its peak.",
        "CPU time of all threads here, in milliseconds per token of the prompt and per token of the best output:",
        cpu_table(rows, beams),
        "Comparison with transformers, each engine in a process of its own: " + speeds["setting"],
        peers.result_table(speeds["rows"]),
        peers.LEGEND,
        "Output tokens per second of the whole run, batch-based search → trie, and the quality of the output:",
        speed_table(rows, speeds["rows"], beams),
        bullets(DIFFERS),
    ])  # fmt: skip
    result = {"rows": rows, "measured": speeds["rows"]}
    shown = [b for b in beams if b > 1]
    unit = engine.pool.bytes_per_token
    return Findings(body, result, (3.4 * len(shown), 5.2), lambda figure: paint(figure, rows, shown, unit))


def begin(engine: Engine, models: Models, tokens: int, turns: int, count: int) -> list[Asked]:
    """For the demo, requests for stories after a conversation of this many turns; otherwise requests for summaries, of
    this many tokens."""
    if models.demo:
        return [Asked(ids, engine.eos_token_ids) for ids in stories(engine, count, turns, models.seed)]
    return summaries(engine, count, models.pick(tokens, 60))


def mean_length(prompts: Sequence[Asked]) -> float:
    return fmean(len(prompt.ids) for prompt in prompts)


def count_one(engine: Engine, prompts: Sequence[Asked], beams: int, new_tokens: int) -> dict[str, Any]:
    """Means over prompts of the cache's peak, in bytes per token of prompt and output."""
    found = [measure(engine, prompt, beams, new_tokens) for prompt in prompts]
    first, unit = found[0], found[0]["kv_bytes_per_token"]
    lengths = [f["prompt_tokens"] + f["new_tokens"] for f in found]
    return {
        "input": fmean(f["prompt_tokens"] for f in found),
        "entries": len(found),
        "output": fmean(f["new_tokens"] for f in found),
        "trie": fmean(f["kv_bytes_peak"] / n for f, n in zip(found, lengths, strict=True)),
        "batch": fmean(f["unshared_nodes_peak"] * unit / n for f, n in zip(found, lengths, strict=True)),
        "held": max(f["kv_bytes_peak"] / (f["live_nodes_peak"] * unit) for f in found),
        "tokens_per_second": sum(f["new_tokens"] for f in found)
        / sum(f["prefill_seconds"] + f["decode_seconds"] for f in found),
        "score": fmean(f["score"] for f in found),
        "prompt_cpu_ms": sum(f["prompt_cpu"] for f in found) / sum(f["prompt_tokens"] for f in found) * 1e3,
        "decode_cpu_ms": sum(f["decode_cpu"] for f in found) / max(1, sum(f["new_tokens"] - 1 for f in found)) * 1e3,
        "series": {
            "trie": first["live"],
            "batch": [beams * (first["prompt_tokens"] + i) for i in range(len(first["live"]))],
        },
    }


def measure(engine: Engine, prompt: Asked, beams: int, new_tokens: int) -> dict[str, Any]:
    """One search: its statistics, its score, the live tokens after each step, and the CPU seconds of all threads for
    the prompt and after it."""
    began, clock, live = time.process_time(), list[float](), list[int]()
    for event in engine.stream(prompt.ids, Trie(beams), max_new_tokens=new_tokens, eos_token_ids=prompt.ends):
        if not isinstance(event, Prefill):
            clock.append(time.process_time())
        if isinstance(event, Progress):
            live.append(event.tree.live_tokens)
        elif isinstance(event, Done):
            cpu = {"prompt_cpu": clock[0] - began, "decode_cpu": clock[-1] - clock[0]}
            return {**event.result.stats, **cpu, "score": event.result.outputs[0].score, "live": live}
    raise AssertionError("a stream without an end")


def measured(
    models: Models, device: str, prompts: Mapping[str, Sequence[Asked]], beams: Sequence[int], new_tokens: int
) -> dict[str, Any]:
    """This engine and transformers in processes of their own, on one prompt of a kind; of the demo a long one only.
    Prompts that take transformers too long with so many beams are left out."""
    threads, runs, rows = models.threads or cores(), models.pick(3 if models.demo else 1, 1), []
    chosen = [texts[0].ids for kind, texts in prompts.items() if kind == "long" or not (models.demo or models.quick)]
    pairs = itertools.product(chosen, beams if not models.quick else beams[-1:])
    for prompt, b in ((prompt, b) for prompt, b in pairs if b * len(prompt) <= SIDE_BY_SIDE):
        # A GGUF file is what it is here, and its dequantised weights there; they are the same numbers.
        own = {"quant": "auto"} if is_gguf(models.target) else {}
        ours = peers.spec("coppice", models.target, models.dtype, b, threads, models.scratch, device=device, **own)
        other = peers.spec("transformers", models.floats(), models.dtype, b, threads, models.scratch, device=device)
        asked = {"coppice": (sys.executable, ours), "transformers": (models.peer_python, other)}
        found = peers.measure_in_turn(asked, prompt, new_tokens, runs, math.inf)
        here = [{"peer": peer, "prompt": len(prompt), "beams": b, **figures} for peer, figures in found.items()]
        peers.compare(here)
        rows += here
        progress("\n".join(f"trie: {row['peer']}, {b} beams: {peers.outcome(row)}" for row in here))
    sizes = ", ".join(str(len(prompt)) for prompt in chosen)
    setting = f"prompts of {sizes} tokens, {new_tokens} new ones, {threads} threads, medians of {runs} interleaved runs"
    if len(rows) < 2 * len(chosen) * len(beams) and not models.quick:
        setting += f", at most {SIDE_BY_SIDE:,} tokens of prompt times beams (transformers evaluates every beam's)"
    versions = {k: v for row in rows for k, v in row.get("versions", {}).items() if k == "transformers"}
    setting += "".join(f"; {name} {version}" for name, version in versions.items())
    if own := next((row for row in reversed(rows) if "kv_bytes_peak" in row), None):
        megabytes = own["kv_bytes_peak"] / 1e6
        setting += f". With {own['beams']} beams the cache takes {megabytes:.1f} MB of our growth; the rest is scratch "
        setting += "space and threads"
    return {"rows": rows, "setting": f"{setting}."}


def paper(b: int, column: int) -> list[str]:
    """The paper's memory (0) or speed (1) for this number of beams: batch, trie, and their ratio."""
    cells = []
    for _, _, by_beams in TABLE_1.values():
        found = [None if x is None else x[column] for x in by_beams[b]]
        cells.append(arrow(["OOM" if x is None else f"{x:.2f}" for x in found]))
        if len(found) == 2 and None not in found:
            batch, ours = found
            cells[-1] += f" ({ratio(ours, batch) if column else ratio(batch, ours)})"
    return cells


def arrow(cells: Sequence[str]) -> str:
    """A cell of the table: batch → trie; one figure where there is only one."""
    return " → ".join(cells)


def memory_table(rows: Sequence[dict[str, Any]], beams: Sequence[int]) -> str:
    """Ours and the paper's Mem/Tok."""
    kinds = list(dict.fromkeys(row["text"] for row in rows))
    head = ["beams", *(f"here, {kind}" for kind in kinds)]
    head += [f"paper, {name} ({n} tokens, {m} entries)" for name, (n, m, _) in TABLE_1.items()]
    lines = []
    for b in beams:
        mine = [row for kind in kinds for row in rows if (row["text"], row["beams"]) == (kind, b)]
        cells = [arrow([f"{r[kind] / 1e3:.2f}" for kind in ("batch", "trie")[b == 1 :]]) for r in mine]
        if b > 1:
            cells = [f"{c} ({ratio(r['batch'], r['trie'])})" for c, r in zip(cells, mine, strict=True)]
        lines.append([b, *cells, *paper(b, 0)])
    return table(head, lines)


def cpu_table(rows: Sequence[dict[str, Any]], beams: Sequence[int]) -> str:
    """The CPU time per token, by the kind of prompt."""
    kinds, keys = list(dict.fromkeys(row["text"] for row in rows)), ("prompt_cpu_ms", "decode_cpu_ms")
    head = ["beams", *(f"{kind}, {part}" for kind in kinds for part in ("prompt", "output"))]
    by = {(row["text"], row["beams"]): row for row in rows}
    return table(head, [[b, *(f"{by[kind, b][key]:.2f}" for kind in kinds for key in keys)] for b in beams])


def speed_table(rows: Sequence[dict[str, Any]], speeds: Sequence[dict[str, Any]], beams: Sequence[int]) -> str:
    """Ours and the paper's Tok/Sec and scores."""
    lines = []
    for b in beams:
        mine = [row for row in speeds if row["beams"] == b and "seconds" in row]
        both = [row["prompt"] for row in mine if row["peer"] == "transformers"]  # the longest prompt of both, if any
        mine = [row for row in mine if row["prompt"] in both[-1:]] or mine[-1:]
        by_peer = {row["peer"]: len(row["tokens"]) / row["seconds"]["median"] for row in mine}
        ours, theirs = by_peer.get("coppice"), by_peer.get("transformers")
        here = arrow(["?" if x is None else f"{x:.1f}" for x in (theirs, ours)])
        score = fmean(row["score"] for row in rows if row["beams"] == b)
        lines.append([b, f"{here} ({ratio(ours, theirs)})", *paper(b, 1), f"{score:.3f}", *paper_scores(b)])
    names = list(TABLE_1)
    return table(["beams", "here", *names, "score here", *(f"score, {name}" for name in names)], lines)


def paper_scores(b: int) -> list[str]:
    """The paper's scores for this number of beams, batch and trie."""
    return [arrow(["OOM" if x is None else f"{x[2]:.4f}" for x in by_beams[b]]) for _, _, by_beams in TABLE_1.values()]


def paint(figure: Any, rows: Sequence[dict[str, Any]], beams: Sequence[int], unit: int) -> None:
    """Figure 3: a row per kind of prompt, a column per number of beams."""
    kinds = list(dict.fromkeys(row["text"] for row in rows))
    for axes_row, kind in zip(figure.subplots(len(kinds), len(beams), squeeze=False), kinds, strict=True):
        for axes, b in zip(axes_row, beams, strict=True):
            [row] = [row for row in rows if (row["text"], row["beams"]) == (kind, b)]
            for name, color, label in (("batch", "tab:blue", "one cache per beam"), ("trie", "tab:red", "trie")):
                axes.plot([n * unit / 1e6 for n in row["series"][name]], color=color, label=label)
            axes.set(title=f"{kind} prompt, {b} beams", ylim=(0, None))
            axes.set_xlabel("tokens generated")
        axes_row[0].set_ylabel("KV cache, MB")
    figure.axes[0].legend(fontsize=8)

"""Quality against tokens per second: DSBD, beam sampling, speculative sampling (the DSBD paper's figures 4 and 5)."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from engine import Engine
from engine.contract import Search, SearchResult
from models.checkpoint.headers import Checkpoint
from models.formats.linear import FORMATS
from search import DSBD, BeamSample, Speculative
from tools.bench.checkpoints import CHAT
from tools.bench.measure import in_turn, standard_error
from tools.bench.papers.common import Findings, Models, bullets
from tools.bench.report import rows_table, table
from tools.bench.searches import after_prompt
from tools.bench.texts import chats, copies, draw_prompts, edits
from tools.bench.variants import first_layers

TITLE = "Dynamic-Width Speculative Beam Decoding for LLM Inference (DSBD)"
SETTING = """Llama-2-13B with drafts by Llama-68M, Llama-3.1-8B by Llama-3.2-1B, OPT-13B by OPT-125M, on a GPU that is
not named; SQuAD (exact match), Spider (execution accuracy), MT-Bench (rated by GPT-4); W_S from 2 to 6, t 0.7 and 0.9,
W_min from 1 to 3, beam sampling with 1 to 4 beams (sections 4.1 and 4.2)."""
MODEL = CHAT
FIXED = {1: 1, 2: 3, 4: 6}  # widths of real models -> draft beams
SPEEDUP = "1.5 to 1.9"  # section 4.2: of DSBD over beam sampling at equal quality, SQuAD and Spider
# Table 1, MT-Bench: (pair, method) -> (score, tokens per second).
TABLE_1 = {
    ("Llama-2-13B", "SpecInfer"): (2.86, 21.8), ("Llama-2-13B", "beam sampling, W = 5"): (3.51, 12.1),
    ("Llama-2-13B", "DSBD"): (3.52, 16.5), ("Llama-3-8B", "SpecInfer"): (3.46, 20.2),
    ("Llama-3-8B", "beam sampling, W = 5"): (4.10, 10.5), ("Llama-3-8B", "DSBD"): (4.11, 17.8),
}  # fmt: skip
# Table 2, a KV cache for one sequence only: the same, with exact matches or correct executions in percent.
TABLE_2 = {
    ("Llama-2, SQuAD", "multinomial"): (74, 21.14), ("Llama-2, SQuAD", "speculative"): (75, 27.11),
    ("Llama-2, SQuAD", "SpecInfer"): (74, 27.15), ("Llama-2, SQuAD", "DSBD"): (86, 26.67),
    ("Llama-2, Spider", "multinomial"): (20, 21.98), ("Llama-2, Spider", "speculative"): (19, 31.74),
    ("Llama-2, Spider", "SpecInfer"): (19, 32.00), ("Llama-2, Spider", "DSBD"): (31, 30.30),
}  # fmt: skip
COLORS = {
    "dsbd": "tab:blue",
    "n-grams": "tab:purple",
    "beam-sample": "tab:orange",
    "speculative": "tab:green",
    "one-path": "tab:red",
}
LEGEND = """*logprob/token* is the mean log-probability per token of the best output under the target, *s.e.* its
standard error over prompts; all outputs have the same length (end-of-sequence is ignored). *tokens/s* divides the new
tokens of the best output by {clock}, prompt included, for one request at a time. *tokens/pass* is the number of tokens
by which the beams grow per pass of the target. *n-grams* is DSBD with n-gram drafts. A row is on the *front* if no
other row of its kind is both better and faster. *speedup at equal quality* divides the speed of the fastest row of
DSBD, or of n-grams, that is at least as good by that of the row of beam sampling."""
WARP: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "top_p": 0.9}
DIFFERS = (
    """Quality here is the best output's mean log-probability per token under the target; the paper uses exact match,
    execution accuracy and a rating of 1 to 10.""",
    """The gain depends on how cheap a draft's pass is: Llama-68M has 1/190 of its target's parameters, the draft here
    {share:.0%} of them. Moreover, a pass of several nodes costs more than a pass of one node on a CPU, and hardly more
    on a GPU.""",
    """Drafts are accepted with probability min(1, p'/q). The paper prints the ratio upside down; the rule as printed
    looks fast because it accepts nearly everything. Drafts are drawn and verified without replacement, with the term
    that equation (5) lacks.""",
    """*one-path* keeps the most probable beam of each round (section 3.4, table 2): it needs the memory of one path,
    but no longer has the distribution of beam sampling.""",
    "Energy is not measured; the paper reports 1.8 to 2.5 times less than for beam sampling.",
)


def run(models: Models) -> Findings:
    """All settings of the paper where there is a draft model; a few of them where the target drafts for itself."""
    models.need("draft")
    return by_itself(models) if str(models.draft) in FORMATS else by_a_model(models)


def by_a_model(models: Models) -> Findings:
    """Drafts by a draft model, on texts that the target draws."""
    engine, new_tokens = models.engine("draft"), models.pick(48, 6)
    label = f"{models.name}, drafts by {'its draft model' if models.demo else Path(models.draft or '').resolve().name}"
    asked = searches(
        models.pick([1, 2, 3, 4], [1, 2]),
        models.pick([2, 3, 4, 5, 6], [2]),
        models.pick([0.7, 0.9], [0.7]),
        models.pick([1, 2, 3], [1]),
    )
    prompts = draw_prompts(engine, models.pick(16, 1), models.pick(16, 4), models.seed)
    rows = measure(engine, asked, prompts, new_tokens)
    sizes = [parameters(folder) for folder in (models.target, models.draft or "")]
    differs = [line.format(share=sizes[1] / sizes[0]) for line in DIFFERS]
    return report(label, sizes, prompts, new_tokens, rows, "wall time", [bullets(differs)])


def by_itself(models: Models) -> Findings:
    """Drafts by the target in 8 or 4 bits, by n-grams, by its first layers and by suffixes, on questions. Times are CPU
    times, because other programs disturb wall time."""
    engine, new_tokens, fixed = models.engine("draft"), models.pick(32, 6), models.pick(FIXED, {1: 1, 2: 2})
    label = f"{models.name}{'' if models.own else ' in float32'}, drafts by itself in {models.draft}"
    asked = searches(
        models.pick([1, 2, 3, 4], [1, 2]),
        models.pick([4], [2]),
        models.pick([0.9], [0.7]),
        models.pick([1, 2], [1]),
    )
    asked += [(f"dsbd W_S={n} W={w}", DSBD(draft_beams=n, width=w, **WARP)) for w, n in fixed.items() if w > 1]
    asked += [(f"n-grams W_S={n} W={w}", DSBD(draft_beams=n, width=w, drafter="ngram", **WARP))
              for w, n in fixed.items()]  # fmt: skip
    prompts = [one.ids for one in chats(engine, models.pick(3, 1))]
    rows = measure(engine, asked, prompts, new_tokens, time.process_time)
    rows += layers(engine, models, prompts, new_tokens)
    mark_front([row for row in rows if row["search"] == "speculative"])
    ridden = rides(models, [*fixed])
    more = [cost(models, rows), same_lists(rows, ridden), bullets([DIFFERS[0], *DIFFERS[2:]])]
    found = report(label, [parameters(models.floats())] * 2, prompts, new_tokens, rows,
                   "the processor's time of all threads", more)  # fmt: skip
    return found._replace(result=found.result | {"ridden": ridden})


def searches(
    beams: Sequence[int], draft_beams: Sequence[int], thresholds: Sequence[float], min_widths: Sequence[int]
) -> list[tuple[str, Search]]:
    """The searches to compare, with labels."""
    found: list[tuple[str, Search]] = [(f"beam-sample W={n}", BeamSample(beams=n, **WARP)) for n in beams]
    found.append(("speculative gamma=3", Speculative(gamma=3, **WARP)))
    for n, t, least in itertools.product(draft_beams, thresholds, min_widths):
        if least <= n:
            search = DSBD(draft_beams=n, gamma=3, threshold=t, min_width=least, **WARP)
            found.append((f"dsbd W_S={n} t={t:g} W_min={least}", search))
    found += [(f"one-path W_S={n} t=0.9", DSBD(draft_beams=n, threshold=0.9, keep=1, **WARP)) for n in draft_beams]
    return found


def layers(engine: Engine, models: Models, prompts: Sequence[list[int]], new_tokens: int) -> list[dict[str, Any]]:
    """Rows of speculative sampling with drafts by the target's first layers, under its own norm and head."""
    rows, whole = [], engine.shape.layers
    for count in (whole // 2, whole - max(1, whole // 8)):
        folder = first_layers(models.floats(), count, models.kept)
        quant = str(models.draft) if models.own else "none"
        engine.add("draft", Engine.load(folder, dtype=models.dtype, quant=quant, threads=models.threads))
        label = f"speculative gamma=3, first {count} of {whole} layers"
        rows += measure(engine, [(label, Speculative(gamma=3, **WARP))], prompts, new_tokens, time.process_time)
    return rows


def measure(
    engine: Engine,
    searches: Sequence[tuple[str, Search]],
    prompts: Sequence[list[int]],
    new_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, Any]]:
    """Run all searches, interleaved, on every prompt, timed by `clock`; draft and target seconds are wall time."""
    for _, search in (searches[0], searches[-1]):
        engine.generate(prompts[:1], search, max_new_tokens=8, ignore_eos=True)  # warm up

    def run(search: Search, i: int) -> tuple[float, SearchResult]:
        began = clock()
        [result] = engine.generate([prompts[i]], replace(search, seed=i), max_new_tokens=new_tokens, ignore_eos=True)  # type: ignore[type-var]
        return clock() - began, result

    found = in_turn({label: partial(run, search) for label, search in searches}, len(prompts), what="prompt")
    rows = []
    for label, runs in found.items():
        qualities = [(r.outputs[0].logprob or 0.0) / len(r.outputs[0].token_ids) for _, r in runs]
        seconds, tokens = sum(s for s, _ in runs), sum(len(r.outputs[0].token_ids) for _, r in runs)
        passes = sum(r.stats["forward_passes"] for _, r in runs)
        rows.append({
            "label": label,
            "search": label.split()[0],
            "quality": fmean(qualities),
            "error": standard_error(qualities),
            "speed": tokens / seconds,
            "seconds": seconds,
            "tokens_per_pass": tokens / passes,
            "draft_seconds": sum(r.stats.get("draft_seconds", 0.0) for _, r in runs),
            "target_seconds": sum(r.stats.get("target_seconds", s) for s, r in runs),
            "front": False,
        })  # fmt: skip
    for kind in COLORS:
        mark_front([row for row in rows if row["search"] == kind])
    return rows


def mark_front(rows: Sequence[dict[str, Any]]) -> None:
    """Mark the rows that no other row beats in both quality and speed."""
    for row in rows:
        beaten = any(
            o["quality"] >= row["quality"] and o["speed"] >= row["speed"] and o is not row
            and (o["quality"], o["speed"]) != (row["quality"], row["speed"])
            for o in rows
        )  # fmt: skip
        row["front"] = not beaten


def speedups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare each row of beam sampling with the fastest row of DSBD, then of DSBD with n-grams, that is as good."""
    found = []
    for kind in ("dsbd", "n-grams"):
        mine = [row for row in rows if row["search"] == kind]
        for row in (row for row in rows if mine and row["search"] == "beam-sample"):
            good = [o for o in mine if o["quality"] >= row["quality"]]
            best = max(good, key=lambda o: o["speed"], default=None)
            ratio = best["speed"] / row["speed"] if best else None
            text, by = (f"{ratio:.2f}", best["label"]) if best and ratio else ("none", f"none of {kind}")
            beams = row["label"].split("=")[1]
            found.append({"beams": beams, "quality": row["quality"], "speed": row["speed"], "by": by, "ratio": ratio,
                          "kind": kind})  # fmt: skip
            found[-1]["text"] = text
    return found


def parameters(folder: str | Path) -> int:
    """Numbers in a checkpoint."""
    return sum(math.prod(tensor.shape) for tensor in Checkpoint.open(folder).tensors.values())


def report(
    label: str,
    sizes: Sequence[int],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    rows: list[dict[str, Any]],
    clock: str,
    more: Sequence[str],
) -> Findings:
    """The setting, all rows, the speeds at equal quality, and more; `clock` names the clock of the times."""
    shown = [row | {"star": "*" if row["front"] else ""} for row in rows]
    ratios = speedups(rows)
    body = "\n\n".join([
        f"{label} ({sizes[0] / 1e6:.1f}M and {sizes[1] / 1e6:.1f}M parameters); {len(prompts)} prompts of "
        f"{fmean(map(len, prompts)):.0f} tokens, {new_tokens} new tokens; temperature {WARP['temperature']:g}, "
        f"top-k {WARP['top_k']}, top-p {WARP['top_p']:g}.",
        rows_table(shown, {
            "search": "{label}", "logprob/token": "{quality:.4f}", "s.e.": "{error:.4f}", "tokens/s": "{speed:.1f}",
            "tokens/pass": "{tokens_per_pass:.2f}", "draft s": "{draft_seconds:.1f}",
            "target s": "{target_seconds:.1f}", "front": "{star}"}),
        rows_table(ratios, {
            "beam sampling": "{beams}", "logprob/token": "{quality:.4f}", "tokens/s": "{speed:.1f}",
            "DSBD at least as good": "{by}", "speedup at equal quality": "{text}"}),
        LEGEND.format(clock=clock),
        beside(rows, ratios),
        *more,
    ])  # fmt: skip
    result = {"model": label, "rows": rows, "speedups": ratios}
    return Findings(body, result, (7, 4.5), lambda figure: paint(figure, rows, label))


def rides(models: Models, beams: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of beam sampling on the target as it is given, with suffix drafts and without, by CPU seconds after the
    prompt. The texts are edits of code and copies, for which suffixes find drafts."""
    engine = models.engine()
    asked = [*edits(engine, models.pick(2, 1)), *copies(engine, models.pick(2, 1), models.pick(80, 20))]
    options = {"max_new_tokens": models.pick(48, 6), "ignore_eos": True}

    def run(w: int, drafts: bool | str, i: int) -> tuple[float, SearchResult]:
        salt = f"{w}, {i}, {drafts}"  # so that no request knows the answer of another to the same text
        search = BeamSample(beams=w, seed=i, **WARP)
        return after_prompt(engine, asked[i].ids, search, drafts=drafts, cache_salt=salt, **options)

    works = {(w, kind): partial(run, w, kind) for w in beams for kind in (False, "suffix")}
    found, rows = in_turn(works, len(asked), what="text"), []
    for w in beams:
        both = found[w, False], found[w, "suffix"]
        seconds = [sum(took for took, _ in runs) for runs in both]
        passes = [sum(result.stats["forward_passes"] for _, result in runs) for runs in both]
        texts = [[result.outputs[0].token_ids for _, result in runs] for runs in both]
        rows.append({"beams": w, "ratio": seconds[0] / seconds[1], "passes": passes[0] / passes[1],
                     "same": texts[0] == texts[1]})  # fmt: skip
    return rows


def same_lists(rows: Sequence[dict[str, Any]], ridden: Sequence[dict[str, Any]]) -> str:
    """Speeds of searches that draw the same lists as beam sampling, or lists from the same distribution."""
    by, lines = {row["label"]: row for row in rows}, []
    for ride in ridden:
        w = ride["beams"]
        plain = by[f"beam-sample W={w}"]
        mine = "speculative gamma=3" if w == 1 else f"dsbd W_S={FIXED.get(w)} W={w}"
        own, grams = by.get(mine), by.get(f"n-grams W_S={FIXED.get(w)} W={w}")
        cells = [f"{row['speed'] / plain['speed']:.2f} ({row['tokens_per_pass']:.2f})" if row else "-"
                 for row in (own, grams)]  # fmt: skip
        lines.append([w, f"{plain['speed']:.1f}", *cells, f"{ride['ratio']:.2f} ({ride['passes']:.2f})",
                      "yes" if ride["same"] else "no"])  # fmt: skip
    head = ["beams", "beam sampling, tokens/s", "draft: itself", "n-grams", "suffix drafts", "same tokens"]
    return (
        "The next table compares searches of equal quality: with a fixed width (*W*) DSBD draws lists from the "
        "distribution of beam sampling, whatever the drafts, and `--drafts suffix` does not change the lists that beam "
        "sampling draws. Cells give the speed relative to beam sampling and, in brackets, the tokens per pass. The "
        "suffixes are measured on edits of code and copied text, in the checkpoint's own format; their brackets give "
        "the passes without drafts divided by those with drafts.\n\n" + table(head, lines)
    )


def cost(models: Models, rows: Sequence[dict[str, Any]]) -> str:
    """The draft, and the cost of its passes relative to those of the target."""
    mine = [row for row in rows if row["search"] == "dsbd"]
    share = sum(row["draft_seconds"] for row in mine) / sum(row["target_seconds"] for row in mine)
    return (
        f"The draft is the target itself in {models.draft}, because there is no smaller model with the same tokens. "
        f"All its passes together took {share:.2f} of the time of the target's passes. *n-grams* draft from the prompt "
        "and the answer so far. In *first layers* the draft is the target without its last layers, "
        f"{f'in {models.draft}' if models.own else 'as floats'}; these were measured afterwards."
    )


def beside(rows: list[dict[str, Any]], ratios: list[dict[str, Any]]) -> str:
    """The paper's figures beside those measured here."""
    found = [f"{'' if r['kind'] == 'dsbd' else r['kind'] + ', '}W = {r['beams']}: {r['text']}" for r in ratios]
    speed = f"DSBD's speed relative to beam sampling at equal quality: here {'; '.join(found)}; in the paper {SPEEDUP}."
    by_label = {row["label"]: row for row in rows}
    plain = by_label["beam-sample W=1"]
    lines = []
    best = max((row for row in rows if row["search"] == "one-path"), key=lambda row: row["quality"])
    for row, name in ((plain, "multinomial"), (by_label["speculative gamma=3"], "speculative"), (best, best["label"])):
        times = row["speed"] / plain["speed"]
        lines.append([f"here: {name}", f"{row['quality']:.3f}", f"{row['speed']:.1f}", f"{times:.2f}"])
    for (pair, name), (quality, rate) in TABLE_2.items():
        base = TABLE_2[pair, "multinomial"][1]
        lines.append([f"paper: {pair}, {name}", f"{quality}", f"{rate:.2f}", f"{rate / base:.2f}"])
    for (pair, name), (quality, rate) in TABLE_1.items():
        lines.append([f"paper: {pair}, MT-Bench, {name}", f"{quality}", f"{rate:.1f}", "-"])
    return speed + "\n\n" + table(["method, memory of one path", "quality", "tokens/s", "x multinomial"], lines)


def paint(figure: Any, rows: Sequence[dict[str, Any]], label: str) -> None:
    """The figure: points, and the fronts as lines."""
    axes = figure.subplots()
    for kind, color in COLORS.items():
        mine = [row for row in rows if row["search"] == kind]
        x, y = [row["speed"] for row in mine], [row["quality"] for row in mine]
        axes.scatter(x, y, s=18, color=color, alpha=0.5)
        front = sorted((row["speed"], row["quality"]) for row in mine if row["front"])
        if front:
            axes.plot([s for s, _ in front], [q for _, q in front], color=color, marker="o", label=kind)
    if not all(row["front"] for row in rows):
        axes.scatter([], [], s=18, color="grey", alpha=0.5, label="small: beaten by another setting of the search")
    axes.set(xlabel="tokens per second", ylabel="log-probability per token", title=label)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)

"""Quality against tokens per second: DSBD, beam sampling, speculative sampling (the DSBD paper's figures 4 and 5)."""

import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

from engine import Engine
from engine.contract import SearchResult
from search import DSBD, BeamSample, Speculative
from tools.bench import dsbd as bench
from tools.bench.checkpoints import CHAT
from tools.bench.measure import in_turn
from tools.bench.papers.common import Findings, Models, bullets
from tools.bench.report import table
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
DIFFERS = (
    """Quality here is the best output's mean log-probability per token under the target; the paper's are exact match,
    execution accuracy and a rating of 1 to 10.""",
    """A draft pays by how much less its pass costs: Llama-68M has 1/190 of its target's parameters, the draft here
    {share:.0%} of them, and on a processor a pass of several nodes costs more than one of a single node, which on a GPU
    it hardly does.""",
    """Drafts are accepted with probability min(1, p'/q): the paper prints it upside down, and the rule as printed looks
    fast because it accepts nearly everything. Drafts are drawn and verified without replacement; the term that is
    missing in equation (5) is there.""",
    """*one-path* keeps the most probable beam of each round (section 3.4, table 2): one path of memory, but no longer
    the distribution of beam sampling.""",
    "Energy is not measured (the paper: 1.8 to 2.5 times less than beam sampling).",
)


def run(models: Models) -> Findings:
    """Measure all settings of the paper on one pair, a few of them on a real one."""
    demo = models.demo
    models.need("draft")
    args = Namespace(
        prompts=models.pick(16 if demo else 3, 1), prompt_tokens=models.pick(16, 4),
        new_tokens=models.pick(48 if demo else 32, 6), gamma=[3],
        draft_beams=models.pick([2, 3, 4, 5, 6] if demo else [4], [2]),
        threshold=models.pick([0.7, 0.9] if demo else [0.9], [0.7]),
        min_width=models.pick([1, 2, 3] if demo else [1, 2], [1]),
        beams=models.pick([1, 2, 3, 4], [1, 2]), drafts=[DSBD.drafts], temperature=1.0, top_k=20, top_p=0.9,
    )  # fmt: skip
    warp = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    asked = bench.searches(args)
    asked += [(f"one-path W_S={n} t=0.9", DSBD(draft_beams=n, threshold=0.9, keep=1, **warp)) for n in args.draft_beams]
    engine, label = models.engine("draft"), f"{models.name}, drafts by its draft model"
    sizes = [bench.parameters(folder) for folder in (models.target, models.draft or "")] if demo else []
    prompts = draw_prompts(engine, args.prompts, args.prompt_tokens, models.seed) if demo else []
    if not demo:
        fixed = models.pick(FIXED, {1: 1, 2: 2})
        asked += [(f"dsbd W_S={n} W={w}", DSBD(draft_beams=n, width=w, **warp)) for w, n in fixed.items() if w > 1]
        asked += [(f"n-grams W_S={n} W={w}", DSBD(draft_beams=n, width=w, drafter="ngram", **warp))
                  for w, n in fixed.items()]  # fmt: skip
        label = f"{models.name}{'' if models.own else ' in float32'}, drafts by itself in {models.draft}"
        sizes = [bench.parameters(models.floats())] * 2
        prompts = [one.ids for one in chats(engine, args.prompts)]
        args.prompt_tokens = round(fmean(map(len, prompts)))
    clock, clock_name, ridden = time.perf_counter, "wall time", []
    if not demo:  # other programs have a share of the wall's
        clock, clock_name = time.process_time, "the processor's time of all threads"
    rows = bench.measure(engine, asked, prompts, args.new_tokens, clock)
    if not demo:
        rows += layers(engine, models, prompts, args.new_tokens, warp)
        bench.mark_front([row for row in rows if row["search"] == "speculative"])
        ridden = rides(models, [*fixed], warp)
    ratios = bench.speedups(rows)
    body = "\n\n".join([
        bench.front_report(args, label, sizes, rows, ratios, clock_name),
        beside(rows, ratios),
        *([] if demo else [cost(models, rows), same_lists(rows, ridden)]),
        bullets([line.format(share=sizes[1] / sizes[0]) for i, line in enumerate(DIFFERS) if demo or i != 1]),
    ])  # fmt: skip
    result = {"model": label, "rows": rows, "speedups": ratios, "ridden": ridden}
    return Findings(body, result, (7, 4.5), lambda figure: bench.paint(figure, rows, label))


def layers(
    engine: Engine, models: Models, prompts: Sequence[list[int]], new_tokens: int, warp: dict[str, Any]
) -> list[dict[str, Any]]:
    """Rows of speculative sampling with drafts by the target's first layers, under its own norm and head."""
    rows, whole = [], engine.shape.layers
    for count in (whole // 2, whole - max(1, whole // 8)):
        folder = first_layers(models.floats(), count, models.kept)
        quant = str(models.draft) if models.own else "none"
        engine.add("draft", Engine.load(folder, dtype=models.dtype, quant=quant, threads=models.threads))
        label = f"speculative gamma=3, first {count} of {whole} layers"
        rows += bench.measure(engine, [(label, Speculative(gamma=3, **warp))], prompts, new_tokens, time.process_time)
    return rows


def rides(models: Models, beams: Sequence[int], warp: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of beam sampling of the target as it is given, with suffixes of the request's text riding along and without:
    the processor's seconds after the prompt. The texts are edits of code and copies, which suffixes know."""
    engine = models.engine()
    asked = [*edits(engine, models.pick(2, 1)), *copies(engine, models.pick(2, 1), models.pick(80, 20))]
    options = {"max_new_tokens": models.pick(48, 6), "ignore_eos": True}

    def run(w: int, drafts: bool | str, i: int) -> tuple[float, SearchResult]:
        salt = f"{w}, {i}, {drafts}"  # so that no request knows the answer of another to the same text
        search = BeamSample(beams=w, seed=i, **warp)
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
    """Speeds of what draws the very lists that beam sampling of so many beams draws, or lists of their distribution."""
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
    head = ["beams", "beam sampling, tokens/s", "drafts by itself", "n-grams", "suffixes ride along", "same tokens"]
    return (
        "Equal quality by construction: with a fixed width (*W*) DSBD draws lists of beam sampling's own distribution, "
        "whatever the drafts, and with drafts that ride along below it beam sampling draws the same lists. Speed over "
        "that of beam sampling, and in brackets tokens a pass (passes saved, for the suffixes: on edits of code and "
        "copied text, in the checkpoint's own format):\n\n" + table(head, lines)
    )


def cost(models: Models, rows: Sequence[dict[str, Any]]) -> str:
    """The draft, and what its passes cost beside those of the target."""
    mine = [row for row in rows if row["search"] == "dsbd"]
    share = sum(row["draft_seconds"] for row in mine) / sum(row["target_seconds"] for row in mine)
    return (
        f"The draft is the target itself in {models.draft}, as there is no smaller relative with the same tokens. Its "
        f"passes took {share:.2f} of the time of the target's, all together. *n-grams* draft from the prompt and the "
        "answer so far; *first layers*: the draft is the target without its last layers, "
        f"{f'in {models.draft}' if models.own else 'as floats'}, measured afterwards."
    )


def beside(rows: list[dict[str, Any]], ratios: list[dict[str, Any]]) -> str:
    """The paper's figures beside those measured here."""
    found = [f"{'' if r['kind'] == 'dsbd' else r['kind'] + ', '}W = {r['beams']}: {r['text']}" for r in ratios]
    speed = f"DSBD's speed over beam sampling's at equal quality: here {'; '.join(found)}; in the paper {SPEEDUP}."
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
    return speed + "\n\n" + table(["memory of one path", "quality", "tokens/s", "x multinomial"], lines)

"""Log-likelihood against nodes: beam search and ULTS on toy trees and on a model (the paper's figures 3 and 5)."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from engine import Engine
from engine.contract import Search, SearchResult
from search import ULTS, Trie
from search.ults.prior import Vectors
from tools.bench.checkpoints import CHAT
from tools.bench.measure import in_turn, progress, standard_error
from tools.bench.papers.common import Findings, Models, bullets
from tools.bench.papers.curves import abscissa, grouped, ordinate, plot_curves, share
from tools.bench.report import rows_table, table
from tools.bench.searches import Collect, after_prompt
from tools.bench.texts import WithoutEos, chats, draw_prompts, edits, plain
from tools.toy_trees import ToyTree

TITLE = "Uncertainty-guided likelihood-tree search (ULTS)"
SETTING = """GPT-2 on an RTX 2080 Ti and Llama-2-7b on an A40; Wikipedia (332 texts, 200 tokens and 20 new ones), CNN
Daily Mail (790; 300 and 60), TL;DR (1000; all and 40); toy trees with 8 children and depth 5 (sections 5.1, 5.2)."""
MODEL = CHAT
ALPHAS, EPSILONS = (0.1, 0.2), (0.05, 0.1, 0.3)  # figure 3; 0.5 and 0.8 are in figure 7, and in docs/results/ults.md
BEAMS, K_MAX = (1, 2, 3, 4, 5, 10, 20), (2, 3, 4, 5, 10, 20)  # section 5.2.2
REAL_BEAMS, REAL_K_MAX = (1, 2, 4, 8, 16, 32), (4, 20)  # of real models: fewer, and wider
TOKENS, NEW = 200, 20  # of Wikipedia, section 5.2
DEPTH = 40  # TL;DR's
# Section 5.2.2, the only numbers given: TL;DR, GPT-2, 40 tokens: (log-likelihood, nodes).
PAPER = {"ULTS, empirical prior, k_max 20": (-18.31, 137.90), "beam search, k 5": (-21.33, 196)}
OTHERS = 6  # questions, and functions, whose answers give the prior of answers that end
ANSWERS = "two questions", "two functions whose variable is to be renamed"
ERRATA = (
    """The paper's rule is *descendant*, one node per round, with Beta beliefs and as many children as k_max; finished
    leaves are excluded from selection and the stop test is strict (in its code, the search ends when a leaf is the
    favourite, whatever epsilon is). *flat, batch 8*, with 20 children, is this engine's default.""",
    """A Dirichlet prior of concentration 1e-4 is over the model's vocabulary (50,257 tokens for GPT-2, {vocabulary:,}
    here), so it is a different prior.""",
    """Nodes are not time: the paper evaluates one per pass, so the table has passes and milliseconds, too. The paper's
    runs keep no KV cache.""",
    "Texts have a fixed length: end-of-sequence is excluded and the rest renormalised, for beam search too.",
)


def run(models: Models) -> Findings:
    """Measure and report both figures."""
    toy = [row for alpha in ALPHAS for row in toy_rows(alpha, models.pick(100, 3), models.pick(EPSILONS, (0.1,)))]
    engine, demo = models.engine(), models.demo
    tokens, count = models.pick(16 if demo else TOKENS, 8), models.pick(16 if demo else 3, 2)
    depth = models.pick(DEPTH if demo else NEW, 4)
    prompts, what = draw_prompts(engine, count, tokens, models.seed), "drawn from the model"
    others, vectors = None, models.pick(1000 if demo else 200, 20)
    if not demo:
        chapters = [plain(engine, tokens, i) for i in range(count + -(-vectors // depth))]
        prompts, others, what = chapters[:count], chapters[count:], "of Python's documentation"
    prior = str(gather(engine, tokens, depth, models.seed + 1, models.scratch, vectors, prompts=others))
    beams, k_max = (BEAMS, K_MAX) if demo else (REAL_BEAMS, REAL_K_MAX)
    asked = searches(prior, models.pick(beams, (1, 3)), models.pick(k_max, (3,)))
    rows = side_by_side(engine, prompts, asked, depth)
    beside_beams(rows)
    ended = [] if demo else with_ends(engine, prior, models)
    body = "\n\n".join([
        f"Toy trees (figure 3), {models.pick(100, 3)} per alpha, no limit per level, one node per round. Cells give "
        "nodes / log-likelihood, and the nodes as a share of those that beam search needs for the same log-likelihood.",
        toy_table(toy),
        f"{models.name} (figure 5), {count} prompts of {tokens} tokens {what}, {depth} new tokens, "
        f"epsilon 0.1, empirical prior of {vectors} softmax vectors. *ms* is the median time from the first "
        "log-probabilities on, *CPU ms* the mean CPU time of all threads. The columns *of beam* show shares of what "
        "beam search (interpolated) takes for the same log-likelihood; \"-\" means that beam search does not reach it, "
        "or that one beam exceeds it.",
        model_table(rows),
        "The paper gives two points of its figure 5 in numbers (TL;DR, GPT-2, 40 new tokens). The table "
        "compares them with the nearest points here:",
        beside(rows),
        *ended_text(ended),
        bullets([line.format(vocabulary=engine.runner.vocab_size) for line in ERRATA]),
    ])  # fmt: skip
    result = {"toy": toy, "rows": rows, "ended": ended}
    return Findings(body, result, (12, 3.8), lambda figure: paint(figure, toy, rows))


def with_ends(engine: Engine, prior: str, models: Models) -> list[dict[str, Any]]:
    """Answers that end where the model ends them: questions, and edits of code."""
    few, depth = models.pick(2, 1), models.pick(40, 4)
    asked = [*chats(engine, few), *edits(engine, few)]
    others = [one.ids for one in (*chats(engine, OTHERS + few)[few:], *edits(engine, OTHERS + few)[few:])]
    folder = models.scratch / "ends"
    folder.mkdir()
    own = str(gather(engine, 0, depth, models.seed, folder, without=lambda search: search, prompts=others))
    beams, k_max = models.pick(REAL_BEAMS, (1, 3)), models.pick((4, 20, 40), (3,))
    searches: list[tuple[dict[str, Any], Search]] = [
        ({"search": "beam", "k": k}, Trie(beams=k, length_penalty=0.0)) for k in beams
    ]
    searches += [({"search": f"flat, batch {8 if k < 40 else 16}", "k": k},
                  ULTS(k_max=k, batch=8 if k < 40 else 16, prior=own)) for k in k_max]  # fmt: skip
    searches.append(({"search": "flat, batch 8, prior of documentation", "k": k_max[len(k_max) // 2]},
                     ULTS(k_max=k_max[len(k_max) // 2], prior=prior)))  # fmt: skip
    rows = side_by_side(engine, [one.ids for one in asked], searches, depth, eos_token_ids=asked[0].ends)
    beside_beams(rows)
    return rows


def ended_text(rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    return [
        f"With real ends: {', '.join(ANSWERS)}; at most {rows[0]['depth']} new tokens. An answer that ends is a "
        "hypothesis of beam search (length penalty 0, so that hypotheses of all lengths compare by log-likelihood) and "
        f"a leaf of ULTS. The prior of ULTS consists of softmax vectors of answers to {2 * OTHERS} other such "
        "requests, with ends.",
        model_table(rows),
    ]


# --- toy trees ---


def toy_rows(alpha: float, count: int, epsilons: Sequence[float]) -> list[dict[str, Any]]:
    """Measure beam search of 1 to 7 beams, and the paper's rules: flat, with the true prior."""
    trees = [ToyTree(seed, alpha) for seed in range(count)]
    beams = [[tree.beam_search(k) for tree in trees] for k in range(1, 8)]
    curve = [(fmean(nodes for _, nodes in found), fmean(value for value, _ in found)) for found in beams]
    rows = [{"alpha": alpha, "search": "beam", "nodes": n, "value": v, "of_beam": None} for n, v in curve]
    for fit in ("beta", "pools"):
        for epsilon in epsilons:
            search = ULTS(fit=fit, epsilon=epsilon, k_max=0, children=8, batch=1, prior="dirichlet", alpha=alpha)
            results = [tree.search(search) for tree in trees]
            nodes = fmean(result.stats["nodes_evaluated"] for result in results)
            value = fmean(result.outputs[0].logprob or 0.0 for result in results)
            beam = abscissa(curve, value)
            rows.append({"alpha": alpha, "search": f"ULTS, {fit}", "epsilon": epsilon, "nodes": nodes, "value": value,
                         "of_beam": nodes / beam if beam else None})  # fmt: skip
        progress(f"ults: toy trees, alpha {alpha}, {fit}")
    return rows


def toy_table(rows: Sequence[dict[str, Any]]) -> str:
    lines: dict[str, list[str]] = {}
    for _, group in grouped(rows, "alpha"):
        for i, row in enumerate(group):
            name = f"beam {i + 1}" if row["search"] == "beam" else f"{row['search']}, epsilon {row['epsilon']}"
            of_beam = f", {share(row['of_beam'])}" if row["search"] != "beam" else ""
            lines.setdefault(name, []).append(f"{row['nodes']:.2f} / {row['value']:.4f}{of_beam}")
    return table(["", *(f"alpha {a}" for a in ALPHAS)], [[name, *cells] for name, cells in lines.items()])


# --- a model ---


def gather(
    engine: Engine,
    prompt_tokens: int,
    depth: int,
    seed: int,
    folder: Path,
    vectors: int = 1000,
    without: Callable[[Search], Search] = WithoutEos,
    prompts: Sequence[list[int]] | None = None,
) -> Path:
    """Gather a prior of 1000 vectors, as in the paper, from other prompts; `without` wraps the search that does, by
    default so that no text ends."""
    found: list[Vectors] = []
    prompts = prompts or draw_prompts(engine, -(-vectors // depth), prompt_tokens, seed)
    for i, prompt in enumerate(prompts):
        engine.generate([prompt], without(Collect(found, 1, i)), max_new_tokens=depth)
    path = folder / f"prior-{depth}.safetensors"
    Vectors.cat(found).save(path)
    return path


def searches(prior: str, beams: Sequence[int], k_max: Sequence[int]) -> list[tuple[dict[str, Any], Search]]:
    """Beam search, the paper's ULTS with both priors, and this engine's default."""
    found: list[tuple[dict[str, Any], Search]] = [
        ({"search": "beam", "k": k}, WithoutEos(Trie(beams=k, length_penalty=0.0))) for k in beams
    ]
    for name, which in (("ULTS, Dirichlet 1e-4", "dirichlet"), ("ULTS, empirical", prior)):
        for k in k_max:
            search = ULTS(select="descendant", fit="beta", batch=1, k_max=k, children=k, prior=which, fixed_length=True)
            found.append(({"search": name, "k": k}, search))
    for k in k_max:
        found.append(({"search": "flat, batch 8", "k": k}, ULTS(k_max=k, prior=prior, fixed_length=True)))
    return found


def side_by_side(
    engine: Engine,
    prompts: Sequence[list[int]],
    searches: Sequence[tuple[dict[str, Any], Search]],
    depth: int,
    **options: Any,
) -> list[dict[str, Any]]:
    """Run searches in turn on every prompt, with options of `Request`; returns their rows with their figures."""

    def run(search: Search, i: int, depth: int = depth) -> tuple[float, SearchResult]:
        return after_prompt(engine, prompts[i], search, max_new_tokens=depth, **options)

    for _, search in searches:
        run(search, 0, min(depth, 4))  # beliefs are fitted once a process
    works = {i: partial(run, search) for i, (_, search) in enumerate(searches)}
    found = in_turn(works, len(prompts), what=f"depth {depth}: prompt")
    return [
        {"depth": depth, **row, **figures_of([result for _, result in found[i]]),
         "cpu_ms": fmean(seconds for seconds, _ in found[i]) * 1e3}
        for i, (row, _) in enumerate(searches)
    ]  # fmt: skip


def figures_of(results: Sequence[SearchResult]) -> dict[str, float]:
    """Means over prompts; milliseconds from the first log-probabilities on, their median."""
    values = [r.outputs[0].score or 0.0 for r in results]
    return {
        "value": fmean(values),
        "nodes": fmean(r.stats["nodes_evaluated"] for r in results),
        "passes": fmean(r.stats["forward_passes"] for r in results),
        "ms": median(r.stats["decode_seconds"] for r in results) * 1e3,
        "value_error": standard_error(values),
    }


def beside_beams(rows: Sequence[dict[str, Any]]) -> None:
    """Add to every row its nodes and milliseconds over those of beam search for the same log-likelihood."""
    beams = [row for row in rows if row["search"] == "beam"]
    for row in rows:
        k = abscissa([(r["k"], r["value"]) for r in beams], row["value"]) if row["search"] != "beam" else None
        for key in ("nodes", "ms", "cpu_ms"):
            row[f"{key}_of_beam"] = row[key] / ordinate([(r["k"], r[key]) for r in beams], k) if k else None


def model_table(rows: Sequence[dict[str, Any]]) -> str:
    """The searches on a model, a row each."""
    shown = [r | {key: share(r[key]) for key in ("nodes_of_beam", "ms_of_beam", "cpu_ms_of_beam")} for r in rows]
    return rows_table(shown, {
        "search": "{search}", "k": "{k}", "log-likelihood": "{value:.3f}", "s.e.": "{value_error:.3f}",
        "nodes": "{nodes:.1f}", "nodes of beam": "{nodes_of_beam}", "passes": "{passes:.1f}", "ms": "{ms:.1f}",
        "ms of beam": "{ms_of_beam}", "CPU ms": "{cpu_ms:.0f}", "CPU of beam": "{cpu_ms_of_beam}"})  # fmt: skip


def beside(rows: Sequence[dict[str, Any]]) -> str:
    """The paper's two points, and ours: ULTS of the largest k_max, and beam search at the next greater cost."""
    lines = [[f"paper: {name}", f"{value:.2f}", f"{nodes:.1f}"] for name, (value, nodes) in PAPER.items()]
    beams = sorted((r for r in rows if r["search"] == "beam"), key=lambda r: r["nodes"])
    for (name,), group in grouped([r for r in rows if r["search"] != "beam"], "search"):
        best = max(group, key=lambda r: r["k"])
        dearer = next((r for r in beams if r["nodes"] >= best["nodes"]), beams[-1])
        lines.append([f"here: {name}, k_max {best['k']}", f"{best['value']:.2f}", f"{best['nodes']:.1f}"])
        lines.append([f"here: beam search, k {dearer['k']}", f"{dearer['value']:.2f}", f"{dearer['nodes']:.1f}"])
    return table(["", "log-likelihood", "nodes"], lines)


def paint(figure: Any, toy: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> None:
    """Draw both figures side by side."""
    panels = [(f"toy trees, alpha {alpha}", group) for (alpha,), group in grouped(toy, "alpha")]
    for axes, (title, group) in zip(figure.subplots(1, len(panels) + 1), [*panels, ("model", rows)], strict=True):
        plot_curves(axes, group, title, log=title == "model")
        axes.legend(fontsize=7, loc="lower right")
    figure.axes[0].set_ylabel("mean log-likelihood")

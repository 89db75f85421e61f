"""ULTS without a model: on toy trees, and its own time."""

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.later import later
from tools.bench.curves import abscissa, grouped, plot_curves, save_figure, share
from tools.bench.figures import need_figures
from tools.bench.measure import in_turn, progress, spread, standard_error
from tools.bench.report import finish, rows_table, stamp, table

with later():
    import torch

    from engine.cache.pool import PagePool
    from engine.cache.tree import TokenTree
    from engine.contract import Evaluate, SearchResult, Task
    from search import ULTS
    from search.ults.prior import Vectors
    from tools.bench.searches import run_alone
    from tools.toy_trees import SHAPE, ToyTree

ALPHAS, EPSILONS = (0.1, 0.2, 0.5, 0.8), (0.05, 0.1, 0.3)
LIMIT_MS = 0.3  # target


def run_toy(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Mean nodes and log-likelihood of every rule beside beam search."""
    if args.save is not None:
        need_figures()
    made, rows, curves, optima = stamp(argv), [], {}, {}
    for alpha in ALPHAS:
        trees = [ToyTree(seed, alpha) for seed in range(args.trees)]
        optima[alpha] = statistics.fmean(tree.optimum() for tree in trees)
        curves[alpha] = beam_curve(trees)
        for select, fit, epsilon in itertools.product(("flat", "descendant", "posterior"), ("beta", "pools"), EPSILONS):
            rows.append(toy_row(trees, curves[alpha], alpha, select, fit, epsilon))
        progress(f"alpha {alpha}: done")
    groups = grouped(rows, "select", "fit", "epsilon")
    figure = save_figure("ults-toy", (15, 3.8), lambda f: draw_toy(f, rows, curves, optima), args.save)
    body = "\n\n".join([
        f"{args.trees} trees per alpha, branching 8, depth 5, no limit per level, one node per round; mean nodes / "
        "mean log-likelihood.",
        table(["", *(f"alpha {a}" for a in ALPHAS)], [
            ["optimum", *(f"{optima[a]:.4f}" for a in ALPHAS)],
            *[[f"beam {k + 1}", *(f"{curves[a][k][0]:.0f} / {curves[a][k][1]:.4f}" for a in ALPHAS)] for k in range(7)],
            *[[f"{select} {fit} eps {eps}", *(f"{r['nodes']:.2f} / {r['value']:.4f}" for r in group)]
              for (select, fit, eps), group in groups],
        ]),
        "Optima found, and nodes as a share of what beam search (interpolated) needs for the same log-likelihood:",
        table(["", *(f"alpha {a}" for a in ALPHAS)], [
            [" ".join([select, fit, f"eps {eps}"]), *(f"{r['found']:.3f}, {share(r['of_beam'])}" for r in group)]
            for (select, fit, eps), group in groups
        ]),
        figure,
    ])  # fmt: skip
    finish("ults-toy", made, body, {"optima": optima, "beam": curves, "results": rows}, args.save)
    return {"results": rows}


def beam_curve(trees: Sequence[ToyTree]) -> list[tuple[float, float]]:
    """Mean nodes and log-likelihood of beam search with 1 to 7 beams."""
    found = [[tree.beam_search(beams) for tree in trees] for beams in range(1, 8)]
    return [(statistics.fmean(n for _, n in f), statistics.fmean(v for v, _ in f)) for f in found]


def toy_row(
    trees: Sequence[ToyTree], curve: Sequence[tuple[float, float]], alpha: float, select: str, fit: str, epsilon: float
) -> dict[str, Any]:
    """ULTS on toy trees drawn from its prior, against beam search's curve."""
    search = ULTS(select=select, fit=fit, epsilon=epsilon, k_max=0, children=8, batch=1, prior="dirichlet", alpha=alpha)
    row = {"alpha": alpha, "select": select, "fit": fit, "epsilon": epsilon, **measure_toy(search, trees)}
    beam = abscissa(curve, row["value"])
    return row | {"of_beam": row["nodes"] / beam if beam else None}


def measure_toy(search: ULTS, trees: Sequence[ToyTree]) -> dict[str, float]:
    results = [tree.search(search) for tree in trees]
    nodes = [r.stats["nodes_evaluated"] for r in results]
    values = [r.outputs[0].logprob or 0.0 for r in results]
    found = [value > tree.optimum() - 1e-5 for value, tree in zip(values, trees, strict=True)]
    return {
        "nodes": statistics.fmean(nodes),
        "nodes_error": standard_error(nodes),
        "value": statistics.fmean(values),
        "found": statistics.fmean(found),
    }


def draw_toy(figure: Any, rows: list[dict[str, Any]], curves: dict[float, list], optima: dict[float, float]) -> None:
    for axis, alpha in zip(figure.subplots(1, len(ALPHAS)), ALPHAS, strict=True):
        beams = [{"search": "beam", "nodes": nodes, "value": value} for nodes, value in curves[alpha]]
        ours = [r | {"search": f"{r['select']}, {r['fit']}"} for r in rows if r["alpha"] == alpha]
        plot_curves(axis, beams + ours, "nodes", "nodes evaluated", f"alpha {alpha}")
        axis.axhline(optima[alpha], color="grey", lw=0.8, ls=":", label="optimum")
    figure.axes[0].set_ylabel("mean log-likelihood")
    figure.axes[-1].legend(fontsize=7)


def run_overhead(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Time between an answer and the next Evaluate, per evaluated node; a table replaces the model."""
    made, rows, works = stamp(argv), [], {}
    generator = torch.Generator().manual_seed(0)
    rows_RV = torch.log_softmax(torch.randn(256, args.vocab, generator=generator) * 4, -1)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        prior = Path(folder) / "prior.safetensors"
        Vectors.of(rows_RV).save(prior)
        batches: list[int] = args.batches
        for select, batch in itertools.product(("flat", "descendant", "posterior"), batches):
            search = ULTS(
                select=select, k_max=args.k_max, batch=batch, samples=args.samples, prior=str(prior), epsilon=0.0
            )
            works[select, batch] = lambda _, search=search: think(search, args.depth, rows_RV)
        for (select, batch), found in in_turn(works, args.runs, warm_up=True).items():
            stats = found[0][1].stats
            ms = spread([seconds / stats["nodes_evaluated"] * 1e3 for seconds, _ in found])
            rows.append({"select": select, "batch": batch, "nodes": stats["nodes_evaluated"],
                         "rounds": stats["rounds"], "ms": ms.pop("median"), **ms})  # fmt: skip
    body = "\n\n".join([
        f"Search alone, a table of softmax vectors over {args.vocab} tokens for a model: {args.samples} samples, k_max "
        f"{args.k_max}, 20 children, depth {args.depth}, medians of {args.runs} runs; target: at most {LIMIT_MS} ms.",
        rows_table(rows, {"rule": "{select}", "batch": "{batch}", "nodes": "{nodes}", "rounds": "{rounds}",
                          "ms per node": "{ms:.3f}", "least-most": "{min:.3f}-{max:.3f}"}),
    ])  # fmt: skip
    finish("ults-overhead", made, body, {"results": rows}, args.save)
    return {"results": rows}


def think(search: ULTS, depth: int, rows_RV: torch.Tensor) -> tuple[float, SearchResult]:
    """Run a search over rows chosen by path; returns its seconds, without those of the answers, and its result."""
    tree = TokenTree(PagePool(SHAPE, 1 << 14, 1), [0])

    def rows_of(request: Evaluate) -> tuple[torch.Tensor, None]:
        return rows_RV[[hash(tuple(tree.path(node))) % len(rows_RV) for node in request.nodes]], None

    return run_alone(search, Task(tree, depth, frozenset(), rows_RV.shape[1]), rows_of)

"""Counterfactual results of speculative best-of-N: `python -m tools.sbon_counterfactual COMMAND`.

From one set of complete utterances with the rewards of their beginnings, every decision token tau and rejection rate
alpha at once, by bootstrap (the paper's section 6.2, its token rate corrected: an accepted utterance counts whole, a
rejected one up to tau). `collect` draws the utterances with the engine, `analyse` computes tables and figures,
`gaussian` does the same for rewards from a Gaussian model with a known correlation.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

from engine import Engine, Request
from engine.app import cli
from engine.contract import SearchGenerator, SearchResult, Task
from engine.demo import with_defaults
from engine.errors import CoppiceError, UsageError
from search.sbon import BoN, Race
from search.sbon.rates import accepted, kendall
from tools.bench.figures import draw
from tools.bench.flags import add_numbers
from tools.bench.measure import progress
from tools.bench.report import add_save_flag, finish, stamp, table
from tools.bench.texts import story_requests

ALPHAS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
GAUSSIAN_ALPHAS, RHOS = (0.5, 0.8, 0.9, 0.95), (0.0, 0.5, 0.7, 0.9, 1.0)
GROUP = 100  # utterances of one search


# --- collecting ---


@dataclass(frozen=True)
class Collect(BoN):
    """Best-of-N that also judges every beginning of a multiple of `every` tokens; its stats hold the rewards."""

    every: int = 16

    def run(self, task: Task) -> SearchGenerator:
        race = Race(task, self, self.n)
        partial: list[list[float]] = [[] for _ in range(self.n)]
        while race.drawn.live:
            yield from race.drawn.extend()
            yield race.report()
            if race.drawn.live and race.length % self.every == 0:
                yield from race.judge()
                for i in race.drawn.live:
                    partial[i].append(race.rewards[i])
        result: SearchResult = yield from race.end()
        lengths = [len(tokens) for tokens in race.drawn.tokens]
        rows = zip(lengths, partial, (race.rewards[i] for i in range(self.n)), strict=True)
        result.stats["collected"] = [{"length": n, "partial": p, "final": r} for n, p, r in rows]
        return result


def collect(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Draw utterances to prompts and write them, a line per prompt."""
    model, _, reward = with_defaults(args.model, None, args.reward)
    engine = Engine.load(model, reward=reward, threads=args.threads, kv_memory=args.kv_memory)
    with open(args.output, "w", encoding="utf-8") as sink:
        for number, record in enumerate(prompts(args)):
            measured = {"id": record.get("id", number), **draw_utterances(engine, record, args)}
            sink.write(json.dumps(measured) + "\n")
            sink.flush()
            progress(f"prompt {number + 1}: {args.n} utterances")


def draw_utterances(engine: Engine, record: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Utterances to a prompt, with the rewards of their beginnings: what `Utterances.of` reads."""
    utterances: list[dict[str, Any]] = []
    while len(utterances) < args.n:
        search = Collect(n=min(GROUP, args.n - len(utterances)), every=args.every, temperature=args.temperature,
                         seed=args.seed + len(utterances) // GROUP)  # fmt: skip
        request = as_request(record, engine, search, max_new_tokens=args.max_new_tokens)
        for _, outcome in engine.serve([request]):
            if isinstance(outcome, CoppiceError):
                raise outcome
            utterances += outcome.stats["collected"]
    return {"every": args.every, "utterances": utterances}


def prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The first prompts of the file, or requests for stories of the demo's generator; other ones for each seed."""
    if args.input:
        with open(args.input, encoding="utf-8") as source:
            return [json.loads(line) for line in source if line.strip()][: args.prompts]
    talks = (talk for talk in story_requests(f"sbon:{args.seed}") if len(talk.turns) <= 3)
    return [{"messages": talk.messages()[:-1]} for talk in itertools.islice(talks, args.prompts)]


def add_prompt_flags(parser: argparse.ArgumentParser, count: int) -> None:
    """The flags that `prompts` reads, except the seed."""
    text = "JSON Lines with messages or a prompt each (fresh ones for the demo)"
    parser.add_argument("--input", metavar="FILE", help=text)
    parser.add_argument("--prompts", type=int, default=count, help="how many (%(default)s)")


def as_request(record: dict[str, Any], engine: Engine, search: Any, **options: Any) -> Request:
    """The request of a line of `engine.batch` input: messages or a prompt."""
    messages = record.get("messages")
    if messages is None:
        return Request(record["prompt"], search, **options)
    if engine.template is None:
        raise UsageError("the input has messages, the model no chat template")
    prompt = engine.tokenizer.encode_rendered(engine.template.render(messages))
    return Request(prompt, search, messages=messages, **options)


# --- computing ---


@dataclass(frozen=True)
class Utterances:
    """M complete utterances of one prompt, and P rewards of their beginnings, every so many tokens."""

    length_M: Tensor
    partial_MP: Tensor
    final_M: Tensor
    every: int

    @staticmethod
    def of(record: dict[str, Any]) -> "Utterances":
        rows = record["utterances"]
        length_M = torch.tensor([row["length"] for row in rows], dtype=torch.float64)
        final_M = torch.tensor([row["final"] for row in rows], dtype=torch.float64)
        partial_MP = final_M.unsqueeze(1).repeat(1, max(1, max(len(row["partial"]) for row in rows)))
        for values, row in zip(partial_MP, rows, strict=True):
            values[: len(row["partial"])] = torch.tensor(row["partial"], dtype=torch.float64)
        return Utterances(length_M, partial_MP, final_M, record["every"])


def counterfactual(
    partial_BN: Tensor, final_BN: Tensor, length_BN: Tensor, tau: float, alpha: float, keep_finished: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Evaluate B runs of speculative best-of-N over N utterances each.

    Args:
        partial_BN, final_BN: rewards at the decision token (the final one where an utterance ended before) and at the
            end.
        length_BN: tokens.
        tau, alpha, keep_finished: as of `search.SBoN`.

    Returns:
        corrected token rate, normalised score (best-of-N's best is 100, its worst 0) and whether the best was kept [B].
    """
    B, N = partial_BN.shape
    order_BN = partial_BN.argsort(dim=1, descending=True, stable=True)
    accepted_BN = torch.zeros(B, N, dtype=torch.bool).scatter_(1, order_BN[:, : accepted(N, alpha)], True)
    drawn_BN = torch.where(accepted_BN, length_BN, length_BN.clamp(max=tau))
    candidates_BN = accepted_BN | (length_BN <= tau) if keep_finished else accepted_BN
    ours_B = final_BN.masked_fill(~candidates_BN, -math.inf).amax(1)
    return drawn_BN.sum(1) / length_BN.sum(1), normalised(ours_B, final_BN), ours_B == final_BN.amax(1)


def normalised(reward_B: Tensor, final_BN: Tensor) -> Tensor:
    """Scores [B] of rewards: 100 for the best of N final rewards, 0 for the worst."""
    best_B, worst_B = final_BN.amax(1), final_BN.amin(1)
    return torch.where(best_B > worst_B, 100 * (1 - (best_B - reward_B) / (best_B - worst_B)), 100.0)


def fewer(final_BN: Tensor, m: int) -> Tensor:
    """The normalised score of best-of-M against best-of-N, over the first M of the N [B]."""
    return normalised(final_BN[:, :m].amax(1), final_BN)


def pearson(x: Tensor, y: Tensor) -> float:
    """Their correlation; nan where one is constant."""
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


def bootstrap(
    prompts: Sequence[Utterances], n: int, trials: int, keep_finished: bool, seed: int
) -> list[dict[str, Any]]:
    """A row for each tau and alpha, averaged over the prompts and `trials` draws of n utterances of each."""
    generator = torch.Generator().manual_seed(seed)
    sums: dict[tuple[int, float], list[tuple[float, float, float]]] = {}
    for prompt in prompts:
        drawn_BN = torch.randint(len(prompt.length_M), (trials, n), generator=generator)
        length_BN, final_BN = prompt.length_M[drawn_BN], prompt.final_M[drawn_BN]
        for p in range(prompt.partial_MP.shape[1]):
            tau, partial_BN = (p + 1) * prompt.every, prompt.partial_MP[:, p][drawn_BN]
            for alpha in ALPHAS:
                measured = counterfactual(partial_BN, final_BN, length_BN, tau, alpha, keep_finished)
                sums.setdefault((tau, alpha), []).append(tuple(float(x.double().mean()) for x in measured))  # type: ignore[arg-type]
    rows = []
    for (tau, alpha), values in sorted(sums.items()):
        values += [(1.0, 100.0, 1.0)] * (len(prompts) - len(values))  # all utterances of the others ended before
        rate, score, kept = (math.fsum(column) / len(values) for column in zip(*values, strict=True))
        rows.append({"tau": tau, "alpha": alpha, "token_rate": rate, "speedup": 1 / rate, "score": score, "kept": kept})
    return rows


def correlations(prompts: Sequence[Utterances]) -> list[dict[str, float]]:
    """Correlations of partial and final rewards by tau: mean and deviation over the prompts."""
    rows = []
    for p in range(max(prompt.partial_MP.shape[1] for prompt in prompts)):
        pairs = []
        for prompt in prompts:
            if p < prompt.partial_MP.shape[1]:
                x, y = prompt.partial_MP[:, p], prompt.final_M
                pairs.append((pearson(x, y), kendall(x.tolist(), y.tolist())))
        pairs = [pair for pair in pairs if not math.isnan(pair[0])]
        if pairs:
            row: dict[str, float] = {"tau": (p + 1) * prompts[0].every, "prompts": len(pairs)}
            for name, values in zip(("pearson", "kendall"), zip(*pairs, strict=True), strict=True):
                row |= {name: fmean(values), f"{name}_std": pstdev(values)}
            rows.append(row)
    return rows


def gaussian_table(n: int, trials: int, seed: int) -> Iterator[dict[str, float]]:
    """Chance of keeping the best and mean score for jointly Gaussian partial and final rewards, by rho and alpha."""
    generator = torch.Generator().manual_seed(seed)
    for rho in RHOS:
        z = torch.randn(2, trials, n, generator=generator, dtype=torch.float64)
        partial, length = rho * z[0] + math.sqrt(1 - rho**2) * z[1], torch.full((trials, n), 2.0)
        for alpha in GAUSSIAN_ALPHAS:
            _, score, kept = counterfactual(partial, z[0], length, 1, alpha, False)
            row = {"rho": rho, "alpha": alpha}
            for name, values in (("kept", kept.double()), ("score", score)):
                row |= {name: float(values.mean()), f"{name}_se": float(values.std() / trials**0.5)}
            yield row


def gaussian_fewer(n: int, m: int, trials: int, seed: int) -> float:
    """The mean score of best-of-M against best-of-N for Gaussian rewards."""
    z = torch.randn(trials, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return float(fewer(z, m).mean())


# --- reports ---


def analyse(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """A table, a JSON line, and the figure."""
    with open(args.file, encoding="utf-8") as source:
        prompts = [Utterances.of(json.loads(line)) for line in source if line.strip()]
    if not prompts or len({prompt.every for prompt in prompts}) > 1:
        raise UsageError("expected at least one line, all with rewards at the same tokens", where=args.file)
    rows = bootstrap(prompts, args.n, args.trials, not args.faithful, args.seed)
    related = correlations(prompts)
    lesser = {m: fmean(best_of(p, args, m) for p in prompts) for m in (1, args.n // 4, args.n // 2)}
    mode = "the paper's rule" if args.faithful else "finished utterances kept"
    each = fmean(len(p.length_M) for p in prompts)
    body = [
        f"N = {args.n}, {len(prompts)} prompts of {each:.0f} utterances, {args.trials} bootstrap trials each, {mode}. "
        "Score / token rate by decision token and rejection rate, and the correlation of partial and final rewards:",
        grid(rows, related),
        "Best-of-M instead: " + ", ".join(f"M = {m}: score {score:.1f}" for m, score in lesser.items() if m) + ".",
    ]
    for best in sorted((r for r in rows if r["score"] >= args.score), key=lambda r: r["token_rate"])[:1]:
        body.append(f"Fewest tokens at a score of {args.score:g} or more: tau {best['tau']}, alpha {best['alpha']}, "
                    f"token rate {best['token_rate']:.3f}, score {best['score']:.1f}.")  # fmt: skip
    if args.figure:
        draw(args.figure, (11, 8), lambda figure: figure_of(figure, prompts, rows, related))
        body.append(f"![score and token rate, partial and final rewards]({PurePath(args.figure).name})")
    result = {"n": args.n, "prompts": len(prompts), "trials": args.trials, "keep_finished": not args.faithful,
              "rows": rows, "correlations": related, "best_of": lesser}  # fmt: skip
    made = stamp(argv, "tools.sbon_counterfactual")
    finish("sbon-counterfactual", made, "\n\n".join(body), result, args.save)


def best_of(prompt: Utterances, args: argparse.Namespace, m: int) -> float:
    """The mean score of best-of-M over bootstrap trials."""
    generator = torch.Generator().manual_seed(args.seed)
    drawn_BN = torch.randint(len(prompt.final_M), (args.trials, args.n), generator=generator)
    return float(fewer(prompt.final_M[drawn_BN], m).mean())


def grid(rows: Sequence[dict[str, Any]], related: Sequence[dict[str, float]]) -> str:
    """A line for each decision token."""
    found = {(row["tau"], row["alpha"]): f"{row['score']:.1f} / {row['token_rate']:.2f}" for row in rows}
    pairs = {r["tau"]: [f"{r[name]:.2f} ± {r[name + '_std']:.2f}" for name in ("pearson", "kendall")] for r in related}
    taus = sorted({row["tau"] for row in rows})
    lines = [[tau, *(found[tau, alpha] for alpha in ALPHAS), *pairs.get(tau, ["", ""])] for tau in taus]
    return table(["tau", *(f"alpha {alpha}" for alpha in ALPHAS), "Pearson", "Kendall"], lines)


def gaussian(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """The Gaussian table, a JSON line, and the figure."""
    rows = list(gaussian_table(args.n, args.trials, args.seed))
    lesser = gaussian_fewer(args.n, args.n // 4, args.trials, args.seed)
    cells = {(row["rho"], row["alpha"]): f"{row['kept']:.3f} / {row['score']:.1f}" for row in rows}
    body = [[rho, *(cells[rho, a] for a in GAUSSIAN_ALPHAS)] for rho in RHOS]
    print(f"N = {args.n}, {args.trials} trials: chance of keeping the best / mean score, by correlation and alpha\n")
    print(table(["rho", *map(str, GAUSSIAN_ALPHAS)], body))
    print(f"\nbest-of-{args.n // 4}: score {lesser:.1f}")
    if args.figure:
        draw(args.figure, (8.5, 3.6), lambda figure: gaussian_figure(figure, rows, lesser, args.n))
    print(json.dumps({"n": args.n, "trials": args.trials, "rows": rows, "fewer": {args.n // 4: lesser}}))


def figure_of(
    figure: Any, prompts: Sequence[Utterances], rows: list[dict[str, Any]], related: list[dict[str, float]]
) -> None:
    """Heat maps of score and token rate (the paper's figure 3), partial against final rewards (2), correlations (5)."""
    ((scores, rates), (scatter, lines)) = figure.subplots(2, 2)
    taus = sorted({row["tau"] for row in rows})
    for axes, name, form in ((scores, "score", ".1f"), (rates, "token_rate", ".2f")):
        values = [[next(r[name] for r in rows if (r["tau"], r["alpha"]) == (t, a)) for t in taus] for a in ALPHAS]
        axes.imshow(values, aspect="auto", origin="lower", cmap="viridis")
        axes.set(title=name.replace("_", " "), xlabel="decision token", ylabel="rejection rate",
                 xticks=range(len(taus)), xticklabels=taus, yticks=range(len(ALPHAS)), yticklabels=ALPHAS)  # fmt: skip
        low, high = min(map(min, values)), max(map(max, values))
        for y, line in enumerate(values):
            for x, value in enumerate(line):
                color = "white" if value < (low + high) / 2 else "black"
                axes.text(x, y, f"{value:{form}}", ha="center", va="center", fontsize=7, color=color)
    middle = taus[min(len(taus) - 1, 1)]
    prompt = max(prompts, key=lambda p: float((p.length_M > middle).sum()))
    x, y = prompt.partial_MP[:, min(middle // prompt.every, prompt.partial_MP.shape[1]) - 1], prompt.final_M
    best = int(y.argmax())
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum().clamp(min=1e-12))
    ends = torch.stack([x.min(), x.max()])
    scatter.scatter(x.tolist(), y.tolist(), s=6, alpha=0.5)
    scatter.plot(ends.tolist(), (y.mean() + slope * (ends - x.mean())).tolist(), color="tab:blue")
    scatter.scatter([float(x[best])], [float(y[best])], color="tab:red", label="best")
    scatter.axvline(float(x[best]), color="tab:red", ls="--", lw=1)
    scatter.set(title=f"one prompt, {len(y)} utterances", xlabel=f"reward at {middle} tokens", ylabel="final reward")
    scatter.legend()
    for name in ("pearson", "kendall"):
        xs, ys, spread = ([r[key] for r in related] for key in ("tau", name, f"{name}_std"))
        lines.errorbar(xs, ys, spread, marker="o", ms=3, capsize=2, label=name)
    lines.set(title="correlation of partial and final rewards", xlabel="tokens")
    lines.legend()


def gaussian_figure(figure: Any, rows: list[dict[str, float]], lesser: float, n: int) -> None:
    """Chance of keeping the best and score, over the correlation."""
    for axes, name, title in zip(
        figure.subplots(1, 2), ("kept", "score"), ("chance of keeping the best", "mean score"), strict=True
    ):
        for alpha in GAUSSIAN_ALPHAS:
            mine = [row for row in rows if row["alpha"] == alpha]
            axes.errorbar([r["rho"] for r in mine], [r[name] for r in mine], [2 * r[f"{name}_se"] for r in mine],
                          marker="o", ms=3, capsize=2, label=f"alpha {alpha}")  # fmt: skip
        axes.set(title=f"{title}, N = {n}", xlabel="correlation of partial and final rewards")
    axes.axhline(lesser, color="grey", ls="--", lw=1, label=f"best-of-{n // 4}")
    axes.legend(fontsize=8)


# --- the command line ---


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.sbon_counterfactual", description=__doc__)
    parser.add_argument("-v", "--verbose", action="store_true", help="show where an error comes from")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("collect", help="draw utterances with the rewards of their beginnings")
    one.add_argument("--model", metavar="DIR", help="(the bundled demo)")
    one.add_argument("--reward", metavar="DIR", help="(the demo's)")
    add_prompt_flags(one, 50)
    one.add_argument("--output", required=True, type=cli.output_file, metavar="FILE")
    add_numbers(one, n=(1000, "utterances of each prompt"), every=(16, "tokens between two rewards"),
                max_new_tokens=256, temperature=1.0)  # fmt: skip
    one.add_argument("--threads", type=int)
    one.add_argument("--kv-memory", type=cli.parse_size, metavar="SIZE")
    one.set_defaults(run=collect)
    two = commands.add_parser("analyse", help="tables and figures of what was collected")
    two.add_argument("file", metavar="FILE")
    two.add_argument("--score", type=float, default=98, help="the least that is wanted (%(default)s)")
    add_save_flag(two, "sbon")
    two.add_argument("--faithful", action="store_true", help="the paper's rule: finished utterances may be rejected")
    two.set_defaults(run=analyse)
    three = commands.add_parser("gaussian", help="the same for Gaussian rewards of known correlation")
    three.set_defaults(run=gaussian)
    for command, trials in ((two, 200), (three, 20000)):
        add_numbers(command, n=(100, "utterances of a run"), trials=trials)
        command.add_argument("--figure", metavar="FILE", help="draw it too (svg, png, pdf)")
    for command in (one, two, three):
        add_numbers(command, seed=0)
    words = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(words)

    def work() -> int:
        args.run(args, words)
        return 0

    return cli.run(work, args.verbose)


if __name__ == "__main__":
    sys.exit(main())

"""The cost of a smaller KV cache: divergence from the float32 cache, and how often the best token is the same."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.demo import demo_folder, is_demo
from models.later import later
from tools.bench.checkpoints import MODELS_HELP, defaults
from tools.bench.flags import add_numbers, add_run_flags
from tools.bench.measure import progress
from tools.bench.report import finish, rows_table, stamp

with later():
    from unittest import mock

    import torch
    from torch import Tensor

    from engine import Engine
    from kernels.kv_fp8 import DTYPE as FP8
    from kernels.kv_kinds import floats, stored
    from kernels.kv_write import kv_write
    from kernels.stack import one_by_one
    from search import Sample

LEGEND = """The texts are samples of the model itself (temperature 1), and every position is compared. *KL* is the
divergence from the log-probabilities with the float32 cache, in nats; *same best token* is the share of positions where
both have the same most probable token. Weights and arithmetic are float32 throughout; the bfloat16 and fp8 caches round
keys and values when they are written. *bytes* is the size of one token's keys and values in all layers."""


COLUMNS = {
    "positions": "{positions}", "KL, mean": "{mean:.2e}", "KL, 99%": "{high:.2e}", "KL, largest": "{most:.2e}",
    "same best token": "{same:.2%}",
}  # fmt: skip


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("cache", help="what a KV cache of 8 bits costs", description=__doc__)
    parser.add_argument("--model", nargs="+", metavar="MODEL", default=[], help=MODELS_HELP)
    add_numbers(parser, texts=(16, "samples of each model"), new_tokens=(240, "tokens of each sample"), seed=0)
    add_run_flags(parser, "benchmarks", None, run)


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    made, rows = stamp(argv), []
    for folder in [demo_folder(), *defaults(args.model)]:
        rows += measure(folder, "demo" if is_demo(folder) else folder.resolve().name, args)
    columns = {"model": "{model}", "cache": "{cache}", "bytes": "{bytes:,}"} | COLUMNS
    finish("cache", made, f"{rows_table(rows, columns)}\n\n{LEGEND}", result := {"results": rows}, args.save)
    return result


def measure(folder: Path, name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each smaller cache of a model."""
    plain, rows = load(folder, args), []
    texts = sampled(plain, args)
    progress(f"{name}: {sum(map(len, texts))} tokens")
    exact = [*each_logits(plain, texts)]
    for cache, dtype in (("bfloat16", torch.bfloat16), ("int8", torch.int8), ("fp8", FP8)):
        if cache == "int8":
            found = divergence(exact, each_logits(load(folder, args, kv_dtype=cache), texts), texts)
        else:
            with rounded_cache(plain, dtype):
                found = divergence(exact, each_logits(plain, texts), texts)
        rows.append({"model": name, "cache": cache, "bytes": plain.shape.kv_bytes_per_token(dtype), **found})
    return rows


def load(folder: Path, args: argparse.Namespace, **options: Any) -> Engine:
    """Load a model that computes in float32."""
    return Engine.load(folder, dtype="float32", device="cpu", kv_memory="64M", threads=args.threads, **options)


def sampled(engine: Engine, args: argparse.Namespace) -> list[list[int]]:
    """Draw samples of a model."""
    draw = Sample(seed=args.seed, num_return_sequences=args.texts)
    limit = min(args.new_tokens, (engine.shape.max_positions or args.new_tokens + 1) - 1)
    [found] = engine.generate([[engine.start_token]], draw, max_new_tokens=limit, ignore_eos=True)
    return [[engine.start_token, *output.token_ids] for output in found.outputs]


def each_logits(engine: Engine, texts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """The logits [N, V] after every token of each text."""
    return (engine.logits(text) for text in texts)


def divergence(exact: Iterable[Tensor], found: Iterable[Tensor], texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Compare log-probabilities with exact ones, both given by the logits of each text, in float64."""
    divergences, same, nats = list[Tensor](), list[Tensor](), list[Tensor]()
    for exact_NV, found_NV, text in zip(exact, found, texts, strict=True):
        logp_NV, logq_NV = (torch.log_softmax(x_NV.double(), -1) for x_NV in (exact_NV, found_NV))
        divergences.append((logp_NV.exp() * (logp_NV - logq_NV)).sum(1).clamp(min=0))
        same.append(logp_NV.argmax(1) == logq_NV.argmax(1))
        nats.append(-logq_NV[:-1].gather(1, torch.tensor(text[1:])[:, None]))
    all_N = torch.cat(divergences)
    return {
        "positions": len(all_N), "mean": all_N.mean().item(), "high": all_N.quantile(0.99).item(),
        "most": all_N.max().item(), "same": torch.cat(same).double().mean().item(),
        "nats": torch.cat(nats).mean().item(),
    }  # fmt: skip


@contextmanager
def rounded_cache(engine: Engine, dtype: torch.dtype) -> Iterator[None]:
    """Context in which a float32 cache holds the numbers that a cache of another dtype would hold."""

    def rounded(x_TGD: Tensor) -> Tensor:
        return floats(stored(x_TGD, dtype), torch.float32) if dtype.itemsize == 1 else x_TGD.to(dtype).float()

    def write(k_GSD: Tensor, v_GSD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor, *, impl: str) -> None:
        kv_write(k_GSD, v_GSD, rounded(k_TGD), rounded(v_TGD), slots_T, impl=impl)

    with one_by_one(engine.runner.model), mock.patch("models.running.kv_write", write):
        yield

"""The cost of a smaller KV cache: divergence from the float32 cache, and how often the best token is the same."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from engine import Engine
from engine.demo import demo_folder, is_demo
from kernels.kv_fp8 import DTYPE as FP8
from kernels.kv_kinds import floats, stored
from kernels.kv_write import kv_write
from kernels.stack import one_by_one
from search import Sample
from tools.bench.flags import add_numbers, add_run_flags
from tools.bench.measure import progress
from tools.bench.report import finish, rows_table, stamp

LEGEND = """The texts are samples of the model itself (temperature 1); every position is compared. *KL*: divergence from
the log-probabilities of the float32 cache, in nats; *same best token*: both have the same most probable one. Weights
and arithmetic are float32 throughout; keys and values of the bfloat16 and fp8 caches are rounded as they are written.
*bytes*: of one token's keys and values in all layers."""


COLUMNS = {
    "positions": "{positions}", "KL, mean": "{mean:.2e}", "KL, 99%": "{high:.2e}", "KL, largest": "{most:.2e}",
    "same best token": "{same:.2%}",
}  # fmt: skip


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("cache", help="what a KV cache of 8 bits costs", description=__doc__)
    parser.add_argument("--model", nargs="+", metavar="DIR", default=[], help="checkpoint folders besides the demo")
    add_numbers(parser, texts=(16, "samples of each model"), new_tokens=(240, "of each"), seed=0)
    add_run_flags(parser, "benchmarks", None, run)


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    made, rows = stamp(argv), []
    for folder in (demo_folder(), *map(Path, args.model)):
        rows += measure(folder, "demo" if is_demo(folder) else folder.resolve().name, args)
    columns = {"model": "{model}", "cache": "{cache}", "bytes": "{bytes:,}"} | COLUMNS
    finish("cache", made, f"{rows_table(rows, columns)}\n\n{LEGEND}", result := {"results": rows}, args.save)
    return result


def measure(folder: Path, name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each smaller cache of a model."""
    plain, texts, exact = sampled(folder, name, args)
    rows = []
    for cache, dtype in (("bfloat16", torch.bfloat16), ("int8", torch.int8), ("fp8", FP8)):
        if cache == "int8":
            logp_NV = log_probabilities(load(folder, args, kv_dtype=cache), texts)
        else:
            with rounded_cache(plain, dtype):
                logp_NV = log_probabilities(plain, texts)
        size = plain.shape.kv_bytes_per_token(dtype)
        rows.append({"model": name, "cache": cache, "bytes": size, **divergence(exact, logp_NV)})
    return rows


def load(folder: Path, args: argparse.Namespace, **options: Any) -> Engine:
    """A model that computes in float32."""
    return Engine.load(folder, dtype="float32", device="cpu", kv_memory="64M", threads=args.threads, **options)


def sampled(folder: Path, name: str, args: argparse.Namespace) -> tuple[Engine, list[list[int]], Tensor]:
    """A model in float32, samples of it, and its log-probabilities after each of their tokens."""
    plain = load(folder, args)
    draw = Sample(seed=args.seed, num_return_sequences=args.texts)
    limit = min(args.new_tokens, (plain.shape.max_positions or args.new_tokens + 1) - 1)
    found = plain.generate([[plain.start_token]], draw, max_new_tokens=limit, ignore_eos=True)[0]
    texts = [[plain.start_token, *output.token_ids] for output in found.outputs]
    progress(f"{name}: {sum(map(len, texts))} tokens")
    return plain, texts, log_probabilities(plain, texts)


def divergence(exact_NV: Tensor, logp_NV: Tensor) -> dict[str, Any]:
    """The divergence of log-probabilities from exact ones."""
    divergence_N = (exact_NV.exp() * (exact_NV - logp_NV)).sum(1).clamp(min=0)
    return {
        "positions": len(exact_NV), "mean": divergence_N.mean().item(), "high": divergence_N.quantile(0.99).item(),
        "most": divergence_N.max().item(), "same": (exact_NV.argmax(1) == logp_NV.argmax(1)).double().mean().item(),
    }  # fmt: skip


def log_probabilities(engine: Engine, texts: Sequence[Sequence[int]]) -> Tensor:
    """After every token of every text: float64 [N, V]."""
    return torch.cat([torch.log_softmax(engine.logits(text).double(), -1) for text in texts])


@contextmanager
def rounded_cache(engine: Engine, dtype: torch.dtype) -> Iterator[None]:
    """Within it, a float32 cache holds the numbers that a cache of another dtype would hold."""

    def rounded(x_TGD: Tensor) -> Tensor:
        return floats(stored(x_TGD, dtype), torch.float32) if dtype.itemsize == 1 else x_TGD.to(dtype).float()

    def write(k_GSD: Tensor, v_GSD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor, *, impl: str) -> None:
        kv_write(k_GSD, v_GSD, rounded(k_TGD), rounded(v_TGD), slots_T, impl=impl)

    with one_by_one(engine.runner.model), mock.patch("models.running.kv_write", write):
        yield

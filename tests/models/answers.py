"""Answers of golden models that hold for several families: of quantised weights, of Triton."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine
from engine.cache.pool import PagePool
from engine.load.loading import LoadedModel
from engine.step.graphs import GraphRunner
from search import Trie
from tests.marks import needs_cpp, needs_int8
from tests.models.copies import GOLDEN

TEXT = [(7 * i * i + 3 * i) % 101 + 3 for i in range(70)]
QUANTS = pytest.mark.parametrize(
    "quant", [pytest.param("int8", marks=needs_int8), pytest.param("int4", marks=needs_cpp)]
)


def load(folder: Path, **options: Any) -> Engine:
    """An engine in float32 with little memory."""
    return Engine.load(folder, **{"dtype": "float32", "kv_memory": 1 << 24} | options)


def check_quantised(variant: str, quant: str, most: float) -> None:
    """Logits differ from those of floats, but by less than this share of their norm."""
    exact, found = (load(GOLDEN / variant, quant=quant).logits(TEXT) for quant in ("none", quant))
    assert 0 < (found - exact).norm() / exact.norm() < most


def check_triton(variant: str) -> None:
    """Beams of Triton's kernels are those of the CPU."""
    plain = load(GOLDEN / variant)
    pool = PagePool(plain.shape, 40, 16, torch.float32)
    runner = GraphRunner(plain.runner.model, pool, plain.runner.vocab_size, impl="triton", record=lambda run: run)
    engine = Engine(LoadedModel(runner, plain.shape, None, eos_token_ids=plain.eos_token_ids))
    options = {"max_new_tokens": 2, "ignore_eos": True, "logprobs": 1}
    (ours, theirs) = (each.generate([TEXT[:5]], Trie(beams=2), **options)[0].outputs for each in (engine, plain))
    for found, wanted in zip(ours, theirs, strict=True):
        assert found.token_ids == wanted.token_ids
        assert found.token_logprobs == pytest.approx(wanted.token_logprobs, abs=1e-4)

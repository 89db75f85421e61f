"""Streams of AltUp and learned residuals, against arithmetic in float64."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from engine import Engine
from models.running import Registers, run
from tests.marks import IMPLS

GOLDEN = Path(__file__).parents[1] / "golden/gemma3n"


def load(variant):
    model = Engine.load(GOLDEN / variant, dtype="float32", kv_memory=1 << 22).runner.model
    stored = load_file(GOLDEN / variant / "model.safetensors")
    return model, {name.removesuffix(".weight"): x.double() for name, x in stored.items()}


def rms(x, eps=0.0):
    return (x.square().mean(-1, keepdim=True) + eps).sqrt()


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_other_streams_have_the_magnitude_of_the_first():
    model, stored = load("plain")
    x = drawn(5, 24)
    found = model.streams.split(x)
    made = [x.double() @ stored[f"model.altup_projections.{i}"].T for i in range(3)]
    expected = torch.stack([x.double(), *(y * rms(x.double()) / rms(y) for y in made)], 1)
    assert torch.allclose(found.double(), expected, atol=1e-5)
    streams = drawn(5, 4, 24, seed=2)
    first, *others = streams.double().unbind(1)
    made = [y @ stored[f"model.altup_unembed_projections.{i}"].T for i, y in enumerate(others)]
    expected = (first + sum(y * rms(first) / rms(y) for y in made)) / 4
    assert torch.allclose(model.streams.join(streams).double(), expected, atol=1e-5)


def test_rows_of_zeros_stay():
    model, _ = load("plain")
    assert not model.streams.split(torch.zeros(2, 24)).any() and not model.streams.join(torch.zeros(2, 4, 24)).any()


def test_prediction_and_correction():
    for variant, active in (("plain", 0), ("others", 1)):
        model, stored = load(variant)
        updates, name = model.layers[1].streams, "model.layers.1.altup."
        streams, changed = drawn(3, model.config.streams.count, 24), drawn(3, 24, seed=2)

        def weights(x, matrix, name=name, stored=stored):
            normed = x / rms(x, 1e-6) * stored[f"{name}router_norm"] / 24
            return (normed @ stored[f"{name}modality_router"].T).tanh() @ stored[f"{name}{matrix}"].T

        before, count = streams.double(), streams.shape[1]
        by = weights(before[:, active], "prediction_coefs").view(3, count, count)
        predicted = before + by @ before
        by = 1 + weights(changed.double(), "correction_coefs")
        innovation = changed.double() - predicted[:, active]
        corrected = predicted + by.unsqueeze(2) * innovation.unsqueeze(1)
        for impl in IMPLS[1:]:
            layout: Any = SimpleNamespace(rows_impl=impl)
            registers = Registers(streams[:, active], model.config, (), None, layout)  # type: ignore[arg-type]
            registers["streams"] = streams
            run([*updates.predict()], registers)
            assert torch.allclose(registers["stream"].double(), predicted[:, active], atol=1e-5)
            registers["stream"] = changed
            run([*updates.correct()], registers)
            assert torch.allclose(registers["streams"].double(), corrected, atol=1e-5)
            factors = stored[f"{name}correct_output_scale"] if variant == "plain" else 1.0
            assert torch.allclose(registers["read"].double(), corrected[:, active] * factors, atol=1e-5)


def test_a_learned_residual():
    model, stored = load("plain")
    name, stream, read = "model.layers.1.laurel.", drawn(3, 24), drawn(3, 24, seed=2)
    made = read.double() @ stored[f"{name}linear_left"].T @ stored[f"{name}linear_right"].T
    expected = stream + read + made / rms(made, 1e-6) * stored[f"{name}post_laurel_norm"]
    layout: Any = SimpleNamespace(rows_impl="torch")
    registers = Registers(stream, model.config, (), None, layout)  # type: ignore[arg-type]
    registers["read"] = read
    run([*model.layers[1].laurel.calls("read")], registers)
    assert torch.allclose(registers["stream"].double(), expected, atol=1e-5)

"""Inputs of layers besides the stream, against arithmetic in float64."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from engine import Engine
from tests.marks import IMPLS

GOLDEN = Path(__file__).parents[1] / "golden/gemma4/inputs"
TOKENS_T = torch.tensor([5, 9, 103])


def normed(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def test_a_row_of_the_table_and_what_a_matrix_makes_of_the_embedding():
    model = Engine.load(GOLDEN, dtype="float32", kv_memory=1 << 22).runner.model
    stored = {name.removesuffix(".weight"): x.double() for name, x in load_file(GOLDEN / "model.safetensors").items()}
    x_TE = torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
    made_TLP = (x_TE.double() @ stored["model.per_layer_model_projection"].T / 24**0.5).unflatten(1, (6, 6))
    rows_TF = stored["model.embed_tokens_per_layer"][TOKENS_T] * 6**0.5
    expected_TF = (normed(made_TLP, stored["model.per_layer_projection_norm"]).flatten(1) + rows_TF) / 2**0.5
    for impl in IMPLS[1:]:
        found_TF = model.inputs(TOKENS_T, x_TE, impl)
        assert torch.allclose(found_TF.double(), expected_TF, atol=1e-5)


def test_factors_are_rounded_to_the_dtype():
    """Transformers rounds its scaled embeddings alike."""
    model = Engine.load(GOLDEN, dtype="bfloat16", kv_memory=1 << 22).runner.model
    assert model.inputs.scale == 2.453125 and model.embedding_scale == 4.90625

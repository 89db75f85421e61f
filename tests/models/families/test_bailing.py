"""Ling 2: draft heads, and experts that are chosen without a bias."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine import Engine

GOLDEN = Path(__file__).parents[2] / "golden" / "published" / "ling"
BIAS = "mlp.gate.expert_bias"


def logits(folder: Path) -> torch.Tensor:
    engine = Engine.load(folder, dtype="float32", kv_memory="4M")
    return engine.logits([3, 5, 7, 11])


def changed(folder: Path, change) -> Path:
    shutil.copytree(GOLDEN, folder)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)
    return folder


def test_draft_heads_are_left_out(tmp_path):
    more = {"model.layers.20.eh_proj.weight": torch.ones(4, 8), "model.layers.20.enorm.weight": torch.ones(4)}
    assert logits(changed(tmp_path / "with", lambda tensors: tensors | more)).equal(logits(GOLDEN))


def test_without_a_bias_experts_are_chosen_as_with_one_of_zeros(tmp_path):
    zeros = changed(tmp_path / "zeros", lambda all: {n: x * 0 if n.endswith(BIAS) else x for n, x in all.items()})
    absent = changed(tmp_path / "absent", lambda all: {n: x for n, x in all.items() if not n.endswith(BIAS)})
    assert BIAS not in json.dumps([*load_file(absent / "model.safetensors")])
    assert logits(absent).equal(logits(zeros)) and not logits(zeros).equal(logits(GOLDEN))

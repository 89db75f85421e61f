"""Poolings that checkpoints ask for: files of sentence-transformers, metadata of GGUF files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine import Engine, UsageError
from engine.load.pooling import Pooling
from models.checkpoint.headers import Checkpoint

FOLDER = Path("tests/golden/llama/plain")
KIND = "sentence_transformers.models."
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": f"{KIND}Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{KIND}Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{KIND}Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": f"{KIND}Dense"}
MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def flags(*modes):
    return {"word_embedding_dimension": 32, "include_prompt": True} | {f"pooling_mode_{m}": m in modes for m in MODES}


def with_files(root, modules, config):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FOLDER / name, root / name)
    (root / "modules.json").write_text(modules if isinstance(modules, str) else json.dumps(modules))
    if config is not None:
        (root / "1_Pooling").mkdir()
        (root / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return root


@pytest.mark.parametrize(
    ("modules", "config", "pooling"),
    [
        ([TRANSFORMER, POOLING, NORMALIZE], flags("lasttoken"), Pooling("last", True)),
        ([TRANSFORMER, POOLING], flags("lasttoken"), Pooling("last", False)),
        ([TRANSFORMER, POOLING], flags("mean_tokens"), Pooling("mean", False)),
        ([TRANSFORMER, POOLING, NORMALIZE], {"pooling_mode": "lasttoken"}, Pooling("last", True)),
        ([TRANSFORMER, POOLING, NORMALIZE], {"pooling_mode": "mean"}, Pooling("mean", True)),
    ],
)
def test_pooling_of_a_folder(tmp_path, modules, config, pooling):
    engine = Engine.load(with_files(tmp_path, modules, config), dtype="float32")
    assert engine.model.pooling == pooling
    own, asked = engine.embed([[1, 2, 3]]), {"pooling": pooling.pooling, "normalize": pooling.normalize}
    assert own.equal(engine.embed([[1, 2, 3]], **asked))


@pytest.mark.parametrize(
    ("modules", "config", "why"),
    [
        ([TRANSFORMER, POOLING], flags("cls_token"), "the pooling cls_token"),
        ([TRANSFORMER, POOLING], flags("cls_token", "mean_tokens"), "cls_token and mean_tokens"),
        ([TRANSFORMER, POOLING], flags(), "the pooling none"),
        ([TRANSFORMER, POOLING, DENSE], flags("mean_tokens"), "a module 'Dense'"),
        ([TRANSFORMER], None, "no module Pooling"),
        ([TRANSFORMER, POOLING | {"path": ".."}], None, "outside of the checkpoint"),
        ([TRANSFORMER, POOLING | {"path": "../else"}], None, "outside of the checkpoint"),
        ([TRANSFORMER, POOLING], None, "cannot be read"),
        ({"modules": []}, None, "no list"),
        ("{", None, "cannot be read"),
        ("[" * 50_000, None, "cannot be read"),
    ],
)
def test_what_is_not_there_needs_a_name(tmp_path, modules, config, why):
    """The model loads: it may generate."""
    engine = Engine.load(with_files(tmp_path, modules, config), dtype="float32")
    assert why in engine.model.pooling.why_not
    with pytest.raises(UsageError, match="embeddings of this checkpoint: "):
        engine.embed([[1, 2]])
    assert engine.embed([[1, 2]], pooling="mean").shape == (1, engine.shape.output_width)


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [(None, Pooling()), (0, Pooling()), (1, Pooling("mean")), (3, Pooling("last")), (2, None), ("last", None)],
)
def test_pooling_of_a_gguf_file(kind, pooling):
    metadata = {"general.architecture": "qwen3"} | ({} if kind is None else {"qwen3.pooling_type": kind})
    checkpoint = replace(Checkpoint.open(FOLDER), gguf=SimpleNamespace(metadata=metadata))
    found = Pooling.of(checkpoint)
    assert found == pooling if pooling is not None else "llama.cpp's pooling" in found.why_not

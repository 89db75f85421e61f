"""Checkpoints whose config.json says nothing of their quantisation: what says it instead."""

import json
import shutil
from pathlib import Path

import pytest

from models.checkpoint.headers import Checkpoint
from models.checkpoint.quantized_configs import with_quantization
from models.errors import CheckpointError

GOLDEN = Path(__file__).parents[2] / "golden" / "quantized"


def moved(tmp_path, variant):
    """A copy of a folder without the field, and the field."""
    folder = tmp_path / variant
    shutil.copytree(GOLDEN / variant, folder)
    config = json.loads((folder / "config.json").read_text())
    given = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    return folder, given, config


def test_a_file_of_auto_gptq(tmp_path):
    folder, given, _ = moved(tmp_path, "gptq_v2")
    assert Checkpoint.open(folder).quantization is None
    del given["quant_method"]
    (folder / "quantize_config.json").write_text(json.dumps(given))
    assert Checkpoint.open(folder).quantization == Checkpoint.open(GOLDEN / "gptq_v2").quantization


def test_a_file_of_modelopt(tmp_path):
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    found = with_quantization(tmp_path, {"a": 1})
    expected = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    assert found == {"a": 1, "quantization_config": expected}
    (tmp_path / "hf_quant_config.json").write_text("[")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        with_quantization(tmp_path, {})


def test_the_older_name_of_the_field(tmp_path):
    folder, given, config = moved(tmp_path, "pack4_group")
    (folder / "config.json").write_text(json.dumps(config | {"compression_config": given}))
    assert Checkpoint.open(folder).quantization is not None


def test_the_field_itself_wins(tmp_path):
    (tmp_path / "quantize_config.json").write_text("{}")
    config = {"quantization_config": {"quant_method": "awq"}, "compression_config": {}}
    assert with_quantization(tmp_path, config) == config


@pytest.mark.parametrize("field", [None, {"group_size": 64, "bits": 4}, {"quant_method": "awq"}])
def test_the_field_of_mlx(tmp_path, field):
    """It may be there alone or twice; a method of another package wins."""
    own = {"group_size": 64, "bits": 4, "lm_head": {"bits": 8}}
    found = with_quantization(tmp_path, {"quantization": own, "quantization_config": field})
    method = field and field.get("quant_method")
    assert found["quantization_config"] == (field if method else own | {"quant_method": "mlx"})


def test_a_field_of_mlx_that_is_no_object(tmp_path):
    with pytest.raises(CheckpointError, match="quantization: expected an object") as caught:
        with_quantization(tmp_path, {"quantization": "4 bits"})
    assert "config.json" in caught.value.where

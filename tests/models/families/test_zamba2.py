"""Zamba2: whose names blocks have in a file, blocks that are not shared, what is kept and packed, adapters, Triton."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine
from kernels.layout import CacheKind, ScanKind
from models.checkpoint.headers import Checkpoint
from models.checkpoint.sizes import measure
from models.errors import CheckpointError
from tests.marks import needs_interpreter
from tests.models.answers import QUANTS, TEXT, check_quantised, check_triton, load
from tests.models.copies import GOLDEN, changed

PLAIN, FIRST, LATER = (
    GOLDEN / "zamba2/plain",
    "model.layers.1.shared_transformer.",
    "model.layers.2.shared_transformer.",
)


def moved(tensors):
    """A block under the names of its last use, and the matrices of each use under those of the other."""
    return {name.replace(FIRST, LATER): x for name, x in tensors.items()}


def repeated(tensors):
    """A block under the names of both uses, as in files of blocks that are not shared."""
    return tensors | {name.replace(FIRST, LATER): x.clone() for name, x in tensors.items() if name.startswith(FIRST)}


def scattered(tensors):
    """The matrices of a use under the names of the other."""
    return {name.replace(FIRST, LATER) if "adapter_list.0" in name else name: x for name, x in tensors.items()}


@pytest.mark.parametrize("change", [moved, repeated, scattered])
def test_names_that_blocks_have_in_files(change, tmp_path):
    assert any(name.startswith(FIRST) for name in load_file(PLAIN / "model.safetensors"))
    folder = changed(tmp_path, "zamba2/plain", {}, change)
    assert load(folder).logits(TEXT).equal(load(PLAIN).logits(TEXT))


def test_blocks_that_differ_are_not_shared(tmp_path):
    """The second layer reads a block of its own if the file has one; as in transformers, whatever ties the config
    has."""

    def apart(tensors):
        return {name: x * 2 if name.startswith(LATER) else x for name, x in repeated(tensors).items()}

    found = load(changed(tmp_path, "zamba2/plain", {}, apart)).logits(TEXT)
    assert (found - load(PLAIN).logits(TEXT)).abs().max() > 0.1


def test_a_missing_block_is_named(tmp_path):
    def without(tensors):
        return {name: x for name, x in tensors.items() if not name.startswith(FIRST) or "adapter" in name}

    with pytest.raises(CheckpointError, match=r"missing model\.layers\.1\.shared_transformer\.self_attn\.q_proj"):
        load(changed(tmp_path, "zamba2/plain", {}, without))


def test_a_block_is_packed_once(tmp_path):
    """Its uses have the same matrices, which count once; keys and values are those of each use."""
    engine = load(PLAIN)
    first, second = (layer.block for layer in engine.runner.model.layers[1:])
    assert first.block is second.block
    for use, table in ((first, 1), (second, 2)):
        assert {call.table for call in use.calls() if call.code in ("write", "attend")} == {table}
    scan = ScanKind(2, 8, 9, 6, 4)
    assert engine.shape.kept == (None, *[CacheKind(4, 12)] * 2, scan, scan, scan)
    twice = changed(tmp_path, "zamba2/plain", {}, repeated)
    sizes = [measure(Checkpoint.open(each), torch.float32, torch.device("cpu")).matrices for each in (PLAIN, twice)]
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")
    tensors = load_file(PLAIN / "model.safetensors")
    matrices = [x for name, x in tensors.items() if name.endswith(tuple(f"{each}.weight" for each in names))]
    assert len(matrices) == 6 and sizes[1] - sizes[0] >= 2 * sum(x.numel() for x in matrices)


@QUANTS
def test_quantised_weights_are_near(quant):
    check_quantised("zamba2/defaults", quant, 0.1 if quant == "int8" else 0.5)


@needs_interpreter
@pytest.mark.parametrize("variant", ["zamba2/plain", "zamba2/bias"])
def test_answers_of_triton(variant):
    check_triton(variant)


def test_a_long_context(tmp_path):
    """`use_long_context` takes the place of the length in the config, of which dynamic rotations depend."""
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, "rope_theta": None}
    short = load(changed(tmp_path / "short", "zamba2/plain", dynamic | {"max_position_embeddings": 32}))
    long = load(changed(tmp_path / "long", "zamba2/plain",
                        dynamic | {"max_position_embeddings": 32, "use_long_context": True}))  # fmt: skip
    assert long.shape.max_positions is None or long.shape.max_positions >= 16384
    assert long.logits(TEXT).equal(load(PLAIN).logits(TEXT)) and not short.logits(TEXT).equal(long.logits(TEXT))


def test_adapters_of_blocks_are_refused(tmp_path):
    """The modules of uses differ in PEFT, which trains an adapter for each of them."""
    begin = f"base_model.model.{FIRST}self_attn.q_proj.lora_"
    save_file({f"{begin}A.weight": torch.ones(2, 48), f"{begin}B.weight": torch.ones(48, 2)},
              tmp_path / "adapter_model.safetensors")  # fmt: skip
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"q_proj: adapters of blocks that layers share are not supported"):
        Engine.load(PLAIN, dtype="float32", kv_memory=1 << 24, adapters=[tmp_path])

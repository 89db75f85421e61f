"""Checkpoints that were packed ahead: the same numbers, mapped, and checked like any file that others may have made."""

import json
import shutil
from pathlib import Path

import pytest

from engine import CheckpointError, Engine, UsageError
from kernels import cpp
from models.checkpoint import weights
from models.checkpoint.headers import Checkpoint
from models.checkpoint.listing import WEIGHTS
from models.checkpoint.tensor_files import write_tensors
from models.formats.packed import KEY, Packing
from tools import pack

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = [
    "llama/gqa",
    "llama/tied",
    "llama/sharded",
    "opt/post_norm",
    "gpt2/plain",
    "phi/plain",
    "phi3/plain",
    "qwen3/bias",
    "qwen3_5/bias",
    "bailing_hybrid/plain",  # of which `view` changes the names of tensors
]

pytestmark = pytest.mark.skipif(bool(cpp.why_not()), reason=f"no C++ kernels: {cpp.why_not()}")


def logits(folder, **options):
    return Engine.load(folder, kv_memory=1 << 22, **options).logits(list(range(3, 30)))


@pytest.mark.parametrize("quant", ["none", "int8", "int4", "int4-zeros-64"])
@pytest.mark.parametrize("variant", FAMILIES)
def test_the_same_numbers(variant, quant, tmp_path):
    pack.pack(GOLDEN / variant, tmp_path / "packed", quant=quant)
    for dtype in ("float32", "bfloat16") if quant != "none" else ("float32",):
        assert logits(tmp_path / "packed", dtype=dtype).equal(logits(GOLDEN / variant, dtype=dtype, quant=quant))


def test_without_kernels_matrices_are_unpacked(tmp_path, monkeypatch):
    pack.pack(GOLDEN / "llama/gqa", tmp_path / "packed")
    monkeypatch.setattr(weights, "has_kernels", lambda *_: False)
    assert logits(tmp_path / "packed", dtype="float32").equal(logits(GOLDEN / "llama/gqa", dtype="float32"))


def test_the_format_of_the_folder_needs_no_flag(tmp_path):
    pack.pack(GOLDEN / "llama/gqa", tmp_path / "eight", quant="int8")
    pack.pack(GOLDEN / "llama/gqa", tmp_path / "floats")
    assert "int8 weights" in Engine.load(tmp_path / "eight", kv_memory=1 << 22).capabilities.precision
    with pytest.raises(UsageError, match="expected none, got int8"):
        Engine.load(tmp_path / "floats", quant="int8")


def test_matrices_stay_where_the_file_is_mapped(tmp_path):
    pack.pack(GOLDEN / "llama/gqa", tmp_path / "packed")
    engine = Engine.load(tmp_path / "packed", kv_memory=1 << 22)
    panels = engine.runner.model.layers[0].attention.qkv.packed.panels
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    ranges = [[int(end, 16) for end in line[0].split("-")] for line in mapped]
    assert any(first <= panels.data_ptr() < last for first, last in ranges)
    assert panels.data_ptr() % 64 == 0


def test_other_files_come_along(tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "llama/gqa", source)
    (source / "LICENSE").write_text("free")
    assert pack.main([str(source), "--output", str(tmp_path / "packed")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] == (tmp_path / "packed" / WEIGHTS).stat().st_size and report["matrices"] > 4
    assert (tmp_path / "packed/LICENSE").read_text() == "free"
    assert pack.main([str(source), "--output", str(tmp_path / "packed")]) == 2
    assert "there already" in capsys.readouterr().err
    assert pack.main([str(tmp_path / "packed"), "--output", str(tmp_path / "again")]) == 3
    assert "packed already" in capsys.readouterr().err and not (tmp_path / "again").exists()


def altered(folder, change):
    """The packed checkpoint with another header or other tensors."""
    checkpoint = Checkpoint.open(folder)
    names = [name for name, info in checkpoint.tensors.items() if not info.packed]
    tensors = {name: tensor.clone() for name, tensor in checkpoint.read(names).items()}
    metadata = checkpoint.packing.metadata()
    found = json.loads(metadata[KEY])
    change(tensors, found)
    with (folder / WEIGHTS).open("wb") as file:
        write_tensors(file, tensors, {**metadata, KEY: json.dumps(found)})


def cut(tensors, _):
    name = next(name for name in tensors if name.startswith("packed:"))
    tensors[name] = tensors[name][:-1].clone()


def regroup(tensors, found):
    key = next(key for key in found["sizes"] if "+" in key)
    del found["sizes"][key]


CHANGES = {
    "another version": (lambda _, found: found.update(version=1), "another version"),
    "no sizes": (lambda _, found: found.pop("sizes"), "malformed"),
    "a dtype that is none": (lambda _, found: found["matrices"].update(x=[[1], "int3"]), "a dtype of floats"),
    "panels that are cut": (cut, "packed matrix"),
    "sizes that do not fit": (
        lambda _, found: found["sizes"].update({key: [9, 9, "", 0, 0, False] for key in found["sizes"]}),
        "packed matrix",
    ),
    "outputs and width exchanged": (
        lambda _, found: [size.__setitem__(slice(2), size[1::-1]) for size in found["sizes"].values()],
        "packed matrix .*: expected .* outputs of width",
    ),
    "a size of texts": (
        lambda _, found: found["sizes"].update({key: ["9"] * 6 for key in found["sizes"]}),
        "the size of",
    ),
    "a kind that nobody knows": (
        lambda _, found: found["sizes"].update({key: [9, 9, "int3", 8, 0, False] for key in found["sizes"]}),
        "expected a kind out of",
    ),
    "a shape below zero": (lambda _, found: found["matrices"].update(x=[[-1], "float32"]), "expected a shape"),
    "a format that nobody knows": (lambda _, found: found.update(quant="int3"), "which this version does not know"),
    "panels that are not there": (
        lambda tensors, _: tensors.pop(next(name for name in tensors if name.startswith("packed:"))),
        "its panels are not in the file",
    ),
    "other groups": (regroup, "was packed with other matrices"),
    "another shape": (
        lambda _, found: [shape.append(1) for shape, _ in found["matrices"].values()],
        "do not fit the config",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_files_that_are_refused(case, tmp_path):
    change, message = CHANGES[case]
    pack.pack(GOLDEN / "llama/gqa", tmp_path / "packed")
    altered(tmp_path / "packed", lambda *_: None)
    logits(tmp_path / "packed")
    altered(tmp_path / "packed", change)
    with pytest.raises(CheckpointError, match=message) as error:
        logits(tmp_path / "packed")
    assert "python -m tools.pack" in error.value.remedy and str(tmp_path / "packed") in error.value.where


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "1" * 5000], ids=["nested", "cut", "digits"])
def test_a_list_that_is_no_json(text):
    with pytest.raises(ValueError, match="malformed"):
        Packing.parse({KEY: text})


def test_a_file_that_is_cut_short_is_packed_again(tmp_path):
    pack.pack(GOLDEN / "llama/gqa", tmp_path / "packed")
    path = tmp_path / "packed" / WEIGHTS
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="not a valid safetensors file") as error:
        logits(tmp_path / "packed")
    assert "python -m tools.pack" in error.value.remedy and error.value.where == str(path)


def test_a_gguf_file_of_floats(tmp_path):
    from tests.models.gguf.files import File, gguf

    path = File(GOLDEN / "llama/gqa", gguf.GGMLQuantizationType.BF16).write(tmp_path / "m.gguf")
    pack.pack(path, tmp_path / "out")
    ours, theirs = (Engine.load(each, kv_memory=1 << 22) for each in (tmp_path / "out", path))
    assert ours.logits([3, 5, 7]).equal(theirs.logits([3, 5, 7])) and not ours.tokenizer.difference(theirs.tokenizer)

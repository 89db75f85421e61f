"""GGUF files that are damaged, divided, or in need of what is not supported: errors name what, before data is read."""

import errno
import os
import struct

import numpy as np
import pytest

from engine import CheckpointError, Engine
from models.checkpoint.headers import Checkpoint
from models.folders import check_there
from models.gguf.reader import GGUF, WIDE_Q2_0
from models.gguf.reader import TYPES as READ
from tests.models.gguf.files import APART, GOLDEN, WIDE, File, gguf, random

TYPES = gguf.GGMLQuantizationType


def load(file, folder):
    """Load the tokenizer and the model of a file."""
    return Engine.load(file.write(folder / "file.gguf"), kv_memory=1 << 22)


def test_sizes_of_blocks_are_those_of_the_package():
    sizes = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {(kind, theirs) for kind, theirs in sizes.items() if kind < APART} <= READ.items()
    assert sizes[APART + 42] == WIDE_Q2_0


@pytest.mark.parametrize("format", ["Q2_0", "Q2_0_G128"])
def test_two_forms_have_one_number(format, tmp_path):
    """The space between tensors tells the blocks of 64 of ggml from those of 128 of the first files."""
    file = File(random(tmp_path / "source", "llama/gqa", **WIDE), TYPES[format], {"blk.1.ffn_up.weight": TYPES.Q8_0})
    file.tensors["output.weight"] = file.tensors.pop("output.weight")  # the last
    file.types["output.weight"] = file.types.pop("output.weight")
    found = GGUF.open(path := file.write(tmp_path / "file.gguf")).tensors
    assert {entry.format for entry in found.values()} == {format, "Q8_0", "F32"}
    with path.open("r+b") as cut:
        cut.truncate(path.stat().st_size - 64)
    with pytest.raises(CheckpointError, match="do not lie in a file of"):
        GGUF.open(path)


@pytest.mark.parametrize("key, value, what", [
    ("tokenizer.ggml.pre", "chameleon", "'chameleon' is a pre-tokenizer that is not supported"),
    ("tokenizer.ggml.model", "t5", "tokenizers of the kind 't5'"),
    ("tokenizer.ggml.merges", ["a q̃"], "merges: 'a q̃' does not fit the vocabulary"),
    ("tokenizer.ggml.token_type", [1, 2, 3], "token_type: expected 104 entries, got 3"),
    ("general.architecture", "opt", "'opt' is not supported"),
    ("llama.logit_scale", 0.5, "llama.logit_scale: expected nothing"),
    ("llama.expert_count", 8, "llama.expert_count: expected experts in all layers"),
    ("llama.attention.head_count_kv", [1, 2], "one number for all layers"),
    ("llama.rope.dimension_count", 4, "rope.dimension_count: expected the size of a head, 8, got 4"),
    ("llama.rope.scaling.type", "longrope", "rope.scaling.type"),
    ("llama.attention.head_count_kv", 2, r"layers.0.self_attn.k_proj.weight in .*: expected \[16, 32\]"),
    ("llama.block_count", 3, "missing model.layers.2.input_layernorm.weight"),
    ("llama.block_count", 1, "unknown model.layers.1.input_layernorm.weight"),
    ("split.count", 2, r"one of several \(2\), and its name does not say which"),
    ("general.type", "adapter", "an adapter"),
])  # fmt: skip
def test_what_is_not_supported_is_named(key, value, what, tmp_path):
    file = File(GOLDEN / "llama/plain")
    file.keys[key] = value
    if key == "general.architecture":
        file.arch = file.keys.pop(key)
    with pytest.raises(CheckpointError, match=what):
        load(file, tmp_path)


def test_a_vocabulary_alone_is_no_model(tmp_path):
    file = File(GOLDEN / "llama/plain")
    file.tensors.clear()
    with pytest.raises(CheckpointError, match=r"the file holds no tensors\n.*\nIt may be a vocabulary alone"):
        load(file, tmp_path)


def test_an_original_length_that_has_no_logarithm(tmp_path):
    file = File(GOLDEN / "phi3/longrope")
    file.keys["phi3.rope.scaling.original_context_length"] = 1
    with pytest.raises(CheckpointError, match=r"original_context_length: expected more than 1, got 1"):
        load(file, tmp_path)


def test_a_format_that_is_not_read_is_named_with_its_tensor(tmp_path):
    source = random(tmp_path / "source", "llama/gqa", **WIDE)
    file = File(source)
    file.tensors["blk.0.ffn_up.weight"] = np.zeros((512, 256 // 32 * 40), np.uint8)  # the package cannot make them
    file.types["blk.0.ffn_up.weight"] = TYPES.Q8_1
    with pytest.raises(CheckpointError, match=r"blk.0.ffn_up.weight has the block format Q8_1.*\n.*\nsupported: F64"):
        load(file, tmp_path)


@pytest.mark.parametrize(("name", "values", "what"), [
    ("blk.0.ffn_up.scale", [1.0, 2.0], r"blk.0.ffn_up.scale.*expected a float32 for each matrix, got F32 of \[2\]"),
    ("blk.0.ffn_up.scale", [float("nan")], "the scale of a tensor is not finite"),
    ("blk.0.attn_norm.scale", [1.0], "unknown blk.0.attn_norm.scale"),
])  # fmt: skip
def test_scales_of_matrices_that_do_not_fit(name, values, what, tmp_path):
    file = File(random(tmp_path / "source", "llama/gqa", **WIDE), TYPES.NVFP4)
    file.add(name, np.array(values, np.float32))
    with pytest.raises(CheckpointError, match=what):
        load(file, tmp_path)


def test_scales_of_halves_of_a_matrix(tmp_path):
    """Granite 4 has one matrix of both; files have two."""
    file = File(random(tmp_path / "source", "granite/scans_groups", **WIDE), TYPES.NVFP4)
    file.add("blk.0.ffn_up.scale", np.ones(1, np.float32))
    with pytest.raises(CheckpointError, match=r"input_linear.weight is two matrices in the file, with scales"):
        load(file, tmp_path)


def test_scales_that_are_no_numbers(tmp_path):
    file = File(random(tmp_path / "source", "llama/gqa", **WIDE), TYPES.Q8_0)
    file.tensors["blk.1.ffn_up.weight"][3, 1] = 0x7C  # infinity
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.up_proj.weight: scales are not finite"):
        load(file, tmp_path)


def test_tensors_that_overlap(tmp_path):
    path = File(GOLDEN / "llama/plain").write(tmp_path / "file.gguf")
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.1.ffn_down.weight") + len(b"blk.1.ffn_down.weight") + 4 + 2 * 8 + 4
    data[at : at + 8] = struct.pack("<Q", struct.unpack_from("<Q", data, at)[0] - 32)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="overlaps another one"):
        Checkpoint.open(path)


def test_damaged_files(tmp_path):
    path = File(GOLDEN / "llama/plain").write(tmp_path / "good.gguf")
    good = path.read_bytes()
    start = good.index(b"token_embd") - 8
    damaged = {
        "no GGUF file": b"GGML" + good[4:],
        "git-LFS": b"version https://git-lfs.github.com/spec/v1\n",
        "has 0 bytes": b"",
        "version 1 is not": good[:4] + struct.pack("<I", 1) + good[8:],
        "big-endian": good[:4] + struct.pack(">I", 3) + good[8:],
        "counts 4294967295 tensors": good[:8] + struct.pack("<Q", 2**32 - 1) + good[16:],
        "1099511627776 keys": good[:16] + struct.pack("<Q", 2**40) + good[24:],
        "a text of": good[:24] + struct.pack("<Q", 2**50) + good[32:],
        "unusable shape": good[: start + 8 + 17 + 4] + struct.pack("<Q", 2**60) + good[start + 8 + 17 + 12 :],
        "cut short": good[:-64],
    }
    with pytest.raises(CheckpointError, match="No such file"):
        Checkpoint.open(tmp_path / "absent.gguf")
    for what, data in damaged.items():
        (tmp_path / "bad.gguf").write_bytes(data)
        with pytest.raises(CheckpointError, match=what):
            Checkpoint.open(tmp_path / "bad.gguf")
    lengths = [*range(0, 400, 7), *range(400, len(good), 997), len(good) - 1]
    for length in lengths:
        (tmp_path / "bad.gguf").write_bytes(good[:length])
        with pytest.raises(CheckpointError):
            Checkpoint.open(tmp_path / "bad.gguf")


def test_a_count_larger_than_the_file(tmp_path):
    file = File(GOLDEN / "llama/plain")
    file.keys["tokenizer.ggml.token_type"] = [7] * 104
    good = file.write(tmp_path / "file.gguf").read_bytes()
    at = good.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    assert good[at : at + 8] == struct.pack("<Q", 104)
    (tmp_path / "file.gguf").write_bytes(good[:at] + struct.pack("<Q", 2**60) + good[at + 8 :])
    with pytest.raises(CheckpointError, match="the header ends in the middle"):
        Checkpoint.open(tmp_path / "file.gguf")


# --- divided models, and folders ---


def divided(folder, count=3):
    """A file, and the same in several."""
    file = File(GOLDEN / "llama/gqa")
    whole, names = file.write(folder / "whole.gguf"), sorted(file.tensors)
    (folder / "parts").mkdir()
    for i in range(count):
        part = File(GOLDEN / "llama/gqa")
        part.tensors = {name: file.tensors[name] for name in names[i::count]}
        part.keys = (part.keys if i == 0 else {}) | {"split.no": i, "split.count": count}
        part.keys["split.tensors.count"] = len(names)
        part.write(folder / f"parts/m-{i + 1:05}-of-{count:05}.gguf")
    return whole, folder / "parts"


def test_a_model_in_several_files(tmp_path):
    whole, parts = divided(tmp_path)
    expected = Engine.load(whole, kv_memory=1 << 22).logits([3, 5, 7])
    for path in (parts, parts / "m-00001-of-00003.gguf", parts / "m-00003-of-00003.gguf"):
        assert Engine.load(path, kv_memory=1 << 22).logits([3, 5, 7]).equal(expected)


def test_parts_that_do_not_fit(tmp_path):
    _, parts = divided(tmp_path)
    first, second, third = sorted(parts.iterdir())
    content = third.read_bytes()
    third.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match=r"expected part 3 of 3, as its name says, got split\.no 1"):
        Checkpoint.open(parts)
    third.unlink()
    with pytest.raises(CheckpointError, match=r"part m-00003-of-00003\.gguf is not there"):
        Checkpoint.open(parts)
    third.write_bytes(content)
    (parts / "other.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models: m-00001-of-00003\.gguf, other\.gguf"):
        Checkpoint.open(parts)
    with pytest.raises(CheckpointError, match="one of several"):
        Checkpoint.open(parts / "other.gguf")
    first.rename(parts / "m-00000-of-00003.gguf")
    with pytest.raises(CheckpointError, match="counts parts from 1"):
        Checkpoint.open(parts / "m-00000-of-00003.gguf")


def test_a_file_whose_name_does_not_say_what_it_is(tmp_path):
    """In the stores of other programs names are digests."""
    path = File(GOLDEN / "llama/plain").write(tmp_path / "m.gguf")
    expected = Engine.load(path, kv_memory=1 << 22).logits([3, 5, 7])
    for name in ("sha256-0123", "m.bin"):
        (tmp_path / name).symlink_to(path)
        check_there(tmp_path / name)
        engine = Engine.load(tmp_path / name, kv_memory=1 << 22)
        assert engine.name == name and engine.logits([3, 5, 7]).equal(expected)
    (tmp_path / "text").write_text("GGU")
    os.mkfifo(tmp_path / "fifo")  # is not opened
    for name in ("text", "fifo"):
        with pytest.raises(CheckpointError, match="is a file, but no GGUF file: name the folder it lies in"):
            check_there(tmp_path / name)
    with pytest.raises(CheckpointError, match="the name of the model is empty"):
        check_there("")
    with pytest.raises(CheckpointError, match="the file cannot be read: File name too long"):
        check_there("a" * 300)


def test_a_file_that_cannot_be_read_is_not_taken_for_another_kind(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "digest").write_bytes(b"GGUF")
    monkeypatch.setattr("models.folders.Path.open", refuse)
    monkeypatch.setattr("models.checkpoint.files.os.open", refuse)
    check_there(tmp_path / "digest")  # loading says what is wrong
    with pytest.raises(CheckpointError, match="the file cannot be read: Permission denied"):
        Checkpoint.open(tmp_path / "digest")


def test_a_file_alone_in_a_folder_is_a_model(tmp_path):
    (tmp_path / "folder").mkdir()
    path = File(GOLDEN / "llama/plain").write(tmp_path / "folder/m.gguf")
    one, other = (Engine.load(each, kv_memory=1 << 22) for each in (path, path.parent))
    assert one.logits([3, 5]).equal(other.logits([3, 5])) and one.name == other.name == "m"


def test_a_file_that_is_cut_short_after_its_header_was_read(tmp_path):
    path = File(GOLDEN / "llama/plain").write(tmp_path / "file.gguf")
    checkpoint = Checkpoint.open(path)
    rows = checkpoint.rows("model.embed_tokens.weight", "model.embed_tokens.weight", (104, 32))
    path.write_bytes(path.read_bytes()[: min(info.start for info in checkpoint.tensors.values()) + 8])
    with pytest.raises(CheckpointError, match="became shorter"):
        checkpoint.read(["lm_head.weight"])
    with pytest.raises(CheckpointError, match="cut short"):
        rows([103])

"""GGUF files to folders: the numbers of the file, the same tokens, and nothing half done."""

import json

import pytest

from engine import CheckpointError, Engine
from engine.text.tokenizer import Tokenizer
from kernels.linear.blocks import BLOCKS
from models.checkpoint.headers import Checkpoint
from models.checkpoint.listing import WEIGHTS
from models.checkpoint.tensors import GroupedReader
from tests.models.gguf.files import GOLDEN, WIDE, File, gguf, random, sentencepiece_file
from tools import convert, requantise

TYPES = gguf.GGMLQuantizationType
PROMPT = list(range(3, 30))


def converted(file, folder):
    """Write a file and convert it. Returns the folder."""
    convert.convert(file.write(folder.with_suffix(".gguf")), folder)
    return folder


@pytest.mark.parametrize("variant", ["llama/plain", "gemma/one", "gpt2/plain", "phi3/longrope", "lfm2/plain"])
def test_folders_are_their_files(variant, tmp_path):
    folder = converted(File(GOLDEN / variant), tmp_path / "out")
    ours, theirs = (Engine.load(path, dtype="float32", kv_memory=1 << 22) for path in (folder, tmp_path / "out.gguf"))
    assert ours.logits(PROMPT).equal(theirs.logits(PROMPT)) and ours.eos_token_ids == theirs.eos_token_ids
    assert not ours.tokenizer.difference(theirs.tokenizer)


@pytest.mark.parametrize("format", BLOCKS)
def test_values_of_blocks(format, tmp_path):
    file = File(random(tmp_path / "source", "llama/tied", **WIDE), TYPES[format])
    folder = converted(file, tmp_path / "out")
    checkpoint, shape = Checkpoint.open(folder), (104, 256)
    rows = checkpoint.rows("model.embed_tokens.weight", "model.embed_tokens.weight", shape)
    assert isinstance(rows, GroupedReader)
    exact = file.floats("token_embd.weight")
    assert rows(list(range(104))).equal(exact)
    grouped = checkpoint.grouped("lm_head.weight", "model.embed_tokens.weight", shape, "Linear", biased=False)
    assert grouped and grouped.floats().equal(exact) and grouped.floats(5, 9).equal(exact[5:9])
    ours, theirs = (Engine.load(path, kv_memory=1 << 22).logits(PROMPT) for path in (folder, tmp_path / "out.gguf"))
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.std()


def test_scores_become_a_model_of_sentencepiece(tmp_path):
    folder = converted(sentencepiece_file(), tmp_path / "out")
    assert (folder / "tokenizer.model").exists() and not (folder / "tokenizer.json").exists()
    ours, theirs = Tokenizer.load(folder), Tokenizer.of(Checkpoint.open(tmp_path / "out.gguf"))
    assert theirs and not ours.difference(theirs) and ours.encode("Hello world") == theirs.encode("Hello world")


def test_scales_that_are_no_numbers(tmp_path):
    file = File(random(tmp_path / "source", "llama/gqa", **WIDE), TYPES.Q8_0)
    file.tensors["blk.1.ffn_up.weight"][3, 1] = 0x7C  # infinity
    with pytest.raises(CheckpointError, match=r"the scales of 'model.layers.1.mlp.up_proj.weight' are not finite"):
        converted(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if path.name != "source"] == ["out.gguf"]


def test_the_command(tmp_path, capsys):
    file = File(random(tmp_path / "source", "llama/tied", **WIDE), TYPES.Q4_K)
    path = file.write(tmp_path / "file.gguf")
    assert convert.main([str(path), "--output", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["architecture"] == "LlamaForCausalLM" and report["tokenizer"] == "gpt2" and not err
    assert report["bytes"] == (tmp_path / "out" / WEIGHTS).stat().st_size and report["formats"]["Q4_K"] == 15
    assert convert.main([str(path), "--output", str(tmp_path / "out")]) == 2
    assert "there already" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        convert.main([str(path)])


@pytest.mark.parametrize("change, what", [
    (lambda c: c.update(version=2), "version 2 of the layout"),
    (lambda c: c["weights"]["lm_head"].update(kind="int3"), r"lm_head.kind: expected one of float4, .*iq4"),
    (lambda c: c["weights"]["lm_head"].update(group=64), r"lm_head.scale.*expected \[104, 4\]"),
    (lambda c: c["weights"].pop("model.layers.0.mlp.up_proj"), "missing model.layers.0.mlp.up_proj.weight"),
])  # fmt: skip
def test_damaged_folders(change, what, tmp_path):
    folder = converted(File(random(tmp_path / "source", "llama/gqa", **WIDE), TYPES.Q8_0), tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=what):
        Engine.load(folder, kv_memory=1 << 22)


def test_matrices_in_other_blocks(tmp_path, capsys):
    """Metadata and floats stay; each value of a matrix moves by half a step of its new block at most."""
    file = File(random(tmp_path / "source", "llama/tied", **WIDE), TYPES.Q4_1)
    source, made = file.write(tmp_path / "source.gguf"), tmp_path / "made.gguf"
    assert requantise.main([str(source), str(made)]) == 0 and "made.gguf" in capsys.readouterr().out
    ours, theirs = Engine.load(source, kv_memory=1 << 22), Engine.load(made, kv_memory=1 << 22)
    assert Checkpoint.open(made).tensors["model.embed_tokens.weight"].format == "Q8_0"
    assert not ours.tokenizer.difference(theirs.tokenizer) and ours.eos_token_ids == theirs.eos_token_ids
    old, new = ours.logits(PROMPT), theirs.logits(PROMPT)
    assert 0 < (old - new).abs().max() < 0.1 * old.std()
    assert requantise.main([str(source), str(made)]) == 2 and "already" in capsys.readouterr().err
    assert requantise.main([str(source), str(tmp_path / "x"), "--type", "Q9"]) == 2
    assert requantise.main([str(tmp_path / "none"), str(tmp_path / "x")]) == 2

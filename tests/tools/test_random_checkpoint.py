"""Random checkpoints: deterministic, well-formed, peaked, with a tokenizer that round-trips."""

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer

from engine import Engine
from tools import random_checkpoint
from tools.random_checkpoint import make

TINY: dict[str, Any] = {"layers": 2, "width": 32, "mlp": 48, "heads": 4, "vocab": 96}


def tensors(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def config(folder):
    return json.loads((folder / "config.json").read_text())


def test_same_arguments_same_bytes_and_another_seed_differs(tmp_path):
    for name, seed in {"a": 0, "b": 0, "c": 1}.items():
        make(tmp_path / name, **TINY, seed=seed)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files)
    a, c = tensors(tmp_path / "a"), tensors(tmp_path / "c")
    assert a.keys() == c.keys() and not any(torch.equal(a[name], c[name]) for name in a)


def test_both_config_spellings_hold_the_same_model(tmp_path):
    rope = {"rope_type": "linear", "factor": 4.0}
    for style in ("v5", "v4"):
        make(tmp_path / style, **TINY, dtype="bfloat16", rope_theta=5e5, rope=rope, config_style=style)
    new, old = config(tmp_path / "v5"), config(tmp_path / "v4")
    assert new.pop("rope_parameters") == {"rope_theta": 5e5, **rope} and new.pop("dtype") == "bfloat16"
    assert old.pop("rope_theta") == 5e5 and old.pop("rope_scaling") == rope and old.pop("torch_dtype") == "bfloat16"
    assert new == old
    weights = (tmp_path / "v5/model.safetensors").read_bytes()
    assert weights == (tmp_path / "v4/model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_shards_hold_the_tensors_of_one_file(tmp_path, dtype):
    made = make(tmp_path / "one", **TINY, dtype=dtype)
    assert make(tmp_path / "three", **TINY, dtype=dtype, shards=3) | {"path": ""} == made | {"path": ""}
    one, three = tensors(tmp_path / "one"), tensors(tmp_path / "three")
    assert one.keys() == three.keys() and all(torch.equal(one[name], three[name]) for name in one)
    assert {t.dtype for t in one.values()} == {getattr(torch, dtype)}
    assert made["parameters"] == sum(t.numel() for t in one.values())
    assert made["bytes"] == sum(t.nbytes for t in one.values())
    index = json.loads((tmp_path / "three/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == made["bytes"] and len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "three" / file, "pt") as shard:
            assert name in shard.keys()  # noqa: SIM118 (safe_open is no mapping)


def test_another_number_of_shards_replaces_what_is_there(tmp_path):
    for shards in (1, 2, 1):
        make(tmp_path / "again", **TINY, shards=shards, seed=shards)
        make(tmp_path / "fresh", **TINY, seed=shards)
        again, fresh = (Engine.load(tmp_path / name, kv_memory=1 << 20) for name in ("again", "fresh"))
        assert torch.equal(again.logits([3]), fresh.logits([3]))


def test_shape_options(tmp_path):
    options: dict[str, Any] = {"kv_heads": 1, "head_dim": 16, "tied": True, "attention_bias": True, "mlp_bias": True}
    make(tmp_path, **TINY, **options)
    found = {name: tuple(tensor.shape) for name, tensor in tensors(tmp_path).items()}
    assert found["model.layers.1.self_attn.q_proj.weight"] == (64, 32)
    assert found["model.layers.1.self_attn.k_proj.bias"] == (16,)
    assert found["model.layers.1.self_attn.o_proj.bias"] == (32,)
    assert found["model.layers.1.mlp.down_proj.bias"] == (32,)
    assert "lm_head.weight" not in found and config(tmp_path)["head_dim"] == 16


def test_another_family(tmp_path):
    make(tmp_path, **TINY, family="qwen3")
    engine = Engine.load(tmp_path, kv_memory=1 << 20)
    assert engine.logits([5, 6, 7]).isfinite().all()
    assert engine.shape.head_dim == config(tmp_path)["head_dim"] == TINY["width"] // TINY["heads"]


def test_the_default_is_the_benchmark_model():
    shape = {"hidden_size": 768, "intermediate_size": 2048, "vocab_size": 32000, "num_hidden_layers": 12,
             "num_attention_heads": 12, "num_key_value_heads": 12, "attention_bias": False, "mlp_bias": False,
             "tie_word_embeddings": False}  # fmt: skip
    sizes = [torch.Size(shape).numel() for shape in random_checkpoint.tensor_shapes(shape).values()]
    assert sum(sizes) == 134_105_856


@pytest.mark.parametrize("vocab", [40, 96, 300, 2048, 32000])
def test_tokenizer(vocab):
    tokenizer = Tokenizer.from_str(json.dumps(random_checkpoint.tokenizer_json(vocab)))
    assert tokenizer.get_vocab_size() == vocab
    pieces = [tokenizer.decode([i]) for i in range(3, vocab)]
    assert all(piece in ("\n", "\t") or (piece and piece.isprintable()) for piece in pieces)
    text = "once upon a time" if vocab < 300 else "Once upon a time, caffè 日本 🙂\n"
    encoded = tokenizer.encode(text)
    assert encoded.ids[0] == random_checkpoint.BOS and tokenizer.decode(encoded.ids) == text
    if vocab == 32000:
        assert len(encoded.ids) < len(text)  # merges are reachable


def test_command_line(tmp_path, capsys):
    random_checkpoint.main(["--out", str(tmp_path), "--layers", "1", "--width", "16", "--mlp", "16", "--heads", "2",
                            "--vocab", "50", "--untied"])  # fmt: skip
    made = json.loads(capsys.readouterr().out)
    assert made["path"] == str(tmp_path) and made["bytes"] == 4 * made["parameters"]
    for wrong in (["--heads", "5"], ["--kv-heads", "5"], ["--vocab", "3"], ["--layers", "0"], ["--scale", "x"]):
        with pytest.raises(SystemExit, match="2"):
            random_checkpoint.main(["--out", str(tmp_path), *wrong])

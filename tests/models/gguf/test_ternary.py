"""Files of bitnet.cpp, against checkpoints of the same numbers as transformers has them."""

import json

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from engine import CheckpointError, Engine
from tests.models.gguf.files import WIDE, File, make_known, random
from tools import convert

I2_S = make_known("I2_S", 36, 128, 32)
PROMPT, METHOD = list(range(3, 30)), {"quant_method": "bitnet", "linear_class": "autobitlinear"}


def packed(numbers_OI, scale):
    """Pack numbers like bitnet.cpp's `quantize_i2_s`: four to a byte, with the scale behind them."""
    fields = (numbers_OI.reshape(-1, 4, 32) + 1).astype(np.uint8)
    octets = (fields << np.array([6, 4, 2, 0], np.uint8)[:, None]).sum(1, dtype=np.uint8)
    return np.concatenate([octets.flatten(), np.array([scale] + [0] * 7, np.float32).view(np.uint8)])


def ternary(tmp_path, variant, head):
    """A folder of random numbers -1, 0 and 1, and a file of the same."""
    source = random(tmp_path / "source", variant, **WIDE)
    file, tensors = File(source), load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        layer, own = name.split(".")[2], name.split(".")[-2].removesuffix("_proj")
        part = {"o": "attn_output"}.get(own) or f"{'attn' if own in 'qkv' else 'ffn'}_{own}"
        numbers, scale = (tensors[name] / tensors[name].std()).round().clamp(-1, 1), tensors[name].std()
        tensors |= {name: numbers, name + "_scale": scale.view(1)}
        stored = f"blk.{layer}.{part}.weight"
        if file.arch == "llama" and own in "qk":  # rows in the order of interleaved rotation
            heads = file.config["num_attention_heads" if own == "q" else "num_key_value_heads"]
            numbers = numbers.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        file.tensors[stored], file.types[stored] = packed(numbers.numpy(), scale), I2_S
        file.raw_shapes[stored] = numbers.shape[0], numbers.shape[1] // 4
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": METHOD | head}
    (source / "config.json").write_text(json.dumps(config))
    return source, file


@pytest.mark.parametrize("variant", ["bitnet/plain", "llama/gqa"])
def test_a_file_of_bitnet_cpp(variant, tmp_path):
    """BitNet b1.58 2B4T is published so; a Llama has the architecture of all Llamas."""
    source, file = ternary(tmp_path, variant, {"modules_to_not_convert": ["lm_head"]})
    assert file.arch == ("bitnet-b1.58" if variant == "bitnet/plain" else "llama")
    path = file.write(tmp_path / "file.gguf")
    for dtype in ("float32", "bfloat16"):
        ours, theirs = (Engine.load(x, dtype=dtype, kv_memory=1 << 24).logits(PROMPT) for x in (path, source))
        assert ours.equal(theirs)
    with pytest.raises(CheckpointError, match="inputs are rounded to 8 bits: a folder would not say so"):
        convert.convert(path, tmp_path / "folder")


@pytest.mark.parametrize("arch, activation", [("bitnet", "silu"), ("bitnet-25", "relu2")])
def test_other_names_of_the_architecture(arch, activation, tmp_path):
    """Older models have another activation."""
    source, file = ternary(tmp_path, "bitnet/plain", {"modules_to_not_convert": ["lm_head"]})
    file.keys = {key.replace("bitnet-b1.58.", f"{arch}."): value for key, value in file.keys.items()}
    file.arch, config = arch, json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"hidden_act": activation}))
    paths = file.write(tmp_path / "file.gguf"), source
    ours, theirs = (Engine.load(x, dtype="float32", kv_memory=1 << 24).logits(PROMPT) for x in paths)
    assert ours.equal(theirs)


def test_damaged_files(tmp_path):
    _, file = ternary(tmp_path, "bitnet/plain", {})
    name = "blk.0.ffn_up.weight"
    good = file.tensors[name]
    for octets, message in (
        (np.concatenate([good[:5], np.array([3], np.uint8), good[6:]]), "numbers other than -1, 0 and 1"),
        (np.concatenate([good[:-32], np.array([np.nan] * 8, np.float32).view(np.uint8)]), "not finite"),
    ):
        file.tensors[name] = octets
        with pytest.raises(CheckpointError, match=message):
            Engine.load(file.write(tmp_path / "file.gguf"), kv_memory=1 << 24)
    file.tensors[name] = good
    file.add("output.weight", np.ones((104, 256), np.float32))
    file.tensors["token_embd.weight"] = packed(np.full((104, 256), 2), 1.0)
    file.types["token_embd.weight"], file.raw_shapes["token_embd.weight"] = I2_S, (104, 64)
    engine = Engine.load(file.write(tmp_path / "file.gguf"), kv_memory=1 << 24)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight: the matrix has numbers other than"):
        engine.logits(PROMPT)
    last = [*file.tensors][-1]
    assert file.types[last] != I2_S
    file.tensors[name], path = file.tensors.pop(name), tmp_path / "file.gguf"  # at the end
    file.write(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="cut short, or damaged"):
        Engine.load(path, kv_memory=1 << 24)

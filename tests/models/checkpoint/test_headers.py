"""Opening checkpoints: what is accepted, and every fault an error that names its file, before data is read."""

import json
import re
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from models.checkpoint import tensor_files
from models.checkpoint.headers import Checkpoint
from models.checkpoint.tensor_files import write_tensors
from models.errors import CheckpointError

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
CONFIG = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32", "eos_token_id": 2}
INVERSE = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"


def folder_with(path: Path, *, shards: dict | None = None, weight_map: object = None, config: object = None, **single):
    """Writes a model folder: one file of tensors `single`, or `shards` {file: tensors} with an index."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    if shards is None:
        save_file(single or {"w": torch.ones(2)}, path / "model.safetensors")
    else:
        for name, tensors in shards.items():
            save_file(tensors, path / name)
        default = {name: file for file, tensors in shards.items() for name in tensors}
        index = {"metadata": {"total_size": 10**30}, "weight_map": default if weight_map is None else weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def refused(path: Path, message: str, where: str = "") -> CheckpointError:
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(path)
    assert where in caught.value.where and caught.value.exit_code == 3
    return caught.value


def safetensors_bytes(header: dict, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def mapped_bytes(path: Path) -> int:
    """Resident bytes of mappings of `path` in this process; None of them mapped: -1."""
    total, ours = -1, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(str(path))
            total = max(total, 0) if ours else total
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_one_file(tmp_path):
    weights = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16()}
    checkpoint = Checkpoint.open(folder_with(tmp_path, **weights))
    assert checkpoint.architecture == "LlamaForCausalLM" and checkpoint.torch_dtype == torch.float32
    assert checkpoint.eos_token_ids == {2} and checkpoint.bos_token_id is None and checkpoint.generation_config is None
    info = checkpoint.tensors["a"]
    assert (info.file.name, info.shape, info.dtype) == ("model.safetensors", (3, 4), torch.float32)
    read = checkpoint.read(["a", "b"])
    assert all(torch.equal(read[name], weights[name]) and read[name].dtype == weights[name].dtype for name in weights)


def test_shards(tmp_path):
    shards = {"model-1.safetensors": {"a": torch.ones(2)}, "model-2.safetensors": {"b": torch.zeros(3)}}
    checkpoint = Checkpoint.open(folder_with(tmp_path, shards=shards))
    assert {name: info.file.name[6] for name, info in checkpoint.tensors.items()} == {"a": "1", "b": "2"}
    assert list(checkpoint.read(["b", "a"])["b"]) == [0, 0, 0]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads Linux's list of mappings")
def test_tensors_are_views_of_the_file_and_unmap(tmp_path):
    size = 1 << 22
    path = folder_with(tmp_path, a=torch.ones(size), b=torch.ones(size)) / "model.safetensors"
    checkpoint = Checkpoint.open(tmp_path)
    assert mapped_bytes(path) == -1
    tensors = checkpoint.read(["a", "b"])
    assert 0 <= mapped_bytes(path) < size
    assert tensors["a"].sum() == size and 4 * size <= mapped_bytes(path) < 6 * size
    del tensors
    assert mapped_bytes(path) == -1


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads Linux's list of mappings")
def test_a_file_stays_open_while_a_model_is_read(tmp_path, monkeypatch):
    """Its header is parsed once for many tensors, and again after so many bytes."""
    path = folder_with(tmp_path, **{name: torch.ones(8) for name in "abc"}) / "model.safetensors"
    checkpoint, opened, open_file = Checkpoint.open(tmp_path), [], tensor_files.safe_open
    monkeypatch.setattr(tensor_files, "safe_open", lambda *args, **kw: opened.append(args) or open_file(*args, **kw))
    with checkpoint.held_open():
        assert all(checkpoint.read([name])[name].sum() == 8 for name in "abc") and len(opened) == 1
        assert mapped_bytes(path) >= 0
    assert mapped_bytes(path) == -1
    monkeypatch.setattr(tensor_files.LastFile, "BYTES", 70)  # two of the tensors
    with checkpoint.held_open():
        assert all(checkpoint.read([name])[name].sum() == 8 for name in "abc") and len(opened) == 3
    checkpoint.read(["a"])
    checkpoint.read(["a"])
    assert len(opened) == 5


def test_misaligned_tensors_are_aligned(tmp_path):
    folder_with(tmp_path)
    header = {"h": ("BF16", [1], 0, 2), "x": ("F32", [2], 2, 10)}
    header = {name: {"dtype": d, "shape": s, "data_offsets": [lo, hi]} for name, (d, s, lo, hi) in header.items()}
    for pad in range(4):
        raw = safetensors_bytes(header | {"__metadata__": {"pad": "." * pad}}, b"\0\0" + struct.pack("<2f", 1.5, -2))
        (tmp_path / "model.safetensors").write_bytes(raw)
        x = Checkpoint.open(tmp_path).read(["x"])["x"]
        assert x.tolist() == [1.5, -2] and x.data_ptr() % 4 == 0


@pytest.mark.parametrize(
    ("config", "generation", "eos", "bos"),
    [
        ({"eos_token_id": 2, "bos_token_id": 1}, {"eos_token_id": [2, 7]}, {2, 7}, 1),
        ({"eos_token_id": [0]}, None, {0}, None),
        ({"eos_token_id": None}, {"eos_token_id": 5, "bos_token_id": 3}, {5}, 3),
        ({}, {}, set(), None),
    ],
)
def test_special_ids(tmp_path, config, generation, eos, bos):
    folder_with(tmp_path, config=config)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    checkpoint = Checkpoint.open(tmp_path)
    assert (checkpoint.eos_token_ids, checkpoint.bos_token_id) == (eos, bos)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "float32", "torch_dtype": "float16"}, torch.float32),
        ({"torch_dtype": "torch.bfloat16"}, torch.bfloat16),
        ({"torch_dtype": None}, torch.float64),
        ({"torch_dtype": "auto"}, torch.float64),
        ({"dtype": "float8_e4m3fn"}, torch.bfloat16),
    ],
)
def test_dtype(tmp_path, config, dtype):
    folder = folder_with(tmp_path, config=config, a=torch.ones(1).double(), i=torch.ones(1).int())
    assert Checkpoint.open(folder).torch_dtype == dtype


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"bos_token_id": 1.5}, "bos_token_id"),
        ({"torch_dtype": "int8"}, "torch_dtype: expected one of"),
        ({"architectures": "Llama"}, "architectures"),
        ({"architectures": [3]}, "architectures"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ([1], "expected a JSON object"),
    ],
)
def test_bad_configs(tmp_path, config, message):
    refused(folder_with(tmp_path, config=config), message, "config.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (LFS, "LFS pointer"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b'{"rope_theta": 1, "rope_theta": 2}', "'?rope_theta'? occurs twice"),
        (b" " * (1 << 20) + b"{}", "larger than 1048576 bytes"),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else "",
)
def test_bad_json(tmp_path, text, message):
    folder_with(tmp_path)
    (tmp_path / "config.json").write_bytes(text)
    refused(tmp_path, message, "config.json")


def test_folders_without_a_model(tmp_path):
    assert "org/name:Q4_K_M" in refused(tmp_path / "org" / "model", "no such folder").remedy
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is a file")
    refused(tmp_path, "no config.json", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "neither model.safetensors nor")
    (tmp_path / "pytorch_model.bin").write_text("")
    assert "python -m tools.convert" in refused(tmp_path, r"pickles \(pytorch_model.bin\)").remedy
    (tmp_path / "model-00001-of-00002.safetensors").write_text("")
    refused(tmp_path, "model-00001-of-00002.safetensors without model.safetensors.index.json")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    refused(tmp_path, "not a regular file", "config.json")


def entry(shape: list, size: int, dtype: str = "F32", start: int = 0) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not a valid safetensors file"),
        (b"1234567", "not a valid safetensors file"),
        (struct.pack("<Q", 2**63) + b"{}", "not a valid safetensors file"),
        (struct.pack("<Q", 100) + b"{}", "not a valid safetensors file"),
        (LFS, "git-LFS pointer"),
        (b"PK\x03\x04" + b"\0" * 60, "pickle"),
        (b"\x80\x02" + b"\0" * 60, "pickle"),
        (safetensors_bytes({"a": entry([4], 16)}, b"\0" * 15), "not a valid safetensors file"),
        (safetensors_bytes({"a": entry([1], 4, start=4)}, b"\0" * 8), "not a valid safetensors file"),
        (safetensors_bytes({"a": entry([2], 8), "b": entry([2], 8, start=4)}, b"\0" * 12), "not a valid"),
        (safetensors_bytes({"a": entry([2**40, 2**40], 4)}, b"\0" * 4), "not a valid safetensors file"),
        (safetensors_bytes({"a": entry([-1], 4)}, b"\0" * 4), "not a valid safetensors file"),
        (safetensors_bytes({"a": entry([0, 10**18], 0)}), r"tensor a: unusable shape \[0, 1000000000000000000\]"),
        (safetensors_bytes({"a": entry([1] * 9, 4)}, b"\0" * 4), "tensor a: unusable shape"),
        (safetensors_bytes({"a": entry([4], 2, "F4")}, b"\0" * 2), "tensor a: dtype F4"),
        (safetensors_bytes({}), "no tensors"),
    ],
)
def test_bad_weight_files(tmp_path, raw, message):
    folder_with(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(raw)
    refused(tmp_path, message, "model.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "x.safetensors")  # and as a shard
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    refused(tmp_path, message, "x.safetensors")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ([], "weight_map"),
        ({}, "weight_map"),
        ({"a": 3}, "expected a file name"),
        ({"a": "../m.safetensors"}, r"\.\./m.safetensors is no plain name"),
        ({"a": "/etc/m.safetensors"}, "no plain name"),
        ({"a": "sub/m.safetensors"}, "no plain name"),
        ({"a": "sub\\m.safetensors"}, "no plain name"),
        ({"a": ".."}, "no plain name"),
        ({"a": ""}, "no plain name"),
        ({"a": "config.json"}, "no plain name"),
        ({"a": "m\0.safetensors"}, "no plain name"),
        ({"a": "\ud800.safetensors"}, "cannot be followed"),
        ({"a": "m" * 300 + ".safetensors"}, "cannot be followed"),
        ({"a": "absent.safetensors"}, "absent.safetensors is not there"),
        ({"a": "m.safetensors", "b": "m.safetensors"}, "tensor b is not in m.safetensors"),
        ({"a": "m.safetensors", "c": "m.safetensors", "d": "n.safetensors"}, "tensor c is not in m.safetensors"),
    ],
)
def test_bad_indexes(tmp_path, weight_map, message):
    shards = {"m.safetensors": {"a": torch.ones(1)}, "n.safetensors": {"d": torch.ones(1), "c": torch.ones(1)}}
    refused(folder_with(tmp_path, shards=shards, weight_map=weight_map), message, "index.json")


def test_duplicate_tensors(tmp_path):
    both = {name: torch.ones(1) for name in "ac"}
    shards = {"m.safetensors": both, "n.safetensors": {"a": torch.ones(1), "b": torch.ones(1)}}
    refused(folder_with(tmp_path, shards=shards), "tensor a lies in two files", "m.safetensors and n.safetensors")


def test_links(tmp_path):
    outside = tmp_path / "secret.safetensors"
    save_file({"w": torch.ones(1)}, outside)
    snapshots = tmp_path / "models" / "snapshots"
    snapshots.mkdir(parents=True)
    folder = folder_with(snapshots / "rev")
    weights = folder / "model.safetensors"
    for target in (outside, Path("../../../secret.safetensors"), Path("../../blobs/../../secret.safetensors")):
        weights.unlink()
        weights.symlink_to(target)
        refused(folder, "leads out of the model folder", "model.safetensors")
    weights.unlink()
    weights.symlink_to("model.safetensors")
    refused(folder, "cannot be followed|is not there", "model.safetensors")

    blob = folder.parent.parent / "blobs" / "0a1b"
    blob.parent.mkdir()
    save_file({"w": torch.ones(1)}, blob)
    weights.unlink()
    weights.symlink_to("../../blobs/0a1b")  # the hub's cache
    assert Checkpoint.open(folder).read(["w"])["w"].item() == 1
    blob.unlink()
    blob.symlink_to(outside)
    refused(folder, "leads out of the model folder")
    blob.unlink()
    refused(folder, "model.safetensors is not there")

    save_file({"w": torch.ones(1)}, folder / "real.safetensors")
    weights.unlink()
    weights.symlink_to("real.safetensors")
    assert list(Checkpoint.open(folder).tensors) == ["w"]


EXPECTED = {EMBED: (8, 4), HEAD: (8, 4), "model.norm.weight": (4,)}


def weights(*names: str, **extra) -> dict:
    return {name: torch.zeros(EXPECTED[name]) for name in names or EXPECTED} | extra


@pytest.mark.parametrize(
    ("tensors", "tied", "aliases"),
    [
        (weights(), {}, {}),
        (weights(), {HEAD: EMBED}, {}),
        (weights(EMBED, "model.norm.weight"), {HEAD: EMBED}, {HEAD: EMBED}),
        (weights(HEAD, "model.norm.weight"), {HEAD: EMBED}, {EMBED: HEAD}),
        (weights() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, {}, {}),
        (weights() | {"model.norm.weight": torch.ones(4).double()}, {}, {}),
    ],
)
def test_check_accepts(tmp_path, tensors, tied, aliases):
    checkpoint = Checkpoint.open(folder_with(tmp_path, **tensors))
    assert checkpoint.check(EXPECTED, ignore=[INVERSE], tied=tied) == aliases


@pytest.mark.parametrize(
    ("tensors", "tied", "message"),
    [
        (weights(EMBED, "model.norm.weight"), {}, "missing lm_head.weight"),
        (weights("model.norm.weight"), {HEAD: EMBED}, "missing model.embed_tokens.weight"),
        (weights() | {"model.extra": torch.ones(1)}, {}, "unknown model.extra in model.safetensors"),
        (weights() | {"xmodel.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, {}, "unknown xmodel"),
        (weights() | {"model.norm.weight": torch.ones(5)}, {}, r"model.norm.weight in .*expected \[4\].*got \[5\]"),
        (weights() | {"model.norm.weight": torch.ones(4).int()}, {}, "got .* of int32"),
        (weights() | {HEAD: torch.ones(4, 8)}, {HEAD: EMBED}, "lm_head.weight in"),
        (weights(EMBED, HEAD) | {"model.norm.weights": torch.ones(4)}, {}, r"nearest: model.norm.weights\)"),
        (weights() | {"tok_embeddings.weight": torch.ones(4)}, {}, "Meta's own layout"),
        (weights() | {f"x.{i}": torch.ones(1) for i in range(15)}, {}, r"15 tensors at fault(.|\n)*and 5 more"),
        (weights() | {"\x1b[31mred": torch.ones(1)}, {}, r"unknown \\x1b\[31mred"),
    ],
)
def test_check_refuses(tmp_path, tensors, tied, message):
    checkpoint = Checkpoint.open(folder_with(tmp_path, **tensors))
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.check(EXPECTED, ignore=[INVERSE], tied=tied)
    assert str(tmp_path) in caught.value.where


def test_a_file_that_changed_after_it_was_opened(tmp_path):
    checkpoint = Checkpoint.open(folder_with(tmp_path, a=torch.ones(2)))
    folder_with(tmp_path, a=torch.ones(3))
    with pytest.raises(CheckpointError, match="a changed while"):
        checkpoint.read(["a"])
    folder_with(tmp_path, b=torch.ones(3))
    with pytest.raises(CheckpointError, match="not a valid"):
        checkpoint.read(["a"])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.read(["a"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FILES = st.sampled_from(["m.safetensors", "../m.safetensors", ".", "m.safetensors/"]) | st.text(max_size=8)


@given(index=st.binary(max_size=30) | st.fixed_dictionaries({"weight_map": JSON | st.dictionaries(st.text(), FILES)}))
def test_any_index_is_read_or_refused(tmp_path_factory, index):
    folder = tmp_path_factory.getbasetemp() / "any-index"
    folder_with(folder, shards={"m.safetensors": {"a": torch.ones(1)}})
    raw = index if isinstance(index, bytes) else json.dumps(index).encode()
    (folder / "model.safetensors.index.json").write_bytes(raw)
    try:
        assert set(Checkpoint.open(folder).tensors) == {"a"}
    except CheckpointError as error:
        assert str(error).isprintable() or "\n" in str(error)


@given(
    config=st.dictionaries(
        st.sampled_from(["architectures", "eos_token_id", "bos_token_id", "dtype", "torch_dtype"]), JSON
    )
)
def test_any_config_is_read_or_refused(tmp_path_factory, config):
    try:
        checkpoint = Checkpoint.open(folder_with(tmp_path_factory.getbasetemp() / "any-config", config=config))
    except CheckpointError:
        return
    assert all(token >= 0 for token in checkpoint.eos_token_ids) and isinstance(checkpoint.architecture, str)


@given(data=st.binary(max_size=200), cut=st.integers(0, 120), at=st.integers(0, 120), byte=st.integers(0, 255))
def test_any_weight_file_is_read_or_refused(tmp_path_factory, data, cut, at, byte):
    folder = folder_with(tmp_path_factory.getbasetemp() / "any-weights")
    valid = bytearray((folder / "model.safetensors").read_bytes())
    valid[at % len(valid)] = byte
    for raw in (data, bytes(valid), bytes(valid[:cut])):
        (folder / "model.safetensors").write_bytes(raw)
        try:
            checkpoint = Checkpoint.open(folder)
            checkpoint.read(checkpoint.tensors)
        except CheckpointError as error:
            assert "model.safetensors" in error.where


def test_what_is_written_is_read(tmp_path):
    """By safetensors' own reader; with dtypes of all sizes, views, an empty tensor and a scalar."""
    tensors = {
        "floats": torch.randn(3, 5).T,
        "bytes": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(3).bfloat16(),
        "numbers": torch.tensor([[-1, 1 << 40]]),
        "none": torch.empty(0, 4),
        "é": torch.tensor(2.5),
        "truth": torch.tensor([True, False]),
    }
    with (tmp_path / "file.safetensors").open("wb") as file:
        write_tensors(file, tensors, {"format": "pt"})
    found = load_file(tmp_path / "file.safetensors")
    assert found.keys() == tensors.keys()
    assert all(found[name].dtype == x.dtype and found[name].equal(x) for name, x in tensors.items())
    with safe_open(tmp_path / "file.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}

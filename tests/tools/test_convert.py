"""Pickles to safetensors: equal tensors, nothing half done, and no code of a pickle is ever run."""

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine import CheckpointError, Engine
from engine.errors import UsageError
from models.quantized.hqq import NUMBERS, TEXTS
from tools import convert, random_checkpoint

TINY = {"layers": 2, "width": 32, "mlp": 48, "heads": 4, "vocab": 96}


class Boom:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def pickled(tmp_path):
    """A tiny checkpoint in `good`, and as pickles in `src`: (source, destination, tensors)."""
    random_checkpoint.make(tmp_path / "good", **TINY)
    tensors = load_file(tmp_path / "good" / "model.safetensors")
    (tmp_path / "src").mkdir()
    for path in (tmp_path / "good").glob("*.json"):
        (tmp_path / "src" / path.name).write_bytes(path.read_bytes())
    torch.save(tensors, tmp_path / "src" / "pytorch_model.bin")
    return tmp_path / "src", tmp_path / "out" / "dst", tensors


def tensors_in(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def shard(source, tensors, cuts=2):
    (source / "pytorch_model.bin").unlink()
    names, files = sorted(tensors), {}
    for k in range(cuts):
        file = f"pytorch_model-{k + 1:05}-of-{cuts:05}.bin"
        files |= dict.fromkeys(names[k::cuts], file)
        torch.save({name: tensors[name] for name in names[k::cuts]}, source / file)
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    return files


@pytest.mark.parametrize("zipped", [True, False])
def test_single_file(pickled, capsys, zipped):
    source, out, tensors = pickled
    torch.save(tensors, source / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    (source / "notes.bin.index.json").write_text("{}")
    (source / "merges.txt").write_text("#version")
    (source / "LICENSE").write_text("MIT")
    assert convert.main([str(source), str(out)]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    assert (report["tensors"], report["bytes"], report["files"]) == (len(tensors), size, 1)
    assert "pytorch_model.bin -> model.safetensors (1/1)" in captured.err
    assert same(tensors_in(out), tensors)
    copied = {path.name for path in out.iterdir()}
    assert copied == {p.name for p in source.glob("*.json")} - {"notes.bin.index.json"} | {
        "merges.txt", "model.safetensors", "LICENSE"
    }  # fmt: skip
    assert [path.name for path in out.parent.iterdir()] == ["dst"]
    assert out.stat().st_mode & 0o777 == source.stat().st_mode & 0o777
    ids = [1, 5, 9]
    good = Engine.load(source.parent / "good", device="cpu", threads=1).logits(ids)
    assert torch.equal(Engine.load(out, device="cpu", threads=1).logits(ids), good)


def test_shards(pickled, capsys):
    source, out, tensors = pickled
    shard(source, tensors, 3)
    assert convert.main([str(source), str(out), "-q"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and json.loads(captured.out)["files"] == 3
    assert same(tensors_in(out), tensors)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    assert not (out / "pytorch_model.bin.index.json").exists()
    assert Engine.load(out, device="cpu", threads=1).logits([1, 2]).isfinite().all()


def modules_of_hqq(folder, nested):
    """A golden model as hqq pickles it: modules with tensors and settings, which older files have in `meta`."""
    found = {}
    for name, x in load_file(folder / "model.safetensors").items():
        module, _, part = name.rpartition(".")
        if part in NUMBERS:
            x = bool(x) if part in ("quant_scale", "quant_zero", "view_as_float") else int(x)
        elif part in TEXTS:
            x = bytes(x.tolist()).decode()
            x = torch.float32 if part == "compute_dtype" else x
        elif part == "shape":
            x = torch.Size(x.tolist())
        own = found.setdefault(module, {})
        if nested and part not in ("W_q", "bias", "weight"):
            own.setdefault("meta", {})[part] = x
        else:
            own[part] = x
    return found


@pytest.mark.parametrize("nested", [False, True])
def test_files_of_hqq(nested, tmp_path):
    """Their settings become small tensors, as in its safetensors."""
    golden, source = Path(__file__).parents[1] / "golden/quantized/hqq", tmp_path / "src"
    shutil.copytree(golden, source, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(modules_of_hqq(golden, nested), source / "qmodel.pt")
    with pytest.raises(CheckpointError, match=r"pickles \(qmodel\.pt\)"):
        Engine.load(source, kv_memory=1 << 22)
    convert.convert(source, tmp_path / "dst")
    ours, theirs = (Engine.load(path, dtype="float32", kv_memory=1 << 22) for path in (tmp_path / "dst", golden))
    assert ours.logits([*range(3, 30)]).equal(theirs.logits([*range(3, 30)]))


@pytest.mark.parametrize("change, message", [
    ({"shape": "no numbers"}, None),
    ({"axis": [None]}, "expected numbers as axis"),
    ({"scale": None, "meta_scale": {"scale": 1.0}}, "'meta_scale' is quantised itself"),
    ({"meta": 3}, "expected a module's tensors and settings"),
])  # fmt: skip
def test_settings_of_hqq_that_are_none(change, message, tmp_path):
    golden, source = Path(__file__).parents[1] / "golden/quantized/hqq", tmp_path / "src"
    shutil.copytree(golden, source, ignore=shutil.ignore_patterns("*.safetensors"))
    modules = modules_of_hqq(golden, False)
    modules["model.layers.0.self_attn.q_proj"] |= change
    torch.save(modules, source / "qmodel.pt")
    with pytest.raises(CheckpointError, match=message):
        convert.convert(source, tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_shared_memory(pickled):
    source, out, tensors = pickled
    embed = tensors["model.embed_tokens.weight"]
    tensors |= {"lm_head.weight": embed, "a": embed[1:3], "b": embed.T, "p": torch.nn.Parameter(torch.ones(2))}
    torch.save(tensors, source / "pytorch_model.bin")
    convert.convert(source, out)
    assert same(tensors_in(out), tensors)
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    convert.convert(source, out.with_name("tied"))
    assert tensors_in(out.with_name("tied")).keys() == tensors.keys() - {"lm_head.weight"}
    shard(source, tensors, 1)
    convert.convert(source, out.with_name("tied shard"))
    assert tensors_in(out.with_name("tied shard")).keys() == tensors.keys() - {"lm_head.weight"}


def fails(capsys, source, out, code, *messages):
    before = sorted(out.parent.iterdir()) if out.parent.exists() else []
    assert convert.main([str(source), str(out)]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    for message in messages:
        assert message in captured.err
    assert (sorted(out.parent.iterdir()) if out.parent.exists() else []) == before


@pytest.mark.parametrize("form", ["zip", "old", "bare", "among tensors"])
def test_a_malicious_pickle_is_refused(pickled, capsys, form):
    source, out, tensors = pickled
    mark, path = source / "boom", source / "pytorch_model.bin"
    evil = {**tensors, "x": Boom(mark)} if form == "among tensors" else Boom(mark)
    if form == "bare":
        path.write_bytes(pickle.dumps(evil, protocol=2))
    else:
        torch.save(evil, path, _use_new_zipfile_serialization=form != "old")
    fails(capsys, source, out, 3, "asks for more than tensors", "mkdir", str(path), "Do not trust")
    path.write_bytes(pickle.dumps(evil, protocol=4))
    fails(capsys, source, out, 3, "not a readable pickle of tensors")
    assert not mark.exists()


def _cut(path):
    path.write_bytes(path.read_bytes()[:-200])


def _noise(path):
    path.write_bytes(b"\x80\x02" + bytes(range(256)))


def _zip(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, "not a readable pickle"),
        (_noise, "not a readable pickle"),
        (_zip, "not a readable pickle"),
        (lambda path: path.write_bytes(b""), "not a readable pickle"),
        (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1"), "git-LFS pointer"),
        (lambda path: torch.save([1], path), "expected tensors by name, got list"),
        (lambda path: torch.save({"a": 1}, path), "'a': expected a tensor, got int"),
        (lambda path: torch.save({"a": torch.ones(1).expand(1 << 40)}, path), "'a': larger than"),
        (
            lambda path: torch.save({"a": torch.ones(2, 2).to_sparse()}, path),
            "'a': expected plain data, got a tensor of layout torch.sparse_coo",
        ),
        (lambda path: torch.save({3: torch.ones(2)}, path), "3: expected a name, got int"),
        (lambda path: torch.save({"\ud800": torch.ones(2)}, path), "cannot be the name of a tensor"),
        (lambda path: torch.save({"__metadata__": torch.ones(2)}, path), "cannot be the name of a tensor"),
        (lambda path: torch.save({"state_dict": {"a": torch.ones(2)}}, path), "this is a training checkpoint"),
        (lambda path: torch.save({"a": torch.ones(0, 3)}, path), "expected data, got the empty shape [0, 3]"),
        (lambda path: torch.save({}, path), "expected tensors by name, got a dictionary without any"),
        (lambda path: torch.save({"a": torch.ones(2, dtype=torch.complex64)}, path), "got torch.complex64"),
        (lambda path: path.unlink(), "neither pytorch_model.bin nor its index"),
        (lambda path: path.rename(path.with_name("x.safetensors")), "safetensors already"),
        (lambda path: (path.parent / "config.json").unlink(), "no config.json"),
        (lambda path: (path.parent / "config.json").write_text("{"), "not valid JSON"),
    ],
)
def test_damaged_sources(pickled, capsys, damage, message):
    source, out, _ = pickled
    damage(source / "pytorch_model.bin")
    fails(capsys, source, out, 3, message, str(source))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files: files | {"model.norm.weight": "../evil.bin"}, "no plain name"),
        (lambda files: files | {"model.norm.weight": "/evil.bin"}, "no plain name"),
        (lambda files: files | {"model.norm.weight": "gone.bin"}, "gone.bin is not there"),
        (lambda files: files | {"extra": files["model.norm.weight"]}, "disagree about 1 tensors, 'extra'"),
        (lambda files: {}, "expected an object"),
    ],
)
def test_damaged_indexes(pickled, capsys, change, message):
    source, out, tensors = pickled
    files = shard(source, tensors)
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": change(files)}))
    fails(capsys, source, out, 3, message)


def test_nothing_is_overwritten(pickled, capsys):
    source, out, _ = pickled
    out.mkdir(parents=True)
    fails(capsys, source, out, 2, "there already", str(out))
    fails(capsys, source, source, 2, "there already")
    (out / "file").write_text("")
    assert convert.main([str(source), str(out / "file" / "dst")]) == 2
    assert "cannot be made" in capsys.readouterr().err


def test_an_interrupt_leaves_nothing(pickled, capsys, monkeypatch):
    source, out, _ = pickled
    out.parent.mkdir()

    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "write_tensors", stopped)
    fails(capsys, source, out, 130, "interrupted")


@pytest.mark.parametrize("version", ["2.9.1", "1.13.0+cu117", "odd"])
def test_old_versions_of_torch_are_refused(version):
    with pytest.raises(UsageError, match=r"torch >= 2\.10"):
        convert.check_torch(version)
    convert.check_torch("2.10.0a0+git")
    convert.check_torch("3.0")

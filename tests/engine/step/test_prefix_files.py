"""Prefixes in files: what a reader answers is what a cold engine answers; wrong files are refused by name."""

import math

import pytest
import torch
from safetensors import safe_open

from engine import Engine, KVMemoryError, UsageError
from engine.step import prefix_files
from kernels import same_bits
from models.checkpoint.tensor_files import write_tensors
from search import Greedy, Trie
from tests.engine.cache import test_prefixes
from tests.engine.cache.test_prefixes import ROOT, exact, load, same
from tests.invariants import check_pool
from tests.recurrent import CHANNELS, KIND, SCAN, check_stores, hybrid

folder, page_size = test_prefixes.folder, test_prefixes.page_size


def test_a_prefix_in_a_file(folder, page_size, tmp_path):
    file, prefix = tmp_path / "prefix", [5 + i % 90 for i in range(130)]
    writer, reader, cold = load(folder), load(folder), load(folder, prefix_cache="off")
    writer.save_prefix(file, prefix)
    assert reader.load_prefix(file) == prefix and file.stat().st_mode & 0o777 == 0o600
    for warm in (writer, reader):
        [result] = warm.generate([[*prefix, 9, 8]], Trie(beams=3), max_new_tokens=6)
        assert result.stats["reused_tokens"] == 130
        same(result, cold.generate([[*prefix, 9, 8]], Trie(beams=3), max_new_tokens=6)[0])
        exact(warm)
    reader.load_prefix(file, cache_salt="a")
    [result] = reader.generate([[*prefix, 9, 8]], Greedy(), max_new_tokens=2, cache_salt="a")
    assert result.stats["reused_tokens"] == 130


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_convolutions_and_int8_in_a_file(kv_dtype, tmp_path):
    path = ROOT / "tests/golden/lfm2/plain"
    options = {"kv_memory": 1 << 22, "dtype": "float32", "kv_dtype": kv_dtype}
    writer, reader = (Engine.load(path, prefix_cache="on", **options) for _ in range(2))
    prefix = [3 + i % 40 for i in range(30)]
    writer.save_prefix(tmp_path / "prefix", prefix)
    reader.load_prefix(tmp_path / "prefix")
    results = [e.generate([[*prefix, 9]], Trie(beams=3), max_new_tokens=5)[0] for e in (writer, reader)]
    same(*results)
    assert results[1].stats["reused_tokens"] == 30
    same(results[0], Engine.load(path, **options).generate([[*prefix, 9]], Trie(beams=3), max_new_tokens=5)[0])


@pytest.mark.parametrize(("length", "kind"), [(64, KIND), (90, KIND), (90, SCAN), (90, CHANNELS)])
def test_recurrent_layers_in_a_file(length, kind, tmp_path, monkeypatch):
    options = {"kv_memory": 6 << 20, "dtype": "float32"}
    hybrid(tmp_path, monkeypatch, kind=kind)
    writer, reader = (Engine.load(tmp_path, prefix_cache="on", **options) for _ in range(2))
    file, prefix = tmp_path / "prefix", [3 + i % 90 for i in range(length)]
    writer.save_prefix(file, prefix)
    reader.load_prefix(file)
    cold = Engine.load(tmp_path, **options).generate([[*prefix, 9]], Trie(beams=3), max_new_tokens=40)[0]
    for warm in (writer, reader):
        [result] = warm.generate([[*prefix, 9]], Trie(beams=3), max_new_tokens=40)
        assert result.stats["reused_tokens"] == length
        same(result, cold)
        check_stores(warm)
    with pytest.raises(UsageError, match=f"too short: expected at least {kind.block} tokens, got {kind.block - 1}"):
        writer.save_prefix(file, prefix[: kind.block - 1])
    with safe_open(file, framework="pt") as opened:
        metadata, kept = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    for change in ({"states": kept["states"][:, :0]}, {"rows": kept["rows"][:, 1:]}, {"rows": kept["rows"] * math.nan}):
        damaged = kept | {name: x.contiguous() for name, x in change.items()}
        checksum = prefix_files._checksum(damaged, metadata["tokens"])
        with open(tmp_path / "damaged", "wb") as opened:
            write_tensors(opened, damaged, metadata | {"checksum": checksum})
        with pytest.raises(UsageError, match=f"not valid: {next(iter(change))}: expected"):
            reader.load_prefix(tmp_path / "damaged")
    check_stores(reader)


def test_files_that_are_refused(folder, tmp_path):
    file, prefix, whole = tmp_path / "prefix", [5 + i % 90 for i in range(60)], load(folder)
    whole.save_prefix(file, prefix)
    data = file.read_bytes()

    def refused(words, engine=whole, path=file):
        with pytest.raises(UsageError, match=words):
            engine.load_prefix(path)
        check_pool(engine.pool, [])

    refused("another model, dtype or format", load(folder, kv_dtype="int8"))
    refused("prefixes are not kept", load(folder, prefix_cache="off"))
    refused("cannot be read: No such file", path=tmp_path / "none")
    refused("cannot be read: Is a directory", path=tmp_path)
    refused("no prefix of this version", path=folder / "model.safetensors")
    with pytest.raises(KVMemoryError, match="full"):
        load(folder, 40).load_prefix(file)
    for damaged, words in ((data[:-9], "damaged"), (data[:-9] + b"x" * 9, "checksum"), (b"abc", "damaged")):
        file.write_bytes(damaged)
        refused(words)
    with pytest.raises(UsageError, match="prefix cannot be written: No such file"):
        whole.save_prefix(tmp_path / "none" / "prefix", prefix)
    with pytest.raises(UsageError, match="token ids from 0 to 119, got 500"):
        whole.save_prefix(file, [500])


def metadata(key, value):
    return lambda found, tensors: found.update({key: value})


def numbers(value):
    def change(found, tensors):
        tensors[min(tensors)].view(-1)[7] = value

    return change


def test_what_bits_depend_on():
    said = []
    for choice in ("on", "off"):
        with same_bits.asking(choice):
            said += [prefix_files._computed(torch.device(kind)) for kind in ("cpu", "cuda")]
    assert said == ["cpu", "cuda, COPPICE_SAME_BITS=on", "cpu", "cuda"]


CRAFTED = {
    "no tokens": (lambda found, tensors: found.pop("tokens"), "tokens: expected a list of ids from 0 to 119, got ''"),
    "no list": (metadata("tokens", "7"), "tokens: expected a list"),
    "no JSON": (metadata("tokens", "[1, 2"), "tokens: expected a list"),
    "nested": (metadata("tokens", "[" * 100_000), "tokens: expected a list"),
    "empty": (metadata("tokens", "[]"), "tokens: expected a list"),
    "floats": (metadata("tokens", str([5.0] * 60)), "tokens: expected a list"),
    "truths": (metadata("tokens", "[" + "true, " * 59 + "true]"), "tokens: expected a list"),
    "negative": (metadata("tokens", str([-1] * 60)), "tokens: expected a list"),
    "outside": (metadata("tokens", str([120] * 60)), "tokens: expected a list of ids from 0 to 119"),
    "endless": (metadata("tokens", str([5] * 401)), "tokens: expected at most 400, the model's context, got 401"),
    "fewer": (metadata("tokens", str([5] * 59)), "expected .*59.* got .*60"),
    "another device": (metadata("computed", "cuda"), "computed on 'cuda', not on 'cpu'"),
    "another order of sums": (metadata("computed", "cpu, COPPICE_SAME_BITS=on"), "=on', not on 'cpu'"),
    "no device": (lambda found, tensors: found.pop("computed"), "computed on None"),
    "another tensor": (lambda found, tensors: tensors.update(x=tensors[min(tensors)]), "expected the tensors"),
    "a tensor less": (lambda found, tensors: tensors.pop(min(tensors)), "expected the tensors"),
    "a shape": (
        lambda found, tensors: tensors.update({n: x[:1].clone() for n, x in tensors.items()}),
        "expected .* got",
    ),
    "a dtype": (lambda found, tensors: tensors.update({n: x.double() for n, x in tensors.items()}), "got .*float64"),
    "NaN": (numbers(math.nan), "expected numbers of at most"),
    "infinite": (numbers(-math.inf), "expected numbers of at most"),
    "huge": (numbers(1e30), "expected numbers of at most"),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_crafted_files_with_right_checksums(case, folder, tmp_path):
    """Refused by name, nothing changed: no request ever reads them."""
    change, words = CRAFTED[case]
    file, engine = tmp_path / "prefix", load(folder)
    engine.save_prefix(file, [5 + i % 90 for i in range(60)])
    engine.pool.prefixes.clear()
    with safe_open(file, framework="pt") as opened:
        found, tensors = dict(opened.metadata()), {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    change(found, tensors)
    found["checksum"] = prefix_files._checksum(tensors, found.get("tokens", ""))
    with file.open("wb") as out:
        write_tensors(out, tensors, found)
    with pytest.raises(UsageError, match=words) as error:
        engine.load_prefix(file)
    assert error.value.where == str(file) and "--save-prefix" in error.value.remedy
    check_pool(engine.pool, [])
    assert engine.pool.free_pages == engine.pool.pages

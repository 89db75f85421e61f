"""Later starts read what earlier ones derived: the same numbers, and whatever changed is derived again."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine import Engine, UsageError
from engine.app import batch_flags
from engine.app.cli import load_options
from engine.load.file_cache import file_cache as cache_of
from kernels import cpp
from kernels.linear import Packed
from models import file_cache
from models.checkpoint import cached_matrices
from models.formats import grouped, int4, int8
from models.formats.floats import PackedLinear
from models.trim import is_mapped
from tests.models.copies import changed

GOLDEN = Path(__file__).parents[2] / "golden"
pytestmark = pytest.mark.skipif(bool(cpp.why_not()), reason=f"no C++ kernels: {cpp.why_not()}")


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """The folder of files; everything is worth one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("COPPICE_CACHE")
    monkeypatch.setattr(cached_matrices, "WORTH", 1)
    monkeypatch.setattr(file_cache, "TICK", -3600)  # golden files may have been made just now
    return tmp_path / "home" / "coppice" / "models"


KERNELS = cpp.cache_folder() / "kernels"


def loaded(folder, **options):
    """An engine, once its thread has written what it derived."""
    engine = Engine.load(folder, **{"dtype": "float32", "kv_memory": 1 << 22} | options)
    for thread in file_cache._running:
        thread.join()
    return engine


def logits(folder, **options):
    return loaded(folder, **options).logits(list(range(3, 30)))


def gguf(tmp_path, name="file.gguf", format="Q4_K", **some):
    from tests.models.gguf.files import WIDE, File, gguf, random

    if not (source := tmp_path / "source").exists():
        random(source, "llama/gqa", **WIDE)
    types = gguf.GGMLQuantizationType
    return File(source, types[format], {name: types[kind] for name, kind in some.items()}).write(tmp_path / name)


def nothing_derived(monkeypatch):
    """From now on every matrix has to come from the cache."""

    def derived(*_, **__):
        raise AssertionError("derived again")

    for module, name in ((grouped, "pack_groups"), (grouped, "BlockPanels"), (int8, "pack"), (int4.Int4, "quantized")):
        monkeypatch.setattr(module, name, derived)


@pytest.mark.parametrize("quant", ["int8", "int4", "int4-zeros-64", "int4-head"])
def test_quantised_matrices_of_a_later_start(quant, kept, monkeypatch):
    first = logits(GOLDEN / "llama/gqa", quant=quant)
    assert len([*kept.iterdir()]) == 1
    nothing_derived(monkeypatch)
    engine = loaded(GOLDEN / "llama/gqa", quant=quant)
    assert engine.logits(list(range(3, 30))).equal(first) and len([*kept.iterdir()]) == 1


@pytest.mark.parametrize(
    "variant", ["gptq_desc_act", "awq", "float8_channel", "mixed", "int8_token", "gemma", "pack_bits"]
)
def test_quantised_checkpoints(variant, kept, monkeypatch):
    first = logits(GOLDEN / "quantized" / variant)
    assert len([*kept.iterdir()]) == 1
    nothing_derived(monkeypatch)
    assert logits(GOLDEN / "quantized" / variant).equal(first)


@pytest.mark.parametrize("some", [{}, {"blk.0.attn_k.weight": "Q8_0", "blk.0.attn_v.weight": "F16"}])
@pytest.mark.parametrize("format", ["Q4_K", "Q6_K", "Q4_1", "Q8_0", "MXFP4"])
def test_blocks_of_gguf_files(format, some, kept, tmp_path, monkeypatch):
    path = gguf(tmp_path, "file.gguf", format, **some)
    first = logits(path)
    nothing_derived(monkeypatch)
    assert logits(path).equal(first) and kept.exists()


def test_experts(kept, monkeypatch):
    folder = GOLDEN / "experts" / "qwen3"
    first = logits(folder, quant="int4")
    nothing_derived(monkeypatch)
    assert logits(folder, quant="int4").equal(first)


def test_matrices_lie_where_the_file_is_mapped(kept, monkeypatch):
    monkeypatch.setattr("models.trim.WORTHWHILE", 1)
    for mapped in (False, True):
        model = loaded(GOLDEN / "llama/gqa", quant="int4").runner.model
        matrices = [layer.packed for layer in model.modules() if isinstance(layer, PackedLinear)]
        assert {is_mapped(packed.panels) for packed in matrices if isinstance(packed, Packed)} == {mapped}


def test_a_file_that_changed_in_place_is_derived_again(kept, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = changed(tmp_path, "llama/gqa")
    path = folder / "model.safetensors"
    before, status = logits(folder, quant="int8"), path.stat()
    save_file({name: x * 2 if "q_proj" in name else x for name, x in load_file(path).items()}, tmp_path / "other")
    path.write_bytes((tmp_path / "other").read_bytes())  # the same inode, size and names
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = logits(folder, quant="int8")
    assert not after.equal(before) and after.equal(logits(folder, quant="int8", cache="off"))
    assert len([*kept.iterdir()]) == 2


@pytest.mark.parametrize("at", ["the first look", "the last one"])
def test_a_file_that_changes_while_it_is_read_is_not_kept(at, kept, tmp_path, monkeypatch):
    folder, looks = changed(tmp_path, "llama/gqa"), []
    monkeypatch.setattr(file_cache, "TICK", 0.0 if at == "the first look" else -3600)

    def touched(paths):
        looks.append(paths)
        if len(looks) == (1 if at == "the first look" else 2):
            time.sleep(0.1)  # longer than a tick of the file system's clock, which lags behind
            os.utime(folder / "model.safetensors")
        return file_cache.identity(paths)

    time.sleep(0.1)
    monkeypatch.setattr(cached_matrices, "identity", touched)
    loaded(folder, quant="int8")
    assert not kept.exists() and looks
    monkeypatch.setattr(cached_matrices, "identity", file_cache.identity)
    time.sleep(0.1)
    loaded(folder, quant="int8")
    assert kept.exists()


def test_another_format_has_a_file_of_its_own(kept):
    numbers = [logits(GOLDEN / "llama/gqa", quant=quant) for quant in ("int8", "int4", "int8", "int4")]
    assert numbers[0].equal(numbers[2]) and numbers[1].equal(numbers[3]) and not numbers[0].equal(numbers[1])
    assert len([*kept.iterdir()]) == 2


def test_another_version_derives_again(kept, monkeypatch):
    logits(GOLDEN / "llama/gqa", quant="int8")
    monkeypatch.setattr(file_cache, "code", lambda: "another version")
    logits(GOLDEN / "llama/gqa", quant="int8")
    assert len([*kept.iterdir()]) == 2


def test_a_damaged_file_is_derived_again_and_replaced(kept, capfd, monkeypatch):
    first = logits(GOLDEN / "llama/gqa", quant="int4")
    [path] = kept.iterdir()
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    capfd.readouterr()
    assert logits(GOLDEN / "llama/gqa", quant="int4").equal(first)
    assert capfd.readouterr().err.count("its content is damaged") == 1
    nothing_derived(monkeypatch)
    assert logits(GOLDEN / "llama/gqa", quant="int4").equal(first)


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_nothing_is_left_where_nothing_is_to_be_kept(how, kept, monkeypatch):
    if how == "variable":
        monkeypatch.setenv("COPPICE_CACHE", "off")
    logits(GOLDEN / "llama/gqa", quant="int4", **({"cache": "off"} if how == "argument" else {}))
    assert not kept.exists()
    monkeypatch.delenv("COPPICE_CACHE", raising=False)
    logits(GOLDEN / "llama/gqa", quant="int4")
    monkeypatch.setattr("models.file_cache.FileCache.open", lambda *_: pytest.fail("read"))
    logits(GOLDEN / "llama/gqa", quant="int4", cache="off")


def test_floats_and_small_models_are_not_kept(kept, monkeypatch):
    logits(GOLDEN / "llama/gqa")
    monkeypatch.setattr(cached_matrices, "WORTH", 1 << 30)
    logits(GOLDEN / "llama/gqa", quant="int4")
    assert not kept.exists()


def test_the_bound(kept, monkeypatch):
    logits(GOLDEN / "llama/gqa", quant="int8")
    [path] = kept.iterdir()
    monkeypatch.setenv("COPPICE_CACHE", str(path.stat().st_size + 10000))
    logits(GOLDEN / "llama/gqa", quant="int4")
    assert len([*kept.iterdir()]) == 1 and not path.exists()
    monkeypatch.setenv("COPPICE_CACHE", "lots")
    with pytest.raises(UsageError, match="COPPICE_CACHE: expected off, or the most bytes of files such as 16G"):
        logits(GOLDEN / "llama/gqa")


def test_the_flag():
    assert load_options(batch_flags.make_parser().parse_args([])).cache == "on"
    assert load_options(batch_flags.make_parser().parse_args(["--no-cache"])).cache == "off"
    assert cache_of("off") is None and cache_of("on") is not None
    with pytest.raises(UsageError, match="cache: expected on or off, got 'no'"):
        Engine.load(GOLDEN / "llama/gqa", cache="no")


def test_a_program_that_ends_at_once_keeps_its_matrices(kept):
    """And a second one reads them."""
    code = (
        "import sys; from engine import Engine; from models.checkpoint import cached_matrices\n"
        "from models import file_cache; cached_matrices.WORTH, file_cache.TICK = 1, -3600\n"
        "sys.stdout.write(str(Engine.load(sys.argv[1], quant='int4', kv_memory=1 << 22).load_seconds))"
    )
    command = [sys.executable, "-c", code, str(GOLDEN / "llama/gqa")]
    if not os.environ.get(cpp.VARIABLE):  # what this machine has built
        shutil.copytree(KERNELS, kept.parent / "kernels")
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "coppice: " not in done.stderr and len([*kept.iterdir()]) == 1


def test_one_file_serves_both_kinds_of_activations(tmp_path, kept):
    """Its matrices are the same, whichever start made it."""
    path = gguf(tmp_path, output="Q6_K")
    plain, rounded = (logits(path, cache="off", activations=name) for name in ("auto", "int8"))
    assert not plain.equal(rounded)
    for first in ("int8", "auto"):
        for name in (first, "int8", "auto"):
            assert logits(path, activations=name).equal(rounded if name == "int8" else plain)
        shutil.rmtree(kept)

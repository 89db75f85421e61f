"""A first start with a part of the experts in memory packs them into a file: the same bits, and nothing half done."""

import os
import shutil
import subprocess
import sys
import weakref
from collections import namedtuple
from itertools import product
from pathlib import Path

import pytest
import torch

from engine import CheckpointError, Engine, UsageError
from engine.load import repacking
from engine.load.budget import allow, plan
from engine.load.experts import why_whole
from engine.load.loading import load_models
from engine.load.sizes import Workload
from kernels import cpp
from kernels.linear import PackedParts
from models import file_cache
from models.checkpoint.cached_matrices import matrices_of_experts
from models.checkpoint.headers import Checkpoint
from models.checkpoint.repacked import repack, repacked_bytes
from models.file_cache import FileCache
from models.formats import floats
from models.mixture import Mixture
from tests.engine.load.mixture import COUNT, MB, large, logits, options
from tests.marks import needs_cpp
from tests.models.copies import GOLDEN

pytestmark = [
    needs_cpp,
    pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not say what it maps"),
]
LIMIT = 64 * MB  # all experts of a small model, which are read from the file all the same
PROMPT = [*range(3, 30)]


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """The folder of the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "own"))
    (tmp_path / "own").mkdir()
    monkeypatch.delenv("COPPICE_CACHE")
    monkeypatch.setattr(file_cache, "TICK", -3600)  # golden files may have been made just now
    monkeypatch.setattr(repacking, "_in_memory", lambda folder: False)  # tests may run there
    return tmp_path / "home" / "coppice" / "models"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return large(tmp_path_factory.mktemp("mixture"))


def started(folder, limit=LIMIT, **more):
    return Engine(load_models(options(folder, **more), MB, limit)["target"], 1)


def whole(folder, **more):
    return Engine.load(folder, **{"dtype": "float32", "device": "cpu", "cache": "off", "kv_memory": MB, **more})


def files(folder):
    return [path.name for path in folder.iterdir()] if folder.exists() else []


def gguf(tmp_path, format):
    from tests.models.gguf.files import WIDE, File, gguf, random

    random(tmp_path / "source", "experts/qwen3", **WIDE)
    return File(tmp_path / "source", gguf.GGMLQuantizationType[format]).write(tmp_path / "file.gguf")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("variant", "quant"),
    [("gpt_oss/mxfp4", "none"), *product(["experts/qwen3", "experts/qwen2"], ["none", "int8", "int4"])],
)
def test_the_same_bits_as_without_a_limit(variant, quant, dtype, kept, capfd):
    expected = whole(GOLDEN / variant, quant=quant, dtype=dtype).logits(PROMPT)
    capfd.readouterr()
    for first in (True, False):
        engine = started(GOLDEN / variant, quant=quant, dtype=dtype)
        assert engine.logits(PROMPT).equal(expected)
        assert ("packing " in capfd.readouterr().err) is first
        assert len(files(kept)) == 1
    assert whole(GOLDEN / variant, quant=quant, dtype=dtype, cache="on").logits(PROMPT).equal(expected)


@pytest.mark.parametrize("format", ["Q8_0", "BF16"])
def test_gguf_files(format, tmp_path, kept):
    path = gguf(tmp_path, format)
    expected = whole(path).logits(PROMPT)
    assert started(path).logits(PROMPT).equal(expected) and started(path).logits(PROMPT).equal(expected)
    assert len(files(kept)) == 1


def test_an_ordinary_start_reads_the_same_file(kept, monkeypatch):
    started(GOLDEN / "experts/qwen3", quant="int8")
    monkeypatch.setattr(FileCache, "write", lambda *_: pytest.fail("written again"))
    whole(GOLDEN / "experts/qwen3", quant="int8", cache="on")
    for thread in file_cache._running:
        thread.join()
    assert len(files(kept)) == 1


def test_floats_of_another_dtype_have_a_file_of_their_own(kept):
    for dtype in ("float32", "bfloat16", "float32"):
        started(GOLDEN / "experts/qwen3", dtype=dtype)
    assert len(files(kept)) == 2


def test_experts_lie_in_the_file_and_the_limit_holds(mixture, kept, monkeypatch):
    monkeypatch.setattr("engine.load.budget.runtime_bytes", lambda: 200 * MB)
    expected = logits(whole(mixture))
    given = options(mixture, workload=Workload())
    planned = plan(given, Workload())
    memory = planned.total(1) - planned.experts.every + planned.experts.least + 2 * MB
    assert why_whole(given) is None
    assert f"first packs {repacking.size_text(planned.experts.every)} into a file" in planned.experts.limits()
    allowed = allow(options(mixture, workload=Workload(), memory=memory))
    assert planned.experts.least <= allowed.experts < 0.75 * planned.experts.every
    engine = started(mixture, allowed.experts)
    assert logits(engine).equal(expected)
    [held] = {module.matrices._keeper.held for module in engine.runner.model.modules() if isinstance(module, Mixture)}
    assert allowed.experts // 2 < held <= allowed.experts
    assert "into a file" not in plan(given, Workload()).experts.limits()  # it is there by now


def test_one_matrix_is_in_memory_at_a_time(mixture, kept, monkeypatch):
    made, pack = [], floats.pack

    def packing(*arguments):
        assert all(panels() is None for panels in made)
        panels = pack(*arguments)
        made.append(weakref.ref(panels))
        return panels

    monkeypatch.setattr(floats, "pack", packing)
    checkpoint, told = Checkpoint.open(mixture), []
    matrices = matrices_of_experts(FileCache(kept, 1 << 34), checkpoint, torch.float32, "none", 0.0)
    with matrices.cache.begin(matrices.name) as new:
        repack(checkpoint, torch.float32, "none", matrices, new, told.append)
    assert len(made) == len(told) == 2 * 3 * COUNT  # up and down of each expert of three layers
    assert told == sorted(told) and told[-1] == repacked_bytes(checkpoint, torch.float32, "none")


@pytest.mark.parametrize("how", ["an error", "Ctrl-C", "a full disk"])
def test_what_is_interrupted_leaves_nothing(how, mixture, kept, monkeypatch):
    put, count = file_cache._put, 0
    raised = {"an error": RuntimeError("x"), "Ctrl-C": KeyboardInterrupt(), "a full disk": OSError(28, "No space left")}

    def failing(*arguments):
        nonlocal count
        count += 1
        if count == 20:
            raise raised[how]
        put(*arguments)

    monkeypatch.setattr(file_cache, "_put", failing)
    expected = UsageError if how == "a full disk" else type(raised[how])
    with pytest.raises(expected) as refused:
        started(mixture)
    assert count == 20 and files(kept) == []
    if how == "a full disk":
        assert "cannot be packed into a file" in str(refused.value) and "No space left" in str(refused.value)
    monkeypatch.setattr(file_cache, "_put", put)
    assert started(mixture) and len(files(kept)) == 1


def test_a_process_that_is_killed_leaves_no_file_of_the_name(mixture, kept):
    code = (
        "import os, sys\nfrom engine.load import repacking\nfrom models import file_cache\n"
        "from engine.load.loading import load_models\nfrom engine.load.options import LoadOptions\n"
        "file_cache.TICK, repacking._in_memory, put, n = -3600, lambda folder: False, file_cache._put, [0]\n"
        "def failing(*all):\n    n[0] += 1\n    os.kill(os.getpid(), 9) if n[0] == 20 else put(*all)\n"
        "file_cache._put = failing\n"
        "load_models(LoadOptions(sys.argv[1], dtype='float32', quant='none', device='cpu'), 1 << 20, 1 << 26)"
    )
    if not os.environ.get(cpp.VARIABLE):  # what this machine has built
        shutil.copytree(KERNELS, kept.parent / "kernels")
    assert subprocess.run([sys.executable, "-c", code, str(mixture)], stderr=-1, check=False).returncode == -9
    assert [Path(name).suffix for name in files(kept)] == [".part"]
    started(mixture)  # which writes it anew
    assert [Path(name).suffix for name in files(kept)] == [""]


KERNELS = cpp.cache_folder() / "kernels"


@pytest.mark.parametrize("why", ["off", "small", "no folder", "full", "changed", "in memory"])
def test_a_file_of_its_own_where_the_cache_takes_none(why, mixture, tmp_path, kept, monkeypatch, capfd):
    said = {
        "off": "it is off",
        "small": "it holds 1.0 MB at most: COPPICE_CACHE=1G raises that",
        "no folder": "Not a directory",
        "full": "models has ",
        "changed": "the checkpoint has just been written",
        "in memory": "models lies in memory",
    }
    if why == "small":
        monkeypatch.setenv("COPPICE_CACHE", "1M")
    if why == "no folder":
        kept.parent.parent.mkdir()
        kept.parent.touch()
    if why == "full":
        usage = namedtuple("usage", "free")
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0 if "home" in str(folder) else 1 << 40))
    if why == "changed":
        monkeypatch.setattr(file_cache, "TICK", 1e9)
    if why == "in memory":
        monkeypatch.setattr(repacking, "_in_memory", lambda folder: "home" in str(folder))
    expected = logits(whole(mixture))
    capfd.readouterr()
    engine = started(mixture, cache="off" if why == "off" else "on")
    told = capfd.readouterr().err
    assert f"it lies in {tmp_path / 'own'} and is removed when this process ends" in told and said[why] in told
    assert files(tmp_path / "own") == [] and (why == "no folder" or files(kept) == [])
    assert logits(engine).equal(expected)


def test_no_disk_has_the_room(mixture, tmp_path, kept, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage((1 << 30) + 5 * MB))
    with pytest.raises(UsageError) as refused:
        started(mixture)
    text = str(refused.value)
    size = repacking.size_text(plan(options(mixture), Workload()).experts.every)
    assert f"no disk takes the {size} that they are packed into" in text
    for folder in (kept, tmp_path / "own"):
        assert f"{folder} has 1.0 GB free, of which 1.0 GB stay free, and {size} are needed" in text
    assert "GB free there" in text and "TMPDIR" in text and files(kept) == [] == files(tmp_path / "own")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_is_read_only(mixture, kept, capfd):
    kept.mkdir(parents=True)
    kept.chmod(0o500)
    started(mixture)
    assert "Permission denied" in capfd.readouterr().err and files(kept) == []


def test_a_checkpoint_that_changes_meanwhile(mixture, tmp_path, kept, monkeypatch):
    copy = shutil.copytree(mixture, tmp_path / "copy")
    put = file_cache._put
    monkeypatch.setattr(file_cache, "_put", lambda *all: (os.utime(copy / "model.safetensors"), put(*all)))
    with pytest.raises(CheckpointError, match="the weights changed while they were packed"):
        started(copy)
    assert files(kept) == []


def test_what_another_process_writes_is_waited_for(mixture, kept, monkeypatch, capfd):
    first = started(mixture)
    [name] = files(kept)
    expected, aside = logits(first), kept.parent / "aside"
    (kept / name).rename(aside)
    part = os.open(kept / f"{name}.part", os.O_CREAT | os.O_RDWR, 0o600)
    file_cache.files.lock(part)

    def ended(seconds):
        aside.rename(kept / name)

    monkeypatch.setattr("engine.load.repacking.time.sleep", ended)
    capfd.readouterr()
    assert logits(started(mixture)).equal(expected)
    os.close(part)
    assert "another process packs the same matrices" in capfd.readouterr().err


def test_which_folders_lie_in_memory(monkeypatch):
    monkeypatch.undo()
    lines = Path("/proc/self/mountinfo").read_text("utf-8").splitlines()
    kinds = {line.split(" - ")[1].split()[0]: line.split()[4] for line in lines}
    assert not repacking._in_memory(Path(__file__).parent) or "tmpfs" in kinds
    if "tmpfs" in kinds:
        assert repacking._in_memory(Path(kinds["tmpfs"]))


def test_parts_of_several_kinds_are_read_from_the_file(tmp_path, kept):
    """Gate and up of an expert, quantised and floats, are two parts of one matrix."""
    from tests.models.gguf.files import WIDE, File, gguf, random

    types = gguf.GGMLQuantizationType
    random(tmp_path / "source", "experts/qwen3", **WIDE)
    file = File(tmp_path / "source", types.Q8_0, {"blk.0.ffn_up_exps.weight": types.F16})
    path = file.write(tmp_path / "file.gguf")
    expected = whole(path).logits(PROMPT)
    engine = started(path)
    assert engine.logits(PROMPT).equal(expected)
    up, _ = engine.runner.model.layers[0].mlp.matrices.experts[0]
    assert isinstance(up.packed, PackedParts)

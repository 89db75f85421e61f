"""Mixtures of experts of which `--memory` holds a part: the same bits, and no more of the file in memory than said."""

import gc
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import Engine, UsageError
from engine.load.budget import allow, plan, table
from engine.load.loading import load_models
from engine.load.options import LoadOptions
from engine.load.sizes import Workload
from models import file_cache
from search import Trie
from tests.marks import needs_cpp
from tests.models.copies import changed
from tools.pack import pack

pytestmark = [
    needs_cpp,
    pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not say what it maps"),
]
PROMPTS = [[3 + (7 * i + j) % 90 for j in range(3)] for i in range(16)]
COUNT, INNER, WIDTH = 16, 4096, 24
MB = 1 << 20


def drawn(tensors):
    """Experts of 1 MB each, so that windows of pages are a small part of them."""
    random = torch.Generator().manual_seed(0)
    sizes = {"experts.gate_up_proj": (COUNT, 2 * INNER, WIDTH), "experts.down_proj": (COUNT, WIDTH, INNER)}
    sizes["mlp.gate.weight"] = (COUNT, WIDTH)

    def tensor(name, x):
        size = next((size for end, size in sizes.items() if name.endswith(end)), None)
        return x if size is None else (torch.randn(size, generator=random) / size[-1] ** 0.5).to(x.dtype)

    return {name: tensor(name, x) for name, x in tensors.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The checkpoint, and the same packed ahead."""
    folder = tmp_path_factory.mktemp("mixture")
    fields = {"num_experts": COUNT, "moe_intermediate_size": INNER}
    source = changed(folder, "experts/qwen3", fields, drawn)
    pack(source, folder / "packed")
    return source, folder / "packed"


def options(folder, **more):
    return LoadOptions(folder, **{"dtype": "float32", "quant": "none", "device": "cpu"} | more)


def resident(folder):
    """Bytes of the mapped weights that are in this process's memory."""
    maps = Path("/proc/self/smaps").read_text("utf-8", "replace")
    own = rf"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ +{re.escape(str(folder))}/.*\n(?:[A-Z].*\n)*?Rss: +(\d+) kB$"
    return 1024 * sum(map(int, re.findall(own, maps, re.MULTILINE)))


def logits(engine):
    return torch.stack([engine.logits(prompt) for prompt in PROMPTS])


def test_fewer_experts_in_memory_than_there_are(folders):
    _, packed = folders
    planned = plan(options(packed), Workload())
    experts = planned.experts
    assert experts is not None and experts.apart() is None
    whole = Engine.load(packed, dtype="float32", kv_memory=MB)
    assert whole.capabilities.warning == ""
    expected = logits(whole)
    everything = resident(packed)
    assert everything > 0.8 * experts.every  # the texts choose nearly all of them
    del whole
    gc.collect()
    assert resident(packed) == 0

    limit = experts.least + MB
    assert limit < 0.75 * experts.every
    models = load_models(options(packed), MB, limit)
    engine = Engine(models["target"], 1)
    outside = resident(packed)  # attention, norms and the head are not touched yet
    rest = planned.lines["weights"] - experts.every + outside
    for prompt, row in zip(PROMPTS * 2, torch.cat([expected, expected]), strict=True):
        assert engine.logits(prompt).equal(row)
        assert resident(packed) <= limit + rest + MB
    assert resident(packed) < everything - 2 * MB
    held = engine.runner.model.layers[0].mlp.matrices._keeper.held
    assert limit // 2 < held <= limit
    assert re.search(r"--memory holds .* of .* of experts; a token touches .*: the others are read", told(engine))


def told(engine):
    return engine.model.capabilities.warning


def test_a_limit_of_memory_below_all_experts(folders, monkeypatch):
    _, packed = folders
    monkeypatch.setattr("engine.load.budget.runtime_bytes", lambda: 200 * MB)
    work = Workload()
    planned = plan(options(packed), work)
    experts, least = planned.experts, planned.cache(1) - planned.cache(0)
    memory = planned.total(1) - experts.every + experts.least

    def allowed(memory, **more):
        return allow(options(packed, memory=memory, workload=work, **more))

    assert memory + 8 * MB < planned.total(1)
    assert allowed(planned.total(1)) == (least, None)
    assert allowed(memory) == (least, experts.least)
    assert allowed(memory + 8 * MB) == (least + 4 * MB, experts.least + 4 * MB)
    assert allowed(memory + 8 * MB, kv_memory=least + MB) == (least + MB, experts.least + 7 * MB)
    with pytest.raises(UsageError, match=r"--kv-memory .* is more than the .* that --memory leaves"):
        allowed(memory + 8 * MB, kv_memory=least + 9 * MB)
    with pytest.raises(UsageError, match=r"experts that stay in memory(.|\n)*--memory holds at least"):
        allowed(memory - 1)
    both = plan(options(packed, draft=packed), work)
    lines = both.with_experts(experts.least).lines
    assert lines["draft weights"] == both.lines["draft weights"] == lines["target weights"] + experts.every

    engine = Engine.load(packed, dtype="float32", device="cpu", memory=memory + 8 * MB, workload=work)
    assert "of experts; a token touches" in told(engine)
    assert engine.pool.pages * engine.pool.page_bytes <= least + 5 * MB


def test_experts_that_an_earlier_start_left_in_the_cache(folders, tmp_path, monkeypatch):
    source, _ = folders
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("models.file_cache.TICK", -3600)  # the checkpoint was made just now
    monkeypatch.setattr("engine.load.budget.runtime_bytes", lambda: 200 * MB)

    def refusal(**more):
        given = options(source, workload=Workload(), **more)
        with pytest.raises(UsageError) as refused:
            allow(replace(given, memory=plan(given, Workload()).total(1) - MB))
        return str(refused.value)

    assert "the cache of derived files is off: pack the model ahead" in refusal()
    monkeypatch.delenv("COPPICE_CACHE")
    assert "floats are not cached: pack the model ahead" in refusal()
    assert "no earlier start has left them in the cache: pack the model ahead" in refusal(quant="int8")

    expected = logits(Engine.load(source, dtype="float32", device="cpu", quant="int8", kv_memory=MB))
    for thread in file_cache._running:
        thread.join()
    given = options(source, quant="int8", workload=Workload())
    planned = plan(given, Workload())
    limit = allow(replace(given, memory=planned.total(1) - MB)).experts
    assert planned.experts.least <= limit < planned.experts.every
    engine = Engine(load_models(given, MB, limit)["target"], 1)
    assert logits(engine).equal(expected)


def test_matrices_in_no_file_are_refused(folders):
    with pytest.raises(UsageError, match="a matrix of an expert lies in no mapped file"):
        load_models(options(folders[0], cache="off"), MB, 64 * MB)
    with pytest.raises(UsageError, match="of the experts of a layer at least"):
        load_models(options(folders[1]), MB, MB)


def test_the_table_says_what_a_token_touches(folders):
    shown = table(options(folders[1]), lambda beams: Trie(beams=beams), None, 8)
    said = r"own: a token touches 3 of 16 experts in each of 3 layers, (\S+) MB of (\S+) MB; --memory holds at least"
    found = re.search(said, shown)
    assert found, shown
    part, every = map(float, found.groups())
    assert part == pytest.approx(every * 3 / 16, abs=0.1)

"""Mixtures of experts of which `--memory` holds a part: the same bits, and no more of the file in memory than said."""

import gc
import re
from pathlib import Path

import pytest
import torch

from engine import Engine, UsageError
from engine.load.budget import allow, plan, table
from engine.load.loading import load_models
from engine.load.sizes import Workload
from search import Trie
from tests.engine.load.mixture import MB, PROMPTS, large, logits, options
from tests.marks import needs_cpp
from tools.pack import pack

pytestmark = [
    needs_cpp,
    pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not say what it maps"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The checkpoint, and the same packed ahead."""
    folder = tmp_path_factory.mktemp("mixture")
    source = large(folder)
    pack(source, folder / "packed")
    return source, folder / "packed"


def resident(folder):
    """Bytes of the mapped weights that are in this process's memory."""
    maps = Path("/proc/self/smaps").read_text("utf-8", "replace")
    own = rf"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ +{re.escape(str(folder))}/.*\n(?:[A-Z].*\n)*?Rss: +(\d+) kB$"
    return 1024 * sum(map(int, re.findall(own, maps, re.MULTILINE)))


def test_fewer_experts_in_memory_than_there_are(folders):
    _, packed = folders
    planned = plan(options(packed), Workload())
    experts = planned.experts
    assert experts is not None and experts.apart is None
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
    texts = planned.texts(planned.longest) - planned.texts(1)  # beside the caches below, which hold the longest text

    def allowed(memory, **more):
        return allow(options(packed, memory=memory, workload=work, **more))[:2]

    assert memory + 8 * MB < planned.total(1)
    assert allowed(planned.total(1)) == (least, None)
    assert allowed(memory) == (least, experts.least)
    assert allowed(memory + 8 * MB) == (least + 4 * MB - texts, experts.least + 4 * MB)
    assert allowed(memory + 8 * MB, kv_memory=least + MB) == (least + MB, experts.least + 7 * MB - texts)
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


def test_a_limit_below_the_experts_of_a_layer_is_refused(folders):
    with pytest.raises(UsageError, match="of the experts of a layer at least"):
        load_models(options(folders[1]), MB, MB)


def test_the_table_says_what_a_token_touches(folders):
    shown = table(options(folders[1]), lambda beams: Trie(beams=beams), 8)
    said = r"own: a token touches 3 of 16 experts in each of 3 layers, (\S+) MB of (\S+) MB; --memory holds at least"
    found = re.search(said, shown)
    assert found, shown
    part, every = map(float, found.groups())
    assert part == pytest.approx(every * 3 / 16, abs=0.1)

"""Which drafter an engine has: by name, or a user's own; refused where drafts do not ride along."""

from types import SimpleNamespace

import pytest
import torch

from engine import Engine, LoadOptions, UsageError
from engine.demo import demo_folder
from engine.drafts.backoff import NGramDrafter
from engine.drafts.choice import chosen_drafter
from engine.drafts.suffixes import SuffixDrafter
from search import Greedy
from tests.marks import needs_cpp


def runner(device="cpu", **more):
    fields = {
        "vocab_size": 260,
        "device": torch.device(device),
        "asynchronous": device != "cpu",
        "token_buckets": None,
        "shared": False,
        "impl": "cpp",
    }
    return SimpleNamespace(**fields | more)


def test_names():
    assert chosen_drafter("off", runner()) is None
    assert isinstance(chosen_drafter("ngrams", runner(impl="torch")), NGramDrafter)
    own = NGramDrafter()
    assert chosen_drafter(own, runner()) is own


@pytest.mark.parametrize(
    "runner",
    [runner("cuda"), runner(shared=True), runner(token_buckets=[8])],
    ids=["GPU", "processes", "compiled"],
)
def test_where_drafts_do_not_ride_along(runner):
    assert chosen_drafter("auto", runner) is None
    for named in ("ngrams", NGramDrafter()):
        with pytest.raises(UsageError, match="drafts: "):
            chosen_drafter(named, runner)


def test_auto_changes_no_bit():
    assert isinstance(chosen_drafter("auto", runner()), SuffixDrafter)
    assert chosen_drafter("auto", runner(impl="torch")) is None


@pytest.mark.parametrize("wrong", ["fast", "", 1, None])
def test_other_values_are_refused(wrong):
    with pytest.raises(UsageError, match="drafts: expected off, auto"):
        LoadOptions(demo_folder(), drafts=wrong)


@needs_cpp
def test_an_engine_drafts_as_it_was_told():
    options = {"kv_memory": 1 << 24, "threads": 1}
    engine = Engine.load(demo_folder(), drafts="ngrams", **options)
    [result] = engine.generate(["1 1 1 1 1 1 1 1"], Greedy(), max_new_tokens=20, ignore_eos=True)
    [plain] = Engine.load(demo_folder(), **options).generate(
        ["1 1 1 1 1 1 1 1"], Greedy(), max_new_tokens=20, ignore_eos=True
    )
    assert result.outputs == plain.outputs
    assert result.stats.keys() - plain.stats.keys() == {"drafted_nodes", "drafted_accepted", "passes_saved"}

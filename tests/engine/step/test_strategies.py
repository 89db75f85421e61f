"""The strategy of a batch: few tokens or divided rows only where every share wants no more."""

from types import SimpleNamespace

import pytest
import torch

from engine.contract.top_sums import TopSums
from engine.rules.constraint import Allowed
from engine.rules.few import Few
from engine.step.strategies import few_tokens, only_sums, strategy_of, whole_rows

SOME, SUMS = Few(Allowed.of([[3, 5]], 10), False), TopSums([0.0], 2)


def share(few=None, sums=None, nodes=(1,)):
    constrained = None if few is None else SimpleNamespace(few_tokens=lambda tree, nodes: few or None)
    return SimpleNamespace(
        nodes=[*nodes],
        top_sums=sums,
        chunk=SimpleNamespace(tree=None, drafts=()),
        drafts_wanted=[],
        pending=SimpleNamespace(constrained=constrained),
    )


def choose(*shares, device="cpu", only_sums=False, heads=()):
    runner = SimpleNamespace(device=torch.device(device), only_sums=only_sums, adapters=lambda work: [*heads])
    return strategy_of(SimpleNamespace(shares=[*shares], runner=runner, work=None))


def test_few_tokens_on_a_cpu_where_all_want_top_sums_of_few():
    chosen = choose(share(SOME, SUMS), share(nodes=()), share(SOME, SUMS))  # one is still in its prompt
    shares, parts = chosen.args
    assert chosen.func is few_tokens and len(shares) == 2 and parts == [SOME, SOME]


@pytest.mark.parametrize(
    "others",
    [[share(None, SUMS)], [share(SOME, None)], [share((), SUMS)]],
    ids=["not constrained", "rows are wanted", "processors besides"],
)
def test_one_share_that_wants_more_has_rows_for_all(others):
    assert choose(share(SOME, SUMS), *others) is whole_rows


def test_the_head_of_an_adapter_computes_all_tokens():
    assert choose(share(SOME, SUMS), heads=[0, 2]) is whole_rows


def test_a_gpu_evaluates_whole_rows():
    assert choose(share(SOME, SUMS), device="cuda") is whole_rows


def test_rows_that_nobody_reads_are_not_computed():
    chosen = choose(share(None, SUMS), share(None, SUMS), only_sums=True)
    assert chosen.func is only_sums and chosen.args[1] == [SUMS, SUMS]
    for more in (share(None, None), share((), SUMS)):
        assert choose(share(None, SUMS), more, only_sums=True) is whole_rows
    assert choose(share(None, SUMS)) is whole_rows and choose(share(nodes=()), only_sums=True) is whole_rows

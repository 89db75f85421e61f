"""Errors survive copying and the way between processes."""

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest

from engine import errors
from engine.errors import (
    CheckpointError,
    ContextError,
    CoppiceError,
    KVMemoryError,
    NumericsError,
    SearchError,
    UsageError,
)

KINDS = [CoppiceError, CheckpointError, ContextError, KVMemoryError, NumericsError, SearchError, UsageError]


class OwnError(UsageError):
    """An error that a search from outside may define."""

    def __init__(self, count: int):
        super().__init__(f"{count} of them", where="there", remedy="do this")
        self.count = count


def test_every_kind_is_tested():
    classes = (value for value in vars(errors).values() if isinstance(value, type))
    assert {value for value in classes if issubclass(value, CoppiceError)} == {*KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("said", [{}, {"where": "there"}, {"remedy": "do this"}, {"where": "there", "remedy": "so"}])
def test_copies_and_pickles(kind, said):
    error = kind("what", **said)
    error.add_note("noted")
    made = [copy.copy(error), copy.deepcopy(error)]
    made += [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for other in made:
        assert type(other) is kind and vars(other) == vars(error) and other.args == error.args
        assert (str(other), other.what, other.exit_code) == (str(error), "what", kind.exit_code)
        assert other.__notes__ == ["noted"]


def test_a_class_with_arguments_of_its_own():
    other = pickle.loads(pickle.dumps(OwnError(3)))
    assert (type(other), other.count, str(other)) == (OwnError, 3, "3 of them\nthere\ndo this")


def fail(kind: type[CoppiceError]) -> None:
    try:
        raise ValueError("the cause")
    except ValueError as cause:
        raise kind("what", where="there", remedy="do this") from cause


def test_a_pool_passes_them_on():
    """In a process of its own; a pool that cannot unpickle an error would wait for ever, hence the timeout."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        for kind in (UsageError, KVMemoryError):
            with pytest.raises(kind) as caught:
                pool.apply_async(fail, (kind,)).get(timeout=120)
            assert str(caught.value) == "what\nthere\ndo this"
            assert "ValueError: the cause" in str(caught.value.__cause__)  # the traceback, as text
    with ProcessPoolExecutor(1, mp_context=context) as executor, pytest.raises(CheckpointError, match="what\nthere"):
        executor.submit(fail, CheckpointError).result(timeout=120)

"""The memory that an engine takes while it loads; all of it comes back when it is let go."""

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import CoppiceError, Engine
from engine.demo import demo_folder
from engine.engine import Session
from search import REGISTRY, Search
from tools.random_checkpoint import make

ROOT = Path(__file__).parents[2]
PROMPT = "Once upon a time"
MB = 1 << 20


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def load() -> Engine:
    return Engine.load(
        demo_folder(), threads=1, kv_memory=8 * MB, draft=demo_folder("draft"), reward=demo_folder("reward")
    )


def generate(engine: Engine, search) -> None:
    engine.generate([PROMPT, "Two"], search, max_new_tokens=8)


def stream_to_the_end(engine: Engine, search) -> None:
    for _ in engine.stream(PROMPT, search, max_new_tokens=8):
        pass


def stream_and_leave(engine: Engine, search) -> None:
    events = engine.stream(PROMPT, search, max_new_tokens=8)
    for _ in zip(range(3), events, strict=False):
        pass
    events.close()  # type: ignore[attr-defined]


def interrupt(engine: Engine, search) -> None:
    for _ in engine.stream(PROMPT, search, max_new_tokens=8, interrupted=lambda: True):
        pass


def converse(engine: Engine, search) -> None:
    session = Session(engine)
    for _ in session.stream(PROMPT, search, max_new_tokens=8):
        pass
    session.close()


def error_of(ask: Callable[[], object]) -> str:
    """The message of the error that a call raises; the error itself is let go, with its traceback."""
    try:
        ask()
    except CoppiceError as error:
        return str(error)
    raise AssertionError("no error")


def refuse(engine: Engine, search) -> None:
    assert "512" in error_of(lambda: engine.generate([[5] * 600], search))
    assert "512" in error_of(lambda: list(engine.stream([5] * 600, search)))


MANNERS = [generate, stream_to_the_end, stream_and_leave, interrupt, converse, refuse]


def assert_freed(engine: list[Engine]) -> None:
    """No reference cycle holds the models: they go with the last reference, without the garbage collector."""
    [last] = engine
    parts = {"engine": last, "model": last.runner.model, "pool": last.pool, "draft": last.companions["draft"]}
    watched = {name: weakref.ref(part) for name, part in parts.items()}
    del parts, last
    engine.clear()
    assert [name for name, ref in watched.items() if ref() is not None] == []


@pytest.mark.parametrize("name", list(REGISTRY))
def test_nothing_holds_an_engine_that_was_let_go(name, no_collector):
    engine = [load()]
    stream_and_leave(engine[0], REGISTRY[name]())
    assert_freed(engine)


@pytest.mark.full(unless=lambda manner: manner is interrupt)
@pytest.mark.parametrize("manner", MANNERS, ids=lambda f: f.__name__)
def test_nothing_holds_an_engine_however_its_searches_ended(manner, no_collector):
    engine = [load()]
    for name in REGISTRY:
        manner(engine[0], REGISTRY[name]())
    assert_freed(engine)


class Failing(Search):
    """A search with a fault."""

    def run(self, task):
        raise ValueError("a fault")
        yield


def test_nothing_holds_an_engine_after_a_fault(no_collector):
    engine = [load()]
    for ask in (generate, stream_to_the_end):
        assert "a fault" in error_of(lambda ask=ask: ask(engine[0], Failing()))
    assert_freed(engine)


def test_nothing_holds_an_engine_after_its_cache_was_full(no_collector):
    companions = {role: demo_folder(role) for role in ("draft", "reward")}
    room = Engine.load(demo_folder(), threads=1, kv_memory=8 * MB, **companions)
    share = 8 * MB // room.pool.pages
    engine = [Engine.load(demo_folder(), threads=1, kv_memory=230 * share, **companions)]
    search = REGISTRY["bon"]()
    assert "cache is full" in error_of(
        lambda: engine[0].generate([PROMPT], search, max_new_tokens=200, ignore_eos=True)
    )
    assert_freed(engine)


MEASURE = """
import json, sys
from engine import Engine
from engine.demo import demo_folder
from search import Trie

def resident():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return [int(status[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM")]

def use(folder, **options):
    engine = Engine.load(folder, threads=1, kv_memory=16 << 20, **options)
    loaded = resident()
    engine.generate([list(range(5, 37))], Trie(beams=8), max_new_tokens=4, ignore_eos=True)
    return loaded

use(demo_folder())  # what is read and compiled once
open("/proc/self/clear_refs", "w").write("5")  # the peak is from now on, not that of importing CUDA's libraries
before, _ = resident()
steady, peak = use(sys.argv[1], dtype="float32")
after, _ = resident()
use(sys.argv[1], dtype="float32")
again, _ = resident()
print(json.dumps([before, steady, peak, after, again]))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads what is resident from Linux' /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_comes_back_and_loading_peaks_one_matrix_above_the_result(tmp_path, dtype):
    """60M parameters, which are 240 MB in float32, the largest matrix 49 MB. Bounds are generous."""
    make(tmp_path, layers=6, width=768, mlp=2048, heads=12, vocab=16000, max_positions=128, dtype=dtype)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    before, steady, peak, after, again = json.loads(done.stdout)
    told = {"before": before, "steady": steady, "peak": peak, "after": after, "again": again}
    assert after - before < 40 * MB and again - before < 40 * MB, told
    assert peak - max(steady, before) < (49 + 25) * MB, told
    assert steady - before < 240 * MB + 25 * MB, told


def test_tables_of_angles_that_a_longer_text_replaced_are_let_go(tmp_path, no_collector):
    """Prepared passes of all sizes would hold those that they used last."""
    make(tmp_path / "model", layers=1, width=32, mlp=64, heads=2, vocab=512)
    engine = Engine.load(tmp_path / "model", threads=1, kv_memory=8 * MB)
    [rotary] = engine.runner.model.rotaries
    tables = []
    for length in (20, 300, 600):
        engine.generate([[5] * length], REGISTRY["greedy"](), max_new_tokens=2, ignore_eos=True)
        assert rotary._kept is not None
        tables.append(weakref.ref(rotary._kept.tables[0]))
    assert [table() is not None for table in tables] == [False, False, True]

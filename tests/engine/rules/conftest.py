"""An engine with a draft model and a reward, for the tests of constraints; others have an `engine` of their own."""

import pytest

from engine import Engine
from tests.engine.rules.automata import GOLDEN


@pytest.fixture(scope="session")
def engine():
    rewards = lambda prompt, texts: [float(len(text)) for text in texts]  # noqa: E731
    engine = Engine.load(GOLDEN / "llama/plain", dtype="float32", kv_memory="8M", reward=rewards)
    engine.add("draft", Engine.load(GOLDEN / "llama/gqa", dtype="float32", kv_memory="4M"))
    return engine


@pytest.fixture
def exact_pool(engine):
    """All pages are free after the test."""
    yield
    for each in (engine, engine.companions["draft"]):
        assert each.pool.free_pages == each.pool.pages

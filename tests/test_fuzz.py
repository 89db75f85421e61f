"""Valid files and lines, mutated: each is answered or refused in the project's own words, and costs no memory."""

import copy
import io
import itertools
import json
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.app import batch
from engine.engine import Engine
from engine.errors import CoppiceError
from search.greedy import Greedy
from tools.random_checkpoint import make

HUGE = [2**24, 2**31, 2**53, 2**63, 10**18, 10**30, -(10**18), 1e18, 1e308, float("inf"), float("nan")]
ATOMS = st.sampled_from(
    [
        *HUGE,
        None,
        True,
        False,
        0,
        1,
        2,
        3,
        7,
        -1,
        64,
        300,
        0.5,
        1.0,
        1e-9,
        "",
        "a",
        "float16",
        "llama",
        "\ud800",
        "../x",
    ]
)
VALUES = st.recursive(
    ATOMS | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
QUICK = settings(
    derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths to everything in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@st.composite
def mutated(draw: st.DrawFn, valid: Any) -> Any:
    """A JSON value with up to three places replaced, taken away, exchanged or added."""
    value = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(list(places(value)) or [("new",)]))
        inner = value
        for key in path:
            inner = inner[key]
        match draw(st.sampled_from(["replace", "replace", "drop", "rename", "copy"])):
            case "replace":
                inner[last] = draw(VALUES)
            case "drop" if last in inner or isinstance(inner, list):
                del inner[last]
            case "rename" if isinstance(inner, dict) and last in inner:
                inner[draw(st.sampled_from([*inner, "new"]) | st.text(max_size=9))] = inner.pop(last)
            case _:
                other = value
                for key in draw(st.sampled_from([*places(value), ()])):
                    other = other[key]
                inner[last] = copy.deepcopy(other)
    return value


@st.composite
def damaged(draw: st.DrawFn, text: bytes) -> bytes:
    """Bytes with a piece cut out, overwritten or repeated."""
    start, length = draw(st.integers(0, len(text))), draw(st.integers(0, 40))
    return (
        text[:start] + draw(st.binary(max_size=4) | st.just(text[start : start + length] * 2)) + text[start + length :]
    )


def dump(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


@contextmanager
def little_memory(room: int = 1 << 30) -> Iterator[None]:
    """Let no more than this be allocated: what asks for more fails, and an error of another kind shows it."""
    if not sys.platform.startswith("linux"):
        yield
        return
    status, limits = Path("/proc/self/status").read_text(), resource.getrlimit(resource.RLIMIT_AS)
    found = re.search(r"VmSize:\s+(\d+)", status)
    assert found
    resource.setrlimit(resource.RLIMIT_AS, ((int(found[1]) << 10) + room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def loads_or_refuses(folder: Path) -> None:
    with little_memory():
        try:
            engine = Engine.load(folder, threads=1, kv_memory=1 << 16)
            engine.generate([[1, 5, 6]], Greedy(), max_new_tokens=2)
        except CoppiceError as error:
            assert error.exit_code in (2, 3, 5) and str(error).replace("\n", "").isprintable()
        else:
            engine.pool.check_invariants([])


ROOT = Path(__file__).parent
SHAPE: dict[str, Any] = {"layers": 1, "width": 16, "mlp": 16, "heads": 2, "vocab": 220, "max_positions": 64}
ROPES: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 32},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, dict[str, Any]]]:
    """Folders and their configs: Llamas of every rotary kind, and a golden model of every other family."""
    base = tmp_path_factory.mktemp("models")
    for i, (rope, style) in enumerate(itertools.product(ROPES, ("v4", "v5"))):
        make(base / f"llama{i}", rope=rope, config_style=style, **SHAPE)
    for family in sorted((ROOT / "golden").iterdir()):
        whole = (path.parent for path in sorted(family.glob("*/config.json")))
        for golden in [path for path in whole if (path / "model.safetensors").is_file() and family.name != "llama"][:3]:
            shutil.copytree(golden, base / f"{family.name}-{golden.name}")
    return [(folder, json.loads((folder / "config.json").read_text())) for folder in sorted(base.iterdir())]


@settings(QUICK, max_examples=300)
@given(data=st.data())
def test_configs(models: list[tuple[Path, dict[str, Any]]], data: st.DataObject):
    folder, config = data.draw(st.sampled_from(models))
    text = dump(data.draw(mutated(config) | damaged(dump(config)), "config"))
    try:
        (folder / "config.json").write_bytes(text)
        loads_or_refuses(folder)
    finally:
        (folder / "config.json").write_text(json.dumps(config))


@settings(QUICK, max_examples=100)
@given(data=st.data())
def test_generation_configs(models: list[tuple[Path, dict[str, Any]]], data: st.DataObject):
    folder, _ = models[0]
    valid = {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 0, "do_sample": True}
    (folder / "generation_config.json").write_bytes(dump(data.draw(mutated(valid) | damaged(dump(valid)))))
    loads_or_refuses(folder)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    make(folder, shards=2, **SHAPE)
    return folder


@settings(QUICK, max_examples=200)
@given(data=st.data())
def test_indexes(sharded: Path, data: st.DataObject):
    path = sharded / "model.safetensors.index.json"
    valid = json.loads(path.read_text())
    try:
        path.write_bytes(dump(data.draw(mutated(valid) | damaged(dump(valid)), "index")))
        loads_or_refuses(sharded)
    finally:
        path.write_text(json.dumps(valid))


@settings(QUICK, max_examples=150)
@given(data=st.data())
def test_headers(sharded: Path, data: st.DataObject):
    path = sharded / "model-00001-of-00002.safetensors"
    valid = path.read_bytes()
    size = int.from_bytes(valid[:8], "little")
    header = json.loads(valid[8 : 8 + size])
    try:
        text = dump(data.draw(mutated(header) | damaged(dump(header)), "header"))
        length = data.draw(st.just(len(text)) | st.sampled_from([0, 2**31, 2**63, 2**64 - 1, len(text) + 1]), "length")
        path.write_bytes(length.to_bytes(8, "little") + text + valid[8 + size :])
        loads_or_refuses(sharded)
    finally:
        path.write_bytes(valid)


LINES: list[dict[str, Any]] = [
    {"id": "x", "prompt": "ab", "params": {"search": "trie", "beams": 3, "length_penalty": 0.5, "stop": ["zz"]}},
    {"prompt_ids": [1, 5, 9], "params": {"search": "sample", "temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3}},
    {"messages": [{"role": "user", "content": "hi"}], "params": {"max_new_tokens": 3, "eos_token_ids": [2, 3]}},
    {"id": 7, "prompt": "b", "params": {"search": "trie", "early_stopping": "never", "num_return_sequences": 2}},
    {"prompt": "", "params": {"search": "sample", "num_return_sequences": 2, "ignore_eos": True}},
]


@pytest.fixture(scope="module")
def engine(models: list[tuple[Path, dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("answers")
    make(folder, **SHAPE)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    engine = Engine.load(folder, threads=1, kv_memory=1 << 18)
    assert engine.template
    engine.template.check()  # its process starts before memory is short
    return engine


@settings(QUICK, max_examples=200)
@given(data=st.data())
def test_batch_lines(engine: Engine, monkeypatch: pytest.MonkeyPatch, data: st.DataObject):
    monkeypatch.setattr(batch, "load_engine", lambda args, shard=None: engine)
    one = st.sampled_from(LINES).flatmap(lambda line: mutated(line) | damaged(dump(line)))
    lines = [dump(line).replace(b"\n", b" ") for line in data.draw(st.lists(one, min_size=1, max_size=4), "lines")]
    good = b'{"id": "good", "prompt": "ab"}'
    out = io.BytesIO()
    with little_memory():
        code = batch.main(["--max-new-tokens", "2", "-q"], io.BytesIO(b"\n".join([*lines, good])), out)
    engine.pool.check_invariants([])
    records = [json.loads(line) for line in out.getvalue().splitlines()]
    assert len(records) == 1 + sum(bool(line.strip()) for line in lines)
    assert code == (2 if any("error" in record for record in records) else 0)
    for record in records:
        assert set(record) in ({"id", "error"}, {"id", "outputs", "stats"})
        assert "error" not in record or record["error"]["code"] in ("usage", "memory", "checkpoint"), record
    assert records[-1]["id"] == "good" and "outputs" in records[-1]

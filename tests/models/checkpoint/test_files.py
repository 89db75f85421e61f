"""Regular files alone are opened, outputs are locked and replaced as a whole."""

import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.app.trace_page import write as write_trace
from engine.app.transcript import load as load_transcript
from engine.errors import CheckpointError, CoppiceError, UsageError
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from models.checkpoint.files import lock, locked, open_regular, read_regular, replacing
from models.checkpoint.headers import Checkpoint
from search.aded.ngrams import add_to_store as add
from search.aded.ngrams import count, open_store
from search.ults.prior import Vectors
from tools.random_checkpoint import make
from tools.tree import load as load_trace


def within(call: Callable[[], Any], seconds: float = 60) -> Any:
    """The result or the error of a call; a call that waits for something fails the test and nothing else."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, "it waits"
    return outcome[0]


Put = Callable[[Path], Path]


@pytest.fixture(params=["fifo", "socket", "device", "folder"])
def irregular(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Puts something that is no regular file in a place."""
    opened: list[socket.socket] = []

    def put(path: Path) -> Path:
        path.unlink(missing_ok=True)
        if request.param == "fifo":
            os.mkfifo(path)
        elif request.param == "socket":
            monkeypatch.chdir(path.parent)  # the names of sockets are short
            opened.append(socket.socket(socket.AF_UNIX))
            opened[-1].bind(path.name)
        elif request.param == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
        return path

    request.addfinalizer(lambda: [s.close() for s in opened])
    return put


def test_what_is_no_regular_file(irregular: Put, tmp_path: Path):
    path = irregular(tmp_path / "x")
    error = within(lambda: open_regular(path))
    assert isinstance(error, OSError) and "not a regular file" in error.strerror
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "absent")


def test_regular_files(tmp_path: Path):
    (tmp_path / "x").write_bytes(b"abcdef")
    (tmp_path / "link").symlink_to("x")
    with open_regular(tmp_path / "link") as file:
        assert os.get_blocking(file.fileno()) and not os.get_inheritable(file.fileno()) and file.read() == b"abcdef"
    assert [len(read_regular(tmp_path / "x", limit)) for limit in (0, 5, 6, 7, 1 << 60)] == [1, 6, 6, 6, 6]


def test_a_fifo_that_takes_the_place_of_a_file_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "x").write_text("")
    found = os.stat(tmp_path / "x")
    os.mkfifo(tmp_path / "fifo")
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda path: found)
        assert "not a regular file" in str(within(lambda: open_regular(tmp_path / "fifo")))


MODEL = ("config.json", "generation_config.json", "model.safetensors.index.json", "model.safetensors")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
OLDER = ("tokenizer.model", "vocab.json", "added_tokens.json", "tekken.json")


@pytest.mark.parametrize("name", [*MODEL, *TOKENIZER, *OLDER, "chat_template.jinja", "chat_template.json"])
def test_files_of_a_checkpoint(irregular: Put, tmp_path: Path, name: str):
    folder = tmp_path / "model"
    make(folder, layers=1, width=16, mlp=16, heads=2, vocab=220, shards=2 if "index" in name else 1)
    if name in OLDER:
        (folder / "tokenizer.json").unlink()
    if name == "special_tokens_map.json":
        (folder / "tokenizer_config.json").write_text("{}")
    if name == "added_tokens.json":
        golden = Path(__file__).parents[2] / "golden" / "text" / "sp_bpe" / "tokenizer.model"
        (folder / "tokenizer.model").write_bytes(golden.read_bytes())
    irregular(folder / name)

    def load() -> None:
        Checkpoint.open(folder)
        ChatTemplate.load(folder, Tokenizer.load(folder))

    error = within(load)
    assert isinstance(error, CheckpointError) and name in str(error), error
    assert "not a regular file" in str(error) or name == "model.safetensors"


def test_files_that_a_person_names(irregular: Put, tmp_path: Path):
    path = irregular(tmp_path / "x")
    make(tmp_path / "model", layers=1, width=16, mlp=16, heads=2, vocab=220)
    tokenizer = Tokenizer.load(tmp_path / "model")
    for call in (
        lambda: ChatTemplate.from_file(path, tokenizer),
        lambda: load_transcript(path),
        lambda: load_trace(path),
        lambda: open_store(path),
        lambda: Vectors.load(path),
    ):
        error = within(call)
        assert isinstance(error, CoppiceError) and "not a regular file" in str(error)
        assert str(path) in str(error) or str(path.resolve()) in str(error)


# --- locks, and files replaced ---


def test_locks(tmp_path: Path):
    path = tmp_path / "x"
    with open(path, "ab") as one, open(path, "ab") as two:
        assert lock(one.fileno()) and lock(one.fileno())
        with pytest.raises(BlockingIOError):
            lock(two.fileno())
    with open(path, "ab") as three:  # closing a file is all it takes
        assert lock(three.fileno())
    with locked(tmp_path, 1), pytest.raises(BlockingIOError), locked(tmp_path, 0.05):
        pass
    with locked(tmp_path, 0.05):
        assert os.listdir(tmp_path) == ["x"]


def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from kernels import files

    def refuse(*_):
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    with open(tmp_path / "x", "ab") as file, locked(tmp_path, 1):
        assert not lock(file.fileno())


def test_replacing(tmp_path: Path):
    target, link = tmp_path / "x", tmp_path / "link"
    link.symlink_to("x")
    with replacing(link) as file:
        file.write(b"one")
        assert not target.exists()
    assert link.is_symlink() and target.read_bytes() == b"one" and stat.S_IMODE(target.stat().st_mode) == 0o600
    target.chmod(0o640)
    with pytest.raises(ZeroDivisionError), replacing(target) as file:
        file.write(b"two")
        raise ZeroDivisionError
    assert target.read_bytes() == b"one"
    with replacing(target, 0o666) as file:
        file.write(b"three")
    assert target.read_bytes() == b"three" and stat.S_IMODE(target.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link", "x"]


def test_two_traces_in_one_file(tmp_path: Path):
    path = tmp_path / "trace.json"
    kinds = {"params": {}, "models": {}, "steps": [], "trees": [], "outputs": [], "texts": {}, "stats": {}}
    records = [[{"search": "x" * size, "name": "x", **kinds}] for size in (10, 1_800_000)]
    threads = [threading.Thread(target=lambda r=r: [write_trace(path, r) for _ in range(20)]) for r in records]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert not path.exists() or load_trace(path)["requests"] in records  # never a part of one
    assert os.listdir(tmp_path) == ["trace.json"]


def test_no_count_is_lost_when_two_add_to_a_store(tmp_path: Path):
    path, errors = tmp_path / "store", []

    def work(first: int) -> None:
        try:
            for i in range(20):
                add(path, count([first, i, 7]), 100, "")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors and len(open_store(path)) == 60 and os.listdir(tmp_path) == ["store"]


def test_a_store_whose_folder_stays_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("search.aded.ngrams.WAIT", 0.05)
    with locked(tmp_path, 1), pytest.raises(UsageError, match="another program has locked its folder"):
        add(tmp_path / "store", count([1, 2, 3]), 100, "")

"""Files of the cache: whole or not there, of this user alone, bounded, and derived again where anything is wrong."""

import fcntl
import os
import subprocess
import sys
import threading

import pytest
import torch

from models import file_cache
from models.file_cache import FileCache, changed_since, identity, in_background, name_of

BOUND = 1 << 20
CONTENT = [b"first" * 20, b"", bytes(range(256)) * 4]


@pytest.fixture
def cache(tmp_path):
    return FileCache(tmp_path / "cache", BOUND)


def write(cache, name="name", content=CONTENT, **facts):
    return cache.write(name, facts, [memoryview(part) for part in content])


def test_what_is_written_is_read_mapped(cache):
    assert cache.open("name") is None and not cache.folder.exists()
    assert write(cache, answer=42)
    found = cache.open("name")
    assert found.facts == {"answer": 42} and [bytes(part) for part in found.sections] == CONTENT
    tensor = found.tensor(2, torch.int32, (16, 16))
    assert tensor.numpy().tobytes() == CONTENT[2] and tensor.data_ptr() % 64 == 0
    (cache.folder / "name").unlink()
    assert tensor.numpy().tobytes() == CONTENT[2]  # the mapping outlives the file
    with pytest.raises(ValueError, match=r"expected \[3\], got 256"):
        found.tensor(2, torch.int32, (3,))


def test_files_are_of_this_user_alone(cache):
    write(cache)
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in cache.folder.iterdir()] == [0o600]


def replaced(at, by):
    def spoil(path):
        content = bytearray(path.read_bytes())
        content[at : at + len(by) if at + len(by) else None] = by
        path.write_bytes(content)

    return spoil


SPOILED = {
    "content": (replaced(3, b"X"), "its content is damaged"),
    "its last byte": (replaced(-1, b"X"), "cut short, or no file of this cache"),
    "the description": (replaced(-70, b"X"), "its description is damaged"),
    "a length that is too large": (replaced(-16, b"\xff" * 8), "cut short"),
    "half": (lambda path: os.truncate(path, path.stat().st_size // 2), "cut short"),
    "nothing": (lambda path: path.write_bytes(b""), "cut short"),
    "another file": (lambda path: path.write_bytes(b"x" * 5000), "cut short, or no file of this cache"),
    "a file that all may write": (lambda path: path.chmod(0o666), "other users may write to"),
    "a folder that all may write": (lambda path: path.parent.chmod(0o777), "other users may write to"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_what_is_damaged_or_anybodys_is_not_read_and_said_once(case, cache, capfd):
    spoil, said = SPOILED[case]
    write(cache)
    spoil(cache.folder / "name")
    assert cache.open("name") is None and cache.open("name") is None
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("coppice: ") and said in lines[0] and str(cache.folder) in lines[0]
    if "folder" not in case:
        assert write(cache) and cache.open("name")  # in its place


def test_links_are_not_followed(cache, tmp_path, capfd):
    write(cache)
    (cache.folder / "name").rename(tmp_path / "elsewhere")
    (cache.folder / "name").symlink_to(tmp_path / "elsewhere")
    assert cache.open("name") is None and "symbolic link" in capfd.readouterr().err


def test_samples_of_a_large_file_are_compared(cache, monkeypatch):
    """Samples are taken from both ends and between."""
    monkeypatch.setattr(file_cache, "PIECE", 16)
    monkeypatch.setattr(file_cache, "PLACES", 4)
    write(cache, content=[bytes(1024)])
    path = cache.folder / "name"
    for at, seen in ((0, True), (1023, True), (336, True), (200, False)):
        replaced(at, b"X")(path)
        assert (cache.open("name") is None) is seen, at
        replaced(at, b"\0")(path)


def test_the_least_recently_used_go_first(cache):
    block = [bytes(300 << 10)]
    for i, name in enumerate("abc"):
        assert write(cache, name, block)
        os.utime(cache.folder / name, (i + 1, i + 1))
    assert cache.open("a")  # used now
    assert write(cache, "d", block)
    assert {path.name for path in cache.folder.iterdir()} == {"a", "c", "d"}
    assert not write(cache, "e", [bytes(BOUND + 1)]) and not (cache.folder / "e").exists()


def test_rests_of_writers_are_removed_when_they_are_old(cache):
    write(cache)
    old, new = cache.folder / "old.part", cache.folder / "new.part"
    old.touch()
    os.utime(old, (1, 1))
    new.touch()
    write(cache)
    assert not old.exists() and new.exists()


def test_a_full_disk_is_left_alone(cache, monkeypatch, capfd):
    monkeypatch.setattr(file_cache, "SPARE", 1 << 60)
    assert not write(cache) and not write(cache) and [*cache.folder.iterdir()] == []
    assert capfd.readouterr().err.count("the disk has 0 to spare") == 1


def test_a_folder_that_cannot_be_made_is_said_once(tmp_path, capfd):
    (tmp_path / "file").touch()
    cache = FileCache(tmp_path / "file" / "cache", BOUND)
    assert cache.open("name") is None and not write(cache) and not write(cache)
    said = capfd.readouterr().err
    assert said.count("coppice: ") == 1 and "Not a directory; XDG_CACHE_HOME" in said and "Errno" not in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only(cache, capfd):
    write(cache)
    cache.folder.chmod(0o500)
    assert cache.open("name") and not write(cache, "other")
    assert "is not kept" in capfd.readouterr().err


def test_a_failed_write_leaves_nothing(cache, monkeypatch, capfd):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not write(cache) and [*cache.folder.iterdir()] == []
    assert "No space left on device" in capfd.readouterr().err


def test_one_of_two_writers_gives_way(cache):
    write(cache, "other")
    with (cache.folder / "name.part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not write(cache) and not (cache.folder / "name").exists()
    assert write(cache)


def test_a_writer_that_opened_what_is_complete_now_leaves_it(cache, monkeypatch):
    """It has the lock of a file that was renamed between its opening and its locking."""
    lock = file_cache.files.lock

    def late(number):
        monkeypatch.setattr(file_cache.files, "lock", lock)
        assert write(cache, answer=1)
        return lock(number)

    monkeypatch.setattr(file_cache.files, "lock", late)
    (cache.folder).mkdir(mode=0o700)
    (cache.folder / "name.part").touch()
    write(cache, answer=2)
    assert cache.open("name").facts == {"answer": 1}


def test_two_processes_at_once(cache):
    """Each writes five times; what it finds then is whole, by whichever of the two."""
    code = (
        "import sys; from pathlib import Path; from models.file_cache import FileCache\n"
        f"cache, written = FileCache(Path({str(cache.folder)!r}), {BOUND}), 0\n"
        "while written < 5: written += cache.write('name', {'i': written}, [memoryview(bytes(300000))])\n"
        "print(cache.open('name').facts['i'] >= 0)"
    )
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True) for _ in range(2)]
    found = [process.communicate(timeout=100) for process in running]
    assert [out.strip() for out, _ in found] == ["True", "True"], found
    assert not any("coppice" in err for _, err in found)
    assert [path.name for path in cache.folder.iterdir()] == ["name"]


def test_identities_change_with_the_file(tmp_path):
    path = tmp_path / "model"
    path.write_bytes(bytes(1 << 20))
    first = identity([path])
    assert identity([path]) == first
    status = path.stat()
    with path.open("r+b") as file:  # in place, the time of its content set back
        file.seek(70_000)
        file.write(b"X")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert identity([path]) != first
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    assert len({identity([path]), identity([copy]), identity([path, copy]), first}) == 4
    assert changed_since([path], status.st_ctime - 1) and not changed_since([path], status.st_ctime + 100)


def test_names_depend_on_every_part_and_the_code(monkeypatch):
    assert name_of("a", 1) == name_of("a", 1) != name_of("a", 2)
    before = name_of("a")
    monkeypatch.setattr(file_cache, "code", lambda: "another version")
    assert name_of("a") != before


def test_writers_run_aside():
    seen = []
    in_background(lambda: seen.append((threading.current_thread(), os.getpriority(os.PRIO_PROCESS, 0)))).join(60)
    [(thread, priority)] = seen
    assert thread is not threading.main_thread() and thread.daemon
    assert priority >= os.getpriority(os.PRIO_PROCESS, 0) + min(5, 19 - os.getpriority(os.PRIO_PROCESS, 0))

"""How C++ kernels are found, built, kept and verified, with a library of two functions in the place of the real one."""

import json
import os
import re
import shutil
import stat
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernels import build, cpp, files, operators, processor
from kernels.processor import NATIVE, TARGETS
from tests.marks import needs_compiler

ROOT = Path(__file__).parents[2]
NAMED = "x86-64-v3" if processor.machine() == "x86_64" else "aarch64"  # a target that compilers here build for
CACHED = cpp._load, cpp._sources, cpp.function, processor.identity, processor.features
HEADER = 'extern "C" {\nvoid coppice_answer(int64_t* to);\n}\n'
pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Sources that compile in no time, an empty cache, and nothing loaded, before and after."""
    source = tmp_path / "source" / "tiny.cpp"
    source.parent.mkdir()
    source.write_text('extern "C" void coppice_answer(long long* to) { *to = 42; }\n')
    for name, value in {
        "SOURCES": [source],
        "HEADERS": [],
        "FLAGS": ("-fPIC",),
        "OPERATORS": operators.parse(HEADER),
        "PREBUILT": tmp_path / "prebuilt",
    }.items():
        monkeypatch.setattr(cpp, name, value)
    monkeypatch.delenv("COPPICE_KERNELS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    again()
    yield source
    again()


def again():
    """Forget what was found, as in a new process."""
    for cached in CACHED:
        cached.cache_clear()


def answer():
    """The answer of the library, in a process that starts now."""
    again()
    numbers = (cpp.ctypes.c_int64 * 1)()
    cpp.function("answer")(cpp.ctypes.addressof(numbers))
    return numbers[0]


def no_compiler(monkeypatch):
    monkeypatch.setattr(cpp.shutil, "which", lambda name: None)


def kept():
    """The library and its facts in the cache."""
    place = cpp.find()
    return place.path, place.path.with_suffix(".json")


def give_away(path, monkeypatch):
    """Make a file or folder another user's, or let this process be one."""
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(files.os, "geteuid", lambda: 12345)


# --- building and keeping ---


@needs_compiler
def test_kernels_are_built_once_and_kept(monkeypatch, capfd):
    assert answer() == 42
    library, facts = kept()
    assert sorted(library.parent.iterdir()) == [facts, library]  # nothing is left over
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    assert json.loads(facts.read_text())["size"] == library.stat().st_size
    out, said = capfd.readouterr()
    assert not out and re.fullmatch(
        r"coppice: building the C\+\+ kernels for this machine, once .*\ncoppice: built .* in \d+ s\n", said
    )
    stamp = library.stat().st_mtime_ns
    no_compiler(monkeypatch)  # nobody asks it for the name
    assert answer() == 42 and library.stat().st_mtime_ns == stamp
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def sharing(tiny, monkeypatch):
    """A longest source, one that includes a header and one that does not; returns the commands that are run."""
    header, user = tiny.with_name("common.h"), tiny.with_name("user.cpp")
    header.write_text("#pragma once\ninline long long number() { return 42; }\n")
    tiny.write_text(f'#include "{header}"\nvoid more(long long* to) {{ *to = number(); }}\n' + " " * 1000)
    user.write_text(
        f'#include "{header}"\nvoid more(long long* to);\n'
        'extern "C" void coppice_answer(long long* to) { more(to); *to += number() - 42; }\n'
    )
    monkeypatch.setattr(cpp, "SHARED", header)
    monkeypatch.setattr(cpp, "SOURCES", [tiny, user])
    commands, run = list[list[str]](), cpp._run

    def noted(command):
        commands.append([str(word) for word in command])
        return run(command)

    monkeypatch.setattr(cpp, "_run", noted)
    again()
    return commands


def units(commands, name):
    """Whether each compilation of a source began with the parsed header."""
    return ["-include" in command for command in commands if any(word.endswith(f"/{name}") for word in command)]


@needs_compiler
def test_a_header_is_parsed_once_for_all_but_the_longest_source(sharing):
    assert answer() == 42
    assert sum("c++-header" in command for command in sharing) == 1
    assert units(sharing, "tiny.cpp") == [False] and units(sharing, "user.cpp") == [True]
    assert units(sharing, "structures.cpp") == [False]


@needs_compiler
@pytest.mark.parametrize("refused", ["c++-header", "-include"])
def test_a_compiler_that_parses_no_header_ahead(refused, sharing, monkeypatch):
    run = cpp._run

    def refuses(command):
        if refused in [str(word) for word in command]:
            raise cpp.BuildError("it is not supported")
        return run(command)

    monkeypatch.setattr(cpp, "_run", refuses)
    assert answer() == 42
    assert units(sharing, "user.cpp") == [False]


@needs_compiler
def test_an_error_of_a_source_that_begins_with_the_header_is_named(sharing, tiny):
    user = tiny.with_name("user.cpp")
    user.write_text(f"{user.read_text()}mistake;\n")
    again()
    assert "user.cpp" in cpp.why_not() and "mistake" in cpp.why_not()
    assert units(sharing, "user.cpp") == [True, False]


@needs_compiler
def test_the_name_tells_sources_flags_and_processors_apart(monkeypatch, tiny):
    names = {cpp.find().name}
    tiny.write_text(tiny.read_text() + "\n")
    again()
    names.add(cpp.find().name)
    monkeypatch.setattr(cpp, "FLAGS", ("-fPIC", "-DOTHER"))
    names.add(cpp.find().name)
    monkeypatch.setattr(processor, "identity", lambda: ("linux", "x86_64", "flags: sse2"))
    names.add(cpp.find().name)
    assert len(names) == 4
    monkeypatch.setenv("CXX", "clang++")
    assert cpp.find().name in names


CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
model\t\t: 85
model name\t: Xeon
stepping\t: 7
cpu MHz\t\t: {mhz}
flags\t\t: {flags}

processor\t: 1
flags\t\t: other
"""


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_processor_is_known_by_its_instructions(monkeypatch, tmp_path, end):
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")

    def of(text):
        (tmp_path / "cpuinfo").write_text(text)
        again()
        return processor.identity()

    plain = of(CPUINFO.format(mhz=2000, flags="sse2 avx2") + end)
    assert "flags: avx2 sse2" in plain and processor.features() == {"sse2", "avx2"}
    assert plain == of(CPUINFO.format(mhz=2400, flags="avx2 sse2") + end)
    assert plain != of(CPUINFO.format(mhz=2000, flags="sse2 avx2 avx512f") + end)
    assert plain != of(CPUINFO.format(mhz=2000, flags="sse2 avx2").replace("85", "86") + end)
    arm = of("processor\t: 0\nFeatures\t: fp asimd\nCPU part\t: 0xd0c" + end)
    assert "CPU part: 0xd0c" in arm and processor.features() == {"fp", "asimd"}
    (tmp_path / "cpuinfo").unlink()
    again()
    assert any(line.startswith("features") for line in processor.identity())  # torch knows some


@needs_compiler
def test_processes_that_start_together_build_once(capfd):
    done = []
    threads = [threading.Thread(target=lambda: done.append(cpp._load.__wrapped__())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4 and not any(isinstance(found, cpp.BuildError) for found in done)
    assert capfd.readouterr().err.count("building") == 1


@needs_compiler
def test_who_waits_for_another_build_says_so(tmp_path, capfd):
    held = os.open(tmp_path, os.O_RDONLY)
    assert files.lock(held)
    threading.Timer(0.2, os.close, [held]).start()
    with files.locked(tmp_path, waiting="waiting for another"):
        assert capfd.readouterr().err.count("waiting for another") == 1


def test_a_relative_cache_folder_means_nothing(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert cpp.cache_folder() == Path.home() / ".cache" / "coppice"


def test_what_a_killed_build_left_is_removed():
    folder = cpp.find().folder
    left, running = folder / "building-killed", folder / "building-running"
    for work in (left, running):
        work.mkdir()
        (work / "0.o").write_bytes(b"half of an object")
    before = time.time() - 2 * cpp.LEFT_SECONDS
    os.utime(left, (before, before))
    assert answer() == 42
    assert [path.name for path in folder.glob("building-*")] == [running.name]


def test_everything_is_on_the_disk_before_it_gets_its_name(monkeypatch):
    events, fsync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(files.os, "fsync", lambda d: events.append(os.fstat(d).st_ino) or fsync(d))
    monkeypatch.setattr(Path, "replace", lambda self, to: events.append(to.suffix) or replace(self, to))
    answer()
    library, facts = (path.stat().st_ino for path in kept())
    assert events[:2] == [library, facts] and events[3:] == [".so", ".json", kept()[0].parent.stat().st_ino]


# --- what is damaged ---


def replace(path, content):
    """In another file of the same name: this process has loaded the old one, and would crash without it at its end."""
    path.unlink()
    path.write_bytes(content)


def cut(path):
    replace(path, path.read_bytes()[:4096])


def bend(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    replace(path, content)


DAMAGE = {
    "cut short": lambda library, facts: cut(library),
    "empty": lambda library, facts: replace(library, b""),
    "a bit": lambda library, facts: bend(library),
    "gone": lambda library, facts: library.unlink(),
    "no facts": lambda library, facts: facts.unlink(),
    "empty facts": lambda library, facts: facts.write_text(""),
    "facts of no use": lambda library, facts: facts.write_text("[1]"),
    "facts without a digest": lambda library, facts: facts.write_text(json.dumps({"size": library.stat().st_size})),
    "not text": lambda library, facts: facts.write_bytes(b"\xff\xfe"),
}


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_built_once_again(damage, monkeypatch, capfd):
    answer()
    DAMAGE[damage](*kept())
    capfd.readouterr()
    assert answer() == 42
    assert capfd.readouterr().err.count("building") == 1
    assert answer() == 42 and not capfd.readouterr().err
    DAMAGE[damage](*kept())
    no_compiler(monkeypatch)
    again()
    assert cpp.why_not() == "no C++ compiler was found"


@needs_compiler
def test_a_disk_that_loses_what_is_written_is_an_error(monkeypatch, capfd):
    save = files.save

    def lose(folder, name, built, facts):
        save(folder, name, built, facts)
        cut(folder / f"{name}.so")

    monkeypatch.setattr(files, "save", lose)
    again()
    assert "is the disk full or failing?" in cpp.why_not()
    assert capfd.readouterr().err.count("building") == 1


@needs_compiler
def test_after_an_error_no_other_source_is_compiled(monkeypatch, tiny):
    others = [tiny.with_name(f"{number}.cpp") for number in range(20)]
    for other in others:
        other.write_text("")
    monkeypatch.setattr(cpp, "SOURCES", [*others, bad := tiny.with_name("bad.cpp")])
    bad.write_text("no C++")  # the longest, so the first
    monkeypatch.setattr(cpp.os, "cpu_count", lambda: 1)
    compiled, run = [], cpp._run
    monkeypatch.setattr(cpp, "_run", lambda command: compiled.extend({"-c"} & {*command}) or run(command))
    again()
    assert "error" in (cpp.why_not() or "") and len(compiled) < 10


@needs_compiler
def test_a_full_disk_is_noticed_before_anything_is_compiled(monkeypatch, capfd):
    monkeypatch.setattr(cpp.shutil, "disk_usage", lambda folder: SimpleNamespace(total=cpp.ROOM, free=cpp.ROOM - 1))
    again()
    assert re.search(r"/kernels: a build needs 96 MB of the disk, which has 95 MB to spare", cpp.why_not() or "")
    assert "building" not in capfd.readouterr().err
    monkeypatch.setattr(cpp.shutil, "disk_usage", lambda folder: SimpleNamespace(total=cpp.ROOM, free=cpp.ROOM))
    assert answer() == 42


@needs_compiler
def test_a_disk_that_does_not_tell_its_size_may_have_room(monkeypatch):
    monkeypatch.setattr(cpp.shutil, "disk_usage", lambda folder: SimpleNamespace(total=0, free=0))
    again()
    assert answer() == 42


@needs_compiler
@pytest.mark.parametrize("spoil", ["compiler", "file", "home"])
def test_kernels_that_cannot_be_built_say_why(monkeypatch, tmp_path, spoil):
    if spoil == "compiler":
        broken = tmp_path / "c++"
        broken.write_text("#!/bin/sh\necho 'fatal error: out of luck' >&2\nexit 1\n")
        broken.chmod(0o755)
        monkeypatch.setenv("CXX", str(broken))
        expected = f"{broken} failed: fatal error: out of luck"
    elif spoil == "file":
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "coppice").write_text("in the way")
        expected = "Not a directory"
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        expected = "no home"

        def homeless():
            raise RuntimeError(expected)

        monkeypatch.setattr(cpp.Path, "home", homeless)
    again()
    assert expected in (cpp.why_not() or "")
    with pytest.raises(cpp.BuildError, match=re.escape(expected)):
        cpp.library()


@needs_compiler
def test_a_library_without_what_python_calls_is_not_kept(monkeypatch):
    monkeypatch.setitem(cpp.OPERATORS.functions, "absent", (None, []))
    again()
    assert re.fullmatch(r".*\.so lacks absent", cpp.why_not())
    assert not list((cpp.cache_folder() / "kernels").iterdir())


@needs_compiler
def test_a_kept_library_without_what_python_calls_is_built_again(tiny, capfd):
    """Two versions of a source with one name cannot be, but for a digest that collides: a library is still checked."""
    answer()
    library, facts = kept()
    whole = tiny.read_text()
    tiny.write_text(whole.replace("coppice_answer", "coppice_other"))
    shared(tiny, library)
    tiny.write_text(whole)
    told = json.loads(facts.read_text())
    content = library.read_bytes()
    told |= {"size": len(content), "sha256": files.hashlib.sha256(content).hexdigest()}
    facts.write_text(json.dumps(told))
    assert answer() == 42 and capfd.readouterr().err.count("building") == 2


# --- who may have written it ---


def shared(source, library):
    library.unlink()  # a new file: the old one may be loaded
    table = source.with_name("structures.cpp")
    table.write_text(cpp.OPERATORS.table())
    subprocess.run([cpp.compiler(), "-fPIC", "-shared", "-o", library, source, table], check=True)


@pytest.fixture
def planted(tiny, tmp_path):
    """A library in the cache that leaves a mark when it is loaded, with facts that fit it; returns the mark."""
    answer()
    library, facts = kept()
    mark = tmp_path / "mark"
    source = tmp_path / "planted.cpp"
    source.write_text(
        f'#include <cstdio>\nstruct S {{ S() {{ std::fclose(std::fopen("{mark}", "w")); }} }} s;\n{tiny.read_text()}'
    )
    shared(source, library)
    library.chmod(0o644)
    content = library.read_bytes()
    told = {"size": len(content), "sha256": files.hashlib.sha256(content).hexdigest()}
    facts.write_text(json.dumps(json.loads(facts.read_text()) | told))
    return mark


@needs_compiler
def test_the_planted_library_would_be_loaded(planted):
    """Or the tests below would show nothing."""
    answer()
    assert planted.exists()


def loosen(mode):
    return lambda path, _: path.chmod(mode)


LOOSE = {
    "a folder that all may write": (lambda library: library.parent, loosen(0o777), "other users may write to"),
    "a folder that a group may write": (lambda library: library.parent, loosen(0o770), "other users may write to"),
    "a sticky folder": (lambda library: library.parent, loosen(0o1777), "other users may write to"),
    "a folder above": (lambda library: library.parents[1], loosen(0o777), "other users may write to"),
    "a library that all may write": (lambda library: library, loosen(0o666), "other users may write to"),
    "facts that all may write": (
        lambda library: library.with_suffix(".json"),
        loosen(0o646),
        "other users may write to",
    ),
    "another's folder": (lambda library: library.parent, give_away, "belongs to user"),
    "another's folder above": (lambda library: library.parents[1], give_away, "belongs to user"),
    "another's library": (lambda library: library, give_away, "belongs to user"),
    "another's facts": (lambda library: library.with_suffix(".json"), give_away, "belongs to user"),
}


@needs_compiler
@pytest.mark.parametrize("case", LOOSE)
def test_what_another_user_may_have_written_is_not_loaded(case, planted, monkeypatch, capfd):
    choose, spoil, expected = LOOSE[case]
    path = choose(kept()[0])
    spoil(path, monkeypatch)
    capfd.readouterr()
    again()
    reason = cpp.why_not()
    assert expected in reason and ("chmod go-w" in reason or "a folder of your own" in reason)
    if os.geteuid() == 0 or "belongs" not in expected:
        assert str(path) in reason
    assert not planted.exists() and "building" not in capfd.readouterr().err


@needs_compiler
def test_links_lead_to_no_other_code(planted, tmp_path):
    library, _ = kept()
    elsewhere = library.rename(tmp_path / "elsewhere.so")
    library.symlink_to(elsewhere)
    again()
    assert cpp.why_not() == f"{library} is a symbolic link, and nothing is loaded through one: remove it"
    library.unlink()
    os.mkfifo(library)
    again()
    assert cpp.why_not() == f"{library} is not a regular file: remove it"  # and it does not hang
    shutil.move(library.parent, tmp_path / "moved")
    library.parent.symlink_to(tmp_path / "moved")
    (tmp_path / "moved").chmod(0o777)
    again()
    assert str(tmp_path / "moved") in cpp.why_not() and not planted.exists()


@needs_compiler
def test_a_folder_of_ours_in_one_where_all_may_write_is_ours(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o1777)  # as /tmp is
    assert answer() == 42


@needs_compiler
@pytest.mark.parametrize("alone", [True, False])
def test_a_group_of_one_may_write_above(tmp_path, monkeypatch, alone):
    """A umask of 002 gives such modes, on systems where every user has a group."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o775)
    user, group = files.pwd.getpwuid(os.geteuid()), files.grp.getgrgid(os.getegid())
    entries = [user] if alone else [user, type(user)(("other", "x", 12345, os.getegid(), "", "/", "/bin/sh"))]
    monkeypatch.setattr(files.pwd, "getpwall", lambda: entries)
    monkeypatch.setattr(files.grp, "getgrgid", lambda _: type(group)((group.gr_name, "x", group.gr_gid, [])))
    again()
    assert (cpp.why_not() is None) is alone


# --- built ahead ---


def ahead(*targets, folder):
    """Kernels built ahead; returns what the command line wrote to stdout."""
    return build.main([*(word for target in targets for word in ("--target", target)), "--output", str(folder)])


def rewrite(folder, name, **changes):
    path = folder / f"{name}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def copy(folder, name, new, **changes):
    """Copy a library, as one that was built for another target."""
    for suffix in (".so", ".json"):
        shutil.copy(folder / f"{name}{suffix}", folder / f"{new}{suffix}")
    rewrite(folder, new, target=new, **changes)


@needs_compiler
def test_kernels_built_ahead_need_no_compiler(monkeypatch, tmp_path, capfd):
    folder = tmp_path / "deep" / "kernels"
    assert ahead(NAMED, "native", folder=folder) == 0
    out, said = capfd.readouterr()
    assert out.split() == [str(folder / f"{NAMED}.so"), str(folder / "native.so")]
    assert said.count("built the C++ kernels for") == 2
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{name}{suffix}" for name in (NAMED, "native") for suffix in (".so", ".json")
    )
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())} == {0o755, 0o644}
    no_compiler(monkeypatch)
    monkeypatch.setenv("COPPICE_KERNELS", str(folder))
    assert answer() == 42 and not cpp.cache_folder().exists() and not capfd.readouterr().err
    assert cpp.find().target is NATIVE


@needs_compiler
def test_the_best_target_that_runs_here_wins(monkeypatch, tmp_path):
    folder = tmp_path / "kernels"
    ahead("native", folder=folder)
    for name in (name for name in TARGETS if name.startswith("x86")):
        copy(folder, "native", name)
    monkeypatch.setenv("COPPICE_KERNELS", str(folder))
    monkeypatch.setattr(processor, "machine", lambda name=None: "x86_64")
    for path in folder.glob("*.json"):
        rewrite(folder, path.stem, machine="x86_64", processor=["another"])
    for name in (name for name in TARGETS if name.startswith("x86")):
        monkeypatch.setattr(processor, "features", lambda has=TARGETS[name].needs: frozenset(has))
        assert cpp.find().target.name == name
    monkeypatch.setattr(processor, "features", lambda: TARGETS["x86-64-v3"].needs - {"avx2", "fma"})
    cpp._load.cache_clear()
    reason = cpp.why_not()
    assert f"COPPICE_KERNELS={folder} has no kernels for this machine" in reason
    assert "x86-64-v3: this processor lacks avx2, fma" in reason
    assert "native: it was built for exactly the processor of another machine" in reason
    assert f"python -m kernels.build --output '{folder}'" in reason


def test_arm_processors_run_what_their_features_allow(monkeypatch):
    monkeypatch.setattr(processor, "machine", lambda name=None: "aarch64")
    old = "fp asimd evtstrm crc32 cpuid"  # a Raspberry Pi 4, a Raspberry Pi 5, a Neoverse V1
    newer = old + " aes pmull sha1 sha2 atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp"
    newest = newer + " jscvt fcma sha3 sve asimdfhm dit uscat ilrcpc flagm paca pacg svei8mm svebf16 i8mm bf16 dgh rng"
    for features, count in ((old, 1), (newer, 2), (newest, 3)):
        monkeypatch.setattr(processor, "features", lambda listed=features: frozenset(listed.split()))
        runs = [name for name, target in TARGETS.items() if target.why_not() is None]
        assert runs == ["native", *["aarch64-i8mm", "aarch64-dotprod", "aarch64"][-count:]]


@needs_compiler
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sources": "0"}, "it was built from other sources"),
        ({"system": "plan9"}, "it was built for plan9 on"),
        ({"machine": "vax"}, "on vax, and this is"),
    ],
)
def test_kernels_of_another_version_or_machine_are_refused(monkeypatch, tmp_path, changes, expected):
    folder = tmp_path / "kernels"
    ahead("native", folder=folder)
    rewrite(folder, "native", **changes)
    monkeypatch.setenv("COPPICE_KERNELS", str(folder))
    again()
    assert expected in cpp.why_not()


@needs_compiler
def test_kernels_built_ahead_are_verified_too(monkeypatch, tmp_path):
    folder = tmp_path / "kernels"
    ahead("native", folder=folder)
    cut(folder / "native.so")
    monkeypatch.setenv("COPPICE_KERNELS", str(folder))
    again()
    assert cpp.why_not().startswith(f"{folder}/native.so is not what was built")
    ahead("native", folder=folder)
    assert answer() == 42
    folder.chmod(0o777)
    again()
    assert f"other users may write to {folder}" in cpp.why_not()
    assert ahead("native", folder=folder) == 1  # which nobody could load


def test_a_folder_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("COPPICE_KERNELS", str(tmp_path / "none"))
    again()
    assert cpp.why_not() == f"{tmp_path}/none: there is no such folder"


def test_off_is_off(monkeypatch, capfd):
    monkeypatch.setenv("COPPICE_KERNELS", "off")
    again()
    assert cpp.off() and cpp.why_not() == "COPPICE_KERNELS=off" and not cpp.cache_folder().exists()
    assert capfd.readouterr() == ("", "")


@needs_compiler
def test_a_package_may_bring_kernels(monkeypatch, capfd):
    ahead("native", folder=cpp.PREBUILT)
    cpp.PREBUILT.chmod(0o777)  # who may write here may write the Python beside it
    with monkeypatch.context() as patch:
        no_compiler(patch)
        assert answer() == 42 and cpp.find().trusted and not cpp.cache_folder().exists()
    capfd.readouterr()
    cut(cpp.PREBUILT / "native.so")
    assert answer() == 42 and "is not what was built" in capfd.readouterr().err
    rewrite(cpp.PREBUILT, "native", sources="0")
    assert not cpp.find().trusted


def test_a_wheel_ships_them():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    assert re.search(r'^kernels = \[.*"prebuilt/\*".*\]', text, re.M)


# --- the command line ---


@needs_compiler
def test_the_list_builds_nothing(capfd, monkeypatch):
    assert build.main(["--list"]) == 0
    out, said = capfd.readouterr()
    assert not said and all(name in out for name in TARGETS)
    assert f"native, built when first needed, into {cpp.find().path}" in out and not cpp.find().path.exists()
    answer()
    build.main(["--list"])
    assert f"native, loaded from {cpp.find().path}" in capfd.readouterr().out
    monkeypatch.setenv("COPPICE_KERNELS", "off")
    build.main(["--list"])
    assert "none are loaded: COPPICE_KERNELS=off" in capfd.readouterr().out


@pytest.mark.parametrize(
    "words", [[], ["--target", "vax", "--output", "x"], ["--list", "--output", "x"], ["--output", "x", "--flags='"]]
)
def test_arguments_that_make_no_sense_are_refused(words, capfd):
    with pytest.raises(SystemExit) as ended:
        build.main(words)
    assert ended.value.code == 2 and "usage" in capfd.readouterr().err


@needs_compiler
def test_another_machine_needs_another_compiler(tmp_path, capfd):
    other = "aarch64" if processor.machine() == "x86_64" else "x86-64-v3"
    assert ahead(other, folder=tmp_path / "kernels") == 1
    assert re.search(r"builds for .*; name a compiler for .* by CXX, for example CXX=", capfd.readouterr().err)


def test_a_cross_compiler_is_asked_for_the_target(monkeypatch, tmp_path):
    """One that builds for a machine of its own: what comes out is kept, though it cannot be loaded here."""
    compiler = tmp_path / "cross"
    compiler.write_text(
        "#!/bin/sh\n"
        '[ "$1" = -dumpmachine ] && echo riscv64-linux-gnu && exit\n'
        f'echo "$@" >> {tmp_path}/seen\n'
        'while [ "$1" != -o ]; do shift; done\necho code > "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setitem(TARGETS, "riscv", processor.Target("riscv", ("-march=rv64gcv",), "riscv64", frozenset(), ""))
    folder = tmp_path / "kernels"
    assert build.main(["--target", "riscv", "--output", str(folder), "--flags", "-g -DA='b c'"]) == 0
    assert all("-march=rv64gcv -g -DA=b c" in line for line in (tmp_path / "seen").read_text().splitlines())
    assert json.loads((folder / "riscv.json").read_text())["machine"] == "riscv64"
    monkeypatch.setenv("COPPICE_KERNELS", str(folder))
    again()
    assert "riscv: it was built for linux on riscv64, and this is" in cpp.why_not()

"""A wheel brings kernels that are found where it is installed, and says which systems they need."""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile

import pytest

from engine.version import __version__
from kernels import cpp, processor
from kernels.processor import TARGETS
from tests.kernels import test_cpp
from tests.marks import needs_compiler
from tools import wheel

tiny = test_cpp.tiny
HERE = processor.machine()
OTHER = next(machine for machine in wheel.MACHINES if machine != HERE)
LOWEST = [name for name, target in TARGETS.items() if target.machine == HERE][-1:]
needs_pip = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("pip", "setuptools"))), reason="pip and setuptools are not installed"
)


@needs_compiler
@needs_pip
def test_its_kernels_are_found_without_a_compiler(tiny, monkeypatch, tmp_path, capsys):
    assert wheel.main(["--output", str(tmp_path / "made" / "here"), "--target", LOWEST[0]]) == 0
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert f"building the C++ kernels for {LOWEST[0]} (1 of 1), once" in told.err
    assert report["targets"] == LOWEST and next((tmp_path / "made" / "here").iterdir()).name in report["path"]
    assert report["path"].endswith(f"_{HERE}.whl") and "-py3-none-manylinux_2_" in report["path"]
    with zipfile.ZipFile(report["path"]) as made:
        names = made.namelist()
        made.extractall(tmp_path / "installed")
    assert {"coppice.py", "kernels/operators.h", "engine/chat.py", "models/demo/target/config.json"} <= {*names}
    [scripts] = (tmp_path / "installed").glob("*.dist-info/entry_points.txt")
    assert "coppice = coppice:main" in scripts.read_text()
    command = [sys.executable, "-P", "-m", "coppice", "--version"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout == f"coppice {__version__}\n"
    assert sorted(name for name in names if "prebuilt" in name) == [
        f"kernels/prebuilt/{LOWEST[0]}.json",
        f"kernels/prebuilt/{LOWEST[0]}.so",
    ]
    monkeypatch.setattr(cpp, "PREBUILT", tmp_path / "installed" / "kernels" / "prebuilt")
    monkeypatch.setattr(cpp.shutil, "which", lambda name: None)
    if reason := TARGETS[LOWEST[0]].why_not():
        pytest.skip(f"{LOWEST[0]}: {reason}")
    numbers = (cpp.ctypes.c_int64 * 1)()
    cpp.function("answer")(cpp.ctypes.addressof(numbers))
    assert numbers[0] == 42 and cpp.built_ahead() == f"{LOWEST[0]}, prebuilt"
    assert not cpp.cache_folder().exists()


@needs_pip
def test_the_other_machine_needs_a_cross_compiler(tiny, monkeypatch, tmp_path, capfd):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert wheel.main(["--output", str(tmp_path / "out"), "--machine", OTHER]) == 2
    assert "no C++ compiler was found" in capfd.readouterr().err and not list((tmp_path / "out").iterdir())
    assert "CXX" not in os.environ


def test_a_target_is_for_its_machine(tmp_path, capsys):
    assert wheel.main(["--output", str(tmp_path / "out"), "--machine", OTHER, "--target", LOWEST[0]]) == 2
    assert f"{LOWEST[0]}: this target is not for {OTHER}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    (file := tmp_path / "file").touch()
    for folder in (file, file / "below"):
        assert wheel.main(["--output", str(folder), "--target", LOWEST[0]]) == 2
        assert capsys.readouterr().err.startswith("error: the output folder cannot be made: ")


def test_an_installed_package_makes_none(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(wheel, "ROOT", tmp_path)
    assert wheel.main(["--output", str(tmp_path / "out")]) == 2
    assert "a wheel is made of a checkout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("symbols", "platform"),
    [
        (b"", "manylinux_2_17_x86_64"),
        (b"GLIBC_2.2.5\0GLIBCXX_3.4\0GLIBC_2.14\0", "manylinux_2_17_x86_64"),
        (b"GLIBC_2.29\0GLIBC_2.4\0", "manylinux_2_29_x86_64"),
        (b"GLIBC_2.29\0GLIBCXX_3.4.29\0", "manylinux_2_34_x86_64"),
        (b"GLIBC_2.38\0GLIBCXX_3.4.9\0", "manylinux_2_38_x86_64"),
    ],
)
def test_its_name_says_what_the_kernels_need(tmp_path, symbols, platform):
    libraries = tmp_path / "a.so", tmp_path / "b.so"
    libraries[0].write_bytes(b"\x7fELF\0" + symbols)
    libraries[1].write_bytes(b"\0GLIBC_2.3\0")
    assert wheel.tag(libraries, "x86_64") == platform


def test_a_library_that_no_system_has_is_refused(tmp_path):
    (tmp_path / "a.so").write_bytes(b"\0GLIBCXX_3.4.99\0")
    with pytest.raises(wheel.UsageError, match=r"version 3\.4\.99 of libstdc\+\+"):
        wheel.tag([tmp_path / "a.so"], "x86_64")


def test_every_part_of_the_package_is_taken():
    assert {path.parent.name for path in wheel.ROOT.glob("*/py.typed")} == {*wheel.PACKAGES}
    assert all((wheel.ROOT / file).is_file() for file in wheel.FILES)

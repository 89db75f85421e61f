"""The distribution: its version, packages, pins and commands, and that it stands alone."""

import os
import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ["engine", "kernels", "models", "search", "tools"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SKIP = re.compile(r"\.(?!ci$|github$).+|__pycache__|build|dist|.*\.egg-info")
TEXT = {"", ".cfg", ".css", ".html", ".js", ".md", ".py", ".sh", ".svg", ".toml", ".txt", ".yaml", ".yml"}


def files() -> Iterator[Path]:
    """All files of the checkout, relative to its root, without environments, caches and build outputs."""
    for folder, inner, names in os.walk(ROOT):
        inner[:] = [name for name in inner if not SKIP.fullmatch(name)]
        yield from (Path(folder, name).relative_to(ROOT) for name in names if name != ".git")  # a file in a worktree


def canonical(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;]", requirement)[0].lower().replace("_", "-")


def test_version_is_written_once() -> None:
    from engine.version import __version__

    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", __version__)
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "engine.version.__version__"}
    sources = [f for f in files() if f.suffix == ".py"]
    written = [f for f in sources if re.search(r"^__version__ *=", (ROOT / f).read_text("utf-8"), re.M)]
    assert written == [Path("engine/version.py")]


def test_installed_version_is_this_one() -> None:
    from engine.version import __version__

    try:
        installed = metadata.version("coppice")
    except metadata.PackageNotFoundError:
        pytest.skip("runs from the checkout, not installed")
    assert installed == __version__, "reinstall: pip install -e ."


def test_an_editable_install_is_a_folder_on_the_path() -> None:
    """With it setuptools writes the checkout into a .pth file; else an import hook, which pyright cannot follow."""
    assert PYPROJECT["tool"]["setuptools"]["package-dir"] == {"": "."}


def test_packages_are_the_five_and_typed() -> None:
    tops = {f.parts[0] for f in files() if f.suffix == ".py" and len(f.parts) > 1}
    assert tops == {*PACKAGES, "tests"}
    assert not list((ROOT / "tests").rglob("__init__.py"))
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file(), package
    folders = {f.parent for f in files() if f.suffix == ".py" and f.parts[0] in PACKAGES}
    bare = sorted(str(folder) for folder in folders if not (ROOT / folder / "__init__.py").is_file())
    assert not bare, f"left out of the wheel without an __init__.py: {bare}"
    included = PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    assert sorted(included) == [f"{package}*" for package in PACKAGES]
    assert PYPROJECT["tool"]["setuptools"]["py-modules"] == [
        f.stem for f in files() if f.suffix == ".py" and not f.parent.name
    ]
    assert PYPROJECT["project"]["scripts"] == {"coppice": "coppice:main"}


def test_constraints_pin_what_make_installs() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups() for line in lines if line and line[0] != "#")  # type: ignore[union-attr]
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    names = ("gpu", "fleet", "grammar", "serve", "test", "viz", "dev", "oracle")
    wanted = {canonical(r) for r in (*project["dependencies"], *(r for name in names for r in extras[name]))}
    assert wanted - {"coppice"} <= pins.keys()
    assert all(f"=={pins['transformers']}" in r for rs in extras.values() for r in rs if canonical(r) == "transformers")


def test_a_chat_needs_no_triton() -> None:
    """Triton takes as much of the disk as torch: GPUs and tests have it by extras."""
    project = PYPROJECT["project"]
    assert not {"triton", "matplotlib", "numpy"} & {*map(canonical, project["dependencies"])}
    assert [*map(canonical, project["optional-dependencies"]["gpu"])] == ["triton"]
    assert "coppice[gpu]" in project["optional-dependencies"]["test"]
    recipe = re.search(r"^\.venv/\.installed:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert recipe and "call install,," in recipe[1]


def test_floors_hold_together() -> None:
    """torch 2.11 brings triton 3.6."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert re.search(r">=([\d.]+)", extras["gpu"][0])[1] == "3.6"  # type: ignore[index]
    assert "torch>=2.11" in PYPROJECT["project"]["dependencies"]


def test_commands_in_the_documentation_exist() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = {}
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        code = re.findall(r"^```.*?^```|`[^`\n]+`|^ {4}[^\n]*", page.read_text(encoding="utf-8"), re.M | re.S)
        named[page.name] = set(re.findall(r"(?:^|[`$;&]) *make ([a-z][\w-]*)", "\n".join(code), re.M))
    assert {"chat", "test"} <= named["README.md"]
    assert not {page: unknown for page, commands in named.items() if (unknown := commands - targets)}


def test_nothing_is_installed_by_the_bare_name() -> None:
    """On PyPI `coppice` is another project: extras come from a checkout, and errors name the packages themselves."""
    bare = re.compile(r"install\b[^\n`]* '?coppice\b(?!-)")
    found = []
    for file in files():
        if file.suffix in TEXT and file.parts[0] != "tests":
            lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
            found += [f"{file}:{i}: {line.strip()}" for i, line in enumerate(lines, 1) if bare.search(line)]
    assert not found, "\n".join(found)


def test_no_path_of_one_machine() -> None:
    path = re.compile(r"(?<![\w.:/-])/(work|opt|home|root|Users)/\w|\.\./shared")
    found = []
    for file in files():
        if file.suffix in TEXT:
            lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
            found += [f"{file}:{i}: {line.strip()}" for i, line in enumerate(lines, 1) if path.search(line)]
    assert not found, "\n".join(found)

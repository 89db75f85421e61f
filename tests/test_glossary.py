"""docs/glossary.md: the code has every name that the page gives for it. Names and docstrings say what things are."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("kernels", "models", "engine", "search")
PAGE = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")


@functools.cache
def names() -> set[str]:
    """Modules, classes, functions, constants and parameters; `Class.member`; string constants in quotation marks."""
    found: set[str] = set()
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            found.add(".".join(file.relative_to(ROOT).with_suffix("").parts))
            module = ast.parse(file.read_text(encoding="utf-8"))
            found |= {name for node in module.body for name in assigned(node)}
            for node in ast.walk(module):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    found.add(node.name)
                if isinstance(node, ast.arg):
                    found.add(node.arg)
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(f'"{node.value}"')
                if isinstance(node, ast.ClassDef):
                    found |= {f"{node.name}.{member}" for member in members(node)}
    return found


def assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def members(kind: ast.ClassDef) -> set[str]:
    own = {name for node in kind.body for name in (*assigned(node), getattr(node, "name", ""))}
    return own | {
        node.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }


NAMED = [
    name
    for row in re.findall(r"^\| (.+) \|$", PAGE, re.M)
    for cell in row.split("|")[:3]
    for name in re.findall(r"`([^`]+)`", cell)
]


def test_the_page_is_read():
    assert {"Request", "TokenTree.keep", "TreeLayout.write_slots_T"} <= set(NAMED) and len(NAMED) > 50


def test_every_name_exists():
    stale = set(NAMED) - names()
    assert not stale


@pytest.mark.parametrize("name", ["Sequence", "TokenTree.drop_all", "engine.nothing", '"cuda_graph_of_nothing"'])
def test_a_stale_name_would_be_seen(name: str):
    assert name not in names()


VAGUE = {"MOST", "LEAST", "SHARE", "KEPT", "MAX", "MIN", "LIMIT"}  # names of constants that do not say of what


def test_one_class_has_one_name_and_constants_say_of_what_they_are():
    """Private names, and names that the implementations of one operator share, do not meet."""
    classes: dict[str, set[str]] = {}
    vague = []
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            path = file.relative_to(ROOT).as_posix()
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    classes.setdefault(node.name, set()).add(path)
                vague += [f"{path}: {name}" for name in assigned(node) if name in VAGUE]
    assert {name: paths for name, paths in classes.items() if len(paths) > 1} == {}
    assert not vague


ALL = (*PACKAGES, "tools", "tests")
NO_SUBJECT = {"Of", "What"}  # words that begin a docstring without a subject


def without_subject(source: str) -> list[str]:
    """The docstrings of modules, classes and functions that begin with such a word."""
    nodes = ast.walk(ast.parse(source))
    documented = (x for x in nodes if isinstance(x, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef))
    texts = [ast.get_docstring(node) or "" for node in documented]
    return [text for text in texts if text.split(" ", 1)[0] in NO_SUBJECT]


def test_docstrings_begin_with_a_subject_or_a_verb():
    files = [file for package in ALL for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 500
    found = {file.relative_to(ROOT): texts for file in files if (texts := without_subject(file.read_text("utf-8")))}
    assert not found


@pytest.mark.parametrize("source", ['"""Of a tree."""', 'def f():\n    """What a tree has."""'])
def test_a_docstring_without_a_subject_would_be_seen(source: str):
    assert without_subject(source) == [ast.literal_eval(source[source.index('"') :])]

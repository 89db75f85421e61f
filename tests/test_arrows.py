"""Imports point one way: tools -> search -> engine -> models -> kernels; those inside functions count too."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RANK = {"kernels": 0, "models": 1, "engine": 2, "search": 3, "tools": 4}
COMMAND_LINES = re.compile(r"engine/((app|serve)/(\w+/)?\w+|chat|batch)\.py")  # these alone look up, into search
ORACLE = re.compile(r"tools/(make_golden\w*\.py|golden_text\.py|bench.*)")  # these alone import transformers
# Extras: imported when they are needed, with an error that names them.
OPTIONAL = {
    "engine/rules/grammars.py": ["llguidance"],
    "engine/text/sandbox.py": ["llguidance"],
    "engine/serve/http.py": ["starlette"],
    "engine/serve/streams.py": ["starlette"],
    "engine/serve/connections.py": ["uvicorn", "h11"],
}
IMPLEMENTATIONS = {"reference", "torch", "native", "triton"}


def core_dependencies() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in project["dependencies"]}


CORE = core_dependencies()


def imports(path: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything imported; `from a import b` gives both a and a.b."""
    here = path.removesuffix(".py").split("/")  # its package is here[:-1], for an __init__.py too
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if called in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def fault(path: str, name: str) -> str | None:
    """Why the file at `path` (relative to the root, with slashes) may not import `name`, or None."""
    folder, *rest = path.removesuffix(".py").split("/")
    top, *inner = name.split(".")
    if top in RANK:
        if RANK[top] > RANK[folder] and not (COMMAND_LINES.fullmatch(path) and top == "search"):
            return f"{folder} may not import {top}"
        own = inner[:1] in (["app"], ["chat"], ["batch"], ["serve"])
        if folder == "engine" and not COMMAND_LINES.fullmatch(path) and own:
            return "command lines are imported by command lines only"
        if (
            folder == top == "kernels"
            and len(rest) > 1
            and rest[-1] in IMPLEMENTATIONS
            and inner[: len(rest) - 1] == rest[:-1]
            and len(inner) >= len(rest)
            and inner[len(rest) - 1] in IMPLEMENTATIONS - {rest[-1]}
        ):
            return "implementations of an operator do not import each other"
    elif top == "transformers":
        if not ORACLE.fullmatch(path):
            return "transformers is the oracle's, not ours"
    elif top in sys.stdlib_module_names or folder == "tools" or top in OPTIONAL.get(path, []):
        return None
    elif top not in ({"torch", "triton"} if folder == "kernels" else CORE):
        return f"{folder} may not depend on {top}"
    return None


def faults(path: str, source: str) -> list[str]:
    found = [(line, name, fault(path, name)) for line, name in imports(path, source)]
    return list(dict.fromkeys(f"{path}:{line}: {reason}" for line, _, reason in found if reason))


@pytest.mark.parametrize("package", RANK)
def test_arrows(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"no package {package}"
    wrong = [f for file in files for f in faults(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "source", "allowed"),
    [
        ("models/families/llama.py", "from kernels.tree_attention import attend", True),
        ("models/families/llama.py", "def f():\n    from engine import tree", False),
        ("models/families/llama.py", "from ...engine import tree", False),
        ("models/families/llama.py", "from . import layers\nfrom .layers import RMSNorm", True),
        ("models/families/llama.py", "import numpy", False),
        ("models/families/llama.py", "import transformers", False),
        ("engine/app/chat.py", "import search", True),
        ("engine/app/cli/searches.py", "import search", True),
        ("engine/app/chat.py", "import tools.bench", False),
        ("engine/engine.py", "from search import Trie", False),
        ("engine/engine.py", "import importlib\nimportlib.import_module('search')", False),
        ("engine/engine.py", "from . import batch", False),
        ("engine/conversation.py", "from engine.app import cli", False),
        ("engine/text/template.py", "from search import Trie", False),
        ("engine/app/batch.py", "from .cli import main", True),
        ("engine/__init__.py", "from .engine import Engine", True),
        ("search/trie.py", "from engine.cache.tree import TokenTree", True),
        ("kernels/op/__init__.py", "from . import native, reference, torch, triton", True),
        ("kernels/op/torch.py", "import torch\nimport math", True),
        ("kernels/op/torch.py", "from .reference import attend", False),
        ("kernels/op/torch.py", "from . import reference", False),
        ("kernels/op/native.py", "from .torch import attend", False),
        ("kernels/op/native.py", "import torch", True),
        ("kernels/op/triton.py", "import triton.language as tl\nimport triton", True),
        ("kernels/op/triton.py", "from kernels.op import torch", False),
        ("kernels/op/triton.py", "from kernels.other import native", True),
        ("kernels/op/bench.py", "import jinja2", False),
        ("tools/make_golden.py", "import transformers, numpy", True),
        ("tools/bench/hf.py", "from transformers import AutoModel", True),
        ("tools/convert.py", "import transformers", False),
    ],
)
def test_the_checker_itself(path: str, source: str, allowed: bool) -> None:
    assert (not faults(path, source)) is allowed

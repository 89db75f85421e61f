"""Writes the descriptions of searches that the command lines show, from the searches' classes."""

import argparse
import json
import sys
from typing import Any

from engine.app.cli import ended
from engine.app.cli.described import FILE, TYPES, DescribedParameter, describe
from engine.contract.checks import is_ours
from search import REGISTRY


def text() -> str:
    """The text that the file should have: one line for each parameter."""
    parts = []
    for name in (name for name, cls in REGISTRY.items() if is_ours(cls)):
        search = describe(name)
        lines = [f"   {json.dumps(key)}: {json.dumps(_entry(one))}" for key, one in search.parameters.items()]
        head = ",\n".join(f'  "{key}": {json.dumps(getattr(search, key))}' for key in ("where", "summary", "aliases"))
        parts.append(f' {json.dumps(name)}: {{\n{head},\n  "parameters": {{\n' + ",\n".join(lines) + "\n  }\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _entry(parameter: DescribedParameter) -> dict[str, Any]:
    """A parameter as JSON; `DescribedParameter.of` reads it."""
    kind = parameter.kind
    types = [name for name, each in TYPES.items() if each in kind.types]
    return {**parameter._asdict(), "kind": {"words": [*kind.words], "types": types, "others": kind.others}}


def main() -> int:
    """Write the file. Returns the exit code."""
    argparse.ArgumentParser(prog="python -m tools.search_flags", description=__doc__).parse_args()
    FILE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))

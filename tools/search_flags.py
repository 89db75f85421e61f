"""Writes what the command lines show of this project's searches, from their classes."""

import argparse
import sys

from engine.app.cli.described import FILE, written_file
from engine.contract.checks import is_ours
from search import REGISTRY


def text() -> str:
    """The text that the file has to have."""
    return written_file([name for name, cls in REGISTRY.items() if is_ours(cls)])


def main() -> int:
    """Write the file. Returns the exit code."""
    argparse.ArgumentParser(prog="python -m tools.search_flags", description=__doc__).parse_args()
    FILE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

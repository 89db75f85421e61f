"""Benchmarks: `python -m tools.bench COMMAND` prints progress to stderr, and tables and one line of JSON to stdout."""

import argparse
import sys
from collections.abc import Sequence

from engine.app import cli
from tools.bench import (
    cache,
    drafts,
    gpu,
    keyboard,
    memory,
    papers,
    peers,
    prefixes,
    quant,
    serve,
    speed,
    starts,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog=cli.called("python -m tools.bench"), description=__doc__)
    parser.add_argument("-v", "--verbose", action="store_true", help="show where an error comes from")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    ours = memory, starts, cache, prefixes, quant, peers, speed, gpu, papers, drafts, serve, keyboard
    for command in ours:
        command.add_parser(commands)
    args = parser.parse_args(words)

    def work() -> int:
        args.run(args, words)
        return 0

    return cli.run(work, args.verbose)


if __name__ == "__main__":
    sys.exit(cli.ended(main))

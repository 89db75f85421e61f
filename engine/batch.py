"""`python -m engine.batch`: see `engine.app.batch`."""

import sys
from collections.abc import Sequence

from engine.app.batch_flags import make_parser
from engine.app.cli import ended, start


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with these words, or with those of the process. Returns the exit code."""
    args = make_parser().parse_args(argv)
    return start(args, "engine.app.batch", [args.model, args.draft, args.reward])


if __name__ == "__main__":
    sys.exit(ended(main))

"""`python -m engine.chat`: see `engine.app.chat`."""

import sys
from collections.abc import Sequence

from engine.app.chat_flags import parser
from engine.app.cli import ended, start


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with these words, or with those of the process. Returns the exit code."""
    args = parser().parse_args(argv)
    return start(args, "engine.app.chat", [args.model, args.draft, args.reward])


if __name__ == "__main__":
    sys.exit(ended(main))

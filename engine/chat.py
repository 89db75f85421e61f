"""`python -m engine.chat`: see `engine.app.chat`."""

import sys

from engine.app.chat_flags import parser
from engine.app.cli.starting import start


def main() -> int:
    """Run the command line. Returns the exit code."""
    args = parser().parse_args()
    return start(args, "engine.app.chat", [args.model, args.draft, args.reward])


if __name__ == "__main__":
    sys.exit(main())

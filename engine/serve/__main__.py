"""`python -m engine.serve`: see `engine.serve.command`."""

import sys

from engine.app.cli import ended, start
from engine.serve.flags import make_parser, named


def main() -> int:
    """Run the command line. Returns the exit code."""
    args = make_parser().parse_args()
    models = [named(word)[1] for word in args.model or ()]
    return start(args, "engine.serve.command", [*models, args.draft, args.reward])


if __name__ == "__main__":
    sys.exit(ended(main))

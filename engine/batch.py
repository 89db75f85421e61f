"""`python -m engine.batch`: see `engine.app.batch`."""

import sys

from engine.app.batch_flags import make_parser
from engine.app.cli.starting import start


def main() -> int:
    """Run the command line. Returns the exit code."""
    args = make_parser().parse_args()
    return start(args, "engine.app.batch", [args.model, args.draft, args.reward])


if __name__ == "__main__":
    sys.exit(main())

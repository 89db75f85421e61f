"""`python -m engine.serve`: see `engine.serve.command`."""

import sys

from engine.serve.command import main

if __name__ == "__main__":
    sys.exit(main())

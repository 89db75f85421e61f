"""`python -m engine.batch`: see `engine.app.batch`."""

import sys

from engine.app.batch import main

if __name__ == "__main__":
    sys.exit(main())

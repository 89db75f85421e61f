"""`python -m engine.chat`: see `engine.app.chat`."""

import sys

from engine.app.chat import main

if __name__ == "__main__":
    sys.exit(main())

"""Progress of long work, on stderr."""

import sys
import time

BETWEEN = 0.1  # seconds between changes of a line


class ProgressLine:
    """Shows the progress of long work: on a terminal a line that changes, elsewhere one at its beginning and its end.

    Args:
        patience: seconds of work before anything is shown.
    """

    def __init__(self, patience: float = 0.0):
        self.began, self.patience, self._last = time.perf_counter(), patience, 0.0
        self.terminal = sys.stderr is not None and sys.stderr.isatty()

    @property
    def told(self) -> bool:
        """Whether anything was shown."""
        return self._last > 0

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self.began

    def tell(self, text: str) -> None:
        """Show the progress, unless it was shown just now."""
        since = BETWEEN if self.terminal else float("inf")
        if self.seconds >= self.patience and (not self.told or time.perf_counter() - self._last >= since):
            self._print(text, end="" if self.terminal else "\n")

    def end(self, text: str) -> None:
        """Show that the work is done, if anything was shown before."""
        if self.told:
            self._print(text, end="\n")

    def _print(self, text: str, end: str) -> None:
        if sys.stderr is None:
            return
        self._last = time.perf_counter()
        print(f"\rcoppice: {text}\x1b[K" if self.terminal else f"coppice: {text}", end=end, file=sys.stderr, flush=True)

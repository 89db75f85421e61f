"""A chat's screen: replies on stdout, everything else on stderr, and Ctrl-C that never tears anything."""

import contextlib
import io
import os
import shutil
import signal
import sys
import termios
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from typing import TextIO

# A model may write escape sequences; a terminal must not obey them. A pipe gets the bytes as they are.
CONTROLS = {i: chr(0x2400 + i) for i in range(32) if i not in (9, 10)} | {127: "␡"}
CONTROLS |= dict.fromkeys(range(128, 160), "�")


class Screen:
    """Where text goes.

    A status is a transient line that hangs on the end of the text while nothing new comes: drawn by a thread, so that
    it also lives through one long step, and wiped before anything is printed. It exists on terminals only.

    Args:
        out: for replies.
        err: for everything else.
        quiet: no hints and no status.
    """

    TICK = 0.1
    DELAY = 0.5  # what is done sooner needs no status
    LINES = 2  # that a status may reach below the text's last line

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None, *, quiet: bool = False):
        self.out, self.err, self.quiet = out or sys.stdout, err or sys.stderr or io.StringIO(), quiet
        self.tty = self.out.isatty()
        self.color = self.tty and self.err.isatty() and not os.environ.get("NO_COLOR") and self._capable
        self.lively = self.tty and self.err.isatty() and not quiet and self._capable
        self.column = 0  # of the cursor, on a terminal; the width itself where the next character wraps
        self._lock = threading.RLock()
        self._drawn = False
        self._quiet_since = 0.0

    @property
    def _capable(self) -> bool:
        return os.environ.get("TERM", "dumb") != "dumb"

    def text(self, text: str) -> None:
        """Print a part of a reply, at once."""
        with self._lock:
            self._wipe()
            if self.tty:
                text = text.translate(CONTROLS)
                self._advance(text)
            self.out.write(text)
            self.out.flush()
            self._quiet_since = time.monotonic()

    def end_line(self) -> None:
        """End a reply; on a terminal only where one is begun."""
        if self.column or not self.tty:
            self.text("\n")

    def hint(self, text: str) -> None:
        """Print dim lines to stderr that only a person wants to see."""
        if self.tty and not self.quiet:
            self.note(text, dim=True)

    def note(self, text: str, *, dim: bool = False) -> None:
        """Print lines to stderr."""
        with self._lock:
            self._wipe()
            if self.column:
                self.text("\n")
            if self.err.isatty():
                text = text.translate(CONTROLS)
            self.err.write((self._dim(text) if dim else text) + "\n")
            self.err.flush()

    @contextlib.contextmanager
    def status(self, label: Callable[[], tuple[str, str]], delay: float = DELAY) -> Iterator[None]:
        """While this lasts, show `label()` whenever nothing was printed for `delay` seconds.

        Args:
            label: asked in a thread: text that may follow what is printed (cut to what fits), and a remark.
            delay: seconds.
        """
        if not self.lively:
            yield
            return
        self._quiet_since = time.monotonic()
        over = threading.Event()

        def draw() -> None:
            while not over.wait(self.TICK):
                with self._lock:
                    if time.monotonic() - self._quiet_since >= delay and not over.is_set():
                        self._draw(*label())

        thread = threading.Thread(target=draw, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._wipe()

    def _draw(self, tail: str, remark: str) -> None:
        width = shutil.get_terminal_size().columns
        if self.column == width:  # moving the cursor would lose the pending wrap
            return
        tail = tail.replace("\n", " ").replace("\t", " ").translate(CONTROLS) if self.color else ""
        # Scroll first, so that the lines below exist and the saved position stays true.
        room = "\x1bD" * self.LINES + f"\x1b[{self.LINES}A"
        label = clip(f"{clip(tail, self.LINES * (width - 1) - len(remark) - 1)} {remark}", self.LINES * (width - 1))
        self.err.write(f"{room}\x1b7\x1b[J{self._dim(label)}\x1b8")
        self.err.flush()
        self._drawn = True

    def _wipe(self) -> None:
        with self._lock:
            if self._drawn:
                self._drawn = False
                self.err.write("\x1b[J")
                self.err.flush()

    def _dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self.color else text

    def _advance(self, text: str) -> None:
        width = shutil.get_terminal_size().columns
        for c in text:
            if c == "\n":
                self.column = 0
            elif c == "\t":
                self.column = min(width - 1, self.column // 8 * 8 + 8)
            elif n := cells(c):
                self.column = n if self.column + n > width else self.column + n


def cells(char: str) -> int:
    """Columns that a character takes on a terminal."""
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def clip(text: str, width: int) -> str:
    """The beginning of a text that fits into `width` columns."""
    end, room = 0, width
    while end < len(text) and (room := room - cells(text[end])) >= 0:
        end += 1
    return text if end == len(text) else text[: max(0, end - 1)] + "…" * (width > 0)


@contextlib.contextmanager
def no_echo() -> Iterator[None]:
    """Keep what is typed meanwhile off the screen; it is there at the next prompt. For terminals, elsewhere nothing."""
    try:
        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (OSError, ValueError, AttributeError, termios.error):
        yield
        return
    after = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(number, termios.TCSANOW, after)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSANOW, before)


class Quit(KeyboardInterrupt):
    """The second Ctrl-C: leave."""


class Interrupt:
    """Ctrl-C as a flag: `pressed` asks whoever works to stop at the next step, so that no state is torn.

    At a prompt it raises KeyboardInterrupt, which clears the line. A second one within two seconds of one that asked
    work to stop raises Quit, wherever. As a context manager it handles SIGINT, unless the process is to ignore that.
    """

    TWICE = 2.0

    def __init__(self):
        self.pressed = False
        self._prompting = False
        self._last = float("-inf")

    def __enter__(self) -> "Interrupt":
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def prompting(self) -> Iterator[None]:
        """A person is asked for a line; from its end on, Ctrl-C counts for the reply to it."""
        self.pressed, self._prompting = False, True
        try:
            yield
        finally:
            self._prompting = False

    def _handle(self, *_: object) -> None:
        now = time.monotonic()
        if now - self._last < self.TWICE:
            raise Quit
        if self._prompting:
            raise KeyboardInterrupt
        self.pressed, self._last = True, now

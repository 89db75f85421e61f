"""A chat's terminal: replies on stdout, everything else on stderr, a line editor, and Ctrl-C handled between steps."""

import contextlib
import errno
import fcntl
import glob
import io
import os
import re
import shutil
import signal
import sys
import termios
import threading
import time
import unicodedata
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

# A model may write escape sequences, which must not reach a terminal. A pipe gets the bytes unchanged.
CONTROLS = {i: chr(0x2400 + i) for i in range(32) if i not in (9, 10)} | {127: "␡"}
CONTROLS |= dict.fromkeys(range(128, 160), "�")


HISTORY_LENGTH = 1000


class Label(NamedTuple):
    """The contents of a status: text that may follow the printed text, a remark, and lines below."""

    tail: str = ""
    remark: str = ""
    lines: Sequence[str] = ()


class Screen:
    """Prints replies, notes and a status.

    A status is a transient line after the printed text, shown while no new text comes. A thread draws it, so that it
    also changes during a long step; it is erased before other text is printed. Only terminals have one.

    Args:
        out: for replies.
        err: for everything else.
        quiet: no hints and no status.
    """

    TICK = 0.1
    DELAY = 0.5  # seconds without text before a status is shown
    LINES = 2  # most lines of tail and remark

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None, *, quiet: bool = False):
        self.out, self.err, self.quiet = out or sys.stdout, err or sys.stderr or io.StringIO(), quiet
        self.tty = self.out.isatty()
        self.color = self.tty and self.err.isatty() and not os.environ.get("NO_COLOR") and capable()
        self.lively = self.tty and self.err.isatty() and not quiet and capable()
        self.column = 0  # of the cursor, on a terminal; the width itself where the next character wraps
        self._lock = threading.RLock()
        self._drawn = ""
        self._held: list[tuple[str, bool]] | None = None  # text that waits for the next frame, while a status is steady
        self._quiet_since = 0.0

    def text(self, text: str, *, dim: bool = False) -> None:
        """Print a part of a reply, at once; dim if the terminal has colours."""
        with self._lock:
            if self._held is not None:
                self._held.append((text, dim))
                return
            self._wipe()
            if self.tty:
                text = text.translate(CONTROLS)
                self._advance(text)
            self.out.write(self._dim(text) if dim else text)
            self.out.flush()
            self._quiet_since = time.monotonic()

    def end_line(self) -> None:
        """End a reply's line; on a terminal only if the line is not empty."""
        if self.column or not self.tty:
            self.text("\n")

    def hint(self, text: str, *, fold: bool = False) -> None:
        """Print dim lines to stderr, on terminals only; see `note`."""
        if self.tty and not self.quiet:
            self.note(text, dim=True, fold=fold)

    def note(self, text: str, *, dim: bool = False, fold: bool = False) -> None:
        """Print lines to stderr; `fold` breaks them between words on a terminal, which would break inside words."""
        with self._lock:
            self._release()
            self._wipe()
            if self.column:
                self.text("\n")
            if self.err.isatty():
                text = text.translate(CONTROLS)
                text = folded(text, shutil.get_terminal_size().columns) if fold else text
            self.err.write((self._dim(text) if dim else text) + "\n")
            self.err.flush()

    @contextlib.contextmanager
    def status(self, label: Callable[[], Label], delay: float = DELAY, *, steady: bool = False) -> Iterator[None]:
        """During the block, show `label()` whenever no text was printed for `delay` seconds.

        Args:
            label: called in a thread; the part that does not fit is cut.
            delay: seconds.
            steady: show the status all the time instead, in ten frames per second; printed text waits for a frame.
        """
        if not self.lively:
            yield
            return
        self._quiet_since = time.monotonic()
        self._held = [] if steady else None
        over = threading.Event()

        def draw() -> None:
            while not over.wait(self.TICK):
                with self._lock:
                    if over.is_set():
                        return
                    if steady:
                        self._release(steady=True)
                    if steady or time.monotonic() - self._quiet_since >= delay:
                        self._draw(label())

        def watched() -> None:
            with contextlib.suppress(OSError, ValueError):  # the terminal is gone: the next write raises the error
                draw()

        thread = threading.Thread(target=watched, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._release()
            self._wipe()

    def _release(self, *, steady: bool = False) -> None:
        """Print the waiting text; later text waits only if `steady`."""
        with self._lock:
            held, self._held = self._held, None
            for text, dim in held or ():
                self.text(text, dim=dim)
            if steady:
                self._held = []

    def _draw(self, label: Label) -> None:
        width, height = shutil.get_terminal_size()
        if self.column == width:  # moving the cursor would cancel the pending wrap
            return
        if lines := [*label.lines][: max(0, height - 2)]:
            count = 1 + len(lines)
            lines = [clip(one_line(line).translate(CONTROLS), width - 1) for line in [label.remark, *lines]]
            shown = "".join("\r\n" + self._dim(line) for line in lines)
        else:
            count = self.LINES
            tail = label.tail.replace("\n", " ").replace("\t", " ").translate(CONTROLS) if self.color else ""
            tail = clip(tail, self.LINES * (width - 1) - columns(label.remark) - 1)
            shown = self._dim(clip(f"{tail} {label.remark}", self.LINES * (width - 1)))
        if shown != self._drawn:
            # Scroll first, so that the lines below exist and the saved position remains valid.
            room = "\x1bD" * count + f"\x1b[{count}A"
            self.err.write(f"{room}\x1b7\x1b[J{shown}\x1b8")
            self.err.flush()
            self._drawn = shown

    def _wipe(self) -> None:
        with self._lock:
            if self._drawn:
                self._drawn = ""
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


def folded(text: str, width: int) -> str:
    """Lines of at most this width, if no word is longer; the rest of a table's row goes under its second column."""
    lines = []
    for line in text.split("\n"):
        row = re.match(r"\S.*?  +", line)
        column = columns(row[0]) if row else 0
        indent = " " * column if column <= width // 2 else ""
        part = ""
        for gap, word in re.findall(r"(\s*)(\S+)", line):
            if part.strip() and columns(part + gap + word) > width:
                lines.append(part)
                part = indent + word
            else:
                part += gap + word
        lines.append(part)
    return "\n".join(lines)


def capable() -> bool:
    """Whether the terminal understands escape sequences."""
    return os.environ.get("TERM", "") not in ("", "dumb")


def cells(char: str) -> int:
    """The number of terminal columns of a character."""
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def columns(text: str) -> int:
    """The number of terminal columns of a text on one line."""
    return sum(map(cells, text))


def clip(text: str, width: int) -> str:
    """The beginning of a text that fits into `width` columns."""
    used = end = 0  # columns so far, and the characters that leave one for the dots
    for i, char in enumerate(text):
        used += cells(char)
        if used > width:
            return text[:end] + "…" * (width > 0)
        if used < width:
            end = i + 1
    return text


def one_line(text: str) -> str:
    """The text with its line ends made visible."""
    return text.replace("\r\n", "⏎").replace("\n", "⏎").replace("\t", " ")


def state_folder() -> Path:
    """Return this program's folder for files that outlive a process, in the XDG state folder; make it if it is absent.

    Raises:
        OSError: the account has no home, or the folder cannot be made.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(base)
    if not os.path.isabs(base):
        home = Path(os.path.expanduser("~"))
        if not home.is_absolute() or not home.is_dir():
            raise FileNotFoundError(errno.ENOENT, "there is no home folder", str(home))
        folder = home / ".local" / "state"
    folder /= "coppice"
    for part in reversed([folder, *folder.parents]):
        if not part.exists():
            part.mkdir(mode=0o700, exist_ok=True)  # every new one: `parents=True` would leave those above open
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    return folder


class LineEditor:
    """Reads lines, on a terminal with editing, completion and a history in a private file of the state folder.

    Without readline or a terminal it reads plain lines.

    Args:
        words: completions of a line's first word.

    Attributes:
        complaint: why lines cannot be stored, for people; "" if they can or need not be.
    """

    def __init__(self, words: Sequence[str] = ()):
        self.path: Path | None = None
        self.complaint = ""
        try:
            if not (os.isatty(sys.stdin.fileno()) and os.isatty(sys.stdout.fileno())):
                raise OSError
            import readline
        except (ImportError, AttributeError, OSError, ValueError):
            self.readline = None
            return
        self.readline = readline
        readline.set_completer_delims(" \t\n")
        readline.set_completer(lambda text, i: self._complete(words, text, i))
        if capable():
            readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one text; Python turns it off
        libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
        try:
            self._open_history(state_folder() / "history")
        except OSError as error:  # the chat works without a history
            where = f": {error.filename}" if error.filename else ""
            self.complaint = f"typed lines will not be remembered: {error.strerror}{where}"

    def _open_history(self, path: Path) -> None:
        assert self.readline
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        if not path.is_file():  # a link to /dev/null: the user wants no history
            return
        self.readline.read_history_file(path)
        if self.readline.get_current_history_length() > HISTORY_LENGTH:
            self.readline.set_history_length(HISTORY_LENGTH)
            self.readline.write_history_file(path)
        self.readline.set_history_length(-1)
        os.chmod(path, 0o600)
        self.path = path

    def ask(self, prompt: str) -> str:
        """Return one line. Raises EOFError."""
        if self.readline is None:
            return input(prompt)
        before = self.readline.get_current_history_length()
        line = input(prompt)
        if self.path and self.readline.get_current_history_length() > before:
            with contextlib.suppress(OSError, AttributeError):  # AttributeError: libedit cannot append
                self.readline.append_history_file(1, self.path)  # at once: the process may be killed
        return line

    def _complete(self, words: Sequence[str], text: str, i: int) -> str | None:
        line = self.readline.get_line_buffer() if self.readline else ""
        matches: list[str] = []
        if line.startswith(("/read ", "/load ", "/save ")):
            matches = sorted(glob.glob(glob.escape(os.path.expanduser(text)) + "*"))
        elif line.startswith("/") and " " not in line:
            matches = [word + " " for word in words if word.startswith(text)]
        return matches[i] if i < len(matches) else None


@contextlib.contextmanager
def no_echo() -> Iterator[None]:
    """Do not echo typed text in this block; the next prompt shows it. Without a terminal, do nothing."""
    try:
        before = termios.tcgetattr(sys.stdin.fileno())
    except (OSError, ValueError, AttributeError, termios.error):
        yield
        return
    _set_modes([*before[:3], before[3] & ~termios.ECHO, *before[4:]])
    try:
        yield
    finally:
        _set_modes(before)


def enter_pressed() -> bool:
    """Whether an empty line was typed, which is read then; a longer one stays for the next prompt."""
    count = array("i", [0])
    try:
        fd = sys.stdin.fileno()
        if not os.isatty(fd):
            return False
        fcntl.ioctl(fd, termios.FIONREAD, count)
        return count[0] == 1 and os.read(fd, 1) == b"\n"
    except (OSError, ValueError, AttributeError):
        return False


def _set_modes(modes: list[Any]) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError, termios.error):  # the terminal is gone
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, modes)


class Quit(KeyboardInterrupt):
    """End the chat: a second Ctrl-C during one reply, a closed terminal, SIGTERM.

    Args:
        number: the signal.
    """

    def __init__(self, number: int = signal.SIGINT):
        self.exit_code = 128 + number
        super().__init__()


@contextlib.contextmanager
def _waking(seconds: float) -> Iterator[None]:
    """Interrupt system calls of the main thread periodically.

    Readline checks for signals when its wait is interrupted; a signal just before the wait would be noticed only at the
    next key.
    """
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Interrupt:
    """Ctrl-C as a flag: `pressed` requests a stop at the next step, so that no state becomes inconsistent.

    At a prompt Ctrl-C raises KeyboardInterrupt, which clears the line. A second Ctrl-C raises Quit while the work that
    the first one should stop continues. A closed terminal (SIGHUP) and SIGTERM always raise Quit. After a Quit these
    signals are ignored until the next prompt, because the conversation is being saved.

    As a context manager it handles the signals, except those that the process ignores.
    """

    LOOK = 0.2  # seconds between two checks for a Ctrl-C that readline missed

    def __init__(self):
        self.pressed = False
        self._prompting = self._leaving = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)  # a Ctrl-C may have come before `_waking` did that
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @contextlib.contextmanager
    def prompting(self) -> Iterator[None]:
        """A block that reads a line; after it, Ctrl-C applies to the reply."""
        self.pressed, self._leaving, self._prompting = False, False, True
        try:
            with _waking(self.LOOK):
                yield
        except SystemError as error:  # `input` has called the handler of a second signal with the first's exception set
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise error.__cause__ from None
            raise
        finally:
            self._prompting = False

    def _handle(self, number: int, _: object) -> None:
        if self._leaving:
            return
        if number == signal.SIGINT and self._prompting:
            raise KeyboardInterrupt
        if number == signal.SIGINT and not self.pressed:
            self.pressed = True
            return
        self._leaving = True
        raise Quit(number)

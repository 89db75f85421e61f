"""The folder of a run: answers in the order in which they come, and at the end one file in the order of the input."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from engine.app.records import read_lines
from engine.errors import UsageError, shortened
from models.checkpoint.files import lock, read_regular, replacing

ANSWERS, COMING, RUN = "answers.jsonl", "answers.coming.jsonl", "run.json"
HEAD, MIDDLE, TAIL = b'{"record": ', b', "answer": ', b"}\n"
MOST = 1 << 20  # bytes of run.json


class Line(NamedTuple):
    """A record of the input: its number, from 0, its line's number, from 1, and the line."""

    record: int
    number: int
    line: bytes


def read_input(path: str) -> list[Line]:
    """The records of a file, without blank lines. Raises UsageError."""
    try:
        with open(path, "rb") as source:
            if not source.seekable():
                raise UsageError("the input is read again to go on with it: expected a file, got a pipe", where=path)
            lines = [(number, line) for number, line in read_lines(source, lambda: False) if line and line.strip()]
    except OSError as error:
        raise UsageError(f"cannot read the input: {error.strerror}", where=path) from None
    return [Line(record, number, line) for record, (number, line) in enumerate(lines)]


class Store:
    """Answers by the number of their record; one process writes.

    Args:
        folder: is made, or holds an earlier run of the same input and flags, which is continued.
        lines: the whole input.
        flags: the flags that answers depend on.

    Raises:
        UsageError: a folder of another run, one that another run writes to, or one that cannot be written.

    Attributes:
        errors: how many answers are errors.
    """

    def __init__(self, folder: str | Path, lines: Sequence[Line], flags: Sequence[str]):
        self.folder, self.count, self.errors = Path(folder), len(lines), 0
        self._places: dict[int, tuple[int, int]] = {}  # of answers in the file: start and end
        digest = hashlib.sha256()
        for line in lines:
            digest.update(line.line.rstrip(b"\r\n") + b"\n")
        self._run = {"input": digest.hexdigest(), "records": len(lines), "flags": list(flags)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = self._opened()
        except OSError as error:
            raise UsageError(f"cannot write the output: {error.strerror}", where=str(self.folder)) from None

    def __contains__(self, record: int) -> bool:
        return record in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, record: int, answer: bytes) -> None:
        """Write an answer, JSON on one line. Raises UsageError if there is no room for it."""
        start = self._end
        row = HEAD + str(record).encode() + MIDDLE + answer + TAIL
        try:
            left = memoryview(row)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._file.truncate(start)
            remedy = "make room, and start the same command again: it goes on"
            raise UsageError(f"cannot write the output: {error.strerror}", where=self._name, remedy=remedy) from None
        self._end += len(row)
        self._note(record, start, row)

    def merge(self) -> Path:
        """Write the file of all answers, in the order of the input."""
        path = self.folder / ANSWERS
        try:
            with open(self._name, "rb") as answers, replacing(path, 0o666) as whole:
                for record in range(self.count):
                    start, end = self._places[record]
                    answers.seek(start)
                    whole.write(answers.read(end - start) + b"\n")
        except OSError as error:
            raise UsageError(f"cannot write the output: {error.strerror}", where=str(path)) from None
        return path

    def close(self) -> None:
        """Close the file and release its lock."""
        self._file.close()

    def _opened(self) -> IO[bytes]:
        self._name, self._end = str(self.folder / COMING), 0
        file = open(self._name, "ab", buffering=0)  # noqa: SIM115  (`close` closes it)
        try:
            lock(file.fileno())
            self._check()
            for start, row in self._rows():
                self._note(self._record(row), start, row)
                self._end = start + len(row)
            file.truncate(self._end)  # of a line that was cut short
        except BlockingIOError:
            file.close()
            raise UsageError("another run is writing to the folder", where=str(self.folder)) from None
        except BaseException:
            file.close()
            raise
        return file

    def _check(self) -> None:
        """Write the description of the run, or compare it with the folder's."""
        path = self.folder / RUN
        if not path.exists():
            if os.path.getsize(self._name) or (self.folder / ANSWERS).exists():
                raise UsageError("the folder has answers of another run", where=str(self.folder))
            with replacing(path, 0o666) as file:
                file.write(json.dumps(self._run, indent=1).encode() + b"\n")
            return
        try:
            before = json.loads(read_regular(path, MOST))
            names = {"input": "input", "records": "input", "flags": "flags"}
            wrong = next((what for name, what in names.items() if before[name] != self._run[name]), None)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError("not a file that a run wrote", where=str(path)) from None
        if wrong:
            remedy = "go on with what it was started with, or give another --output"
            raise UsageError(f"the folder has a run with other {wrong}", where=str(path), remedy=remedy)

    def _rows(self) -> Iterator[tuple[int, bytes]]:
        """Whole lines of the file, and where they start. Raises UsageError for other lines."""
        start = 0
        with open(self._name, "rb") as file:
            for row in file:
                if not row.endswith(b"\n"):
                    return
                if not row.startswith(HEAD) or MIDDLE not in row or not row.endswith(TAIL):
                    raise UsageError("not a file that a run wrote", where=self._name)
                yield start, row
                start += len(row)

    def _record(self, row: bytes) -> int:
        """The number of the record that a line of the file answers. Raises UsageError."""
        number, _, answer = row.removeprefix(HEAD).removesuffix(TAIL).partition(MIDDLE)
        with suppress(ValueError, RecursionError):
            if number.isdigit() and int(number) < self.count and isinstance(json.loads(answer), dict):
                return int(number)
        raise UsageError(f"not an answer that a run wrote: {shortened(ascii(row))}", where=self._name)

    def _note(self, record: int, start: int, row: bytes) -> None:
        first = row.index(MIDDLE) + len(MIDDLE)
        if record not in self._places:
            self.errors += "error" in json.loads(row[first : -len(TAIL)])
            self._places[record] = start + first, start + len(row) - len(TAIL)

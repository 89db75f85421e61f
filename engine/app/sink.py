"""The output of a batch: whole lines in order, in a file that a later run can continue, or on standard output."""

import argparse
import io
import json
import os
import stat
import sys
from typing import IO, Any

from engine.app.batch_flags import deciding
from engine.app.records import digest, encoded, is_id
from engine.errors import UsageError
from models.checkpoint.files import lock
from models.shard import Shard


def open_sink(args: argparse.Namespace, source: IO[bytes], stdout: IO[bytes] | None, shard: Shard) -> "Sink":
    """Open the output. In all processes except the first it writes nothing and has the same counts of answers."""
    sink = Sink(_Nowhere(), "nowhere") if shard.rank > 0 else Sink.open(args, source, stdout)
    sink.kept, sink.lines, sink.errors = shard.first(lambda: (sink.kept, sink.lines, sink.errors))
    return sink


DIGEST, FLAGS = "record", "flags"  # keys of an answer in a file
ANSWERS = "outputs", "scores", "embedding", "error"  # keys of an answer: it has one of them


class _Nowhere(io.BytesIO):
    """A file that discards what is written to it."""

    def write(self, data: Any) -> int:
        return len(data)


class Sink:
    """Writes answers in order, whole lines only.

    Attributes:
        file: --output FILE; None is stdout.
        kept: ids of the answers that the file had before, and digests of their records (None: the file has none).
        flags: digest of the flags that decide the answers.
        lines, errors: the number of answers, and of those that are errors.
    """

    def __init__(self, stream: IO[bytes], name: str, file: io.FileIO | None = None, flags: str = ""):
        self.stream, self.name, self.file, self.flags = stream, name, file, flags
        self.kept: list[tuple[str | int, str | None]] = []
        self.lines = self.errors = 0
        self._held: dict[int, dict[str, Any]] = {}
        self._next = 0

    @staticmethod
    def open(args: argparse.Namespace, source: IO[bytes], stdout: IO[bytes] | None) -> "Sink":
        """Open the output that the flags name. Raises UsageError."""
        if args.output == "-":
            if args.resume:
                raise UsageError("--resume needs --output FILE")
            if stdout is None and sys.stdout is None:
                raise UsageError("standard output is closed", remedy="give --output FILE")
            sink = Sink(stdout or sys.stdout.buffer, "standard output")
            if _same_file(source, sink.stream):
                raise UsageError("the input and the output are the same file")
            return sink
        file = None
        try:
            file = open(args.output, "ab", buffering=0)  # noqa: SIM115  (the sink closes it)
            sink = Sink(file, args.output, file, digest(repr(sorted(deciding(args).items())).encode()))
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                sink._lock(file, args.quiet)
            if _same_file(source, file):
                raise UsageError("the input and the output are the same file", where=args.output)
            if args.resume:
                sink._keep(file)
            elif os.fstat(file.fileno()).st_size:
                remedy = "--resume continues it; or give another name, or delete it"
                raise UsageError("the output file exists and is not empty", where=args.output, remedy=remedy)
        except OSError as error:
            raise UsageError(f"cannot write the output: {error.strerror}", where=args.output) from None
        except UsageError:
            if file is not None:
                file.close()
            raise
        return sink

    def _lock(self, file: io.FileIO, quiet: bool) -> None:
        """Lock the file against other runs until it is closed. Raises UsageError if another run has the lock."""
        try:
            if not lock(file.fileno()) and not quiet and sys.stderr is not None:
                note = f"{self.name}: its file system has no locks; no other run may write to it meanwhile"
                print(note, file=sys.stderr)
        except BlockingIOError:
            remedy = "wait until that run has ended, or give another --output"
            raise UsageError("another run is writing to the output file", where=self.name, remedy=remedy) from None

    def _keep(self, file: io.FileIO) -> None:
        """Read the ids and digests of the file's answers; remove an incomplete last line. Raises UsageError."""
        whole = 0
        with open(self.name, "rb") as old:
            for number, line in enumerate(old, 1):
                head = b'{"id": '
                # After a loss of power the end of a file may be zeros.
                if not line.endswith(b"\n") and (line.startswith(head) or head.startswith(line.rstrip(b"\0"))):
                    break
                try:
                    record = json.loads(line)
                    identity = record["id"]
                    if not is_id(identity) or sum(key in record for key in ANSWERS) != 1:
                        raise ValueError
                except (ValueError, KeyError, TypeError, RecursionError):
                    raise UsageError(
                        "--resume: this is no answer of an earlier run",
                        where=f"{self.name}, line {number}",
                        remedy="give the file that the interrupted run wrote",
                    ) from None
                if record.get(FLAGS, self.flags) != self.flags:
                    raise UsageError(
                        "--resume: this answer was made with other flags",
                        where=f"{self.name}, line {number}",
                        remedy="give the flags of the first run (of model, prompts, search and replies), "
                        "or another --output",
                    )
                self.kept.append((identity, record.get(DIGEST)))
                self.errors += "error" in record
                whole += len(line)
        self.lines = len(self.kept)
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.truncate(whole)

    def put(self, i: int, record: dict[str, Any], found: str) -> None:
        """Add the i-th answer, and write all answers whose predecessors are written; a file gets the digests of their
        records and of the flags, too."""
        self._held[i] = record | {DIGEST: found, FLAGS: self.flags} if self.file else record
        while self._next in self._held:
            record = self._held.pop(self._next)
            self._write(encoded(record) + b"\n")
            self._next += 1
            self.lines += 1
            self.errors += "error" in record

    def _write(self, line: bytes) -> None:
        size = os.fstat(self.file.fileno()).st_size if self.file else 0
        try:
            left = memoryview(line)
            while left:
                left = left[self.stream.write(left) :]
            self.stream.flush()
        except BaseException as error:
            if self.file and stat.S_ISREG(os.fstat(self.file.fileno()).st_mode):
                self.file.truncate(size)  # no incomplete lines, even if the disk is full
            if isinstance(error, BrokenPipeError) or not isinstance(error, OSError):
                raise
            remedy = "its lines are whole: make room, and continue with --resume" if self.file else ""
            raise UsageError(f"cannot write the output: {error.strerror}", where=self.name, remedy=remedy) from None

    def close(self) -> None:
        if self.file:
            self.file.close()


def _same_file(a: IO[bytes], b: IO[bytes]) -> bool:
    try:
        one, two = os.fstat(a.fileno()), os.fstat(b.fileno())
    except (OSError, ValueError):  # not files of the system
        return False
    return stat.S_ISREG(one.st_mode) and os.path.samestat(one, two)

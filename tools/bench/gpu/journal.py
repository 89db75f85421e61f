"""The journal of a run: a JSON line for each case of a stage as it begins and as it ends, and one for each stage.

A process that goes on with a run takes from it what is known, and measures the rest. So an error that ends a process, a
GPU that answers no more, or a limit of time costs the case under way and no other.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import UsageError

WHOLE = ""  # the name of the case that is a stage as a whole


class Ended(NamedTuple):
    """A case that has ended: its row, None where it failed, and why there are figures missing."""

    row: dict[str, Any] | None
    notes: list[str]


class Journal:
    """The findings of a run so far.

    Args:
        path: the file, to which every line is written at once; None: the journal is kept in memory alone.

    Attributes:
        stage: the stage under way.
        ended: the cases that have ended, by stage and case.
        begun: the stages and cases that have not ended, each stage before its cases.
        stages: the figures of stages that have ended.
        left: for each of these stages the number of cases that had no time.

    Raises:
        UsageError: the file cannot be read, or is no journal.
    """

    def __init__(self, path: Path | None = None):
        self.path, self.stage, self.written = path, "", 0
        self.ended: dict[tuple[str, str], Ended] = {}
        self.begun: list[tuple[str, str]] = []
        self.stages: dict[str, dict[str, Any]] = {}
        self.left: dict[str, int] = {}
        self.facts: dict[str, Any] = {}
        self.catch_up()

    def catch_up(self) -> None:
        """Read the lines that this or another process has added."""
        if self.path is None or not self.path.exists():
            return
        try:
            new = self.path.read_bytes()[self.written :]
            whole = new[: new.rfind(b"\n") + 1]  # a process may have ended in the middle of its last line
            for line in whole.splitlines():
                self._apply(json.loads(line))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"the journal cannot be read: {error}", where=str(self.path)) from None
        self.written += len(whole)

    def _write(self, line: Mapping[str, Any]) -> None:
        self._apply(line)
        if self.path is not None:
            data = (json.dumps(line) + "\n").encode()
            with self.path.open("r+b" if self.path.exists() else "wb") as file:
                file.truncate(self.written)
                file.seek(self.written)
                file.write(data)
            self.written += len(data)

    def _apply(self, line: Mapping[str, Any]) -> None:
        kind, name = line["is"], (line.get("stage", ""), line.get("case", WHOLE))
        if kind == "run":  # what had no time in the run before has some now
            self.begun.clear()
            for stage in [stage for stage, count in self.left.items() if count]:
                del self.left[stage], self.stages[stage]
        elif kind == "fact":
            self.facts[line["name"]] = line["value"]
        elif kind == "begin":
            self.begun = [each for each in self.begun if each != name and each[0] == name[0]]
            self.begun.append(name)
        else:
            self.begun = [each for each in self.begun if each != name]
            if name[1] == WHOLE:
                self.stages[name[0]], self.left[name[0]] = line["found"], line["left"]
            else:
                self.ended[name] = Ended(line["row"], line["notes"])

    def run(self) -> None:
        """Begin or continue a run: stages that had no time for all their cases begin anew."""
        self._write({"is": "run"})

    def agree(self, **facts: Any) -> None:
        """Keep facts that figures depend on. Raises UsageError where the journal has others."""
        for name, value in facts.items():
            if self.facts.setdefault(name, value) != value:
                raise UsageError(f"the journal's {name} is {self.facts[name]}, not {value}", where=str(self.path),
                                 remedy="name another file, or remove it")  # fmt: skip
            self._write({"is": "fact", "name": name, "value": value})

    def begin(self, case: str = WHOLE) -> None:
        """A case of the stage under way begins, or the stage itself."""
        self._write({"is": "begin", "stage": self.stage, "case": case})

    def end(self, case: str, row: Mapping[str, Any] | None, notes: Sequence[str]) -> None:
        """A case has ended."""
        self._write({"is": "end", "stage": self.stage, "case": case, "row": row, "notes": [*notes]})

    def close(self, found: Mapping[str, Any], left: int = 0) -> None:
        """The stage under way has ended, in which so many cases had no time."""
        self._write({"is": "end", "stage": self.stage, "case": WHOLE, "found": found, "left": left})

    def known(self, case: str) -> Ended | None:
        """The end of a case of the stage under way."""
        return self.ended.get((self.stage, case))

    def blame(self, why: str) -> bool:
        """Note why a process ended, for the case that was under way, or else its stage; False if none was."""
        if not self.begun:
            return False
        self.stage, case = self.begun[-1]
        if case == WHOLE:
            self.close({"rows": [], "targets": [], "notes": [f"{self.stage}: {why}"], "seconds": None})
        else:
            self.end(case, None, [f"{case}: {why}"])
        return True

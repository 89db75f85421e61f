"""A worker: a loaded model that answers blocks of lines, exactly as `engine.batch` answers them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.app.batch_flags import COMMON, add_request_flags
from engine.app.cli import Parser, add_verbosity_flags, positive, template_options
from engine.errors import CoppiceError, UsageError
from engine.load.flags import without_effect
from engine.load.options import LoadOptions
from models.later import later

with later():
    from engine.app.cli import load_engine
    from engine.app.records import Place, answer, encoded, identified, make_request
    from engine.contract import Search
    from engine.engine import Request


class Worker:
    """An actor of Ray Data's `map_batches`, which calls it with one block of lines after another.

    If the model cannot be loaded, the answer to every block is that error: the run ends with it and is not retried.

    Args:
        flags: as of `python -m tools.fleet`.
    """

    def __init__(self, flags: Sequence[str]):
        self.args = make_parser().parse_args(flags)
        self.fault: CoppiceError | None = None
        try:
            self.engine = load_engine(self.args)
            self.options = template_options(self.args)
        except CoppiceError as error:
            self.fault = error

    def __call__(self, block: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Answer lines.

        Args:
            block: the columns of `tools.fleet.store.Line`.

        Returns:
            columns: "record"; "answer", JSON; "pid", of this process; "fault", the error that ends the run, or "", and
            "code", its exit code.
        """
        records = [int(record) for record in block["record"]]
        if self.fault is not None:
            return _columns(records, [b""] * len(records), str(self.fault), self.fault.exit_code)
        places: list[Place] = []
        lines = zip(records, map(int, block["number"]), map(bytes, block["line"]), strict=True)
        answers = [b""] * len(records)
        try:
            for i, outcome in self.engine.serve(self._requests(lines, places)):
                answers[i] = encoded(answer(places[i], outcome))
        except CoppiceError as error:  # of the run, not of a line: no memory, say
            return _columns(records, answers, str(error), error.exit_code)
        return _columns(records, answers)

    def _requests(self, lines: Iterator[tuple[int, int, bytes]], places: list[Place]) -> Iterator[Any]:
        """The requests of lines, or their errors; `places` gets the place of each before it is yielded."""
        for record, number, line in lines:
            found, identity, wrong = identified(line, record)
            request: Request | CoppiceError | None = wrong
            thoughts = None
            if wrong is None:
                try:
                    request, thoughts = make_request(found, self.engine, self.args, self.options)
                except CoppiceError as error:
                    request = error
            places.append(Place(identity, number, thoughts=thoughts))
            yield request


def _columns(records: list[int], answers: list[bytes], fault: str = "", code: int = 0) -> dict[str, list[Any]]:
    count = len(records)
    own = {"pid": [os.getpid()] * count, "fault": [fault] * count, "code": [code] * count}
    return {"record": records, "answer": answers, **own}


EPILOG = """\
The input is that of engine.batch, a file; so are its flags. DIR gets answers.jsonl when all lines are answered, in the
order of the input. A run that ended early continues when the same command is started again. A worker that dies is
replaced, and its lines are given to another one: no line is lost or answered twice.

Without --address, Ray starts on this machine; with --address HOST:PORT (or auto) the run joins a Ray cluster, whose
machines all have coppice and the model's folder at the same path. Each worker has --threads threads and, with
--device cuda, a GPU.

exit codes: as of engine.batch; 6 a worker ended too often, or Ray cannot be reached.
"""
DESCRIPTION = "Answer prompts by many workers, each with a model: JSON Lines in, JSON Lines out, in input order."
OURS = f"{COMMON} --workers --address --block"


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("python -m tools.fleet", DESCRIPTION, EPILOG, OURS)
    group = parser.group("fleet")
    group.add_argument("--input", required=True, metavar="FILE", help="JSON Lines")
    group.add_argument("--output", required=True, metavar="DIR", help="a new folder, or that of a run to continue")
    group.add_argument("--workers", type=positive, default=1, metavar="N", help="processes, each with a model (1)")
    group.add_argument("--address", metavar="HOST:PORT", help="address of a Ray cluster (this machine alone)")
    group.add_argument("--block", type=positive, metavar="N", help="lines of a block (by their number)")
    add_request_flags(parser, "fleet", threads={"default": 1, "help": "limit of CPU threads of a worker (1)"})
    add_verbosity_flags(parser)
    return parser


def depended_on(args: Any) -> list[str]:
    """The flags that answers depend on, in a fixed order."""
    others = without_effect(LoadOptions) | {"input", "output", "workers", "address", "block", "quiet", "verbose"}
    return sorted(f"{name}={value!r}" for name, value in vars(args).items() if name not in others)


def check_search(search: Search) -> None:
    """Refuse a search that writes files. Raises UsageError."""
    if getattr(search, "save", None) is not None:
        raise UsageError("save: workers save nothing", remedy="leave out --aded-save")

"""Batch: reads prompts and writes answers as JSON Lines, in the same order; forward passes serve many lines."""

import argparse
import codecs
import difflib
import io
import json
import math
import os
import queue
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import IO, Any

from engine.app.cli import (
    PARALLEL,
    Parser,
    add_limit_flags,
    add_model_flags,
    add_prefix_flags,
    add_prompt_flags,
    add_rule_flags,
    add_search_flags,
    add_template_flags,
    add_trace_flag,
    add_verbosity_flags,
    limits,
    load_engine,
    parse_object,
    rules,
    run,
    search_params,
    template_options,
)
from engine.app.trace_page import check_target, saving
from engine.contract import SearchResult
from engine.contract.trace import Traces
from engine.engine import Engine, Request
from engine.errors import CoppiceError, UsageError, shortened
from engine.load.distributed import shared, together
from engine.rules import ONE_OF, PLAIN_RULES, response_format, with_changes
from engine.step.driver import Driver
from engine.text.prompting import TemplateOptions, chat_prompt
from engine.text.thinking import Thoughts
from models.checkpoint.files import lock
from models.sharding import Shard
from search.base import REGISTRY, chosen, make_search, parameters, paths

DESCRIPTION = "Answer prompts: JSON Lines in, JSON Lines out, in input order, each line as soon as it is ready."
EPILOG = """\
input, an object per line (blank lines are skipped):
  {"prompt": TEXT} or {"messages": [{"role", "content"}, ...]} or {"prompt_ids": [...]}, and if you like
  "id": a string or an integer, repeated in the answer (the record's number, from 0)
  "tools": with messages, a list of functions (JSON schemas) that the model may call
  "template": with messages, an object of variables for the chat template; "think": on, off or auto
  "response_format": as OpenAI has it: {"type": "json_schema", "json_schema": {"schema": ...}}, "json_object" or "text"
  "params": an object that overrides the command line for this line. Keys are the flags in snake_case (search, beams,
    max_new_tokens, stop, choices, parse_special, ...), eos_token_ids, a list, and sequence_bias, a list of
    [[id, ...], number]; json_schema and grammar are the schema, an object, and the grammar, a text. Other flags that
    name files are for the command line alone. A line that changes the search does not inherit the parameters of the
    command line that its search lacks.

output, an object per line:
  {"id", "outputs": [{"text", "token_ids", "logprob", "score", "finish_reason"}, ...], "stats": {...}}, best first, or
  with "reasoning" beside "text" where the model wrote a thought before the answer to messages, with "item", the item's
  id, where there is a --catalogue, with "token_logprobs" ([logprob, ...]) and "top_logprobs" ([[[id, logprob], ...],
  ...]) where there is --logprobs, or
  {"id", "error": {"code", "message"}}; the run goes on after it.

--resume keeps what FILE has, errors included, cuts off a torn last line, and goes on with the next record. Give it
the same input and the same flags.

A fault of a search of your own is the error of its line, with the code "search"; -v shows its traceback. A line can
choose every search that the command line names (--search may be repeated), and loads none.

torchrun --nproc-per-node N -m engine.batch ... shares the models among N processes, one per GPU where there are any:
the first one reads the input, and writes; sizes of memory are those of each process.

exit codes: 0 every line was answered; 2 some line has an error for an answer, or wrong usage; 3 checkpoint; 4 memory;
  5 numerics; 6 another process has ended; 1 our bug; 130 interrupted; 141 closed pipe. Codes 3 to 6 are about the whole
  run, not about a line. torchrun itself returns 1 for each of them.
"""
MAX_LINE = 64 << 20
PROMPTS = ("prompt", "messages", "prompt_ids")
TEMPLATE = ("tools", "template", "think")
LIMITS = ("max_new_tokens", "stop", "ignore_eos", "eos_token_ids", "logprobs")
READ_AHEAD = 64  # lines of a pipe
AWAKE = 30.0  # seconds after which an idle reader of a pipe says so, to processes that wait for it


def main(argv: Sequence[str] | None = None, stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None) -> int:
    """Run the command line, with `stdin` and `stdout` instead of the process's if given. Returns the exit code."""
    parser = Parser("python -m engine.batch", DESCRIPTION, EPILOG)
    add_request_flags(parser)
    add_prefix_flags(parser)
    group = parser.add_argument_group("batch")
    group.add_argument("--input", default="-", metavar="FILE", help="- is stdin (-)")
    group.add_argument("--output", default="-", metavar="FILE", help="must be new or empty; - is stdout (-)")
    group.add_argument("--parallel", type=int, default=PARALLEL, metavar="N", help="searches at once (%(default)s)")
    group.add_argument("--resume", action="store_true", help="go on where FILE ends")
    add_trace_flag(group, "one page, on which the latest lines can be chosen by their ids")
    add_verbosity_flags(parser)
    args = parser.parse_args(argv)

    def whole() -> int:
        with together(args.device) as shard:
            return batch(args, stdin, stdout, shard)

    return run(whole, args.verbose, args.quiet)


def add_request_flags(parser: Parser) -> None:
    """The flags of everything that answers lines."""
    add_model_flags(parser)
    add_template_flags(parser)
    add_prompt_flags(parser)
    add_search_flags(parser)
    add_limit_flags(parser)
    add_rule_flags(parser)


def batch(args: argparse.Namespace, stdin: IO[bytes] | None, stdout: IO[bytes] | None, shard: Shard) -> int:
    """Serve the input to its end. Raises CoppiceError for errors of the whole run.

    Of processes that share the models the first one reads and writes; all others get what it read.
    """
    make_search(args.search, search_params(args))  # checks the command line before anything is loaded
    rules(args)
    traces = None
    if args.trace is not None:
        check_target(args.trace, args.input, args.output)
        traces = Traces()
    args = argparse.Namespace(**{**vars(args), "shard": shard})
    if shard.rank > 0:
        args.quiet, args.trace = True, None
    source = _open_input(args, stdin) if shard.rank == 0 else io.BytesIO()
    # A pipe stays open until the process ends: closing it would wait for the thread that reads it.
    with source if source.seekable() else nullcontext(), closing(_sink(args, source, stdout, shard)) as sink:
        engine = load_engine(args)
        meter = Meter(engine, args, source)
        records = Records(source, engine, args, sink.kept, traces)
        try:
            with saving(traces, args.trace), closing(engine.serve(records, on_step=meter.step)) as outcomes:
                for i, outcome in outcomes:
                    meter.count(outcome)
                    if args.verbose and isinstance(outcome, CoppiceError) and outcome.__cause__ is not None:
                        traceback.print_exception(outcome)
                    sink.put(i, answer(records.finish(i), outcome))
        except KeyboardInterrupt:
            if sink.file is None:
                raise
            raise KeyboardInterrupt(f"{args.output} has the answers so far; the same with --resume goes on") from None
        finally:
            meter.clear()
        if records.index < len(sink.kept):
            raise UsageError(
                f"{args.output} has {len(sink.kept)} answers, the input only {records.index} records",
                remedy="--resume needs the input that the answers are for",
            )
        meter.summary(len(sink.kept))
        if sink.errors:
            if not args.quiet:
                print(f"{sink.errors} of {sink.lines} answers are errors", file=sys.stderr)
            return UsageError.exit_code
        return 0


# --- records ---


@dataclass(frozen=True)
class Place:
    """The id of a record, its line in the input, counted from 1, and how answers to its messages write thoughts."""

    id: str | int
    line: int
    thoughts: Thoughts | None = None


class Records:
    """The items for `Engine.serve`: requests, errors in place of requests, None while a pipe is empty.

    Args:
        source: the input.
        engine: has the tokenizer and the template.
        args: the command line.
        kept: ids of the records that are answered already.
        traces: records the other requests.
    """

    def __init__(
        self,
        source: IO[bytes],
        engine: Engine,
        args: argparse.Namespace,
        kept: Sequence[str | int],
        traces: Traces | None = None,
    ):
        self.source, self.engine, self.args, self.kept, self.traces = source, engine, args, kept, traces
        self.index = 0  # records read
        self.options = template_options(args)
        self._places: dict[int, Place] = {}  # index of an unfinished request -> its place

    def finish(self, i: int) -> Place:
        """The place of the i-th request, which is answered."""
        return self._places.pop(i)

    def __iter__(self) -> Iterator[Request | CoppiceError | None]:
        for number, line in shared(self.engine.shard, lambda: read_lines(self.source, lambda: bool(self._places))):
            if line is None:
                yield None
                continue
            if not line.strip():
                continue
            index, self.index = self.index, self.index + 1
            record, identity, error = identified(line, index)
            if index < len(self.kept):
                if identity != self.kept[index]:
                    raise UsageError(
                        f"record {index} of the input has the id {identity!r}, its answer {self.kept[index]!r}",
                        where=f"line {number} of the input, answer {index + 1} of {self.args.output}",
                        remedy="--resume needs the input that the answers are for",
                    )
                continue
            place = self._places[index - len(self.kept)] = Place(identity, number)
            try:
                request = error
                if request is None:
                    request, thoughts = make_request(record, self.engine, self.args, self.options)
                    self._places[index - len(self.kept)] = replace(place, thoughts=thoughts)
                if self.traces and isinstance(request, Request):
                    request = replace(request, trace=self.traces.new(identity))
                yield request
            except CoppiceError as fault:
                yield fault


def read_lines(source: IO[bytes], busy: Callable[[], bool]) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines of the input. For a pipe also (0, None) whenever it has no line at the moment and `busy()`, and
    every `AWAKE` seconds."""
    lines = enumerate(iter(lambda: _line(source), b""), 1)
    if source.seekable():
        yield from ((number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line) for number, line in lines)
        return
    waiting: queue.Queue = queue.Queue(READ_AHEAD)

    def read() -> None:
        try:
            for item in lines:
                waiting.put(item)
            waiting.put(None)
        except Exception as error:
            waiting.put(error)

    threading.Thread(target=read, name="input", daemon=True).start()
    while True:
        try:
            item = waiting.get(block=not busy(), timeout=AWAKE)
        except queue.Empty:
            yield 0, None
            continue
        if item is None:
            return
        if isinstance(item, Exception):
            raise item
        yield item


def _line(source: IO[bytes]) -> bytes:
    """The next line; at most MAX_LINE + 1 bytes of it, so that a wrong file does not fill the memory."""
    try:
        line = source.readline(MAX_LINE + 1)
        if len(line) > MAX_LINE:
            while (more := source.readline(1 << 20)) and not more.endswith(b"\n"):
                pass
    except OSError as error:
        raise UsageError(f"cannot read the input: {error.strerror}") from None
    return line


def parse_record(line: bytes) -> dict[str, Any]:
    """A line of the input as an object. Raises UsageError."""
    if len(line) > MAX_LINE:
        raise UsageError(f"the line has more than {MAX_LINE >> 20} MB")
    hooks = {"parse_constant": _no_constant, "parse_float": _finite, "parse_int": _sane, "object_pairs_hook": _unique}
    try:
        return parse_object(line, **hooks)
    except ValueError as error:
        raise UsageError(str(error)) from None


def identified(line: bytes, index: int) -> tuple[dict[str, Any], str | int, UsageError | None]:
    """A record, its id, which is its number if it has none, and what is wrong with it."""
    try:
        record = parse_record(line)
    except UsageError as error:
        return {}, index, error
    identity = record.get("id", index)
    if not _is_id(identity):
        return record, index, UsageError(f"id: expected a string or an integer, got {_show(identity)}")
    return record, identity, None


def _no_constant(name: str) -> float:
    raise UsageError(f"malformed JSON: {name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise UsageError(f"the number {digits[:40]} is out of range")
    return value


def _sane(digits: str) -> int:
    if len(digits) > 20 or abs(value := int(digits)) >= 1 << 63:
        raise UsageError(f"the integer {digits[:40]} is out of range")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise UsageError(f"the key {shortened(twice)!r} occurs twice")
    return record


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def make_request(
    record: dict[str, Any], engine: Engine, args: argparse.Namespace, options: TemplateOptions
) -> tuple[Request, Thoughts | None]:
    """The request of a record, and how its answers write thoughts; the command line gives what the record lacks.

    Raises CoppiceError.
    """
    _known(record, ["id", *PROMPTS, *TEMPLATE, "response_format", "params"], "")
    given = [key for key in PROMPTS if key in record]
    if len(given) != 1:
        raise UsageError(f"expected one of prompt, messages and prompt_ids, got {' and '.join(given) or 'none'}")
    params = record.get("params", {})
    if not isinstance(params, dict):
        raise UsageError(f"params: expected an object, got {_show(params)}")
    own_options = (*LIMITS, *PLAIN_RULES, "parse_special")
    known = ["search", *own_options, *dict.fromkeys(key for name in REGISTRY for key in parameters(name))]
    _known(params, known, "params.")
    bounds = limits(args) | {key: params[key] for key in LIMITS if key in params}
    own_rules = {key: params[key] for key in PLAIN_RULES if key in params}
    if "response_format" in record:
        if other := next((key for key in ONE_OF if key in own_rules), None):
            raise UsageError(f"response_format and params.{other}: expected at most one of them")
        own_rules |= response_format(record["response_format"])
    bounds |= with_changes(rules(args), own_rules)
    for key in ("stop", "choices", "bad_words"):
        if isinstance(bounds.get(key), str):
            bounds[key] = [bounds[key]]
    if bounds.get("eos_token_ids", ()) is None:  # None would be the checkpoint's
        raise UsageError("eos_token_ids: expected a list of token ids, got null")
    for key, words in paths().items():
        if params.get(key) is not None and params[key] not in words:
            also = f"; here it may be {' or '.join(words)}" if words else ""
            raise UsageError(f"params.{key}: paths are given on the command line only{also}")
    own = {key: value for key, value in params.items() if key not in ("search", *own_options)}
    name, inherited = chosen(params, args.search), search_params(args)
    if isinstance(name, str) and name != args.search and name in REGISTRY:
        inherited = {key: value for key, value in inherited.items() if key in parameters(name)}
    search = make_search(name, inherited | own)
    if given != ["messages"]:
        if other := next((key for key in TEMPLATE if key in record), None):
            raise UsageError(f"{other}: only a line with messages has a chat template")
        parse = params.get("parse_special", getattr(args, "parse_special", False))
        return Request(_prompt(given[0], record[given[0]], engine, parse), search, **bounds), None
    if params.get("parse_special"):
        raise UsageError("parse_special: messages are from users, it is for a prompt", remedy="leave it out")
    prompt = chat_prompt(engine, _messages(record["messages"]), _options(record, options))
    bounds.setdefault("eos_token_ids", prompt.eos_token_ids)
    return Request(prompt.ids, search, messages=record["messages"], **bounds), prompt.thoughts


def _options(record: dict[str, Any], options: TemplateOptions) -> TemplateOptions:
    """What the chat template of a record gets; the command line gives what the record lacks. Raises UsageError."""
    variables = record.get("template", {})
    if not isinstance(variables, dict):
        raise UsageError(f"template: expected an object of variables, got {_show(variables)}")
    tools = record.get("tools", options.tools)
    return TemplateOptions(tools, {**options.variables, **variables}, record.get("think", options.think))


def _prompt(key: str, value: Any, engine: Engine, parse_special: bool) -> Sequence[int]:
    if key == "prompt_ids":
        if not isinstance(value, list):
            raise UsageError(f"prompt_ids: expected a list of integers, got {_show(value)}")
        return value
    if not isinstance(value, str):
        raise UsageError(f"prompt: expected a string, got {_show(value)}")
    return engine.encode(value, parse_special)


def _messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a record. Raises UsageError."""
    if not isinstance(value, list) or not value:
        raise UsageError(f"messages: expected a list of at least one message, got {_show(value)}")
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise UsageError(f"messages[{i}]: expected an object, got {_show(message)}")
        for part in ("role",) if message.get("tool_calls") else ("role", "content"):
            if not isinstance(message.get(part), str):
                got = _show(message[part]) if part in message else "none"
                raise UsageError(f"messages[{i}].{part}: expected a string, got {got}")
    return value


def _known(record: dict[str, Any], keys: Sequence[str], where: str) -> None:
    for key in record:
        if key not in keys:
            near = difflib.get_close_matches(key[:100], keys, 1)
            rest = "--help lists all, as flags" if where else f"known: {', '.join(keys)}"
            remedy = f"did you mean {near[0]}?" if near else rest
            raise UsageError(f"{where}{key[:100]}: no such key", remedy=remedy)


def _show(value: Any) -> str:
    """A JSON value for a message, shortened."""
    return shortened(json.dumps(value))


def answer(place: Place, outcome: SearchResult | CoppiceError) -> dict[str, Any]:
    """The output record of a request."""
    if isinstance(outcome, CoppiceError):
        message = f"line {place.line}: {'; '.join(str(outcome).splitlines())}"
        return {"id": place.id, "error": {"code": outcome.code, "message": message}}
    return outcome.record(place.id, place.thoughts)


def encoded(record: dict[str, Any]) -> bytes:
    """A record as JSON on one line; a lone surrogate (of an id) becomes an escape of JSON, as in the input."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace")


# --- files ---


def _open_input(args: argparse.Namespace, stdin: IO[bytes] | None) -> IO[bytes]:
    if args.input != "-":
        try:
            return open(args.input, "rb")
        except OSError as error:
            raise UsageError(f"cannot read the input: {error.strerror}", where=args.input) from None
    if stdin is not None:
        return stdin
    if sys.stdin is None:
        raise UsageError("standard input is closed", remedy="give --input FILE")
    if sys.stdin.isatty() and not args.quiet:
        print("JSON Lines are read from the terminal; Ctrl-D ends them", file=sys.stderr)
    # Not sys.stdin: a thread that waits there holds a lock that the interpreter takes when it ends.
    return open(sys.stdin.fileno(), "rb", closefd=False)


def _sink(args: argparse.Namespace, source: IO[bytes], stdout: IO[bytes] | None, shard: Shard) -> "Sink":
    """The output; in all processes but the first, one that writes nothing and has as many answers."""
    sink = Sink(_Nowhere(), "nowhere") if shard.rank > 0 else Sink.open(args, source, stdout)
    sink.kept, sink.lines, sink.errors = shard.first(lambda: (sink.kept, sink.lines, sink.errors))
    return sink


class _Nowhere(io.BytesIO):
    """Keeps nothing that is written to it."""

    def write(self, data: Any) -> int:
        return len(data)


class Sink:
    """Writes answers in order, whole lines only.

    Attributes:
        file: --output FILE; None is stdout.
        kept: ids of the answers that the file had before.
        lines, errors: the number of answers, and of those that are errors.
    """

    def __init__(self, stream: IO[bytes], name: str, file: io.FileIO | None = None):
        self.stream, self.name, self.file = stream, name, file
        self.kept: list[str | int] = []
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
            sink = Sink(file, args.output, file)
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                sink._lock(args.quiet)
            if _same_file(source, file):
                raise UsageError("the input and the output are the same file", where=args.output)
            if args.resume:
                sink._keep()
            elif os.fstat(file.fileno()).st_size:
                remedy = "--resume goes on with it; or give another name, or delete it"
                raise UsageError("the output file exists and is not empty", where=args.output, remedy=remedy)
        except OSError as error:
            raise UsageError(f"cannot write the output: {error.strerror}", where=args.output) from None
        except UsageError:
            if file is not None:
                file.close()
            raise
        return sink

    def _lock(self, quiet: bool) -> None:
        """Lock the file against other runs until it is closed. Raises UsageError if another run has the lock."""
        assert self.file is not None
        try:
            if not lock(self.file.fileno()) and not quiet and sys.stderr is not None:
                note = f"{self.name}: its file system has no locks; no other run may write to it meanwhile"
                print(note, file=sys.stderr)
        except BlockingIOError:
            remedy = "wait until that run has ended, or give another --output"
            raise UsageError("another run is writing to the output file", where=self.name, remedy=remedy) from None

    def _keep(self) -> None:
        """Read the ids of the file's answers; remove an incomplete last line."""
        assert self.file is not None
        whole = 0
        with open(self.name, "rb") as old:
            for number, line in enumerate(old, 1):
                head = b'{"id": '
                if not line.endswith(b"\n") and (line.startswith(head) or head.startswith(line)):
                    break
                try:
                    record = json.loads(line)
                    identity = record["id"]
                    if not _is_id(identity) or ("outputs" in record) == ("error" in record):
                        raise ValueError
                except (ValueError, KeyError, TypeError, RecursionError):
                    raise UsageError(
                        "--resume: this is no answer of an earlier run",
                        where=f"{self.name}, line {number}",
                        remedy="give the file that the interrupted run wrote",
                    ) from None
                self.kept.append(identity)
                self.errors += "error" in record
                whole += len(line)
        self.lines = len(self.kept)
        if stat.S_ISREG(os.fstat(self.file.fileno()).st_mode):
            self.file.truncate(whole)

    def put(self, i: int, record: dict[str, Any]) -> None:
        """Add the i-th answer, and write all answers whose predecessors are written."""
        self._held[i] = record
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
            remedy = "its lines are whole: make room, and go on with --resume" if self.file else ""
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


# --- progress ---


class Meter:
    """Progress on stderr: one line that changes on a terminal, elsewhere with -v a line every ten seconds."""

    def __init__(self, engine: Engine, args: argparse.Namespace, source: IO[bytes]):
        self.engine = engine
        self.terminal = sys.stderr is not None and sys.stderr.isatty()
        self.quiet, self.notes = args.quiet or sys.stderr is None, set()  # notes of searches, once each
        self.on = not args.quiet and (self.terminal or args.verbose)
        self.began = time.monotonic()
        self.shown, self.drawn = self.began, False
        self.done = self.tokens = self.peak = 0
        self.total = _count(source) if self.on and args.input != "-" else None
        machine = engine.capabilities
        if self.on:
            lines = f"{engine.name} loaded in {engine.load_seconds:.1f} s", machine.precision, machine.paths
            print(*filter(None, lines), sep="\n", file=sys.stderr)
        if machine.warning and not self.quiet:
            print(machine.warning, file=sys.stderr)

    def count(self, outcome: SearchResult | CoppiceError) -> None:
        """Count an answer."""
        self.clear()
        self.done += 1
        if isinstance(outcome, SearchResult):
            self.tokens += outcome.stats["new_tokens"]

    def step(self, driver: Driver) -> None:
        """Show progress after a step."""
        for note in [r.report.info["note"] for r in driver.running if "note" in r.report.info]:
            if not self.quiet and note not in self.notes:
                self.clear()
                self.notes.add(note)
                print(note, file=sys.stderr)
        if not self.on:
            return
        live = self.engine.pool.used_pages * self.engine.pool.page_bytes
        self.peak = max(self.peak, live)
        now = time.monotonic()
        if now - self.shown < (0.2 if self.terminal else 10):
            return
        self.shown = now
        tokens = self.tokens + sum(len(r.report.best()) for r in driver.running if r.report.best)
        of = "" if self.total is None else f"/{self.total}"
        text = f"{self.done}{of} lines, {tokens / (now - self.began):.0f} tokens/s, KV {live / 1e6:.1f} MB"
        print(f"\r{text}\x1b[K" if self.terminal else f"{text}\n", end="", file=sys.stderr, flush=True)
        self.drawn = self.terminal

    def clear(self) -> None:
        """Erase the line before other output."""
        if self.drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self.drawn = False

    def summary(self, kept: int) -> None:
        """Print the totals."""
        if not self.on:
            return
        seconds = time.monotonic() - self.began
        text = f"{self.done} lines, {self.tokens} new tokens in {seconds:.1f} s ({self.tokens / seconds:.0f} tokens/s)"
        before = f"; {kept} lines were there before" if kept else ""
        prefixes = self.engine.pool.prefixes
        if prefixes is not None and prefixes.reused_tokens:
            before += f"; {prefixes.reused_tokens} of {prefixes.asked_tokens} prompt tokens were cached"
        print(f"{text}, KV peak {self.peak / 1e6:.1f} MB{before}", file=sys.stderr)


def _count(source: IO[bytes]) -> int | None:
    """The number of records of a file; None for a pipe."""
    if not source.seekable():
        return None
    count = sum(1 for line in iter(lambda: _line(source), b"") if line.strip())
    source.seek(0)
    return count

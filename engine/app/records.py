"""The wire format: JSON lines to requests, results to lines. Shared by the batch command, the server and the fleet."""

import argparse
import codecs
import difflib
import hashlib
import json
import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from engine.app.cli import limits, parse_object, rules, search_params, template_options
from engine.contract import Search, SearchResult
from engine.contract.embedding import TextVector
from engine.contract.scoring import Scoring
from engine.contract.trace import Traces
from engine.embeddings import embedding_of, embedding_request
from engine.engine import Engine
from engine.errors import CoppiceError, UsageError, shortened
from engine.load.distributed import shared
from engine.load.generation import Generation
from engine.load.loading import LoadedModel
from engine.request import Request, score_request
from engine.rules import ONE_OF, PLAIN_RULES, RULES, response_format, with_changes
from engine.text.prompting import chat_prompt
from engine.text.template import TemplateOptions
from engine.text.thinking import Thoughts
from search.base import REGISTRY, chosen, make_search, parameters, paths

MAX_LINE = 64 << 20
PROMPTS = ("prompt", "messages", "prompt_ids")
TEMPLATE = ("tools", "template", "think")
KEYS = ("id", *PROMPTS, *TEMPLATE, "response_format", "score", "embed", "params")  # of a line
LIMITS = ("max_new_tokens", "stop", "ignore_eos", "eos_token_ids", "logprobs", "heal", "distinct", "adapter", "drafts")
OPTIONS = (*LIMITS, *PLAIN_RULES, "parse_special")  # keys of params that belong to no search
UNTRACEABLE = Scoring, TextVector  # they generate nothing
READ_AHEAD = 64  # lines of a pipe
AWAKE = 30.0  # seconds after which an idle reader of a pipe sends a sign of life to processes that wait for it


@dataclass(frozen=True)
class Place:
    """The id of a record, its line in the input, counted from 1, the `digest` of the record, and how answers to its
    messages write thoughts."""

    id: str | int
    line: int
    digest: str = ""
    thoughts: Thoughts | None = None


class Records:
    """The items for `Engine.serve`: requests, errors in place of requests, None while a pipe is empty.

    Args:
        source: the input.
        engine: the engine, with its tokenizer and template.
        args: the parsed command line.
        kept: ids of the records that are answered already, and their digests (None: unknown).
        traces: records the remaining requests.
    """

    def __init__(
        self,
        source: IO[bytes],
        engine: Engine,
        args: argparse.Namespace,
        kept: Sequence[tuple[str | int, str | None]],
        traces: Traces | None = None,
    ):
        self.source, self.engine, self.args, self.kept, self.traces = source, engine, args, kept, traces
        self.index = 0  # records read
        self.options = template_options(args)
        self._places: dict[int, Place] = {}  # index of an unfinished request -> its place

    def finish(self, i: int) -> Place:
        """Forget the i-th request, which has been answered, and return its place."""
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
            found = digest(line if error else record)
            if index < len(self.kept):
                self._check_kept(index, number, identity, found)
                continue
            request, thoughts = error, None
            try:
                if request is None:
                    request, thoughts = make_request(record, self.engine, self.args, self.options)
            except CoppiceError as fault:
                request = fault
            self._places[index - len(self.kept)] = Place(identity, number, found, thoughts)
            if self.traces and isinstance(request, Request) and not isinstance(request.search, UNTRACEABLE):
                request = replace(request, trace=self.traces.new(identity))
            yield request

    def _check_kept(self, index: int, number: int, identity: str | int, found: str) -> None:
        """Raise UsageError unless a record is the one that its answer was made for."""
        kept, before = self.kept[index]
        if identity == kept and before in (None, found):
            return
        what = f"record {index} of the input has the id {identity!r}, its answer {kept!r}"
        if identity == kept:
            what = f"record {index} of the input, with the id {identity!r}, has changed since it was answered"
        raise UsageError(
            what,
            where=f"line {number} of the input, answer {index + 1} of {self.args.output}",
            remedy="--resume needs the input that the answers are for; another input needs another --output",
        )


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


def count_records(source: IO[bytes]) -> int | None:
    """The number of records of a file; None for a pipe."""
    if not source.seekable():
        return None
    count = sum(1 for line in iter(lambda: _line(source), b"") if line.strip())
    source.seek(0)
    return count


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
    """A record, its id (its number if it has none), and its fault."""
    try:
        record = parse_record(line)
    except UsageError as error:
        return {}, index, error
    identity = record.get("id", index)
    if not is_id(identity):
        return record, index, UsageError(f"id: expected a string or an integer, got {_show(identity)}")
    return record, identity, None


def digest(record: dict[str, Any] | bytes) -> str:
    """The digest of a record, whatever the order of its keys; of a line's bytes if it is none."""
    data = record.strip() if isinstance(record, bytes) else json.dumps(record, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()[:16]


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


def is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def make_request(
    record: dict[str, Any], engine: Engine, args: argparse.Namespace, options: TemplateOptions
) -> tuple[Request, Thoughts | None]:
    """The request of a record, and how its answers write thoughts; the command line gives what the record lacks.

    Raises CoppiceError.
    """
    known = known_params()
    _known(record, KEYS, "", {key: f'it is a key of params: "params": {{"{key}": ...}}' for key in known})
    if "embed" in record:
        return embed_record(record, engine.model), None
    if "score" in record:
        return score_record(record, engine.model, getattr(args, "parse_special", False)), None
    given = [key for key in PROMPTS if key in record]
    if len(given) != 1:
        raise UsageError(f"expected one of prompt, messages and prompt_ids, got {' and '.join(given) or 'none'}")
    params = _object(record, "params")
    elsewhere = dict.fromkeys(RULES, "only engine.Request has it, in Python")
    elsewhere |= dict.fromkeys(vars(args), "only the command line has it, as a flag")
    _known(params, known, "params.", elsewhere | dict.fromkeys(KEYS, "it is a key of the line, beside params"))
    own_rules = _own_rules(record, params)
    name, generation = chosen(params, args.search), getattr(args, "generation", Generation())
    bounds = _bounds(params, args, with_changes(with_changes(generation.rules_of(name), rules(args)), own_rules))
    search = _search(params, args, name, generation)
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


def _object(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object that a record has for a key; empty if it has none. Raises UsageError."""
    value = record.get(key, {})
    if not isinstance(value, dict):
        raise UsageError(f"{key}: expected an object{' of variables' * (key == 'template')}, got {_show(value)}")
    return value


def _own_rules(record: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """The fields of `Rules` that a record has. Raises UsageError."""
    own = {key: params[key] for key in PLAIN_RULES if key in params}
    if "response_format" in record:
        if other := next((key for key in ONE_OF if key in own), None):
            raise UsageError(f"response_format and params.{other}: expected at most one of them")
        own |= response_format(record["response_format"])
    return own


def _bounds(params: dict[str, Any], args: argparse.Namespace, rules: dict[str, Any]) -> dict[str, Any]:
    """The limits and the rules of a request, as arguments of `Request`. Raises UsageError."""
    bounds = limits(args) | {key: params[key] for key in LIMITS if key in params} | rules
    for key in ("stop", "choices", "bad_words", "dry_sequence_breakers"):
        if isinstance(bounds.get(key), str):
            bounds[key] = [bounds[key]]
    if bounds.get("eos_token_ids", ()) is None:  # None would be the checkpoint's
        raise UsageError("eos_token_ids: expected a list of token ids, got null")
    return bounds


def _search(params: dict[str, Any], args: argparse.Namespace, name: Any, generation: Generation) -> Search:
    """The search of a record; the command line and the checkpoint give the parameters that it lacks. Raises
    UsageError."""
    for key, words in paths().items():
        if params.get(key) is not None and params[key] not in words:
            also = f"; here it may be {' or '.join(words)}" if words else ""
            raise UsageError(f"params.{key}: paths are given on the command line only{also}")
    inherited = search_params(args)
    if isinstance(name, str) and name in REGISTRY:
        known = parameters(name)
        if name != args.search:
            inherited = {key: value for key, value in inherited.items() if key in known}
        inherited = generation.params_of(known) | inherited
    return make_search(name, inherited | {key: x for key, x in params.items() if key not in ("search", *OPTIONS)})


def known_params() -> list[str]:
    """The keys that `params` may have: those of every search, and of all requests."""
    return ["search", *OPTIONS, *dict.fromkeys(key for name in REGISTRY for key in parameters(name))]


def _options(record: dict[str, Any], options: TemplateOptions) -> TemplateOptions:
    """The options of a record's chat template; the command line gives what the record lacks. Raises UsageError."""
    tools, think = record.get("tools", options.tools), record.get("think", options.think)
    return TemplateOptions(tools, {**options.variables, **_object(record, "template")}, think, options.lead)


def _prompt(key: str, value: Any, engine: Engine, parse_special: bool) -> Sequence[int]:
    if key == "prompt_ids":
        if not isinstance(value, list):
            raise UsageError(f"prompt_ids: expected a list of integers, got {_show(value)}")
        return value
    if not isinstance(value, str):
        remedy = "token ids go into prompt_ids" if isinstance(value, list) else ""
        raise UsageError(f"prompt: expected a string, got {_show(value)}", remedy=remedy)
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


def _known(record: dict[str, Any], keys: Sequence[str], where: str, elsewhere: Mapping[str, str]) -> None:
    """Check the keys of an object; `elsewhere` has remedies for keys of other places. Raises UsageError."""
    for key in record:
        if key not in keys:
            near = difflib.get_close_matches(key[:100], keys, 1)
            rest = "--help all lists them, as flags" if where else f"known: {', '.join(keys)}"
            remedy = elsewhere.get(key) or (f"did you mean {near[0]}?" if near else rest)
            of = " of a line" if key in elsewhere and not where else ""
            raise UsageError(f"{where}{key[:100]}: no such key{of}", remedy=remedy)


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


def embed_record(record: Mapping[str, Any], model: LoadedModel) -> Request:
    """The request of a batch line with "embed". Raises UsageError."""
    if other := next((key for key in record if key not in ("id", "embed", "params")), None):
        raise UsageError(f"{other}: a line with embed has no other text")
    params = _object(record, "params")
    _known(params, ["pooling", "normalize", "dimensions", "adapter"], "params.", {})
    search = embedding_of(model, params.get("pooling"), params.get("normalize"), params.get("dimensions"))
    return embedding_request(model, record["embed"], search, adapter=params.get("adapter"), name="embed")


def score_record(record: Mapping[str, Any], model: LoadedModel, parse_special: bool = False) -> Request:
    """The request of a batch line with "score". Raises UsageError."""
    given = [key for key in record if key not in ("id", "score", "params")]
    if len(given) != 1 or given[0] not in ("prompt", "prompt_ids"):
        raise UsageError(f"score: expected prompt or prompt_ids beside it, got {' and '.join(given) or 'none'}")
    params, prompt = record.get("params", {}), record[given[0]]
    if not isinstance(params, dict) or not params.keys() <= {"parse_special", "adapter"}:
        expected = "expected parse_special and adapter at most"
        raise UsageError(f"params: nothing is generated for a line with score, {expected}")
    if not isinstance(prompt, str if given == ["prompt"] else list):
        kind = "a string" if given == ["prompt"] else "a list of integers"
        raise UsageError(f"{given[0]}: expected {kind}, got {shortened(repr(prompt))}")
    if not isinstance(record["score"], list):
        raise UsageError(f"score: expected a list of texts or of token ids, got {shortened(repr(record['score']))}")
    request = score_request(model, prompt, record["score"], parse_special=params.get("parse_special", parse_special))
    return replace(request, adapter=params.get("adapter"))

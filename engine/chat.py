"""The chat: `python -m engine.chat --model DIR`. On a terminal a conversation, with piped input one reply."""

import argparse
import contextlib
import dataclasses
import io
import json
import math
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine import cli
from engine.conversation import Conversation, figures, mib
from engine.engine import Done, Engine, Prefill, Progress, Text
from engine.errors import CoppiceError, UsageError
from engine.requests import Output, Search, SearchResult
from engine.stopping import StopStrings
from engine.terminal import Interrupt, Quit, Screen, no_echo
from engine.version import __version__
from models.checkpoint import Checkpoint
from search.base import REGISTRY, make_search, parameters

LIMITS = ("max_new_tokens", "ignore_eos", "stop")
STATUS_DELAY = 0.3  # seconds without settled text before the beams' state is shown


@dataclass(frozen=True)
class Settings:
    """What `/set` may change: the search, its parameters, the limits.

    `params` may hold parameters of other searches, for when one changes back.
    """

    search: str
    params: Mapping[str, Any]
    max_new_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]

    def configuration(self) -> Search:
        """The search's configuration. Raises UsageError."""
        known = parameters(self.search)
        return make_search(self.search, {key: value for key, value in self.params.items() if key in known})

    def limits(self) -> dict[str, Any]:
        """Options of `Engine.stream`."""
        return {key: getattr(self, key) for key in LIMITS}

    def shown(self) -> dict[str, Any]:
        """Everything in force, by the names that users write."""
        search = self.configuration()
        own = {key: getattr(search, field) for key, field in parameters(self.search).items()}
        return {"search": self.search} | own | self.limits()

    def changed(self, changes: Mapping[str, Any]) -> "Settings":
        """Settings with these changes, all or none. Raises UsageError."""
        changes = dict(changes)
        name = changes.pop("search", self.search)
        limits = {key: changes.pop(key) for key in LIMITS if key in changes}
        if type(new := limits.get("max_new_tokens", 1)) is not int or new < 1:
            raise UsageError(f"max_new_tokens: expected an integer >= 1, got {new!r}")
        if not isinstance(ignore := limits.get("ignore_eos", False), bool):
            raise UsageError(f"ignore_eos: expected true or false, got {ignore!r}")
        if "stop" in limits:
            stop = limits["stop"]
            limits["stop"] = tuple(stop) if isinstance(stop, list) else (str(stop),) if stop != "" else ()
        make_search(name, {})
        make_search(name, {key: value for key, value in self.params.items() if key in parameters(name)} | changes)
        return dataclasses.replace(self, search=name, params={**self.params, **changes}, **limits)


class Chat:
    """Reads, answers, obeys commands.

    Args:
        conversation: with its engine.
        settings: to begin with.
        screen: where everything is printed.
        interrupt: the handler of Ctrl-C.
        as_json: replies as JSON lines instead of text.
        stats: print the figures after every reply.
        verbose: tracebacks.
    """

    def __init__(
        self,
        conversation: Conversation,
        settings: Settings,
        screen: Screen,
        interrupt: Interrupt,
        *,
        as_json: bool = False,
        stats: bool = False,
        verbose: bool = False,
    ):
        self.conversation, self.settings, self.screen, self.interrupt = conversation, settings, screen, interrupt
        self.engine: Engine = conversation.engine
        self.as_json, self.stats, self.verbose = as_json, stats, verbose
        self.replies = 0
        self.last: SearchResult | None = None

    # --- one reply ---

    def reply(self, user: str) -> Output:
        """Answer and print it as it becomes certain. Raises CoppiceError; the turn is withdrawn then."""
        watch = _Watch(self.engine, self.settings.configuration())
        options = self.settings.limits() | {"interrupted": lambda: self.interrupt.pressed}
        result = None
        try:
            with (
                contextlib.closing(self.conversation.stream(user, watch.search, **options)) as events,  # type: ignore[type-var]
                self.screen.status(watch.label, STATUS_DELAY),
            ):
                for event in events:
                    watch.see(event)
                    if isinstance(event, Text) and not self.as_json:
                        self.screen.text(event.text)
                    elif isinstance(event, Done):
                        result = event.result
        except (CoppiceError, KeyboardInterrupt):
            if not self.as_json and watch.text:
                self.screen.end_line()
            raise
        assert result is not None
        self.last = result
        if self.as_json:
            self.screen.text(json.dumps(result.record(self.replies), ensure_ascii=False) + "\n")
        else:
            self.screen.end_line()
        self.replies += 1
        best, *others = result.outputs
        if not self.as_json:
            for rank, other in enumerate(others, 2):
                self.screen.hint(f"{rank}. {other.text}")
        self._tell_end(best, result)
        if self.stats:
            self.screen.note(figures(result))
        return best

    def _tell_end(self, best: Output, result: SearchResult) -> None:
        if best.finish_reason == "interrupted":
            self.screen.hint("[interrupted]")
        elif best.finish_reason == "length":
            full = len(best.token_ids) < self.settings.max_new_tokens
            used = result.stats["prompt_tokens"] + len(best.token_ids)
            why = f"the context of {used} tokens is full" if full else f"max_new_tokens {self.settings.max_new_tokens}"
            self.screen.hint(f"[stopped: {why}]")

    # --- the conversation ---

    def converse(self) -> int:
        """Prompt, answer, until the end of input. Returns the exit code."""
        while True:
            try:
                if self._obey(self._ask()):
                    return 0
            except EOFError:
                self.screen.note("")
                return 0
            except CoppiceError as error:
                if self.verbose:
                    self.screen.note(traceback.format_exc().rstrip())
                self.screen.note(f"error: {error}")
            except Quit:
                self.screen.note("")
                raise
            except KeyboardInterrupt:
                self.screen.note("")

    def _ask(self) -> str:
        with self.interrupt.prompting():
            if self.screen.tty:
                return input("> ")
            self.screen.err.write("> ")
            self.screen.err.flush()
            line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def _obey(self, line: str) -> bool:
        """Answer a line or do its command. Returns whether to leave."""
        if not line.strip():
            return False
        if line.startswith("/") and not line.startswith("//"):
            name, _, rest = line.partition(" ")
            command = COMMANDS.get(ALIASES.get(name, name))
            if command is None:
                raise UsageError(f"{name}: no such command", remedy="/help lists them; //text sends /text to the model")
            return bool(command(self, rest.strip()))
        with no_echo():
            self.reply(line.removeprefix("/") if line.startswith("//") else line)
        return False

    # --- commands ---

    def help(self, _: str) -> None:
        """this list"""
        lines = []
        for name, command in COMMANDS.items():
            also = ", ".join(alias for alias, real in ALIASES.items() if real == name)
            lines.append(f"{name + USAGE.get(name, ''):16}{command.__doc__}{also and f' (also {also})'}")
        lines += [f"{'//text':16}sends /text", "Ctrl-C stops a reply, pressed twice it leaves; Ctrl-D leaves"]
        self.screen.note("\n".join(lines))

    def exit(self, _: str) -> bool:
        """leave"""
        return True

    def reset(self, _: str) -> None:
        """forget the conversation and free its cache"""
        self.conversation.reset()
        self.screen.hint("[a new conversation]")

    def show_stats(self, _: str) -> None:
        """figures of the last reply, the context and the cache"""
        pool, trunk = self.engine.pool, self.conversation.session.trunk
        held = trunk.cached if trunk else 0
        context = self.engine.shape.max_positions
        lines = [figures(self.last)] if self.last else []
        turns = len(self.conversation.turns)
        lines += [
            f"context  {held}{f' of {context}' if context else ''} tokens cached, {turns} turn{'s' * (turns != 1)}",
            f"pool     {pool.used_pages} of {pool.pages} pages in use, {mib(pool.used_pages * pool.page_bytes)}",
        ]
        self.screen.note("\n".join(lines))

    def set(self, rest: str) -> None:
        """change the search, its parameters or the limits; alone, show them"""
        if rest:
            settings = self.settings.changed(assignments(rest))
            search, tokenizer = settings.configuration(), self.engine.tokenizer
            eos = frozenset() if settings.ignore_eos else self.engine.eos_token_ids
            search.check(self.engine.runner.vocab_size, eos)
            if settings.stop:
                StopStrings(tokenizer, settings.stop)
            self.settings = settings
        else:
            lines = [f"{key:22}{_literal(value)}" for key, value in self.settings.shown().items()]
            self.screen.note("\n".join([*lines, f"searches: {', '.join(REGISTRY)}"]))


COMMANDS: dict[str, Callable[[Chat, str], bool | None]] = {
    "/help": Chat.help,
    "/set": Chat.set,
    "/stats": Chat.show_stats,
    "/reset": Chat.reset,
    "/exit": Chat.exit,
}
ALIASES = {"/?": "/help", "/clear": "/reset", "/quit": "/exit", "/bye": "/exit"}
USAGE = {"/set": " k=v ..."}


class _Watch:
    """What the status line says of a reply under way; `label` is asked by another thread."""

    def __init__(self, engine: Engine, search: Search):
        self.engine, self.search = engine, search
        self.text = ""
        self.best: list[int] = []
        self.settled = 0
        self.reading = ""

    def see(self, event: object) -> None:
        match event:
            case Text(text):
                self.text += text
            case Prefill(done, total):
                self.reading = f"[reading the prompt: {done} of {total} tokens]"
            case Progress(report, _):
                self.settled += len(report.settled)
                self.best = list(report.best()) if report.best else []

    def label(self) -> tuple[str, str]:
        best, shown = self.best, self.text
        if not best:
            return "", self.reading or "[reading the prompt]"
        many = {k: n for k in ("beams", "num_return_sequences") if (n := getattr(self.search, k, 1)) > 1}
        kind, count = next(iter(many.items()), ("", 1))
        text = self.engine.tokenizer.decode(best)
        if not kind:
            return "", f"[… {len(best)} tokens]"
        word = "beams" if kind == "beams" else "sequences"
        tail = text[len(shown) :] if text.startswith(shown) else ""
        return tail, f"[… {len(best)} tokens, {count} {word}, {max(0, len(best) - self.settled)} undecided]"


# --- texts ---


def banner(engine: Engine, settings: Settings, folder: str) -> str:
    """What a person should know before the first prompt."""
    count = sum(math.prod(tensor.shape) for tensor in Checkpoint.open(folder).tensors.values())
    dtype = str(engine.pool.cache.k_LGSD.dtype).removeprefix("torch.")
    device = engine.pool.cache.k_LGSD.device
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else str(device)
    params = ", ".join(f"{key} {_literal(value)}" for key, value in settings.params.items())
    context = f"context {engine.shape.max_positions} tokens" if engine.shape.max_positions else "context without limit"
    lines = [
        f"coppice {__version__} · {engine.name}: {_count(count)} parameters, {dtype}, {where}, "
        f"loaded in {engine.load_seconds:.1f} s",
        f"search {settings.search}{f' ({params})' if params else ''} · {context}, "
        f"cache for {engine.pool.pages * engine.pool.page_size}",
    ]
    if engine.template is None:
        lines.append("no chat template: plain completion. Each prompt is continued, the text so far is its context.")
    return "\n".join([*lines, "/help lists the commands; Ctrl-C stops a reply, Ctrl-D leaves"])


def assignments(text: str) -> dict[str, Any]:
    """`beams=15 early-stopping=never` -> {"beams": 15, "early_stopping": "never"}. Raises UsageError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"/set: {error}") from None
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UsageError(f"/set: expected name=value, got {word!r}", remedy="/set alone shows the names")
        try:
            found[key.lstrip("-").replace("-", "_")] = json.loads(value)
        except ValueError:
            found[key.lstrip("-").replace("-", "_")] = value
    return found


def _literal(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _count(number: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


# --- the command line ---


def parser() -> argparse.ArgumentParser:
    """All flags, in groups."""
    parser = cli.Parser(
        "python -m engine.chat",
        "Talk to a model. On a terminal: a conversation. With -p or piped input: one reply on stdout.",
        "exit codes: 0 fine, 1 our bug, 2 usage or input, 3 checkpoint, 4 memory, 5 numerics, 130 interrupted, "
        "141 closed pipe",
    )
    cli.add_model_flags(parser)
    cli.add_search_flags(parser)
    cli.add_limit_flags(parser)
    group = parser.add_argument_group("chat")
    group.add_argument("-p", "--prompt", metavar="TEXT", help="one reply to this (piped input is appended), then exit")
    group.add_argument("--system", metavar="TEXT", help="system message, for models with a chat template")
    group.add_argument("--stats", action="store_true", help="figures after each reply, on stderr")
    group.add_argument("--json", action="store_true", help="replies as JSON lines, as engine.batch writes them")
    cli.add_verbosity_flags(parser)
    return parser


def one_shot(args: argparse.Namespace) -> str | None:
    """The only prompt, from the flag and from piped input; None on a terminal. Raises UsageError."""
    if sys.stdin is not None and sys.stdin.isatty():
        return args.prompt
    data = sys.stdin.buffer.read() if sys.stdin is not None else b""
    try:
        piped = data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            "the input is not valid UTF-8", where=f"stdin, byte {error.start}: 0x{data[error.start]:02x}"
        ) from None
    piped = piped.removesuffix("\n").removesuffix("\r")  # the end of the last line is the shell's, as a rule
    if args.prompt is not None:
        return f"{args.prompt}\n{piped}" if piped else args.prompt
    if not piped.strip():
        raise UsageError("the input is empty", where="stdin", remedy="pipe a prompt in, or give -p TEXT")
    return piped


def chat(args: argparse.Namespace) -> int:
    """Run the command line. Returns the exit code; raises CoppiceError."""
    make_search(args.search, cli.search_params(args))
    settings = Settings(args.search, cli.search_params(args), **cli.limits(args))
    if sys.stdout is None:
        raise BrokenPipeError("stdout is closed")
    prompt = one_shot(args)
    # Whatever the locale. Bytes that are not UTF-8 come in as surrogates, which are refused when the text is encoded.
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)
    screen = Screen(quiet=args.quiet)
    began = time.monotonic()
    with screen.status(lambda: ("", f"[loading the model: {time.monotonic() - began:.1f} s]")):
        engine = cli.load_engine(args)
    conversation = Conversation(engine, args.system)
    with Interrupt() as interrupt, contextlib.closing(conversation.session):
        options = {"as_json": args.json, "stats": args.stats, "verbose": args.verbose}
        session = Chat(conversation, settings, screen, interrupt, **options)
        if prompt is not None:
            return cli.INTERRUPTED if session.reply(prompt).finish_reason == "interrupted" else 0
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # makes input() edit and remember
        screen.hint(banner(engine, settings, args.model))
        return session.converse()


def main(argv: list[str] | None = None) -> int:
    """The command line's entry; returns the exit code."""
    args = parser().parse_args(argv)
    return cli.run(lambda: chat(args), args.verbose)


if __name__ == "__main__":
    sys.exit(main())

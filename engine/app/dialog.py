"""The dialog: reads the user's lines, prints replies, runs commands."""

import argparse
import contextlib
import json
import os
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from engine.app import transcript
from engine.app.settings import Settings
from engine.app.terminal import (
    Interrupt,
    Label,
    LineEditor,
    Quit,
    Screen,
    enter_pressed,
    no_echo,
    one_line,
    state_folder,
)
from engine.app.trace_page import saving
from engine.contract import Output, Report, Search, SearchResult
from engine.contract.trace import Traces
from engine.conversation import Conversation, Dropped, Turn, figures
from engine.engine import Engine
from engine.errors import CoppiceError, UsageError
from engine.request import Done, Event, Prefill, Progress, Text
from engine.text.stopping import CONTEXT
from engine.text.thinking import Thoughts
from engine.text.tokenizer import Tokenizer

STATUS_DELAY = 0.3  # seconds without settled text before the state of the beams is shown
MAX_SHOWN = 8  # candidates under the text
SEVERAL = {"beams": "beams", "n": "utterances", "num_return_sequences": "sequences"}  # field of a search -> its word
QUOTES = '"""'
NAMED = 60  # characters of a prompt that become the name of its trace

Candidates = Sequence[tuple[float | None, Sequence[int]]]  # scores and tokens, best first


class Dialog:
    """Reads lines, answers them, and runs commands.

    Args:
        conversation: the conversation, with its engine.
        settings: the first settings.
        screen: prints everything.
        interrupt: the handler of Ctrl-C.
        args: the parsed command line: what is shown, and the files that are written after every turn.
        commands: commands by name; each gets the dialog and the rest of the line, and returns whether to leave.
        aliases: other names of commands.
        traces: traces of the latest replies.
        file_state: the `transcript.state` of `--save` when it was checked or loaded.
    """

    def __init__(
        self,
        conversation: Conversation,
        settings: Settings,
        screen: Screen,
        interrupt: Interrupt,
        args: argparse.Namespace,
        *,
        commands: Mapping[str, Callable[["Dialog", str], bool | None]],
        aliases: Mapping[str, str],
        traces: Traces | None = None,
        file_state: transcript.State = None,
    ):
        self._file_state = file_state
        self.conversation, self.settings, self.screen, self.interrupt = conversation, settings, screen, interrupt
        self.engine: Engine = conversation.engine
        self.args, self.commands, self.aliases = args, commands, aliases
        self.file: Path | None = args.save
        self.traces = traces
        self.replies = 0
        self.last: SearchResult | None = None
        self.made: tuple[Turn, Settings] | None = None  # the last turn, and its settings
        self.candidates: Candidates = ()  # the candidates of the last reply, if it was interrupted
        self._editor: LineEditor | None = None
        self._saved: tuple[Sequence[Turn], str | None] = (), None  # turns and system message that a file has
        self._cut: Turn | None = None  # the turn under way when the chat was left

    # --- one reply ---

    def reply(self, user: str, settings: Settings | None = None) -> Output:
        """Answer, and print text as soon as it is certain. Raises CoppiceError, without a new turn.

        Args:
            user: the person's text.
            settings: settings for this reply alone.
        """
        settings = settings or self.settings
        watch = Watch(self.engine, settings.configuration(), self.args.show_beams)
        options = settings.limits() | {"interrupted": lambda: self.interrupt.pressed and watch.stop()}
        options["taken"] = enter_pressed
        if self.traces is not None:
            options["trace"] = self.traces.new(" ".join(user.split())[:NAMED])
        result, count, voice = None, len(self.conversation.turns), None
        try:
            with (
                saving(self.traces, self.args.trace),
                contextlib.closing(self.conversation.stream(user, watch.search, **options)) as events,  # type: ignore[type-var]
                self.screen.status(watch.label, STATUS_DELAY, steady=watch.beams),
            ):
                for event in events:
                    watch.see(event)
                    voice = voice or Voice(self.screen, self.conversation.thoughts)
                    self._show(event, voice)
                    if isinstance(event, Done):
                        result = event.result
        except (CoppiceError, KeyboardInterrupt) as error:
            if isinstance(error, Quit) and len(self.conversation.turns) == count:
                thought, reply = self.conversation.thoughts.split(watch.text)
                self._cut = Turn(user, reply, "interrupted", self.conversation.first, reasoning=thought)
            if not self.args.json and watch.text:
                self.screen.end_line()
            raise
        assert result is not None
        self.interrupt.pressed = False  # the next Ctrl-C counts as the first
        best = result.outputs[0]
        self.last, self.candidates = result, watch.candidates if best.finish_reason == "interrupted" else ()
        self.made = self.conversation.turns[-1], settings
        self._show_end(result, settings)
        self.keep()
        return best

    def _show(self, event: Event | Dropped, voice: "Voice") -> None:
        """Print new text, and a note about dropped turns."""
        if isinstance(event, Text | Done) and not self.args.json:
            voice.say(event.text) if isinstance(event, Text) else voice.finish()
        elif isinstance(event, Dropped) and not self.screen.quiet:
            turns = "turn" if event.turns == 1 else f"{event.turns} turns"
            rest = f", only the last {event.left}" if event.left else ""
            self.screen.note(f"[the context is full: the model no longer sees the oldest {turns}{rest}]", dim=True)

    def _show_end(self, result: SearchResult, settings: Settings) -> None:
        """Print the lines after a reply."""
        best, *others = result.outputs
        if self.args.json:
            self.screen.text(
                json.dumps(result.record(self.replies, self.conversation.thoughts), ensure_ascii=False) + "\n"
            )
        else:
            self.screen.end_line()
            for rank, other in enumerate(others, 2):
                self.screen.hint(f"{rank}. {self.conversation.thoughts.split(other.text)[1]}")
        self.replies += 1
        if best.finish_reason == "interrupted":
            self.screen.hint("[interrupted]")
        elif best.finish_reason == "length":
            full = len(best.token_ids) < settings.max_new_tokens
            used = result.stats["prompt_tokens"] + len(best.token_ids) - 1  # the last one needs no position
            why = f"the context of {used} tokens is full" if full else f"max_new_tokens {settings.max_new_tokens}"
            self.screen.hint(f"[stopped: {why}]")
        if best.token_logprobs is not None and not self.args.json:
            self.screen.note(token_table(best, self.engine.tokenizer))
        if self.args.stats:
            self.screen.note(figures(result, self.engine.capabilities), fold=True)

    def keep(self) -> None:
        """Save the conversation to `file`, if there is one. Raises UsageError, also if another program changed it."""
        if self.file is not None:
            transcript.save(self.file, self.conversation, self.settings.shown(), expected=self._file_state)
            self.mark_saved(self.file)

    def mark_saved(self, path: str | Path = "") -> None:
        """Note that a file has the present conversation; `path` is that file if it was just written or read."""
        self._saved = tuple(self.conversation.turns), self.conversation.system
        if path and self.file is not None and Path(path).expanduser().resolve() == self.file.expanduser().resolve():
            self._file_state = transcript.state(self.file)

    def rescue(self) -> None:
        """Save a conversation that no file has, and print the path.

        The file is that of --save, else a new one in the state folder, else a temporary one. Errors are printed.
        """
        conversation = self.conversation
        if self._cut is not None:
            conversation.turns.append(self._cut)
            self._cut = None
        if not conversation.turns or self._saved == (tuple(conversation.turns), conversation.system):
            return
        name = f"chat-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.json"
        places: list[tuple[Callable[[], Path], transcript.State]] = [
            (lambda: state_folder() / name, None),
            (lambda: Path(tempfile.mkdtemp(prefix="coppice-")) / name, None),  # private, like the state folder
        ]
        if self.file is not None:
            places.insert(0, (lambda: self.file or Path(), self._file_state))
        note = ""
        for place, state in places:
            try:
                path = transcript.save(place(), conversation, self.settings.shown(), expected=state)
            except (CoppiceError, OSError) as error:
                note = f"error: the conversation is lost: {error}"
            else:
                note = f"the conversation is saved; to continue it: --load {shlex.quote(str(path))}"
                self.mark_saved()  # a closed terminal may call this twice
                break
        with contextlib.suppress(OSError, ValueError):  # the terminal is closed
            self.screen.note(note)

    def answer(self, user: str, settings: Settings | None = None) -> None:
        """`reply`, without an echo of text that is typed meanwhile."""
        with no_echo():
            self.reply(user, settings)

    def again(self, settings: Settings) -> None:
        """Answer the last turn again; an error leaves it unchanged. Raises UsageError if there is none."""
        turns = self.conversation.turns
        if not turns:
            raise UsageError("there is no turn to answer again")
        count, turn = len(turns), turns.pop()
        try:
            self.answer(turn.user, settings)
        except Quit:
            self._cut = None  # the complete answer remains
            raise
        finally:
            if len(turns) < count:
                turns.append(turn)

    # --- the conversation ---

    def converse(self) -> int:
        """Read lines and answer them until the end of input. Returns the exit code.

        An exception that ends the dialog first saves a conversation that no file has, see `rescue`.
        """
        try:
            return self._converse()
        except BaseException:
            self.rescue()
            raise

    def _converse(self) -> int:
        self._editor = LineEditor([*self.commands])
        if self._editor.complaint:
            self.screen.hint(f"[{self._editor.complaint}]")
        cleared = False  # whether the latest input was a Ctrl-C at the prompt
        while True:
            try:
                line, quoted = self._ask()
                cleared = False
                if self._obey(line, quoted):
                    if self.file is not None:  # which could perhaps not take the last turn, as on a full disk
                        self.rescue()
                    return 0
            except EOFError:
                if self.file is not None or not sys.stdin.isatty():  # a closed terminal is no Ctrl-D
                    self.rescue()
                self.screen.note("")
                return 0
            except CoppiceError as error:
                if self.args.verbose:
                    self.screen.note(traceback.format_exc().rstrip())
                self.screen.note(f"error: {error}")
            except Quit:
                self.screen.note("")
                raise
            except KeyboardInterrupt:
                self.screen.note("")
                if cleared:
                    self.screen.hint("[Ctrl-D or /exit leaves]")
                cleared = True

    def _ask(self) -> tuple[str, bool]:
        """The person's input, and whether it was between triple quotes, where it may have several lines."""
        with self.interrupt.prompting():
            line = self._line("> ")
            if not line.lstrip().startswith(QUOTES):
                return line, False
            text = line.lstrip().removeprefix(QUOTES)
            while not text.rstrip().endswith(QUOTES):
                text += "\n" + self._line("... ")
        return text.rstrip().removesuffix(QUOTES).removeprefix("\n").removesuffix("\n"), True

    def _line(self, prompt: str) -> str:
        if self.screen.tty:
            return self._editor.ask(prompt) if self._editor else input(prompt)

        self.screen.err.write(prompt)
        self.screen.err.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def _obey(self, line: str, quoted: bool) -> bool:
        """Answer a line or run its command. Returns whether to leave."""
        if not line.strip():
            return False
        typed = line.lstrip()
        if typed.startswith("/") and not typed.startswith("//") and not quoted:
            name, _, rest = typed.partition(" ")
            command = self.commands.get(self.aliases.get(name, name))
            if command is None:
                raise UsageError(f"{name}: no such command", remedy="/help lists them; //text sends /text to the model")
            return bool(command(self, rest.strip()))
        self.answer(line.removeprefix("/") if line.startswith("//") and not quoted else line)
        return False


class Voice:
    """Prints a reply. On a terminal with colours the thought is dim and has no tags; elsewhere it keeps its tags."""

    def __init__(self, screen: Screen, thoughts: Thoughts):
        self.screen = screen
        self._stream = thoughts.stream() if screen.color else None
        self._lead = f"{thoughts.opening}\n" if thoughts.opened else ""  # the prompt's own tag
        self._thinks = False

    def say(self, text: str) -> None:
        """Print the next text."""
        if self._stream is not None:
            self._print(self._stream.push(text))
            return
        self.screen.text(self._lead + text)
        self._lead = ""

    def finish(self) -> None:
        """Print the text that was held back."""
        if self._stream is not None:
            self._print(self._stream.finish())

    def _print(self, parts: Sequence[tuple[str, bool]]) -> None:
        for text, thought in parts:
            if self._thinks and not thought:
                self.screen.text("\n\n")
            self._thinks = thought
            self.screen.text(text, dim=thought)


class Watch:
    """The status of a reply under way; another thread calls `label`.

    Args:
        engine, search: the engine and the search of the reply.
        beams: show the live candidates.
    """

    PERIOD = 0.1  # seconds between two updates of the candidates

    def __init__(self, engine: Engine, search: Search, beams: bool = False):
        self.engine, self.search = engine, search
        many = {word: n for key, word in SEVERAL.items() if type(n := getattr(search, key, 1)) is int and n > 1}
        self.kind, self.count = next(iter(many.items()), ("", 1))
        self.beams = beams and self.count > 1
        self.text = ""
        self.best: list[int] = []
        self.settled = 0
        self.reading = ""
        self.candidates: Candidates = ()
        self._shown: tuple[int, Candidates] = 0, ()  # candidates, and the number of settled tokens at that time
        self._report: Report | None = None
        self._looked = 0.0

    def see(self, event: object) -> None:
        match event:
            case Text(text):
                self.text += text
            case Prefill(done, total):
                self.reading = f"[reading the prompt: {done} of {total} tokens]"
            case Progress(report, _):
                self.settled += len(report.settled)
                self.best = list(report.best()) if report.best else []
                self.reading = f"[{report.info['note']}]" if "note" in report.info else self.reading
                self._report = report
                if self.beams and time.monotonic() - self._looked >= self.PERIOD:
                    self._shown = self.settled, self._look(MAX_SHOWN)
                    self._looked = time.monotonic()

    def stop(self) -> bool:
        """Store the candidates of the search, which is stopped next; returns True."""
        self.candidates = self._look()
        return True

    def _look(self, most: int | None = None) -> Candidates:
        if self._report is None or self._report.beams is None:
            return ()
        return [(score, list(tokens)) for score, tokens in self._report.beams()[:most]]

    def _figures(self) -> str:
        """The search's own figures from its latest report."""
        info = self._report.info if self._report else {}
        words = {key.replace("_", " "): value for key, value in info.items() if isinstance(value, int | float)}
        return "".join(f", {key} {value:.4g}" for key, value in words.items())

    def label(self) -> Label:
        best, shown = self.best, self.text
        if not best:
            return Label("", self.reading or "[reading the prompt]")
        tokens = plural(len(best), "token")
        if not self.kind:
            return Label("", f"[… {tokens}{self._figures()}]")
        undecided = max(0, len(best) - self.settled)
        remark = f"[… {tokens}, {self.count} {self.kind}, {undecided} undecided{self._figures()}]"
        if self._report is not None and self._report.ready is not None:
            remark = f"[the answer of {tokens} is ready, Enter takes it; {self.count} {self.kind} continue]"
        settled, candidates = self._shown
        if candidates:
            decode = self.engine.tokenizer.decode_continuation
            # The decoder gets a few settled tokens too, for spaces and incomplete characters.
            texts = [decode(tokens[max(0, settled - CONTEXT) : settled], tokens[settled:]) for _, tokens in candidates]
            return Label("", remark, [candidate(s, text) for (s, _), text in zip(candidates, texts, strict=True)])
        text = self.engine.tokenizer.decode(best)
        return Label(text[len(shown) :] if text.startswith(shown) else "", remark)


def token_table(output: Output, tokenizer: Tokenizer) -> str:
    """A line per token: its log-probability, and the most probable tokens at its place; special tokens are spelled."""
    tokens, lines = output.token_ids, []

    def entry(place: int, token: int, logp: float | None) -> str:
        if token in tokenizer.skipped_ids:
            text = tokenizer.decode([token], skip_special=False)
        else:
            text = tokenizer.decode_continuation(tokens[max(0, place - CONTEXT) : place], [token])
        return f"{'-' if logp is None else f'{logp:.4f}':>10}  {json.dumps(text, ensure_ascii=False)}"

    rows = zip(tokens, output.token_logprobs or [], output.top_logprobs or [], strict=True)
    for place, (token, logp, top) in enumerate(rows):
        lines.append("".join([entry(place, token, logp), *(f"  {entry(place, *other).lstrip()}" for other in top)]))
    return "\n".join(lines)


def plural(count: int, word: str) -> str:
    """A count with its word."""
    return f"{count} {word}{'s' * (count != 1)}"


def candidate(score: float | None, text: str) -> str:
    """The line of a candidate."""
    return f"{'' if score is None else f'{score:.4f}':>10}  {one_line(text)}"

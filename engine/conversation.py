"""Conversation: the turns of a chat, the prompt made from them, the cache kept between turns, and statistics of
replies."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Unpack

from engine.contract import Output, Search, SearchResult
from engine.contract.checks import slots_of
from engine.engine import Engine, Session
from engine.errors import UsageError, shortened
from engine.load.capabilities import Capabilities
from engine.request import Done, Event, Request, StreamOptions
from engine.text.prompting import chat_prompt
from engine.text.template import TemplateOptions
from engine.text.thinking import Thoughts
from engine.words import OVERFLOW


@dataclass(frozen=True)
class Turn:
    """A message of a person and the model's reply.

    Args:
        user: the person's text.
        reply: the model's text in the conversation, without its thought.
        finish_reason: as in `Output`; "interrupted" marks a partial reply.
        first: the oldest turn in the prompt of this one; earlier turns did not fit the context.
        cached: tokens in the cache after this turn.
        reasoning: the model's thought before the reply; None if it had none.
    """

    user: str
    reply: str
    finish_reason: str
    first: int = 0
    cached: int = field(default=0, compare=False)
    reasoning: str | None = None


@dataclass(frozen=True)
class Dropped:
    """The context was full: the prompt no longer has the oldest turns.

    Args:
        turns: number of turns left out from this reply on.
        left: number of earlier turns in the prompt.
    """

    turns: int
    left: int


class Conversation:
    """Turns with one model. With a chat template the prompt consists of messages, otherwise of plain text to continue.

    A conversation stores all turns. When they no longer fit the context (or the cache), the prompt leaves out whole
    turns, the oldest first, until the history takes at most half of its room, so that the shorter prompt is evaluated
    once and reused for many turns. The system message always stays.

    Args:
        engine: the model.
        system: system message, for templates only.
        on_overflow: "drop-turns" leaves turns out, "error" refuses the turn that does not fit.
        options: the template's variables other than the messages.

    Attributes:
        thoughts: separates thought and answer in replies to the latest prompt.

    Raises:
        UsageError: a system message or options without a template, or options that it does not know.
    """

    def __init__(
        self,
        engine: Engine,
        system: str | None = None,
        on_overflow: str = "drop-turns",
        options: TemplateOptions | None = None,
    ):
        if on_overflow not in OVERFLOW:
            raise UsageError(f"on_overflow: expected one of {', '.join(OVERFLOW)}, got {on_overflow!r}")
        self.engine, self.on_overflow = engine, on_overflow
        self.turns: list[Turn] = []
        self.session = Session(engine)
        self.options = TemplateOptions()
        self.thoughts, self._ends = Thoughts(), engine.eos_token_ids
        self._check_system(system)
        self.system = system
        if options is not None and options.given:
            self.set_options(options)

    @property
    def first(self) -> int:
        """The oldest turn in the latest prompt."""
        return self.turns[-1].first if self.turns else 0

    def prompt_ids(self, user: str, first: int | None = None) -> list[int]:
        """Token ids of the conversation with the person's next text at its end.

        Args:
            user: the text.
            first: the oldest turn in the prompt; None: the same as in the latest prompt.

        Raises:
            UsageError: the text cannot be encoded, or the template rejects it.
        """
        if self.engine.template is None:
            return self.engine.tokenizer.encode(self.text(user, first))
        prompt = chat_prompt(self.engine, self.messages(user, first), self.options)
        self.thoughts, self._ends = prompt.thoughts, prompt.eos_token_ids
        return prompt.ids

    def messages(self, user: str, first: int | None = None) -> list[dict[str, Any]]:
        """The messages to render, with the person's next text at their end; arguments as in `prompt_ids`."""
        template = self.engine.template
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system is not None else []
        for turn in self.turns[self.first if first is None else first :]:
            reply = {"role": "assistant", "content": turn.reply}
            if template is not None:
                reply = template.reply(turn.reply, turn.reasoning)
            messages += [{"role": "user", "content": turn.user}, reply]
        return [*messages, {"role": "user", "content": user}]

    def text(self, user: str, first: int | None = None) -> str:
        """The prompt of plain completion: all text and the person's next; white space or a new line separates turns."""
        text = ""
        for turn in [*self.turns[self.first if first is None else first :], Turn(user, "", "")]:
            parted = not text or text[-1].isspace() or not turn.user or turn.user[0].isspace()
            text += ("" if parted else "\n") + turn.user + turn.reply
        return text

    def stream(self, user: str, search: Search, **options: Unpack[StreamOptions]) -> Iterator[Event | Dropped]:
        """Answer, and append the turn, complete or interrupted; an error leaves the conversation unchanged.

        Args:
            user: the person's text.
            search, options: as in `Engine.stream`.

        Raises:
            UsageError: the conversation does not fit the context, or `user` is no text.
            CoppiceError: see `Engine.stream`.
        """
        if not isinstance(user, str):
            raise UsageError(f"user: expected a text, got {shortened(repr(user))}")
        before = self.first
        first, ids = self._fit(user, search, options.get("max_new_tokens", Request.max_new_tokens))
        if first > before:
            yield Dropped(first - before, len(self.turns) - first)
        if self.engine.template is not None:
            own: StreamOptions = {"messages": self.messages(user, first), "eos_token_ids": self._ends}
            options = own | options
        for event in self.session.stream(ids, search, **options):
            if isinstance(event, Done):
                best, trunk = event.result.outputs[0], self.session.trunk
                cached = trunk.cached if trunk else 0
                thought, reply = self.thoughts.split(self._reply(ids, best))
                self.turns.append(Turn(user, reply, best.finish_reason, first, cached, thought))
            yield event

    def undo(self) -> Turn:
        """Remove the last turn, and its part of the cache. Raises UsageError if there is none."""
        if not self.turns:
            raise UsageError("there is no turn to take back")
        turn = self.turns.pop()
        trunk = self.session.trunk
        same = self.turns and self.turns[-1].first == turn.first  # otherwise the cache belongs to another prompt
        kept = self.turns[-1].cached if same else 0
        if trunk is not None and kept < trunk.cached:
            trunk.truncate(self.engine.pool, kept)
            del trunk.tokens[kept:]
        return turn

    def set_system(self, text: str | None) -> None:
        """Set the system message, None for none; the next turn evaluates the whole conversation again.

        Raises:
            UsageError: there is no template, or it rejects the message.
        """
        self._check_system(text)
        self._replace(text, self.options)

    def set_options(self, options: TemplateOptions) -> None:
        """Set the template's variables other than the messages, from the next turn on.

        Raises:
            UsageError: there is no template, or it does not know an option.
        """
        if self.engine.template is None and options.given:
            raise UsageError(
                "this model has no chat template, which tools and thoughts need", remedy="give --chat-template FILE"
            )
        self._replace(self.system, options)

    def _replace(self, system: str | None, options: TemplateOptions) -> None:
        """Set what a prompt has besides the turns, if the template takes it."""
        before, (self.system, self.options) = (self.system, self.options), (system, options)
        try:
            self.prompt_ids("Hello")
        except BaseException:
            self.system, self.options = before
            raise

    def restore(self, turns: Iterable[Turn], system: str | None) -> None:
        """Replace the conversation by another one. Raises UsageError for a system message without a template."""
        self._check_system(system)
        self.reset()
        self.turns, self.system = list(turns), system

    def reset(self) -> None:
        """Remove all turns and free their cache."""
        self.turns.clear()
        self.session.close()

    def _check_system(self, text: str | None) -> None:
        if not isinstance(text, str | None):
            raise UsageError(f"system: expected a text, got {shortened(repr(text))}")
        if text is not None and self.engine.template is None:
            raise UsageError(
                "this model has no chat template, so there is no place for a system message",
                remedy="put it into the prompt, or give --chat-template FILE",
            )

    def _fit(self, user: str, search: Search, new: int) -> tuple[int, list[int]]:
        """Choose the oldest turn of the prompt; returns its index and the prompt's token ids.

        A prompt whose beginning changed is evaluated again, so turns are not dropped one by one: when the history is
        full, at most half of it stays, but always the latest turn if that alone fits. If no turn is left, the engine
        decides whether the message fits.

        Raises:
            UsageError: the conversation is full and `on_overflow` is "error"; or the message alone is too long.
        """
        first, last, context = self.first, len(self.turns), self.engine.shape.max_positions
        ids = self.prompt_ids(user, first)
        if first == last or self._has_room(len(ids), search, new):
            return first, ids
        if self.on_overflow == "error":
            raise UsageError(
                f"the conversation is full: with this turn it has {len(ids)} tokens, "
                f"this model's maximum context length is {context}",
                where=f"an answer needs room for {self._room(new)} more; the turn was not added",
                remedy="/reset starts afresh; --on-overflow drop-turns forgets the oldest turns instead",
            )
        prompt = cache(partial(self.prompt_ids, user))

        def grows(first: int) -> bool:
            """Whether the history from this turn on could double."""
            size = len(prompt(first))
            return self._has_room(2 * size - len(prompt(last)), search, new)

        latest = range(first + 1, last)
        chosen = bisect_left(latest, True, key=grows) + first + 1
        if chosen == last and first + 1 < last and self._has_room(len(prompt(last - 1)), search, new):
            chosen = last - 1
        ids = prompt(chosen)
        if context is not None and len(ids) > context:
            raise UsageError(
                f"the message is too long: without any turn before it there are {len(ids)} tokens, "
                f"this model's maximum context length is {context}",
                where="it was not added; the conversation is as it was",
                remedy="shorten it" + " or the system message" * (self.system is not None),
            )
        return chosen, ids

    def _room(self, new: int) -> int:
        """Tokens to reserve for the answer: up to 1/16 of the context, or 1/4 if turns may be dropped."""
        context = self.engine.shape.max_positions
        share = 4 if self.on_overflow == "drop-turns" else 16
        return new if context is None else max(1, min(new, context // share))

    def _has_room(self, tokens: int, search: Search, new: int) -> bool:
        context, pool = self.engine.shape.max_positions, self.engine.pool
        if context is not None:
            if tokens + self._room(new) > context:
                return False
            new = min(new, context - tokens + 1)
        return self.on_overflow == "error" or slots_of(search, tokens, new)[0] <= pool.pages * pool.page_size

    def _reply(self, ids: list[int], best: Output) -> str:
        if self.engine.template is not None:
            return best.text
        # `best.text` lacks the space that some decoders strip from the beginning of a text.
        tokenizer = self.engine.tokenizer
        stripped = tokenizer.decode_continuation(ids, best.token_ids).removesuffix(tokenizer.decode(best.token_ids))
        return stripped + best.text


def figures(result: SearchResult, machine: Capabilities | None = None) -> str:
    """A reply's statistics for people; with the dtype and the fast paths of the machine, if `machine` is given."""
    stats = dict(result.stats)
    take = stats.pop
    prompt, reused, new = take("prompt_tokens"), take("reused_tokens"), take("new_tokens")
    prefill, decode = take("prefill_seconds"), take("decode_seconds")
    passes, nodes, unit = take("forward_passes"), take("nodes_evaluated"), take("kv_bytes_per_token")
    peak, live, unshared = take("kv_bytes_peak"), take("live_nodes_peak"), take("unshared_nodes_peak")
    lines = [
        f"prompt   {prompt} tokens, {reused} of them reused from before",
        f"reply    {new} tokens ({result.outputs[0].finish_reason})",
        f"time     {prefill:.2f} s for the prompt, {decode:.2f} s for the reply"
        + (f": {new / decode:.1f} tokens/s" if decode > 0 else ""),
        f"work     {passes} forward passes, {nodes} nodes evaluated",
        f"cache    {mib(peak)} at its peak, for {live} live tokens of {unit} bytes; "
        f"a cache for each branch would have held {unshared} tokens",
    ]
    if (answer := stats.pop("answer_step", None)) is not None:
        stats["steps"] = f"answer complete at step {answer} of {stats['steps']}"
    # Lists are left out: they are for programs.
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in stats.items()}
    others = [f"{key:8} {value}" for key, value in rounded.items() if not isinstance(value, list)]
    if machine is not None and machine.precision:
        others += [f"numbers  {machine.precision}", f"machine  {machine.paths}"]
    return "\n".join(lines + others)


def mib(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 2**20:.2f} MiB"

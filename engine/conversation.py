"""Conversation: the turns of a chat, the prompt they make, the cache that outlives each turn; replies in figures."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.engine import Done, Engine, Event, Session
from engine.errors import UsageError
from engine.requests import Output, Search, SearchResult


@dataclass(frozen=True)
class Turn:
    """What was said and what was answered.

    Args:
        user: the person's text.
        reply: the model's, as it stands in the conversation.
        finish_reason: as in `Output`; "interrupted" marks a partial reply.
    """

    user: str
    reply: str
    finish_reason: str


class Conversation:
    """Turns on one model. With a chat template the model reads messages; without, plain text that it continues.

    Args:
        engine: the model.
        system: system message, for templates only.

    Raises:
        UsageError: a system message without a template.
    """

    def __init__(self, engine: Engine, system: str | None = None):
        if system is not None and engine.template is None:
            raise UsageError(
                "this model has no chat template, so there is no place for a system message",
                where="--system",
                remedy="put it into the prompt, or give --chat-template FILE",
            )
        self.engine, self.system = engine, system
        self.turns: list[Turn] = []
        self.session = Session(engine)

    def prompt_ids(self, user: str) -> list[int]:
        """Token ids of the conversation with the person's next text at its end.

        Raises:
            UsageError: the text cannot be encoded, or the template rejects it.
        """
        tokenizer, template = self.engine.tokenizer, self.engine.template
        if template is None:
            return tokenizer.encode(self.text(user))
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        for turn in self.turns:
            messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.reply}]
        return tokenizer.encode_rendered(template.render([*messages, {"role": "user", "content": user}]))

    def text(self, user: str) -> str:
        """Plain completion: all text so far and the next; a new line parts the turns unless white space does."""
        text = ""
        for turn in [*self.turns, Turn(user, "", "")]:
            parted = not text or text[-1].isspace() or not turn.user or turn.user[0].isspace()
            text += ("" if parted else "\n") + turn.user + turn.reply
        return text

    def stream(self, user: str, search: Search, *, max_new_tokens: int = 256, **options: Any) -> Iterator[Event]:
        """Answer; a turn that is done or interrupted joins the conversation, after an error that is as it was.

        Args:
            user: the person's text.
            search, options: as in `Engine.stream`.

        Raises:
            UsageError: the conversation does not fit the context.
            CoppiceError: as `Engine.stream`.
        """
        ids = self.prompt_ids(user)
        self._check_room(len(ids), max_new_tokens)
        for event in self.session.stream(ids, search, max_new_tokens=max_new_tokens, **options):
            if isinstance(event, Done):
                best = event.result.outputs[0]
                self.turns.append(Turn(user, self._reply(ids, best), best.finish_reason))
            yield event

    def reset(self) -> None:
        """Forget all turns and give their cache back."""
        self.turns.clear()
        self.session.close()

    def _check_room(self, tokens: int, max_new_tokens: int) -> None:
        """A later turn needs room for more than a word; the first may fill the context, as the engine checks."""
        context = self.engine.shape.max_positions
        if context is None or not self.turns:
            return
        room = max(1, min(max_new_tokens, context // 16))
        if tokens + room > context:
            raise UsageError(
                f"the conversation is full: with this turn it has {tokens} tokens, the model's context holds {context}",
                where=f"an answer needs room for {room} more; the turn was not added",
                remedy="/reset starts afresh",
            )

    def _reply(self, ids: list[int], best: Output) -> str:
        if self.engine.template is not None:
            return best.text
        # `text` is that of the tokens alone, without the space that some decoders strip where a text begins.
        tokenizer = self.engine.tokenizer
        stripped = tokenizer.decode_continuation(ids, best.token_ids).removesuffix(tokenizer.decode(best.token_ids))
        return stripped + best.text


def figures(result: SearchResult) -> str:
    """A reply's statistics for people."""
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
    return "\n".join(lines + [f"{key:8} {value}" for key, value in stats.items()])


def mib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**20:.2f} MiB"

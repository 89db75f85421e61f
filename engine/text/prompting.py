"""Messages to a prompt: the chat template with its variables, thought tags, end-of-turn tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from engine.errors import UsageError
from engine.text.thinking import Thoughts
from engine.words import THINK

if TYPE_CHECKING:
    from engine.engine import Engine


@dataclass(frozen=True)
class TemplateOptions:
    """The variables that a chat template gets besides the messages.

    Args:
        tools: functions that the model may call, as JSON schemas; None: none.
        variables: further variables of the template, JSON values.
        think: "on" or "off" sets the variable of the template that switches thoughts; "auto" leaves it out.
        lead: the beginning of the reply, control tokens included; it belongs to the prompt, and a thought that the
            template has opened is closed before it.

    Raises:
        UsageError: another value of `think`.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    think: str = "auto"
    lead: str = ""

    def __post_init__(self):
        if self.think not in THINK:
            raise UsageError(f"think: expected {', '.join(THINK)}, got {self.think!r}")

    @property
    def given(self) -> bool:
        """Whether any option differs from the default."""
        return self != TemplateOptions()


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation.

    Args:
        ids: the prompt.
        thoughts: separate a reply's thought from its answer.
        eos_token_ids: tokens that end a reply: the checkpoint's, the token that the template writes after one, and the
            one that models write after calls.
    """

    ids: list[int]
    thoughts: Thoughts
    eos_token_ids: frozenset[int]


def chat_prompt(
    engine: "Engine", messages: Sequence[Mapping[str, Any]], options: TemplateOptions | None = None
) -> ChatPrompt:
    """Render messages by the engine's chat template.

    Args:
        engine: the model, with its template and tokenizer.
        messages: see `ChatTemplate.render`.
        options: the other variables of the template.

    Raises:
        UsageError: there is no template, or it rejects the messages or the options.
        CheckpointError: the template fails.
    """
    template, tokenizer, options = engine.template, engine.tokenizer, options or TemplateOptions()
    if template is None:
        raise UsageError("messages: the model has no chat template", remedy="give a prompt, or --chat-template FILE")
    spans = template.render(messages, tools=options.tools, variables=options.variables, think=options.think)
    known = tokenizer.special_spellings | tokenizer.added_spellings
    spelled = [end for end in (template.turn_end(), template.calls.end) if end in known]
    ends = frozenset(tokenizer.encode_rendered([(end, True) for end in spelled]))
    thoughts = template.thoughts.after("".join(text for text, _ in spans[-2:]))
    if options.lead:
        closing = f"{thoughts.closing}{thoughts.gap}" if thoughts.opened else ""
        begun = None if thoughts.begun is None else thoughts.begun + options.lead
        spans, thoughts = [*spans, (closing + options.lead, True)], replace(thoughts, opened=False, begun=begun)
    return ChatPrompt(tokenizer.encode_rendered(spans), thoughts, engine.eos_token_ids | ends)

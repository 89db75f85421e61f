"""Messages to a prompt: the chat template with its variables, thought tags, end-of-turn tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.errors import UsageError
from engine.text.template import TemplateOptions
from engine.text.thinking import Thoughts

if TYPE_CHECKING:
    from engine.engine import Engine


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
    spans = template.render(messages, options)
    known = tokenizer.special_spellings | tokenizer.added_spellings
    spelled = [end for end in (template.turn_end(), template.calls.end) if end in known]
    ends = frozenset(tokenizer.encode_rendered([(end, True) for end in spelled]))
    thoughts = template.thoughts.after("".join(text for text, _ in spans[-2:]))
    if options.lead:
        closing = f"{thoughts.closing}{thoughts.gap}" if thoughts.opened else ""
        begun = None if thoughts.begun is None else thoughts.begun + options.lead
        spans, thoughts = [*spans, (closing + options.lead, True)], replace(thoughts, opened=False, begun=begun)
    return ChatPrompt(tokenizer.encode_rendered(spans), thoughts, engine.eos_token_ids | ends)

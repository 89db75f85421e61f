"""Prompts: of messages, by the chat template with its variables, thought tags and end-of-turn tokens; and prompts whose
output goes between two texts, for models with fill-in-the-middle tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.errors import UsageError
from engine.text.channels import MESSAGE
from engine.text.template import TemplateOptions
from engine.text.thinking import Thoughts
from engine.text.tokenizer import Tokenizer

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
        closing = f"{thoughts.closing_tokens}{thoughts.gap}" if thoughts.opened else ""
        header = options.lead if MESSAGE in options.lead else ""  # else a call has none
        begun = None if thoughts.begun is None else thoughts.begun + header
        spans, thoughts = [*spans, (closing + options.lead, True)], replace(thoughts, opened=False, begun=begun)
    return ChatPrompt(tokenizer.encode_rendered(spans), thoughts, engine.eos_token_ids | ends)


# --- filling in ---


class _Infill(NamedTuple):
    """The tokens before prefix, suffix and middle; the tokens that end the middle; whether the suffix comes first."""

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()
    suffix_first: bool = False


# The papers' and model cards' forms: Qwen2.5-Coder and CodeGemma, StarCoder and Granite, DeepSeek-Coder, Code Llama and
# Codestral, whose prefix comes after the suffix.
FORMS = (
    _Infill(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>"),
    ),
    _Infill("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<fim_pad>", "<file_sep>")),
    _Infill("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<|EOT|>", "<｜end▁of▁sentence｜>")),
    _Infill("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
    _Infill("[PREFIX]", "[SUFFIX]", "", suffix_first=True),
)


def infill(tokenizer: Tokenizer, prefix: str, suffix: str) -> tuple[list[int], frozenset[int]]:
    """The prompt for the text between two texts, in which spellings of control tokens are plain text.

    Returns:
        the token ids, and the ids that end the middle in addition to those of the checkpoint.

    Raises:
        UsageError: the tokenizer has no tokens for it, or a text is not valid UTF-8.
    """
    spellings = tokenizer.special_spellings | tokenizer.added_spellings
    form = next((f for f in FORMS if {f.prefix, f.suffix, f.middle} - {""} <= spellings), None)
    if form is None:
        raise UsageError("suffix: the model has no tokens for filling in", remedy="put it into the prompt")
    parts = [[(form.prefix, True), (prefix, False)], [(form.suffix, True), (suffix, False)]]
    spans = [span for part in (parts[::-1] if form.suffix_first else parts) for span in part] + [(form.middle, True)]
    ids = tokenizer.encode("") + tokenizer.encode_rendered(spans)
    ends = (tokenizer.encode_rendered([(end, True)]) for end in form.ends if end in spellings)
    return ids, frozenset(token for [token] in ends)

"""Prompts whose output goes between two texts, for models with fill-in-the-middle tokens."""

from typing import NamedTuple

from engine.errors import UsageError
from engine.text.tokenizer import Tokenizer


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

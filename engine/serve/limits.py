"""Limits on requests: sizes of fields, and how much a search may compute and keep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.contract import Search
from engine.contract.checks import attributed, slots_of
from engine.errors import ContextError, UsageError, check_integer, shortened
from engine.load.loading import LoadedModel
from engine.request import Request
from engine.serve.names import NO_EFFECT
from engine.serve.served import Served

# Fields that a check or every step goes through -> most entries, most values and most characters of all entries.
MOST_IN_FIELD: dict[str, tuple[int, int, int]] = {
    "messages": (4096, 1 << 16, 1 << 62),  # their characters have a prompt's limit
    "tools": (1024, 1 << 16, 1 << 20),
    "suffix": (1, 1, 1 << 62),  # a prompt's limit
    "template": (256, 1 << 14, 1 << 18),
    "chat_template_kwargs": (256, 1 << 14, 1 << 18),
    "response_format": (256, 1 << 16, 1 << 18),
    "json_schema": (1 << 14, 1 << 16, 1 << 18),
    "regex": (1, 1, 1 << 16),
    "grammar": (1, 1, 1 << 18),
    "begin": (1, 1, 1 << 14),
    "choices": (4096, 1 << 15, 1 << 16),
    "stop": (256, 256, 4096),
    "dry_sequence_breakers": (64, 64, 1024),
    "bad_words": (256, 4096, 1 << 14),
    "sequence_bias": (256, 4096, 0),
    "logit_bias": (4096, 8192, 1 << 16),
    "suppress_tokens": (4096, 4096, 0),
    "begin_suppress_tokens": (4096, 4096, 0),
    "eos_token_ids": (64, 64, 0),
}
OTHERS = 64, 256, 4096  # the same limits for any other field
MOST_NGRAM = 64  # tokens that are compared after every token
MOST_COMPARED = 1 << 15  # tokens that DRY compares in a step, of all sequences: a tenth of a second at worst
STEP_WORK, KEPT_WORK = 1 << 16, 1 << 20  # numbers of a search for each sequence of the width, see `Search.work`
MOST_ROWS = 1 << 16  # rows of the model's width that a request with log-probabilities keeps
MOST_ALTERNATIVES = 1 << 17  # log-probabilities of a reply


@dataclass(frozen=True)
class Limits:
    """The most that a request may ask for.

    Args:
        prompt: tokens of a prompt; None: the model's context.
        new_tokens: new tokens of an output.
        width: sequences that a search keeps at once; see `width_of`.
        body: bytes of a body.
        seconds: time until a request is answered.
        traces: whether traces are kept.
        strict: refuse fields that mean nothing here, rather than ignore them.
    """

    prompt: int | None = None
    new_tokens: int = 4096
    width: int = 64
    body: int = 4 << 20
    seconds: float = 600.0
    traces: bool = True
    strict: bool = False

    def reach(self, model: LoadedModel) -> int:
        """The most tokens of a text for a model: the limit, its context or its cache."""
        pool = model.runner.pool
        return self.prompt or model.shape.max_positions or pool.pages * pool.page_size


def check_sizes(body: Mapping[str, Any], served: Served, limits: Limits) -> None:
    """Compare the sizes of a body's fields with the limits, before they are processed. Raises UsageError."""
    for key, value in body.items():
        if key not in ("prompt", *NO_EFFECT):
            _size(key, value, *MOST_IN_FIELD.get(key, OTHERS))
    model, prompt = served.engine.model, body.get("prompt")
    for each in prompt if isinstance(prompt, list) and prompt and type(prompt[0]) is not int else [prompt]:
        if isinstance(each, str | list):
            check_length("prompt", each, model, limits)
    if isinstance(body.get("suffix"), str):
        check_length("suffix", body["suffix"], model, limits)
    if isinstance(body.get("messages"), list):
        _check_characters("messages", _weight(body["messages"], 1 << 62)[1], model, limits)


def check_length(name: str, text: str | Sequence[int], model: LoadedModel, limits: Limits) -> None:
    """Raises ContextError for a text that fits no context by the number of its characters or tokens.

    Args:
        text: a text or token ids, not encoded yet: a long one is refused before it is encoded.
    """
    if isinstance(text, str):
        _check_characters(name, len(text), model, limits)
    elif len(text) > (reach := limits.reach(model)):
        raise ContextError(
            f"{name}: the text has {len(text)} tokens, this model's maximum context length is {reach}",
            remedy="shorten it",
        )


def _check_characters(name: str, count: int, model: LoadedModel, limits: Limits) -> None:
    """Raises ContextError for more characters than a context's tokens can stand for."""
    reach, tokenizer = limits.reach(model), model.tokenizer
    if tokenizer is not None and count > reach * tokenizer.longest:
        each = f"{reach} tokens of at most {tokenizer.longest} characters"
        raise ContextError(
            f"{name}: the text has {count} characters, this model's maximum context length is {each}",
            remedy="shorten it",
        )


def _size(name: str, value: Any, entries: int, values: int, characters: int) -> None:
    """Raises UsageError if a field has more entries, values in all or characters in all."""
    if isinstance(value, list | dict) and len(value) > entries:
        raise UsageError(f"{shortened(name)}: expected at most {entries} entries, got {len(value)}")
    count, length = _weight(value, values)
    if count > values:
        raise UsageError(f"{shortened(name)}: expected at most {values} values in all its lists and objects")
    if length > characters:
        raise UsageError(f"{shortened(name)}: expected at most {characters} characters in all, got {length}")


def _weight(value: Any, most: int) -> tuple[int, int]:
    """The number of values in a JSON value, and of their characters; counting stops above `most`."""
    stack, values, characters = [value], 0, 0
    while stack and values <= most:
        value = stack.pop()
        if isinstance(value, dict):
            stack += value
            stack += value.values()
        elif isinstance(value, list):
            stack += value
        else:
            values += 1
            characters += len(value) if isinstance(value, str) else 0
    return values, characters


def check_limits(request: Request, limits: Limits, served: Served) -> None:
    """Compare what a request asks for with the limits. Raises UsageError."""
    prompt, new = len(request.prompt), request.max_new_tokens  # both in tokens
    if limits.prompt is not None and prompt > limits.prompt:
        raise ContextError(f"the prompt has {prompt} tokens, this server takes {limits.prompt}", remedy="shorten it")
    check_integer("max_new_tokens", new, 1)
    if new > limits.new_tokens:
        raise UsageError(f"max_new_tokens: expected at most {limits.new_tokens}, got {new}")
    check_integer("no_repeat_ngram_size", request.no_repeat_ngram_size, 0, MOST_NGRAM)
    check_width(width := width_of(request.search), limits.width)
    reach = served.engine.shape.max_positions
    new = new if reach is None else min(new, max(1, reach - prompt + 1))
    if request.dry_multiplier and request.dry_penalty_last_n:
        last = request.dry_penalty_last_n
        compared = prompt + new if last < 0 else min(last, prompt + new)
        if width * compared > MOST_COMPARED:
            what = f"{width} sequences of {compared} tokens are compared in a step, this server takes {MOST_COMPARED}"
            raise UsageError(what, remedy=f"give dry_penalty_last_n, at most {MOST_COMPARED // width}")
    with attributed(type(request.search)):
        step, kept = request.search.work(new)
    for what, number, most in (("in a step", step, STEP_WORK), ("in all", kept, KEPT_WORK)):
        if number > most * limits.width:
            each = f"{number} numbers {what}, this server takes {most * limits.width}"
            raise UsageError(f"the search computes {each}", remedy="ask for fewer samples, or for fewer tokens")
    if request.logprobs is not None:
        check_integer("logprobs", request.logprobs, 0)
        outputs = getattr(request.search, "num_return_sequences", 1)
        if (count := outputs * new * (1 + request.logprobs)) > MOST_ALTERNATIVES:
            what = f"{outputs} x {new} tokens with {request.logprobs} alternatives are {count} log-probabilities"
            raise UsageError(f"logprobs: {what}, this server takes {MOST_ALTERNATIVES}", remedy="ask for fewer tokens")
        if width * new > MOST_ROWS:
            what = f"{width} sequences of {new} tokens are {width * new} rows"
            raise UsageError(f"logprobs: {what}, this server keeps {MOST_ROWS}", remedy="ask for fewer tokens")


def check_width(width: int, most: int) -> None:
    """Raises UsageError for a search that keeps more sequences at once."""
    if width > most:
        fewer = "n, beams, bon_n, sbon_n, ults_k_max, dsbd_width, dsbd_draft_beams"
        remedy = f"ask for fewer ({fewer}), or start the server with --max-width {width}"
        raise UsageError(f"the search keeps {width} sequences at once, this server at most {most}", remedy=remedy)


def width_of(search: Search) -> int:
    """How many sequences a search keeps at once at most, by its `slots`."""
    new = 1025
    return max(1, -(-(slots_of(search, 1, new)[1] - 1) // (new - 1)))

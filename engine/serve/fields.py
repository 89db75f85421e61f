"""The bodies of OpenAI's requests, with the parameters of every search besides, as requests of the engine."""

import argparse
import functools
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.app.cli import template_options
from engine.app.records import make_request
from engine.contract import Search
from engine.contract.checks import attributed, slots_of
from engine.contract.scoring import Scoring
from engine.contract.trace import ANCHOR, Trace, token_text
from engine.engine import Engine, Request
from engine.errors import UsageError, check_flag, check_integer, shortened
from engine.load.options import NO_ADAPTER
from engine.rules.catalogue import Catalogue
from engine.serve.stepper import Lane
from engine.service import Checked
from engine.text.prompting import TemplateOptions
from engine.text.thinking import Thoughts
from search.base import REGISTRY, chosen, parameters
from search.options import Sampling

CHAT, COMPLETIONS = "chat", "completions"
# Fields that change no token.
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
# Fields of which one value alone can be served -> those values, and what to use instead.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), "search bon with bon_n ranks samples by a reward model"),
    "suffix": ((), "put it into the prompt"),
    "functions": (([],), "tools go to the chat template"),
    "function_call": (("none", "auto"), "tools go to the chat template"),
    "tool_choice": (("none", "auto"), "response_format fixes the form of a reply"),
    "modalities": ((["text"],), ""),
    "audio": ((), ""),
    "prediction": ((), "search aded drafts by itself"),
    "web_search_options": ((), ""),
    "adapter": ((), 'the model\'s name says it: "model": "NAME:ADAPTER"'),
}
RENAMED = {  # names of others -> keys of a batch line's params
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_return_sequences",
    "beam_width": "beams",
}
# Values that any search may be given.
PLAIN_DRAWS = {
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "typical_p": (1,),
    "top_n_sigma": (0,),
    "xtc_probability": (0,),
}
MOST_LOGPROBS = 20
MOST_FIELDS = 256  # of a body
# Fields that a check or every step goes through -> most entries, most values and most characters of all entries.
MOST_IN_FIELD: dict[str, tuple[int, int, int]] = {
    "messages": (4096, 1 << 16, 1 << 62),  # their characters: as of a prompt
    "tools": (1024, 1 << 16, 1 << 20),
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
OTHERS = 64, 256, 4096  # of any other field
MOST_NGRAM = 64  # tokens that are compared after every token
STEP_WORK, KEPT_WORK = 1 << 16, 1 << 20  # numbers of a search for each sequence of the width, see `Search.work`
MOST_ROWS = 1 << 16  # of the model's width, that a request with log-probabilities keeps
MOST_ALTERNATIVES = 1 << 17  # log-probabilities of a reply
SPELLINGS = 1 << 16  # that are kept
TRACED = 5000  # nodes of a trace
OWN = ("model", "stream", "stream_options", "trace", "catalogue", "use_beam_search", "return_token_ids")
OF_PROMPTS = ("echo", "prompt_logprobs")
RECORD = {CHAT: ("messages", "tools", "template", "think", "response_format"), COMPLETIONS: ("response_format",)}


@dataclass(frozen=True)
class Limits:
    """The most that a request may ask for.

    Args:
        prompt: tokens of a prompt; None: the model's context.
        new_tokens: new tokens of an output.
        width: sequences that a search keeps at once; see `width_of`.
        body: bytes.
        seconds: until a request is answered.
        traces: whether traces are kept.
    """

    prompt: int | None = None
    new_tokens: int = 4096
    width: int = 64
    body: int = 4 << 20
    seconds: float = 600.0
    traces: bool = True


@dataclass
class Served:
    """A model that is served.

    Args:
        name: by which requests choose it.
        engine: has its models.
        lane: where its requests run.
        args: the command line: gives what a request lacks.
        catalogues: by the names that requests use.
        adapter: the name of its adapter.
    """

    name: str
    engine: Engine
    lane: Lane
    args: argparse.Namespace
    catalogues: Mapping[str, Catalogue] = field(default_factory=dict)
    adapter: str = NO_ADAPTER

    def __post_init__(self):
        self.template: TemplateOptions = template_options(self.args)
        self.created = int(time.time())
        self._bytes: list[bytes] | None = None
        self.spelling = functools.lru_cache(SPELLINGS)(self._spelling)

    def adapted(self) -> "dict[str, Served]":
        """The model with each of its adapters, by name: NAME:ADAPTER."""
        found = {f"{self.name}:{adapter}": adapter for adapter in self.engine.model.adapters}
        return {name: replace(self, name=name, adapter=adapter) for name, adapter in found.items()}

    @functools.cached_property
    def longest(self) -> int:
        """The most characters that a token stands for; 0 without a tokenizer."""
        tokenizer = self.engine.model.tokenizer
        return 0 if tokenizer is None else tokenizer.longest

    def _spelling(self, token: int) -> tuple[str, list[int]]:
        """A token's text in the middle of a text, and its bytes, which may be a part of a character."""
        tokenizer = self.engine.tokenizer
        if self._bytes is None:
            try:
                self._bytes = tokenizer.data()
            except UsageError:  # they depend on the tokens around
                self._bytes = []
        text = token_text(tokenizer, tokenizer.encode(ANCHOR, add_special=False), token)
        data = self._bytes[token] if token < len(self._bytes) else b""
        return text, [*(data or text.encode())]


@dataclass
class Asked:
    """A checked request of a client: one prompt or several.

    Attributes:
        checked: a request of the engine for each prompt.
        thoughts: how replies write what they think; None where there is no chat template.
        n: outputs per prompt.
        name: of the search.
        seed: that was drawn, because none was given.
        token_ids: whether choices have them.
        traces: one for each prompt, if traces are wanted.
        scored: how many of `checked`, the last ones, score a prompt each; the others, if there are any, generate.
        echoed: the prompts' texts, if answers begin with them.
        logprobs: alternatives beside the log-probability of each token of a choice; None: no such numbers.
        prompt_logprobs: likewise of the prompt's tokens, in a field of their own.
    """

    served: Served
    kind: str
    checked: list[Checked]
    thoughts: Thoughts | None
    n: int
    stream: bool
    include_usage: bool
    name: str
    seed: int | None
    token_ids: bool = False
    traces: list[Trace] = field(default_factory=list)
    scored: int = 0
    echoed: list[str] = field(default_factory=list)
    logprobs: int | None = None
    prompt_logprobs: int | None = None


def places_of(body: Mapping[str, Any], kind: str) -> int:
    """How many requests of the engine a body makes at most."""
    return len(prompts_of(body, kind)) * (2 if "prompt_logprobs" in body or body.get("echo") is True else 1)


def prompts_of(body: Mapping[str, Any], kind: str) -> list[Any]:
    """The prompts: one conversation; of completions a text, a list of token ids, or a list of those."""
    if kind == CHAT:
        return [_messages(body.get("messages"))]
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and type(prompt[0]) is not int:
        return prompt
    return [prompt]


def read(body: dict[str, Any], kind: str, served: Served, limits: Limits, identity: str, salt: str = "") -> Asked:
    """Read a body with `_read`. Errors name fields as the client did."""
    try:
        return _read(body, kind, served, limits, identity, salt)
    except UsageError as error:
        for theirs, ours in RENAMED.items():
            if theirs in body and error.what.startswith(f"{ours}:"):
                what = theirs + error.what.removeprefix(ours)
                raise UsageError(what, where=error.where, remedy=error.remedy) from None
        raise


def _read(body: dict[str, Any], kind: str, served: Served, limits: Limits, identity: str, salt: str) -> Asked:
    """Check a body, and make the requests that it asks for.

    Args:
        body: the JSON object, without keys whose value is null.
        kind: CHAT or COMPLETIONS.
        identity: names the traces.
        salt: of cached prefixes.

    Raises:
        CoppiceError: a field is unknown, refused, malformed or above a limit.
    """
    _sizes(body, served, limits)
    _refuse(body, kind)
    params = _params(body, served, kind)
    score, silent = _scoring(body, params), params.get("max_new_tokens") == 0
    if silent:
        if score is None and not _flag(body, "echo"):
            raise UsageError("max_new_tokens: 0 needs echo: true or prompt_logprobs")
        params["max_new_tokens"] = 1  # for the checks
    base = {key: body[key] for key in RECORD[kind] if key in body} | {"params": params}
    if kind == CHAT and "chat_template_kwargs" in body:
        base["template"] = body["chat_template_kwargs"]
    stream, options = _flag(body, "stream"), _options(body)
    checked, traces, thoughts, seed = [], [], None, None
    scored, echoed = [], []
    prompts = prompts_of(body, kind)
    for i, prompt in enumerate(prompts):
        key = "messages" if kind == CHAT else "prompt_ids" if isinstance(prompt, list) else "prompt"
        request, thoughts = make_request(base | {key: prompt}, served.engine, served.args, served.template)
        if isinstance(request.search, Sampling) and "seed" not in params and getattr(served.args, "seed", None) is None:
            seed = secrets.randbits(63) if seed is None else seed
            request = replace(request, search=replace(request.search, seed=seed))
        request = replace(request, cache_salt=salt, adapter=served.adapter)
        _limit(request, limits, served)
        if "catalogue" in body:
            request = replace(request, catalogue=_catalogue(body["catalogue"], served.catalogues))
        if _flag(body, "trace"):
            if not limits.traces:
                raise UsageError("trace: this server keeps none")
            traces.append(Trace(f"{identity}-{i}" if len(prompts) > 1 else identity, TRACED))
            request = replace(request, trace=traces[-1])
        checked.append(served.lane.service.check(request))
        if _flag(body, "echo"):
            echoed.append(prompt if isinstance(prompt, str) else served.engine.tokenizer.decode(checked[-1].ids))
        if score is not None or silent:
            scored.append(served.lane.service.check(_score_of(checked[-1], score or 0, "prompt_logprobs" in body)))
    if silent:
        checked = []
    if score is not None and stream:
        raise UsageError("stream: log-probabilities of the prompt come with the whole answer alone")
    checked += scored
    if checked[0].request.logprobs is not None:
        served.spelling(0)  # here, and not while others stream
    first = checked[0].request.search
    name, n = params["search"], getattr(first, "num_return_sequences", 1)
    return Asked(
        served, kind, checked, thoughts, n, stream, options, name, seed, _flag(body, "return_token_ids"), traces,
        len(scored), echoed, params.get("logprobs"), body.get("prompt_logprobs"),
    )  # fmt: skip


def _scoring(body: Mapping[str, Any], params: Mapping[str, Any]) -> int | None:
    """How many alternatives are wanted beside the log-probability of each token of the prompt; None: none of these."""
    wanted = []
    if "prompt_logprobs" in body:
        check_integer("prompt_logprobs", body["prompt_logprobs"], 0, MOST_LOGPROBS)
        wanted.append(body["prompt_logprobs"])
    if _flag(body, "echo") and "logprobs" in params:
        wanted.append(params["logprobs"])
    return max(wanted, default=None)


def _score_of(checked: Checked, top: int, ranked: bool) -> Request:
    """The request that scores a prompt after its first token. Raises UsageError."""
    if (count := len(checked.ids) * (1 + top)) > MOST_ALTERNATIVES:
        what = f"{len(checked.ids)} tokens of the prompt with {top} alternatives are {count} log-probabilities"
        raise UsageError(f"prompt: {what}, this server takes {MOST_ALTERNATIVES}", remedy="ask for fewer alternatives")
    first, *rest = checked.ids
    search = Scoring((tuple(rest),), top=top, ranked=ranked)
    salt, adapter = checked.request.cache_salt, checked.request.adapter
    return Request([first], search, max(1, len(rest)), ignore_eos=True, cache_salt=salt, adapter=adapter)


def _refuse(body: Mapping[str, Any], kind: str) -> None:
    """Raises UsageError for what cannot be served."""
    for key, (fine, remedy) in REFUSED.items():
        if key in body and not any(value == body[key] for value in fine):
            allowed = f"expected {' or '.join(map(repr, fine))}" if fine else "it cannot be served"
            raise UsageError(f"{key}: {allowed}, got {shortened(repr(body[key]))}", remedy=remedy)
    others = {
        CHAT: ("prompt", "parse_special", "prompt_logprobs", *(["echo"] if body.get("echo") else [])),
        COMPLETIONS: ("messages", "tools", "template", "think", "chat_template_kwargs"),
    }
    if wrong := next((key for key in others[kind] if key in body), None):
        where = "/v1/completions" if kind == CHAT else "/v1/chat/completions"
        raise UsageError(f"{wrong}: it belongs to {where}")


def _params(body: Mapping[str, Any], served: Served, kind: str) -> dict[str, Any]:
    """The `params` of a batch line. Raises UsageError."""
    others = {*IGNORED, *REFUSED, *OWN, *OF_PROMPTS, *RECORD[kind], "prompt", "chat_template_kwargs"}
    others |= {"logprobs", "top_logprobs"}
    params: dict[str, Any] = {} if (wanted := _logprobs(body, kind)) is None else {"logprobs": wanted}
    for key, value in body.items():
        if key in others:
            continue
        name = RENAMED.get(key, key)
        if name in params and params[name] != value:
            raise UsageError(f"{key}: it contradicts another field that means {name}")
        params[name] = value
    wide = _flag(body, "use_beam_search") or "beam_width" in body
    if wide:
        params.setdefault("beams", params.get("num_return_sequences", 1))
        params.setdefault("search", "trie")
    name = params["search"] = chosen(params, served.args.search)
    if isinstance(name, str) and name in REGISTRY:
        _drop_plain(params, name)
    return params


def _drop_plain(params: dict[str, Any], name: str) -> None:
    """Leave out what clients send always and what means nothing to this search."""
    known = parameters(name)
    for key, plain in PLAIN_DRAWS.items():
        if key in params and key not in known and params[key] in plain and not isinstance(params[key], bool):
            del params[key]
    if "xtc_threshold" not in known and "xtc_probability" not in params:
        params.pop("xtc_threshold", None)
    if "seed" in params and "seed" not in known:  # the same output with any
        check_integer("seed", params.pop("seed"), 0)
    if params.get("num_return_sequences") == 1 and "num_return_sequences" not in known:
        del params["num_return_sequences"]


def _flag(body: Mapping[str, Any], key: str) -> bool:
    check_flag(key, value := body.get(key, False))
    return value


def _logprobs(body: Mapping[str, Any], kind: str) -> int | None:
    """How many alternatives are wanted beside the log-probability of each token; None: none of these numbers."""
    if kind == COMPLETIONS:
        if "top_logprobs" in body:
            raise UsageError("top_logprobs: it belongs to /v1/chat/completions; here logprobs is the number")
        if "logprobs" in body:
            check_integer("logprobs", body["logprobs"], 0, MOST_LOGPROBS)
        return body.get("logprobs")
    wanted, top = _flag(body, "logprobs"), body.get("top_logprobs", 0)
    check_integer("top_logprobs", top, 0, MOST_LOGPROBS)
    if top and not wanted:
        raise UsageError("top_logprobs: it needs logprobs: true")
    return top if wanted else None


def _options(body: Mapping[str, Any]) -> bool:
    """Whether a stream ends with its usage. Raises UsageError."""
    match body.get("stream_options", {}):
        case {"include_usage": bool() as wanted}:
            return wanted
        case dict() as options if "include_usage" not in options:
            return False
    raise UsageError(f"stream_options: expected an object, got {shortened(repr(body['stream_options']))}")


def _catalogue(name: Any, known: Mapping[str, Catalogue]) -> Catalogue:
    if not isinstance(name, str) or name not in known:
        names = f"one of {', '.join(known)}" if known else "none: the server was started without --catalogue"
        raise UsageError(f"catalogue: expected {names}, got {shortened(repr(name))}")
    return known[name]


def _sizes(body: Mapping[str, Any], served: Served, limits: Limits) -> None:
    """Compare the sizes of a body's fields with the limits, before anything is done with them. Raises UsageError."""
    if len(body) > MOST_FIELDS:
        raise UsageError(f"the body has {len(body)} fields, this server takes {MOST_FIELDS}")
    for key, value in body.items():
        if key not in ("prompt", *IGNORED):
            _size(key, value, *MOST_IN_FIELD.get(key, OTHERS))
    engine = served.engine
    reach = limits.prompt or engine.shape.max_positions or engine.pool.pages * engine.pool.page_size
    prompt = body.get("prompt")
    for each in prompt if isinstance(prompt, list) and prompt and type(prompt[0]) is not int else [prompt]:
        if isinstance(each, list) and len(each) > reach:
            raise UsageError(f"the prompt has {len(each)} tokens, at most {reach} fit the context")
        if isinstance(each, str):
            _length("the prompt has", len(each), reach, served)
    if isinstance(body.get("messages"), list):
        _length("the messages have", _weight(body["messages"], 1 << 62)[1], reach, served)


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
    """The number of values in a JSON value, and of their characters; it stops where there are more than `most`."""
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


def _length(what: str, characters: int, reach: int, served: Served) -> None:
    """Raises UsageError for a text that has more characters than a context's tokens can stand for."""
    if served.longest and characters > reach * served.longest:
        each = f"{reach} tokens of at most {served.longest} characters"
        raise UsageError(f"{what} {characters} characters, the context holds {each}", remedy="shorten it")


def _limit(request: Request, limits: Limits, served: Served) -> None:
    """Compare what a request asks for with the limits. Raises UsageError."""
    prompt, new = len(request.prompt), request.max_new_tokens  # tokens, by now
    if limits.prompt is not None and prompt > limits.prompt:
        raise UsageError(f"the prompt has {prompt} tokens, this server takes {limits.prompt}", remedy="shorten it")
    check_integer("max_new_tokens", new, 1)
    if new > limits.new_tokens:
        raise UsageError(f"max_new_tokens: expected at most {limits.new_tokens}, got {new}")
    check_integer("no_repeat_ngram_size", request.no_repeat_ngram_size, 0, MOST_NGRAM)
    if (width := width_of(request.search)) > limits.width:
        raise UsageError(f"the search keeps {width} sequences at once, this server at most {limits.width}")
    reach = served.engine.shape.max_positions
    new = new if reach is None else min(new, max(1, reach - prompt + 1))
    step, kept = work_of(request.search, new)
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


def width_of(search: Search) -> int:
    """How many sequences a search keeps at once at most, by its `slots`."""
    new = 1025
    return max(1, -(-(slots_of(search, 1, new)[1] - 1) // (new - 1)))


def work_of(search: Search, new_tokens: int) -> tuple[int, int]:
    """Return what a search computes beside the model's rows, see `Search.work`. Raises SearchError."""
    with attributed(type(search)):
        return search.work(new_tokens)


def _messages(messages: Any) -> Any:
    """Messages whose contents are texts: of contents in parts, the parts' texts. Raises UsageError."""
    if not isinstance(messages, list):
        return messages
    return [_message(i, m) if isinstance(m, dict) else m for i, m in enumerate(messages)]


def _message(i: int, message: Mapping[str, Any]) -> dict[str, Any]:
    message = {key: value for key, value in message.items() if value is not None}
    if message.get("role") == "developer":
        message["role"] = "system"
    parts = message.get("content")
    if isinstance(parts, list):
        for wrong in [part for part in parts if not _is_text(part)][:1]:
            raise UsageError(f"messages[{i}].content: expected parts of type text, got {shortened(repr(wrong))}")
        message["content"] = "".join(part["text"] for part in parts)
    return message


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)

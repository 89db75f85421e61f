"""Converts bodies of OpenAI's requests, which may also have the parameters of every search, to engine requests."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.app.records import make_request
from engine.contract.scoring import Scoring
from engine.contract.trace import Trace
from engine.errors import UsageError, check_integer, shortened
from engine.request import Checked, Request
from engine.rules import ONE_OF, response_format
from engine.rules.catalogue import Catalogue
from engine.serve.calls import ToolUse, template_messages, tool_use
from engine.serve.limits import MOST_ALTERNATIVES, Limits, check_limits, check_sizes
from engine.serve.names import (
    CHAT,
    MOST_LOGPROBS,
    RECORD,
    RENAMED,
    flag,
    params_of,
    plain_messages,
    refuse,
    usage_wanted,
    without_unknown,
)
from engine.serve.served import Served
from engine.text.prompting import infill
from engine.text.template import TemplateOptions
from engine.text.thinking import Thoughts
from search.base import chosen
from search.options import Sampling

SEED_BITS = 53  # bits of a drawn seed: JavaScript reads larger integers as other ones
TRACED = 5000  # nodes of a trace


@dataclass
class Asked:
    """A checked request of a client: one prompt or several.

    Attributes:
        checked: a request of the engine for each prompt.
        thoughts: how replies write thoughts; None without a chat template.
        n: outputs per prompt in the answer.
        drawn: outputs per prompt that the search returns; if more than `n`, the answer has the best.
        name: the name of the search.
        seed: the seed that was drawn because none was given.
        token_ids: whether choices have token ids.
        traces: one for each prompt, if traces are wanted.
        scored: number of requests at the end of `checked` that score a prompt each; the others generate.
        echoed: the prompts' texts, if answers begin with them.
        logprobs: alternatives in addition to the log-probability of each token of a choice; None: no log-probabilities.
        prompt_logprobs: the same for the prompt's tokens, in a field of their own.
        tools: how replies may call functions; None: not at all.
        ignored: names of fields that mean nothing here.
    """

    served: Served
    kind: str
    checked: list[Checked]
    thoughts: Thoughts | None
    n: int
    drawn: int
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
    tools: ToolUse | None = None
    ignored: list[str] = field(default_factory=list)


def places_of(body: Mapping[str, Any], kind: str) -> int:
    """The most engine requests that a body may become."""
    return len(prompts_of(body, kind)) * (2 if "prompt_logprobs" in body or body.get("echo") is True else 1)


def prompts_of(body: Mapping[str, Any], kind: str) -> list[Any]:
    """The prompts: one conversation; for completions a text, a list of token ids, or a list of those."""
    if kind == CHAT:
        return [plain_messages(body.get("messages"))]
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and type(prompt[0]) is not int:
        return prompt
    return [prompt]


def read(body: dict[str, Any], kind: str, served: Served, limits: Limits, identity: str, salt: str = "") -> Asked:
    """Read a body with `_read`. Errors name fields as the client did."""
    try:
        return _read(body, kind, served, limits, identity, salt)
    except RecursionError:
        raise UsageError("the body is nested too deep") from None
    except UsageError as error:
        names = {"best_of": "num_return_sequences", **RENAMED}
        if isinstance(body.get("tool_choice"), str | dict):  # a forced call is a grammar
            names["tools"] = "grammar"
        for theirs, ours in names.items():
            if theirs in body and error.what.startswith(f"{ours}:"):
                what = theirs + error.what.removeprefix(ours)
                raise UsageError(what, where=error.where, remedy=error.remedy) from None
        raise


def _read(body: dict[str, Any], kind: str, served: Served, limits: Limits, identity: str, salt: str) -> Asked:
    """Check a body, and make the requests that it asks for.

    Args:
        body: the JSON object, without keys whose value is null.
        kind: CHAT or COMPLETIONS.
        identity: the name of the traces.
        salt: the salt of cached prefixes.

    Raises:
        CoppiceError: a field is unknown, refused, malformed or above a limit.
    """
    body, ignored = without_unknown(body, limits.strict, search=chosen(body, served.args.search))
    check_sizes(body, served, limits)
    refuse(body, kind)
    params = params_of(body, served, kind)
    score = _scoring(body, params)
    silent = _silenced(body, params, score)
    base = {key: body[key] for key in RECORD[kind] if key in body} | {"params": params}
    use, template = _tools(base, body, served) if kind == CHAT else (None, served.template)
    stream, options = flag(body, "stream"), usage_wanted(body)
    checked, traces, thoughts, seed = [], [], None, None
    scored, echoed = [], []
    prompts = prompts_of(body, kind)
    for i, prompt in enumerate(prompts):
        request, thoughts = _request(base, kind, prompt, body, served, template)
        if isinstance(request.search, Sampling) and "seed" not in params and getattr(served.args, "seed", None) is None:
            seed = secrets.randbits(SEED_BITS) if seed is None else seed
            request = replace(request, search=replace(request.search, seed=seed))
        request = replace(request, cache_salt=salt, adapter=served.adapter)
        check_limits(request, limits, served)
        if "catalogue" in body:
            request = replace(request, catalogue=_catalogue(body["catalogue"], served.catalogues))
        if flag(body, "trace"):
            if not limits.traces:
                raise UsageError("trace: this server keeps no traces")
            traces.append(Trace(f"{identity}-{i}" if len(prompts) > 1 else identity, TRACED))
            request = replace(request, trace=traces[-1])
        checked.append(served.lane.service.check(request))
        if flag(body, "echo"):
            ids, healed = checked[-1].ids, checked[-1].healed
            echoed.append(prompt if isinstance(prompt, str) else served.engine.tokenizer.decode(ids) + healed)
        if score is not None or silent:
            scored.append(served.lane.service.check(_score_of(checked[-1], score or 0, "prompt_logprobs" in body)))
    if score is not None and stream:
        raise UsageError("stream: log-probabilities of the prompt are returned only without a stream")
    checked = scored if silent else checked + scored
    if checked[0].request.logprobs is not None:
        served.spelling(0)  # computed here, not while others stream
    drawn = getattr(checked[0].request.search, "num_return_sequences", 1)
    if use is not None and not use.forced and checked[0].request.json_schema is not None:
        use = None  # JSON of the client's schema is the answer, even if it looks like a call
    return Asked(
        served,
        kind,
        checked,
        thoughts,
        n=body.get("n", 1) if "best_of" in body or silent else drawn,
        drawn=drawn,
        stream=stream,
        include_usage=options,
        name=params["search"],
        seed=seed,
        token_ids=flag(body, "return_token_ids"),
        traces=traces,
        scored=len(scored),
        echoed=echoed,
        logprobs=params.get("logprobs"),
        prompt_logprobs=body.get("prompt_logprobs"),
        tools=use,
        ignored=ignored,
    )


def _silenced(body: Mapping[str, Any], params: dict[str, Any], score: int | None) -> bool:
    """Whether a body asks for no new token; then give its `params` values that pass the checks. Raises UsageError."""
    if params.get("max_new_tokens") != 0:
        return False
    if score is None and not flag(body, "echo"):
        raise UsageError("max_new_tokens: 0 needs echo: true or prompt_logprobs")
    params["max_new_tokens"] = 1
    if params.get("heal") is True:
        params["heal"] = False  # nothing is generated again
    return True


def _tools(base: dict[str, Any], body: Mapping[str, Any], served: Served) -> tuple[ToolUse | None, TemplateOptions]:
    """How the replies of a chat may call functions, and the options of its template; `base` gets what they need.
    Raises UsageError."""
    if "chat_template_kwargs" in body:
        base["template"] = body["chat_template_kwargs"]
    use, tools = tool_use(body, served)
    base.pop("tools", None)
    if use is not None and use.forced:
        _force(base, use)
    return use, replace(served.template, tools=tools, lead=use.lead if use is not None else "")


def _request(
    base: dict[str, Any], kind: str, prompt: Any, body: Mapping[str, Any], served: Served, template: TemplateOptions
) -> tuple[Request, Thoughts | None]:
    """The request for one prompt of a body, and how its answers write thoughts. Raises CoppiceError."""
    if kind == CHAT and served.engine.template is not None:
        prompt, described = template_messages(prompt, template.tools, served.engine.template)
        template = replace(template, tools=None) if described else template
    key = "messages" if kind == CHAT else "prompt_ids" if isinstance(prompt, list) else "prompt"
    if (suffix := body.get("suffix", "")) == "":
        return make_request(base | {key: prompt}, served.engine, served.args, template)
    if not isinstance(suffix, str) or not isinstance(prompt, str):
        raise UsageError("suffix: it and the prompt must be texts")
    if body.get("heal") or body.get("parse_special"):
        raise UsageError("suffix: it cannot be combined with heal or parse_special")
    ids, ends = infill(served.engine.tokenizer, prompt, suffix)
    request, thoughts = make_request(base | {"prompt_ids": ids}, served.engine, served.args, template)
    given = served.engine.eos_token_ids if request.eos_token_ids is None else request.eos_token_ids
    return replace(request, eos_token_ids=frozenset(given) | ends), thoughts


def _force(base: dict[str, Any], use: ToolUse) -> None:
    """Constrain the outputs of a record to calls. Raises UsageError: it has another constraint.

    `response_format` applies to texts, and a forced call has no text, so it is dropped; instructor sends both.
    """
    response_format(base.pop("response_format", {"type": "text"}))
    params = base["params"]
    if other := next((key for key in ONE_OF if key in params), None):
        raise UsageError(f"tool_choice: a forced call cannot be combined with {other}")
    base["params"] = params | {"grammar": use.format.grammar(use.functions, use.several)}


def _scoring(body: Mapping[str, Any], params: Mapping[str, Any]) -> int | None:
    """How many alternatives are requested besides the log-probability of each token of the prompt; None: no
    log-probabilities."""
    wanted = []
    if "prompt_logprobs" in body:
        check_integer("prompt_logprobs", body["prompt_logprobs"], 0, MOST_LOGPROBS)
        wanted.append(body["prompt_logprobs"])
    if flag(body, "echo") and "logprobs" in params:
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


def _catalogue(name: Any, known: Mapping[str, Catalogue]) -> Catalogue:
    if not isinstance(name, str) or name not in known:
        names = f"one of {', '.join(known)}" if known else "none: the server was started without --catalogue"
        raise UsageError(f"catalogue: expected {names}, got {shortened(repr(name))}")
    return known[name]

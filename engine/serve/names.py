"""The fields of OpenAI's bodies: which are served, ignored and refused, and what they are called in a batch."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from engine.app.records import known_params
from engine.errors import UsageError, check_flag, check_integer, shortened
from engine.serve.served import Served
from search.base import REGISTRY, chosen, parameters

CHAT, COMPLETIONS = "chat", "completions"
# Fields that change no token.
NO_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Fields with only a few supported values -> those values, and what to use instead.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "functions": (([],), "the field is tools now"),
    "function_call": (("none", "auto"), "the field is tool_choice now"),
    "modalities": ((["text"],), ""),
    "audio": ((), ""),
    "web_search_options": ((), ""),
    "adapter": ((), 'the model\'s name says it: "model": "NAME:ADAPTER"'),
    "chat_template": ((), "the command line has --chat-template FILE"),
    "add_generation_prompt": ((True,), ""),
    "continue_final_message": ((False,), "/v1/completions continues texts"),
    "guided_json": ((), "use json_schema"),
    "guided_regex": ((), "use regex"),
    "guided_choice": ((), "use choices"),
    "guided_grammar": ((), "use grammar"),
    "structured_outputs": ((), "use json_schema, regex, choices or grammar"),
    "extra_body": ((), "its fields go into the body itself"),
}
RENAMED = {  # names in other APIs -> keys of a batch line's params
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_return_sequences",
    "beam_width": "beams",
}
# Values that any search may be given, because they change no draw.
PLAIN_DRAWS = {"temperature": 1, "top_p": 1, "typical_p": 1, "top_k": 0, "min_p": 0, "top_n_sigma": 0}
PLAIN_DRAWS |= {"epsilon_cutoff": 0, "eta_cutoff": 0, "xtc_probability": 0}
OWN = ("model", "stream", "stream_options", "trace", "catalogue", "use_beam_search", "return_token_ids")
OF_TOOLS = ("tool_choice", "parallel_tool_calls")
OF_PROMPTS = ("echo", "prompt_logprobs", "best_of", "suffix")
RECORD = {CHAT: ("messages", "tools", "template", "think", "response_format"), COMPLETIONS: ("response_format",)}
OTHERS = ("prompt", "chat_template_kwargs", "logprobs", "top_logprobs")
# All but the keys of a batch line's params, which may come from outside of this project.
KNOWN = frozenset([*NO_EFFECT, *REFUSED, *RENAMED, *OWN, *OF_TOOLS, *OF_PROMPTS, *RECORD[CHAT], *OTHERS])
MOST_LOGPROBS = 20
LEAST_TOP_P = 1e-9  # less than the probability of any best token
MOST_FIELDS = 256  # fields of a body
MOST_UNKNOWN = 32  # fields; each is compared with all names
NEAR = 0.8  # least similarity (difflib) of a misspelled field to a name
LONGEST_NAME = 64  # characters of an ignored field's name in a header


def without_unknown(
    body: Mapping[str, Any], strict: bool, known: Collection[str] | None = None, search: Any = None
) -> tuple[dict[str, Any], list[str]]:
    """The fields of a body that mean something here, and the names of those that do not.

    Args:
        known: the fields that do; None: those of requests for completions.
        search: the name of the search that the body chooses.

    Raises:
        UsageError: a field looks like a misspelt name, or is a parameter of the search without the search's name before
            it, or with `strict` any field means nothing; too many fields.
    """
    if len(body) > MOST_FIELDS:
        raise UsageError(f"the body has {len(body)} fields, this server takes {MOST_FIELDS}")
    known = KNOWN | {*known_params()} if known is None else known
    unknown = [key for key in body if key not in known]
    if len(unknown) > MOST_UNKNOWN:
        raise UsageError(f"the body has {len(unknown)} unknown fields, this server takes {MOST_UNKNOWN}")
    own = parameters(search) if isinstance(search, str) and search in REGISTRY else {}
    fields = {field: name for name, field in own.items()}
    for key in unknown:
        near = difflib.get_close_matches(key, known, 1, NEAR) if len(key) <= LONGEST_NAME else []
        near = [fields[key]] if key in fields else near
        if near or strict:
            remedy = f"did you mean {near[0]}?" if near else "docs/serving.md lists them"
            raise UsageError(f"{key[:LONGEST_NAME]}: no such key", remedy=remedy)
    return {key: value for key, value in body.items() if key not in unknown}, unknown


def header_of(ignored: Iterable[str]) -> dict[str, str]:
    """The header that names ignored fields, in characters that any client reads; none if there are none."""
    names = [re.sub(r"[^\w.-]", "?", name[:LONGEST_NAME], flags=re.ASCII) for name in ignored]
    return {"x-coppice-ignored": ", ".join(names)} if names else {}


def refuse(body: Mapping[str, Any], kind: str) -> None:
    """Raises UsageError for fields and values that are not supported."""
    for key, (fine, remedy) in REFUSED.items():
        if key in body and not any(value == body[key] for value in fine):
            allowed = f"expected {' or '.join(map(repr, fine))}" if fine else "it cannot be served"
            raise UsageError(f"{key}: {allowed}, got {shortened(repr(body[key]))}", remedy=remedy)
    if body.get("suffix") and body.get("echo") and body.get("logprobs") is not None:
        raise UsageError("echo: it cannot show log-probabilities of a prompt with a suffix", remedy="leave one out")
    plain = {"echo": False, "best_of": 1, "suffix": ""}
    of_prompts = [key for key in OF_PROMPTS if body.get(key) != plain.get(key)]
    others = {
        CHAT: ("prompt", "parse_special", *of_prompts),
        COMPLETIONS: ("messages", "tools", *OF_TOOLS, "template", "think", "chat_template_kwargs"),
    }
    if wrong := next((key for key in others[kind] if key in body), None):
        where = "/v1/completions" if kind == CHAT else "/v1/chat/completions"
        raise UsageError(f"{wrong}: it belongs to {where}")


def params_of(body: Mapping[str, Any], served: Served, kind: str) -> dict[str, Any]:
    """The `params` of a batch line. Raises UsageError."""
    others = KNOWN - {*RENAMED}
    params: dict[str, Any] = {} if (wanted := _logprobs(body, kind)) is None else {"logprobs": wanted}
    for key, value in body.items():
        if key in others:
            continue
        name = RENAMED.get(key, key)
        if name in params and params[name] != value:
            raise UsageError(f"{key}: it contradicts another field that means {name}")
        params[name] = value
    if "best_of" in body:
        _take_best_of(body, params)
    _read_as_openai(params)
    wide = flag(body, "use_beam_search") or "beam_width" in body
    if wide:
        params.setdefault("beams", params.get("num_return_sequences", 1))
        params.setdefault("search", "trie")
    name = params["search"] = chosen(params, served.args.search)
    if isinstance(name, str) and name in REGISTRY:
        _drop_plain(params, name)
    return params


def _take_best_of(body: Mapping[str, Any], params: dict[str, Any]) -> None:
    """Ask the search for `best_of` outputs instead of `n`. Raises UsageError."""
    wanted = params.get("num_return_sequences", 1)
    check_integer("n", wanted, 1)
    check_integer("best_of", body["best_of"], 1)
    if body["best_of"] < wanted:
        raise UsageError(f"best_of: expected at least n, {wanted}, got {body['best_of']}")
    if body["best_of"] > wanted and flag(body, "stream"):
        raise UsageError("best_of: which outputs are the best is known at the end alone", remedy="leave out stream")
    params["num_return_sequences"] = body["best_of"]


def _read_as_openai(params: dict[str, Any]) -> None:
    """Replace values that searches refuse: `top_p` 0 means the best token, `top_k` -1 all, `seed` -1 none."""
    if params.get("top_p") == 0 and not isinstance(params["top_p"], bool):
        params["top_p"] = LEAST_TOP_P
    if params.get("top_k") == -1:
        params["top_k"] = 0
    if params.get("seed") == -1:
        del params["seed"]
    elif isinstance(seed := params.get("seed"), int) and seed < 0:  # OpenAI's are signed
        params["seed"] = seed & (1 << 63) - 1


def _drop_plain(params: dict[str, Any], name: str) -> None:
    """Leave out parameters that clients always send and that mean nothing to this search."""
    known = parameters(name)
    for key, plain in PLAIN_DRAWS.items():
        if key in params and key not in known and params[key] == plain and not isinstance(params[key], bool):
            del params[key]
    if "xtc_threshold" not in known and "xtc_probability" not in params:
        params.pop("xtc_threshold", None)
    if "seed" in params and "seed" not in known:  # any seed gives the same output
        check_integer("seed", params.pop("seed"), 0)
    if params.get("num_return_sequences") == 1 and "num_return_sequences" not in known:
        del params["num_return_sequences"]


def flag(body: Mapping[str, Any], key: str) -> bool:
    check_flag(key, value := body.get(key, False))
    return value


def _logprobs(body: Mapping[str, Any], kind: str) -> int | None:
    """How many alternatives are requested besides the log-probability of each token; None: no log-probabilities."""
    if kind == COMPLETIONS:
        if "top_logprobs" in body:
            raise UsageError("top_logprobs: it belongs to /v1/chat/completions; here logprobs is the number")
        if "logprobs" in body:
            check_integer("logprobs", body["logprobs"], 0, MOST_LOGPROBS)
        return body.get("logprobs")
    wanted, top = flag(body, "logprobs"), body.get("top_logprobs", 0)
    check_integer("top_logprobs", top, 0, MOST_LOGPROBS)
    if top and not wanted:
        raise UsageError("top_logprobs: it needs logprobs: true")
    return top if wanted else None


def usage_wanted(body: Mapping[str, Any]) -> bool:
    """Whether a stream ends with its usage. Raises UsageError."""
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        raise UsageError(f"stream_options: expected an object, got {shortened(repr(options))}")
    wanted = False if options.get("include_usage") is None else options["include_usage"]
    check_flag("stream_options.include_usage", wanted)
    return wanted


def plain_messages(messages: Any) -> Any:
    """Messages whose contents are texts: contents in parts become the parts' texts. Raises UsageError."""
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

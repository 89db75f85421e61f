"""Answers in OpenAI's format: completions, stream chunks, usage, errors."""

import codecs
import json
import re
import time
from collections.abc import Collection, Iterator, Sequence
from itertools import starmap
from typing import Any

from engine.contract import Output, SearchResult
from engine.errors import ContextError, CoppiceError, KVMemoryError, UsageError
from engine.load.pools import is_out_of_memory
from engine.rules.constraint import ConstraintError
from engine.serve.calls import ToolUse
from engine.serve.fields import Asked
from engine.serve.names import CHAT
from engine.serve.stepper import Busy
from engine.text.thinking import Thoughts

FAULTS = {500: "the server failed; its stderr says why", 503: "the server has no memory for this now"}
TOO_LONG = "the prompt is too long: "  # words that LiteLLM looks for
FIELD = re.compile(r"[\w.\[\]]+", re.ASCII)
FILE = re.compile(r"[\\/]|\.[A-Za-z]")  # in the `where` of an error: a file, which clients do not know
# Paths of this server in a message. URLs match as a group; routes, pages of docs/ and references in schemas do not.
PATH = re.compile(
    r"(https?://[^\s'\",;()]+)|(?<![\w#/.])(?!/v1/|docs/[\w-]+\.md)(?:[A-Za-z]:\\|~?/|[\w.-]+/)[^\s'\",;:()]+"
)
FINISH = {"eos": "stop", "stop": "stop", "constraint": "stop", "length": "length", "interrupted": "length"}


class Answers:
    """Writes the answers to one request.

    Args:
        identity: the id of the completion.
        asked: the request.
    """

    last = b"data: [DONE]\n\n"  # the last event of a stream

    def __init__(self, identity: str, asked: Asked):
        self.asked, self.identity, self.created = asked, identity, int(time.time())
        self.chat = asked.kind == CHAT
        # Such answers are slow to write, so a thread writes them.
        self.large = asked.tools is not None or any(one.request.logprobs is not None for one in asked.checked)
        self._replies: dict[int, Reply] = {}
        self._begun: set[int] = set()

    def whole(self, results: Sequence[SearchResult]) -> dict[str, Any]:
        """The answer without a stream."""
        asked = self.asked
        answers, scores = results[: len(results) - asked.scored], results[len(results) - asked.scored :]
        outputs = {
            i * asked.n + j: output
            for i, result in enumerate(answers or scores)
            for j, output in enumerate(self._best(result) if answers else [*result.outputs] * asked.n)
        }
        choices = [self._choice(index, output) for index, output in outputs.items()]
        for choice in choices if scores else ():
            index = choice["index"]
            self._add_prompt(choice, scores[index // asked.n], self._shown(outputs[index]))
        return self._head("chat.completion" if self.chat else "text_completion") | {
            "choices": choices,
            "usage": usage(answers or scores, asked.drawn),
            "coppice": self._about(answers or scores),
        }

    def _best(self, result: SearchResult) -> Sequence[Output]:
        """The outputs of the answer: if there are more, those with the highest log-probability per token."""
        outputs = result.outputs[: self.asked.drawn]
        if self.asked.drawn > self.asked.n:
            outputs = sorted(outputs, key=lambda one: (one.logprob or 0.0) / max(1, len(one.token_ids)), reverse=True)
        return outputs[: self.asked.n]

    # --- streams ---

    def opening(self) -> Iterator[dict[str, Any]]:
        """Chunks before anything has happened."""
        yield from ()

    def text(self, prompt: int, text: str) -> Iterator[dict[str, Any]]:
        """Chunks for further text of the best output of a prompt."""
        yield from self._text(prompt * self.asked.n, text)

    def end(self, prompt: int, result: SearchResult) -> Iterator[dict[str, Any]]:
        """Chunks for the rest: the best output's end, and the other outputs."""
        for j, output in enumerate(result.outputs[: self.asked.n]):
            index = prompt * self.asked.n + j
            yield from self._text(index, output.text if j else "", last=True)
            fields: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
            called = index in self._replies and self._replies[index].calls > 0
            fields |= {"logprobs": self._logprobs(output, prompt), "finish_reason": self._finish(output, called)}
            yield self._chunk([{"index": index, **fields, "coppice": self._about_output(output)}])

    def close(self, results: Sequence[SearchResult]) -> Iterator[dict[str, Any]]:
        """The last chunk, if it was asked for."""
        if self.asked.include_usage:
            yield self._chunk([]) | {"usage": usage(results, self.asked.drawn), "coppice": self._about(results)}

    def event(self, data: dict[str, Any]) -> bytes:
        """A chunk as it is sent: a server-sent event."""
        return b"data: " + encoded(data) + b"\n\n"

    def failed(self, error: CoppiceError) -> bytes:
        """The last event of a stream that fails."""
        return self.event(error_body(error))

    def _text(self, index: int, text: str, last: bool = False) -> Iterator[dict[str, Any]]:
        if not self.chat:
            if self.asked.echoed and index not in self._begun:
                self._begun.add(index)
                text = self._echo(index) + text
            if text:
                yield self._chunk([{"index": index, "text": text, "logprobs": None, "finish_reason": None}])
            return
        if index not in self._replies:
            self._replies[index] = Reply(self.asked.thoughts, self.asked.tools)
        reply = self._replies[index]
        for delta in [*reply.push(text), *(reply.finish() if last else ())]:
            yield self._delta(index, delta)
        if last and index not in self._begun:
            yield self._delta(index, {"content": ""})

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", **delta}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head("chat.completion.chunk" if self.chat else "text_completion") | {"choices": choices}
        return chunk | ({"usage": None} if self.asked.include_usage else {})

    # --- parts ---

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.identity, "object": kind, "created": self.created, "model": self.asked.served.name}

    def _about(self, results: Sequence[SearchResult]) -> dict[str, Any]:
        """Fields that OpenAI's answers lack: the search, the drawn seed, figures, where traces are."""
        about: dict[str, Any] = {"search": self.asked.name, "stats": [result.stats for result in results]}
        if self.asked.seed is not None:
            about["seed"] = self.asked.seed
        if self.asked.traces:
            about["traces"] = [f"/trace/{trace.name}" for trace in self.asked.traces]
        return about

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        fields: dict[str, Any] = {"text": self._echo(index) + output.text}
        if self.chat:
            fields = {"message": message_of(output.text, self.asked.thoughts, self.asked.tools)}
        called = "tool_calls" in fields.get("message", {})
        logprobs = self._logprobs(output, index // self.asked.n)
        fields |= {"logprobs": logprobs, "finish_reason": self._finish(output, called)}
        return {"index": index, **fields, "coppice": self._about_output(output)}

    def _finish(self, output: Output, called: bool) -> str:
        reason = FINISH.get(output.finish_reason, "stop")
        return "tool_calls" if called and reason == "stop" else reason

    def _echo(self, index: int) -> str:
        """The prompt that the text of a choice begins with, if it was asked for."""
        return self.asked.echoed[index // self.asked.n] if self.asked.echoed else ""

    def _add_prompt(self, choice: dict[str, Any], result: SearchResult, new: Sequence[int]) -> None:
        """Add the log-probabilities of the prompt's tokens to a choice with these new tokens; its first token has
        none."""
        asked, [score] = self.asked, result.scores or []
        ids = [*asked.checked[choice["index"] // asked.n - asked.scored].ids, *score.token_ids]
        tops = score.top_logprobs or [[] for _ in score.token_ids]
        if asked.echoed and asked.logprobs is not None:
            own = choice["logprobs"] or {"tokens": [], "token_logprobs": [], "top_logprobs": []}
            rows = zip(score.token_ids, score.token_logprobs, tops, strict=True)
            found = [self._alternatives(token, logp, top[: asked.logprobs]) for token, logp, top in rows]
            numbers = [None, *score.token_logprobs, *own["token_logprobs"]]
            choice["logprobs"] = self._columns(
                [*ids, *new], numbers, [None, *found, *own["top_logprobs"]], choice["text"]
            )
        if asked.prompt_logprobs is not None:
            rows = zip(score.token_ids, score.token_logprobs, score.ranks or [], tops, strict=True)
            places: list[Any] = [None]
            for token, logp, rank, top in rows:
                likely = [(t, x, i) for i, (t, x) in enumerate(top[: asked.prompt_logprobs], 1)]
                places.append({str(t): self._ranked(t, x, i) for t, x, i in [*likely, (token, logp, rank)]})
            choice["prompt_logprobs"] = places

    def _ranked(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        """A token of `prompt_logprobs`, as vLLM writes it."""
        return {"logprob": logprob, "rank": rank, "decoded_token": self.asked.served.spelling(token)[0]}

    def _about_output(self, output: Output) -> dict[str, Any]:
        about: dict[str, Any] = {"logprob": output.logprob, "score": output.score}
        about["finish_reason"] = output.finish_reason
        if output.item is not None:
            about["item"] = output.item
        return about | {"token_ids": output.token_ids} if self.asked.token_ids else about

    def _logprobs(self, output: Output, prompt: int) -> dict[str, Any] | None:
        """The log-probabilities of an output's tokens; None if they are not wanted.

        The token that ended it is left out, except with an echo: vLLM has it there, and lm-evaluation-harness needs it.
        """
        if output.token_logprobs is None:
            return None
        tokens = self._shown(output)
        alternatives = output.top_logprobs or [[] for _ in tokens]
        rows = [*zip(tokens, output.token_logprobs, alternatives, strict=False)]
        if self.chat:
            return {
                "content": [self._token(t, x) | {"top_logprobs": [*starmap(self._token, top)]} for t, x, top in rows]
            }
        healed = len(self.asked.checked[prompt].healed)
        return self._columns(tokens, [x for _, x, _ in rows], [*starmap(self._alternatives, rows)], output.text, healed)

    def _shown(self, output: Output) -> Sequence[int]:
        """The tokens of an output that have log-probabilities."""
        if output.token_logprobs is None:
            return ()
        tokens, reason = output.token_ids, output.finish_reason
        if reason == "stop":  # at a special token, if it has no text
            ended = not self.asked.served.engine.tokenizer.skipped_ids.isdisjoint(tokens[-1:])
        else:
            ended = reason == "eos"
        return tokens[: -1 if ended and not self.asked.echoed else None]

    def _columns(
        self, tokens: Sequence[int], logprobs: list[Any], tops: list[Any], whole: str, healed: int = 0
    ) -> dict[str, Any]:
        """The log-probabilities of the tokens of a completion's text, as OpenAI writes them; see `_offsets`."""
        spelled = [self.asked.served.spelling(token) for token in tokens]
        offsets = _offsets(spelled, whole, self.asked.served.engine.tokenizer.special_spellings, healed)
        return {
            "tokens": [text for text, _ in spelled],
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _alternatives(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """The log-probabilities of the likeliest tokens at a place, by their texts, and of the token that stands there,
        as OpenAI has it. Of tokens that are spelled alike, such as parts of characters, the likeliest."""
        found: dict[str, float] = {}
        for other, its in (*top, (token, logprob)):
            found.setdefault(self.asked.served.spelling(other)[0], its)
        return found

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        text, data = self.asked.served.spelling(token)
        return {"token": text, "logprob": logprob, "bytes": data}


def _offsets(spelled: Sequence[tuple[str, list[int]]], whole: str, control: Collection[str], healed: int) -> list[int]:
    """Where each token begins in a text; one that begins inside a character, where this character begins.

    Args:
        spelled: the tokens' spellings and bytes. The spelling of a part of a character is not in the text.
        whole: the text.
        control: spellings of control tokens, which take no room unless the text spells them.
        healed: characters of the first tokens that belong to the prompt.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, at = list[int](), -healed  # `at`: the characters that have begun
    for text, data in spelled:
        first = at
        for i, byte in enumerate(data if text not in control or whole.startswith(text, at) else ()):
            held = len(decoder.getstate()[0])
            found = len(decoder.decode(bytes([byte])))
            # A byte that does not continue the held ones begins a character; they become a replacement character.
            at += held == 0 or found > (decoder.getstate()[0] == b"")
            first = at - 1 if i == 0 else first
        offsets.append(max(0, first))
    return offsets


def usage(results: Sequence[SearchResult], n: int) -> dict[str, Any]:
    """Tokens of prompts and outputs."""
    prompt = sum(result.stats["prompt_tokens"] for result in results)
    prompt += sum(len(score.token_ids) for result in results for score in result.scores or ())  # after the first
    new = sum(len(output.token_ids) for result in results for output in result.outputs[:n])
    reused = sum(result.stats["reused_tokens"] for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": reused},
    }


def encoded(data: dict[str, Any]) -> bytes:
    """JSON; a number that JSON does not have becomes null, a lone surrogate an escape."""
    try:
        text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(json.loads(json.dumps(data), parse_constant=lambda _: None), separators=(",", ":"))
    return text.encode(errors="backslashreplace")


# --- the message of a chat ---


class Reply:
    """Reads a reply as it arrives.

    Args:
        thoughts: how it writes thoughts; None without a chat template.
        tools: how it may call functions; None: not at all.

    Attributes:
        calls: number of calls so far.
    """

    def __init__(self, thoughts: Thoughts | None, tools: ToolUse | None):
        self._thoughts, self._tools = (thoughts or Thoughts()).stream(), tools
        self._calls = tools.stream() if tools is not None else None
        self.calls = 0

    @property
    def thought(self) -> bool:
        """Whether the reply has a thought."""
        return self._thoughts.thought

    def push(self, text: str) -> list[dict[str, Any]]:
        """Add text. Returns the changes of the message that are certain, in the form of OpenAI's streams."""
        return [delta for part in self._thoughts.push(text) for delta in self._deltas(*part)]

    def finish(self) -> list[dict[str, Any]]:
        """Return the changes that were held back."""
        found = [delta for part in self._thoughts.finish() for delta in self._deltas(*part)]
        return found + (self._written(self._calls.finish()) if self._calls is not None else [])

    def _deltas(self, text: str, inside: bool) -> list[dict[str, Any]]:
        if inside:
            return [{"reasoning_content": text}]
        return self._written([text] if self._calls is None else self._calls.push(text))

    def _written(self, parts: list[Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, str):
                found.append({"content": part})
            elif self._tools is not None:
                found.append({"tool_calls": [{"index": self.calls, **self._tools.written(part)}]})
                self.calls += 1
        return found


def message_of(text: str, thoughts: Thoughts | None, tools: ToolUse | None) -> dict[str, Any]:
    """The message of a whole reply."""
    reply = Reply(thoughts, tools)
    deltas = [*reply.push(text), *reply.finish()]
    content = "".join(delta.get("content", "") for delta in deltas)
    calls = [{k: v for k, v in call.items() if k != "index"} for d in deltas for call in d.get("tool_calls", ())]
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    message["refusal"] = None
    if reply.thought:
        message["reasoning_content"] = "".join(delta.get("reasoning_content", "") for delta in deltas)
    return message | {"tool_calls": calls} if calls else message


# --- errors ---


class HttpError(CoppiceError):
    """An error of HTTP rather than of the engine."""

    def __init__(self, status: int, what: str, *, code: str, remedy: str = ""):
        super().__init__(what, remedy=remedy)
        self.status, self.code = status, code


def status_of(error: CoppiceError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, HttpError):
        return error.status
    if isinstance(error, Busy):
        return 429
    if error.__cause__ is not None and is_out_of_memory(error.__cause__):
        return 503
    return 400 if isinstance(error, UsageError | KVMemoryError | ConstraintError) else 500


def error_body(error: CoppiceError) -> dict[str, Any]:
    """An error in the form of OpenAI's API, without the server's paths; the server's faults appear only in its log."""
    status = status_of(error)
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    message = _message(error, status)
    name = message.partition(": ")[0]
    param = name if status == 400 and FIELD.fullmatch(name) else None
    return {"error": {"message": message, "type": kind, "param": param, "code": error.code}}


def _message(error: CoppiceError, status: int) -> str:
    if isinstance(error, HttpError):
        return "; ".join(filter(None, (error.what, error.remedy)))
    if status in FAULTS:
        return FAULTS[status]
    where = "" if FILE.search(error.where) else error.where
    lead = TOO_LONG if isinstance(error, ContextError) else ""
    parts = (part.removeprefix("params.") for part in (lead + error.what, where, error.remedy) if part)
    return PATH.sub(lambda found: found[1] or "(a path)", "; ".join(parts))


def error_headers(error: CoppiceError) -> dict[str, str]:
    """Headers that tell clients whether and when to try again."""
    status = status_of(error)
    if isinstance(error, Busy):
        return {"retry-after": str(error.seconds)}
    if status == 401:
        return {"www-authenticate": "Bearer"}
    return {"retry-after": "1"} if status == 503 else {"x-should-retry": "false"} if status >= 500 else {}

"""A request: what a caller wants, checked against the models that answer it; and the events of its answer."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor

from engine.cache.prefixes import shared_length
from engine.cache.tree import TokenTree
from engine.contract import Report, Search, SearchResult
from engine.contract.checks import attributed, check_search
from engine.contract.distinct import check_distinct
from engine.contract.scoring import Scoring
from engine.contract.trace import Trace
from engine.drafts import Drafter
from engine.drafts.requested import RequestedDrafters
from engine.errors import ContextError, UsageError, check_flag, check_integer, shortened
from engine.load.loading import LoadedModel
from engine.load.options import RewardFunction
from engine.load.pools import check_memory, check_rows
from engine.rewards import Messages, check_messages
from engine.rules import ONE_OF, Rules, Words
from engine.rules.begin import heal, spellings
from engine.rules.catalogue import Catalogue
from engine.rules.constrained import Constrained
from engine.rules.constraint import Constraint
from engine.rules.logprobs import MOST_ALTERNATIVES, check_logprobs
from engine.step.drafting import EngineDrafts
from engine.step.jobs import Job
from engine.text.stopping import StopStrings, check_stop, text_after
from engine.text.tokenizer import Tokenizer
from engine.words import TEXT, TEXT_SUM
from models.draft_heads import DraftHead


@dataclass(frozen=True)
class Request(Rules):
    """One prompt, the search that answers it, its limits, and `Rules`, whose fields are given by name.

    Args:
        prompt: token ids, or text (encoded with the special tokens that the tokenizer adds).
        search: a search's configuration.
        max_new_tokens: limit of each output; the model's context may end it earlier.
        eos_token_ids: tokens that end an output; None takes the checkpoint's.
        ignore_eos: no token ends an output.
        stop: strings that end an output; they are cut off its text. The spelling of a special token stands for the
            token.
        messages: the messages from which the prompt was rendered, for a reward model with a chat template; it reads a
            plain prompt as a single user message.
        reward: (prompt, texts) -> scores, instead of a reward model. The prompt is `messages` if there are any,
            otherwise its text.
        trace: records the steps of the search; each request needs its own.
        logprobs: how many alternatives to return besides the log-probability of each token, 0 for none, see `Output`;
            None: no log-probabilities of tokens.
        parse_special: parse spellings of control tokens in a text prompt as these tokens. Leave it off if others can
            write into the prompt.
        heal: the prompt may end inside a word: its last tokens are generated again, in any tokenisation of the same
            text, see `engine.rules.begin`. Outputs have them in `token_ids` and `logprob`, but not in `text`. Cannot be
            combined with constraints other than `begin`.
        distinct: return outputs with distinct texts instead of several tokenisations of one text. "text": the best
            output of each text; "text-sum": the best one, ranked and reported with the log-sum-exp of the
            log-probabilities and of the scores of all. All outputs that the search finds are considered, for instance
            all hypotheses that beams finish; if they have too few distinct texts, fewer than `num_return_sequences` are
            returned. None: outputs unchanged.
        adapter: the name of one of the engine's adapters, or "none"; None uses the first one, if there is any.
        cache_salt: only requests with the same salt share cached prefixes. With a salt per user, response times do not
            reveal what others have asked. None: the request neither uses nor leaves cached prefixes. See `Engine.load`.
        drafts: the drafts evaluated in the request's passes: the engine's (True, see `LoadOptions`), none (False), or
            those of a name accepted by `LoadOptions.drafts` or of an `engine.drafts.Drafter`, whatever the engine has.
            Answers do not depend on it.
    """

    prompt: Sequence[int] | str
    search: Search
    max_new_tokens: int = 256
    eos_token_ids: Iterable[int] | None = None
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    messages: Messages | None = None
    reward: RewardFunction | None = None
    trace: Trace | None = None
    logprobs: int | None = None
    adapter: str | None = None
    cache_salt: str | None = ""
    parse_special: bool = False
    heal: bool = False
    distinct: str | None = None
    drafts: bool | str | Drafter = True


class RequestOptions(TypedDict, total=False):
    """The fields of `engine.Request` except prompt and search; see there."""

    max_new_tokens: int
    eos_token_ids: Iterable[int] | None
    ignore_eos: bool
    stop: Sequence[str]
    messages: Messages | None
    reward: RewardFunction | None
    trace: Trace | None
    logprobs: int | None
    adapter: str | None
    cache_salt: str | None
    parse_special: bool
    heal: bool
    distinct: str | None
    drafts: bool | str | Drafter
    constraint: Constraint | None
    constraint_scores: str
    begin: str | bytes | None
    choices: Words | None
    json_schema: Mapping[str, Any] | bool | str | None
    regex: str | None
    grammar: str | None
    catalogue: Catalogue | str | Path | None
    logit_bias: Mapping[int | str, float] | None
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[Any] | None
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    no_repeat_ngram_size: int
    bad_words: Words
    min_length: int
    min_new_tokens: int | None
    prefix_allowed_tokens_fn: Callable[[int, Tensor], Any] | None
    suppress_tokens: Sequence[int]
    begin_suppress_tokens: Sequence[int]
    logits_processor: Callable[[Tensor, Tensor], Tensor] | Sequence[Callable[[Tensor, Tensor], Tensor]] | None


class StreamOptions(RequestOptions, total=False):
    """The same, plus the additional arguments of `Engine.stream`."""

    interrupted: Callable[[], bool]
    taken: Callable[[], bool]


def check_options(options: Mapping[str, Any], search: Any) -> None:
    """Check the names of options. Raises UsageError."""
    known = RequestOptions.__annotations__
    for name in options:
        if name in known:
            continue
        if hasattr(search, name):
            remedy = f"it is a parameter of the search: {type(search).__name__}({name}=...)"
        else:
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]}?" if near else "help(engine.RequestOptions) lists all"
        raise UsageError(f"{name[:100]}: no such option", remedy=remedy)


def requests_of(prompts: Iterable[Sequence[int] | str], search: Search, options: RequestOptions) -> Iterator[Request]:
    """The requests of `Engine.generate`, made one by one. Raises UsageError at once."""
    if isinstance(prompts, str):
        raise UsageError("prompts: expected a list of prompts, got one string", remedy="write [prompt]")
    if not isinstance(prompts, Iterable):
        raise UsageError(f"prompts: expected a list of prompts, got {prompts!r}", remedy="write [prompt]")
    check_options(options, search)
    return (Request(prompt, search, **options) for prompt in prompts)


@dataclass(frozen=True)
class Prefill:
    """Progress of the prefill: `done` of `total` prompt tokens are evaluated."""

    done: int
    total: int


@dataclass(frozen=True)
class Text:
    """The next part of the best output's text, as soon as it is final."""

    text: str


@dataclass(frozen=True)
class Progress:
    """A step of the search; `report` has its statistics and its best candidate so far, `tree` is the live tree."""

    report: Report
    tree: TokenTree


@dataclass(frozen=True)
class Done:
    """The end; the texts of all `Text` events, joined, are the text of the best output."""

    result: SearchResult


Event = Prefill | Text | Progress | Done


def event_of(job: Job, seen: Prefill | Progress | None) -> Prefill | Progress | None:
    """The state of a search; None if it equals the previous event, or if the search has ended."""
    if job.done or not job.trees:
        return None
    tree = job.trees[0]
    if not job.prefilled:
        event = Prefill(tree.trunk.cached, tree.prompt_length)
        return None if event == seen else event
    shown = isinstance(seen, Progress) and seen.report is job.report
    return None if shown or job.report == Report() else Progress(job.report, tree)  # it may pause before it reports


@dataclass(frozen=True)
class Models:
    """The models that answer requests.

    Args:
        target: continues prompts.
        others: companions by role: "draft", "reward".
        reward: a function instead of a reward model.
        drafts: the engine's drafter; None: none.
        drafters: other drafters, which requests may choose.
    """

    target: LoadedModel
    others: Mapping[str, LoadedModel] = field(default_factory=dict)
    reward: RewardFunction | None = None
    drafts: EngineDrafts | None = None
    drafters: RequestedDrafters = field(default_factory=RequestedDrafters)

    @property
    def by_role(self) -> dict[str, LoadedModel]:
        return {"target": self.target, **self.others}


@dataclass(frozen=True)
class Checked:
    """A request that has been checked against the models.

    Args:
        ids: the prompt's token ids.
        limit: most new tokens, in the models' contexts.
        eos: tokens that end an output.
        stops: None without stop strings.
        constrained: edits its rows; None if nothing does. It belongs to one run of the request.
        healed: the end of the prompt's text with which outputs begin; "" if nothing was cut.
        drafts: the request's drafter; None: none.
    """

    request: Request
    ids: list[int]
    limit: int
    eos: frozenset[int] = frozenset()
    stops: StopStrings | None = None
    constrained: Constrained | None = None
    healed: str = ""
    drafts: EngineDrafts | None = None

    def text(self, tokenizer: Tokenizer | None, tokens: Sequence[int]) -> str:
        """The text of an output, without stop strings."""
        if tokenizer is None:
            return ""
        text = text_after(tokenizer, tokens, self.healed, self.ids)
        return self.stops.cut(text) if self.stops is not None else text


def check_request(models: Models, request: Request, share: float = 1.0) -> Checked:
    """Check a request against the models and a share of their memory. Raises UsageError or KVMemoryError."""
    target = models.target
    if target.shape.scores:
        raise UsageError(
            "this checkpoint is a reward model: it scores texts and generates none",
            where=target.name,
            remedy="give a checkpoint whose architecture ends in ForCausalLM",
        )
    if isinstance(request.search, type) or not hasattr(request.search, "run"):
        raise UsageError(f"search: expected a configuration such as search.Trie(), got {request.search!r}")
    target.adapter(request.adapter)
    ids, eos = _prompt(target, request.prompt, request.parse_special), _ends(target, request)
    _check_fields(request)
    _check_distinct(target, request)
    request, ids, healed = _heal(target, request, ids)
    stops = StopStrings(target.need_tokenizer(), request.stop, healed, ids) if request.stop else None
    check_search(request.search)
    _check_roles(models, request)
    limit, vocab_size = _limit(models, request, len(ids)), target.runner.vocab_size
    with attributed(type(request.search)):
        request.search.check(vocab_size, eos)
    thoughts = target.template.thoughts if target.template else None
    constrained = request.at_work(ids, limit, vocab_size, eos, target.tokenizer, thoughts)
    check_memory(target.runner.pool, request.search, len(ids), limit, share)
    check_rows(target.runner.most_rows, request.search)
    drafts = models.drafters.of(request.drafts, models)
    drafts = None if request.search.drafts_itself else drafts
    return Checked(request, ids, limit, eos, stops, constrained, healed, drafts)


def _heal(target: LoadedModel, request: Request, ids: list[int]) -> tuple[Request, list[int], str]:
    """Heal the prompt of a request that asks for it: require outputs to begin with the removed text, and allow and
    require more tokens.

    Returns the request, its prompt, and the text that was removed. Raises UsageError.
    """
    if not request.heal:
        return request, ids, ""
    if other := next((name for name in ONE_OF if name != "begin" and getattr(request, name) is not None), None):
        raise UsageError(f"heal: it cannot be combined with {other}")
    kept, data = heal(ids, spellings(target.need_tokenizer(), target.runner.vocab_size))
    if not data:
        return request, ids, ""
    begin = request.begin.encode() if isinstance(request.begin, str) else request.begin or b""
    removed, least = len(ids) - len(kept), request.min_new_tokens
    if least:  # 0 requires nothing
        check_integer("min_new_tokens", least, 0)
        request = replace(request, min_new_tokens=least + removed)
    new = request.max_new_tokens + removed
    return replace(request, begin=data + begin, max_new_tokens=new), kept, data.decode()


def _prompt(target: LoadedModel, prompt: Sequence[int] | str, parse_special: bool) -> list[int]:
    """The token ids of a prompt. Raises UsageError."""
    check_prompt(prompt)
    check_flag("parse_special", parse_special)
    ids = target.encode(prompt, parse_special) if isinstance(prompt, str) else list(prompt)
    check_ids(target, ids)
    return ids


def check_prompt(prompt: object, name: str = "prompt") -> None:
    """Check that a value is text or a sequence, as of token ids. Raises UsageError."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):  # text is one too
        raise UsageError(f"{name}: expected token ids or text, got {shortened(repr(prompt))}")


def check_ids(target: LoadedModel, ids: Sequence[int], name: str = "", what: str = "the prompt") -> None:
    """Check that a prompt is not empty, fits the context and has only valid ids.

    Args:
        name: the argument that has it; "": errors name "prompt" or nothing.
        what: the name of the prompt in errors.

    Raises:
        UsageError: it does not.
    """
    lead, wanted = f"{name}: " if name else "", f"{name or 'prompt'}: expected token ids"
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise UsageError(f"{wanted}, got {ids!r}")
    if not ids:
        bare = target.tokenizer is not None and not target.tokenizer.encode("")
        why = ", and this tokenizer adds no token of its own to begin with" if bare else ""
        raise UsageError(f"{name or 'prompt'}: {what} is empty{why}", remedy="give at least one token to continue")
    reach = target.shape.max_positions
    if reach is not None and len(ids) > reach:
        selected, remedy = target.runner.model.config.selected, "shorten it"
        if selected is None or reach < selected:
            remedy += "; a model that rotates positions takes more with a larger --context"
        raise ContextError(
            f"{lead}{what} has {len(ids)} tokens, this model's maximum context length is {reach}", remedy=remedy
        )
    vocab = target.shape.vocab_size
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab:
            got = shortened(repr(token))
            raise UsageError(f"{wanted} from 0 to {vocab - 1}, got {got}", where=f"token {i}")


def _ends(target: LoadedModel, request: Request) -> frozenset[int]:
    """The tokens that end an output. Raises UsageError."""
    check_integer("max_new_tokens", request.max_new_tokens, 1)
    if isinstance(request.eos_token_ids, str) or not isinstance(request.eos_token_ids, Iterable | None):
        raise UsageError(f"eos_token_ids: expected a list of token ids, got {shortened(repr(request.eos_token_ids))}")
    ends = target.eos_token_ids if request.eos_token_ids is None else list(request.eos_token_ids)
    for token in ends:
        if type(token) is not int or token < 0:
            raise UsageError(f"eos_token_ids: expected a list of token ids, got {shortened(repr(token))} in it")
    check_flag("ignore_eos", request.ignore_eos)
    return frozenset() if request.ignore_eos else frozenset(ends)


def _check_fields(request: Request) -> None:
    """Check the fields that need no model, except those of `Rules`. Raises UsageError."""
    check_stop(request.stop)
    check_flag("heal", request.heal)
    check_logprobs(request.logprobs)
    if not isinstance(request.cache_salt, str | None):
        raise UsageError(f"cache_salt: expected a text or None, got {request.cache_salt!r}")
    check_messages(request.messages)
    if not isinstance(request.trace, Trace | None):
        raise UsageError(f"trace: expected a Trace, got {request.trace!r}")
    if request.trace is not None and request.trace.begun:
        raise UsageError("trace: it records another request already", remedy="give each request a trace of its own")
    check_callable("reward", request.reward, " of (prompt, texts)")


def _check_distinct(target: LoadedModel, request: Request) -> None:
    """Check `distinct`. Raises UsageError."""
    if (how := request.distinct) is None:
        return
    check_distinct(how)
    target.need_tokenizer()
    if how == TEXT_SUM and "reward" in request.search.models:
        raise UsageError("distinct: rewards of one text cannot be added", remedy=f"give {TEXT}")


def _check_roles(models: Models, request: Request) -> None:
    """Check that a search's models are available, and that it may write its files. Raises UsageError."""
    for role in request.search.models:
        if role not in models.others and not (role == "reward" and (request.reward or models.reward)):
            kind = {"draft": "a smaller one of the same tokenizer", "reward": "one with a scalar head"}[role]
            raise UsageError(f"this search needs a {role} model", remedy=f"give --{role} DIR, {kind}")
        if role == "draft" and isinstance(models.others[role].runner.model, DraftHead):
            remedy = "give a model by --draft; a head drafts under other searches, by --drafts"
            raise UsageError("this search needs a draft model, and the draft is a head of the model", remedy=remedy)
    if models.target.runner.shared and getattr(request.search, "save", None) is not None:
        raise UsageError("save: processes that share a model save nothing", remedy="leave out --aded-save")


def _limit(models: Models, request: Request, prompt: int) -> int:
    """Most new tokens of a request, in the contexts of the models."""
    new, reach = request.max_new_tokens, models.target.shape.max_positions
    if reach is not None:
        new = min(new, reach - prompt + 1)  # the last token is never evaluated: it needs no position
    if "draft" in request.search.models and (beside := models.others["draft"].shape.max_positions) is not None:
        new = min(new, max(1, beside - prompt + 1))  # it reads the same tokens
    return new


def check_callable(name: str, value: object, arguments: str = "") -> None:
    """Check that a value is a function or None. Raises UsageError."""
    if value is not None and not callable(value):
        raise UsageError(f"{name}: expected a function{arguments}, got {value!r}")


def joint(
    model: LoadedModel, prompt: Sequence[int] | str, texts: Sequence[Sequence[int] | str], parse_special: bool
) -> tuple[list[int], Scoring]:
    """The common prompt of continuations, and the search that scores them.

    A continuation's tokens are those of the joined text after the longest prefix that it shares with the prompt's own
    tokens: a token that spans the boundary belongs to the continuation.

    Args:
        prompt: text, or token ids.
        texts: continuations, text or token ids; one that is text after a prompt of ids is tokenised alone.

    Raises:
        UsageError: a prompt or continuation has the wrong type, an id is out of range, no token precedes all
            continuations, or a text does not fit the context.
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise UsageError(f"continuations: expected a list of texts or of token ids, got {shortened(repr(texts))}")
    ids = _prompt(model, prompt, parse_special)
    wholes, starts = list[list[int]](), list[int]()
    for i, text in enumerate(texts):
        if isinstance(text, str) and isinstance(prompt, str):
            whole = model.encode(prompt + text, parse_special) if text else ids
            starts.append(shared_length(ids, whole))
        elif isinstance(text, str):
            whole = ids + model.need_tokenizer().encode(text, add_special=False)
            starts.append(len(ids))
        elif isinstance(text, Sequence) and not isinstance(text, bytes | bytearray):
            whole = ids + list(text)
            starts.append(len(ids))
        else:
            raise UsageError(f"continuations[{i}]: expected a text or token ids, got {shortened(repr(text))}")
        for part in (whole[:-1] or whole, whole[-1:]):
            check_ids(model, part, f"continuations[{i}]", "the prompt with its continuation")
        wholes.append(whole)
    first = min(starts, default=len(ids))
    if first == 0:
        raise UsageError(
            "the prompt's first token changes with the continuation, so nothing comes before it",
            remedy="give a longer prompt",
        )
    return ids[:first], Scoring(tuple(tuple(whole[first:]) for whole in wholes), tuple(n - first for n in starts))


def score_request(
    model: LoadedModel,
    prompt: Sequence[int] | str,
    texts: Sequence[Sequence[int] | str],
    top: int = 0,
    parse_special: bool = False,
) -> Request:
    """The request that scores continuations, see `Engine.score`. Raises UsageError."""
    check_integer("top_logprobs", top, 0, MOST_ALTERNATIVES)
    ids, search = joint(model, prompt, texts, parse_special)
    longest = max([1, *map(len, search.continuations)])
    return Request(ids, replace(search, top=min(top, model.runner.vocab_size)), longest, ignore_eos=True)

"""The contract between searches and the engine.

A search is a generator. It yields `Evaluate` and is sent an `Answer`; it yields `Report` or `Pause` and is sent None;
it returns a `SearchResult`. When the KV pool is full, the driver throws KVMemoryError at the `Evaluate` that did not
fit. None of its nodes is evaluated then, so the search may drop nodes and yield another `Evaluate`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.contract.top_sums import Next, TopSums, find_top_sums
from engine.text.thinking import Thoughts
from engine.text.tokenizer import Tokenizer

Read = Callable[[Tensor, Tensor | None], Tensor]
TakeHidden = Callable[[Tensor], None]
FINISH_REASONS = ("eos", "stop", "length", "constraint", "interrupted")


class Answer(NamedTuple):
    """The answer to an `Evaluate`.

    Attributes:
        rows_NV: float32, on the model's device: natural logarithms of probabilities, one row per node in the order of
            the request, normalised over the model's vocabulary; then ids beyond the tokenizer's are set to -inf, and so
            are tokens that a constraint forbids (see `engine.Rules`). [N, 1], a score per node, for a tree of a
            scalar-head model. [0, V] if the request is for top sums, or for hidden rows.
        numbers: the result of `Evaluate.read`, or the top sums, float64 [n], on the host; None without either.
    """

    rows_NV: Tensor
    numbers: Tensor | None


@dataclass(frozen=True)
class Evaluate:
    """A request for the next-token log-probabilities after `nodes`; the driver sends an `Answer`.

    Nodes must be live and not evaluated yet; their unevaluated ancestors are evaluated in the same pass.

    Args:
        tree: holds the nodes.
        nodes: at least one.
        read: function of the rows and their peaks (see `kernels.rows.log_softmax`; None if they were not computed),
            both on the model's device. It returns the values that the search needs on the host, float64 [n] on that
            device; the driver copies the values of all searches to the host at once.
        top_sums: ask for top sums instead of rows, which then need not exist: `numbers` has the finite sums, best
            first, then as many positions, row * V + token. Equal sums are ordered by position. Not with `read`.
        next: a hint, with `top_sums` only: the nodes that the search will probably evaluate next. A GPU starts them
            before the answer has reached the host. It changes no answer.
        hidden: a function that is called with the hidden rows [T, E] of the tokens evaluated for this request, parents
            first, in parts, as passes compute them: the head's input, on the model's device and in its dtype, in memory
            that the next pass may overwrite. No log-probabilities are computed. Tokens that are already in the cache,
            such as those of a cached prefix, have no rows. Not with `read` or `top_sums`.
        apart: a hint: the search continues below each node without waiting for the others if it can, see
            `TokenTree.has_row`. It changes no answer.
    """

    tree: TokenTree
    nodes: Sequence[int]
    read: Read | None = None
    top_sums: TopSums | None = None
    next: Next | None = None
    hidden: TakeHidden | None = None
    apart: bool = False

    def answer(self, rows_NV: Tensor, peaks_NB: Tensor | None = None) -> Answer:
        """The answer with these rows and the result of `read` for them, or with their top sums."""
        if self.top_sums is not None:
            return Answer(rows_NV[:0], find_top_sums(rows_NV, peaks_NB, self.top_sums).flatten())
        return Answer(rows_NV, None if self.read is None else self.read(rows_NV, peaks_NB).cpu())


@dataclass(frozen=True)
class Report:
    """The state of a search, for observers.

    Args:
        settled: tokens of the best output that have become certain, after those of earlier reports.
        best: returns the tokens of the best candidate so far.
        info: the algorithm's own figures.
        beams: returns (score, tokens) of the candidates, best first; a score of None is not known yet. `best` and
            `beams` may be called only until the search is resumed.
        ready: returns the result that the search would have if it ended now; None while no output has ended, or while a
            live one currently scores higher. A waiting user may take it. Only the built-in searches set it.
    """

    settled: Sequence[int] = ()
    best: Callable[[], Sequence[int]] | None = None
    info: dict[str, Any] = field(default_factory=dict)
    beams: Callable[[], Sequence[tuple[float | None, Sequence[int]]]] | None = None
    ready: "Callable[[], SearchResult] | None" = None


@dataclass(frozen=True)
class Pause(Report):
    """Nothing to report, but other searches may run a pass before this one continues a long computation."""


@dataclass(frozen=True)
class Output:
    """One answer.

    Args:
        token_ids: new tokens, including end-of-sequence if produced.
        logprob: sum of their log-probabilities under the target model; None if interrupted.
        score: what the search ranks by; None if interrupted, or if a constraint ended the output.
        finish_reason: "eos", "stop" (a stop string), "length", "constraint" (it allows no token) or "interrupted".
        text: the tokens as text, stop string cut off; filled in by the engine.
        item: the id of the output's catalogue item; None without a catalogue, or if a limit cut the output before the
            end of an item. Filled in by the engine.
        token_logprobs: the log-probability of each token in the rows that the search received; they sum to `logprob`.
            None for a token after a sequence that the search did not evaluate. This and the next field are filled in by
            the engine for a request with `logprobs`, otherwise None.
        top_logprobs: at each token's position the most probable tokens and their log-probabilities, best first.
    """

    token_ids: list[int]
    logprob: float | None
    score: float | None
    finish_reason: str
    text: str = ""
    item: str | int | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None

    def named(self, item: str | int) -> "Output":
        """This output with the id of its item; there may be thousands, for which `replace` is slow."""
        made = object.__new__(Output)
        vars(made).update(vars(self), item=item)
        return made


@dataclass(frozen=True)
class ContinuationScore:
    """The log-probabilities of one continuation of a prompt.

    Args:
        token_ids: its tokens.
        token_logprobs: the log-probability of each.
        logprob: their sum.
        is_greedy: whether each token is the most probable one at its position.
        top_logprobs: at each position the most probable tokens and their log-probabilities, best first; None if not
            requested.
        ranks: 1 plus the number of more probable tokens at each position; None if not requested.
    """

    token_ids: list[int]
    token_logprobs: list[float]
    logprob: float
    is_greedy: bool
    top_logprobs: list[list[tuple[int, float]]] | None = None
    ranks: list[int] | None = None

    def record(self) -> dict[str, Any]:
        """The score in an output line of a batch; a token that cannot be has null."""
        finite = [x if x > -math.inf else None for x in (self.logprob, *self.token_logprobs)]
        record = {"logprob": finite[0], "is_greedy": self.is_greedy, "token_ids": self.token_ids}
        return record | {"token_logprobs": finite[1:]}


@dataclass
class SearchResult:
    """Outputs, best first, and statistics of the run (documented in docs/stats.md).

    `scores`: the scores of the given continuations, in order, if scores were requested; then there is no output.
    `embedding`: float32 [E], on the CPU, if an embedding was requested; then there is no output.
    """

    outputs: list[Output]
    stats: dict[str, Any] = field(default_factory=dict)
    scores: list[ContinuationScore] | None = None
    embedding: Tensor | None = None

    def record(self, id: int | str, thoughts: Thoughts | None = None) -> dict[str, Any]:
        """The result as an output line of a batch; `thoughts` separates "reasoning" from "text"."""
        if self.scores is not None:
            return {"id": id, "scores": [score.record() for score in self.scores], "stats": self.stats}
        if self.embedding is not None:
            numbers = [float(f"{x:.9g}") for x in self.embedding.tolist()]  # the fewest digits that identify a float32
            return {"id": id, "embedding": numbers, "stats": self.stats}
        keys = ("text", "token_ids", "logprob", "score", "finish_reason")
        outputs = [{key: getattr(output, key) for key in keys} for output in self.outputs]
        for output, record in zip(self.outputs, outputs, strict=True):
            for key in ("item", "token_logprobs", "top_logprobs"):
                if (value := getattr(output, key)) is not None:
                    record[key] = value
        if thoughts is not None:
            outputs = [_parted(output, thoughts) for output in outputs]
        return {"id": id, "outputs": outputs, "stats": self.stats}


def _parted(output: dict[str, Any], thoughts: Thoughts) -> dict[str, Any]:
    """An output's record with the thought, if there is one, separated from the answer."""
    thought, answer = thoughts.split(output["text"])
    return {"text": answer} | ({} if thought is None else {"reasoning": thought}) | {**output, "text": answer}


@dataclass(frozen=True)
class Task:
    """The input of a search.

    Args:
        tree: the target model's tree, holding the prompt.
        max_new_tokens: at least 1.
        eos_token_ids: tokens that end a sequence; may be empty.
        vocab_size: the number of tokens that can be generated; higher ids have log-probability -inf.
        ends: for each of some nodes of the tree and new tokens after it, as many after each, whether the output ends
            there without an end-of-sequence token: "stop" (it contains a stop string), "constraint" (no token is
            allowed after it) or None. The tree need not have nodes of the new tokens. None if no output of this
            request does.
        open_tree: (model name, prompt) -> a tree of another model, "draft" or "reward"; freed with the search.
        tokenizer: the target model's; None without one.
        seconds: number of target tokens -> this search's share of the time of a pass that evaluates them, by recent
            measurements; 0 before the first one. It may guide how much a search tries at once, but must not affect the
            output. None if unknown.
        model_key: names files that store data about the target model between runs; "" to store none.
        start_token: the first token of a text of the target model.
        judge: computes the rewards of responses; for searches whose `models` name "reward".
        spare: pool -> how many more of its pages this search could take if the driver ran no other search. A search
            that decides how much to try by this number rather than by the free pages gives the same answer alone and in
            a batch.
        normalised: whether the probabilities of a row sum to 1, except for ids from `vocab_size` on. A constraint masks
            tokens and may leave a sum near 0.
        rising: whether log-probabilities may be positive (because of a bias), so that a longer sequence may be more
            probable.
        rows: rows of log-probabilities for which a pass of the target model has room, `most_rows` at least; a search
            that could use any number requests no more. None: no limit.
    """

    tree: TokenTree
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    vocab_size: int
    ends: Callable[[Sequence[int], Sequence[Sequence[int]]], Sequence[str | None]] | None = None
    open_tree: Callable[[str, Sequence[int]], TokenTree] | None = None
    tokenizer: Tokenizer | None = None
    seconds: Callable[[int], float] | None = None
    model_key: str = ""
    start_token: int = 0
    judge: "Judge | None" = None
    spare: Callable[[PagePool], int] = attrgetter("free_pages")
    normalised: bool = True
    rising: bool = False
    rows: int | None = None

    def finish_reason(self, tokens: Sequence[int]) -> str | None:
        """Why a sequence, which begins with the tokens of the trunk, ends with its last token; None if it does not
        end."""
        node, rest = self.tree.root, tokens
        if self.ends is not None:
            node = self.tree.descend(tokens)
            rest = tokens[self.tree.position(node) + 1 - self.tree.prompt_length :]
        return self._reasons([node], [rest], tokens[-1:], [len(tokens)])[0]

    def finish_reasons(self, nodes: Sequence[int], tokens: Sequence[int]) -> list[str | None]:
        """For each of some nodes of the tree and a token after it, why the sequence ends with this token; None if it
        does not end."""
        before = self.tree.prompt_length - 2
        lengths = [position - before for position in map(self.tree.position, nodes)]
        return self._reasons(nodes, [[token] for token in tokens], tokens, lengths)

    def _reasons(
        self, nodes: Sequence[int], rests: Sequence[Sequence[int]], last: Sequence[int], lengths: Sequence[int]
    ) -> list[str | None]:
        """The finish reasons of sequences, given by a node and the tokens after it, the last token and the length."""
        ended = [None] * len(nodes) if self.ends is None else self.ends(nodes, rests)
        eos, most = self.eos_token_ids, self.max_new_tokens
        return [
            "eos" if token in eos else reason or ("length" if length >= most else None)
            for token, reason, length in zip(last, ended, lengths, strict=True)
        ]


class Judge(Protocol):
    """Computes rewards of responses, complete or not. Higher is better."""

    def rewards(self, responses: Sequence[Sequence[int]]) -> Generator[Evaluate, Any, list[float]]:
        """The rewards of responses, given as new tokens; call it with `yield from`."""
        ...

    def keep(self, responses: Sequence[Sequence[int]]) -> None:
        """Free the memory of all responses except these; later calls ask only for these and their extensions."""
        ...


SearchGenerator = Generator[Evaluate | Report, Any, SearchResult]


class Search(ABC):
    """Base class of every search: a frozen dataclass derives from it, whose fields are the search's parameters.

    Attributes:
        models: roles of the models that the search evaluates besides the target: "draft", "reward".
        drafts_itself: whether the search makes its own drafts, so that `--drafts` does not apply.
    """

    models: ClassVar[Sequence[str]] = ()
    drafts_itself: ClassVar[bool] = False

    @abstractmethod
    def run(self, task: Task) -> SearchGenerator:
        """Start the algorithm: a generator that yields `Evaluate` and `Report` and returns a `SearchResult`."""

    def slots(self, prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
        """KV slots that a run of `new_tokens` needs: (at least, at most).

        A request is refused before anything is evaluated if the first number does not fit the cache. By default the
        first number is for one sequence, and the second for as many as `most_rows`, which share only the prompt.
        """
        return prompt_tokens + new_tokens - 1, prompt_tokens + self.most_rows() * (new_tokens - 1)

    def most_rows(self) -> int:
        """The most rows of log-probabilities that a run requests at once; `--memory` leaves room for them.

        By default as many as the fields `beams` or `num_return_sequences` give.
        """
        widths = [getattr(self, name, 1) for name in ("beams", "num_return_sequences")]
        return max([1, *(n for n in widths if type(n) is int)])

    def with_all_outputs(self) -> "Search":
        """This search, returning all outputs that it finds anyway, from which outputs with distinct texts are
        chosen."""
        return self

    def work(self, new_tokens: int) -> tuple[int, int]:
        """Values that a run of `new_tokens` computes besides the model's rows: (most in a step, most that it keeps).

        A server refuses requests above its limits. The default is none.
        """
        return 0, 0

    def check(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:  # noqa: B027  (most need none)
        """Check that a model can serve this search. Raises UsageError; by default it never does."""

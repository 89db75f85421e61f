"""Reranking: the scores of documents for a query, by a model with a scalar head, which reads each pair as one text."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.contract import Evaluate, Output, Search, SearchGenerator, SearchResult, Task
from engine.errors import UsageError, shortened
from engine.load.loading import LoadedModel
from engine.load.pools import check_memory
from engine.request import Checked, Models, Request, check_ids
from engine.rewards import scored

PLACES = "{query}", "{document}"  # placeholders in a template of pairs
MOST_TEMPLATE = 1 << 14  # characters


class Ranked(NamedTuple):
    """A document's place in its list, and its score: higher is more relevant."""

    index: int
    score: float


@dataclass(frozen=True)
class HeadScore(Search):
    """The score of a text by a scalar head; it generates nothing.

    Args:
        ids: the text in the reward model's tokens; None: it is the prompt of a target with a scalar head.
    """

    ids: tuple[int, ...] | None = None

    def run(self, task: Task) -> SearchGenerator:
        """See `Search`."""
        tree = task.tree
        if self.ids is not None:
            assert task.open_tree is not None
            tree = task.open_tree("reward", self.ids)
        rows_N1, _ = yield Evaluate(tree, [tree.root])
        stats = {"prompt_tokens": tree.prompt_length, "reused_tokens": tree.reused}
        return SearchResult([Output([], None, float(rows_N1[0, 0]), "length")], stats)

    def slots(self, prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
        return prompt_tokens, prompt_tokens


def head_of(models: Models) -> LoadedModel:
    """The model with the scalar head: the target or its reward model. Raises UsageError without one."""
    if models.target.shape.scores:
        return models.target
    if "reward" in models.others:
        return models.others["reward"]
    raise UsageError(
        "reranking needs a model with a scalar head, and this one generates",
        where=models.target.name,
        remedy="give --reward DIR, a checkpoint whose architecture ends in ForSequenceClassification; "
        "docs/vectors.md shows what a model that generates can do",
    )


def check_text(
    models: Models,
    ids: Sequence[int],
    cache_salt: str | None = "",
    share: float = 1.0,
    name: str = "text",
    adapter: str | None = None,
) -> Checked:
    """The request for the score of a text, in tokens of the model with the scalar head.

    Args:
        share: the part of its KV cache that the request may have.
        name: the name of the text in errors.
        adapter: see `Request`; a reward model has none.

    Raises:
        UsageError, KVMemoryError: it is empty, or fits neither context nor cache; no model has a scalar head; an
            unknown adapter.
    """
    head = head_of(models)
    models.target.adapter(adapter)
    check_ids(head, ids, name, "what the model reads of it")
    ids = scored(ids, head.pad_token_id)
    search = HeadScore(None if head is models.target else tuple(ids))
    check_memory(head.runner.pool, search, len(ids), 1, share)
    prompt = [*ids] if head is models.target else [models.target.start_token]  # for a tree that is not evaluated
    return Checked(Request(prompt, search, 1, cache_salt=cache_salt, adapter=adapter), prompt, 1)


def check_texts(
    models: Models, texts: Iterable[Sequence[int]], cache_salt: str | None, name: str, adapter: str | None
) -> Iterator[Checked]:
    """The requests for the scores of texts, made one by one, see `check_text`; errors call their list `name`."""
    return (check_text(models, ids, cache_salt, name=f"{name}[{i}]", adapter=adapter) for i, ids in enumerate(texts))


def score_requests(models: Models, texts: Iterable[Sequence[int]], adapter: str | None = None) -> Iterator[Checked]:
    """The requests of `Engine.scores`, made one by one. Raises UsageError at once if the model has no scalar head."""
    if not models.target.shape.scores:
        raise UsageError("this checkpoint has no scalar head", where=models.target.name, remedy="it generates text")
    if not isinstance(texts, Iterable) or isinstance(texts, str):
        raise UsageError(f"texts: expected a list of lists of token ids, got {texts!r}")
    return check_texts(models, texts, None, "texts", adapter)


def scores_of(results: Iterable[SearchResult]) -> list[float]:
    """The scores that a scalar head gave to texts."""
    return [result.outputs[0].score or 0.0 for result in results]


def pairs(head: LoadedModel, query: str, documents: Sequence[str], template: str | None = None) -> Iterator[list[int]]:
    """The tokens of each document with the query.

    Args:
        template: a text with the placeholders {query} and {document}. Control tokens that it spells are parsed, those
            in the query and the documents are not. None: the model's chat template, with the query as the user's
            message and the document as the reply; without one, the query, a line break and the document.

    Raises:
        UsageError: the template lacks a placeholder.
        CheckpointError: the model has no tokenizer, or its chat template fails.
    """
    tokenizer = head.need_tokenizer()
    if template is not None:
        check_template(template)
        parts = re.split("({query}|{document})", template)
        for document in documents:
            texts: dict[str, str] = dict(zip(PLACES, (query, document), strict=True))
            yield tokenizer.encode_rendered([(texts.get(part, part), part not in texts) for part in parts])
    elif head.template is not None:
        before, _, after = head.template.around_reply([{"role": "user", "content": query}])
        for document in documents:
            yield tokenizer.encode_rendered([*before, (document, False), *after])
    else:
        for document in documents:
            yield tokenizer.encode(f"{query}\n{document}")


def check_template(template: object) -> None:
    """Check a template of pairs. Raises UsageError."""
    if not isinstance(template, str) or len(template) > MOST_TEMPLATE:
        raise UsageError(f"template: expected a text of at most {MOST_TEMPLATE} characters")
    if missing := next((place for place in PLACES if place not in template), None):
        raise UsageError(f"template: expected {' and '.join(PLACES)} in it, {missing} is missing")


def check_documents(query: object, documents: object) -> None:
    """Check that a query is a text, and documents are a list of texts. Raises UsageError."""
    if not isinstance(query, str):
        raise UsageError(f"query: expected a text, got {shortened(repr(query))}")
    if isinstance(documents, str) or not isinstance(documents, Sequence):
        raise UsageError(f"documents: expected a list of texts, got {shortened(repr(documents))}")
    for i, document in enumerate(documents):
        if not isinstance(document, str):
            raise UsageError(f"documents[{i}]: expected a text, got {shortened(repr(document))}")


def ranked(scores: Sequence[float]) -> list[Ranked]:
    """Scores with their places, best first; among equals the lower place first."""
    return sorted((Ranked(i, score) for i, score in enumerate(scores)), key=lambda one: -one.score)
